"""torch.vmap: every operator has a rule, which says why if it cannot; test_operators.py compares it with a loop."""

from __future__ import annotations

import pytest
import torch
from calls import assert_same_bits, operator

from torchsparse_rec import ops

# This operator takes no tensors.
WITHOUT_RULE = {"torchsparse_rec::cpu_level"}
NAMES = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("torchsparse_rec::")}


def test_every_operator_has_a_rule() -> None:
    has = {name for name in NAMES if torch._C._dispatch_has_kernel_for_dispatch_key(name, "FuncTorchBatched")}
    assert has == NAMES - WITHOUT_RULE


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
    tables, ids = torch.randn(3, 5, 2, generator=generator), torch.tensor([4, 0, 4])
    offsets = torch.tensor([0, 2, 3])
    for function in (
        lambda x: ops.embedding(x, ids),
        lambda x: ops.embedding_bag(x, ids, offsets, mode="mean"),
        lambda x: ops.sparse_segment_sqrt_n(x, ids, torch.tensor([0, 0, 2]), 3),
    ):
        gradient = torch.func.grad(lambda x, f=function: f(x).square().sum())
        wanted = torch.stack([gradient(table) for table in tables])
        assert_same_bits(torch.vmap(gradient)(tables), wanted)
