"""How tables lie in memory, and in which types: what the operators that write them can take."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

__all__ = ["accumulator_dtype", "flat", "has_whole_rows", "writable"]


def flat(x: Tensor) -> Tensor:
    """View ``[V, ...]`` as ``[V, D]``, without a copy."""
    x = x.detach()
    return x if x.dim() == 2 else x.view(x.shape[0], -1)


def has_whole_rows(x: Tensor) -> bool:
    """Say whether operators can write a table: whether each row is contiguous and apart from the others."""
    if x.is_contiguous():
        return True
    return x.dim() == 2 and (x.shape[1] == 1 or x.stride(1) == 1) and x.stride(0) >= x.shape[1]


@contextmanager
def writable(weights: list[Tensor], wanted: Sequence[bool]) -> Iterator[list[Tensor]]:
    """
    Have copies in the place of tables that operators cannot write, such as transposed matrices, and write them back.

    Args:
        weights: the tables.
        wanted: whether to write each of them.

    Raises:
        ValueError: elements of a table share memory, so that no step can write them.
    """
    scattered = [k for k, want in enumerate(wanted) if want and not has_whole_rows(weights[k])]
    copies = list(weights)
    for k in scattered:
        if _shares_elements(weights[k]):
            raise ValueError(
                f"a table of shape {list(weights[k].shape)} has elements that share memory, by strides "
                f"{list(weights[k].stride())}, so that no step can update it: give its module weight.contiguous()"
            )
        copies[k] = weights[k].detach().contiguous()
    yield copies
    for k in scattered:
        weights[k].copy_(copies[k])


def _shares_elements(x: Tensor) -> bool:
    """Say whether two elements may be one in memory."""
    end = 1
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1 and stride < end:
            return True
        end += stride * (size - 1)
    return False


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the optimizer's states for a table of ``dtype``: float64 for float64, otherwise float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
