"""
Helpers of the tests of checkpoints: versions whose content follows from their number, and processes that write them.

Run as a program, this file has torch loaded and makes other processes on request, so that two hundred of them can be
killed within a minute: ``python checkpoint_cases.py`` reads lines ``command path argument`` and forks for each.
"""

import errno
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from torchsparse_rec.checkpoint import CheckpointStore, VersionInfo
from torchsparse_rec.checkpoint.manifest import _end, checksum

SHARDS = 4
#: One version of so many is full.
PERIOD = 4


def kind_of(number: int) -> str:
    """Return the kind of a version, ``"full"`` or ``"delta"``."""
    return "full" if number % PERIOD == 1 else "delta"


def shards_of(number: int) -> list[int]:
    """Return the shards that a version writes: all, or the two that change."""
    return list(range(SHARDS)) if kind_of(number) == "full" else [number % SHARDS, (number + 1) % SHARDS]


def content(number: int, shard: int, rows: int) -> torch.Tensor:
    """Return what a version writes to a shard: a number of both in every row, so that no mix goes unseen."""
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
    """Load the newest version, and check its content against its number; return the number, or 0 without a version."""
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


def rewrite(manifest: Path, change: Callable[[dict], object]) -> None:
    """Change what a manifest says, and correct its checksum."""
    fields = json.loads(manifest.read_bytes())
    del fields["crc32c"]
    change(fields)
    content = json.dumps(fields)[:-1].encode()
    manifest.write_bytes(content + _end(checksum(content)))


# ---- Calls of the system --------------------------------------------------------------------------------------------

CHANGING = ("mkdir", "rename", "replace", "unlink", "rmdir", "fsync")


@contextmanager
def watched(monkeypatch, before: Callable[[str, tuple], None]) -> Iterator[None]:
    """
    Call ``before`` ahead of each system call that changes the disk, except writes to files.

    The files that ``before`` writes are not synced to the disk, which would take time.
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
    """A process that forks processes which write checkpoints, one at a time."""

    def __init__(self) -> None:
        # torch's threads do not survive a fork.
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
        """Start a process, and return its id."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{command} {path} {argument}\n")
        return int(self.line().removeprefix("started "))

    def line(self) -> str:
        """Return the next line that the process prints, or ``ended <status>`` once it has ended."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the process that makes processes has ended"
        return line.rstrip("\n")

    def lines(self) -> list[str]:
        """Return all further lines until the process has ended."""
        lines = [self.line()]
        while not lines[-1].startswith("ended "):
            lines.append(self.line())
        return lines

    def close(self) -> None:
        """End the process that forks."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


def _say(text: str) -> None:
    os.write(1, f"{text}\n".encode())


def _save(path: str, rows: int) -> None:
    """Save versions until killed."""
    store = CheckpointStore(path, keep=3)
    while True:
        info = save(store, rows, _say)
        _say(f"saved {info.number}")


def _hold(path: str, rows: int) -> None:
    """Stay in the middle of a save until killed."""
    with CheckpointStore(path).writer() as writer:
        writer.write("0", {"rows": content(writer.number, 0, rows)})
        _say("holding")
        time.sleep(600)


def _limited(path: str, nbytes: int) -> None:
    """Save three times as many bytes as a file may hold, and print the error."""
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
