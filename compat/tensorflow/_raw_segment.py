"""The operators of ``tf.raw_ops`` that reduce segments of rows without indices."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ._segment import segment_reduce, unsorted_segment_reduce


def SegmentSum(*, data: Any, segment_ids: Any, name: str | None = None) -> Tensor:
    """Compute :func:`.math.segment_sum`."""
    return segment_reduce("sum", data, segment_ids)


def SegmentMean(*, data: Any, segment_ids: Any, name: str | None = None) -> Tensor:
    """Compute :func:`.math.segment_mean`."""
    return segment_reduce("mean", data, segment_ids)


def SegmentMax(*, data: Any, segment_ids: Any, name: str | None = None) -> Tensor:
    """Compute :func:`.math.segment_max`."""
    return segment_reduce("max", data, segment_ids)


def SegmentMin(*, data: Any, segment_ids: Any, name: str | None = None) -> Tensor:
    """Compute :func:`.math.segment_min`."""
    return segment_reduce("min", data, segment_ids)


def SegmentProd(*, data: Any, segment_ids: Any, name: str | None = None) -> Tensor:
    """Compute :func:`.math.segment_prod`."""
    return segment_reduce("prod", data, segment_ids)


def UnsortedSegmentSum(*, data: Any, segment_ids: Any, num_segments: Any, name: str | None = None) -> Tensor:
    """Compute :func:`.math.unsorted_segment_sum`."""
    return unsorted_segment_reduce("sum", data, segment_ids, num_segments)


def UnsortedSegmentMax(*, data: Any, segment_ids: Any, num_segments: Any, name: str | None = None) -> Tensor:
    """Compute :func:`.math.unsorted_segment_max`."""
    return unsorted_segment_reduce("max", data, segment_ids, num_segments)


def UnsortedSegmentMin(*, data: Any, segment_ids: Any, num_segments: Any, name: str | None = None) -> Tensor:
    """Compute :func:`.math.unsorted_segment_min`."""
    return unsorted_segment_reduce("min", data, segment_ids, num_segments)


def UnsortedSegmentProd(*, data: Any, segment_ids: Any, num_segments: Any, name: str | None = None) -> Tensor:
    """Compute :func:`.math.unsorted_segment_prod`."""
    return unsorted_segment_reduce("prod", data, segment_ids, num_segments)
