"""Tensors on two devices in one call: an error that names both, and no work on either device."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cpu_only import CPU_ONLY
from emulation import fixture
from samples.operators import SAMPLES
from samples.sample import Sample, map_tensors, tensors_of
from torch import Tensor

# Call the CPU's kernels although one tensor is on meta: torch would take the fake kernel.
KERNELS_OF_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


def _with_one_moved(sample: Sample) -> Iterator[tuple[Any, ...]]:
    """Yield the sample's arguments, once for each of its tensors, with this one on meta."""
    count = sum(len(tensors_of(argument)) for argument in sample.arguments)
    for moved in range(count):
        number = itertools.count()

        def move(x: Tensor, number: Iterator[int] = number, moved: int = moved) -> Tensor:
            return x.to("meta") if next(number) == moved else x

        yield tuple(map_tensors(move, argument) for argument in sample.arguments)


def _samples() -> Iterator[Sample]:
    """Yield one call of every operator for each set of tensors that it can be given, and looks at."""
    for name, of_it in SAMPLES.items():
        seen = set()
        for sample in of_it:
            given = tuple(len(tensors_of(argument)) > 0 for argument in sample.arguments)
            if name in CPU_ONLY or sample.name.startswith("none_wanted"):
                continue
            if sum(map(len, map(tensors_of, sample.arguments))) > 1 and given not in seen:
                seen.add(given)
                yield sample


def test_one_tensor_on_another_device(subtests: pytest.Subtests) -> None:
    message = r"must be on the device of [a-z_0-9\[\]]+, (cpu, got meta|meta, got cpu)$"
    for sample in _samples():
        operator = fixture.operator(sample.operator, "torchsparse_rec")
        with subtests.test(str(sample)):
            for arguments in _with_one_moved(sample):
                with pytest.raises(ValueError, match=message):
                    operator.redispatch(KERNELS_OF_CPU, *arguments)


def test_cuda_kernels_check_before_they_open_a_device(subtests: pytest.Subtests) -> None:
    """Leave a recorded bad id in place: a kernel that began work on the device would raise its error."""
    with contextlib.suppress(ValueError, IndexError):  # left by a test that failed
        fixture.check_errors()
    fixture.operator("embedding")(torch.ones(2, 1), torch.tensor([7]), -1, False, False)
    for sample in _samples():
        with subtests.test(str(sample)):
            for arguments in _with_one_moved(sample):
                with pytest.raises(ValueError, match="must be on the device of"):
                    fixture.operator(sample.operator).redispatch(KERNELS_OF_CPU, *arguments)
    with pytest.raises(IndexError, match="got 7"):
        fixture.check_errors()
