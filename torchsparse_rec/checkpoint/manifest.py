"""
The manifest, which describes one version of a checkpoint: a JSON object with the checksum of its own bytes.

A reader trusts nothing else before it has read a shard. The last entry is the CRC-32C of all bytes before that entry,
in one fixed form, so that a change of any byte of the file is detected.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch

from ..ops import crc32c
from ..typing import CheckpointKind

FORMAT = "torchsparse_rec checkpoint"
VERSION = 1
KINDS = get_args(CheckpointKind)
# The shard of a version that one process writes: by index.
_OF_ONE = re.compile(r"shard-\d{5,}\.safetensors")
# The shard of a version that several processes write: by rank and index.
_OF_RANK = re.compile(r"shard-\d{5,}-\d{5,}\.safetensors")


class CheckpointError(ValueError):
    """
    An error that names a damaged or missing file of a checkpoint.

    Args:
        path: the path of the file that is refused.
        problem: the fault of the file.

    Example:
        >>> from torchsparse_rec.checkpoint import CheckpointError
        >>> print(CheckpointError("run/000012/manifest.json", "the file is missing"))
        run/000012/manifest.json: the file is missing
    """

    def __init__(self, path: str | Path, problem: str):
        self.path, self.problem = str(path), problem
        # Pickling needs both as arguments.
        super().__init__(self.path, problem)

    def __str__(self) -> str:
        return f"{self.path}: {self.problem}"


@dataclass(frozen=True)
class VersionInfo:
    """
    One version of a checkpoint.

    Args:
        number: the number of the version, from 1 on.
        kind: ``"full"``, or ``"delta"``, which applies on top of ``base``; None if the manifest cannot be read.
        base: the number of the version below a delta; else None.
        metadata: the metadata that the writer was given.
        shards: the number of files of tensors that the version has.
        nbytes: the bytes of these files together.
        problem: None, or why the version cannot be restored, as far as it is known without reading its shards.

    Example:
        >>> from torchsparse_rec.checkpoint import VersionInfo
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
    """A file of tensors: the shard's name, size and checksum, each tensor's dtype and shape, and its writer's words."""

    name: str
    file: str
    nbytes: int
    crc32c: str
    tensors: dict[str, tuple[str, list[int]]]
    about: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Manifest:
    """The manifest of a version. A delta names its base by its number and by the checksum of the base's manifest."""

    number: int
    kind: str
    base: int | None
    base_crc32c: str | None
    metadata: dict[str, Any]
    shards: list[Shard]

    def info(self, problem: str | None = None) -> VersionInfo:
        """Return the version's information for users, with a ``problem`` if there is one."""
        nbytes = sum(shard.nbytes for shard in self.shards)
        return VersionInfo(self.number, self.kind, self.base, self.metadata, len(self.shards), nbytes, problem)


class _Bytes:
    """Bytes that numpy takes for writable memory: torch warns of any other, and a copy costs more than the checksum."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        address = np.frombuffer(data, np.uint8).ctypes.data
        self.__array_interface__ = {"data": (address, False), "shape": (len(data),), "typestr": "|u1", "version": 3}


def checksum(data: bytes) -> str:
    """Return the CRC-32C of bytes as 8 hexadecimal digits."""
    value = int(crc32c([torch.from_numpy(np.asarray(_Bytes(data)))])[0]) if data else 0
    return f"{value:08x}"


def shard_file(index: int, rank: int | None = None) -> str:
    """Return the file name of a version's shard ``index``, counted from 0; with a rank, of that rank's shard."""
    return f"shard-{index:05d}.safetensors" if rank is None else f"shard-{rank:05d}-{index:05d}.safetensors"


def is_shard(name: str) -> bool:
    """Say whether a file of a version's folder is one of its shards, by its name."""
    return _OF_ONE.fullmatch(name) is not None or _OF_RANK.fullmatch(name) is not None


def encode(manifest: Manifest) -> tuple[bytes, str]:
    """Return the bytes of a manifest's file, and the manifest's checksum: deltas name their base by it."""
    content = json.dumps({"format": FORMAT, "format_version": VERSION, **asdict(manifest)})[:-1].encode()
    crc = checksum(content)
    return content + _end(crc), crc


def _end(crc: str) -> bytes:
    return f', "crc32c": "{crc}"}}\n'.encode()


def decode(data: bytes, path: Path, number: int) -> tuple[Manifest, str]:
    """
    Return the manifest that a file's bytes hold, and its checksum.

    Args:
        data: the bytes of the file.
        path: the path of the file, for errors.
        number: the number of the version whose manifest it must be.

    Raises:
        CheckpointError: if a byte has changed, or the bytes are no manifest of that version.
    """
    split = max(len(data) - len(_end("00000000")), 0)
    crc = checksum(data[:split])
    # Compared as bytes: as a number, "A" instead of "a" would go undetected.
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
        for name, kind in (("name", str), ("nbytes", int), ("crc32c", str), ("tensors", dict), ("about", dict)):
            _check_type(f"{name} of {shard.file}", getattr(shard, name), kind)
        for described in shard.tensors.values():
            _check_type(f"a tensor of {shard.file}", described, list)
            dtype, shape = described
            _check_type(f"a dtype of {shard.file}", dtype, str)
            _check_type(f"a shape of {shard.file}", shape, list)
            for size in shape:
                _check_type(f"a size of {shard.file}", size, int)
    if manifest.kind not in KINDS or (manifest.base is not None) != (manifest.kind == "delta"):
        raise ValueError(f"kind {manifest.kind!r} with base {manifest.base!r}")
    # A base is older than its delta, so no chain goes in circles.
    if manifest.base is not None and not 0 < manifest.base < manifest.number:
        raise ValueError(f"version {manifest.number} with base {manifest.base}")
    # Only known names, so that none leads out of the folder.
    files = [shard.file for shard in shards]
    of_ranks = len(set(files)) == len(files) and all(_OF_RANK.fullmatch(file) for file in files)
    if files != [shard_file(index) for index in range(len(files))] and not of_ranks:
        raise ValueError(f"shards in files {files}")
    return manifest


def _check_type(what: str, value: Any, kind: type | tuple[type, ...]) -> None:
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ValueError(f"{what} is {value!r}")
