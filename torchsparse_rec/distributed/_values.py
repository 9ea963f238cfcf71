"""Values of a checkpoint as JSON holds them, and the tensors in them, which go into shards."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

__all__ = ["decoded", "encoded"]

# What stands for a value that JSON does not have: a mapping whose first key is one of these.
_TENSOR, _NUMBER, _TUPLE, _FLOAT = "$tensor", "$number", "$tuple", "$float"
_RESERVED = (_TENSOR, _NUMBER, _TUPLE, _FLOAT)


def encoded(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """
    Return a value as JSON gives it back.

    Args:
        value: None, a number, a string, a tensor, or a list, tuple or mapping of such.
        name: of the value, for errors and for tensors in it.
        tensors: to which those tensors in it are added that have dimensions, by names of their own.

    Raises:
        ValueError: for anything else, naming where it is.
    """
    if value is None or isinstance(value, (bool, str)):
        return value
    if type(value) is int:
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {_FLOAT: repr(value)}
    if isinstance(value, Tensor):
        return _tensor(value, name, tensors)
    if type(value) in (list, tuple):
        items = [encoded(each, f"{name}[{k}]", tensors) for k, each in enumerate(value)]
        return items if type(value) is list else {_TUPLE: items}
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str) or key in _RESERVED:
                raise ValueError(f"save: {name} must have strings for keys, other than {_RESERVED}, got {key!r}")
        return {key: encoded(each, f"{name}.{key}", tensors) for key, each in value.items()}
    raise ValueError(
        f"save: {name} must be None, a number, a string, a tensor, or a list or mapping of these, got a "
        f"{type(value).__name__}: a checkpoint holds nothing that would have to be pickled"
    )


def _tensor(x: Tensor, name: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(x, DTensor) or x.layout != torch.strided or x.is_meta:
        kind = "DTensor" if isinstance(x, DTensor) else f"{x.layout} tensor on {x.device}"
        raise ValueError(f"save: {name} must be a strided tensor that is whole on each rank, got a {kind}")
    if x.dim() == 0:
        return {_NUMBER: encoded(x.item(), name, tensors), "dtype": str(x.dtype).removeprefix("torch.")}
    while name in tensors:  # keys may have dots
        name += "'"
    tensors[name] = x.detach()
    return {_TENSOR: name}


def decoded(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the value that :func:`encoded` was given; its tensors are on the CPU."""
    if isinstance(value, list):
        return [decoded(each, tensors) for each in value]
    if not isinstance(value, dict):
        return value
    if _TENSOR in value:
        return tensors[value[_TENSOR]]
    if _NUMBER in value:
        return torch.tensor(decoded(value[_NUMBER], tensors), dtype=getattr(torch, value["dtype"]))
    if _TUPLE in value:
        return tuple(decoded(each, tensors) for each in value[_TUPLE])
    if _FLOAT in value:
        return float(value[_FLOAT])
    return {key: decoded(each, tensors) for key, each in value.items()}
