"""TensorFlow's V2 checkpoints, written without TensorFlow: see :mod:`.format`."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from ... import ops
from ...files import whole_file
from .format import CHUNK, DTYPES, FOOTER, MAGIC, Entry, mapped_file
from .wire import field, masked, slice_key, written_block, written_shape, written_slices

__all__ = ["CheckpointWriter", "host_chunks"]

_NUMBERS = {dtype: number for number, dtype in DTYPES.items()}
#: The size beyond which a block of the index ends.
_BLOCK = 16 * 2**10


def host_chunks(tensor: Tensor, factor: float) -> Iterator[Tensor]:
    """Yield the rows of a tensor, multiplied, contiguous and on the CPU: some at a time, where that takes a copy."""
    tensor = tensor.detach()
    step = len(tensor) if tensor.dim() else 1
    if not (tensor.device.type == "cpu" and tensor.is_contiguous() and factor == 1):
        step = CHUNK // max(tensor[:1].numel() * tensor.element_size(), 1) if tensor.dim() else 1
    for some in tensor.split(max(step, 1)) if tensor.dim() else [tensor]:
        yield (some if factor == 1 else some * factor).cpu().contiguous()


class CheckpointWriter:
    """
    Writes a V2 checkpoint of one shard, in a ``with`` statement: it appears under its name where that ends.

    Args:
        prefix: the path without ``.index``. Files there are replaced; if the statement raises, they are not.

    Example:
        See :class:`.format.CheckpointReader`.
    """

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.data = f"{prefix}.data-00000-of-00001"
        self._entries: dict[bytes, Entry] = {}

    def __enter__(self) -> CheckpointWriter:
        with ExitStack() as files:
            # The file opened last is the first to get its name: no index is there without its data.
            self._index_file = files.enter_context(whole_file(f"{self.prefix}.index"))
            self._file = files.enter_context(whole_file(self.data))
            self._files = files.pop_all()
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        if kind is not None:
            self._files.__exit__(kind, error, traceback)
            return
        with self._files:
            self._finish()

    def add(self, name: str, tensor: Tensor, parts: int = 1, factor: float = 1.0) -> None:
        """
        Write a tensor.

        Args:
            name: the tensor's name, which the checkpoint does not have yet.
            tensor: a tensor on any device and of any dtype that TensorFlow has.
            parts: the number of slices of its first dimension into which it is cut, as a partitioned variable is.
            factor: the number by which it is multiplied.

        Raises:
            ValueError: the name is taken, there are fewer rows than parts, or TensorFlow has no such dtype.
        """
        if name.encode() in self._entries or not name:
            raise ValueError(f"{self.prefix}: names must differ and not be empty, got {name!r} again")
        if tensor.dtype not in _NUMBERS:
            raise ValueError(f"{self.prefix}: {name!r} must have a dtype that TensorFlow has, got {tensor.dtype}")
        number, shape = _NUMBERS[tensor.dtype], tuple(tensor.shape)
        if parts == 1:
            self._entries[name.encode()] = self._written(tensor, number, factor)
            return
        if not shape or parts > shape[0]:
            raise ValueError(f"{self.prefix}: {name!r} of shape {list(shape)} must have rows for {parts} parts")
        slices, begin = [], 0
        for k in range(parts):  # the first ones are longer, as fixed_size_partitioner has it
            length = shape[0] // parts + (k < shape[0] % parts)
            slices.append(((begin, length), *((0, -1) for _ in shape[1:])))
            key = slice_key(name, slices[-1])
            self._entries[key] = self._written(tensor[begin : begin + length], number, factor)
            begin += length
        self._entries[name.encode()] = Entry(number, shape, 0, 0, 0, 0, tuple(slices))

    def _written(self, tensor: Tensor, number: int, factor: float) -> Entry:
        offset = self._file.tell()
        for some in host_chunks(tensor, factor):
            self._file.write(some.reshape(-1).view(torch.uint8).numpy().data)
        return Entry(number, tuple(tensor.shape), 0, offset, self._file.tell() - offset, 0, ())

    def _finish(self) -> None:
        """Write the index of the data."""
        self._file.flush()
        content = mapped_file(self._file.name)
        keys = [key for key, entry in self._entries.items() if not entry.slices]
        places = [self._entries[key] for key in keys]
        crcs = ops.crc32c([content[x.offset : x.offset + x.size] for x in places]).tolist()
        for key, crc in zip(keys, crcs, strict=True):
            self._entries[key] = self._entries[key]._replace(crc=masked(crc))
        self._index_file.write(self._index())
        self._index_file.flush()  # now: on a full disk neither file is replaced

    def _index(self) -> bytes:
        records = [(b"", field(1, 1) + field(3, field(1, 1)))]
        for key in sorted(self._entries):
            entry = self._entries[key]
            value = field(1, entry.dtype) + field(2, written_shape(entry.shape))
            value += b"".join(field(k, x) for k, x in ((3, entry.shard), (4, entry.offset), (5, entry.size)) if x)
            if not entry.slices:
                value += b"\x35" + struct.pack("<I", entry.crc)
            records.append((key, value + b"".join(field(7, written_slices(slices)) for slices in entry.slices)))
        blocks, handles = b"", []
        for group in _groups(records):
            handle, block = written_block(len(blocks), group)
            blocks += block
            handles.append((group[-1][0], handle))
        meta, block = written_block(len(blocks), [])
        blocks += block
        index, block = written_block(len(blocks), handles)
        return blocks + block + (meta + index).ljust(FOOTER - 8, b"\0") + struct.pack("<Q", MAGIC)


def _groups(records: list[tuple[bytes, bytes]]) -> Iterator[list[tuple[bytes, bytes]]]:
    """Yield the records in runs that make a block each."""
    group: list[tuple[bytes, bytes]] = []
    size = 0
    for record in records:
        group.append(record)
        size += len(record[0]) + len(record[1])
        if size > _BLOCK:
            yield group
            group, size = [], 0
    if group:
        yield group
