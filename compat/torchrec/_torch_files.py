"""
What ``torch.distributed.checkpoint`` and ``torch.save`` have written, mapped into memory, without a process group.

A folder of ``torch.distributed.checkpoint`` has ``.metadata``, which says where the pieces of a tensor belong and in
which file each lies. A piece is an archive as of ``torch.save``: its bytes are found there and never read whole.
"""

from __future__ import annotations

import functools
import math
import os
import pickle
import re
import zipfile
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..tensorflow._checkpoint_format import Piece, mapped_file, overlap
from ..tensorflow._checkpoint_sources import Found, Window, stored_begin

__all__ = ["METADATA", "add_all", "folder_tensors", "state_tensors", "tensors_of_file"]

METADATA = ".metadata"
_WAY_OUT = (
    "save it by torch.distributed.checkpoint.save({'model': model.state_dict(), 'optimizer': "
    "model.fused_optimizer.state_dict()}, checkpoint_id=folder), which needs no more memory, and load that folder"
)


# ---- States in memory, and files of torch.save ----------------------------------------------------------------------


def tensors_of_file(path: str) -> dict[str, Found]:
    """
    Return the tensors of a file of ``torch.save``, mapped.

    Raises:
        ValueError: it is no state of whole tensors.
    """
    try:
        state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(
            f"{path} must be a state that torch.load(weights_only=True) loads; of a model with tables over ranks, "
            f"{_WAY_OUT}: {error}"
        ) from error
    if not isinstance(state, Mapping):
        raise ValueError(f"{path} must be a state, a mapping from names to tensors, got a {type(state).__name__}")
    check = functools.cache(functools.partial(_check_file, path))

    def checked(pieces: Callable[[], list[Piece]]) -> list[Piece]:
        check()
        return pieces()

    found = state_tensors(path, state)
    return {name: x._replace(pieces=functools.partial(checked, x.pieces)) for name, x in found.items()}


def _check_file(path: str) -> None:
    """Raise ``ValueError`` unless the bytes of a file of ``torch.save`` have their checksums; torch compares none."""
    content = mapped_file(path)
    with zipfile.ZipFile(path) as archive, open(path, "rb") as file:
        for member in archive.infolist():
            begin = stored_begin(file, member)
            found = content[begin : begin + member.file_size]
            # torch.serialization.set_crc32_options(False) leaves 0.
            if member.CRC not in (0, zlib.crc32(found.numpy().data)):
                raise ValueError(f"{path} is damaged: {member.filename!r} must have the CRC {member.CRC:#010x} there")


def add_all(path: str, found: dict[str, Found], others: Mapping[str, Found]) -> None:
    """Add tensors to others; raise ``ValueError`` if they have a name in common."""
    if both := found.keys() & others.keys():
        raise ValueError(f"{path}: names must be of one tensor each, got two of {min(both)!r}")
    found.update(others)


def state_tensors(path: str, state: Mapping[Any, Any], before: str = "") -> dict[str, Found]:
    """Return the tensors of a state by name; names in mappings within mappings are joined by dots."""
    found: dict[str, Found] = {}
    for key, x in state.items():
        name = f"{before}{key}"
        if isinstance(x, Mapping):
            add_all(path, found, state_tensors(path, x, f"{name}."))
        elif isinstance(x, (int, float)) and not isinstance(x, bool):
            add_all(path, found, {name: whole_tensor(path, name, torch.tensor(float(x)))})
        elif hasattr(x, "local_shards") or hasattr(x, "full_tensor"):  # ShardedTensor and DTensor
            add_all(path, found, {name: Found(name, tuple(x.size()), x.dtype, 1, _refusing(path, name, type(x)))})
        elif isinstance(x, Tensor):
            add_all(path, found, {name: whole_tensor(path, name, x)})
    return found


def whole_tensor(path: str, name: str, x: Tensor) -> Found:
    """Return a tensor in memory as one that is found in a file."""
    place = tuple(slice(0, size) for size in x.shape)

    def pieces() -> list[Piece]:
        if x.is_meta or x.layout != torch.strided:
            kind = "tensor on the meta device" if x.is_meta else f"tensor of layout {x.layout}"
            raise ValueError(f"{path}: {name!r} must be a tensor with all its elements, got a {kind}")
        content = x.detach().contiguous().reshape(-1).view(torch.uint8)
        return [Piece(place, tuple(x.shape), x.dtype, content, None, path)]

    return Found(name, tuple(x.shape), x.dtype, 1, pieces)


def _refusing(path: str, name: str, kind: type) -> Callable[[], list[Piece]]:
    def pieces() -> list[Piece]:
        raise ValueError(
            f"{path}: {name!r} must be a whole tensor, got a {kind.__name__}, of which this process has a part: "
            f"{_WAY_OUT}"
        )

    return pieces


# ---- Folders of torch.distributed.checkpoint ------------------------------------------------------------------------


def folder_tensors(folder: str, before: str = "") -> dict[str, Found]:
    """
    Return the tensors of a folder of ``torch.distributed.checkpoint``.

    Args:
        folder: that one trusts as code: ``.metadata`` is a pickle.
        before: what names begin with, beside those in the folder.

    Raises:
        ValueError: it is no such folder.
    """
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    try:
        metadata = FileSystemReader(folder).read_metadata()
        tensors = {
            name: its for name, its in metadata.state_dict_metadata.items() if isinstance(its, TensorStorageMetadata)
        }
        stored = dict(metadata.storage_data)
    except (pickle.UnpicklingError, EOFError, AttributeError, ImportError, TypeError) as error:
        raise ValueError(
            f"{os.path.join(folder, METADATA)} must be what torch.distributed.checkpoint writes: {error}"
        ) from error
    pieces = _Pieces(folder, stored)
    return {
        before + name: Found(
            before + name, tuple(its.size), its.properties.dtype, len(its.chunks), pieces.of(name, its)
        )
        for name, its in tensors.items()
    }


class _Pieces:
    """
    The pieces of a folder's tensors, each found, and compared with its checksum, when it is first asked for.

    Args:
        folder: where the files are.
        stored: what the folder's metadata says of each piece.
    """

    def __init__(self, folder: str, stored: Mapping[Any, Any]) -> None:
        self._folder, self._stored = folder, stored
        self._mapped: dict[str, Tensor] = {}
        self._found: dict[str, list[Piece]] = {}

    def of(self, name: str, its: Any) -> Callable[[], list[Piece]]:
        """Return what finds the pieces of a tensor, whose metadata are given."""

        def pieces() -> list[Piece]:
            if name not in self._found:
                self._check(name, its)
                self._found[name] = [self._piece(name, its, chunk) for chunk in its.chunks]
            return self._found[name]

        return pieces

    def _check(self, name: str, its: Any) -> None:
        """Raise ``ValueError`` unless the pieces make up the tensor, each element once."""
        places = [_place(chunk) for chunk in its.chunks]
        elements = sum(math.prod(chunk.sizes) for chunk in its.chunks)
        inside = all(part.stop <= size for place in places for part, size in zip(place, its.size, strict=True))
        if elements != math.prod(its.size) or not inside or (its.size and overlap(places)):
            listed = [(list(chunk.offsets), list(chunk.sizes)) for chunk in its.chunks]
            raise ValueError(
                f"{self._folder}: the pieces of {name!r} must make up its {list(its.size)}, each element once, got "
                f"offsets and sizes {listed}"
            )

    def _piece(self, name: str, its: Any, chunk: Any) -> Piece:
        from torch.distributed.checkpoint.metadata import MetadataIndex

        info = self._stored.get(MetadataIndex(name, chunk.offsets)) or self._stored.get(MetadataIndex(name))
        if info is None:
            raise ValueError(f"{self._folder}: .metadata must say where {name!r} at {list(chunk.offsets)} lies")
        if getattr(info, "transform_descriptors", None):
            raise ValueError(
                f"{self._folder}: {name!r} must be stored as it is, got {list(info.transform_descriptors)}, which this "
                "does not read: load it by torch.distributed.checkpoint, and save it again"
            )
        path = os.path.join(self._folder, info.relative_path)
        if path not in self._mapped:
            if not os.path.exists(path):
                raise FileNotFoundError(f"{path} is missing: .metadata says that {name!r} lies there")
            self._mapped[path] = mapped_file(path)
        shape, dtype = tuple(chunk.sizes), its.properties.dtype
        content = _stored_bytes(path, self._mapped[path], info.offset, info.length, name, shape, dtype)
        return Piece(_place(chunk), shape, dtype, content, None, path)


def _place(chunk: Any) -> tuple[slice, ...]:
    return tuple(slice(begin, begin + size) for begin, size in zip(chunk.offsets, chunk.sizes, strict=True))


def _stored_bytes(
    path: str, content: Tensor, begin: int, length: int, name: str, shape: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    """Return the bytes, uint8, of a tensor that ``torch.save`` has written to a part of a file."""
    if begin + length > len(content):
        raise ValueError(
            f"{path} must have the bytes {begin} to {begin + length} of {name!r}, but ends at {len(content)}"
        )
    try:
        with Window(path, begin, length) as opened:
            window: Any = opened
            archive = zipfile.ZipFile(window)
            data = [member for member in archive.infolist() if re.fullmatch(r"[^/]+/data/\d+", member.filename)]
            starts = [begin + stored_begin(window, member) for member in data]
            # Not read by zipfile, which would ask for the checksum that may have been left out.
            orders = [member for member in archive.infolist() if member.filename.endswith("/byteorder")]
            order = [content[begin + stored_begin(window, x) :][: x.file_size].numpy().tobytes() for x in orders]
            window.seek(0)
            layout = torch.load(window, map_location="meta", weights_only=True)
            size = math.prod(shape) * dtype.itemsize
            if not isinstance(layout, Tensor) or tuple(layout.shape) != shape or layout.dtype != dtype:
                raise ValueError(f"it must be a tensor {list(shape)} of {dtype}, as .metadata says, got {layout}")
            if order not in ([], [b"little"]):
                raise ValueError(f"its bytes must be little endian, got {order}")
            plain = layout.is_contiguous() and layout.storage_offset() == 0
            stored = [member.compress_type for member in data] == [zipfile.ZIP_STORED]
            if not plain or not stored or data[0].file_size != size:  # such as a tensor that was transposed
                window.seek(0)
                whole: Tensor = torch.load(window, map_location="cpu", weights_only=True)
                return whole.contiguous().reshape(-1).view(torch.uint8)
    except (zipfile.BadZipFile, pickle.UnpicklingError, RuntimeError, EOFError, KeyError, ValueError) as error:
        raise ValueError(f"{path} is damaged, or of another kind than torch.save: {name!r}: {error}") from error
    found = content[starts[0] : starts[0] + size]
    # torch.serialization.set_crc32_options(False) leaves 0.
    if data[0].CRC not in (0, zlib.crc32(found.numpy().data)):
        raise ValueError(f"{path} is damaged: {name!r} must have the CRC {data[0].CRC:#010x} there")
    return found
