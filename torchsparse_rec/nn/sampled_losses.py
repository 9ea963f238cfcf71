"""Losses over some of many classes, those that a candidate sampler drew: TensorFlow's sampled softmax and NCE."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..jagged.checks import check_tensor, type_name
from ..ops.candidates import Candidates, last_places
from ..ops.embedding import embedding
from ._lookup import bad_id
from ._refusals import refuse_clipped
from .collection import CollectionTable
from .lookup_sparse import lookup_sparse, part_of

__all__ = ["nce_loss", "sampled_softmax_loss"]

_INDICES = (torch.int32, torch.int64)
# The logit of a class that does not count, also in float64: TensorFlow adds this number to the logit.
_LEFT_OUT = -torch.finfo(torch.float32).max


def sampled_softmax_loss(
    input: Tensor,
    table: torch.nn.Module | Tensor,
    target: Tensor,
    candidates: Candidates,
    *,
    bias: Tensor | None = None,
    remove_accidental_hits: bool = True,
    reduction: Literal["mean", "sum", "none"] = "mean",
) -> Tensor:
    """
    Return the cross entropy of the softmax over a sample's own classes and some others, in the place of all classes.

    The logit of a class is the product of ``input`` and its row, with its bias, less the logarithm of its expected
    count, which makes up for how often it is drawn. The rows of targets and candidates come from one lookup: they alone
    have a gradient, as ``grad_mode`` says, and in ``"fused"`` a step.

    Args:
        input: ``[..., D]``, N samples in all, of floats.
        table: a row for each class: a module that is called with ids, such as :class:`Embedding`,
            :class:`EmbeddingBag`, :class:`EmbeddingVariable`, whose keys are the classes, or a table of a collection.
            Or ``[V, D]``.
        target: the true classes, int32 or int64: ``[...]``, or ``[..., T]`` for T of each sample, with equal shares.
        candidates: the other classes: the result of a sampler, such as :class:`LogUniformSampler`, for ``target``. Its
            counts are constants. They are moved to the device of ``input``, which does not wait.
        bias: ``[V]``, added to the logits, with a dense gradient. A table of keys has none.
        remove_accidental_hits: whether a candidate does not count for the samples whose true class it is. Of an id that
            was drawn several times, that is the last place only, as in TensorFlow. Default True.
        reduction: ``"mean"`` (default), ``"sum"`` or ``"none"``.

    Returns:
        A scalar, or with ``reduction="none"`` the shape of ``input`` without its last dimension: float32, or float64 if
        a floating tensor is. Half types are computed in float32, also within autocast. The mean of no samples is NaN.

    The row ``padding_idx`` of a module is no class. As a candidate it does not count. Targets may be filled up with it:
    the others have its share, and a sample without others has a loss of 0 and is not in the mean.

    A true class that the sampler never draws has an expected count of 0, and the loss is NaN, as in TensorFlow.

    Raises:
        IndexError: a target or a candidate that has no row, named with its position (on CUDA: by a later call).
        TypeError: an argument of another type.
        ValueError: shapes, dtypes or devices that do not fit, or another ``reduction``.

    Source: ``tf.nn.sampled_softmax_loss``; Jean et al., https://arxiv.org/abs/1412.2007.

    Example:
        >>> from torchsparse_rec.nn import Embedding, LogUniformSampler
        >>> items, sampler = Embedding(1000, 8, grad_mode="sparse"), LogUniformSampler(1000, num_sampled=20)
        >>> target = torch.tensor([3, 999, 3])
        >>> loss = sampled_softmax_loss(torch.randn(3, 8), items, target, sampler(target))
        >>> loss.backward()
        >>> len(items.weight.grad.indices()[0]) <= 22
        True
    """
    return _loss(softmax_losses, input, table, target, candidates, bias, remove_accidental_hits, reduction)


def nce_loss(
    input: Tensor,
    table: torch.nn.Module | Tensor,
    target: Tensor,
    candidates: Candidates,
    *,
    bias: Tensor | None = None,
    remove_accidental_hits: bool = False,
    reduction: Literal["mean", "sum", "none"] = "mean",
) -> Tensor:
    """
    Return the noise-contrastive loss: of each logit, whether its class is one of the sample's own or was drawn.

    A sample's loss is the sum of the binary cross entropies of its logits, those of
    :func:`sampled_softmax_loss`. The label of each of T own classes is ``1 / T``, of the others 0.

    Args:
        input: the argument of :func:`sampled_softmax_loss`, as are all that follow.
        table: the argument of :func:`sampled_softmax_loss`.
        target: the argument of :func:`sampled_softmax_loss`.
        candidates: the argument of :func:`sampled_softmax_loss`.
        bias: the argument of :func:`sampled_softmax_loss`.
        remove_accidental_hits: the argument of :func:`sampled_softmax_loss`. Default False: a candidate that is a
            sample's own class counts as noise too.
        reduction: the argument of :func:`sampled_softmax_loss`.

    Returns:
        As :func:`sampled_softmax_loss`.

    Raises:
        IndexError: as :func:`sampled_softmax_loss`.
        TypeError: as :func:`sampled_softmax_loss`.
        ValueError: as :func:`sampled_softmax_loss`.

    Source: ``tf.nn.nce_loss``; Gutmann and Hyvärinen, http://proceedings.mlr.press/v9/gutmann10a.html.

    Example:
        >>> from torchsparse_rec.nn import AllSampler
        >>> target = torch.tensor([0])
        >>> nce_loss(torch.zeros(1, 2), torch.zeros(4, 2), target, AllSampler(4)(target))  # 5 times log(2)
        tensor(3.4657)
    """
    return _loss(nce_losses, input, table, target, candidates, bias, remove_accidental_hits, reduction)


# ---- Losses of samples -----------------------------------------------------------------------------------------------


class Logits(NamedTuple):
    """
    Logits of N samples, for their T own classes and S others.

    Attributes:
        own: ``[N, T]``.
        labels: the share of each own class, ``[N, T]``, or ``[1, T]`` where all samples have the same.
        others: ``[N, S]``.
    """

    own: Tensor
    labels: Tensor
    others: Tensor


def sampled_logits(
    input: Tensor,
    rows: Tensor,
    biases: Tensor | None,
    target: Tensor,
    candidates: Candidates,
    remove_accidental_hits: bool,
    padding_idx: int | None = None,
) -> Logits:
    """
    Compute the logits of a sampled loss.

    Args:
        input: ``[N, D]``.
        rows: ``[N * T + S, D]``: the rows of the targets, then of the candidates.
        biases: ``[N * T + S]``, their biases.
        target: ``[N, T]``.
        candidates: S ids, and counts of the shapes ``[N, T]`` and ``[S]``, on the device of ``input``.
        remove_accidental_hits: whether a candidate does not count for the samples whose target it is.
        padding_idx: an id that is no class.
    """
    count = target.numel()
    left_out = torch.zeros(target.shape[0], len(candidates.ids) + 1, dtype=torch.bool, device=input.device)
    labels = input.new_full((1, target.shape[1]), 1 / target.shape[1])
    if remove_accidental_hits:
        # The last column takes the targets that were not drawn: their place is -1.
        left_out.scatter_(1, last_places(target, candidates.ids) % left_out.shape[1], True)
    left_out = left_out[:, :-1]
    with torch.autocast(input.device.type, enabled=False):
        own = (input.unsqueeze(1) * rows[:count].view(*target.shape, input.shape[1])).sum(2)
        others = input @ rows[count:].T
    if biases is not None:
        own, others = own + biases[:count].view_as(own), others + biases[count:]
    own, others = own - candidates.target_count.log(), others - candidates.count.log()
    if padding_idx is not None:
        is_class = target != padding_idx
        labels = is_class.to(own.dtype) / is_class.sum(1, keepdim=True).clamp_min(1)
        own = own.masked_fill(~is_class, _LEFT_OUT)  # in its place, not added: a padding's expected count may be 0
        left_out = left_out | (candidates.ids == padding_idx)
    if remove_accidental_hits or padding_idx is not None:
        others = others.masked_fill(left_out, _LEFT_OUT)
    return Logits(own, labels, others)


def softmax_losses(logits: Logits) -> Tensor:
    """Return the cross entropy of each sample, ``[N]``."""
    own, labels, others = logits
    return torch.cat([own, others], 1).logsumexp(1) - (labels * own).sum(1)


def nce_losses(logits: Logits) -> Tensor:
    """Return the sum of the binary cross entropies of each sample, ``[N]``."""
    own, labels, others = logits
    of_own = labels * F.logsigmoid(own) + (1 - labels) * F.logsigmoid(-own)
    return -of_own.sum(1) - F.logsigmoid(-others).sum(1)


def _loss(
    losses_of: Callable[[Logits], Tensor],
    input: Tensor,
    table: torch.nn.Module | Tensor,
    target: Tensor,
    candidates: Candidates,
    bias: Tensor | None,
    remove_accidental_hits: bool,
    reduction: str,
) -> Tensor:
    name = "sampled_softmax_loss" if losses_of is softmax_losses else "nce_loss"
    _check(name, input, table, target, candidates, bias, reduction)
    ids, target_count, count = (x.detach().to(input.device, non_blocking=True) for x in candidates)
    targets = target.reshape(-1, 1 if target.shape == input.shape[:-1] else target.shape[-1]).long()
    padding_idx = None if isinstance(table, Tensor) else getattr(table, "padding_idx", None)
    rows, biases = _looked_up(name, table, bias, target, ids)
    dtype = torch.promote_types(torch.promote_types(input.dtype, rows.dtype), torch.float32)
    drawn = Candidates(ids, target_count.view_as(targets).to(dtype), count.to(dtype))
    logits = sampled_logits(
        input.reshape(-1, input.shape[-1]).to(dtype),
        rows.to(dtype),
        None if biases is None else biases.to(dtype),
        targets,
        drawn,
        remove_accidental_hits,
        padding_idx,
    )
    losses = losses_of(logits)
    if padding_idx is None:
        counted = losses.numel()
    else:
        is_left_out = (targets == padding_idx).all(1)
        # Before the division by how many count: where none does, the mean is NaN, and no gradient is.
        losses, counted = losses.masked_fill(is_left_out, 0), (~is_left_out).sum()
    if reduction == "none":
        return losses.view(input.shape[:-1])
    return losses.sum() if reduction == "sum" else losses.sum() / counted


def _looked_up(
    name: str, table: torch.nn.Module | Tensor, bias: Tensor | None, target: Tensor, sampled: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Return the rows and the biases of targets and candidates, each of one lookup."""
    ids = torch.cat([target.reshape(-1).long(), sampled.long()])
    try:
        if isinstance(table, Tensor):
            rows = embedding(table, ids)
        elif isinstance(table, CollectionTable) and not _is_copy(name, table):
            rows = lookup_sparse(table, ids, "sum")  # called by itself it would give a gradient of all rows
        else:
            rows = table(ids.unsqueeze(1) if isinstance(table, torch.nn.EmbeddingBag) else ids)
    except IndexError:
        for argument, given in (("target", target), ("candidates.ids", sampled)):
            if (size := _classes(table)) is not None and (error := bad_id(name, given, size, argument)) is not None:
                raise error from None
        raise
    return rows, None if bias is None else embedding(bias.unsqueeze(1), ids).squeeze(1)


def _is_copy(name: str, table: CollectionTable) -> bool:
    """Say whether ranks have copies of a collection's table; raise ``ValueError`` if each has a part, or clips rows."""
    refuse_clipped(name, "table", table)
    part = part_of(table)
    if part is not None and not part.replicated:
        raise ValueError(
            f"{name}: table must be whole, got a part of {part.name!r}: of a table over ranks there is "
            "nn.table_cross_entropy"
        )
    return part is not None


# ---- Checks ----------------------------------------------------------------------------------------------------------


def _classes(table: torch.nn.Module | Tensor) -> int | None:
    """Return how many rows a table has; None for a table of keys."""
    return table.shape[0] if isinstance(table, Tensor) else getattr(table, "num_embeddings", None)


def _check(
    name: str,
    input: Tensor,
    table: torch.nn.Module | Tensor,
    target: Tensor,
    candidates: Candidates,
    bias: Tensor | None,
    reduction: str,
) -> None:
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"{name}: reduction must be 'mean', 'sum' or 'none', got {reduction!r}")
    for argument, x in (("input", input), ("target", target)):
        check_tensor(name, argument, x)
    if input.dim() == 0 or not input.is_floating_point():
        raise ValueError(f"{name}: input must be [..., D] of floats, got {input.dtype} of shape {tuple(input.shape)}")
    size: Any
    if isinstance(table, Tensor):
        size = table.shape[1] if table.dim() == 2 and table.is_floating_point() else None
        got = f"{table.dtype} of shape {tuple(table.shape)}"
    elif hasattr(table, "embedding_dim"):
        size = table.embedding_dim
        got = f"rows of {size}"
    else:
        raise TypeError(f"{name}: table must be a tensor or an embedding module, got {type_name(table)}")
    if size != input.shape[-1]:
        raise ValueError(f"{name}: table must have rows of {input.shape[-1]} floats, as input has, got {got}")
    shape = tuple(input.shape[:-1])
    of_each = target.shape[-1] if target.dim() == input.dim() else 1
    fits = target.shape[: len(shape)] == shape and target.dim() <= input.dim() and of_each > 0
    if not fits or target.dtype not in _INDICES:
        raise ValueError(
            f"{name}: target must be int32 or int64 of shape {shape}, or with a last dimension of several classes, got "
            f"{target.dtype} of shape {tuple(target.shape)}"
        )
    if not isinstance(candidates, tuple) or len(candidates) != 3:
        raise TypeError(f"{name}: candidates must be what a sampler returns, got {type_name(candidates)}")
    ids, target_count, count = candidates
    for argument, x in (("ids", ids), ("target_count", target_count), ("count", count)):
        check_tensor(name, f"candidates.{argument}", x)
    if ids.dim() != 1 or ids.dtype not in _INDICES:
        raise ValueError(
            f"{name}: candidates.ids must be int32 or int64 of rank 1, got {ids.dtype} of shape {tuple(ids.shape)}"
        )
    for argument, x, wanted in (("target_count", target_count, target.shape), ("count", count, ids.shape)):
        if x.shape != wanted or not x.is_floating_point():
            raise ValueError(
                f"{name}: candidates.{argument} must be floats of shape {tuple(wanted)}, got {x.dtype} of shape "
                f"{tuple(x.shape)}"
            )
    _check_devices_and_bias(name, input, table, target, bias)


def _check_devices_and_bias(
    name: str, input: Tensor, table: torch.nn.Module | Tensor, target: Tensor, bias: Tensor | None
) -> None:
    given = {"target": target}
    if isinstance(table, Tensor):
        given["table"] = table
    if bias is not None:
        check_tensor(name, "bias", bias)
        given["bias"] = bias
        size = _classes(table)
        if size is None:
            raise ValueError(f"{name}: bias must be None for a table of keys, got shape {tuple(bias.shape)}")
        if bias.shape != (size,) or not bias.is_floating_point():
            raise ValueError(
                f"{name}: bias must be [{size}] of floats, a number for each row of table, got {bias.dtype} of shape "
                f"{tuple(bias.shape)}"
            )
    for argument, x in given.items():
        if x.device != input.device:
            raise ValueError(f"{name}: {argument} must be on the device of input, {input.device}, got {x.device}")
