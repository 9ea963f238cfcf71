"""The exchange of vectors between ranks, and of their gradients back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..nn.plan import Ids
from .ranks import Call, Ranks, known_call

__all__ = ["Asked", "LookUp", "Place", "Sizes", "exchange", "scale_gradient", "start"]

# A module's way to look up some of its tables, given their plan, their numbers, and ids; for keys in tables that grow
# also how often each occurs.
LookUp = Callable[..., Tensor]
# Where a result is among all: its lookup, and the first of its columns.
Place = tuple[int, int]


class Asked(NamedTuple):
    """
    A rank's request to the others in one of the ways in which tables are split.

    ``parts`` travel; ``sent`` has the number of each part's elements for each rank. Headers have ``counts`` of them,
    ``[W, K]`` int64 on the host. ``ids`` are the layout of the results: their bags and, where rows come, the places of
    rows as indices.
    """

    parts: list[Tensor]
    sent: list[list[int]]
    counts: Tensor
    ids: Ids


class Sizes(NamedTuple):
    """
    How many elements of a vector go to each rank, and how many come from each.

    With ``copied`` all ranks have the same vector: each keeps its own one and nothing is sent; gradients go to all.
    """

    sent: Sequence[int]
    came: Sequence[int]
    copied: bool = False


def exchange(
    ranks: Ranks,
    group: dist.ProcessGroup,
    call: Call,
    sizes: Sequence[Sizes],
    parts: Sequence[Tensor],
    anchor: Tensor | None,
    factor: float,
    wire_dtype: torch.dtype | None = None,
) -> list[Tensor]:
    """
    Send vectors, and have their gradients come back.

    Args:
        ranks: the ranks that take part.
        group: their process group for the vectors that are sent forward.
        call: the description of this rank's action.
        sizes: the sizes of each vector.
        parts: the vectors, each with the elements for rank 0, then for rank 1, ...
        anchor: a tensor that requires a gradient, on all ranks or on none: backward sends and receives on each rank,
            also where there is nothing to send. None: there is no backward.
        factor: the number by which gradients are multiplied.
        wire_dtype: the dtype of wider numbers on the way, both ways. None: their own.

    Returns:
        The received vectors, in the order of ranks.
    """
    if ranks.count == 1 and wire_dtype is None:  # nothing travels
        return list(parts)
    if anchor is None:
        return start(ranks, group, call, sizes, parts, wire_dtype)()
    ranks.expect_backward()
    return list(_Exchange.apply(anchor, ranks, group, call, sizes, factor, wire_dtype, *parts))


def _narrow(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return a vector as it travels."""
    return x.to(dtype) if dtype is not None and x.is_floating_point() and x.itemsize > dtype.itemsize else x


def start(
    ranks: Ranks,
    group: dist.ProcessGroup,
    call: Call,
    sizes: Sequence[Sizes],
    parts: Sequence[Tensor],
    wire_dtype: torch.dtype | None = None,
) -> Callable[[], list[Tensor]]:
    """Begin what :func:`exchange` does without a backward; return the function that waits for the vectors."""
    moved = [k for k, size in enumerate(sizes) if not size.copied]
    sent = [_narrow(parts[k], wire_dtype) for k in moved]
    coming = ranks.start(group, call, sent, [sizes[k].sent for k in moved], [sizes[k].came for k in moved])

    def end() -> list[Tensor]:
        result = {k: x.to(parts[k].dtype) for k, x in zip(moved, coming(), strict=True)}
        for k, size in enumerate(sizes):
            if size.copied:
                result[k] = parts[k].split(list(size.sent))[ranks.rank].clone()
        return [result[k] for k in range(len(parts))]

    return end


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        ranks: Ranks,
        group: dist.ProcessGroup,
        call: Call,
        sizes: Sequence[Sizes],
        factor: float,
        wire_dtype: torch.dtype | None,
        *parts: Tensor,
    ) -> Any:
        ctx.ranks, ctx.sizes, ctx.factor, ctx.wire_dtype = ranks, sizes, factor, wire_dtype
        ctx.anchor = (anchor.shape, anchor.dtype)
        ctx.call = known_call(call.module, "gradients", call.mode, call.details)
        ctx.real = [k for k, part in enumerate(parts) if part.is_floating_point()]
        result = start(ranks, group, call, sizes, parts, wire_dtype)()
        result = [x.view_as(x) if x is part else x for x, part in zip(result, parts, strict=True)]
        ctx.mark_non_differentiable(*(x for x in result if not x.is_floating_point()))
        return tuple(result)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Send gradients to where the vectors came from."""
        count = ctx.ranks.count
        parts, sent, came = [], [], []
        for k in ctx.real:
            size, grad = ctx.sizes[k], _narrow(grads[k].reshape(-1), ctx.wire_dtype)
            parts.append(grad.repeat(count) if size.copied else grad)
            sent.append([grad.numel()] * count if size.copied else size.came)
            came.append(size.sent)
        got = ctx.ranks.send_back(ctx.call, parts, sent, came)
        result: list[Tensor | None] = [None] * len(grads)
        for k, grad in zip(ctx.real, got, strict=True):
            grad = grad.to(grads[k].dtype)
            result[k] = grad if ctx.factor == 1 else grad.mul_(ctx.factor)  # what came is nobody else's
        shape, dtype = ctx.anchor
        return torch.zeros(shape, dtype=dtype, device=ctx.ranks.device), *(None,) * 6, *result


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Scale the gradient."""
        return grad * ctx.factor, None


def scale_gradient(x: Tensor, factor: float) -> Tensor:
    """Return ``x``, whose gradient is scaled."""
    return x if factor == 1 or not x.requires_grad else _Scaled.apply(x, factor)  # type: ignore[no-any-return]
