"""Files of a checkpoint: they survive a loss of power once written, and the bytes that are checked are those used."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .._extras import extra_module
from ..files import naming, sync_folder
from .manifest import CheckpointError, Shard, checksum

MANIFEST = "manifest.json"
PARTIAL_MANIFEST = ".manifest.json.partial"
#: The files of a version; any other file in its folder is not ours to remove.
_OURS = re.compile(r"shard-\d{5,}(-\d{5,})?\.safetensors|manifest\.json|\.manifest\.json\.partial|\.token-[0-9a-f]+")
#: The dtypes of tables that all readers of safetensors support.
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
    )
}


def safetensors(user: str) -> Any:
    """
    Return the module ``safetensors.torch``, which belongs to the extra ``checkpoint``.

    Args:
        user: the function that needs it, for the error.

    Raises:
        ImportError: if safetensors is not installed; the error names the extra.
    """
    return extra_module("safetensors.torch", "checkpoint", user)


# ---- Writing --------------------------------------------------------------------------------------------------------


def encode_shard(name: str, tensors: Mapping[str, Tensor]) -> tuple[bytes, dict[str, tuple[str, list[int]]]]:
    """
    Return the bytes of a shard's file, and its tensors' dtypes and shapes.

    Raises:
        ValueError: for tensors that cannot be stored.
    """
    module, stored, storages = safetensors("CheckpointStore.writer"), {}, set()
    for key, tensor in tensors.items():
        # safetensors reserves the name __metadata__.
        if not isinstance(key, str) or key in ("", "__metadata__"):
            raise ValueError(f"Writer.write: shard {name!r} must name its tensors by strings, got {key!r}")
        if not isinstance(tensor, Tensor) or tensor.layout != torch.strided or tensor.dtype not in DTYPES.values():
            found = f"{tensor.dtype}, {tensor.layout}" if isinstance(tensor, Tensor) else type(tensor).__name__
            raise ValueError(
                f"Writer.write: tensor {key!r} of shard {name!r} must be dense and of one of the dtypes "
                f"{', '.join(DTYPES)}, got {found}"
            )
        host = tensor.detach().to("cpu").contiguous()
        # safetensors refuses tensors that share memory.
        storage = host.untyped_storage().data_ptr()
        stored[key] = host.clone() if storage in storages else host
        storages.add(storage)
    described = {key: (str(t.dtype).removeprefix("torch."), list(t.shape)) for key, t in stored.items()}
    # Into memory first: safetensors' errors of files have no errno, and the checksum must be of the bytes meant.
    return module.save(stored), described


# ---- Removing -------------------------------------------------------------------------------------------------------


def is_ours(folder: Path) -> bool:
    """Say whether a folder has only a version's files."""
    return all(_OURS.fullmatch(name) for name in os.listdir(folder))


def remove_version(folder: Path) -> None:
    """
    Remove a version, its manifest first, so that no version ever lacks a shard.

    Files that no writer wrote stay, as does the folder if it has any.
    """
    with suppress(FileNotFoundError):
        os.unlink(folder / MANIFEST)
        sync_folder(folder)
    for name in os.listdir(folder):
        if _OURS.fullmatch(name):
            os.unlink(folder / name)
    with suppress(OSError):
        os.rmdir(folder)


# ---- Reading --------------------------------------------------------------------------------------------------------


def check_file(path: Path, nbytes: int | None = None) -> None:
    """
    Raise ``CheckpointError`` unless ``path`` is a regular file, of ``nbytes`` bytes if given.

    Raises:
        CheckpointError: if there is no such file, or it has another size; the error names the file.
    """
    try:
        status = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(path, "the file is missing") from None
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(path, "is no regular file")
    if nbytes is not None and status.st_size != nbytes:
        raise CheckpointError(path, f"must have {nbytes} bytes, got {status.st_size}")


def read_file(path: Path) -> bytes:
    """
    Return the bytes of a file.

    Raises:
        CheckpointError: if there is no such file.
        OSError: if the file cannot be read.
    """
    check_file(path)
    try:
        with naming(path), open(path, "rb") as file:
            return file.read()
    except FileNotFoundError:
        raise CheckpointError(path, "the file is missing") from None


def read_bytes(folder: Path, shard: Shard) -> bytes:
    """
    Return the bytes of a shard, whose checksum has been verified.

    They are copied into the process's own memory: a mapped file would be read again later, unchecked.

    Raises:
        CheckpointError: if the shard is damaged or missing.
    """
    path = folder / shard.file
    check_file(path, shard.nbytes)
    data = read_file(path)
    if len(data) != shard.nbytes or checksum(data) != shard.crc32c:
        raise CheckpointError(path, f"the checksum of shard {shard.name!r} is wrong: the file is damaged")
    return data


def read_shard(folder: Path, shard: Shard) -> dict[str, Tensor]:
    """
    Return the tensors of a shard by name.

    Raises:
        CheckpointError: if the shard is damaged, missing, or does not fit the manifest.
    """
    data, module = read_bytes(folder, shard), safetensors("CheckpointStore.open")
    try:
        tensors = module.load(data)
    except MemoryError:
        raise
    except Exception as error:  # safetensors' own errors, which have no class in common, and Python's
        raise CheckpointError(folder / shard.file, f"is no file of safetensors: {error!r}") from error
    found = {key: [str(t.dtype).removeprefix("torch."), list(t.shape)] for key, t in tensors.items()}
    if found != {key: list(described) for key, described in shard.tensors.items()}:
        raise CheckpointError(folder / shard.file, f"must hold {shard.tensors}, as the manifest says, got {found}")
    # In the order of writing, which safetensors does not keep.
    return {key: tensors[key] for key in shard.tensors}
