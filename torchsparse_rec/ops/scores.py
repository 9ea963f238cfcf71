"""
Family ``scores``: losses over all rows of a table and its best rows, block by block: all scores are never there.

Contract: csrc/scores.h. Kernels: csrc/cpu/scores.cpp, csrc/cuda/scores.cu. Products are torch's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..jagged import JaggedTensor
from ..jagged.checks import check_tensor
from .scores_checks import check_block, check_factors, floats_of, left_out, wide
from .scores_passes import loss, targets_of, weights_of

__all__ = ["linear_cross_entropy"]


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum", "none"] = "mean",
    label_smoothing: float = 0.0,
    temperature: float = 1.0,
    normalize: bool = False,
    excluded: JaggedTensor | Tensor | None = None,
    block: int | None = None,
) -> Tensor:
    """
    Return ``F.cross_entropy(input @ linear_weight.T + linear_bias, target)`` without ever holding all scores.

    Forward and backward read the rows of ``linear_weight`` block by block. Beside inputs and gradients, memory is that
    of one block's scores.

    Args:
        input: ``[..., D]``, N samples in all, of floats. If one of the floating tensors is float64, all are.
        linear_weight: ``[V, D]``, a row for each class.
        target: ``[...]``, int32 or int64: classes in ``[0, V)``, or ``ignore_index``.
        linear_bias: ``[V]``, added to the scores.
        weight: ``[V]``, the weights of the classes, without a gradient.
        ignore_index: the target of samples that are left out.
        reduction: ``"mean"`` (default), which divides by the sum of the targets' weights, ``"sum"`` or ``"none"``.
        label_smoothing: the part of a target that all classes share alike, in ``[0, 1]``, and 0 where classes are
            excluded. Default 0.
        temperature: the number above 0 that products are divided by, before the bias is added. Default 1.
        normalize: whether samples and rows are divided by their Euclidean norms, of at least 1e-12: a product is then a
            cosine. Default False.
        excluded: the classes that do not count for a sample: a ``JaggedTensor`` of N rows of ids, or ``[N, E]`` int64
            filled up with -1. A sample's target always counts.
        block: the number of rows that are read at a time. The default gives 1 MB of scores, and at least 256 rows.

    Returns:
        A scalar, or with ``reduction="none"`` the shape of ``target``: float32, of float64 inputs float64. Where no
        sample counts, the mean is NaN and its gradients are 0, as torch's.

    Raises:
        IndexError: a target or an excluded class out of range, named with its position, which counts along rows.
        RuntimeError: ``weight`` that requires a gradient.
        TypeError: an argument that is no tensor.
        ValueError: shapes, dtypes or devices that do not fit, or an option out of its range.

    Differentiable in ``input``, ``linear_weight`` and ``linear_bias``, once: second derivatives are refused. Scores of
    half types are float32, also within autocast. Products are torch's: as with ``torch.nn.Linear``, a sample's last
    bits may depend on its batch, the CPU and the number of threads.

    Source: ``torch.nn.functional.linear_cross_entropy``.

    Example:
        >>> rows = torch.eye(3)
        >>> linear_cross_entropy(2 * rows[:2], rows, torch.tensor([0, 2]), reduction="none")
        tensor([0.2395, 2.2395])
    """
    options = Options(weight, ignore_index, reduction, label_smoothing, temperature, normalize, excluded, block)
    return cross_entropy("linear_cross_entropy", input, linear_weight, target, linear_bias, options)


class Options(NamedTuple):
    """The options of a loss over rows, which those of :func:`linear_cross_entropy` are."""

    weight: Tensor | None
    ignore_index: int
    reduction: str
    label_smoothing: float
    temperature: float
    normalize: bool
    excluded: JaggedTensor | Tensor | None
    block: int | None


def cross_entropy(
    function: str,
    input: Tensor,
    rows: Tensor,
    target: Tensor,
    bias: Tensor | None,
    options: Options,
    *,
    names: tuple[str, str] = ("linear_weight", "linear_bias"),
    padding: int = -1,
    losses_of: Callable[..., Tensor] | None = None,
) -> Tensor:
    """
    Return what :func:`linear_cross_entropy` does.

    Args:
        function: the name of the caller, with which errors begin.
        input: the samples.
        rows: the rows. Where ``losses_of`` is given, only their shape, dtype and device count.
        target: the targets.
        bias: the biases.
        options: all other arguments.
        names: those of ``rows`` and ``bias`` in errors.
        padding: a row that is no class, and as a target counts as ignored; -1: none.
        losses_of: a function that returns the loss of each sample, given what ``Samples`` is made of. Default: the
            operator, by ``rows``.
    """
    weight, ignore_index, reduction, label_smoothing, temperature, normalize, excluded, block = options
    check_loss(function, input, rows, target, bias, options, names)
    classes, dtype = rows.shape[0], wide(input.dtype)
    samples = input.reshape(target.numel(), input.shape[-1]).to(dtype)
    if normalize:
        samples = F.normalize(samples, eps=1e-12)
    targets = targets_of(target.reshape(-1), classes, ignore_index, False)
    if padding >= 0:
        targets = targets.where(targets != padding, -1)
    pairs = left_out(function, excluded, targets, classes)
    of = samples / temperature, targets, bias, weight, *pairs, label_smoothing, normalize, block, padding
    losses = loss(of[0], rows, *of[1:], None)[0] if losses_of is None else losses_of(*of)
    if reduction == "none":
        return losses.reshape(target.shape)  # type: ignore[no-any-return]
    if reduction == "sum":
        return losses.sum()  # type: ignore[no-any-return]
    return losses.sum() / weights_of(targets, weight, dtype).sum()  # type: ignore[no-any-return]


# ---- Checks ----------------------------------------------------------------------------------------------------------


def check_loss(
    function: str,
    input: Tensor,
    rows: Tensor,
    target: Tensor,
    bias: Tensor | None,
    options: Options,
    names: tuple[str, str],
) -> None:
    """Raise for arguments of :func:`cross_entropy` that do not fit, but for numbers of rows."""
    weight, _, reduction, label_smoothing, temperature, _, excluded, block = options
    _check_options(function, reduction, label_smoothing, temperature, excluded, block)
    _check_inputs(function, names, input, rows, target, bias, weight)


def _check_options(
    name: str,
    reduction: str,
    label_smoothing: float,
    temperature: float,
    excluded: JaggedTensor | Tensor | None,
    block: int | None,
) -> None:
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"{name}: reduction must be 'mean', 'sum' or 'none', got {reduction!r}")
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"{name}: label_smoothing must be in [0, 1], got {label_smoothing}")
    if label_smoothing > 0 and excluded is not None:
        raise ValueError(
            f"{name}: label_smoothing must be 0 where classes are excluded, as it gives all a share of the target, got "
            f"{label_smoothing}"
        )
    if not 0 < temperature < float("inf"):
        raise ValueError(f"{name}: temperature must be finite and above 0, got {temperature}")
    check_block(name, block)


def _check_inputs(
    name: str,
    names: tuple[str, str],
    input: Tensor,
    rows: Tensor,
    target: Tensor,
    bias: Tensor | None,
    weight: Tensor | None,
) -> None:
    rows_name, bias_name = names
    of_rows = {argument: x for argument, x in ((bias_name, bias), ("weight", weight)) if x is not None}
    given = {"input": input, rows_name: rows, "target": target, **of_rows}
    for argument, x in given.items():
        check_tensor(name, argument, x)
    check_factors(name, "input", input, rows_name, rows)
    dtypes = floats_of(input.dtype)
    floats = " or ".join(str(dtype) for dtype in dtypes)
    if target.shape != input.shape[:-1] or target.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"{name}: target must be int32 or int64 of shape {tuple(input.shape[:-1])}, a class for each sample, "
            f"got {target.dtype} of shape {tuple(target.shape)}"
        )
    for argument, x in of_rows.items():
        if x.shape != rows.shape[:1] or x.dtype not in dtypes:
            raise ValueError(
                f"{name}: {argument} must be [{rows.shape[0]}] of {floats}, a number for each row of {rows_name}, "
                f"got {x.dtype} of shape {tuple(x.shape)}"
            )
    for argument, x in given.items():
        if x.device != input.device:
            raise ValueError(f"{name}: {argument} must be on the device of input, {input.device}, got {x.device}")
    if weight is not None and weight.requires_grad:
        raise RuntimeError(f"{name}: weight must not require a gradient: detach it")
