"""The variables in TensorFlow's and Keras's files by name, wherever their bytes lie."""

from __future__ import annotations

import functools
import itertools
import math
import os
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from io import RawIOBase
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .format import (
    CHUNK,
    CheckpointReader,
    Piece,
    check_crcs,
    check_member,
    copy_bytes,
    mapped_file,
    reading,
    stored_begin,
)
from .wire import fields

__all__ = ["MOST_STEPS", "Found", "Source", "Window", "h5py_module", "listed", "named_after", "open_source"]

_VALUE = "/.ATTRIBUTES/VARIABLE_VALUE"
_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"
_H5_DTYPES = {
    "<f2": torch.float16,
    "<f4": torch.float32,
    "<f8": torch.float64,
    "<i4": torch.int32,
    "<i8": torch.int64,
}


#: Above it a float64 does not hold all integers.
MOST_STEPS = 2**53


class Found(NamedTuple):
    """A tensor in a file, not yet read."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype | None
    """None: one that torch does not have."""
    parts: int
    """In how many parts it is stored."""
    pieces: Callable[[], list[Piece]]

    def read(self) -> Tensor:
        """Return a copy, its checksums compared."""
        pieces = self.pieces()
        check_crcs(self.name, pieces)
        result = torch.empty(self.shape, dtype=pieces[0].dtype)
        for piece in pieces:
            copy_bytes(piece, result)
        return result

    def number(self) -> float:
        """Return the value of a tensor of one element."""
        if math.prod(self.shape) != 1:
            file = self.pieces()[0].file
            raise ValueError(f"{file}: {self.name!r} must be one number, got the shape {list(self.shape)}")
        return float(self.read())

    def step_count(self) -> int:
        """Return the value of a tensor of one element that counts steps."""
        number = self.number()
        if not 0 <= number <= MOST_STEPS or number != int(number):
            file = self.pieces()[0].file
            raise ValueError(f"{file}: {self.name!r} must be a number of steps, an integer of at least 0, got {number}")
        return int(number)


class Source(NamedTuple):
    """The content of a checkpoint or a file of weights."""

    path: str
    tensors: dict[str, Found]
    """By name, without the suffix of object-based checkpoints, and with partitions joined."""
    full_names: dict[str, str]
    """What Keras or TensorFlow calls the variables, where the file says it beside its own names."""
    is_h5: bool
    has_objects: bool
    """Whether it is an object-based checkpoint."""

    def names(self, name: str) -> list[str]:
        """Return all names of a tensor: the file's, and the variable's."""
        return list(dict.fromkeys([name, self.full_names.get(name, name)]))

    def named(self, name: str) -> list[Found]:
        """Return the tensor of a name in the file, or else the tensors of variables of that name."""
        if name in self.tensors:
            return [self.tensors[name]]
        return [self.tensors[key] for key, full in self.full_names.items() if full == name]


def open_source(path: str | os.PathLike[str], strategy: str) -> Source:
    """
    Return the variables of a checkpoint, a SavedModel, a ``.weights.h5`` or ``.keras``.

    Args:
        path: the path of the file; a checkpoint's without ``.index``, or its folder, where the file ``checkpoint``
            names the last one; a SavedModel's folder.
        strategy: the rule by which rows lie in partitions that are stored under separate names: "div" or "mod".
    """
    path = os.fspath(path)
    with reading(path):
        is_h5 = path.endswith((".h5", ".hdf5", ".keras"))
        source = _h5_source(path) if is_h5 else _checkpoint_source(path, strategy)
    tensors = {name: named_after(path, found) for name, found in source.tensors.items()}
    named = source.path if path in source.path else f"{path}: {source.path}"
    return source._replace(path=named, tensors=tensors)


def named_after(path: str, found: Found) -> Found:
    """Return a tensor whose errors name the path that the caller gave, wherever its file is."""

    def pieces() -> list[Piece]:
        with reading(path):
            its = found.pieces()
        return [x if path in x.file else x._replace(file=f"{path}: {x.file}") for x in its]

    return found._replace(pieces=pieces)


def _checkpoint_source(path: str, strategy: str) -> Source:
    prefix = _prefix_of(path)
    reader = CheckpointReader(prefix)
    keys = {name: name.removesuffix(_VALUE) for name in reader.entries if name != _GRAPH}
    tensors = {
        base: Found(base, reader.shape(name), reader.dtype(name), _parts(reader, name), _pieces_of(reader, name))
        for name, base in keys.items()
    }
    full_names = _full_names(reader, keys) if _GRAPH in reader.entries else {}
    return Source(
        reader.path, {**tensors, **_joined(reader.path, tensors, strategy)}, full_names, False, _GRAPH in reader.entries
    )


def _prefix_of(path: str) -> str:
    """Return the prefix of the V2 checkpoint at a path."""
    if os.path.isdir(path):
        if os.path.exists(os.path.join(path, "variables", "variables.index")):
            return os.path.join(path, "variables", "variables")
        state = os.path.join(path, "checkpoint")
        if os.path.exists(state):
            with open(state, encoding="utf-8") as file:
                match = re.search(r'^model_checkpoint_path: "(.*)"', file.read(), re.MULTILINE)
            if match:
                prefix = os.path.join(path, match[1])
                if not os.path.exists(f"{prefix}.index"):
                    here = [x.removesuffix(".index") for x in os.listdir(path) if x.endswith(".index")]
                    raise FileNotFoundError(
                        f"{state} says that the last checkpoint is {prefix}, which is missing: if the folder was "
                        f"moved, give the path of a checkpoint in it, of which it has {listed(here) or 'none'}"
                    )
                return prefix
        raise FileNotFoundError(
            f"{path} must be a SavedModel or have a file 'checkpoint'; it has {listed(os.listdir(path)) or 'nothing'}"
        )
    prefix = path.removesuffix(".index")
    if not os.path.exists(f"{prefix}.index"):
        if os.path.exists(path):
            raise ValueError(
                f"{path} must be the prefix of a V2 checkpoint, beside which there is {prefix}.index; or a folder, .h5 "
                "or .keras file. Checkpoints of TensorFlow's first format are not read"
            )
        raise FileNotFoundError(f"{prefix}.index is missing: path must be a checkpoint's, without '.index'")
    return prefix


def _pieces_of(reader: CheckpointReader, name: str) -> Callable[[], list[Piece]]:
    return lambda: reader.pieces(name)


def _parts(reader: CheckpointReader, name: str) -> int:
    return max(1, len(reader.entries[name].slices))


# ---- Partitions under names of their own ----------------------------------------------------------------------------


def _joined(path: str, tensors: dict[str, Found], strategy: str) -> dict[str, Found]:
    """Return whole variables for tensors whose names have a component ``part_0`` and so on."""
    groups: dict[str, dict[int, Found]] = {}
    for name, found in tensors.items():
        match = re.fullmatch(r"(.+)/part_(\d+)((?:/.*)?)", name)
        if match:
            groups.setdefault(match[1] + match[3], {})[int(match[2])] = found
    result = {}
    for name, parts in groups.items():
        first = next(iter(parts.values()))
        if name not in tensors and first.shape:
            rows = sum(part.shape[0] if part.shape else 0 for part in parts.values())
            shape = (rows, *first.shape[1:])
            result[name] = Found(name, shape, first.dtype, len(parts), _join(path, name, parts, strategy))
    return result


def _join(path: str, name: str, parts: dict[int, Found], strategy: str) -> Callable[[], list[Piece]]:
    def pieces() -> list[Piece]:
        begin, result = 0, []
        rows = sum(part.shape[0] if part.shape else 0 for part in parts.values())
        for k in range(len(parts)):
            if k not in parts:
                raise ValueError(f"{path}: {name!r} must have parts 0 to {len(parts) - 1}, got {sorted(parts)}")
            part, whole = parts[k], parts[0]
            if part.shape[1:] != whole.shape[1:] or part.dtype != whole.dtype or not part.shape:
                raise ValueError(
                    f"{path}: parts of {name!r} must agree, got {part.shape} {part.dtype} after {whole.shape} "
                    f"{whole.dtype}"
                )
            if strategy == "mod":
                where = slice(k, rows, len(parts))
                count = len(range(*where.indices(rows)))
                if count != part.shape[0]:
                    raise ValueError(
                        f"{path}: part {k} of {name!r} must have {count} of {rows} rows where partition_strategy is "
                        f"'mod', got {part.shape[0]}"
                    )
            else:
                where = slice(begin, begin + part.shape[0])
            begin += part.shape[0]
            for piece in part.pieces():
                if len(part.pieces()) > 1 and strategy == "mod":
                    raise ValueError(f"{path}: part {k} of {name!r} is itself in slices, which 'mod' does not join")
                its = piece.place[0]
                place = where if strategy == "mod" else slice(where.start + its.start, where.start + its.stop)
                result.append(piece._replace(place=(place, *piece.place[1:])))
        return result

    return pieces


# ---- The object graph -----------------------------------------------------------------------------------------------


def _full_names(reader: CheckpointReader, keys: dict[str, str]) -> dict[str, str]:
    """Return the variables' own names, which an object-based checkpoint has beside the paths of its objects."""
    result = {}
    for node in _all(reader.path, reader.text(_GRAPH), 1):
        for attribute in _all(reader.path, node, 2):
            texts = dict(fields(reader.path, attribute))
            full, key = texts.get(2, b""), texts.get(3, b"")
            if not isinstance(full, bytes) or not isinstance(key, bytes):
                continue
            name = key.decode(errors="backslashreplace")
            if full and name in keys:
                result[keys[name]] = full.decode(errors="backslashreplace")
    return result


def _all(path: str, data: Any, number: int) -> Iterator[Any]:
    return (content for k, content in fields(path, data) if k == number)


# ---- HDF5 -----------------------------------------------------------------------------------------------------------


def h5py_module() -> Any:
    """Return the ``h5py`` module, imported when a file first needs it."""
    try:
        import h5py
    except ImportError as error:
        raise ImportError(f"files of Keras need h5py: pip install h5py ({error})") from error
    return h5py


class Window(RawIOBase):
    """A part of a file as a file of its own."""

    def __init__(self, path: str, begin: int, size: int) -> None:
        self._file, self._begin, self._size, self._at = open(path, "rb"), begin, size, 0

    def close(self) -> None:
        self._file.close()
        super().close()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)[: max(0, self._size - self._at)]
        self._file.seek(self._begin + self._at)
        count = self._file.readinto(view)
        self._at += count
        return count


_IN_KERAS = "model.weights.h5"


@contextmanager
def _opened(path: str, content: Tensor) -> Iterator[tuple[Any, int, Callable[[], None]]]:
    """Yield the HDF5 file at a path, or in the ``.keras`` file there, where it begins, and what compares its CRC."""
    h5py = h5py_module()
    if not path.endswith(".keras"):
        with h5py.File(path, "r") as file:
            yield file, 0, lambda: None
        return
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        if _IN_KERAS not in names:
            raise ValueError(f"{path} must have {_IN_KERAS}, as Keras writes it; it has {listed(names) or 'nothing'}")
        member = archive.getinfo(_IN_KERAS)
    if member.compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"{path}: {_IN_KERAS} is compressed, which Keras does not do: unpack it, and give its path")
    with open(path, "rb") as raw:
        begin = stored_begin(raw, member)
    with Window(path, begin, member.file_size) as window, h5py.File(window, "r") as file:
        yield file, begin, functools.cache(functools.partial(check_member, path, content, begin, member))


def _check_heaps(path: str, content: Tensor) -> None:
    """
    Raise ``ValueError`` if a heap of strings in an HDF5 file has an object without an end: HDF5 would never end.

    Source: "Global Heap" in the HDF5 File Format Specification.
    """
    head = b"GCOL\1\0\0\0"
    for begin in range(0, len(content), CHUNK):
        some = content[begin : begin + CHUNK + len(head)].numpy().tobytes()
        at = some.find(head)
        while at >= 0:
            where = begin + at
            data = content[where : where + 16].numpy().tobytes()
            end = where + int.from_bytes(data[8:16], "little")
            where += 16
            while where + 16 <= min(end, len(content)):
                fields_of = content[where : where + 16].numpy().tobytes()
                number, size = int.from_bytes(fields_of[:2], "little"), int.from_bytes(fields_of[8:], "little")
                taken = size if number == 0 else 16 + -(-size // 8) * 8  # object 0 is the rest, its head included
                if taken < 16:
                    raise ValueError(f"{path} is damaged: a heap's object at byte {where} must take 16 bytes or more")
                where += taken
            at = some.find(head, at + 1)


def _h5_source(path: str) -> Source:
    if not os.path.exists(path):
        raise FileNotFoundError(f"{path} is missing")
    h5py = h5py_module()
    content = mapped_file(path)
    tensors: dict[str, Found] = {}
    full_names: dict[str, str] = {}
    ranges: list[tuple[int, int, str]] = []

    _check_heaps(path, content)
    with _opened(path, content) as (file, begin, check):

        def visit(name: str, x: Any) -> None:
            if isinstance(x, h5py.Dataset):
                is_bfloat16 = x.attrs.get("dtype") == "bfloat16"
                is_bfloat16 = is_bfloat16 and x.dtype.itemsize == 2
                dtype = torch.bfloat16 if is_bfloat16 else _H5_DTYPES.get(x.dtype.str)
                shape, offset = tuple(x.shape), x.id.get_offset()
                bytes_of = _h5_pieces(path, content, name, shape, dtype, offset, begin, check)
                tensors[name] = Found(name, shape, dtype, 1, bytes_of)
                if offset is not None:
                    ranges.append((offset, offset + math.prod(shape) * x.dtype.itemsize, name))
                layer = x.parent.attrs.get("name")
                if isinstance(layer, str):
                    full_names[name] = f"{layer}/{name.rsplit('/', 1)[-1]}"

        file.visititems(visit)
    for (_, end, before), (start, _, name) in itertools.pairwise(sorted(ranges)):
        if start < end:  # HDF5 has no checksums: an address that has changed is seen where it is another's
            raise ValueError(f"{path} is damaged: {before!r} and {name!r} must lie apart, got one byte {start} of both")
    return Source(path, tensors, full_names, True, False)


def _h5_pieces(
    path: str,
    content: Tensor,
    name: str,
    shape: tuple[int, ...],
    dtype: torch.dtype | None,
    offset: int | None,
    begin: int,
    check: Callable[[], None],
) -> Callable[[], list[Piece]]:
    def pieces() -> list[Piece]:
        check()
        if dtype is None:
            raise ValueError(f"{path}: {name!r} must be of little endian floats or integers of a dtype that torch has")
        size = math.prod(shape) * dtype.itemsize
        if offset is None and size:
            raise ValueError(f"{path}: {name!r} must lie in one run of bytes, as Keras writes it, and not in chunks")
        start = begin + (offset or 0)
        if start + size > len(content):
            raise ValueError(
                f"{path} must have the bytes {start} to {start + size} of {name!r}, but ends at {len(content)}"
            )
        place = tuple(slice(0, n) for n in shape)
        return [Piece(place, shape, dtype, content[start : start + size], None, path)]

    return pieces


def listed(names: Iterable[str], most: int = 20) -> str:
    """Return names for an error, the first of many."""
    ordered = sorted(names)
    return ", ".join(map(repr, ordered[:most])) + (f", and {len(ordered) - most} more" if len(ordered) > most else "")
