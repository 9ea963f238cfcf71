"""Models that are served from a folder: versions, readers in threads and processes, and what they share."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from torchsparse_rec import KeyedJaggedTensor, nn, optim, serving, variable

IDS = torch.tensor([[1, 2, 3], [3, 1, 0]])
KEYED = KeyedJaggedTensor(["f"], torch.tensor([1, 2, 3]), None, torch.tensor([2, 1]))
ROWS, DIM = 1000, 16


def collection() -> nn.EmbeddingBagCollection:
    config = nn.EmbeddingBagConfig(name="t", num_embeddings=10, embedding_dim=4, feature_names=["f"])
    return nn.EmbeddingBagCollection([config])


MODELS: dict[str, tuple[Callable[[], torch.nn.Module], object]] = {
    "bag": (lambda: nn.EmbeddingBag(10, 4), IDS),
    "embedding": (lambda: nn.Embedding(10, 4, padding_idx=3), IDS),
    "collection": (collection, KEYED),
    "growing": (lambda: nn.EmbeddingVariable(4), IDS),
    "layers": (lambda: torch.nn.Sequential(nn.EmbeddingBag(10, 4, mode="mean"), torch.nn.Linear(4, 2)), IDS),
}


def values(result: object) -> Tensor:
    return result if isinstance(result, Tensor) else result.values()


@pytest.mark.parametrize("name", MODELS)
def test_it_is_the_trained_model(name: str, tmp_path: Path) -> None:
    """Publish between steps that leave rows stale: what is served is what the model itself gives, and trains on."""
    make, ids = MODELS[name]
    model = make()
    optimizer = optim.Adam(model.parameters(), lr=0.1, in_backward=name != "layers")
    served = None
    for version in range(1, 4):
        for _ in range(2):
            optimizer.zero_grad()
            values(model.train()(ids)).square().sum().backward()
            optimizer.step()
        assert serving.save_for_serving(model, tmp_path) == version
        served = served or serving.load_for_serving(tmp_path)
        assert torch.equal(values(served(ids)), values(model.eval()(ids)))
        assert served.version == version
        assert repr(served) == f"ServedModel({str(tmp_path)!r}, version={version})"
    assert not served.model.training and not any(x.requires_grad for x in served.model.parameters())
    assert sorted(os.listdir(tmp_path)) == ["model.pt", "version"]


def test_a_write_stays_in_the_process(tmp_path: Path) -> None:
    serving.save_for_serving(nn.EmbeddingBag(10, 4), tmp_path)
    one, two = serving.load_for_serving(tmp_path), serving.load_for_serving(tmp_path)
    before = two(IDS).clone()
    with torch.no_grad():
        one.model.weight.zero_()
    assert one(IDS).abs().sum() == 0 and torch.equal(two(IDS), before)


# ---- What is refused ------------------------------------------------------------------------------------------------


def test_refused_models_leave_the_old_version(tmp_path: Path) -> None:
    served = None
    storage = variable.StorageOption("DRAM_SSD", storage_path=str(tmp_path / "cold"), storage_size=[1 << 10])
    cold = nn.EmbeddingVariable(4, ev_option=variable.EmbeddingVariableOption(storage_option=storage))
    unnamed = nn.EmbeddingBag(10, 4)
    unnamed.transform = lambda x: x
    for model, match in (
        (nn.EmbeddingBag, "must be a torch.nn.Module, got a type"),
        (cold, "disk"),
        (unnamed, "torch.save"),
    ):
        served = served or first(tmp_path / "folder")
        with pytest.raises(TypeError, match=f"save_for_serving: model .*{match}"):
            serving.save_for_serving(model, tmp_path / "folder")
        assert sorted(os.listdir(tmp_path / "folder")) == ["model.pt", "version"]
        served(IDS)
        assert served.version == 1


def first(folder: Path) -> serving.ServedModel:
    serving.save_for_serving(nn.EmbeddingBag(10, 4), folder)
    return serving.load_for_serving(folder)


def test_nothing_published(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="folder must be one in which save_for_serving has published, got '.*'"):
        serving.load_for_serving(tmp_path)


def test_an_unreadable_version_is_left_out(tmp_path: Path) -> None:
    """Warn once of a file that is no model, and of one that is gone, and serve on; then take the next version."""
    served, model = first(tmp_path), tmp_path / "model.pt"
    before = served(IDS).clone()
    (tmp_path / "broken").write_bytes(b"PK no archive")
    for spoil in (lambda: os.replace(tmp_path / "broken", model), model.unlink):
        spoil()
        with pytest.warns(UserWarning, match=r"model\.pt cannot be read, so version 1 is served on: ") as seen:
            assert torch.equal(served(IDS), before) and torch.equal(served(IDS), before)
        assert len(seen) == 1 and seen[0].filename == __file__
    assert serving.save_for_serving(nn.EmbeddingBag(10, 4), tmp_path) == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not torch.equal(served(IDS), before)
    assert served.version == 2


def test_what_a_killed_publisher_left_is_removed(tmp_path: Path) -> None:
    served = first(tmp_path)
    (tmp_path / ".unfinished.pt").write_bytes(b"half a model")
    served(IDS)
    assert served.version == 1 and serving.save_for_serving(nn.EmbeddingBag(10, 4), tmp_path) == 2
    assert sorted(os.listdir(tmp_path)) == ["model.pt", "version"]


# ---- Processes and threads ------------------------------------------------------------------------------------------

# Publish tables in which all elements are the version's number, until the parent closes standard input.
PUBLISHER = f"""
import sys, threading, torch
from torchsparse_rec import nn, serving
stop = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), stop.set()), daemon=True).start()
version = 1
while not stop.is_set():
    version += 1
    model = nn.Embedding({ROWS}, {DIM}, _weight=torch.full(({ROWS}, {DIM}), float(version)))
    assert serving.save_for_serving(model, sys.argv[1]) == version
    print(version, flush=True)
"""


@contextlib.contextmanager
def child(*arguments: object) -> Iterator[subprocess.Popen]:
    command = [sys.executable, "-c", *map(str, arguments)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def serve_while_published(folder: Path, seconds: float) -> None:
    """Look up in 16 threads while a process publishes: each lookup is one version's, never an older one's."""
    serving.save_for_serving(nn.Embedding(ROWS, DIM, _weight=torch.ones(ROWS, DIM)), folder)
    served = serving.load_for_serving(folder)
    faults, seen = [], set()

    def read(seed: int) -> None:
        generator, newest = torch.Generator().manual_seed(seed), 0.0
        while time.monotonic() < end or (len(seen) <= 3 and time.monotonic() < end + 60):
            rows = served(torch.randint(0, ROWS, (200,), generator=generator))
            low, high = rows.min().item(), rows.max().item()
            if low != high or low < newest:
                faults.append((low, high, newest))
            newest = high
            seen.add(newest)

    with child(PUBLISHER, folder) as publisher:
        assert publisher.stdout.readline() == "2\n"
        end = time.monotonic() + seconds
        threads = [threading.Thread(target=read, args=(seed,)) for seed in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        published = publisher.communicate("")[0].split()[-1]
        assert publisher.returncode == 0
    assert faults == [] and len(seen) > 3
    served(IDS)
    assert served.version == int(published)
    # One mapping: no old version is held for long.
    end = time.monotonic() + 60
    while Path("/proc/self/maps").read_text().count(str(folder)) > 1 and time.monotonic() < end:
        time.sleep(0.005)
    assert Path("/proc/self/maps").read_text().count(str(folder)) == 1


@pytest.mark.always("the only one that reads while another process writes")
def test_versions_published_during_lookups(tmp_path: Path) -> None:
    serve_while_published(tmp_path, seconds=4)


@pytest.mark.full
def test_versions_published_during_lookups_of_30_seconds(tmp_path: Path) -> None:
    serve_while_published(tmp_path, seconds=30)


def test_publishers_take_turns(tmp_path: Path) -> None:
    """Publish from two processes: no number is given twice, and none is lost."""
    program = (
        "import sys; from torchsparse_rec import nn, serving; "
        "print([serving.save_for_serving(nn.Embedding(9, 2), sys.argv[1]) for _ in range(20)])"
    )
    with child(program, tmp_path) as one, child(program, tmp_path) as two:
        numbers = [int(x) for each in (one, two) for x in re.findall(r"\d+", each.communicate()[0])]
    assert sorted(numbers) == list(range(1, 41))


READER = """
import sys, torch
from torchsparse_rec import serving
served = serving.load_for_serving(sys.argv[1])
print(served(torch.arange(100_000)[:, None]).sum().item(), flush=True)
sys.stdin.read()
"""


def test_processes_share_one_copy(tmp_path: Path) -> None:
    """Read all rows in three processes: of 25.6 MB each has a third, and none a page of its own."""
    serving.save_for_serving(nn.EmbeddingBag(100_000, 64), tmp_path)
    with child(READER, tmp_path) as one, child(READER, tmp_path) as two, child(READER, tmp_path) as three:
        readers = (one, two, three)
        assert len({reader.stdout.readline() for reader in readers}) == 1
        shares, own = 0, 0
        for reader in readers:
            text = Path(f"/proc/{reader.pid}/smaps").read_text()
            part = re.search(r"model\.pt\n(?:\w+:.*\n)+", text)[0]
            shares += int(re.search(r"^Pss: +(\d+) kB", part, re.MULTILINE)[1])
            own += int(re.search(r"^Private_Dirty: +(\d+) kB", part, re.MULTILINE)[1])
    assert 24_900 <= shares <= 25_200 and own == 0
