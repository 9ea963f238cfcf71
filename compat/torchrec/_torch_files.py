"""
What ``torch.distributed.checkpoint`` and ``torch.save`` have written, mapped into memory, without a process group.

A folder of ``torch.distributed.checkpoint`` has ``.metadata``: the places of a tensor's pieces, and the file of each. A
piece is an archive as of ``torch.save``: its bytes are found there and never read whole.
"""

from __future__ import annotations

import functools
import math
import os
import pickletools
import re
import zipfile
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..checkpoints.format import Piece, check_member, mapped_file, overlap, reading, stored_begin
from ..checkpoints.sources import Found, Window

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
        with reading(path):
            _check_file(path, lambda name: not _IS_DATA.fullmatch(name))
            state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except ValueError as error:
        raise ValueError(
            f"{path} must be a state that torch.load(weights_only=True) loads; of a model with tables over ranks, "
            f"{_WAY_OUT}: {error}"
        ) from error
    if not isinstance(state, Mapping):
        raise ValueError(f"{path} must be a state, a mapping from names to tensors, got a {type(state).__name__}")
    check = functools.cache(functools.partial(_check_file, path, _IS_DATA.fullmatch))

    def checked(pieces: Callable[[], list[Piece]]) -> list[Piece]:
        check()
        return pieces()

    found = state_tensors(path, state)
    return {name: x._replace(pieces=functools.partial(checked, x.pieces)) for name, x in found.items()}


_IS_DATA = re.compile(r"[^/]+/data/\d+")


def _check_file(path: str, wanted: Callable[[str], Any]) -> None:
    """Raise ``ValueError`` unless members of a file of ``torch.save`` have their checksums; torch compares none."""
    content = mapped_file(path)
    with zipfile.ZipFile(path) as archive, open(path, "rb") as file:
        for member in archive.infolist():
            # torch.serialization.set_crc32_options(False) leaves 0.
            if member.CRC != 0 and wanted(member.filename):
                check_member(path, content, stored_begin(file, member), member)


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
        folder: the folder, which one trusts as code: ``.metadata`` is a pickle.
        before: a prefix for the names in the folder.

    Raises:
        ValueError: it is no such folder.
    """
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    path = os.path.join(folder, METADATA)
    try:
        with open(path, "rb") as file:
            _check_memo(file.read())
        metadata = FileSystemReader(folder).read_metadata()
        tensors = {
            name: its for name, its in metadata.state_dict_metadata.items() if isinstance(its, TensorStorageMetadata)
        }
        for name, its in tensors.items():
            _check_sizes(name, its)
        stored = dict(metadata.storage_data)
    except (FileNotFoundError, PermissionError):
        raise
    except Exception as error:  # a pickle that is damaged may call anything, which may raise anything
        said = f"{type(error).__name__}: {error}"
        raise ValueError(f"{path} must be what torch.distributed.checkpoint writes: {said}") from error
    pieces = _Pieces(folder, stored)
    return {
        before + name: Found(
            before + name, tuple(its.size), its.properties.dtype, len(its.chunks), pieces.of(name, its)
        )
        for name, its in tensors.items()
    }


def _check_memo(data: bytes) -> None:
    """Raise ``ValueError`` if a pickle numbers an object beyond its own size: pickle would take memory up to there."""
    for opcode, argument, _ in pickletools.genops(data):
        if opcode.name in ("PUT", "LONG_BINPUT") and not 0 <= int(argument or 0) <= len(data):
            raise ValueError(f"the number of an object must be at most {len(data)}, got {argument}")


def _check_sizes(name: Any, its: Any) -> None:
    """Raise ``ValueError`` unless the entry of a tensor in ``.metadata`` is a name, a dtype and sizes."""
    numbers = [its.size, *(x for chunk in its.chunks for x in (chunk.offsets, chunk.sizes))]
    are_sizes = all(
        isinstance(some, tuple) and len(some) == len(its.size) and all(isinstance(x, int) and x >= 0 for x in some)
        for some in numbers
    )
    if not isinstance(name, str) or not isinstance(its.properties.dtype, torch.dtype) or not are_sizes:
        raise ValueError(f"{name!r} must have a dtype and sizes, got {its}")


class _Pieces:
    """
    The pieces of a folder's tensors. A piece is found, and compared with its checksum, when it is first asked for.

    Args:
        folder: the folder of the files.
        stored: the entry of each piece in the folder's metadata.
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
        numbers = info.offset, info.length
        if not all(isinstance(x, int) and x >= 0 for x in numbers) or not isinstance(info.relative_path, str):
            raise ValueError(f"{self._folder}: .metadata must say in which bytes {name!r} lies, got {info}")
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
    with reading(path), reading(name), Window(path, begin, length) as opened:
        window: Any = opened
        members = zipfile.ZipFile(window).infolist()
        starts = {x.filename: begin + stored_begin(window, x) for x in members}
        for member in members:
            # torch.serialization.set_crc32_options(False) leaves 0.
            if member.CRC != 0 and member.compress_type == zipfile.ZIP_STORED:
                check_member(path, content, starts[member.filename], member, name)
        # Not read by zipfile, which would require the checksum that may have been left out.
        orders = [x for x in members if x.filename.endswith("/byteorder")]
        order = [content[starts[x.filename] :][: x.file_size].numpy().tobytes() for x in orders]
        window.seek(0)
        layout = torch.load(window, map_location="meta", weights_only=True)
        size = math.prod(shape) * dtype.itemsize
        if not isinstance(layout, Tensor) or tuple(layout.shape) != shape or layout.dtype != dtype:
            raise ValueError(f"it must be a tensor {list(shape)} of {dtype}, as .metadata says, got {layout}")
        if order not in ([], [b"little"]):
            raise ValueError(f"its bytes must be little endian, got {order}")
        plain = layout.is_contiguous() and layout.storage_offset() == 0
        data = [x for x in members if _IS_DATA.fullmatch(x.filename)]
        stored = [x.compress_type for x in data] == [zipfile.ZIP_STORED]
        if not plain or not stored or data[0].file_size != size:  # such as a tensor that was transposed
            window.seek(0)
            whole: Tensor = torch.load(window, map_location="cpu", weights_only=True)
            return whole.contiguous().reshape(-1).view(torch.uint8)
    begin = starts[data[0].filename]
    return content[begin : begin + size]
