"""
What the tests of checkpoints share: versions whose content follows from their number, and processes that write them.

Run as a program, it is a process that has torch loaded and makes others on request, so that two hundred of them can be
killed within a minute: ``python checkpoint_cases.py`` reads lines ``command path argument`` and forks for each.
"""

import errno
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from torchsparse_rec.nn.variable.checkpoint import CheckpointStore, VersionInfo

SHARDS = 4
#: Every so many versions one is full.
PERIOD = 4


def kind_of(number: int) -> str:
    """Whether a version is full."""
    return "full" if number % PERIOD == 1 else "delta"


def shards_of(number: int) -> list[int]:
    """Which shards a version writes: all, or two that change."""
    return list(range(SHARDS)) if kind_of(number) == "full" else [number % SHARDS, (number + 1) % SHARDS]


def content(number: int, shard: int, rows: int) -> torch.Tensor:
    """What a version writes to a shard: the number in every row, so that no mix goes unseen."""
    return torch.full((rows,), number * SHARDS + shard)


def save(store: CheckpointStore, rows: int, on_phase: Callable[[str], None] | None = None) -> VersionInfo:
    """Write the next version."""
    latest = store.latest()
    number = 1 if latest is None else latest.number + 1
    with store.writer(kind_of(number), {"number": number}, on_phase=on_phase) as writer:
        assert writer.number == number
        for shard in shards_of(number):
            writer.write(str(shard), {"rows": content(number, shard, rows)})
        return writer.commit()


def check_whole(store: CheckpointStore, rows: int) -> int:
    """Load the newest version, which must be what its number says; 0 if there is none."""
    assert [info.problem for info in store.versions() if info.problem is not None] == []
    latest = store.latest()
    if latest is None:
        return 0
    chain = store.open()
    assert chain.version == latest
    loaded = {}
    for info, name, tensors in chain:
        assert info.metadata == {"number": info.number}
        loaded[int(name)] = tensors["rows"]
    first = latest.number - (latest.number - 1) % PERIOD
    assert [info.number for info in chain.versions] == list(range(first, latest.number + 1))
    for shard in range(SHARDS):
        writer = max(n for n in range(first, latest.number + 1) if shard in shards_of(n))
        assert torch.equal(loaded[shard], content(writer, shard, rows)), (latest.number, shard)
    return latest.number


# ---- Calls of the system --------------------------------------------------------------------------------------------

CHANGING = ("mkdir", "rename", "replace", "unlink", "rmdir", "fsync")


@contextmanager
def watched(monkeypatch, before: Callable[[str, tuple], None]) -> Iterator[None]:
    """
    Have a function called before each call of the system that changes the disk but for writing to files.

    What it writes itself is not brought to the disk, which costs time.
    """
    inside = []

    def wrapped(name, original):
        def call(*arguments, **options):
            if not inside:
                inside.append(name)
                try:
                    before(name, arguments)
                finally:
                    inside.pop()
            elif name == "fsync":
                return None
            return original(*arguments, **options)

        return call

    with monkeypatch.context() as patch:
        for name in CHANGING:
            patch.setattr(os, name, wrapped(name, getattr(os, name)))
        yield


# ---- Processes ------------------------------------------------------------------------------------------------------


class Savers:
    """A process that makes processes which write checkpoints, one at a time."""

    def __init__(self) -> None:
        # A process that is forked has none of torch's threads.
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
        self.process = subprocess.Popen(
            [sys.executable, __file__],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )

    def start(self, command: str, path: Path, argument: int) -> int:
        """Start a process; its id."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{command} {path} {argument}\n")
        return int(self.line().removeprefix("started "))

    def line(self) -> str:
        """The next line that the process says; ``ended <status>`` once it has ended."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the process that makes processes has ended"
        return line.rstrip("\n")

    def lines(self) -> list[str]:
        """All further lines, until it has ended."""
        lines = [self.line()]
        while not lines[-1].startswith("ended "):
            lines.append(self.line())
        return lines

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


def _say(text: str) -> None:
    os.write(1, f"{text}\n".encode())


def _save(path: str, rows: int) -> None:
    """Save until killed."""
    store = CheckpointStore(path, keep=3)
    while True:
        info = save(store, rows, _say)
        _say(f"saved {info.number}")


def _hold(path: str, rows: int) -> None:
    """Stay in the midst of a save until killed."""
    with CheckpointStore(path).writer() as writer:
        writer.write("0", {"rows": content(writer.number, 0, rows)})
        _say("holding")
        time.sleep(600)


def _limited(path: str, nbytes: int) -> None:
    """Save three times as much as files may hold."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, nbytes))
    try:
        with CheckpointStore(path).writer() as writer:
            writer.write("small", {"rows": torch.zeros(1)})
            writer.write("large", {"rows": torch.zeros(3 * nbytes, dtype=torch.uint8)})
    except OSError as error:
        _say(f"{errno.errorcode[error.errno or 0]} {error.filename} {error.strerror}")


def _main() -> None:
    for line in sys.stdin:
        command, path, argument = line.split()
        child = os.fork()
        if child == 0:
            try:
                _say(f"started {os.getpid()}")
                {"save": _save, "hold": _hold, "limited": _limited}[command](path, int(argument))
            except BaseException as error:
                _say(f"raised {error!r}")
            os._exit(0)
        _say(f"ended {os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}")


if __name__ == "__main__":
    _main()
