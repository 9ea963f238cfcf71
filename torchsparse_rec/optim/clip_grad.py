"""torch's gradient clipping, for sparse gradients too."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import utils

from ..tables.gradients import coalesced
from ..tables.table import table_if_any

__all__ = ["clip_grad_norm_", "clip_grad_value_"]


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

    Works as :func:`torch.nn.utils.clip_grad_norm_`, which refuses sparse gradients. Rows that occur more than once are
    merged before the norm is taken.

    Args:
        parameters: a parameter, or an iterable of them.
        max_norm: the norm that is not exceeded afterwards.
        norm_type: the p of the norm. Default 2.
        error_if_nonfinite: whether a norm that is no number, or infinite, is an error. Default False.
        foreach: as torch's. Default None.

    Returns:
        The norm before scaling, over all gradients as one vector, without dimensions.

    Raises:
        RuntimeError: the norm is not finite, with ``error_if_nonfinite``; or backward() has already updated a table in
            ``grad_mode="fused"``.

    Source: ``torch.nn.utils.clip_grad_norm_``.

    Example:
        >>> table = torch.nn.Embedding(4, 1, sparse=True)
        >>> (table(torch.tensor([1, 1, 2])) * torch.tensor([[1.0], [2.0], [4.0]])).sum().backward()
        >>> clip_grad_norm_(table.parameters(), max_norm=1.0)
        tensor(5.)
        >>> table.weight.grad.to_dense().flatten()
        tensor([0.0000, 0.6000, 0.8000, 0.0000])
    """
    gradients = _gradients("clip_grad_norm_", parameters)
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
        foreach: as torch's. Default None.

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
    gradients = _gradients("clip_grad_value_", parameters)
    if gradients:
        utils.clip_grad_value_(_holding(gradients), clip_value, foreach)


def _holding(gradients: list[Tensor]) -> list[Any]:
    """Return objects with a ``grad`` each, which is all that torch's functions read of a parameter."""
    return [SimpleNamespace(grad=grad) for grad in gradients]


def _gradients(function: str, parameters: Tensor | Iterable[Tensor]) -> list[Tensor]:
    """
    Return the strided tensors that hold the parameters' gradients.

    A sparse ``.grad`` with repeated rows is replaced by one with merged rows, whose values are returned.
    """
    gradients: list[Tensor] = []
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    tables = [table for parameter in parameters if (table := table_if_any(parameter)) is not None]
    for optimizer in {optimizer for table in tables if (optimizer := table.optimizer) is not None}:
        optimizer.refuse_stepped(f"{function}: gradients are to be clipped", parameters)
    for parameter in parameters:
        grad = parameter.grad
        if grad is None:
            continue
        if grad.layout is torch.sparse_coo:
            if not grad.is_coalesced():
                parameter.grad = grad = coalesced(grad).to(grad.dtype)
            grad = grad._values()
        if grad.numel() > 0:  # torch finds no largest element of an empty tensor
            gradients.append(grad)
    return gradients
