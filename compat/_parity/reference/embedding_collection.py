"""Slow, obvious references of the operators on collections of tables."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import embedding
from .embedding import EXTREMES
from .numbers import accumulator
from .row_optimizer import row_optimizer_make_current_, row_optimizer_update_


class _Lookup(NamedTuple):
    table: int
    mode: int
    padding: int
    begin: int  # the lookup's ids are indices[begin:end]
    end: int
    offsets: Tensor  # where its bags begin, counted from ``begin``


def _lookups(indices: Tensor, offsets: Tensor | None, lists: tuple) -> Iterator[_Lookup]:
    tables, keys, modes, bags, padding_idx = lists[:5]
    starts = torch.arange(indices.shape[0] + 1) if offsets is None else offsets
    for table, key, mode in zip(tables, keys, modes, strict=True):
        first = sum(bags[:key])
        mine = starts[first : first + bags[key] + 1]
        yield _Lookup(table, mode, padding_idx[table], int(mine[0]), int(mine[-1]), mine - mine[0])


def _parts(results: Tensor, dims: list[int], lists: tuple) -> list[Tensor]:
    """Return each lookup's part of a tensor that has the shape of the output."""
    tables, keys, _, bags, _, side_by_side = lists
    sizes = [(bags[key], dims[table]) for table, key in zip(tables, keys, strict=True)]
    if side_by_side:
        return list(results.split([columns for _, columns in sizes], 1))
    flat = results.split([rows * columns for rows, columns in sizes])
    return [part.reshape(size) for part, size in zip(flat, sizes, strict=True)]


def _part(x: Tensor | None, lookup: _Lookup) -> Tensor | None:
    return None if x is None else x[lookup.begin : lookup.end]


def _wide(x: Tensor | None) -> Tensor | None:
    return None if x is None else accumulator(x)


def _lookup(
    weights: list[Tensor], indices: Tensor, offsets: Tensor | None, per_sample_weights: Tensor | None, lists: tuple
) -> tuple[Tensor, Tensor]:
    outputs, positions = [], []
    for lookup in _lookups(indices, offsets, lists):
        # Without offsets the row of padding is read like any other.
        is_read = offsets is None and lookup.padding < weights[lookup.table].shape[0]
        pooled, argmax = embedding.embedding_bag(
            weights[lookup.table],
            indices[lookup.begin : lookup.end],
            lookup.offsets,
            _part(per_sample_weights, lookup),
            lookup.mode,
            -1 if is_read else lookup.padding,
            False,
            False,
        )
        outputs.append(pooled)
        positions.append(torch.where(argmax < 0, argmax, argmax + lookup.begin).flatten())
    joined = torch.cat(outputs, 1) if lists[5] else torch.cat([x.flatten() for x in outputs])
    return joined, torch.cat(positions)


def embedding_collection(
    weights: list[Tensor],
    indices: Tensor,
    offsets: Tensor | None,
    per_sample_weights: Tensor | None,
    *lists_and_sparse: Any,
) -> tuple[Tensor, Tensor]:
    return _lookup(weights, indices, offsets, per_sample_weights, lists_and_sparse[:6])


def embedding_collection_current(
    weights: list[Tensor],
    states: list[Tensor],
    last_steps: list[Tensor],
    history: Tensor,
    indices: Tensor,
    offsets: Tensor | None,
    per_sample_weights: Tensor | None,
    *lists_and_rule: Any,
) -> tuple[Tensor, Tensor]:
    lists, (rule, h, step, base) = lists_and_rule[:6], lists_and_rule[6:]
    current = row_optimizer_make_current_(weights, states, last_steps, history, rule, h, step, base, [])
    return _lookup(list(current[: len(weights)]), indices, offsets, per_sample_weights, lists)


def _argmax_parts(argmax: Tensor | None, dims: list[int], indices: Tensor, offsets: Tensor | None, lists: tuple):
    """Yield for each lookup of an extreme its part, with positions in its own ids, and None for the others."""
    begin = 0
    for lookup in _lookups(indices, offsets, lists):
        if lookup.mode not in EXTREMES:
            yield None
            continue
        assert argmax is not None
        rows, columns = lookup.offsets.shape[0] - 1, dims[lookup.table]
        part = argmax[begin : begin + rows * columns].reshape(rows, columns)
        begin += rows * columns
        yield torch.where(part < 0, part, part - lookup.begin)


def _gradients(
    grad: Tensor,
    indices: Tensor,
    offsets: Tensor | None,
    per_sample_weights: Tensor | None,
    argmax: Tensor | None,
    num_embeddings: list[int],
    dims: list[int],
    lists: tuple,
    wanted: list[bool],
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the gradient of every table in the accumulator's dtype, and the rows that occur."""
    wide = accumulator(grad)
    sizes = zip(num_embeddings, dims, wanted, strict=True)
    results = [wide.new_zeros(rows if want else 0, columns) for rows, columns, want in sizes]
    occurring: list[set[int]] = [set() for _ in dims]
    parts = zip(
        _lookups(indices, offsets, lists),
        _parts(wide, dims, lists),
        _argmax_parts(argmax, dims, indices, offsets, lists),
        strict=True,
    )
    for lookup, part, winners in parts:
        if not wanted[lookup.table]:
            continue
        ids = indices[lookup.begin : lookup.end]
        results[lookup.table] += embedding.embedding_dense_backward(
            part,
            ids,
            lookup.offsets,
            _wide(_part(per_sample_weights, lookup)),
            winners,
            num_embeddings[lookup.table],
            lookup.mode,
            lookup.padding,
            False,
        )
        occurring[lookup.table] |= set(ids.tolist()) - {lookup.padding}
    return results, [torch.tensor(sorted(rows), dtype=torch.int64) for rows in occurring]


def embedding_collection_dense_backward(
    grad: Tensor,
    indices: Tensor,
    offsets: Tensor | None,
    per_sample_weights: Tensor | None,
    argmax: Tensor | None,
    num_embeddings: list[int],
    dims: list[int],
    *lists_and_wanted: Any,
) -> tuple[Tensor, ...]:
    *lists, wanted = lists_and_wanted
    inputs = (grad, indices, offsets, per_sample_weights, argmax, num_embeddings, dims)
    return tuple(x.to(grad.dtype) for x in _gradients(*inputs, tuple(lists), wanted)[0])


def embedding_collection_sparse_backward(
    grad: Tensor,
    indices: Tensor,
    offsets: Tensor | None,
    per_sample_weights: Tensor | None,
    argmax: Tensor | None,
    num_embeddings: list[int],
    dims: list[int],
    *lists_and_wanted: Any,
) -> tuple[Tensor, ...]:
    *lists, wanted = lists_and_wanted
    inputs = (grad, indices, offsets, per_sample_weights, argmax, num_embeddings, dims)
    dense, rows = _gradients(*inputs, tuple(lists), wanted)
    return (*(x.to(grad.dtype)[row] for x, row in zip(dense, rows, strict=True)), *rows)


def embedding_collection_coo_backward(grad: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """Return the indices and the values of table after table's COO tensor."""
    results = embedding_collection_sparse_backward(grad, *rest)
    tables = len(results) // 2
    return tuple(x for k in range(tables) for x in (results[tables + k][None], results[k]))


def embedding_collection_weights_backward(
    grad: Tensor,
    weights: list[Tensor],
    states: list[Tensor],
    last_steps: list[Tensor],
    history: Tensor | None,
    indices: Tensor,
    offsets: Tensor,
    per_sample_weights: Tensor,
    output: Tensor,
    *lists_and_rule: Any,
) -> Tensor:
    lists, (rule, h, step, base) = lists_and_rule[:6], lists_and_rule[6:]
    tables = weights
    if history is not None:
        tables = list(
            row_optimizer_make_current_(weights, states, last_steps, history, rule, h, step, base, [])[: len(weights)]
        )
    dims = [table.shape[1] for table in tables]
    result = accumulator(torch.zeros_like(per_sample_weights))
    both = zip(_parts(grad, dims, lists), _parts(output, dims, lists), strict=True)
    for lookup, (mine, pooled) in zip(_lookups(indices, offsets, lists), both, strict=True):
        result[lookup.begin : lookup.end] += embedding.embedding_weights_backward(
            *(accumulator(x) for x in (mine, tables[lookup.table])),
            indices[lookup.begin : lookup.end],
            lookup.offsets,
            accumulator(per_sample_weights[lookup.begin : lookup.end]),
            accumulator(pooled),
            lookup.mode,
            lookup.padding,
        )
    return result.to(per_sample_weights.dtype)


def embedding_collection_update_(
    weights: list[Tensor],
    states: list[Tensor],
    last_steps: list[Tensor],
    history: Tensor | None,
    grad: Tensor,
    indices: Tensor,
    offsets: Tensor | None,
    per_sample_weights: Tensor | None,
    argmax: Tensor | None,
    *lists_and_rule: Any,
) -> tuple[Tensor, ...]:
    lists, (wanted, grad_scale, rule, h, step, base, maximize, seeds) = lists_and_rule[:6], lists_and_rule[6:]
    sizes = [x.shape[0] for x in weights], [x.shape[1] for x in weights]
    dense, rows = _gradients(grad, indices, offsets, per_sample_weights, argmax, *sizes, lists, wanted)
    stepped = [k for k, want in enumerate(wanted) if want]
    results = row_optimizer_update_(
        [weights[k] for k in stepped],
        states,
        last_steps,
        history,
        [rows[k] for k in stepped],
        [dense[k][rows[k]] for k in stepped],
        grad_scale,
        rule,
        h,
        step,
        base,
        maximize,
        seeds,
    )
    updated = dict(zip(stepped, results, strict=False))
    return (*(updated.get(k, x) for k, x in enumerate(weights)), *results[len(stepped) :])


FUNCTIONS = (
    embedding_collection,
    embedding_collection_current,
    embedding_collection_dense_backward,
    embedding_collection_sparse_backward,
    embedding_collection_coo_backward,
    embedding_collection_weights_backward,
    embedding_collection_update_,
)
