"""
Samples of the operators of the family ``candidates``, which have no CUDA kernel.

They are no part of :mod:`samples.operators`, whose samples run on all devices; tests/ops/test_candidates.py compares
them with their references.
"""

from __future__ import annotations

import itertools

import torch
from samples.sample import INDICES, Random, Sample
from torch import Tensor

from torchsparse_rec import ops
from torchsparse_rec.compat._parity.reference.candidates import ALL, FIXED, LEARNED, LOG_UNIFORM, UNIFORM, tree_of

NAMES = {UNIFORM: "uniform", LOG_UNIFORM: "log_uniform", FIXED: "fixed", LEARNED: "learned", ALL: "all"}
# Powers of two and others, since a draw below them differs; one id; more than 32 bits.
_RANGES = (1, 2, 7, 64, 100, 1000)
_WIDE = (2**31 + 11, 2**40, 2**62)


def _weights(random: Random, range_max: int) -> Tensor:
    """Return weights, some of which are zero."""
    weights = random.integers(0, 9, range_max, dtype=torch.int64).float() / 4
    weights[0] = 1.5
    return weights


def _state(random: Random, kind: int, range_max: int) -> tuple[Tensor | None, list[Tensor], int]:
    """Return counts and unigrams, and how many ids can be drawn."""
    if kind == FIXED:
        table = ops.unigram_table(_weights(random, range_max))
        return None, list(table[:4]), table.drawable
    if kind == LEARNED:
        return tree_of(random.integers(1, 6, range_max, dtype=torch.int64).tolist()), [], range_max
    return None, [], range_max


def _sample(kind: int, range_max: int, unique: bool, index: torch.dtype, shape: tuple[int, ...]) -> Sample:
    random = Random(kind * 1000 + range_max % 997)
    counts, unigrams, drawable = _state(random, kind, range_max)
    num_sampled = range_max if kind == ALL else min(50, drawable) if unique else 50
    seeds = [int(x) for x in random.integers(-(2**62), 2**62, 2, dtype=torch.int64)]
    generator = ops.new_candidate_generator(*seeds, place=int(random.integers(0, 2**50, 1, dtype=torch.int64)))
    true_classes = random.integers(0, min(range_max, torch.iinfo(index).max), *shape, dtype=index)
    arguments = (generator, counts, unigrams, true_classes, range_max, num_sampled, unique, kind)
    name = f"{NAMES[kind]}_{range_max}_{'unique' if unique else 'any'}_{index}_{shape}".replace("torch.", "")
    return Sample("candidates_", name, arguments, representative=range_max == 7 and unique and shape == (3, 2))


def _draws() -> list[Sample]:
    samples = []
    for kind, range_max, unique in itertools.product(NAMES, (*_RANGES, *_WIDE), (True, False)):
        if range_max in _WIDE and kind not in (UNIFORM, LOG_UNIFORM):
            continue
        index = torch.int64 if range_max in _WIDE or range_max == 7 else INDICES[range_max % 2]
        samples += [_sample(kind, range_max, unique, index, shape) for shape in ((3, 2), (0,), (5,))]
    return samples


def _tables() -> list[Sample]:
    by_hand = torch.tensor([4.0, 9.0, 0.0, 1.0])
    samples = [Sample("candidates_unigrams", "by_hand", (by_hand, 2, 0.5), representative=True)]
    for size, reserved, distortion in itertools.product((1, 5, 300), (0, 3), (1.0, 0.75, 0.0)):
        weights = _weights(Random(size), size)
        name = f"{size}_{reserved}_{distortion}"
        samples.append(Sample("candidates_unigrams", name, (weights, reserved, distortion)))
    return samples


CANDIDATES_SAMPLES = {"candidates_": _draws(), "candidates_unigrams": _tables()}
