"""
The softmax losses of a batch's queries over its candidates: passes over the candidates, block by block.

A candidate with a query's key does not count for it, unless it is the target. One key may be that of half the batch, so
no list of such pairs is made. Queries and candidates come sorted by key: those that a block leaves out are then scores
of few queries in a row, whose keys are compared.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from .._reduction import SUM
from .autograd import differentiable, only_once
from .scores_passes import (
    Passes,
    Samples,
    backward_fake,
    backward_of,
    factors_of,
    forward_fake,
    forward_of,
    targets_of,
)
from .scores_top_k import best_of_passes

__all__ = ["in_batch_losses", "targets_of"]

_ops = torch.ops.torchsparse_rec
# The elements of rows that the gradient of chosen candidates gathers at a time.
_GATHERED = 1 << 20


class _KeyedPasses(Passes):
    """Passes that leave out a sample's rows of the same key, but for its target; keys of both ascend."""

    def __init__(self, of: Samples, keys: Tensor, row_keys: Tensor) -> None:
        super().__init__(of, row_keys.shape[0])
        self._keys, self._row_keys = keys, row_keys

    def scores(self, rows: Tensor, begin: int, end: int) -> Tensor:
        out = super().scores(rows, begin, end)
        keys, first, last = self._row_keys[begin:end], 0, out.shape[0]
        if keys.device.type == "cpu":  # elsewhere it would wait for the device
            first = int(torch.searchsorted(self._keys, keys[:1]))
            last = int(torch.searchsorted(self._keys, keys[-1:], right=True))
        same = self._keys[first:last, None] == keys
        same &= self.of.targets[first:last, None] != torch.arange(begin, end, device=keys.device)
        out[first:last].masked_fill_(same, -torch.inf)
        return out


def _passes(input: Tensor, rows: Tensor, targets: Tensor, bias: Tensor | None, *rest: Tensor | None) -> Passes:
    ids, samples, keys, row_keys = rest
    of = Samples(input.contiguous(), targets, bias, None, ids, samples, 0.0, False, None)
    return Passes(of, rows.shape[0]) if keys is None or row_keys is None else _KeyedPasses(of, keys, row_keys)


# ---- The highest scores alone ----------------------------------------------------------------------------------------


def _hardest(passes: Passes, rows: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss over target and k best others, these rows, and by how much the loss grows with their scores."""
    of = passes.of
    own = (of.input * rows[of.targets].to(of.input.dtype)).sum(1)
    if of.bias is not None:
        own += of.bias[of.targets].to(own.dtype)
    best, found = best_of_passes(passes, lambda begin, end: rows[begin:end], k, excludes_targets=True)
    scores, chosen = torch.cat([own[:, None], best], 1), torch.cat([of.targets[:, None], found], 1)
    shares = scores.softmax(1)
    shares[:, 0] -= 1
    # In the places left, where shares are 0, targets.
    return scores.logsumexp(1) - own, chosen.where(chosen >= 0, of.targets[:, None]), shares


def _hardest_backward(
    passes: Passes, rows: Tensor, grad: Tensor, chosen: Tensor, shares: Tensor, wanted: list[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what :func:`backward_of` does, of the rows that were chosen."""
    input, shares = passes.of.input, shares * grad[:, None]
    input_wanted, rows_wanted, bias_wanted = wanted
    input_grad = torch.empty_like(input) if input_wanted else input.new_empty(0)
    step = max(1, _GATHERED // max(chosen.shape[1] * input.shape[1], 1))
    for begin in range(0, len(input_grad), step):
        part = slice(begin, begin + step)
        input_grad[part] = torch.bmm(shares[part, None], rows[chosen[part]].to(input.dtype))[:, 0]

    def of_chosen(grads: Tensor) -> Tensor:
        """Return for each row the sum of the gradients ``[N, D]`` of the samples that chose it, times their shares."""
        bags = torch.arange(0, chosen.numel() + 1, chosen.shape[1], device=chosen.device)
        of_bags = chosen.flatten(), bags, shares.flatten(), None
        return _ops.embedding_dense_backward.default(grads, *of_bags, rows.shape[0], SUM, -1, False)  # type: ignore[no-any-return]

    rows_grad = of_chosen(input).to(rows.dtype) if rows_wanted else rows.new_empty(0)
    bias_grad = of_chosen(torch.ones_like(input[:, :1]))[:, 0] if bias_wanted else input.new_empty(0)
    return input_grad, rows_grad, bias_grad


# ---- Operators -------------------------------------------------------------------------------------------------------

_library = torch.library.Library("torchsparse_rec_scores", "FRAGMENT")
_SAMPLES = (
    "Tensor input, Tensor rows, Tensor targets, Tensor? bias, Tensor? ids, Tensor? samples, Tensor? keys,"
    " Tensor? row_keys, SymInt? k"
)
_library.define(f"in_batch({_SAMPLES}) -> (Tensor losses, Tensor saved, Tensor also_saved)")
_library.define(
    f"in_batch_backward(Tensor grad, Tensor saved, Tensor also_saved, {_SAMPLES}, bool[] wanted)"
    " -> (Tensor input_grad, Tensor rows_grad, Tensor bias_grad)"
)


def _forward(input: Tensor, rows: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    *others, k = rest
    passes = _passes(input, rows, *others)
    if k is None:
        return forward_of(passes, rows)
    with torch.autocast(rows.device.type, enabled=False):
        return _hardest(passes, rows, k)


def _backward(
    grad: Tensor, saved: Tensor, also_saved: Tensor, input: Tensor, rows: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    *others, k, wanted = rest
    passes = _passes(input, rows, *others)
    if k is None:
        factors = partial(factors_of, grad=grad, maximum=saved, total=also_saved)
        return backward_of(passes, rows, factors, wanted)
    with torch.autocast(rows.device.type, enabled=False):
        return _hardest_backward(passes, rows, grad, saved, also_saved, wanted)


def _forward_fake(input: Tensor, rows: Tensor, targets: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    k = rest[-1]
    if k is None:
        return forward_fake(input, rows, targets)
    shape = (targets.shape[0], k + 1)
    return input.new_empty(shape[0]), targets.new_empty(shape), input.new_empty(shape)


def _setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
    *tensors, ctx.k = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*output[1:], *tensors)


def _gradients(ctx: Any, grad: Tensor, *_: Any) -> tuple:
    wanted = [ctx.needs_input_grad[k] for k in (0, 1, 3)]
    grads = _in_batch_backward(grad, *ctx.saved_tensors, ctx.k, wanted)
    of_input, of_rows, of_bias = (x if is_wanted else None for x, is_wanted in zip(grads, wanted, strict=True))
    return of_input, of_rows, None, of_bias, *(None,) * 5


for _name, _function, _fake in (
    ("in_batch", _forward, _forward_fake),
    ("in_batch_backward", _backward, backward_fake),
):
    _library.impl(_name, _function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"torchsparse_rec_scores::{_name}", _fake, lib=_library)
_in_batch_backward = differentiable(
    "torchsparse_rec_scores::in_batch_backward",
    *only_once("in_batch_softmax_loss", "its gradients have no second derivatives: those of all scores have them"),
)
_in_batch = differentiable("torchsparse_rec_scores::in_batch", _gradients, _setup_context)


def in_batch_losses(
    input: Tensor,
    rows: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    excluded: tuple[Tensor, Tensor] | tuple[None, None],
    keys: tuple[Tensor, Tensor] | tuple[None, None],
    k: int | None,
) -> Tensor:
    """
    Return the loss of each sample, ``[N]``. Nothing is checked.

    Args:
        input: ``[N, D]``, in the dtype of scores.
        rows: ``[M, D]``.
        targets: ``[N]`` int64, rows that ascend.
        bias: ``[M]``, added to the scores.
        excluded: rows that do not count, which ascend, and for which samples.
        keys: those of samples and of rows, which both ascend: rows of a sample's key do not count, but for its target.
        k: how many rows count besides the target: those of the highest scores, fewer than M. None: all.
    """
    return _in_batch(input, rows, targets, bias, *excluded, *keys, k)[0]  # type: ignore[no-any-return]
