"""Losses over all rows of a fused table, of eager calls: autograd sees a leaf in the place of the table."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .._torch import set_grad_enabled
from ..ops.autograd import final
from ..ops.scores_passes import NO_SECOND_DERIVATIVES, Samples, factors_of
from ._fused import FusedLookups
from .streamed import Deferred

__all__ = ["fused_losses"]


def fused_losses(lookups: FusedLookups, of: tuple, training: bool) -> Tensor:
    """Return the loss of each sample of :class:`Samples`, whose backward updates the table."""
    return _FusedLoss.apply(lookups.leaf, *of, lookups, training)  # type: ignore[no-any-return]


class _FusedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, leaf, *rest):
        input, *options, ctx.lookups, training = rest
        of = Samples(input.contiguous(), *options)
        losses, maximum, total, ctx.before = ctx.lookups.losses(of, training)
        # The context lives as long as the backward can come.
        ctx.number = ctx.lookups.expect(ctx.lookups.tables(), weakref.ref(ctx))
        ctx.options = of[6:10]
        ctx.save_for_backward(*of[:6], of.live, maximum, total)
        return losses

    @staticmethod
    def backward(ctx, grad):
        """Update the table, and return the gradients of input and bias, which have no derivatives."""
        *tensors, live, maximum, total = ctx.saved_tensors
        of = Samples(*tensors, *ctx.options)._replace(live=live)
        wanted = ctx.needs_input_grad[1], ctx.needs_input_grad[3]
        records = torch.is_grad_enabled()
        set_grad_enabled(False)
        try:
            number = ctx.number if ctx.lookups.is_wanted() else None
            loss = Deferred(of, partial(factors_of, grad=grad, maximum=maximum, total=total))
            grads: Any = ctx.lookups.finish_loss(number, ctx.before, loss, wanted)
        finally:
            set_grad_enabled(records)
        refusal = partial(final, "table_cross_entropy", why=NO_SECOND_DERIVATIVES)
        of_input, of_bias = (x if x is None else refusal(x, grad, of.input) for x in grads)
        return None, of_input, None, of_bias, *(None,) * 10
