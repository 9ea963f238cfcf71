"""
What a version of a checkpoint says of itself: its manifest, one JSON object with the checksum of its own bytes.

The manifest is all that a reader trusts before it has read a shard. Its last entry is the CRC-32C of all bytes before
that entry, written in one form only, so that no byte of the file can change unseen.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...ops import crc32c

FORMAT = "torchsparse_rec checkpoint"
VERSION = 1
KINDS = ("full", "delta")


class CheckpointError(ValueError):
    """
    A checkpoint that is damaged, or not whole.

    Args:
        path: of the file that is refused.
        problem: what is wrong with it.

    Example:
        >>> from torchsparse_rec.nn.variable.checkpoint import CheckpointError
        >>> print(CheckpointError("run/000012/manifest.json", "the file is missing"))
        run/000012/manifest.json: the file is missing
    """

    def __init__(self, path: str | Path, problem: str):
        self.path, self.problem = str(path), problem
        # Both are its arguments, so that it can be pickled.
        super().__init__(self.path, problem)

    def __str__(self) -> str:
        return f"{self.path}: {self.problem}"


@dataclass(frozen=True)
class VersionInfo:
    """
    One version of a checkpoint.

    Args:
        number: of the version, from 1 on.
        kind: ``"full"``, or ``"delta"``, which applies on top of ``base``; None if the manifest cannot be read.
        base: the number of the version below a delta; else None.
        metadata: what its writer was given.
        shards: how many files of tensors it has.
        nbytes: their bytes together.
        problem: None, or why it cannot be restored, as far as can be said without reading its shards.

    Example:
        >>> from torchsparse_rec.nn.variable.checkpoint import VersionInfo
        >>> VersionInfo(number=2, kind="delta", base=1).base
        1
    """

    number: int
    kind: str | None = None
    base: int | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    shards: int = 0
    nbytes: int = 0
    problem: str | None = None


@dataclass(frozen=True)
class Shard:
    """A file of tensors: the name its writer gave it, and what must be found in it (tensors: dtype and shape)."""

    name: str
    file: str
    nbytes: int
    crc32c: str
    tensors: dict[str, tuple[str, list[int]]]


@dataclass(frozen=True)
class Manifest:
    """A version. A delta names its base by number and by the checksum of its manifest: another will not do."""

    number: int
    kind: str
    base: int | None
    base_crc32c: str | None
    metadata: dict[str, Any]
    shards: list[Shard]

    def info(self, problem: str | None = None) -> VersionInfo:
        """What callers see of it."""
        nbytes = sum(shard.nbytes for shard in self.shards)
        return VersionInfo(self.number, self.kind, self.base, self.metadata, len(self.shards), nbytes, problem)


class _Bytes:
    """Bytes as numpy takes them for writable memory: torch warns of any other, and a copy costs more than the sum."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        address = np.frombuffer(data, np.uint8).ctypes.data
        self.__array_interface__ = {"data": (address, False), "shape": (len(data),), "typestr": "|u1", "version": 3}


def checksum(data: bytes) -> str:
    """The CRC-32C of bytes as 8 hexadecimal digits."""
    value = int(crc32c([torch.from_numpy(np.asarray(_Bytes(data)))])[0]) if data else 0
    return f"{value:08x}"


def shard_file(index: int) -> str:
    """The name of a version's shard, from 0 on."""
    return f"shard-{index:05d}.safetensors"


def encode(manifest: Manifest) -> tuple[bytes, str]:
    """The bytes of the manifest's file, and its checksum, by which deltas name it."""
    content = json.dumps({"format": FORMAT, "format_version": VERSION, **asdict(manifest)})[:-1].encode()
    crc = checksum(content)
    return content + _end(crc), crc


def _end(crc: str) -> bytes:
    return f', "crc32c": "{crc}"}}\n'.encode()


def decode(data: bytes, path: Path, number: int) -> tuple[Manifest, str]:
    """
    A manifest and its checksum.

    Args:
        data: the bytes of the file.
        path: of the file, for errors.
        number: of the version whose manifest it must be.

    Raises:
        CheckpointError: if a byte is not as it was written, or it is no manifest of that version.
    """
    split = max(len(data) - len(_end("00000000")), 0)
    crc = checksum(data[:split])
    # Compared as bytes: of a number, "A" for "a" would go unseen.
    if data[split:] != _end(crc):
        raise CheckpointError(path, "the checksum of the manifest is wrong: it is damaged, cut or of something else")
    try:
        manifest = _parsed(json.loads(data[:split] + b"}"))
    except RecursionError:
        raise CheckpointError(path, "is no manifest of a checkpoint: too many lists in lists") from None
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(path, f"is no manifest of a checkpoint: {error!r}") from error
    if manifest.number != number:
        raise CheckpointError(path, f"is the manifest of version {manifest.number}, expected that of {number}")
    return manifest, crc


def _parsed(fields: dict[str, Any]) -> Manifest:
    form = (fields.pop("format"), fields.pop("format_version"))
    if form != (FORMAT, VERSION):
        raise ValueError(f"expected the format {(FORMAT, VERSION)}, got {form}: written by a later version?")
    shards = [Shard(**shard) for shard in fields.pop("shards")]
    manifest = Manifest(**fields, shards=shards)
    _check_type("version", manifest.number, int)
    _check_type("base", manifest.base, (int, type(None)))
    _check_type("metadata", manifest.metadata, dict)
    for shard in shards:
        for name, kind in (("name", str), ("nbytes", int), ("crc32c", str), ("tensors", dict)):
            _check_type(f"{name} of {shard.file}", getattr(shard, name), kind)
        for described in shard.tensors.values():
            _check_type(f"a tensor of {shard.file}", described, list)
    if manifest.kind not in KINDS or (manifest.base is not None) != (manifest.kind == "delta"):
        raise ValueError(f"kind {manifest.kind!r} with base {manifest.base!r}")
    # A base is older: so no chain goes in circles.
    if manifest.base is not None and not 0 < manifest.base < manifest.number:
        raise ValueError(f"version {manifest.number} with base {manifest.base}")
    # Names are known: none leads out of the folder.
    if [shard.file for shard in shards] != [shard_file(index) for index in range(len(shards))]:
        raise ValueError(f"shards in files {[shard.file for shard in shards]}")
    return manifest


def _check_type(what: str, value: Any, kind: type | tuple[type, ...]) -> None:
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ValueError(f"{what} is {value!r}")
