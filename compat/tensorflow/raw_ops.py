"""
``tf.raw_ops``: single operators. As in TensorFlow, all arguments are keywords; ``name`` is ignored.

An operator has the shapes, dtypes and errors of the function that its docstring names.

Example:
    >>> SparseSegmentSumWithNumSegments(data=[1.0, 2.0, 3.0], indices=[0, 2], segment_ids=[0, 0], num_segments=2)
    tensor([4., 0.])
    >>> SparseSegmentSumGrad(grad=[1.0, 2.0], indices=[0, 2, 2], segment_ids=[0, 0, 1], output_dim0=3)
    tensor([1., 0., 3.])
    >>> SparseSegmentSumGradV2(grad=[1.0, 2.0], indices=[2, 0, 2], segment_ids=[0, 0, 1], dense_output_dim0=3)
    SparseGradient(output=tensor([1., 3.]), sorted_unique_indices=tensor([0, 2], dtype=torch.int32))
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from ... import ops
from . import _candidates
from ._candidates import AccidentalHits, SampledCandidates
from ._raw_hash import AsString as AsString
from ._raw_hash import Fingerprint as Fingerprint
from ._raw_hash import SparseCross as SparseCross
from ._raw_hash import SparseCrossHashed as SparseCrossHashed
from ._raw_hash import SparseCrossV2 as SparseCrossV2
from ._raw_hash import StringToHashBucket as StringToHashBucket
from ._raw_hash import StringToHashBucketFast as StringToHashBucketFast
from ._raw_hash import StringToHashBucketStrong as StringToHashBucketStrong
from ._raw_sparse_tensor import RaggedFillEmptyRows as RaggedFillEmptyRows
from ._raw_sparse_tensor import RaggedFillEmptyRowsGrad as RaggedFillEmptyRowsGrad
from ._raw_sparse_tensor import SparseFillEmptyRows as SparseFillEmptyRows
from ._raw_sparse_tensor import SparseFillEmptyRowsGrad as SparseFillEmptyRowsGrad
from ._raw_sparse_tensor import SparseReorder as SparseReorder
from ._raw_sparse_tensor import SparseReshape as SparseReshape
from ._raw_sparse_tensor import SparseToDense as SparseToDense
from ._segment import segment_reduce, unsorted_segment_reduce
from ._sparse_segment import segment_grad, segment_grad_v2, sparse_segment_reduce
from ._unique import Unique as _Unique
from ._unique import UniqueWithCounts as _UniqueWithCounts
from ._unique import unique, unique_along, unique_with_counts
from .arguments import as_tensor

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


class SparseGradient(NamedTuple):
    """The result of the ``GradV2`` operators."""

    #: ``[U, ...]``, the rows of the gradient that have entries.
    output: Tensor
    #: ``[U]``, their ids, in the dtype of ``indices``.
    sorted_unique_indices: Tensor


def _operator(
    name: str, function: Callable[Concatenate[str, _Arguments], _Result], reduction: str
) -> Callable[_Arguments, _Result]:
    """Make the operator of a name: a function of a reduction and arguments, for one reduction."""

    def operator(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        return function(reduction, *args, **kwargs)

    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())[1:]
    operator.__name__ = operator.__qualname__ = name
    operator.__doc__ = (function.__doc__ or "").format(reduction=reduction, forward=name.partition("Grad")[0])
    vars(operator)["__signature__"] = signature.replace(parameters=parameters)
    return operator


# ---- Segments -------------------------------------------------------------------------------------------------------


def _segment(reduction: str, /, *, data: Any, segment_ids: Any, name: str | None = None) -> Tensor:
    """Compute :func:`.math.segment_{reduction}`."""
    return segment_reduce(reduction, data, segment_ids)


def _unsorted_segment(
    reduction: str, /, *, data: Any, segment_ids: Any, num_segments: Any, name: str | None = None
) -> Tensor:
    """Compute :func:`.math.unsorted_segment_{reduction}`."""
    return unsorted_segment_reduce(reduction, data, segment_ids, num_segments)


SegmentSum = _operator("SegmentSum", _segment, "sum")
SegmentMean = _operator("SegmentMean", _segment, "mean")
SegmentMax = _operator("SegmentMax", _segment, "max")
SegmentMin = _operator("SegmentMin", _segment, "min")
SegmentProd = _operator("SegmentProd", _segment, "prod")
UnsortedSegmentSum = _operator("UnsortedSegmentSum", _unsorted_segment, "sum")
UnsortedSegmentMax = _operator("UnsortedSegmentMax", _unsorted_segment, "max")
UnsortedSegmentMin = _operator("UnsortedSegmentMin", _unsorted_segment, "min")
UnsortedSegmentProd = _operator("UnsortedSegmentProd", _unsorted_segment, "prod")


# ---- Sparse segments ------------------------------------------------------------------------------------------------


def _sparse_segment(
    reduction: str,
    /,
    *,
    data: Any,
    indices: Any,
    segment_ids: Any,
    sparse_gradient: bool = False,
    name: str | None = None,
) -> Tensor:
    """Compute :func:`.sparse.segment_{reduction}` with the last segment id + 1 rows."""
    return sparse_segment_reduce(reduction, data, indices, segment_ids, None, sparse_gradient)


def _sparse_segment_with_num_segments(
    reduction: str,
    /,
    *,
    data: Any,
    indices: Any,
    segment_ids: Any,
    num_segments: Any,
    sparse_gradient: bool = False,
    name: str | None = None,
) -> Tensor:
    """Compute :func:`.sparse.segment_{reduction}` with ``num_segments`` rows."""
    return sparse_segment_reduce(reduction, data, indices, segment_ids, num_segments, sparse_gradient)


def _sparse_segment_grad(
    reduction: str, /, *, grad: Any, indices: Any, segment_ids: Any, output_dim0: Any, name: str | None = None
) -> Tensor:
    """Return the gradient of :func:`{forward}`, ``[output_dim0, ...]``; ``segment_ids`` need not be sorted."""
    return segment_grad(reduction, grad, indices, segment_ids, "output_dim0", output_dim0)


def _sparse_segment_grad_v2(
    reduction: str, /, *, grad: Any, indices: Any, segment_ids: Any, dense_output_dim0: Any, name: str | None = None
) -> SparseGradient:
    """Return the gradient of :func:`{forward}`: the rows that have entries, and their sorted ids."""
    return SparseGradient(
        *segment_grad_v2(reduction, grad, indices, segment_ids, "dense_output_dim0", dense_output_dim0)
    )


SparseSegmentSum = _operator("SparseSegmentSum", _sparse_segment, "sum")
SparseSegmentMean = _operator("SparseSegmentMean", _sparse_segment, "mean")
SparseSegmentSqrtN = _operator("SparseSegmentSqrtN", _sparse_segment, "sqrt_n")
SparseSegmentSumWithNumSegments = _operator("SparseSegmentSumWithNumSegments", _sparse_segment_with_num_segments, "sum")
SparseSegmentMeanWithNumSegments = _operator(
    "SparseSegmentMeanWithNumSegments", _sparse_segment_with_num_segments, "mean"
)
SparseSegmentSqrtNWithNumSegments = _operator(
    "SparseSegmentSqrtNWithNumSegments", _sparse_segment_with_num_segments, "sqrt_n"
)
SparseSegmentSumGrad = _operator("SparseSegmentSumGrad", _sparse_segment_grad, "sum")
SparseSegmentMeanGrad = _operator("SparseSegmentMeanGrad", _sparse_segment_grad, "mean")
SparseSegmentSqrtNGrad = _operator("SparseSegmentSqrtNGrad", _sparse_segment_grad, "sqrt_n")
SparseSegmentSumGradV2 = _operator("SparseSegmentSumGradV2", _sparse_segment_grad_v2, "sum")
SparseSegmentMeanGradV2 = _operator("SparseSegmentMeanGradV2", _sparse_segment_grad_v2, "mean")
SparseSegmentSqrtNGradV2 = _operator("SparseSegmentSqrtNGradV2", _sparse_segment_grad_v2, "sqrt_n")


# ---- Distinct values ------------------------------------------------------------------------------------------------


def Unique(*, x: Any, out_idx: torch.dtype = torch.int32, name: str | None = None) -> _Unique:
    """Compute :func:`torchsparse_rec.compat.tensorflow.unique`."""
    return unique(x, out_idx)


def UniqueWithCounts(*, x: Any, out_idx: torch.dtype = torch.int32, name: str | None = None) -> _UniqueWithCounts:
    """Compute :func:`torchsparse_rec.compat.tensorflow.unique_with_counts`."""
    return unique_with_counts(x, out_idx)


def UniqueV2(*, x: Any, axis: Any, out_idx: torch.dtype = torch.int32, name: str | None = None) -> _Unique:
    """
    Return the distinct slices of ``x`` along an axis, in order of first appearance.

    Args:
        x: a tensor of any rank, or of rank 1 without an axis; dtypes as of
            :func:`torchsparse_rec.compat.tensorflow.unique`. A slice with a NaN equals no other.
        axis: a vector of int32 or int64: ``[]`` for no axis, or ``[axis]``, which may be negative.
        out_idx: dtype of ``idx``: torch.int32 or torch.int64.
        name: the name, ignored.

    Raises:
        ValueError: for another ``axis``, an ``axis`` that ``x`` does not have, and other dtypes.

    Example:
        >>> UniqueV2(x=torch.tensor([[1, 2], [3, 4], [1, 2]]), axis=[0])
        Unique(y=tensor([[1, 2],
                [3, 4]]), idx=tensor([0, 1, 0], dtype=torch.int32))
    """
    return _Unique(*unique_along(x, axis, out_idx)[:2])


def UniqueWithCountsV2(
    *, x: Any, axis: Any, out_idx: torch.dtype = torch.int32, name: str | None = None
) -> _UniqueWithCounts:
    """
    Compute :func:`UniqueV2`, and count how often each slice occurs.

    Example:
        >>> UniqueWithCountsV2(x=torch.tensor([[1, 1], [3, 3]]), axis=[-1]).count
        tensor([2], dtype=torch.int32)
    """
    return _UniqueWithCounts(*unique_along(x, axis, out_idx))


# ---- Buckets ---------------------------------------------------------------------------------------------------------

_BUCKETIZED = (torch.int32, torch.int64, torch.float32, torch.float64)


def Bucketize(*, input: Any, boundaries: Any, name: str | None = None) -> Tensor:
    """
    Return for each number how many boundaries are not above it; NaN falls into the last bucket.

    Args:
        input: numbers of any shape; int32, int64, float32 or float64. As in TensorFlow, integers are compared as
            float32.
        boundaries: a list of numbers, ascending, kept as float32.
        name: the name, ignored.

    Returns:
        The shape of ``input``, int32.

    Raises:
        TypeError: for boundaries that are not a list of numbers.
        ValueError: for boundaries that are not ascending or not numbers, and other dtypes.

    Example:
        >>> Bucketize(input=[-5, 3, 10, 1000], boundaries=[0, 10, 100])
        tensor([0, 1, 2, 3], dtype=torch.int32)
    """
    x = as_tensor("input", input)
    if x.dtype not in _BUCKETIZED:
        raise ValueError(f"input must be int32, int64, float32 or float64, got {x.dtype}")
    if not isinstance(boundaries, (list, tuple)):
        raise TypeError(f"boundaries must be a list of numbers, got {type(boundaries).__name__}")
    limits = torch.tensor([float(boundary) for boundary in boundaries], dtype=torch.float32)
    if limits.isnan().any():
        raise ValueError(f"boundaries must be numbers, got {list(boundaries)}")
    descents = (limits.diff() < 0).nonzero()
    if descents.numel() > 0:
        position = int(descents[0]) + 1
        raise ValueError(
            f"boundaries must be ascending, got {boundaries[position - 1]} followed by {boundaries[position]} at "
            f"position {position}"
        )
    return ops.bucketize(x, limits.to(x.device)).to(torch.int32)


# ---- Candidates ------------------------------------------------------------------------------------------------------


def _sampler(
    kind: str,
    /,
    *,
    true_classes: Any,
    num_true: int,
    num_sampled: int,
    unique: bool,
    range_max: int,
    seed: int = 0,
    seed2: int = 0,
    name: str | None = None,
) -> SampledCandidates:
    """Compute :func:`.random.{reduction}_candidate_sampler` with both seeds given; two zeros are none."""
    return _candidates.drawn(
        kind, true_classes, num_true, num_sampled, unique, _candidates.Seeds(seed, seed2), range_max
    )


UniformCandidateSampler = _operator("UniformCandidateSampler", _sampler, "uniform")
LogUniformCandidateSampler = _operator("LogUniformCandidateSampler", _sampler, "log_uniform")
LearnedUnigramCandidateSampler = _operator("LearnedUnigramCandidateSampler", _sampler, "learned_unigram")


def FixedUnigramCandidateSampler(
    *,
    true_classes: Any,
    num_true: int,
    num_sampled: int,
    unique: bool,
    range_max: int,
    vocab_file: str = "",
    distortion: float = 1.0,
    num_reserved_ids: int = 0,
    num_shards: int = 1,
    shard: int = 0,
    unigrams: Sequence[float] = (),
    seed: int = 0,
    seed2: int = 0,
    name: str | None = None,
) -> SampledCandidates:
    """Compute :func:`.random.fixed_unigram_candidate_sampler` with both seeds given; two zeros are none."""
    weights = (vocab_file, distortion, num_reserved_ids, num_shards, shard, tuple(unigrams))
    seeds = _candidates.Seeds(seed, seed2)
    return _candidates.drawn("fixed_unigram", true_classes, num_true, num_sampled, unique, seeds, range_max, *weights)


def AllCandidateSampler(
    *,
    true_classes: Any,
    num_true: int,
    num_sampled: int,
    unique: bool,
    seed: int = 0,
    seed2: int = 0,
    name: str | None = None,
) -> SampledCandidates:
    """Compute :func:`.random.all_candidate_sampler`."""
    return _candidates.all_ids(true_classes, num_true, num_sampled)


def ComputeAccidentalHits(
    *,
    true_classes: Any,
    sampled_candidates: Any,
    num_true: int,
    seed: int = 0,
    seed2: int = 0,
    name: str | None = None,
) -> AccidentalHits:
    """Compute :func:`.nn.compute_accidental_hits`."""
    return _candidates.accidental_hits(true_classes, sampled_candidates, num_true)
