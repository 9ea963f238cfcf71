"""Calls the operator of a sample, and compares results to the bit."""

from __future__ import annotations

from collections.abc import Callable

import torch
from samples.sample import Sample, map_tensors, tensors_of
from torch import Tensor


def operator(name: str) -> Callable:
    return getattr(torch.ops.torchsparse_rec, name).default


def written(name: str) -> list[int]:
    """Return the positions of the arguments that the operator writes."""
    arguments = operator(name)._schema.arguments
    return [i for i, x in enumerate(arguments) if x.alias_info is not None and x.alias_info.is_write]


def state(name: str) -> list[int]:
    """Return the positions of the arguments that are a table's state, which must be contiguous even if it is read."""
    names = ("index", "entries", "free_rows", "weight") if name.startswith("table") else ()
    return [i for i, x in enumerate(operator(name)._schema.arguments) if x.name in names]


def call(sample: Sample) -> tuple[Tensor, ...]:
    """Return the results of a call and what it wrote, into copies of the arguments."""
    places = written(sample.operator)
    arguments = list(sample.arguments)
    for i in places:
        arguments[i] = map_tensors(torch.clone, arguments[i])
    result = operator(sample.operator)(*arguments)
    results = result if isinstance(result, tuple) else (result,)
    return tuple(x for part in (*results, *(arguments[i] for i in places)) for x in tensors_of(part))


def assert_same_bits(actual: Tensor, wanted: Tensor) -> None:
    assert actual.dtype == wanted.dtype and actual.shape == wanted.shape
    if actual.numel():  # an empty tensor may have strides that no other dtype can view
        bits = [x.contiguous().reshape(-1).view(torch.uint8) for x in (actual, wanted)]
        assert torch.equal(*bits), (actual, wanted)


def among_columns(x: Tensor) -> Tensor:
    """Return a view of the same values, between columns that belong to another tensor."""
    wide = x.new_full((x.shape[0], x.shape[1] + 5), 99)
    wide[:, 2:-3] = x
    return wide[:, 2:-3]
