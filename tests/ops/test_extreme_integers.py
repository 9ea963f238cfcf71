"""
Extreme values for every integer that an operator takes: its arguments, and the elements of its int64 tensors.

A call returns, or raises an error that names the argument. There is little memory, so that a call which needs much must
ask for it at once. Under a sanitizer the Makefile says how little.
"""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from calls import operator
from cpu_only import CPU_ONLY
from devices import KERNELS
from samples.on_host import HOST_SAMPLES
from samples.operators import SAMPLES
from samples.sample import Sample, tensors_of
from torch import Tensor

from torchsparse_rec import ops

NUMBERS = [sign * x for x in (2**31, 2**32, 2**40, 2**61, 2**63 - 1) for sign in (1, -1)]
FEW_NUMBERS = [2**40, 2**63 - 1, -(2**31)]
ROOM = 256 << 20
_SANITIZED = "sanitized" in os.environ.get("TORCHSPARSE_REC_LIBRARY", "") or os.environ.get(
    "TORCHSPARSE_REC_EMULATED_SANITIZE"
)


@contextmanager
def little_memory() -> Iterator[None]:
    """Limit this process to the memory that it uses now, plus ROOM."""
    if _SANITIZED:  # its shadow takes terabytes of addresses
        yield
        return
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + ROOM, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _is_integer(x: object) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)


def _changed(sample: Sample, place: int, value: object) -> Sample:
    return replace(sample, arguments=(*sample.arguments[:place], value, *sample.arguments[place + 1 :]))


def with_arguments(sample: Sample, numbers: Sequence[int]) -> Iterator[tuple[str, int, Sample]]:
    """Yield argument name, number and the sample with that number for an integer argument or an element of a list."""
    # A sample may leave out arguments that have defaults.
    named = zip(operator(sample.operator)._schema.arguments, sample.arguments, strict=False)
    for place, (argument, value) in enumerate(named):
        for x in numbers:
            if _is_integer(value) or (value is None and "int" in str(argument.type).lower()):
                yield argument.name, x, _changed(sample, place, x)
            elif isinstance(value, list) and value and _is_integer(value[0]):
                for at in range(len(value)):
                    yield argument.name, x, _changed(sample, place, [*value[:at], x, *value[at + 1 :]])


def with_elements(sample: Sample, numbers: Sequence[int]) -> Iterator[tuple[str, int, Sample]]:
    """Yield the sample with one element of an int64 tensor replaced: the first, one within, the last."""
    # A sample may leave out arguments that have defaults.
    named = zip(operator(sample.operator)._schema.arguments, sample.arguments, strict=False)
    for place, (argument, value) in enumerate(named):
        for k, tensor in enumerate(tensors_of(value)):
            if tensor.dtype != torch.int64 or tensor.numel() == 0:
                continue
            for at in sorted({0, tensor.numel() // 2, tensor.numel() - 1}):
                for x in numbers:
                    new: Tensor = tensor.clone(memory_format=torch.contiguous_format)
                    new.view(-1)[at] = x
                    changed = new if isinstance(value, Tensor) else [*value[:k], new, *value[k + 1 :]]
                    yield argument.name, x, _changed(sample, place, changed)


def attempt(sample: Sample) -> Exception | None:
    """Call the operator with copies of the tensors. Return the error that it raises, or None."""
    arguments = sample.map_tensors(torch.clone).arguments
    with little_memory():
        try:
            operator(sample.operator)(*arguments)
        except (ValueError, IndexError, RuntimeError) as error:
            return error
    return None


def check(name: str, number: int, sample: Sample) -> None:
    error = attempt(sample)
    if isinstance(error, RuntimeError):
        assert re.search(rf"cannot allocate .*, for .*{name} = \d+$", str(error)), (name, number, error)
    elif error is not None:
        assert re.match(r"\w+: ", str(error)), (name, number, error)


ALL = {**SAMPLES, **HOST_SAMPLES}
each_operator = pytest.mark.parametrize(
    ("name", "kernels"),
    [
        pytest.param(name, kernels, id=f"{name}-{kernels}", marks=[pytest.mark.slow] if kernels == "emulated" else [])
        for kernels in KERNELS
        for name in ALL
        if kernels == "cpu" or name not in CPU_ONLY
    ],
    indirect=["kernels"],
)


def _representatives(name: str) -> list[Sample]:
    return [x for x in ALL[name] if x.representative]


@each_operator
def test_every_integer(name: str, kernels: str) -> None:
    for sample in _representatives(name):
        for case in (*with_arguments(sample, NUMBERS), *with_elements(sample, NUMBERS)):
            check(*case)


@pytest.mark.parametrize("name", SAMPLES)
def test_a_few_of_them_emulated(name: str, emulated: object) -> None:
    sample = _representatives(name)[0]
    operator(name)(*sample.map_tensors(torch.clone).arguments)
    for case in (*with_arguments(sample, FEW_NUMBERS), *with_elements(sample, FEW_NUMBERS[1:2])):
        check(*case)


@pytest.mark.parametrize("size", [2**40, 2**63 - 1])
def test_views_that_repeat_one_element(size: int) -> None:
    """Raise for views whose contiguous copy is larger than any memory."""
    ids = torch.zeros(1, dtype=torch.int64).expand(size)
    for call in (
        lambda: ops.segment_sum(torch.ones(1, 1).expand(size, 1), ids, 1),
        lambda: ops.unique(ids),
        lambda: ops.to_hash_bucket_fast(ids, 10),
    ):
        with pytest.raises(RuntimeError, match=rf"cannot allocate a \w+ tensor of shape \[{size}(, 1)?\]$"):
            call()


def test_a_gradient_without_columns_asks_for_nothing(kernels: str) -> None:
    grad, ids, rows = torch.ones(2, 0), torch.tensor([0, 1]), 2**61
    none = (None, None, None)
    lookups = ([0], [0], [0], [2], [-1], True, [True])
    with little_memory():
        assert ops.sparse_segment_sum_grad(grad, ids, ids, rows).shape == (rows, 0)
        assert operator("embedding_dense_backward")(grad, ids, *none, rows, 0, -1, False).shape == (rows, 0)
        (dense,) = operator("embedding_collection_dense_backward")(grad, ids, *none, [rows], [0], *lookups)
        assert dense.shape == (rows, 0)
        with pytest.raises(IndexError, match=rf"indices\[1\] must be in \[0, {rows}\), got -1"):
            ops.sparse_segment_sum_grad(grad, torch.tensor([0, -1]), ids, rows)
            torch.ops.torchsparse_rec.check_errors.default(grad)
