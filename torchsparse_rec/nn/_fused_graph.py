"""
Lookups of tables with stale rows in compiled graphs: operators that name the module of the tables by a number.

They read and write tables when the graph runs; the graph itself sees ids, results and, for fused lookups, a leaf.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from .._torch import as_stored, constant_in_graphs
from .._torch_modules import is_alive
from ..ops.scores_passes import Samples, factors_of, forward_fake
from ._fused import FusedLookups
from ._graph_owners import owner_of
from ._read import TableSet, read, weights_gradient
from .plan import Ids, LookupPlan
from .streamed import Deferred

_calls = itertools.count()


@constant_in_graphs
def number_of_call() -> int:
    """Return a new number for a call in a graph: compilers merge equal calls into one lookup with two backwards."""
    return next(_calls)


def _lookups_of(number: int, tables: Sequence[int], plan: Sequence[int]) -> FusedLookups:
    return owner_of(number)._fused_lookups(LookupPlan.of_numbers(plan), tuple(tables))  # type: ignore[no-any-return]


# In a library of their own: these operators are Python, and mean nothing without the module that they name.
_library = torch.library.Library("torchsparse_rec_nn", "DEF")
# A CUDA graph would replay what their Python did when it was captured.
_define = partial(_library.define, tags=(torch.Tag.cudagraph_unsafe,))
_define(
    "fused_lookup(Tensor leaf, Tensor indices, Tensor? offsets, Tensor? per_sample_weights, SymInt[] bags,"
    " bool side_by_side, int owner, int[] tables, int[] plan, bool recorded, bool training,"
    " int call)"
    " -> (Tensor output, Tensor argmax, Tensor token)"
)
_define(
    "fused_lookup_backward(Tensor grad, Tensor leaf, Tensor indices, Tensor? offsets, Tensor? per_sample_weights,"
    " Tensor? output, Tensor argmax, Tensor token, SymInt[] bags, bool side_by_side, int owner, int[] tables,"
    " int[] plan) -> (Tensor leaf_grad, Tensor weights_grad)"
)


def _implement(name: str, function: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Register an operator's function for all devices, and its fake, which gives shapes."""
    _library.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"torchsparse_rec_nn::{name}", fake, lib=_library)


def _look_up(_leaf, indices, offsets, per_sample_weights, bags, side_by_side, *rest):
    number, tables, plan, recorded, training, _call = rest
    ids = Ids(indices, offsets, per_sample_weights, bags, side_by_side)
    lookups, token = _lookups_of(number, tables, plan), torch.full((1,), -1)
    with as_stored():
        tables = lookups.tables()
        if recorded and training:
            lookups.check(tables)
        reading = read(lookups.plan, tables, ids)
    if recorded:
        token.fill_(lookups.expect(tables, is_alive(token)))
    return *reading, token


def _look_up_fake(_leaf, indices, offsets, per_sample_weights, bags, side_by_side, number, tables, plan, *_):
    reading = _read_fake(indices, offsets, per_sample_weights, bags, side_by_side, number, tables, plan)
    return *reading, torch.empty(1, dtype=torch.int64)


def _backward(grad, leaf, indices, offsets, per_sample_weights, output, argmax, token, bags, side_by_side, *where):
    lookups, ids = _lookups_of(*where), Ids(indices, offsets, per_sample_weights, bags, side_by_side)
    weights_grad, tables = grad.new_empty(0), lookups.tables()
    if output is not None:
        weights_grad = weights_gradient(lookups.plan, tables, ids, grad, output)
    with torch.no_grad():
        lookups.finish(int(token), tables, grad, ids, argmax)
    return torch.zeros_like(leaf), weights_grad


def _backward_fake(grad, leaf, indices, offsets, per_sample_weights, output, *_):
    return torch.empty_like(leaf), grad.new_empty(0) if output is None else torch.empty_like(per_sample_weights)


def _setup_context(ctx, inputs, output):
    leaf, indices, offsets, per_sample_weights, *ctx.where, _recorded, _training, _call = inputs
    result, argmax, token = output
    ctx.mark_non_differentiable(argmax, token)
    ctx.weighs = per_sample_weights is not None and per_sample_weights.requires_grad
    ctx.save_for_backward(leaf, indices, offsets, per_sample_weights, result if ctx.weighs else None, argmax, token)


def _registered_backward(ctx, grad, _argmax, _token):
    leaf_grad, weights_grad = torch.ops.torchsparse_rec_nn.fused_lookup_backward.default(
        grad, *ctx.saved_tensors, *ctx.where
    )
    return leaf_grad, None, None, weights_grad if ctx.weighs else None, *(None,) * 8


_implement("fused_lookup", _look_up, _look_up_fake)
_implement("fused_lookup_backward", _backward, _backward_fake)
torch.library.register_autograd(
    "torchsparse_rec_nn::fused_lookup", _registered_backward, setup_context=_setup_context, lib=_library
)
fused_lookup = torch.ops.torchsparse_rec_nn.fused_lookup.default


# ---- Lookups without a gradient to the tables ------------------------------------------------------------------------

_define(
    "current_lookup(Tensor indices, Tensor? offsets, Tensor? per_sample_weights, SymInt[] bags, bool side_by_side,"
    " int owner, int[] tables, int[] plan) -> (Tensor output, Tensor argmax)"
)
_define(
    "current_lookup_backward(Tensor grad, Tensor indices, Tensor? offsets, Tensor per_sample_weights, Tensor output,"
    " SymInt[] bags, bool side_by_side, int owner, int[] tables, int[] plan) -> Tensor"
)


def _tables_of(number, tables):
    weights = owner_of(number).stored_weights()
    return TableSet([weights[k] for k in tables])


def _read(indices, offsets, per_sample_weights, bags, side_by_side, number, tables, plan):
    ids = Ids(indices, offsets, per_sample_weights, bags, side_by_side)
    with as_stored():
        return tuple(read(LookupPlan.of_numbers(plan), _tables_of(number, tables), ids))


def _read_fake(indices, offsets, per_sample_weights, bags, side_by_side, number, tables, plan):
    made, ids = LookupPlan.of_numbers(plan), Ids(indices, offsets, per_sample_weights, bags, side_by_side)
    dtype = owner_of(number).stored_weights()[tables[0]].dtype
    return (
        indices.new_empty(made.output_shape(ids), dtype=dtype),
        indices.new_empty(sum(made.argmax_sizes(ids)), dtype=torch.int64),
    )


def _read_backward(grad, indices, offsets, per_sample_weights, output, bags, side_by_side, number, tables, plan):
    ids = Ids(indices, offsets, per_sample_weights, bags, side_by_side)
    return weights_gradient(LookupPlan.of_numbers(plan), _tables_of(number, tables), ids, grad, output)


def _read_backward_fake(grad, indices, offsets, per_sample_weights, *_):
    return torch.empty_like(per_sample_weights)


def _read_setup_context(ctx, inputs, output):
    *ids, ctx.bags, ctx.side_by_side, ctx.number, ctx.tables, ctx.plan = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*ids, output[0])


def _read_registered_backward(ctx, grad, _argmax):
    where = (ctx.bags, ctx.side_by_side, ctx.number, ctx.tables, ctx.plan)
    weights_grad = torch.ops.torchsparse_rec_nn.current_lookup_backward.default(grad, *ctx.saved_tensors, *where)
    return None, None, weights_grad, *(None,) * 5


_implement("current_lookup", _read, _read_fake)
_implement("current_lookup_backward", _read_backward, _read_backward_fake)
torch.library.register_autograd(
    "torchsparse_rec_nn::current_lookup", _read_registered_backward, setup_context=_read_setup_context, lib=_library
)
current_lookup = torch.ops.torchsparse_rec_nn.current_lookup.default


# ---- Losses over all rows of a table ---------------------------------------------------------------------------------

_SAMPLES = (
    "Tensor input, Tensor targets, Tensor? bias, Tensor? weight, Tensor? ids, Tensor? samples, float label_smoothing,"
    " bool normalize, SymInt? block, int padding"
)
_define(
    f"fused_loss(Tensor leaf, {_SAMPLES}, bool recorded, bool training, int owner, int call)"
    " -> (Tensor losses, Tensor maximum, Tensor sum, Tensor token)"
)
_define(
    f"fused_loss_backward(Tensor grad, Tensor leaf, Tensor maximum, Tensor sum, Tensor token, {_SAMPLES}, int owner,"
    " bool[] wanted) -> (Tensor leaf_grad, Tensor input_grad, Tensor bias_grad)"
)


def _loss(_leaf, input, *rest):
    *of, recorded, training, number, _call = rest
    lookups = owner_of(number).readers_of((0,))
    losses, maximum, total, before = lookups.losses(Samples(input.contiguous(), *of), recorded and training)
    token = torch.tensor([-1, *before])  # the number of the reader, and the table's version
    if recorded:
        token[0] = lookups.expect(lookups.tables(), is_alive(token))
    return losses, maximum, total, token


def _loss_fake(_leaf, input, targets, *_):
    return *forward_fake(input, input, targets), torch.empty(3, dtype=torch.int64)


def _loss_backward(grad, leaf, maximum, total, token, input, *rest):
    *options, owner, wanted = rest
    reader, *before = token.tolist()
    factors = partial(factors_of, grad=grad, maximum=maximum, total=total)
    loss = Deferred(Samples(input.contiguous(), *options), factors)
    with torch.no_grad():
        grads = owner_of(owner).readers_of((0,)).finish_loss(None if reader < 0 else reader, before, loss, wanted)
    return torch.zeros_like(leaf), *(grad.new_empty(0) if x is None else x for x in grads)


def _loss_backward_fake(grad, leaf, maximum, total, token, input, targets, bias, *rest):
    input_wanted, bias_wanted = rest[-1]
    return (
        torch.empty_like(leaf),
        grad.new_empty(input.shape if input_wanted else 0),
        bias.new_empty(bias.shape) if bias_wanted and bias is not None else grad.new_empty(0),
    )


def _loss_setup_context(ctx, inputs, output):
    leaf, input, targets, bias, weight, ids, samples, *ctx.options, _recorded, _training, ctx.owner, _call = inputs
    _, maximum, total, token = output
    ctx.mark_non_differentiable(maximum, total, token)
    ctx.save_for_backward(leaf, maximum, total, token, input, targets, bias, weight, ids, samples)


def _loss_registered_backward(ctx, grad, *_):
    wanted = [ctx.needs_input_grad[1], ctx.needs_input_grad[3]]
    leaf_grad, *grads = torch.ops.torchsparse_rec_nn.fused_loss_backward.default(
        grad, *ctx.saved_tensors, *ctx.options, ctx.owner, wanted
    )
    input_grad, bias_grad = (x if is_wanted else None for x, is_wanted in zip(grads, wanted, strict=True))
    return leaf_grad, input_grad, None, bias_grad, *(None,) * 11


_implement("fused_loss", _loss, _loss_fake)
_implement("fused_loss_backward", _loss_backward, _loss_backward_fake)
torch.library.register_autograd(
    "torchsparse_rec_nn::fused_loss", _loss_registered_backward, setup_context=_loss_setup_context, lib=_library
)
fused_loss = torch.ops.torchsparse_rec_nn.fused_loss.default
