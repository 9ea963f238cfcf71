"""Values of a checkpoint as JSON holds them, and the tensors in them, which go into shards."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

__all__ = ["decoded", "encoded"]

# What stands for a value that JSON does not have: a mapping whose first key is one of these.
_TENSOR, _NUMBER, _TUPLE, _FLOAT = "$tensor", "$number", "$tuple", "$float"
_RESERVED = (_TENSOR, _NUMBER, _TUPLE, _FLOAT)


def encoded(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """
    Return a value as JSON gives it back.

    Args:
        value: None, a number, a string, a tensor, or a list, tuple or mapping of such.
        name: the name of the value, for errors and for tensors in it.
        tensors: a dict that receives every tensor of the value that is not a scalar, under a new name.

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
    from torch.distributed.tensor import DTensor  # imports sympy, which an import of the library must not

    if isinstance(x, DTensor) or x.layout != torch.strided or x.is_meta:
        kind = "DTensor" if isinstance(x, DTensor) else f"{x.layout} tensor on {x.device}"
        raise ValueError(f"save: {name} must be a strided tensor that is whole on each rank, got a {kind}")
    if x.dim() == 0:
        return {_NUMBER: encoded(x.item(), name, tensors), "dtype": str(x.dtype).removeprefix("torch.")}
    while name in tensors:  # keys may have dots
        name += "'"
    tensors[name] = x.detach()
    return {_TENSOR: name}


def decoded(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """
    Return the value that :func:`encoded` was given; its tensors are on the CPU.

    Args:
        value: the value in JSON's form.
        name: the name by which the value was encoded; its tensors' names begin with it.
        tensors: the tensors by name. The value's tensors are taken out: each belongs to one value.

    Raises:
        ValueError: for a value that :func:`encoded` does not return, naming where it is.
    """
    if isinstance(value, list):
        return [decoded(each, f"{name}[{k}]", tensors) for k, each in enumerate(value)]
    if not isinstance(value, dict):
        return value
    if not any(key in value for key in _RESERVED):
        return {key: decoded(each, f"{name}.{key}", tensors) for key, each in value.items()}
    match value:
        case {"$tensor": str(its), **rest} if not rest and its in tensors and its.rstrip("'") == name.rstrip("'"):
            return tensors.pop(its)
        case {"$number": number, "dtype": str(dtype), **rest} if not rest:
            kind, number = getattr(torch, dtype, None), decoded(number, name, {})
            if isinstance(kind, torch.dtype) and isinstance(number, (bool, int, float)):
                with suppress(OverflowError, RuntimeError):
                    x = torch.tensor(number, dtype=kind)
                    again = encoded(x.item(), name, {})
                    if type(again) is type(value[_NUMBER]) and again == value[_NUMBER]:
                        return x
        case {"$tuple": list(items), **rest} if not rest:
            return tuple(decoded(items, name, tensors))
        case {"$float": ("inf" | "-inf" | "nan") as number, **rest} if not rest:
            return float(number)
    raise ValueError(f"{name} must be a value that save() writes, got {repr(value):.100}")
