"""Gradients as TensorFlow's optimizers see them: a tensor, or slices whose indices may repeat."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .... import ops
from ..tensors import IndexedSlices


@dataclass(frozen=True)
class Slices:
    """Some rows of a gradient; slices of one row add up."""

    #: ``[N, ...]``.
    values: Tensor
    #: ``[N]``, int32 or int64.
    indices: Tensor
    #: The number of rows of the parameter.
    num_rows: int
    #: Whether it is known that no index repeats.
    merged: bool = False

    def merge(self) -> Slices:
        """Return each row once, as the sum of its slices."""
        if self.merged:
            return self
        values, indices = ops.deduplicate_rows(self.values, self.indices)
        return Slices(values, indices, self.num_rows, merged=True)


Gradient = Tensor | Slices


def changed(gradient: Gradient, change: Callable[[Tensor], Tensor]) -> Gradient:
    """Apply ``change`` to every slice by itself, or to the tensor."""
    if isinstance(gradient, Tensor):
        return change(gradient)
    return Slices(change(gradient.values), gradient.indices, gradient.num_rows, gradient.merged)


def dense(gradient: Gradient) -> Tensor:
    """Return the tensor that the slices stand for."""
    if isinstance(gradient, Tensor):
        return gradient
    return ops.indexed_slices_to_dense(gradient.values, gradient.indices, gradient.num_rows)


def as_gradient(gradient: Any, parameter: Tensor, position: int, any_float: bool = False) -> Gradient:
    """
    Return the caller's gradient of a parameter, checked: a tensor or slices.

    Args:
        gradient: strided; sparse COO, whose indices may repeat unless it is coalesced; or :class:`.IndexedSlices`.
        parameter: the parameter whose gradient it is.
        position: the place of the parameter in the optimizer, or of the pair in the list; for errors.
        any_float: whether the gradient may have another floating dtype than the parameter.

    Raises:
        ValueError: for another shape, dtype, device or layout.
        IndexError: for a row that the parameter does not have. On CUDA a sparse COO gradient is taken to be valid, as
            torch's own optimizers take it; checking the indices of slices waits for the device.
    """
    name = f"gradient {position}"
    if isinstance(gradient, IndexedSlices):
        values, indices, merged = gradient.values, gradient.indices, False
    elif not isinstance(gradient, Tensor):
        raise ValueError(f"{name} must be a tensor or IndexedSlices, got {type(gradient).__name__}")
    elif gradient.layout == torch.sparse_coo:
        if gradient.sparse_dim() != 1 or gradient.shape != parameter.shape:
            raise ValueError(
                f"{name} must have one sparse dimension and the shape {list(parameter.shape)} of its parameter, got "
                f"{gradient.sparse_dim()} and {list(gradient.shape)}"
            )
        values, indices, merged = gradient._values(), gradient._indices()[0], gradient.is_coalesced()
    elif gradient.layout != torch.strided:
        raise ValueError(f"{name} must be strided, sparse COO or IndexedSlices, got {gradient.layout}")
    else:
        _check(name, gradient, parameter, parameter.shape, any_float)
        return gradient.detach()
    if parameter.dim() == 0:
        raise ValueError(f"{name} must be strided, as its parameter is a scalar, got slices")
    if indices.dim() != 1 or indices.dtype not in (torch.int32, torch.int64) or indices.device != parameter.device:
        raise ValueError(
            f"{name} must have int32 or int64 indices of rank 1 on {parameter.device}, got {indices.dtype} of shape "
            f"{list(indices.shape)} on {indices.device}"
        )
    _check(name, values, parameter, (indices.shape[0], *parameter.shape[1:]), any_float)
    if isinstance(gradient, IndexedSlices) or indices.device.type == "cpu":
        _check_indices(name, indices, parameter.shape[0])
    return Slices(values.detach(), indices, parameter.shape[0], merged)


def _check(name: str, values: Tensor, parameter: Tensor, shape: tuple[int, ...], any_float: bool) -> None:
    if values.shape != torch.Size(shape):
        raise ValueError(f"{name} must have the shape {list(shape)}, got {list(values.shape)}")
    fits = values.dtype == parameter.dtype or (any_float and values.is_floating_point())
    if not fits or values.device != parameter.device:
        raise ValueError(
            f"{name} must have the dtype and device of its parameter, {parameter.dtype} on {parameter.device}, got "
            f"{values.dtype} on {values.device}"
        )


def _check_indices(name: str, indices: Tensor, num_rows: int) -> None:
    bad = torch.nonzero((indices < 0) | (indices >= num_rows))
    if bad.shape[0]:
        place = int(bad[0])
        raise IndexError(f"{name}: indices[{place}] must be in [0, {num_rows}), got {int(indices[place])}")
