"""The outputs of an operator share no memory with its other tensors: every pair is refused, and nothing is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from calls import assert_same_bits, call, operator, written
from cpu_only import CPU_ONLY
from devices import KERNELS
from samples.on_host import HOST_SAMPLES
from samples.operators import SAMPLES
from samples.sample import Sample, tensors_of
from torch import Tensor

from torchsparse_rec import ops

ALIGNMENT = 64
ALL = {**SAMPLES, **HOST_SAMPLES}
# All operators that write, except one whose written tensor is its only one.
WRITERS = sorted(name for name in ALL if written(name) and name != "row_optimizer_advance_")


def _with_results(sample: Sample) -> Sample:
    """Return the sample with outputs as large as the results, so that they are not resized."""
    if not sample.operator.endswith("_out"):
        return sample
    places = written(sample.operator)
    fresh = [x.new_empty(0) if i in places else x for i, x in enumerate(sample.arguments)]
    operator(sample.operator)(*fresh)
    return Sample(sample.operator, sample.name, tuple(fresh))


def _samples(name: str) -> list[Sample]:
    return [_with_results(x) for x in ALL[name] if x.representative]


def _laid(like: Tensor, memory: Tensor, begin: int) -> Tensor:
    """Return a contiguous tensor of the same shape at a place in memory."""
    size = like.numel() * like.element_size()
    return memory[begin : begin + size].view(like.dtype).view(like.shape)


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


def _places(sample: Sample) -> Iterator[tuple[int, int]]:
    """Yield argument and position in it of every tensor with elements, except tables that are not wanted."""
    arguments = operator(sample.operator)._schema.arguments
    wanted = {x.name: value for x, value in zip(arguments, sample.arguments, strict=False)}.get("wanted")
    for i, value in enumerate(sample.arguments):
        for k, x in enumerate(tensors_of(value)):
            taken = wanted[k] if arguments[i].name == "weights" and wanted is not None else True
            if x.numel() > 0 and taken:
                yield i, k


def _replaced(sample: Sample, changes: dict[tuple[int, int], Tensor]) -> list:
    arguments = list(sample.arguments)
    for (i, k), x in changes.items():
        if isinstance(arguments[i], Tensor):
            arguments[i] = x
        else:
            arguments[i] = [x if at == k else y for at, y in enumerate(arguments[i])]
    return arguments


# Operators that take lists of tensors, and so have many pairs.
RARELY_EMULATED = ("embedding_collection_update_", "row_optimizer_make_current_", "row_optimizer_update_")
each_writer = pytest.mark.parametrize(
    ("name", "kernels"),
    [
        pytest.param(name, kernels, marks=[pytest.mark.slow] if kernels != "cpu" and name in RARELY_EMULATED else [])
        for name in WRITERS
        for kernels in KERNELS
        if kernels == "cpu" or name not in CPU_ONLY
    ],
    indirect=["kernels"],
)


@each_writer
def test_every_pair_is_refused(name: str, kernels: str) -> None:
    pairs = 0
    for sample in _samples(name):
        tensors = {(i, k): tensors_of(sample.arguments[i])[k] for i, k in _places(sample)}
        for first in [place for place in tensors if place[0] in written(name)]:
            for second in tensors:
                if second == first:
                    continue
                x, y = tensors[first], tensors[second]
                memory = torch.zeros(_bytes(x) + _bytes(y) + ALIGNMENT, dtype=torch.uint8)
                _laid(y, memory, 0).copy_(y)
                _laid(x, memory, 0).copy_(x)
                before = memory.clone()
                arguments = _replaced(sample, {first: _laid(x, memory, 0), second: _laid(y, memory, 0)})
                with pytest.raises(ValueError, match=r"^\w+: .* must not share memory with"):
                    operator(name)(*arguments)
                assert torch.equal(memory, before)
                pairs += 1
    assert pairs > 0


def _side_by_side(sample: Sample) -> Sample:
    """Return the sample with all its tensors in one memory, one behind the other."""
    tensors = [x for value in sample.arguments for x in tensors_of(value)]
    ends = torch.tensor([0, *(-(-_bytes(x) // ALIGNMENT) * ALIGNMENT for x in tensors)]).cumsum(0).tolist()
    memory, begins = torch.zeros(ends[-1], dtype=torch.uint8), iter(ends)
    return sample.map_tensors(lambda x: _laid(x, memory, next(begins)).copy_(x))


@each_writer
def test_what_lies_side_by_side_is_not_shared(name: str, kernels: str) -> None:
    for sample in _samples(name):
        wanted = call(sample.map_tensors(torch.clone))
        together = _side_by_side(sample)
        result = operator(name)(*together.arguments)
        results = result if isinstance(result, tuple) else (result,)
        places = [together.arguments[i] for i in written(name)]
        for actual, expected in zip((x for part in (*results, *places) for x in tensors_of(part)), wanted, strict=True):
            assert_same_bits(actual, expected)


def _gradients(grad: Tensor, out: Tensor) -> list[Callable[[], object]]:
    """Return calls with `out=` for gradients of three rows out of five."""
    ids, segments, rows = torch.tensor([3, 1, 0]), torch.tensor([0, 0, 1]), torch.empty(0, dtype=torch.int64)
    return [
        lambda: ops.sparse_segment_sum_grad(grad, ids, segments, 5, out=out),
        lambda: ops.sparse_segment_sum_grad_v2(grad, ids, segments, 5, out=(out, rows)),
    ]


@pytest.mark.parametrize("rows", [0, 2])
def test_an_output_that_is_resized_shares_no_storage(rows: int, kernels: str) -> None:
    """Refuse shared storage: resizing would move the memory that is read, or grow over it."""
    memory = torch.ones(10, 4)
    for call_ in _gradients(memory[6:8], memory[:rows]):
        with pytest.raises(ValueError, match="grad must not share memory with (out|values)"):
            call_()
    for call_ in _gradients(*[torch.ones(2, 4)] * 2):
        with pytest.raises(ValueError, match="grad must not share memory with (out|values)"):
            call_()
    assert torch.equal(memory, torch.ones(10, 4))


def test_an_output_of_the_right_size_may_be_of_the_same_storage(kernels: str) -> None:
    memory = torch.ones(10, 4)
    dense, compact = _gradients(memory[6:8], memory[:5])[0], _gradients(memory[6:8], memory[:3])[1]
    wanted = torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0]).unsqueeze(1).expand(5, 4)
    assert torch.equal(dense(), wanted) and torch.equal(memory[5:], torch.ones(5, 4))
    compact()
    assert torch.equal(memory[:3], torch.ones(3, 4))
