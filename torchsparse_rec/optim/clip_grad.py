"""torch's gradient clipping, for sparse gradients and for tables over several ranks too."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import utils

from .._torch import has_kernel
from ..tables.gradients import coalesced
from ..tables.part import plain, refuse_norm
from ..tables.table import split_part, table_if_any
from ._in_backward import already_written

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from ..tables.optimizer import TableOptimizer

__all__ = ["clip_grad_norm_", "clip_grad_value_"]

_ATEN = torch.library.Library("aten", "IMPL")


def _norm_of_sparse(
    x: Tensor, ord: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    """Return torch's ``linalg.vector_norm`` of a COO tensor; rows that occur more than once are merged before."""
    refuse_norm(x)
    if dim or keepdim or ord < 0:  # in these the elements that are not stored count by themselves
        return torch.linalg.vector_norm(coalesced(x).to_dense(), ord, dim, keepdim, dtype=dtype)
    values = plain(coalesced(x)._values())
    if not values.numel():  # torch finds no largest element of an empty tensor
        values = values.new_zeros(1)
    return torch.linalg.vector_norm(values if dtype is None else values.to(dtype), ord).to(dtype or x.dtype)


# By this operator torch's clipping, and what trainers make of it, takes the norm of a gradient. torch has none for
# sparse tensors, so nothing that works changes. Should it get one, torch's counts.
for _key in ("SparseCPU", "SparseCUDA"):
    if not has_kernel("aten::linalg_vector_norm", _key):
        _ATEN.impl("linalg_vector_norm", _norm_of_sparse, _key)


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """
    Scale the gradients of parameters, of whatever layout, so that their norm is at most ``max_norm``, in place.

    Works as :func:`torch.nn.utils.clip_grad_norm_`, which takes sparse gradients too once this package is imported.
    Rows that occur more than once are merged before the norm is taken.

    Where tables are split over ranks (:mod:`torchsparse_rec.distributed`), the norm is over all ranks' parts. Dense
    layers and replicated tables, whose gradients all ranks have, count once. All ranks must call it, with the same
    parameters in the same order: each sends its norm to the others, once for every process group.

    Args:
        parameters: a parameter, or an iterable of them.
        max_norm: the norm that is not exceeded afterwards.
        norm_type: the p of the norm. Default 2.
        error_if_nonfinite: whether a norm that is no number, or infinite, is an error. Default False.
        foreach: torch's argument. Default None.

    Returns:
        The norm before scaling, over all gradients as one vector, without dimensions. The same on all ranks.

    Raises:
        RuntimeError: the norm is not finite, with ``error_if_nonfinite``; or backward() has already updated a table in
            ``grad_mode="fused"``. All ranks raise alike.

    Source: ``torch.nn.utils.clip_grad_norm_``.

    Example:
        >>> table = torch.nn.Embedding(4, 1, sparse=True)
        >>> (table(torch.tensor([1, 1, 2])) * torch.tensor([[1.0], [2.0], [4.0]])).sum().backward()
        >>> clip_grad_norm_(table.parameters(), max_norm=1.0)
        tensor(5.)
        >>> table.weight.grad.to_dense().flatten()
        tensor([0.0000, 0.6000, 0.8000, 0.0000])
    """
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    gradients = _gradients(parameters)
    if any(split_part(parameter) is not None for parameter in parameters):
        total = _norm_over_ranks(parameters, norm_type, error_if_nonfinite, foreach)
    else:
        if _has_stepped(parameters):
            raise already_written("clip_grad_norm_: gradients are to be clipped")
        total = utils.get_total_norm(gradients, norm_type, error_if_nonfinite, foreach)
    utils.clip_grads_with_norm_(_holding(gradients), max_norm, total, foreach)
    return total


@torch.no_grad()
def clip_grad_value_(parameters: Tensor | Iterable[Tensor], clip_value: float, foreach: bool | None = None) -> None:
    """
    Clamp the elements of the gradients of parameters, of whatever layout, to ``[-clip_value, clip_value]``, in place.

    Works as :func:`torch.nn.utils.clip_grad_value_`, which refuses sparse gradients. Rows that occur more than once
    are merged first.

    Args:
        parameters: a parameter, or an iterable of them.
        clip_value: the largest absolute value afterwards.
        foreach: torch's argument. Default None.

    Raises:
        RuntimeError: backward() has already updated a table in ``grad_mode="fused"``.

    Source: ``torch.nn.utils.clip_grad_value_``.

    Example:
        >>> table = torch.nn.Embedding(4, 1, sparse=True)
        >>> table(torch.tensor([1, 1, 2])).sum().backward()
        >>> clip_grad_value_(table.parameters(), 1.5)
        >>> table.weight.grad.to_dense().flatten().tolist()
        [0.0, 1.5, 1.0, 0.0]
    """
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    if _has_stepped(parameters):
        raise already_written("clip_grad_value_: gradients are to be clipped")
    gradients = _gradients(parameters)
    if gradients:
        utils.clip_grad_value_(_holding(gradients), clip_value, foreach)


def _holding(gradients: list[Tensor]) -> list[Any]:
    """Return objects with a ``grad`` each, which is all that torch's functions read of a parameter."""
    return [SimpleNamespace(grad=grad) for grad in gradients]


def _norm_over_ranks(
    parameters: list[Tensor], norm_type: float, error_if_nonfinite: bool, foreach: bool | None
) -> Tensor:
    """Return the norm of all ranks' parts and of this rank's whole gradients; raise on all ranks or on none."""
    groups: dict[ProcessGroup | None, list[Tensor]] = {}
    whole: list[Tensor] = []
    for parameter in parameters:
        part = split_part(parameter)
        (whole if part is None else groups.setdefault(part.group, [])).append(parameter)
    stepped = _has_stepped(parameters)
    messages = []
    for group, parts in groups.items():
        norm = utils.get_total_norm(_gradients(parts), norm_type, foreach=foreach)
        # Gathered, not added up: the bits depend on no backend, and every norm_type is the same message.
        mine = torch.tensor([0.0, stepped], dtype=torch.float64, device=parts[0].device)
        mine[0] = norm
        everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
        dist.all_gather(everyone, mine, group=group)
        messages += everyone
    norms, any_stepped = torch.stack(messages).unbind(1)
    # A GPU is waited for only where a table can have been stepped.
    if any(optimizer.in_backward for optimizer in _optimizers(parameters)) and any_stepped.any():
        raise already_written("clip_grad_norm_: gradients are to be clipped")
    here = utils.get_total_norm(_gradients(whole), norm_type, foreach=foreach)
    total = utils.get_total_norm([norms, here.double()], norm_type, error_if_nonfinite)
    return total.to(reduce(torch.promote_types, {p.dtype for p in parameters}, torch.float32))


def _optimizers(parameters: list[Tensor]) -> set[TableOptimizer]:
    tables = [table for parameter in parameters if (table := table_if_any(parameter)) is not None]
    return {optimizer for table in tables if (optimizer := table.optimizer) is not None}


def _has_stepped(parameters: list[Tensor]) -> bool:
    """Say whether a backward has stepped a table, whose gradient can be clipped no more."""
    return any(optimizer.has_stepped(parameters) for optimizer in _optimizers(parameters))


def _gradients(parameters: list[Tensor]) -> list[Tensor]:
    """
    Return the strided tensors that hold the parameters' gradients.

    A sparse ``.grad`` with repeated rows is replaced by one with merged rows, whose values are returned.
    """
    gradients: list[Tensor] = []
    for parameter in parameters:
        grad = parameter.grad
        if grad is None:
            continue
        if grad.layout is torch.sparse_coo:
            if not grad.is_coalesced():
                parameter.grad = grad = coalesced(grad).to(grad.dtype)
            grad = grad._values()
        if grad.numel() > 0:  # torch finds no largest element of an empty tensor
            gradients.append(plain(grad))
    return gradients
