"""The softmax loss of two towers: a query's candidate among those of the whole batch."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from .._agreed import agreeing
from .._torch import is_seen
from ..jagged import JaggedTensor
from ..jagged.checks import check_tensor, checked_integers
from ..ops.embedding import embedding
from ..ops.scores_checks import ascending, excluded_pairs, floats_of
from ..ops.scores_in_batch import in_batch_losses, targets_of

__all__ = ["in_batch_softmax_loss"]

_NAME = "in_batch_softmax_loss"


def in_batch_softmax_loss(
    query: Tensor,
    candidate: Tensor,
    *,
    ids: Tensor | None = None,
    log_q: Tensor | None = None,
    excluded: JaggedTensor | Tensor | None = None,
    temperature: float = 1.0,
    remove_accidental_hits: bool = True,
    hard_negatives: int | None = None,
    reduction: Literal["mean", "sum", "none"] = "mean",
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """
    Return the cross entropy of each query's own candidate among all candidates, without ever holding all scores.

    Query n's own candidate is candidate n; the others are those of the other queries, and further ones that may follow.
    As in TensorFlow Recommenders, products are divided by the temperature first. Then ``log_q`` is subtracted, then
    candidates are left out, and the hardest ones are chosen last.

    Args:
        query: ``[N, D]``, of floats. If one of ``query`` and ``candidate`` is float64, both are.
        candidate: ``[M, D]``, where M is at least N.
        ids: ``[M]``, integers: what each candidate is. Default: all are different.
        log_q: ``[M]``, of floats: the logarithm of each candidate's probability to be in a batch. It is subtracted from
            all scores, those of own candidates too, as popular items are in more batches.
        excluded: the ids that do not count for a query: a ``JaggedTensor`` of N rows, or ``[N, E]`` int64 filled up
            with -1. They are ids as in ``ids``, and those that no candidate has say nothing; without ``ids``, they are
            places in ``candidate``. A query's own candidate always counts.
        temperature: the number above 0 that products are divided by. Default 1.
        remove_accidental_hits: whether candidates with the id of a query's own one do not count for it. Default True.
        hard_negatives: how many candidates count besides a query's own one: those of the highest scores. Default: all.
        reduction: ``"mean"`` (default), ``"sum"`` or ``"none"``.
        group: a process group whose ranks all call this. Candidates, with ``ids`` and ``log_q``, are then those of all
            its ranks, which may bring different N and M. Default: this process alone.

    Returns:
        A scalar, or with ``reduction="none"`` ``[N]``: float32, of float64 inputs float64. The mean of no query is NaN.
        With ``group`` it is of this rank's queries; for a mean over those of all ranks, give the losses to
        :func:`torchsparse_rec.distributed.global_mean`.

    Raises:
        IndexError: a place in ``excluded`` out of range, which counts along rows.
        TypeError: an argument that is no tensor.
        ValueError: shapes, dtypes or devices that do not fit, an option out of its range, ``log_q`` that is not finite.
            On CUDA and in compiled code it is not looked at: of -inf and NaN losses are NaN or infinite. Within a group
            an error is raised on all ranks.

    Differentiable in ``query``, ``candidate`` and ``log_q``, once. Memory is that of inputs, gradients and one block of
    scores, of at least 256 candidates, whatever the ids; with ``hard_negatives`` also of so many numbers for each
    query, and only the candidates that count have gradients. What is excluded by ``ids`` takes 16 bytes for each pair
    of a query and a candidate. These are counted, so that on CUDA the device is waited for.

    With ``group`` gradients are exchanged too, so all ranks must go backward: a candidate's gradient is the sum over
    all ranks' losses.

    Source: ``tasks.Retrieval`` of TensorFlow Recommenders; Yi et al., https://doi.org/10.1145/3298689.3346996.

    Example:
        >>> users, items = torch.eye(3), 2 * torch.eye(3)
        >>> in_batch_softmax_loss(users, items, reduction="none")
        tensor([0.2395, 0.2395, 0.2395])
        >>> in_batch_softmax_loss(users, items, ids=torch.tensor([7, 7, 8]), reduction="none")
        tensor([0.1269, 0.1269, 0.2395])
    """
    given = (query, candidate, ids, log_q, excluded, group, temperature, hard_negatives, reduction)
    first = 0
    if group is None:
        ids, named = _checked(*given)
    else:
        with agreeing(group) as said:
            ids, named = _checked(*given)
            said.extend(_of_this_rank(candidate, ids, log_q))
        candidate, ids, log_q, first = _of_all_ranks(said, candidate, ids, log_q, group)
    count, rows = query.shape[0], candidate.shape[0]
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    query = query.to(dtype) / temperature
    bias = None if log_q is None else -log_q.to(dtype)
    own = places = torch.arange(first, first + count, device=query.device)
    keys: tuple[Tensor, Tensor] | tuple[None, None] = (None, None)
    if ids is not None:  # candidates by id, and queries by their own candidates
        ids, order = ids.sort(stable=True)
        candidate, bias = embedding(candidate, order), None if bias is None else bias[order]
        own, queries = order.argsort()[own].sort()
        query, places = embedding(query, queries), queries.argsort()
        named = None if named is None else (named[0], places[named[1]])
        keys = (ids[own], ids) if remove_accidental_hits else keys
    if rows == 0:
        losses = (query * candidate).sum(1)
    else:
        k = hard_negatives if hard_negatives is not None and hard_negatives < rows - 1 else None
        losses = in_batch_losses(query, candidate, own, bias, _pairs(named, ids, own, rows), keys, k)
    if reduction == "none":
        return losses if ids is None else losses[places]
    return losses.sum() if reduction == "sum" else losses.mean()


def _pairs(
    named: tuple[Tensor, Tensor] | None, ids: Tensor | None, own: Tensor, rows: int
) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """Return the places that are excluded, ascending, and for which queries; -1 in place of a query's own."""
    if named is None:
        return None, None
    places, queries = named
    if ids is None:
        places = targets_of(places, rows, -1, True)
    else:  # the candidates of an id are neighbours
        begin = torch.searchsorted(ids, places)
        counts = (torch.searchsorted(ids, places, right=True) - begin).where(places != -1, 0)
        before = counts.cumsum(0) - counts
        queries, places = queries.repeat_interleave(counts), (begin - before).repeat_interleave(counts)
        places = places + torch.arange(places.shape[0], device=places.device)
    return ascending(places, queries, own)


# ---- Checks ----------------------------------------------------------------------------------------------------------


def _checked(
    query: Tensor,
    candidate: Tensor,
    ids: Tensor | None,
    log_q: Tensor | None,
    excluded: JaggedTensor | Tensor | None,
    group: dist.ProcessGroup | None,
    temperature: float,
    hard_negatives: int | None,
    reduction: str,
) -> tuple[Tensor | None, tuple[Tensor, Tensor] | None]:
    """Return ids, and the ids that are excluded and for which queries, as int64; raise if something does not fit."""
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"{_NAME}: reduction must be 'mean', 'sum' or 'none', got {reduction!r}")
    if not 0 < temperature < float("inf"):
        raise ValueError(f"{_NAME}: temperature must be finite and above 0, got {temperature}")
    if hard_negatives is not None and hard_negatives < 1:
        raise ValueError(f"{_NAME}: hard_negatives must be None or at least 1, got {hard_negatives}")
    given: dict[str, Any] = {"query": query, "candidate": candidate, "ids": ids, "log_q": log_q}
    for argument, x in given.items():
        if x is not None or argument in ("query", "candidate"):
            check_tensor(_NAME, argument, x)
    if query.dim() != 2 or not query.is_floating_point():
        raise ValueError(f"{_NAME}: query must be [N, D] of floats, got {query.dtype} of shape {tuple(query.shape)}")
    dtypes = floats_of(query.dtype)
    count, dim = query.shape
    if candidate.dim() != 2 or candidate.shape[1] != dim or candidate.dtype not in dtypes:
        raise ValueError(
            f"{_NAME}: candidate must be [M, {dim}] of {' or '.join(map(str, dtypes))}, as query is {query.dtype}, got "
            f"{candidate.dtype} of shape {tuple(candidate.shape)}"
        )
    rows = candidate.shape[0]
    if rows < count:
        raise ValueError(f"{_NAME}: candidate must have at least {count} rows, one for each query, got {rows}")
    for argument, x in (("ids", ids), ("log_q", log_q)):
        if x is not None and x.shape != (rows,):
            raise ValueError(f"{_NAME}: {argument} must be [{rows}], one for each candidate, got {tuple(x.shape)}")
    if ids is not None:
        ids = checked_integers(f"{_NAME}: ids", ids).long()
    if log_q is not None and not log_q.is_floating_point():
        raise ValueError(f"{_NAME}: log_q must be of floats, got {log_q.dtype}")
    named = None
    if excluded is not None:
        places, queries = excluded_pairs(_NAME, excluded, count, query.device, "queries")
        named = places.long().contiguous(), queries
        if ids is None and group is not None:
            raise ValueError(
                f"{_NAME}: ids must be given where excluded and group are, as places are one rank's, got None"
            )
    for argument, x in given.items():
        if x is not None and x.device != query.device:
            raise ValueError(f"{_NAME}: {argument} must be on the device of query, {query.device}, got {x.device}")
    if log_q is not None and log_q.device.type == "cpu" and not is_seen():
        bad = (~log_q.isfinite()).nonzero()
        if len(bad):
            place = int(bad[0])
            raise ValueError(
                f"{_NAME}: log_q[{place}] must be finite, the logarithm of a probability above 0, got "
                f"{float(log_q[place])}"
            )
    return ids, named


# ---- Ranks -----------------------------------------------------------------------------------------------------------


def _of_this_rank(candidate: Tensor, ids: Tensor | None, log_q: Tensor | None) -> tuple[int, str]:
    """Return the number of candidates, and all else that ranks must have in common."""
    parts = {"candidate": candidate, "ids": ids, "log_q": log_q}
    told = [
        f"{name}: {x.dtype} {['M', *x.shape[1:]]}{', with gradient' * (x.requires_grad and torch.is_grad_enabled())}"
        for name, x in parts.items()
        if x is not None
    ]
    return candidate.shape[0], "; ".join(told)


def _of_all_ranks(
    said: list[Any], candidate: Tensor, ids: Tensor | None, log_q: Tensor | None, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor | None, Tensor | None, int]:
    """Return what all ranks bring, in their order, and the place of this rank's first candidate."""
    for rank, (_, told) in enumerate(said):
        if told != said[0][1]:
            raise ValueError(
                f"{_NAME}: all ranks must give candidates of the same kind, got on rank 0: {said[0][1]}; on rank "
                f"{rank}: {told}"
            )
    sizes = [size for size, _ in said]
    parts = [None if x is None else _Gathered.apply(x, group, sizes) for x in (candidate, ids, log_q)]
    return *parts, sum(sizes[: dist.get_rank(group)])  # type: ignore[return-value]


class _Gathered(torch.autograd.Function):
    """What all ranks bring, one after the other; gradients go home, where they are added in the order of ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, sizes: list[int]) -> Tensor:
        ctx.group, ctx.sizes, own = group, sizes, x.shape[0]
        out = x.new_empty(sum(sizes), *x.shape[1:])
        copies = torch.cat([x] * len(sizes))
        dist.all_to_all_single(out, copies, sizes, [own] * len(sizes), group=group)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple:
        ranks, own = len(ctx.sizes), ctx.sizes[dist.get_rank(ctx.group)]
        came = grad.new_empty(ranks * own, *grad.shape[1:])
        dist.all_to_all_single(came, grad.contiguous(), [own] * ranks, ctx.sizes, group=ctx.group)
        return came.view(ranks, own, *grad.shape[1:]).sum(0), None, None
