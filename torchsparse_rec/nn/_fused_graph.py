"""
Fused lookups in compiled graphs: two operators that name the lookups' owner by a number.

What they do to tables happens when the graph runs; the graph itself sees an anchor, ids and results.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ._fused import FusedLookups
from ._plan import Ids, Plan
from ._read import weights_gradient

if TYPE_CHECKING:
    from ._owner import AnchorOwner

_numbers = itertools.count()
_owners: weakref.WeakValueDictionary[int, AnchorOwner] = weakref.WeakValueDictionary()


def register_owner(module: AnchorOwner) -> int:
    """A number by which operators find the module."""
    number = next(_numbers)
    _owners[number] = module
    return number


def _lookups_of(number: int, tables: Sequence[int], plan: Sequence[int]) -> FusedLookups:
    return _owners[number]._fused_lookups(Plan.of_numbers(plan), tuple(tables))


# Not among the library's operators: they are Python, and mean nothing without the module that they name.
_library = torch.library.Library("torchsparse_rec_nn", "DEF")
_library.define(
    "fused_lookup(Tensor anchor, Tensor indices, Tensor? offsets, Tensor? per_sample_weights, SymInt[] bags,"
    " bool side_by_side, int owner, int[] tables, int[] plan, bool recorded)"
    " -> (Tensor output, Tensor argmax, Tensor token)"
)
_library.define(
    "fused_lookup_backward(Tensor grad, Tensor anchor, Tensor indices, Tensor? offsets, Tensor? per_sample_weights,"
    " Tensor? output, Tensor argmax, Tensor token, SymInt[] bags, bool side_by_side, int owner, int[] tables,"
    " int[] plan) -> (Tensor anchor_grad, Tensor weights_grad)"
)


def _look_up(anchor, indices, offsets, per_sample_weights, bags, side_by_side, number, tables, plan, recorded):
    ids = Ids(indices, offsets, per_sample_weights, bags, side_by_side)
    reading, token = _lookups_of(number, tables, plan).start(ids, recorded)
    return *reading, token


def _look_up_fake(anchor, indices, offsets, per_sample_weights, bags, side_by_side, number, tables, plan, recorded):
    made = Plan.of_numbers(plan)
    ids = Ids(indices, offsets, per_sample_weights, bags, side_by_side)
    dtype = _owners[number]._stored_weights()[tables[0]].dtype
    return (
        anchor.new_empty(made.output_shape(ids), dtype=dtype),
        anchor.new_empty(sum(made.argmax_sizes(ids)), dtype=torch.int64),
        torch.empty(1, dtype=torch.int64),
    )


def _backward(grad, anchor, indices, offsets, per_sample_weights, output, argmax, token, bags, side_by_side, *where):
    lookups, ids = _lookups_of(*where), Ids(indices, offsets, per_sample_weights, bags, side_by_side)
    weights_grad = grad.new_empty(0)
    if output is not None:
        weights_grad = weights_gradient(lookups.plan, lookups.tables(), ids, grad, output)
    lookups.finish(token, grad, ids, argmax)
    return torch.zeros_like(anchor), weights_grad


def _backward_fake(grad, anchor, indices, offsets, per_sample_weights, output, *_):
    return torch.empty_like(anchor), grad.new_empty(0) if output is None else torch.empty_like(per_sample_weights)


def _setup_context(ctx, inputs, output):
    anchor, indices, offsets, per_sample_weights, *ctx.where, _ = inputs
    result, argmax, token = output
    ctx.mark_non_differentiable(argmax, token)
    ctx.weighs = per_sample_weights is not None and per_sample_weights.requires_grad
    ctx.save_for_backward(anchor, indices, offsets, per_sample_weights, result if ctx.weighs else None, argmax, token)


def _registered_backward(ctx, grad, _argmax, _token):
    anchor_grad, weights_grad = torch.ops.torchsparse_rec_nn.fused_lookup_backward.default(
        grad, *ctx.saved_tensors, *ctx.where
    )
    return anchor_grad, None, None, weights_grad if ctx.weighs else None, *(None,) * 6


_library.impl("fused_lookup", _look_up, "CompositeExplicitAutograd")
_library.impl("fused_lookup_backward", _backward, "CompositeExplicitAutograd")
torch.library.register_fake("torchsparse_rec_nn::fused_lookup", _look_up_fake, lib=_library)
torch.library.register_fake("torchsparse_rec_nn::fused_lookup_backward", _backward_fake, lib=_library)
torch.library.register_autograd(
    "torchsparse_rec_nn::fused_lookup", _registered_backward, setup_context=_setup_context, lib=_library
)
fused_lookup = torch.ops.torchsparse_rec_nn.fused_lookup.default
