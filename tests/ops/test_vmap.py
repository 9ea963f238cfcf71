"""torch.vmap: every operator has a rule, which gives the results of a loop over the batch, or says why it cannot."""

from __future__ import annotations

import pytest
import torch
from calls import assert_same_bits, call, operator, state, written
from devices import HARDWARE
from samples.operators import REPRESENTATIVE
from samples.sample import Sample, map_tensors, tensors_of
from torch import Tensor

from torchsparse_rec import ops

BATCH = 3
# This operator takes no tensors.
WITHOUT_RULE = {"torchsparse_rec::cpu_level"}
NAMES = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("torchsparse_rec::")}


@pytest.mark.parametrize("name", sorted(NAMES - WITHOUT_RULE))
def test_every_operator_has_a_rule(name: str) -> None:
    assert torch._C._dispatch_has_kernel_for_dispatch_key(name, "FuncTorchBatched")


def _batch(x: Tensor) -> list[Tensor]:
    """Return a batch of different floats; integers stay alike, since they may be ids, whose order and range matter."""
    return [x.clone() * factor if x.is_floating_point() else x.clone() for factor in (1, 2, -1)]


def _batched(sample: Sample, places: set[int], index: int | None = None) -> Sample:
    """Return the sample with a batch of arguments at ``places``, or with one element of that batch."""
    return Sample(
        sample.operator,
        sample.name,
        tuple(
            map_tensors(lambda x: torch.stack(_batch(x), -1) if index is None else _batch(x)[index], x)
            if i in places
            else x
            for i, x in enumerate(sample.to("cpu").arguments)
        ),
    )


def _present(sample: Sample) -> list[int]:
    """Return the positions of the arguments that the operator writes, except optional tensors that are not given."""
    return [i for i in written(sample.operator) if sample.arguments[i] is not None]


def _sized(sample: Sample) -> Sample:
    """Return the sample with outputs of their final shape: the batch's common memory cannot be resized."""
    count = sum(len(tensors_of(sample.arguments[i])) for i in _present(sample))
    results = iter(call(sample.to("cpu"))[-count:] if count else ())

    def sized(x: Tensor) -> Tensor:
        shape = next(results).shape
        return x if x.shape == shape else x.new_zeros(shape)

    given = enumerate(sample.arguments)
    arguments = tuple(map_tensors(sized, x) if i in _present(sample) else x for i, x in given)
    return Sample(sample.operator, sample.name, arguments)


def _cases() -> list:
    return [
        pytest.param(sample, i, id=f"{sample}-{i}")
        for sample in map(_sized, REPRESENTATIVE)
        for i, x in enumerate(sample.arguments)
        # torch batches no COO tensors: transforms are shown the sparse_backward of their family.
        if isinstance(x, Tensor) and not sample.operator.endswith("coo_backward")
    ]


@pytest.mark.filterwarnings("error:There is a performance drop")
@pytest.mark.parametrize("sample, place", _cases())
@pytest.mark.parametrize("device", HARDWARE, indirect=True)
def test_equals_a_loop(sample: Sample, place: int, device: str) -> None:
    """Batch one argument along its last dimension, and with it the arguments that are written."""
    places = {place, *_present(sample)}
    wanted = [call(_batched(sample, places, index)) for index in range(BATCH)]
    arguments = _batched(sample, places).arguments
    contiguous = bool(written(sample.operator) or state(sample.operator))
    if contiguous:  # the kernels write to contiguous memory alone, and state is such
        moved = enumerate(arguments)
        arguments = [map_tensors(lambda x: x.movedim(-1, 0).contiguous(), x) if i in places else x for i, x in moved]
    batch_dim = 0 if contiguous else -1

    def function(*given: object) -> object:
        return call(Sample(sample.operator, sample.name, given))

    in_dims = tuple(map_tensors(lambda _: batch_dim, x) if i in places else None for i, x in enumerate(arguments))
    results = torch.vmap(function, in_dims)(*arguments)
    for actual, *each in zip(results, *wanted, strict=True):
        assert_same_bits(actual, torch.stack(each))


def test_sizes_that_depend_on_values_are_refused() -> None:
    with pytest.raises(ValueError, match=r"unique: torch.vmap cannot stack results of the shapes \[\(1,\), \(2,\)\]"):
        torch.vmap(ops.unique)(torch.tensor([[1, 2], [3, 3]]))


def test_what_is_written_must_be_batched() -> None:
    segment_ids, out = torch.tensor([0, 0]), torch.zeros(4, 2)
    with pytest.raises(ValueError, match="sparse_segment_reduce_grad_out: out is written to"):
        torch.vmap(operator("sparse_segment_reduce_grad_out"), (0, None, None, None, None, None))(
            torch.ones(3, 1, 2), segment_ids, segment_ids, 4, 0, out
        )


def test_what_is_written_is_not_resized() -> None:
    segment_ids, out = torch.tensor([0, 0]), torch.zeros(3, 5, 2)
    with pytest.raises(ValueError, match=r"out must have the shape \[4, 2\] .* torch.vmap, got \[5, 2\]"):
        torch.vmap(operator("sparse_segment_reduce_grad_out"), (0, None, None, None, None, 0))(
            torch.ones(3, 1, 2), segment_ids, segment_ids, 4, 0, out
        )


def test_an_empty_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="unique: torch.vmap must have a batch of at least 1"):
        torch.vmap(ops.unique)(torch.empty(0, 2, dtype=torch.int64))


def test_gradients_of_each_element() -> None:
    """Apply vmap over grad, to the operators' public functions."""
    generator = torch.Generator().manual_seed(0)
    tables, ids = torch.randn(BATCH, 5, 2, generator=generator), torch.tensor([4, 0, 4])
    offsets = torch.tensor([0, 2, 3])
    for function in (
        lambda x: ops.embedding(x, ids),
        lambda x: ops.embedding_bag(x, ids, offsets, mode="mean"),
        lambda x: ops.sparse_segment_sqrt_n(x, ids, torch.tensor([0, 0, 2]), 3),
    ):
        gradient = torch.func.grad(lambda x, f=function: f(x).square().sum())
        wanted = torch.stack([gradient(table) for table in tables])
        assert_same_bits(torch.vmap(gradient)(tables), wanted)
