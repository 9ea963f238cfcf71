"""Publishers that are killed at random moments: numbers never go back, and nothing is torn."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

# Fork a publisher, and look up while it publishes until it is killed; so many times. A process of its own, with one
# thread: others could not be forked.
KILLS = """
import collections, os, random, signal, sys, time, torch
from torchsparse_rec import nn, serving
from torchsparse_rec.serving._folder import problems

torch.set_num_threads(1)
folder, times, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])

class Model(torch.nn.Module):
    # One in which all numbers are the same.
    def __init__(self, number):
        super().__init__()
        self.table = nn.Embedding(2000, 16, _weight=torch.full((2000, 16), float(number)))
        self.register_buffer("dense", torch.full((3,), float(number)))

    def forward(self, ids):
        return torch.cat([self.table(ids).flatten(), self.dense])

def publish(begin):
    for number in range(begin, begin + 1000):
        version = serving.save_for_serving(Model(number), folder)
        os.write(answers, f"{version} {number}\\n".encode())

draw, ids = random.Random(seed), torch.arange(2000)
serving.save_for_serving(Model(0), folder)
served = serving.load_for_serving(folder)
contents, seen, said, left = {1: 0.0}, 1, 1, collections.Counter()
for k in range(1, times + 1):
    asked, answers = os.pipe()
    child = os.fork()
    if child == 0:
        publish(1000 * k)
    os.close(answers)
    end = time.monotonic() + draw.uniform(0, 0.15)
    while time.monotonic() < end:
        rows = served(ids)
        assert rows.min() == rows.max(), "torn"
        assert contents.setdefault(served.version, rows[0].item()) == rows[0].item(), "a number of two versions"
        assert served.version >= seen, "it went back"
        seen = served.version
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    for line in os.fdopen(asked):
        version, number = map(int, line.split())
        assert version > said, "published under a number of before"
        assert contents.setdefault(version, number) == number
        said = version
    left[" ".join(sorted(os.listdir(folder)))] += 1
    assert problems(folder) == [], problems(folder)
    assert served(ids).min() == served(ids).max() and served.version >= max(said, seen)
    seen = said = served.version
    contents = {seen: contents.get(seen, served(ids)[0].item())}
print("versions", seen, "left", dict(left))
serving.save_for_serving(Model(1), folder)
assert sorted(os.listdir(folder)) == ["model.pt", "version"]
"""


def killed(folder: Path, times: int, seed: int) -> int:
    """Kill so many publishers; return the last version's number."""
    command = [sys.executable, "-c", KILLS, str(folder), str(times), str(seed)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return int(done.stdout.split()[1])


def test_killed_publishers(tmp_path: Path) -> None:
    assert killed(tmp_path, times=5, seed=1) > 1


@pytest.mark.full
def test_30_killed_publishers(tmp_path: Path) -> None:
    assert killed(tmp_path, times=30, seed=2) > 1
