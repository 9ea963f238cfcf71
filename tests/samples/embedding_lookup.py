"""Sample inputs of the operators behind TensorFlow's lookups: sparse ids, shards and clipped rows."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from samples.sample import DIMENSIONS, FLOATS, INDICES, REDUCTIONS, Family, Random, Sample
from torch import Tensor

from torchsparse_rec.compat._parity.reference import MEAN, SQRTN, SUM
from torchsparse_rec.compat._parity.reference.embedding_lookup import embedding_bag_shards

# ---- Ids ------------------------------------------------------------------------------------------------------------


def shard_rows_samples(operator: str) -> Iterator[Sample]:
    yield Sample(operator, "by_hand", (torch.tensor([[0, 1], [4, 3]]), [3, 2], 0, False), representative=True)
    yield Sample(operator, "by_hand_div", (torch.tensor([0, 4, 2, 3]), [3, 2], 1, False), representative=True)
    sizes = ([5], [4, 3, 3], [3, 3], [2, 1, 1, 1, 1], [1, 1, 0, 0])
    for seed, (own, strategy, index) in enumerate(itertools.product(sizes, (0, 1), INDICES)):
        ids = Random(seed).integers(0, sum(own), 3, 4, dtype=index)
        padding = seed % 3 == 0
        if padding:
            ids[1] = sum(own)
        name = f"{len(own)}_shards_of_{sum(own)}_{'mod' if strategy == 0 else 'div'}_{index}".replace("torch.", "")
        yield Sample(operator, name, (ids, own, strategy, padding))
    yield Sample(operator, "other_sizes", (torch.tensor([0, 2, 4, 6, 8]), [5, 1], 0, False))
    yield Sample(operator, "no_ids", (torch.empty(0, 2, dtype=torch.int32), [0, 0], 1, False))


def pruned_bags_samples(operator: str) -> Iterator[Sample]:
    ids, rows = torch.tensor([2, -1, 1, 0, -5]), torch.tensor([0, 0, 2, 2, 3])
    weights = torch.tensor([1.0, 2.0, 0.0, torch.nan, 3.0])
    yield Sample(operator, "by_hand", (ids, rows, None, 5, 3, False, None, False), representative=True)
    yield Sample(operator, "by_hand_default", (ids, rows, weights, 5, 3, True, 2, True), representative=True)
    flavours = itertools.cycle(itertools.product((True, False), (None, 4), (None, *FLOATS), (True, False)))
    for seed, (index, row_index, n, bags) in enumerate(itertools.product(INDICES, INDICES, (0, 5, 70), (1, 9, 40))):
        for variant in range(2):
            is_sorted, default, dtype, positions = next(flavours)
            random = Random(2 * seed + variant)
            own_ids = random.integers(-2, 11, n, dtype=index)
            own_rows = random.integers(0, bags, n, dtype=row_index)
            own_rows = own_rows.sort().values if is_sorted else own_rows
            own_weights = None if dtype is None else random.weights(n, dtype)
            prune = own_weights is not None and (seed + variant) % 3 > 0
            arguments = (own_ids, own_rows, own_weights, bags, 11, prune, default, positions)
            yield Sample(operator, f"{seed}_{variant}_{n}_in_{bags}", arguments)
    nothing = torch.empty(0, dtype=torch.int64)
    yield Sample(operator, "no_bags", (nothing, nothing, torch.empty(0), 0, 0, True, None, True))
    yield Sample(operator, "no_rows", (torch.tensor([-1, -1]), torch.tensor([1, 0]), None, 3, 0, False, None, True))
    yield Sample(operator, "only_default", (nothing, nothing, None, 4, 1, False, 0, True))


def gradient_pruned_bags_samples(operator: str) -> Iterator[Sample]:
    ids, rows = torch.tensor([2, -1, 1, 0, 2]), torch.tensor([3, 0, 2, 0, 3])
    weights = torch.tensor([1.0, 2.0, 0.5, -1.0, 3.0], dtype=torch.float64)
    for prune, default in itertools.product((False, True), (None, 1)):
        name = f"{'pruned' if prune else 'kept'}_{default}"
        yield Sample(operator, name, (ids, rows, weights, 5, 3, prune, default, True))


# ---- Lookups --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Lookup:
    """A pooled lookup in shards, and the gradient of its result."""

    name: str
    params: list[Tensor]
    indices: Tensor
    offsets: Tensor | None
    weights: Tensor | None
    mode: int
    padding_idx: int
    max_norm: float
    grad: Tensor
    representative: bool = False

    def output(self) -> Tensor:
        """Return the result of the forward, from the reference."""
        lookup = (self.params, self.indices, self.offsets, self.weights, self.mode)
        return embedding_bag_shards(*lookup, self.padding_idx, self.max_norm, False)


def _random_lookup(
    name: str,
    sizes: tuple[int, ...] = (4, 0, 7, 1),
    lengths: tuple[int, ...] | None = (3, 0, 5, 1, 8),
    dim: int = 3,
    dtype: torch.dtype = torch.float32,
    index: torch.dtype = torch.int64,
    weighted: bool = False,
    mode: int = SUM,
    padding_idx: int = -1,
    max_norm: float = -1.0,
    seed: int = 0,
    representative: bool = False,
) -> _Lookup:
    random = Random(seed)
    rows, items = sum(sizes), 17 if lengths is None else sum(lengths)
    offsets = None if lengths is None else torch.tensor([0, *itertools.accumulate(lengths)], dtype=index)
    return _Lookup(
        name,
        [random.floats(size, dim, dtype=dtype) for size in sizes],
        random.integers(0, max(rows + (padding_idx == rows), 1), items, dtype=index),
        offsets,
        random.weights(items, dtype) if weighted else None,
        mode,
        padding_idx,
        max_norm,
        random.floats(items if lengths is None else len(lengths), dim, dtype=dtype),
        representative,
    )


def _lookups() -> Iterator[_Lookup]:
    table = [torch.tensor([[3.0, 4.0]]), torch.tensor([[0.0, 0.0], [1.0, 0.0]])]
    hand = torch.tensor([0, 2, 1, 0]), torch.tensor([0, 2, 2, 4])
    grad = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    weights = torch.tensor([1.0, 3.0, 0.5, 0.5])
    yield _Lookup("by_hand", table, *hand, None, MEAN, -1, 2.5, grad, representative=True)
    yield _Lookup("by_hand_weighted", table, *hand, weights, SQRTN, 2, 5.0, grad, representative=True)
    yield _Lookup("zero_norm", table, *hand, weights, SUM, -1, 0.0, grad)
    flavours = itertools.cycle(itertools.product((-1.0, 1.25, 100.0), (False, True), (-1, 12, 4)))
    sizes = itertools.cycle([(12,), (4, 0, 7, 1), (6, 6)])
    for seed, ((dtype, dim), mode) in enumerate(
        itertools.product(itertools.product(FLOATS, DIMENSIONS), (SUM, MEAN, SQRTN))
    ):
        max_norm, weighted, padding = next(flavours)
        yield _random_lookup(
            f"{dtype}_{dim}_{REDUCTIONS[mode]}_{max_norm}".replace("torch.", ""),
            next(sizes),
            dim=dim,
            dtype=dtype,
            index=INDICES[seed % 2],
            weighted=weighted,
            mode=mode,
            padding_idx=padding,
            max_norm=max_norm,
            seed=seed,
        )
    yield _random_lookup("each_its_own", lengths=None, max_norm=1.0, representative=True)
    yield _random_lookup("each_its_own_half", lengths=None, max_norm=1.0, dtype=torch.float16, dim=33)
    yield _random_lookup("each_its_own_unclipped", lengths=None, padding_idx=12)
    yield _random_lookup("no_bags", lengths=())
    yield _random_lookup("no_rows", sizes=(0, 0), lengths=(0, 0), max_norm=1.0)
    yield _random_lookup("no_columns", dim=0, weighted=True, max_norm=1.0)
    yield _random_lookup("only_padding", sizes=(0,), lengths=(3, 0, 2), padding_idx=0, weighted=True, max_norm=1.0)
    yield _random_lookup("one_bag", sizes=(50, 40), lengths=(700,), dim=70, weighted=True, max_norm=2.0, seed=5)


def shards_samples(operator: str) -> Iterator[Sample]:
    for x in _lookups():
        arguments = (x.params, x.indices, x.offsets, x.weights, x.mode, x.padding_idx, x.max_norm, False)
        yield Sample(operator, x.name, arguments, x.representative)


def shards_weights_backward_samples(operator: str) -> Iterator[Sample]:
    for x in _lookups():
        if x.weights is not None:
            bags = (x.indices, x.offsets, x.weights, x.output())
            yield Sample(
                operator, x.name, (x.grad, x.params, *bags, x.mode, x.padding_idx, x.max_norm), x.representative
            )


def clip_backward_samples(operator: str) -> Iterator[Sample]:
    table = [torch.tensor([[3.0, 4.0]]), torch.tensor([[0.0, 0.0], [1.0, 0.0]])]
    grad = torch.tensor([[1.0, 2.0], [3.0, 4.0], [0.0, 0.0], [2.0, 0.0]])
    yield Sample(operator, "by_hand", (grad, table, torch.tensor([0, 1, 2, 0]), 5.0), representative=True)
    yield Sample(operator, "by_hand_dense", (grad[:3], table, None, 2.0), representative=True)
    for seed, (dtype, dim) in enumerate(itertools.product(FLOATS, DIMENSIONS)):
        random = Random(seed)
        params = [random.floats(size, dim, dtype=dtype) for size in (5, 0, 8)]
        wide = dtype if dtype == torch.float64 else torch.float32
        rows = random.integers(0, 13, 20, dtype=torch.int64) if seed % 2 else None
        gradient = random.floats(13 if rows is None else 20, dim, dtype=wide)
        name = f"{dtype}_{dim}".replace("torch.", "")
        yield Sample(operator, name, (gradient, params, rows, 0.75 * dim**0.5))
    yield Sample(operator, "no_rows", (torch.empty(0, 3), [torch.empty(0, 3)], None, 1.0))


def _smooth_lookups() -> Iterator[_Lookup]:
    weights = torch.tensor([0.5, 1.5, 2.0, -0.25, 1.0, 0.75, 3.0, 0.25, 1.25], dtype=torch.float64)
    for mode, max_norm, padding in itertools.product((SUM, MEAN, SQRTN), (-1.0, 0.9), (-1, 5)):
        lookup = _random_lookup(
            f"{REDUCTIONS[mode]}_{max_norm}_{padding}",
            (2, 3),
            (3, 0, 2, 4),
            dim=2,
            dtype=torch.float64,
            mode=mode,
            padding_idx=padding,
            max_norm=max_norm,
            seed=1,
        )
        yield _Lookup(**{**vars(lookup), "weights": weights})
    yield _random_lookup("each_its_own", (2, 3), None, dim=2, dtype=torch.float64, max_norm=0.9, seed=2)


def gradient_shards_samples(operator: str) -> Iterator[Sample]:
    for x in _smooth_lookups():
        lookup = (x.params, x.indices, x.offsets, x.weights, x.mode, x.padding_idx, x.max_norm, False)
        yield Sample(operator, x.name, lookup)


def gradient_clip_samples(operator: str) -> Iterator[Sample]:
    random = Random(3)
    params = [random.floats(size, 3, dtype=torch.float64) for size in (2, 3)]
    yield Sample(operator, "all_rows", (random.floats(5, 3, dtype=torch.float64), params, None, 1.2))
    rows = torch.tensor([4, 0, 4, 2])
    yield Sample(operator, "some_rows", (random.floats(4, 3, dtype=torch.float64), params, rows, 1.2))


FAMILY = Family(
    samples={
        "shard_rows": shard_rows_samples,
        "pruned_bags": pruned_bags_samples,
        "embedding_bag_shards": shards_samples,
        "embedding_bag_shards_weights_backward": shards_weights_backward_samples,
        "clip_rows_backward": clip_backward_samples,
    },
    gradients={
        "pruned_bags": gradient_pruned_bags_samples,
        "embedding_bag_shards": gradient_shards_samples,
        "clip_rows_backward": gradient_clip_samples,
    },
)
