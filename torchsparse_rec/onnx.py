"""
Translations of our operators for ``torch.onnx.export``: ``pip install torchsparse-rec[onnx]``.

A translation has the arguments of its operator. Annotated arguments are known when a graph is made. All others are
values in the graph: ``op`` makes nodes for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ._extras import extra_module
from ._reduction import MAX, PROD, SQRTN, is_divided, is_extreme

__all__ = ["translations"]

# Modules of onnxscript, once translations() has been called.
op: Any = None
ir: Any = None


def translations() -> dict[Callable[..., Any], Callable[..., Any]]:
    """
    Return the translations of lookups and segment reductions to ONNX: to standard operators, of opset 18.

    Every runtime has those operators. Lookups are by ``Embedding``, ``EmbeddingBag`` and the collections, in ``eval()``
    and every gradient mode. Reductions are ``segment_sum``, ``unsorted_segment_sum``, ``sparse_segment_sum`` and their
    kin. A table that grows has no translation, nor have hashes: the error of ``torch.onnx.export`` names their
    operator.

    A model in ONNX checks nothing: a negative id, which is an error in PyTorch, reads some row. Where a maximum or
    minimum is NaN in PyTorch, the runtime's choice counts, and sums are rounded in its order.

    Returns:
        The ``custom_translation_table`` of ``torch.onnx.export(..., dynamo=True)``.

    Raises:
        ImportError: onnxscript is not installed: the extra ``onnx``.

    Example:
        >>> table = torchsparse_rec.nn.Embedding(10, 3).eval()  # doctest: +SKIP
        >>> model = torch.onnx.export(  # doctest: +SKIP
        ...     table, (torch.tensor([1, 2]),), dynamo=True, custom_translation_table=translations()
        ... )
        >>> [node.op_type for node in model.model.graph]  # doctest: +SKIP
        ['Gather']
    """
    global op, ir
    onnxscript = extra_module("onnxscript", "onnx", "torchsparse_rec.onnx")
    op, ir = onnxscript.opset18, onnxscript.ir
    ops = torch.ops.torchsparse_rec
    return {
        ops.embedding.default: _embedding,
        ops.embedding_bag.default: _embedding_bag,
        ops.embedding_collection.default: _embedding_collection,
        ops.segment_reduce.default: _segment_reduce,
        ops.unsorted_segment_reduce.default: _unsorted_segment_reduce,
        ops.sparse_segment_reduce.default: _sparse_segment_reduce,
    }


# ---- Lookups ---------------------------------------------------------------------------------------------------------


def _embedding(weight, indices, padding_idx: int, scale_grad_by_freq: bool, sparse: bool):
    return op.Gather(weight, indices)


def _embedding_bag(
    weight,
    indices,
    offsets,
    per_sample_weights,
    mode: int,
    padding_idx: int,
    scale_grad_by_freq: bool,
    sparse: bool,
):
    ids, bags = _ids_of_offsets(offsets, _length(indices)), _plus(_length(offsets), -1)
    return _pooled(weight, indices, ids, bags, per_sample_weights, mode, padding_idx), _no_argmax()


def _embedding_collection(
    weights: Sequence[Any],
    indices,
    offsets,
    per_sample_weights,
    tables: Sequence[int],
    keys: Sequence[int],
    modes: Sequence[int],
    bags,
    padding_idx: Sequence[int],
    side_by_side: bool,
    sparse: bool,
):
    # Where the bags of each key begin, and end.
    ends = op.CumSum(bags, op.Constant(value_int=0))
    begins = op.Sub(ends, bags)
    ids = None if offsets is None else _ids_of_offsets(offsets, _length(indices))
    results = []
    for table, key, mode in zip(tables, keys, modes, strict=True):
        count, begin, end = (op.Gather(x, op.Constant(value_ints=[key])) for x in (bags, begins, ends))
        if ids is None:
            results.append(op.Gather(weights[table], op.Slice(indices, begin, end)))
            continue
        its = op.Gather(offsets, begin), op.Gather(offsets, end)
        its_ids = op.Sub(op.Slice(ids, *its), begin)
        its_weights = None if per_sample_weights is None else op.Slice(per_sample_weights, *its)
        arguments = (op.Slice(indices, *its), its_ids, count, its_weights, mode, padding_idx[table])
        results.append(_pooled(weights[table], *arguments))
    if not side_by_side:
        results = [op.Reshape(result, op.Constant(value_ints=[-1])) for result in results]
    return op.Concat(*results, axis=int(side_by_side)), _no_argmax()


def _pooled(weight, indices, ids, bags, per_sample_weights, mode: int, padding: int):
    """Pool the rows ``weight[indices]`` by bag: ``ids`` holds the bag of each."""
    if padding >= 0:
        left_out = op.Equal(indices, op.CastLike(op.Constant(value_int=padding), indices))
        ids = op.Where(left_out, bags, ids)
        # An index that is no row may mark entries to leave out.
        indices = op.Where(left_out, op.CastLike(op.Constant(value_int=0), indices), indices)
    dtype = weight.dtype
    rows = _wide(op.Gather(weight, indices), dtype)
    weighs = per_sample_weights is not None
    share = op.Unsqueeze(_wide(per_sample_weights, dtype), op.Constant(value_ints=[1])) if weighs else None
    return op.CastLike(_reduced(rows, dtype, ids, bags, mode, share), weight)


def _no_argmax():
    """Make the second result of lookups, which only gradients need: an empty one."""
    return op.ConstantOfShape(op.Constant(value_ints=[0]), value=ir.tensor([0]))


# ---- Reductions ------------------------------------------------------------------------------------------------------


def _segment_reduce(data, segment_ids, offsets, num_segments, reduction: int):
    if offsets is None:
        return _of_rows(data, data, _long(segment_ids), _segments(segment_ids, num_segments), reduction)
    ids = _ids_of_offsets(offsets, _length(data))
    return _of_rows(data, data, ids, _plus(_length(offsets), -1), reduction)


def _unsorted_segment_reduce(data, segment_ids, num_segments, reduction: int):
    segments = _one(num_segments)
    ids = _long(op.Reshape(segment_ids, op.Constant(value_ints=[-1])))
    shape = op.Concat(op.Shape(ids), op.Shape(data, start=len(segment_ids.shape)), axis=0)
    ids = op.Where(op.Less(ids, op.Constant(value_int=0)), segments, ids)
    return _of_rows(op.Reshape(data, shape, allowzero=1), data, ids, segments, reduction, lowest=True)


def _sparse_segment_reduce(data, indices, segment_ids, num_segments, reduction: int):
    segments = _segments(segment_ids, num_segments)
    return _of_rows(op.Gather(data, indices), data, _long(segment_ids), segments, reduction)


def _of_rows(rows, data, ids, segments, reduction: int, lowest: bool = False):
    """Reduce rows of ``data``, of any shape, by segment."""
    rest = op.Shape(rows, start=1)
    columns = op.ReduceProd(rest, keepdims=1)
    rows = op.Reshape(_wide(rows, data.dtype), op.Concat(op.Shape(ids), columns, axis=0), allowzero=1)
    result = _reduced(rows, data.dtype, ids, segments, reduction, None, lowest)
    return op.CastLike(op.Reshape(result, op.Concat(segments, rest, axis=0), allowzero=1), data)


def _reduced(rows, dtype, ids, segments, reduction: int, share, lowest: bool = False):
    """
    Reduce rows ``[N, D]``, each times its share ``[N, 1]`` or 1, to ``[segments, D]``.

    The segment of rows that are left out is one after the last. ``lowest``: an extreme of no rows is the number that
    never wins, instead of 0.
    """
    accumulator = _accumulator(dtype)
    if reduction == PROD:
        return _scattered(rows, ids, segments, 1, accumulator, "mul")
    if is_extreme(reduction):
        return _extreme(rows, dtype, ids, segments, reduction == MAX, lowest)
    total = _scattered(rows if share is None else op.Mul(rows, share), ids, segments, 0, accumulator, "add")
    if not is_divided(reduction):
        return total
    if share is None:
        share = _column(ids, accumulator)
    divisor = _scattered(op.Mul(share, share) if reduction == SQRTN else share, ids, segments, 0, accumulator, "add")
    divisor = op.Sqrt(divisor) if reduction == SQRTN else divisor
    none = op.Equal(divisor, _number(0, accumulator))
    quotient = op.Div(total, op.Where(none, _number(1, accumulator), divisor))
    return op.Where(none, _number(0, accumulator), quotient)


def _extreme(rows, dtype, ids, segments, largest: bool, lowest: bool):
    floating = dtype.is_floating_point()
    limits = (torch.finfo if floating else torch.iinfo)(_TORCH_DTYPES[dtype.name])
    never = limits.min if largest else limits.max
    start = float("-inf" if largest else "inf") if floating else never
    found = _scattered(rows, ids, segments, start, _accumulator(dtype), "max" if largest else "min")
    counts = _scattered(_column(ids, ir.DataType.INT64), ids, segments, 0, ir.DataType.INT64, "add")
    empty = op.Equal(counts, op.Constant(value_int=0))
    return op.Where(empty, _number(never if lowest else 0, _accumulator(dtype)), found)


def _scattered(rows, ids, segments, start: float, dtype, how: str):
    """Reduce rows ``[N, D]`` by segment, beginning with ``start``."""
    shape = op.Concat(_plus(segments, 1), op.Shape(rows, start=1), axis=0)
    places = op.Expand(op.Unsqueeze(ids, op.Constant(value_ints=[1])), op.Shape(rows))
    joined = op.ScatterElements(op.Expand(_number(start, dtype), shape), places, rows, axis=0, reduction=how)
    return op.Slice(joined, op.Constant(value_ints=[0]), segments)


# ---- Ids and sizes ---------------------------------------------------------------------------------------------------


def _ids_of_offsets(offsets, items):
    """Return the bag of each item: the number of bags that begin at or before it, less one. ``items``: ``[1]``."""
    begins = _long(op.Slice(offsets, op.Constant(value_ints=[1]), op.Constant(value_ints=[-1])))
    marks = op.Expand(op.Constant(value_int=0), _plus(items, 1))
    marks = op.ScatterElements(marks, begins, op.Expand(op.Constant(value_int=1), op.Shape(begins)), reduction="add")
    return op.Slice(op.CumSum(marks, op.Constant(value_int=0)), op.Constant(value_ints=[0]), items)


def _segments(segment_ids, num_segments):
    """Return the number of segments, ``[1]``: one more than the last id, if ``num_segments`` is None."""
    if num_segments is not None:
        return _one(num_segments)
    ids = op.Concat(op.Constant(value_ints=[-1]), _long(segment_ids), axis=0)
    return _plus(op.Gather(ids, op.Constant(value_ints=[-1])), 1)


def _length(x):
    return op.Shape(x, start=0, end=1)


def _one(x):
    return op.Reshape(x, op.Constant(value_ints=[1]))


def _plus(x, number: int):
    return op.Add(x, op.Constant(value_ints=[number]))


# ---- Types -----------------------------------------------------------------------------------------------------------

_HALF = ("FLOAT16", "BFLOAT16")
_TORCH_DTYPES = {
    **{"FLOAT16": torch.float16, "BFLOAT16": torch.bfloat16, "FLOAT": torch.float32, "DOUBLE": torch.float64},
    **{"INT8": torch.int8, "INT16": torch.int16, "INT32": torch.int32, "INT64": torch.int64, "UINT8": torch.uint8},
    **{"UINT16": torch.uint16, "UINT32": torch.uint32, "UINT64": torch.uint64},
}


def _accumulator(dtype):
    """Return the dtype of sums of ``dtype``: float32 for half types, which are rounded once."""
    return ir.DataType.FLOAT if dtype.name in _HALF else dtype


def _wide(x, dtype):
    return op.Cast(x, to=ir.DataType.FLOAT) if dtype.name in _HALF else x


def _long(x):
    return op.Cast(x, to=ir.DataType.INT64)


def _number(number: float, dtype):
    return op.Constant(value=ir.tensor(number, dtype=dtype))


def _column(ids, dtype):
    """Make ones, ``[N, 1]``, for N ids."""
    shape = op.Concat(op.Shape(ids), op.Constant(value_ints=[1]), axis=0)
    return op.Expand(_number(1, dtype), shape)
