"""Ctrl-C ends a command of ours: its worker processes end, its files are whole, and one line says how to go on."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Starts a program with the SIGINT of a terminal: a shell starts background jobs with it ignored.
FOREGROUND = (
    "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); "
    "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
)
LOOP = """
import os, time
import torch
from torch.utils.data import DataLoader, Dataset

class Slow(Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, number):
        print(os.getpid(), flush=True)
        time.sleep(3600)

def workers():
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return lambda *given: None, DataLoader(Slow(), num_workers=2), model, optimizer

class Collected:
    def __del__(self):
        print("begun", flush=True)
        time.sleep(3600)

def collected():
    try:
        Collected()
        time.sleep(3600)
    finally:
        print("ended", flush=True)
"""


def interrupted(command: str, begun: Callable[[str], bool], output: Path, more: str = "") -> str:
    """
    Send SIGINT twice to a command once it has begun; return what it has printed on stdout.

    Args:
        command: a module and its arguments, which have no spaces.
        begun: whether the command has begun, by what it has printed so far.
        output: a file that does not exist, for stdout.
        more: a pattern of how the line goes on.
    """
    with open(output, "wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-c", FOREGROUND, "-m", *command.split()],
            cwd=ROOT,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            stdout=file,
            stderr=subprocess.PIPE,
            text=True,
        )
    try:
        while not begun(output.read_text()) and process.poll() is None:
            time.sleep(0.01)
        for _ in range(2):
            process.send_signal(signal.SIGINT)
            time.sleep(0.1)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert re.fullmatch(f"python -m {re.escape(command.split()[0])}: interrupted{more}\n", err), err
    return output.read_text()


def is_running(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"  # who inherits it may be slow to ask for it


def test_no_worker_process_is_left(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(LOOP)
    command = f"torchsparse_rec.profiling {tmp_path}/loop.py:workers"
    workers = interrupted(command, lambda out: out.count("\n") == 2, tmp_path / "output").split()
    until = time.monotonic() + 60
    while (left := [worker for worker in workers if is_running(int(worker))]) and time.monotonic() < until:
        time.sleep(0.02)
    assert not left


def test_it_is_not_lost_in_what_cannot_raise(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(LOOP)
    command = f"torchsparse_rec.profiling {tmp_path}/loop.py:collected"
    assert interrupted(command, lambda out: "begun" in out, tmp_path / "output") == "begun\nended\n"


def test_files_are_whole(tmp_path: Path) -> None:
    path, target = tmp_path / "ratings.csv", tmp_path / "target"
    path.write_bytes(b"user,item,rating\n" + b"123456,7890,0.5\n" * 10_000_000)
    target.mkdir()
    (target / "ratings.parquet").write_bytes(b"before")
    command = f"torchsparse_rec.data convert {path} {target}/ratings.parquet --columns user:int64,item"
    interrupted(command, lambda _: len(list(target.iterdir())) == 2, tmp_path / "output")
    assert [(file.name, file.read_bytes()) for file in target.iterdir()] == [("ratings.parquet", b"before")]


def test_a_line_says_how_to_go_on(tmp_path: Path) -> None:
    flags = f"--max-cardinality 1000 --held-out 4096 --threads 2 --save-every 1 --checkpoint {tmp_path}"
    command = f"torchsparse_rec.examples.dlrm {flags}"
    more = rf"; to go on from step [\d,]+: \S+ -m {re.escape(command)}"
    # The second version is begun when the first has been counted.
    interrupted(command, lambda _: (tmp_path / "checkpoint/000002").exists(), tmp_path / "output", more)
