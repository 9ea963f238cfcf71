"""Slow, obvious references of the passes over blocks of scores, in float64."""

from __future__ import annotations

import torch
from torch import Tensor

INF = torch.inf


def _places(target: Tensor, first_row: int, columns: int) -> list[tuple[int, int]]:
    """Return the samples whose target is in the block, and its column."""
    return [(n, t - first_row) for n, t in enumerate(target.tolist()) if first_row <= t < first_row + columns]


def _relative_to(maximum: Tensor) -> Tensor:
    """Return what exponentials are relative to: scores that are all -inf stay so."""
    return maximum.double().masked_fill(maximum == -torch.inf, 0.0)


def scores_targets(target: Tensor, rows: int, ignore_index: int, excluded: bool) -> Tensor:
    return target.long().masked_fill(target == ignore_index, -1)


def scores_exclude_(scores: Tensor, row_ids: Tensor, samples: Tensor, first_row: int) -> tuple[Tensor]:
    for row, sample in zip(row_ids.tolist(), samples.tolist(), strict=True):
        if first_row <= row < first_row + scores.shape[1]:
            scores[sample, row - first_row] = -torch.inf
    return (scores,)


def scores_lse_(
    scores: Tensor, target: Tensor, first_row: int, maximum: Tensor, sum: Tensor, own: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    top = torch.cat([maximum[:, None], scores], 1).amax(1)
    base = _relative_to(top)
    before = torch.where(maximum == top, sum, sum * (maximum.double() - base).exp())
    sum.copy_(before + (scores.double() - base[:, None]).exp().sum(1))
    maximum.copy_(top.masked_fill(sum.isnan(), torch.nan))
    for n, column in _places(target, first_row, scores.shape[1]):
        own[n] = scores[n, column]
    return maximum, sum, own


def scores_softmax_(
    scores: Tensor, maximum: Tensor, target: Tensor, first_row: int, factor: Tensor, own_factor: Tensor
) -> tuple[Tensor]:
    shares = (scores.double() - _relative_to(maximum)[:, None]).exp() * factor.double()[:, None]
    for n, column in _places(target, first_row, scores.shape[1]):
        shares[n, column] += own_factor[n]
    scores.copy_(shares)
    return (scores,)


def scores_top_k_(scores: Tensor, first_row: int, values: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    k = values.shape[1]
    for n in range(scores.shape[0]):
        block = [(x, first_row + c) for c, x in enumerate(scores[n].tolist())]
        found = [(x, row) for x, row in [*zip(values[n].tolist(), rows[n].tolist(), strict=True), *block] if x != -INF]
        found.sort(key=lambda each: (each[0] == each[0], -each[0] if each[0] == each[0] else 0.0, each[1]))
        found = (found + [(-INF, -1)] * k)[:k]
        values[n] = values.new_tensor([x for x, _ in found])
        rows[n] = rows.new_tensor([row for _, row in found])
    return values, rows


FUNCTIONS = (scores_targets, scores_exclude_, scores_lse_, scores_softmax_, scores_top_k_)
