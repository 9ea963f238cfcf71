"""Checks of the arguments of an EmbeddingVariable and of its methods."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._torch_modules import is_in_ddp, is_in_fsdp
from ..tables.growing import GrowingRows
from ..tables.stale import is_parameter
from ..tables.table import split_part
from .keys import KeyRows
from .options import EmbeddingVariableOption

__all__ = [
    "LOAD_INSTEAD",
    "SAVE_INSTEAD",
    "check_arguments",
    "check_places",
    "check_range",
    "check_trainable",
    "check_whole",
    "given_exports",
    "given_keys",
    "given_numbers",
    "given_values",
    "is_in_job",
]

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_arguments(
    embedding_dim: int,
    key_dtype: torch.dtype,
    option: Any,
    target_gpu: int,
    capacity: int,
    dtype: torch.dtype,
    name: Any,
    seed: Any,
    device: torch.device | str | None,
) -> None:
    """Raise ``ValueError`` or ``TypeError`` unless a variable can be made of these arguments."""
    owner = "EmbeddingVariable"
    for argument, value, least in (
        ("embedding_dim", embedding_dim, 1),
        ("capacity", capacity, 2),
        ("target_gpu", target_gpu, -1),
    ):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{owner}: {argument} must be an integer of at least {least}, got {value!r}")
    if capacity >= 2**31:
        raise ValueError(f"{owner}: capacity must be below 2**31, got {capacity}")
    if key_dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{owner}: key_dtype must be torch.int32 or torch.int64, got {key_dtype}")
    if dtype not in _FLOATS:
        raise ValueError(f"{owner}: dtype must be float16, bfloat16, float32 or float64, got {dtype}")
    if not isinstance(name, str):
        raise TypeError(f"{owner}: name must be a string, got {type(name).__name__}")
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or not -(2**63) <= seed < 2**63):
        raise ValueError(f"{owner}: seed must be an integer of 64 bits, got {seed!r}")
    if torch.empty(0, device=device).device.type == "meta":
        raise ValueError(f"{owner}: device must have memory: keys are looked up in it, got {device!r}")
    if not isinstance(option, EmbeddingVariableOption):
        raise TypeError(f"{owner}: ev_option must be an EmbeddingVariableOption, got {type(option).__name__}")


def is_in_job() -> bool:
    """Say whether this process is a rank of a job: of one that has begun, or as ``torchrun`` has started it."""
    if dist.is_available() and dist.is_initialized():
        return True
    ranks = os.environ.get("WORLD_SIZE", "")
    return ranks.isdecimal() and int(ranks) > 1 and "LOCAL_RANK" in os.environ


#: What to call for a variable that is split over ranks.
SAVE_INSTEAD = "torchsparse_rec.checkpoint.save(folder, module, optimizer)"
LOAD_INSTEAD = "torchsparse_rec.checkpoint.load(folder, module, optimizer)"


def check_whole(weight: Tensor, method: str, instead: str) -> None:
    """
    Raise ``RuntimeError`` if a variable is split over ranks: a method would take this rank's keys for all.

    Args:
        weight: the weight of the variable.
        method: the name of the method.
        instead: the call to make instead.
    """
    part = split_part(weight)
    if part is not None:
        raise RuntimeError(
            f"{method}: table {part.name!r} is split over ranks, and this one has only its own keys: call "
            f"{instead}, on all ranks"
        )


def check_trainable(module: torch.nn.Module, name: str, weight: Tensor) -> None:
    """Raise ``RuntimeError`` where a variable cannot be trained because of its wrapper."""
    if getattr(module, "_is_replica", False):
        raise RuntimeError(
            f"EmbeddingVariable {name!r}: replicas of torch.nn.DataParallel cannot train, their new rows "
            "would be lost: use one process for each device"
        )
    if is_in_ddp() and split_part(weight) is None:  # of a part, its module has checked that it is left out
        raise RuntimeError(
            f"EmbeddingVariable {name!r}: a table that grows cannot be in a DistributedDataParallel, whose "
            "processes would give the same row to different keys: leave it out of the wrapped module"
        )
    if is_in_fsdp(module):
        raise RuntimeError(
            f"EmbeddingVariable {name!r}: a table that grows cannot be in fully_shard, which deals out the "
            "rows that it has now: leave it out by ignored_params"
        )
    if not is_parameter(weight):
        raise RuntimeError(
            f"EmbeddingVariable {name!r}: its weight is computed (prune, parametrize), or given by functional_call or "
            "torch.func, so that rows of new ids would be lost: call eval() on the table, or train it as it is"
        )


def check_places(name: str, weight: Tensor, keys: KeyRows) -> None:
    """Raise ``RuntimeError`` if a variable has been given rows of other keys, as by ``functional_call``."""
    if type(weight) is GrowingRows:
        for places in weight.places:
            places.check(keys.places())
    elif weight.shape[0] != keys.capacity:
        raise RuntimeError(
            f"EmbeddingVariable {name!r}: its weight has {weight.shape[0]} rows, but its keys have {keys.capacity}: "
            "rows taken before the table grew do not fit its present keys"
        )


def given_exports(tensors: Mapping[str, Any]) -> Iterator[tuple[Tensor, Tensor, Any, Any]]:
    """Yield the keys, values, frequencies and versions of each variable or partition of an export; None if missing."""
    owner = "EmbeddingVariable.insert_export"
    prefixes = [name.removesuffix("-keys") for name in tensors if name.endswith("-keys")]
    if not prefixes:
        raise ValueError(f"{owner}: tensors must have names that end with '-keys', got {sorted(tensors)}")
    for prefix in prefixes:
        if f"{prefix}-values" not in tensors:
            raise ValueError(f"{owner}: tensors must have '{prefix}-values', beside its keys")
        keys, values = (torch.as_tensor(tensors[f"{prefix}-{name}"]) for name in ("keys", "values"))
        names = [f"{prefix}-freqs", f"{prefix}-versions"]
        frequencies, versions = (tensors[name] if name in tensors else None for name in names)
        yield keys, values, frequencies, versions


def given_keys(method: str, keys: Any, key_dtype: torch.dtype, device: torch.device) -> Tensor:
    """Check a caller's keys, and return them as ``[K]`` int64 on the table's device."""
    given = torch.as_tensor(keys, device=device)
    if given.numel() == 0 and not isinstance(keys, Tensor):
        given = given.long()  # an empty list becomes floats
    if given.dim() != 1 or given.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"EmbeddingVariable.{method}: keys must be int32 or int64 of rank 1, got {given.dtype} {list(given.shape)}"
        )
    check_range(f"{method}: keys", given, key_dtype)
    return given.long()


def check_range(argument: str, keys: Tensor, key_dtype: torch.dtype) -> None:
    """Raise ``ValueError`` for a key that a table of ``key_dtype`` cannot have."""
    if key_dtype == torch.int32 and keys.dtype != torch.int32 and bool((keys != keys.int()).any()):
        bad = keys[keys != keys.int()][0].item()
        raise ValueError(f"EmbeddingVariable.{argument} must be of the key_dtype, int32, got {bad}")


def given_numbers(argument: str, numbers: Any, keys: Tensor, least: int) -> Tensor | None:
    """Check a caller's frequencies or versions, and return them as ``[K]`` int64; None stays None."""
    if numbers is None:
        return None
    given = torch.as_tensor(numbers, device=keys.device)
    count = len(keys)
    if given.shape != (count,):
        raise ValueError(
            f"EmbeddingVariable.insert: {argument} must be [{count}], one for each key, got {list(given.shape)}"
        )
    if count and (given.is_floating_point() or given.dtype == torch.bool):
        raise ValueError(f"EmbeddingVariable.insert: {argument} must be integers, got {given.dtype}")
    bad = given[(given < least) | (given >= 2**31 - 1)]
    if len(bad):
        raise ValueError(f"EmbeddingVariable.insert: {argument} must be in [{least}, 2**31 - 1), got {bad[0].item()}")
    return given.long()


def given_values(values: Any, keys: Tensor, like: Tensor) -> Tensor:
    """Check a caller's rows, and return them as ``[K, D]``, with the dtype and on the device of the table ``like``."""
    values, shape = torch.as_tensor(values, dtype=like.dtype, device=like.device), (len(keys), like.shape[1])
    if values.shape != shape and (len(keys) or values.numel()):
        raise ValueError(f"EmbeddingVariable.insert: values must be {list(shape)}, got {list(values.shape)}")
    return values.reshape(shape)
