"""The passes of the family ``scores`` over all rows of a table, as operators of Python, and their derivatives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ._in_place import without_result
from .autograd import differentiable, not_differentiable, only_once

__all__ = [
    "Backward",
    "Factors",
    "NO_SECOND_DERIVATIVES",
    "Passes",
    "Samples",
    "backward_fake",
    "backward_of",
    "factors_of",
    "forward_fake",
    "forward_of",
    "loss",
    "targets_of",
    "weights_of",
]

_ops = torch.ops.torchsparse_rec
targets_of = _ops.scores_targets.default

# Scores of a block of rows: 1 MB of float32, which a core's second cache holds; and elements of its rows. Of fewer rows
# than 256 the calls weigh.
_BLOCK_SCORES, _BLOCK_ELEMENTS = 1 << 18, 1 << 20
_LEAST_ROWS = 256

NO_SECOND_DERIVATIVES = "its gradients have no second derivatives: F.cross_entropy of all scores has them"


# ---- Passes over the rows --------------------------------------------------------------------------------------------


class Samples(NamedTuple):
    """What a loss over rows is told of its samples and rows; scores are ``[N, rows of a block]``."""

    input: Tensor  # [N, D], scaled
    targets: Tensor  # [N] int64, -1 of those that do not count
    bias: Tensor | None  # [V]
    weight: Tensor | None  # [V]
    ids: Tensor | None  # the classes that are excluded, by class
    samples: Tensor | None  # of which samples
    label_smoothing: float
    normalize: bool
    block: int | None
    padding: int = -1  # a row that is no class; -1: none
    live: Tensor | None = None  # [V] bool, the rows that are classes; None: all


class Passes:
    """Passes over all rows of a table, block by block: a loss, and its gradients."""

    def __init__(self, of: Samples, rows: int) -> None:
        self.of, self.rows = of, rows
        count, self.dim = of.input.shape
        most = min(_BLOCK_SCORES // max(count, 1), _BLOCK_ELEMENTS // max(self.dim, 1))
        self.size = max(1, min(of.block or max(_LEAST_ROWS, most // 32 * 32), rows))
        self.classes: Tensor | int = max(rows - (of.padding >= 0), 1)
        self.live, self._bias = of.live, of.bias
        if self.live is not None:
            # A table may have grown since the loss: its new rows are no classes.
            self.live = F.pad(self.live, (0, rows - self.live.shape[0]))
            bias = of.input.new_zeros(rows) if of.bias is None else of.bias.to(of.input.dtype)
            self._bias = bias.masked_fill(~self.live, -torch.inf)
            self.classes = self.live.sum().double().clamp_min(1)  # a tensor: CUDA need not wait
        self._scores = of.input.new_empty(count * self.size)

    def blocks(self) -> Iterator[tuple[int, int]]:
        """Yield the first row of each block, and the first one after it."""
        for begin in range(0, self.rows, self.size):
            yield begin, min(begin + self.size, self.rows)

    def forward(self, rows_of: Callable[[int, int], Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return the loss of each sample, and maximum and sum of the exponentials of its scores."""
        of = self.of
        maximum, total, own, shared = self.sums(rows_of)
        lse = maximum + total.log()
        losses = (1 - of.label_smoothing) * weights_of(of.targets, of.weight, torch.float64) * (lse - own)
        if shared is not None:
            mean = torch.mv(of.input.double(), shared.row) + shared.bias
            losses += of.label_smoothing / self.classes * (shared.weight * lse - mean)
        return losses.where(of.targets >= 0, 0).to(of.input.dtype), maximum, total

    def sums(self, rows_of: Callable[[int, int], Tensor]) -> tuple[Tensor, Tensor, Tensor, Shared | None]:
        """Return maximum, sum of exponentials and target's score of each sample, and label smoothing's sums."""
        of = self.of
        count = of.input.shape[0]
        maximum, own = of.input.new_full((count,), -torch.inf), of.input.new_zeros(count)
        total = of.input.new_zeros(count, dtype=torch.float64)
        shared = Shared(self) if of.label_smoothing else None
        for begin, end in self.blocks():
            rows, _ = self.units(rows_of(begin, end), begin, end)
            scores = self.scores(rows, begin, end)
            _ops.scores_lse_.default(scores, of.targets, begin, maximum, total, own)
            if shared is not None:
                shared.add(rows, begin, end)
        return maximum, total, own, shared

    def row_weights(self) -> Tensor:
        """Return the weight of each row as a class, 0 of one that is none."""
        of = self.of
        weights = of.input.new_ones(self.rows) if of.weight is None else of.weight.to(of.input.dtype)
        if self.live is not None:
            weights = weights.where(self.live, 0)
        return weights if of.padding < 0 else weights.index_fill(0, of.targets.new_tensor([of.padding]), 0)

    def units(self, rows: Tensor, begin: int, end: int) -> tuple[Tensor, Tensor | None]:
        """
        Return a block's rows in the dtype of scores, and their norms; they are divided by these to be normalised.

        Rows that are no classes are zeros: 0 times what an erased key has left there may be NaN.
        """
        rows = rows.to(self.of.input.dtype)
        if self.live is not None:
            rows = rows.where(self.live[begin:end, None], 0)
        if not self.of.normalize:
            return rows, None
        norms = rows.norm(dim=1, keepdim=True).clamp_min(1e-12)
        return rows / norms, norms

    def scores(self, rows: Tensor, begin: int, end: int) -> Tensor:
        """Return the scores of a block, which the next one overwrites."""
        of = self.of
        out = self._scores[: of.input.shape[0] * (end - begin)].view(-1, end - begin)
        if self._bias is None:
            torch.mm(of.input, rows.T, out=out)
        else:
            torch.addmm(self._bias[begin:end].to(out.dtype), of.input, rows.T, out=out)
        if of.ids is not None:
            _ops.scores_exclude_.default(out, of.ids, of.samples, begin)
        if begin <= of.padding < end:
            out[:, of.padding - begin] = -torch.inf
        return out


class Shared:
    """What label smoothing gives to all classes alike: sums over them of rows, biases and weights, in float64."""

    def __init__(self, passes: Passes) -> None:
        of = passes.of
        self._weights = passes.row_weights()
        self.row = of.input.new_zeros(passes.dim, dtype=torch.float64)
        self.weight = self._weights.double().sum()
        self.bias = self.row.new_zeros(()) if of.bias is None else of.bias.double() @ self._weights.double()

    def add(self, rows: Tensor, begin: int, end: int) -> None:
        """Add a block's rows."""
        self.row += self._weights[begin:end] @ rows

    def of_block(self, begin: int, end: int) -> Tensor:
        """Return the weights of a block's classes."""
        return self._weights[begin:end]


class Factors(NamedTuple):
    """What the gradients of N samples are made of, beside their scores."""

    maximum: Tensor  # [N]
    exponentials: Tensor  # [N], the factor of exp(score - maximum)
    own: Tensor  # [N], what the target's score adds
    # What label smoothing subtracts.
    every: Tensor | None = None  # [N] float64, from an input: times shared.row
    every_input: Tensor | None = None  # [D], from a row: times its weight
    every_sum: Tensor | None = None  # [], from a bias: times the row's weight


def factors_of(passes: Passes, grad: Tensor, maximum: Tensor, total: Tensor) -> Factors:
    """Return the factors of the losses that :meth:`Passes.forward` returns, whose gradient is ``grad``."""
    of = passes.of
    counts = of.targets >= 0
    grad = grad.double().where(counts, 0)
    own = grad * (1 - of.label_smoothing) * weights_of(of.targets, of.weight, torch.float64)
    exponentials, every = own, None
    if of.label_smoothing:
        every = grad * (of.label_smoothing / passes.classes)
        exponentials = own + every * passes.row_weights().double().sum()
    exponentials = (exponentials / total).where(counts, 0)
    factors = Factors(maximum, exponentials.to(of.input.dtype), -own.to(of.input.dtype))
    if every is None:
        return factors
    return factors._replace(every=every, every_input=every.to(of.input.dtype) @ of.input, every_sum=every.sum())


class Backward:
    """The gradients of a loss: each block's scores are computed again."""

    def __init__(self, passes: Passes, factors: Factors, wants_input: bool, wants_bias: bool) -> None:
        of = passes.of
        self._passes, self._factors, self.size = passes, factors, passes.size
        self._shared = None if factors.every_input is None else Shared(passes)
        self._input_grad = of.input.new_zeros(of.input.shape, dtype=torch.float64) if wants_input else None
        self._part = torch.empty_like(of.input) if wants_input else None
        self._bias_grad = torch.empty_like(of.bias) if wants_bias and of.bias is not None else None

    def blocks(self) -> Iterator[tuple[int, int]]:
        """Yield the first row of each block, and the first one after it."""
        return self._passes.blocks()

    def block(self, raw: Tensor, begin: int, end: int, rows_grad: Tensor | None) -> None:
        """Do a block's part of the gradients of input and bias; write that of its rows, if it is wanted."""
        passes, of, factors, shared = self._passes, self._passes.of, self._factors, self._shared
        rows, norms = passes.units(raw, begin, end)
        shares = passes.scores(rows, begin, end)
        _ops.scores_softmax_.default(shares, factors.maximum, of.targets, begin, factors.exponentials, factors.own)
        weights = None if shared is None else shared.of_block(begin, end)
        if self._input_grad is not None:
            self._input_grad += torch.mm(shares, rows, out=self._part)
            if shared is not None and factors.every is not None:
                shared.add(rows, begin, end)
        if self._bias_grad is not None:
            grad = shares.sum(0)
            if weights is not None and factors.every_sum is not None:
                grad -= factors.every_sum.to(grad.dtype) * weights
            self._bias_grad[begin:end] = grad
        if rows_grad is not None:
            grad = torch.mm(shares.T, of.input, out=rows_grad if rows_grad.dtype == shares.dtype else None)
            if weights is not None and factors.every_input is not None:
                grad -= torch.outer(weights, factors.every_input)
            if norms is not None:
                grad.sub_((grad * rows).sum(1, keepdim=True) * rows).div_(norms)
            if grad is not rows_grad:
                rows_grad.copy_(grad)

    def gradients(self) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients of input and bias that are wanted, once all blocks are done."""
        input_grad = self._input_grad
        if input_grad is not None:
            if self._shared is not None and self._factors.every is not None:
                input_grad -= torch.outer(self._factors.every, self._shared.row)
            input_grad = input_grad.to(self._passes.of.input.dtype)
        return input_grad, self._bias_grad


def weights_of(targets: Tensor, weight: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the weight of each sample's target, 0 of samples that do not count: ``[N]``."""
    counts = targets >= 0
    return counts.to(dtype) if weight is None else weight[targets.clamp_min(0)].to(dtype).where(counts, 0)


# ---- Operators -------------------------------------------------------------------------------------------------------

# In a library of their own: these operators are Python, of the kernels and torch's products.
_library = torch.library.Library("torchsparse_rec_scores", "DEF")
_SAMPLES = (
    "Tensor input, Tensor rows, Tensor targets, Tensor? bias, Tensor? weight, Tensor? ids, Tensor? samples,"
    " float label_smoothing, bool normalize, SymInt? block, int padding, Tensor? live"
)
_library.define(f"loss({_SAMPLES}) -> (Tensor losses, Tensor maximum, Tensor sum)")
_library.define(
    f"loss_backward(Tensor grad, Tensor maximum, Tensor sum, {_SAMPLES}, bool[] wanted)"
    " -> (Tensor input_grad, Tensor rows_grad, Tensor bias_grad)"
)


def _given(input: Tensor, rows: Tensor, *rest: Any) -> tuple[Passes, Tensor]:
    of = Samples(input.contiguous(), *rest)
    if of.live is not None:  # autograd wants a gradient of the rows that a table had before it grew
        rows = rows[: of.live.shape[0]]
    return Passes(of, rows.shape[0]), rows


def forward_of(passes: Passes, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return what :meth:`Passes.forward` does, of the rows of a tensor."""
    with torch.autocast(rows.device.type, enabled=False):
        return passes.forward(lambda begin, end: rows[begin:end])


def backward_of(
    passes: Passes, rows: Tensor, factors: Callable[[Passes], Factors], wanted: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of input, rows and bias, each empty where it is not wanted."""
    input_wanted, rows_wanted, bias_wanted = wanted
    rows_grad = torch.empty_like(rows, memory_format=torch.contiguous_format) if rows_wanted else None
    with torch.autocast(rows.device.type, enabled=False):
        backward = Backward(passes, factors(passes), input_wanted, bias_wanted)
        for begin, end in passes.blocks():
            backward.block(rows[begin:end], begin, end, None if rows_grad is None else rows_grad[begin:end])
        input_grad, bias_grad = backward.gradients()
    results = [(passes.of.input, input_grad), (rows, rows_grad), (rows, bias_grad)]
    return tuple(like.new_empty(0) if x is None else x for like, x in results)  # type: ignore[return-value]


def _forward(*of: Any) -> tuple[Tensor, Tensor, Tensor]:
    return forward_of(*_given(*of))


def _backward(grad: Tensor, maximum: Tensor, total: Tensor, *of: Any) -> tuple[Tensor, Tensor, Tensor]:
    *samples, wanted = of
    passes, rows = _given(*samples)
    return backward_of(passes, rows, partial(factors_of, grad=grad, maximum=maximum, total=total), wanted)


def forward_fake(input: Tensor, rows: Tensor, targets: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return the shapes of a loss."""
    count = targets.shape[0]
    return input.new_empty(count), input.new_empty(count), input.new_empty(count, dtype=torch.float64)


def backward_fake(
    grad: Tensor, maximum: Tensor, total: Tensor, input: Tensor, rows: Tensor, targets: Tensor, bias: Any, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the shapes of a loss's gradients."""
    *_, (input_wanted, rows_wanted, bias_wanted) = rest
    return (
        input.new_empty(input.shape if input_wanted else 0),
        rows.new_empty(rows.shape if rows_wanted else 0),
        bias.new_empty(bias.shape) if bias_wanted and bias is not None else rows.new_empty(0),
    )


def _setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
    input, rows, targets, bias, weight, ids, samples, *ctx.options, live = inputs
    _, maximum, total = output
    ctx.mark_non_differentiable(maximum, total)
    ctx.save_for_backward(live, maximum, total, input, rows, targets, bias, weight, ids, samples)


def _registered_backward(ctx: Any, grad: Tensor, _maximum: Any, _sum: Any) -> tuple:
    wanted = [ctx.needs_input_grad[k] for k in (0, 1, 3)]
    live, *saved = ctx.saved_tensors
    grads = _loss_backward(grad, *saved, *ctx.options, live, wanted)
    of_input, of_rows, of_bias = (x if is_wanted else None for x, is_wanted in zip(grads, wanted, strict=True))
    return of_input, of_rows, None, of_bias, *(None,) * 8


for _name, _function, _fake in (
    ("loss", _forward, forward_fake),
    ("loss_backward", _backward, backward_fake),
):
    _library.impl(_name, _function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"torchsparse_rec_scores::{_name}", _fake, lib=_library)


@torch.library.register_fake("torchsparse_rec::scores_targets")
def _(target: Tensor, rows: int, ignore_index: int, excluded: bool) -> Tensor:
    return target.new_empty(target.shape, dtype=torch.int64)


not_differentiable("scores_targets")
without_result("scores_exclude_", "scores_lse_", "scores_softmax_")
_loss_backward = differentiable(
    "torchsparse_rec_scores::loss_backward",
    *only_once("linear_cross_entropy", NO_SECOND_DERIVATIVES),
)
loss = differentiable("torchsparse_rec_scores::loss", _registered_backward, _setup_context)
