"""Fake kernels and derivatives of the operators that :mod:`.embedding_lookup` calls."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .autograd import differentiable, not_differentiable, only_once, register

_ops = torch.ops.torchsparse_rec
_HALVES = (torch.float16, torch.bfloat16)


# ---- Fake kernels ---------------------------------------------------------------------------------------------------


@torch.library.register_fake("torchsparse_rec::shard_rows")
def _(ids: Tensor, *rest: Any) -> Tensor:
    return ids.new_empty(ids.shape)


@torch.library.register_fake("torchsparse_rec::pruned_bags")
def _(
    ids: Tensor,
    row_ids: Tensor,
    weights: Tensor | None,
    num_bags: int,
    num_embeddings: int,
    prune_weights: bool,
    default_id: int | None,
    with_positions: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    n = ids.shape[0]
    total = n if default_id is None else n + num_bags
    return (
        ids.new_empty(0, dtype=torch.float32) if weights is None else weights.new_empty(total),
        ids.new_empty(total),
        ids.new_empty(num_bags + 1, dtype=torch.int64),
        ids.new_empty(n if with_positions else 0, dtype=torch.int64),
    )


@torch.library.register_fake("torchsparse_rec::embedding_bag_shards")
def _(params: list[Tensor], indices: Tensor, offsets: Tensor | None, *rest: Any) -> Tensor:
    bags = indices.shape[0] if offsets is None else offsets.shape[0] - 1
    return params[0].new_empty(bags, params[0].shape[1])


@torch.library.register_fake("torchsparse_rec::embedding_bag_shards_weights_backward")
def _(grad: Tensor, params: Any, indices: Tensor, offsets: Tensor, per_sample_weights: Tensor, *rest: Any) -> Tensor:
    return per_sample_weights.new_empty(per_sample_weights.shape)


@torch.library.register_fake("torchsparse_rec::clip_rows_backward")
def _(grad: Tensor, params: list[Tensor], *rest: Any) -> Tensor:
    return params[0].new_empty(grad.shape)


# ---- Autograd: bags -------------------------------------------------------------------------------------------------

not_differentiable("shard_rows")


def _pruned_bags_setup_context(ctx, inputs, output) -> None:
    _, indices, offsets, positions = output
    ctx.mark_non_differentiable(indices, offsets, positions)
    ctx.set_materialize_grads(False)
    ctx.num_embeddings, ctx.with_positions = inputs[4], inputs[7]
    ctx.save_for_backward(indices, positions)


def _pruned_bags_backward(ctx, weights_grad, _indices, _offsets, _positions):
    if not ctx.with_positions:
        raise RuntimeError("pruned_bags: with_positions must be True for the gradient of weights")
    indices, positions = ctx.saved_tensors
    if weights_grad is None:
        return (None,) * 8
    left_out = indices.index_select(0, positions) == ctx.num_embeddings
    grad = weights_grad.index_select(0, positions).masked_fill(left_out, 0.0)
    return None, None, grad, None, None, None, None, None


# ---- Autograd: lookups ----------------------------------------------------------------------------------------------


def _by_shard(values: Tensor, rows: Tensor, sizes: list[int]) -> list[Tensor]:
    """Split a table's sparse gradient into its shards': rows are sorted, so each shard has a stretch of them."""
    if len(sizes) == 1:
        stretches, firsts = [(0, rows.shape[0])], [0]
    else:
        firsts = [0, *torch.tensor(sizes).cumsum(0).tolist()]
        bounds = torch.searchsorted(rows, torch.tensor(firsts, device=rows.device)).tolist()
        stretches = list(zip(bounds, bounds[1:], strict=False))
    return [
        torch.sparse_coo_tensor(
            (rows[begin:end] - first).unsqueeze(0),
            values[begin:end],
            (size, values.shape[1]),
            is_coalesced=True,
            check_invariants=False,
        )
        for (begin, end), first, size in zip(stretches, firsts, sizes, strict=False)
    ]


def _shards_setup_context(ctx, inputs, output) -> None:
    params, indices, offsets, weights, ctx.mode, ctx.padding_idx, ctx.max_norm, ctx.sparse = inputs
    ctx.sizes = [shard.shape[0] for shard in params]
    ctx.weights_need_grad = weights is not None and weights.requires_grad
    params_needed = ctx.max_norm >= 0 or ctx.weights_need_grad
    ctx.save_for_backward(
        indices, offsets, weights, output if ctx.weights_need_grad else None, *(params if params_needed else ())
    )


def _shards_backward(ctx, grad):
    indices, offsets, weights, output, *params = ctx.saved_tensors
    clips = ctx.max_norm >= 0
    shard_grads: list[Tensor | None] = [None] * len(ctx.sizes)
    if any(ctx.needs_input_grad[0]):
        # The clip's part comes after the sum over a row's entries: rounded once, at the end.
        wide = torch.float32 if clips and grad.dtype in _HALVES else grad.dtype
        entries = (
            grad.to(wide),
            indices,
            offsets,
            None if weights is None else weights.to(wide),
            None,
            sum(ctx.sizes),
            ctx.mode,
            ctx.padding_idx,
            False,
        )
        if ctx.sparse:
            values, rows = _ops.embedding_sparse_backward.default(*entries)
            if clips:
                values = _ops.clip_rows_backward.default(values, params, rows, ctx.max_norm)
            shard_grads = list(_by_shard(values, rows, ctx.sizes))
        else:
            dense = _ops.embedding_dense_backward.default(*entries)
            if clips:
                dense = _ops.clip_rows_backward.default(dense, params, None, ctx.max_norm)
            shard_grads = [dense] if len(ctx.sizes) == 1 else list(dense.split(ctx.sizes))
    weights_grad = None
    if ctx.weights_need_grad:
        weights_grad = _ops.embedding_bag_shards_weights_backward.default(
            grad, params, indices, offsets, weights, output, ctx.mode, ctx.padding_idx, ctx.max_norm
        )
    return shard_grads, None, None, weights_grad, None, None, None, None


# ---- Autograd: the gradients of gradients ---------------------------------------------------------------------------


def _clip_setup_context(ctx, inputs, output) -> None:
    grad, params, rows, ctx.max_norm = inputs
    ctx.save_for_backward(grad, rows, *params)


def _clip_backward_backward(ctx, result_grad):
    grad, rows, *params = ctx.saved_tensors

    def in_torch(grad: Tensor, *params: Tensor) -> Tensor:
        """Compute ``clip_rows_backward`` in torch's own differentiable operations."""
        x = torch.cat(params).to(grad.dtype)
        x = x if rows is None else x.index_select(0, rows)
        squares = (x * x).sum(1, keepdim=True)
        zero = squares == 0
        norms = torch.where(zero, torch.ones_like(squares), squares).sqrt()  # whose derivative is zero where x is
        along = (x * grad).sum(1, keepdim=True) / (norms * norms)
        return torch.where(zero | (norms < ctx.max_norm), grad, (grad - x * along) * (ctx.max_norm / norms))

    grads = torch.func.vjp(in_torch, grad, *params)[1](result_grad)
    return grads[0], list(grads[1:]), None, None


pruned_bags = differentiable("pruned_bags", _pruned_bags_backward, _pruned_bags_setup_context)
# An autograd.Function does not see tables that come in a list: these operators take only the registered way.
register("embedding_bag_shards", _shards_backward, _shards_setup_context)
register("clip_rows_backward", _clip_backward_backward, _clip_setup_context)
register("embedding_bag_shards_weights_backward", *only_once("embedding_bag_shards_weights_backward"))
