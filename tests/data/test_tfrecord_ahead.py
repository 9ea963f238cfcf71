"""The thread that reads ahead: order, memory, errors in their turn, and its end when nobody wants more."""

from __future__ import annotations

import gc
import gzip
import os
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from data.tfrecord_cases import ids, table

from torchsparse_rec.compat._parity.reference.record import entry, example, framed, list_of
from torchsparse_rec.data import DataError, FixedLenFeature, TFRecordReader
from torchsparse_rec.data import _tfrecord_blocks as blocks_module
from torchsparse_rec.data._tfrecord_ahead import ahead, mapped

X = {"x": FixedLenFeature([], "int64")}


def threads() -> int:
    return sum(thread.name.startswith("torchsparse_rec.data.tfrecord") for thread in threading.enumerate())


class Items:
    """Numbers; counts how many have been taken, and notes whether it was closed."""

    def __init__(self, count: int, error: BaseException | None = None) -> None:
        self.count, self.error, self.taken, self.closed = count, error, 0, False

    def __iter__(self) -> Iterator[int]:
        try:
            for i in range(self.count):
                self.taken += 1
                yield i
            if self.error is not None:
                raise self.error
        finally:
            self.closed = True


def test_items_come_in_order_and_few_are_ahead() -> None:
    items = Items(50)
    for i, item in enumerate(ahead(iter(items))):
        time.sleep(0.001)
        assert item == i and items.taken <= i + 3
    assert items.closed and items.taken == 50 and threads() == 0


@pytest.mark.parametrize("error", [ValueError("no more"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_an_error_is_raised_in_its_turn(error: BaseException) -> None:
    found = []
    with pytest.raises(type(error)) as raised:
        for item in ahead(iter(Items(3, error))):
            found.append(item)  # noqa: PERF402
    assert raised.value is error and found == [0, 1, 2] and threads() == 0


@pytest.mark.parametrize(("many", "close"), [(False, True), (False, False), (True, False)])
def test_threads_end_when_nobody_wants_more(many: bool, close: bool) -> None:
    items = Items(10**9)
    stream: Any = mapped(abs, ahead(iter(items)), 2) if many else ahead(iter(items))
    assert next(stream) == 0 and (many or threads() == 1)
    if close:
        stream.close()
    del stream
    gc.collect()
    assert items.closed and threads() == 0


def test_the_threads_of_others_stay_as_they_are(restore_threads: None) -> None:
    """Keep the number of torch threads of the consumer, and of threads that start later."""
    torch.set_num_threads(3)
    found: list[int] = []
    for stream in (ahead(iter([1])), mapped(abs, iter([1]), 2)):
        assert list(stream) == [1]
        other = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
        other.start()
        other.join()
        found.append(torch.get_num_threads())
    assert found == [3] * 4


@pytest.mark.parametrize("count", [1, 2, 3])
def test_what_threads_make_comes_in_order(count: int) -> None:
    items, inside = Items(40), set()

    def slow(i: int) -> tuple[int, int]:
        inside.add(threading.get_ident())
        time.sleep(0.003 if i % 3 == 0 else 0)
        return i, torch.get_num_threads() if count > 1 else 1

    for i, made in enumerate(mapped(slow, iter(items), count)):
        assert made == (i, 1) and items.taken <= i + count
    assert items.closed and items.taken == 40 and threads() == 0
    assert (threading.get_ident() in inside) == (count == 1)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_errors_of_items_and_of_what_is_made_come_in_their_turn(count: int) -> None:
    def bad(i: int) -> int:
        if i == 5:
            raise KeyError(i)
        return i

    for stream, error, many in (
        (mapped(bad, iter(Items(9)), count), KeyError, 5),
        (mapped(bad, iter(Items(3, ValueError("no more"))), count), ValueError, 3),
    ):
        found = []
        with pytest.raises(error):
            for made in stream:
                found.append(made)  # noqa: PERF402
        assert found == list(range(many)) and threads() == 0


def test_a_reader_that_is_left_closes_its_file(tmp_path: Path, small_chunks: None) -> None:
    (tmp_path / "x").write_bytes(framed(ids(1000)))
    before = len(os.listdir("/proc/self/fd"))
    stream = iter(TFRecordReader(tmp_path / "x", X, 1))
    next(stream)
    assert len(os.listdir("/proc/self/fd")) == before + 1
    del stream
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before and threads() == 0


@pytest.mark.parametrize("compression", ["auto", None, "gzip"])
def test_a_pipe_is_read(tmp_path: Path, compression: str | None) -> None:
    """Read a pipe, which gives a few bytes at a time and cannot go back."""
    content = framed(ids(40))
    content = gzip.compress(content) if compression == "gzip" else content
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)

    def write() -> None:
        with pipe.open("wb", buffering=0) as file:
            for at in range(0, len(content), 5):
                file.write(content[at : at + 5])

    writer = threading.Thread(target=write)
    writer.start()
    assert [row["x"] for row in table(TFRecordReader(pipe, X, 7, compression=compression))] == list(range(40))
    writer.join()


def test_shards_keep_only_their_own_records(tmp_path: Path) -> None:
    """Keep few records, however many blocks a batch takes; errors name places in the whole file."""
    messages = [*ids(30), b"", b"", example([entry(b"x", list_of("float32", [1.0]))])]
    (tmp_path / "x").write_bytes(framed(messages))
    reader = TFRecordReader(tmp_path / "x", X, num_shards=16, index=0)
    (records,) = list(reader._records())
    assert records.data.numpy().tobytes() == messages[0] + messages[16] + messages[32]
    for index, row, inside in ((0, 32, 9), (14, 30, 0), (15, 31, 0)):
        place = sum(16 + len(message) for message in messages[:row]) + 12 + inside
        with pytest.raises(DataError, match=rf"byte {place}: feature 'x'"):
            list(TFRecordReader(tmp_path / "x", X, num_shards=16, index=index))


def test_many_compressed_files_in_one_are_not_copied_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copy less than a block at the end of each file: zlib copies the bytes after the end, of all that it was given."""
    copied: list[int] = []

    class Inflate:
        def __init__(self, bits: int) -> None:
            self.inner = decompressobj(bits)

        def __getattr__(self, name: str) -> Any:
            if name == "unused_data":
                copied.append(len(self.inner.unused_data))
            return getattr(self.inner, name)

    decompressobj = zlib.decompressobj
    monkeypatch.setattr(blocks_module.zlib, "decompressobj", Inflate)
    (tmp_path / "x").write_bytes(gzip.compress(b"") * 5000 + gzip.compress(framed(ids(3))))
    assert len(table(TFRecordReader(tmp_path / "x", X))) == 3
    assert len(copied) == 5001 and max(copied) <= 1 << 16


EXIT = """
import atexit, threading, time
# What is registered first is called last.
atexit.register(lambda: print([thread.name for thread in threading.enumerate()], flush=True))
from torchsparse_rec.data._tfrecord_ahead import ahead

def items():
    while True:
        time.sleep(0.05)
        yield 1

numbers = ahead(items())
next(numbers)
"""


def test_the_interpreter_waits_for_the_thread() -> None:
    """Wait for the thread at exit: ending it within torch would abort the process."""
    done = subprocess.run([sys.executable, "-c", EXIT], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "['MainThread']\n", "")
