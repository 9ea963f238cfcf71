"""Checks of a variable's checkpoint: a checksum only proves that the bytes are the written ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import ops
from .manifest import CheckpointError

__all__ = ["ContentChecks", "check_metadata"]

# The largest frequency; steps and versions are below it.
_MOST = 2**31 - 1
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64)
# The tensors of each shard, beside the states of rows.
_SHARDS = {
    "rows": ("keys", "values", "frequencies", "versions"),
    "order": ("keys",),
    "erased": ("keys",),
    "candidates": ("keys", "frequencies", "versions"),
    "sketch": ("sketch",),
}


def check_metadata(path: Path, metadata: Mapping[str, Any]) -> None:
    """
    Raise ``CheckpointError`` unless a variable may have written a version's metadata.

    Args:
        path: the path of the manifest, for errors.
        metadata: the metadata of the version; its embedding_dim and key_dtype have been checked already.

    Raises:
        CheckpointError: if no variable writes such metadata; the error names the file.
    """
    for name, most in (("global_step", _MOST - 1), ("evicted", 2**63 - 1), ("optimizer_steps", _MOST - 1)):
        value = metadata.get(name)
        if not _is_within(value, 0, most):
            raise CheckpointError(path, f"{name} must be an integer in [0, {most}], got {value!r}")
    seen = metadata.get("seen", 0)  # older versions lack it
    if not _is_within(seen, 0, metadata["global_step"]):
        raise CheckpointError(path, f"seen must be an integer in [0, global_step], got {seen!r}")
    states = metadata.get("states")
    if not isinstance(states, list) or not all(isinstance(name, str) for name in states):
        raise CheckpointError(path, f"states must be a list of names, got {states!r}")
    if not isinstance(metadata.get("optimizer"), (str, type(None))):
        raise CheckpointError(path, f"optimizer must be a name or null, got {metadata['optimizer']!r}")


class ContentChecks:
    """
    Checks the shards of a checkpoint, in order.

    Args:
        embedding_dim: the embedding_dim of the variable.
        key_dtype: the key_dtype of the variable.
        states: the states of the variable's optimizer, by name: whether a state has one number for each row, instead of
            ``embedding_dim`` numbers.
    """

    def __init__(self, embedding_dim: int, key_dtype: torch.dtype, states: Mapping[str, bool]) -> None:
        self._embedding_dim, self._key_dtype = embedding_dim, key_dtype
        self._per_row = dict(states)  # states of other names too, with the form that they have in the first shard

    def check_shard(
        self, path: str | Path, name: str, tensors: Mapping[str, Tensor], states: Sequence[str] = ()
    ) -> None:
        """
        Raise ``CheckpointError`` unless a shard can be restored.

        Args:
            path: the path of the shard's file, for errors.
            name: the name of the shard: rows, order, erased, candidates or sketch.
            tensors: the tensors of the shard, by name.
            states: the states that rows must have, by the metadata of the shard's version.

        Raises:
            CheckpointError: if the shard cannot be restored; the error names the file.
        """
        wanted = _SHARDS.get(name)
        if wanted is None:
            raise CheckpointError(path, f"a shard must be one of {', '.join(_SHARDS)}, got {name!r}")
        if name == "rows":
            wanted = (*wanted, *(f"states.{state}" for state in states))
        there = [key for key in tensors if key.startswith("states.")] if name == "rows" else []
        if {*wanted, *there} != {*tensors}:
            raise CheckpointError(path, f"shard {name!r} must hold {', '.join(wanted)}, got {', '.join(tensors)}")
        if name == "sketch":
            sketch = tensors["sketch"]
            if sketch.dim() != 1 or sketch.dtype not in _INTEGERS or bool((sketch < 0).any()):
                raise CheckpointError(path, f"sketch must be counts [N], got {_form(sketch)}")
            return
        keys = tensors["keys"]
        if keys.dim() != 1 or keys.dtype != torch.int64:
            raise CheckpointError(path, f"keys must be int64 [N], got {_form(keys)}")
        if self._key_dtype == torch.int32 and bool((keys != keys.int()).any()):
            raise CheckpointError(path, f"keys must be int32, got {keys[keys != keys.int()][0].item()}")
        if len(ops.unique(keys).values) != len(keys):
            raise CheckpointError(path, f"keys of shard {name!r} must be distinct")
        for numbers, least, most in (("frequencies", 0, _MOST), ("versions", -1, _MOST - 1)):
            if numbers in wanted:
                self._check_numbers(path, numbers, tensors[numbers], len(keys), least, most)
        if name == "rows":
            self._check_rows(path, "values", tensors["values"], len(keys), False)
            for state in there:
                x = tensors[state]
                self._check_rows(path, state, x, len(keys), self._per_row.setdefault(state[7:], x.dim() == 1))

    def _check_numbers(self, path: str | Path, name: str, x: Tensor, count: int, least: int, most: int) -> None:
        if x.dtype != torch.int64 or x.shape != (count,):
            raise CheckpointError(path, f"{name} must be int64 [{count}], as the keys, got {_form(x)}")
        bad = x[(x < least) | (x > most)]
        if len(bad):
            raise CheckpointError(path, f"{name} must be in [{least}, {most}], got {bad[0].item()}")

    def _check_rows(self, path: str | Path, name: str, x: Tensor, count: int, per_row: bool) -> None:
        shape = (count,) if per_row else (count, self._embedding_dim)
        if x.dtype not in _FLOATS or x.shape != shape:
            raise CheckpointError(path, f"{name} must be of floats {list(shape)}, got {_form(x)}")


def _is_within(value: Any, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _form(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"
