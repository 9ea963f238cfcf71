"""
Slow, obvious references of the operators of the family ``candidates``.

They follow csrc/candidates.h in Python's integers and floats. Ids are the operators' own to the bit; expected counts
are computed in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

UNIFORM, LOG_UNIFORM, FIXED, LEARNED, ALL = range(5)


# ---- Random words ---------------------------------------------------------------------------------------------------


def philox_words(seed: int, seed2: int, place: int) -> Iterator[int]:
    """Yield the words of Philox 4x32-10."""
    mask = 2**32 - 1
    while True:
        c = [place & mask, place >> 32 & mask, seed2 & mask, seed2 >> 32 & mask]
        k0, k1 = seed & mask, seed >> 32 & mask
        for _ in range(10):
            a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
            c = [b >> 32 ^ c[1] ^ k0, b & mask, a >> 32 ^ c[3] ^ k1, a & mask]
            k0, k1 = k0 + 0x9E3779B9 & mask, k1 + 0xBB67AE85 & mask
        yield from c
        place += 1


def _real(words: Iterator[int]) -> float:
    high = next(words) & 0xFFFFF
    return (high << 32 | next(words)) * 2.0**-52


def _below(words: Iterator[int], n: int, bits: int) -> int:
    def draw() -> int:
        low = next(words)
        return low if bits == 32 else low | next(words) << 32

    if n & (n - 1) == 0:
        return draw() & n - 1
    left_over = (2**bits - 1) % n + 1
    while (x := draw()) < left_over:
        pass
    return x % n


# ---- Operators ------------------------------------------------------------------------------------------------------


def learned_counts(tree: Tensor) -> list[int]:
    """Return the count of each id that a binary indexed tree holds."""
    sums = [0]
    for i in range(1, len(tree)):
        sums.append(sums[i & i - 1] + int(tree[i]))
    return [after - before for before, after in zip(sums, sums[1:], strict=False)]


def tree_of(counts: list[int]) -> Tensor:
    """Return the binary indexed tree of some counts."""
    tree = [sum(counts)] + [sum(counts[i & i - 1 : i]) for i in range(1, len(counts) + 1)]
    return torch.tensor(tree, dtype=torch.int32)


def _law(
    kind: int, range_max: int, counts: Tensor | None, unigrams: list[Tensor]
) -> tuple[Callable[[Iterator[int]], int], Callable[[int], float]]:
    """Return how an id is drawn, and an id's probability."""
    if kind == UNIFORM:
        return lambda words: _below(words, range_max, 64), lambda v: 1 / range_max
    if kind == LOG_UNIFORM:
        log_range = math.log1p(range_max)
        return (
            lambda words: (int(math.exp(_real(words) * log_range)) - 1) % range_max,
            lambda v: math.log((v + 2.0) / (v + 1.0)) / log_range,
        )
    if kind == LEARNED:
        assert counts is not None
        of_ids = np.array(learned_counts(counts))
        ends = np.cumsum(of_ids)
        return (
            lambda words: int(np.searchsorted(ends, _below(words, int(ends[-1]), 32), side="right")),
            lambda v: of_ids[v] / ends[-1],
        )
    weights, chances, aliases, total = (x.tolist() for x in unigrams)

    def draw(words: Iterator[int]) -> int:
        r = (next(words) & 0x7FFFFF) * 2.0**-23
        v = _below(words, range_max, 32)
        return v if r < chances[v] else aliases[v]

    return draw, lambda v: weights[v] / total[0]


def candidates_(
    generator: Tensor,
    counts: Tensor | None,
    unigrams: list[Tensor],
    true_classes: Tensor,
    range_max: int,
    num_sampled: int,
    unique: bool,
    kind: int,
) -> tuple[Tensor, ...]:
    seed, seed2, place = generator.tolist()
    generator[2] += (2048 * num_sampled + 3) // 4
    if kind == ALL:
        return torch.arange(range_max), torch.ones(true_classes.shape), torch.ones(range_max), generator
    draw, probability = _law(kind, range_max, counts, unigrams)
    words, tries = philox_words(seed, seed2, place), 0
    sampled: list[int] = []
    while len(sampled) < num_sampled:
        v = draw(words)
        tries += 1
        if not unique or v not in sampled:
            sampled.append(v)

    def expected(ids: Tensor) -> Tensor:
        p = [probability(v) for v in ids.reshape(-1).tolist()]
        many = [
            x * num_sampled if tries == num_sampled else 1.0 if x == 1 else -math.expm1(tries * math.log1p(-x))
            for x in p
        ]
        return torch.tensor(many, dtype=torch.float64).float().reshape(ids.shape)

    ids = torch.tensor(sampled)
    results = ids, expected(true_classes), expected(ids), generator
    if kind != LEARNED:
        return results
    assert counts is not None
    of_ids = learned_counts(counts)
    for v in true_classes.reshape(-1).tolist()[: 2**31 - 1 - sum(of_ids)]:
        of_ids[v] += 1
    return *results, counts.copy_(tree_of(of_ids))


def candidates_unigrams(unigrams: Tensor, reserved: int, distortion: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    weights = np.append(np.zeros(reserved), unigrams.double().numpy() ** distortion).astype(np.float32)
    total = np.add.accumulate(weights)[-1:]  # in order
    n, whole = len(weights), sum(weights.tolist())
    share = [float(w * np.float32(n)) / whole for w in weights]
    chances, aliases = [1.0] * n, list(range(n))
    low, high = [v for v in range(n) if share[v] < 1], [v for v in range(n) if not share[v] < 1]
    while low and high:
        small, large = low.pop(), high.pop()
        chances[small], aliases[small] = share[small], large
        share[large] -= 1.0 - share[small]
        (low if share[large] < 1 else high).append(large)
    return (
        torch.from_numpy(weights),
        torch.tensor(chances, dtype=torch.float64).float(),
        torch.tensor(aliases, dtype=torch.int32),
        torch.from_numpy(total),
    )


def compute_accidental_hits(true_classes: Tensor, sampled: Tensor) -> tuple[list[int], list[int]]:
    """Return rows and places of the hits."""
    place = {v: i for i, v in enumerate(sampled.tolist())}
    hits = [(row, place[v]) for row, ids in enumerate(true_classes.tolist()) for v in ids if v in place]
    return [row for row, _ in hits], [at for _, at in hits]
