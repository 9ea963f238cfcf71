"""Second derivatives of :mod:`.embedding_collection`: those of its gradients, table by table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from .. import _reduction
from ._transforms import call
from .embedding import partial_derivatives, picked_rows, weights_backward_composite

_NO_RULE: tuple = (0, [], 0, 0)


class _Lookup(NamedTuple):
    table: int
    key: int
    mode: int
    dim: int
    first_bag: int
    bags: int
    result: Tensor  # [bags, dim], a view of what the collection has for all lookups


def _lookups(lists: tuple, dims: list[int], results: Tensor) -> Iterator[_Lookup]:
    """Yield every lookup with its part of ``results``, which has the shape of the output."""
    tables, keys, modes, bags, _, side_by_side = lists
    begin = 0
    for table, key, mode in zip(tables, keys, modes, strict=True):
        dim, count = dims[table], bags[key]
        width = dim if side_by_side else count * dim
        part = results.narrow(-1, begin, width).reshape(count, dim)
        begin += width
        yield _Lookup(table, key, mode, dim, sum(bags[:key]), count, part)


def _joined(parts: list[Tensor], side_by_side: bool) -> Tensor:
    return torch.cat(parts, 1) if side_by_side else torch.cat([part.reshape(-1) for part in parts])


def _picked_maxima(table: Tensor, indices: Tensor, argmax: Tensor) -> Tensor:
    """Return ``table[indices[argmax]]`` element by element, zero where a bag is empty."""
    if indices.shape[0] == 0 or table.shape[0] == 0:
        return table.new_zeros(argmax.shape)
    empty = argmax < 0
    winners = indices[argmax.clamp_min(0)].long().masked_fill(empty, 0)
    return table.gather(0, winners).masked_fill(empty, 0.0)


def _transposed(ctx: Any, tables: dict[int, tuple[Tensor, Tensor, int]]) -> tuple[Tensor, Tensor | None]:
    """
    Differentiate the sum of ``<table, that table's gradient>`` with respect to ``grad`` and ``per_sample_weights``.

    The gradient of pooled lookups is linear in ``grad``, and its transpose is the lookups themselves. ``tables``: for
    each table that counts, the table to look up, the indices as its rows, and the row that is padding.
    """
    grad, offsets, per_sample_weights, argmax = ctx.saved_tensors[:4]
    bags, side_by_side = ctx.lists[3], ctx.lists[5]
    parts, argmax_begin = [], 0
    weights_grad = torch.zeros_like(per_sample_weights) if ctx.needs_input_grad[3] else None
    for lookup in _lookups(ctx.lists, ctx.dims, grad):
        shape, is_max = lookup.result.shape, lookup.mode == _reduction.MAX
        begin = argmax_begin
        argmax_begin += shape.numel() if is_max else 0
        if lookup.table not in tables:
            parts.append(grad.new_zeros(shape))
            continue
        table, indices, padding = tables[lookup.table]
        if is_max:
            parts.append(_picked_maxima(table, indices, argmax[begin:argmax_begin].view(shape)))
            continue
        if offsets is None and padding >= 0:  # a lookup would read the row, which has no gradient
            is_padding = torch.arange(table.shape[0], device=table.device) == padding
            table = table.masked_fill(is_padding.unsqueeze(1), 0)
        one = ([0], [lookup.key], [lookup.mode], bags, [padding], True)
        pooled, _ = call("embedding_collection", [table], indices, offsets, per_sample_weights, *one, False)
        parts.append(pooled)
        if weights_grad is not None:
            inputs: tuple = (lookup.result, [table], [], [], None, indices, offsets, per_sample_weights, pooled)
            weights_grad = weights_grad + call("embedding_collection_weights_backward", *inputs, *one, *_NO_RULE)
    return _joined(parts, side_by_side), weights_grad


def _save(ctx: Any, inputs: tuple, rows: list[Tensor]) -> None:
    grad, indices, offsets, per_sample_weights, argmax, _, ctx.dims, *lists, ctx.wanted = inputs
    ctx.lists = tuple(lists)
    ctx.save_for_backward(grad, offsets, per_sample_weights, argmax, indices, *rows)


def dense_setup_context(ctx: Any, inputs: tuple, output: list[Tensor]) -> None:
    """Save what the derivative of ``embedding_collection_dense_backward`` needs."""
    _save(ctx, inputs, [])


def dense_backward(ctx: Any, grads: list[Tensor]) -> tuple:
    """Differentiate ``embedding_collection_dense_backward``."""
    indices, padding = ctx.saved_tensors[4], ctx.lists[4]
    tables = {k: (x, indices, padding[k]) for k, (x, want) in enumerate(zip(grads, ctx.wanted, strict=True)) if want}
    grad_grad, weights_grad = _transposed(ctx, tables)
    return grad_grad, None, None, weights_grad, *(None,) * 10


def sparse_setup_context(ctx: Any, inputs: tuple, output: tuple[list[Tensor], list[Tensor]]) -> None:
    """Save what the derivative of ``embedding_collection_sparse_backward`` needs."""
    ctx.mark_non_differentiable(*output[1])
    _save(ctx, inputs, output[1])


def sparse_backward(ctx: Any, grads: list[Tensor], _rows: Any) -> tuple:
    """Differentiate ``embedding_collection_sparse_backward``: in tables of the rows that occur, and one for padding."""
    indices, *rows = ctx.saved_tensors[4:]
    tables = {}
    for k, (values, own, want) in enumerate(zip(grads, rows, ctx.wanted, strict=True)):
        if want:
            # The row for padding is the first: the number of rows is known only at run time.
            positions = (torch.searchsorted(own, indices) + 1).masked_fill(indices == ctx.lists[4][k], 0)
            tables[k] = torch.cat([values.new_zeros(1, values.shape[1]), values]), positions, 0
    grad_grad, weights_grad = _transposed(ctx, tables)
    return grad_grad, None, None, weights_grad, *(None,) * 10


def weights_setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
    """Save what the derivative of ``embedding_collection_weights_backward`` needs."""
    grad, weights, states, last_steps, history, indices, offsets, per_sample_weights, pooled, *lists = inputs
    ctx.lists, ctx.counts, ctx.behind = tuple(lists[:6]), (len(states), len(last_steps)), history is not None
    # torch takes an empty list for one of tensors, whose gradients are a list too.
    ctx.hyperparameters_grad = None if lists[7] else []
    ctx.save_for_backward(grad, indices, offsets, per_sample_weights, pooled, *weights)


def _weights_composite(
    lists: tuple, grad: Tensor, indices: Tensor, offsets: Tensor, weights: Tensor, pooled: Tensor, tables: list[Tensor]
) -> Tensor:
    """
    Compute ``embedding_collection_weights_backward`` in torch's differentiable operations.

    Each lookup takes all items, most of them as padding.
    """
    dims, total = [table.shape[1] for table in tables], sum(lists[3])
    bag_of_item = torch.repeat_interleave(
        torch.arange(total, device=offsets.device), offsets.diff(), output_size=indices.shape[0]
    )
    result = torch.zeros_like(weights)
    both = zip(_lookups(lists, dims, grad), _lookups(lists, dims, pooled), strict=True)
    for lookup, same in both:
        end = lookup.first_bag + lookup.bags
        rows = tables[lookup.table].shape[0]
        ours = (bag_of_item >= lookup.first_bag) & (bag_of_item < end) & (indices != lists[4][lookup.table])
        ids = torch.where(ours, indices, rows)
        around = (0, 0, lookup.first_bag, total - end)
        result = result + weights_backward_composite(
            pad(lookup.result, around),
            picked_rows(tables[lookup.table], ids, rows),
            weights,
            pad(same.result, around),
            ids,
            offsets,
            lookup.mode,
            rows,
        )
    return result


def weights_backward(ctx: Any, result_grad: Tensor) -> tuple:
    """Differentiate ``embedding_collection_weights_backward``."""
    if ctx.behind:
        raise RuntimeError("embedding_collection_weights_backward: rows that are behind cannot be differentiated twice")
    grad, indices, offsets, per_sample_weights, pooled, *tables = ctx.saved_tensors
    needed = [ctx.needs_input_grad[i] for i in (0, 7, 8)] + list(ctx.needs_input_grad[1])
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        aliases = [x.view_as(x) for x in (grad, per_sample_weights, pooled, *tables)]
        result = _weights_composite(ctx.lists, aliases[0], indices, offsets, aliases[1], aliases[2], aliases[3:])
        grads = partial_derivatives(result, aliases, needed, result_grad, create_graph)
    states, last_steps = ([None] * count for count in ctx.counts)
    of_rule = (None, ctx.hyperparameters_grad, None, None)
    return grads[0], grads[3:], states, last_steps, None, None, None, grads[1], grads[2], *(None,) * 6, *of_rule
