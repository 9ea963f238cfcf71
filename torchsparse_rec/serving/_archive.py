"""
The file of a version: an archive of ``torch.save``, whose members have checksums that torch writes and never compares.

Its members are the pickle, a few words about the format, and the memory of each tensor. A load compares all checksums
but the tables', which may be larger than memory: theirs are compared on request.
"""

from __future__ import annotations

import mmap
import os
import pickletools
import struct
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch.nn import Module

from .. import nn
from ..variable.own_tensors import OwnTensors

__all__ = ["Archive", "content_of", "naming", "touch"]

_PICKLE, _FIRST = "data.pkl", "data/0"
# The modules whose parameters and buffers are tables.
_TABLES = (torch.nn.Embedding, torch.nn.EmbeddingBag, nn.EmbeddingVariable, nn.quantized.QuantizedTable)


def content_of(version: int, model: Module) -> dict[str, Any]:
    """Return what ``torch.save`` is to write."""
    # The first tensor of the archive: its address is where torch has mapped the file.
    return {"version": version, "first": torch.zeros(1, dtype=torch.uint8), "model": model}


@contextmanager
def naming(path: str) -> Iterator[None]:
    """Turn errors of reading a file into ``ValueError`` with its name, unless the file is missing or forbidden."""
    try:
        yield
    except (FileNotFoundError, PermissionError):
        raise
    except Exception as error:  # of zipfile, torch or a pickle that is damaged, or of code that is not here: any
        raise ValueError(f"{path} cannot be read: {_line(error)}") from error


def _line(error: Exception) -> str:
    """Return an error's first line, with its class where that is informative."""
    kind = "" if type(error) in (ValueError, zipfile.BadZipFile) else f"{type(error).__name__}: "
    return f"{kind}{(str(error).splitlines() or [''])[0]}"


class Archive(zipfile.ZipFile):
    """
    An archive, open for reading.

    Args:
        path: the name of the file.

    Raises:
        Exception: of many classes, here and in all methods, where it is damaged: see :func:`naming`.
    """

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._members = {member.filename.partition("/")[2]: member for member in self.infolist()}
        if len(self._members) != len(self.infolist()) or _PICKLE not in self._members:
            raise ValueError("it has no members of a model, or two of one name")

    @property
    def has_checksums(self) -> bool:
        """Whether it has checksums: after ``torch.serialization.set_crc32_options(False)`` torch writes none."""
        return self._members[_PICKLE].CRC != 0

    def damages(self, names: Iterable[str] | None = None) -> Iterator[str]:
        """Compare the checksums of the members of these names, by default all; yield the fault of each."""
        if not self.has_checksums:
            yield "it has no checksums to compare: publish it anew"
            return
        for name in self._members if names is None else names:
            try:
                with self.open(self._members[name]) as member:
                    while member.read(1 << 20):  # zipfile compares the checksum at the end
                        pass
            except Exception as error:  # a length, a method or a key that no member has: any
                yield f"{name} is damaged: {_line(error)}"

    def compare(self, names: Iterable[str] | None = None) -> None:
        """Raise ``ValueError`` for the first one of :meth:`damages`."""
        for problem in self.damages(names):
            raise ValueError(problem)

    def small(self) -> list[str]:
        """Return the names of all members but tensors."""
        return [name for name in self._members if not name.startswith("data/")]

    def dense(self, content: dict[str, Any]) -> list[str]:
        """Return the names of the members of tensors that are no tables, from the content that torch has loaded."""
        if "first" not in content:  # published by an older version
            return []
        modules = (module for module in content["model"].modules() if isinstance(module, _TABLES))
        tables = {storage.data_ptr() for module in modules for storage in _storages(module)}
        begin = content["first"].data_ptr() - self._place(_FIRST)
        names = (name for name in self._members if name.startswith("data/"))
        return [name for name in names if begin + self._place(name) not in tables]

    def _place(self, name: str) -> int:
        """Return where in the file a member's bytes begin."""
        begin = self._members[name].header_offset
        assert self.fp is not None
        sizes = struct.unpack("<HH", os.pread(self.fp.fileno(), 4, begin + 26))  # of its name and of what is added
        return begin + 30 + sum(sizes)

    def version(self) -> int:
        """Return the version's number, without unpickling what may need code that is not here."""
        member = self._members[_PICKLE]
        if not self.has_checksums:
            del member.CRC  # else zipfile compares it
        codes = pickletools.genops(self.read(member))
        for _, value, _ in codes:
            if value == "version":
                numbers = (number for code, number, _ in codes if code.name.startswith(("BININT", "LONG")))
                return next(number for number in numbers if number is not None)
        raise ValueError("it has no version")


def touch(model: Module) -> None:
    """Map the pages of all tensors into this process before lookups need them, unless memory has no room for them."""
    contents = [torch.empty(0, dtype=torch.uint8).set_(storage).numpy() for storage in _storages(model)]
    if sum(map(len, contents)) <= _available_memory():
        for content in filter(len, contents):
            # numpy's: without Python's lock, and in this thread alone.
            content[:: mmap.PAGESIZE].max(), content[-1]


def _storages(module: Module) -> Iterator[torch.UntypedStorage]:
    """Yield the memory of a module's parameters and buffers, and of the keys of its tables that grow."""
    for x in (*module.parameters(), *module.buffers()):
        yield x.untyped_storage()
    for owner in module.modules():
        if isinstance(owner, OwnTensors):
            for name in owner.tensors:
                yield getattr(owner, name).untyped_storage()


def _available_memory() -> int:
    """Return the bytes that can be used without swapping, as Linux estimates them; elsewhere 0."""
    with suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return 0
