"""Sample inputs of the family ``embedding``: pooled lookups, each also a sample of the gradients."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from samples.sample import DIMENSIONS, FLOATS, INDICES, PRESENT_ROWS, Family, Random, Sample
from torch import Tensor

from torchsparse_rec.compat._parity.reference import EXTREMES, MAX, MEAN, MIN, POOLING, SQRTN, SUM
from torchsparse_rec.compat._parity.reference.embedding import embedding_bag


@dataclass(frozen=True)
class _Bags:
    """A pooled lookup and the gradient of its result."""

    name: str
    weight: Tensor
    indices: Tensor
    offsets: Tensor
    weights: Tensor | None
    padding_idx: int
    grad: Tensor
    representative: bool = False


def _random_bags(
    name: str,
    rows: int = 12,
    lengths: tuple[int, ...] = (3, 0, 5, 1, 8),
    dim: int = 3,
    dtype: torch.dtype = torch.float32,
    index: torch.dtype = torch.int64,
    offset: torch.dtype = torch.int64,
    weighted: bool = False,
    padding_idx: int = -1,
    representative: bool = False,
    seed: int = 0,
) -> _Bags:
    random = Random(seed)
    items = sum(lengths)
    return _Bags(
        name,
        random.floats(rows, dim, dtype=dtype),
        random.integers(0, max(rows + (padding_idx == rows), 1), items, dtype=index),
        torch.tensor([0, *itertools.accumulate(lengths)], dtype=offset),
        random.weights(items, dtype) if weighted else None,
        padding_idx,
        random.floats(len(lengths), dim, dtype=dtype),
        representative,
    )


def _hand_bags(weights: list[float] | None = None, padding_idx: int = -1, **flags: bool) -> _Bags:
    name = "by_hand" + ("_weighted" if weights else "") + ("_padding" if padding_idx >= 0 else "")
    return _Bags(
        name,
        torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]),
        torch.tensor([0, 2, 1, 1]),
        torch.tensor([0, 2, 2, 4]),
        None if weights is None else torch.tensor(weights),
        padding_idx,
        torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]),
        **flags,
    )


def _bag_problems() -> Iterator[_Bags]:
    yield _hand_bags(representative=True)
    yield _hand_bags([1.0, 3.0, 0.5, 0.5], representative=True)
    yield _hand_bags([1.0, 3.0, 0.5, 0.5], padding_idx=1)
    yield replace(_hand_bags([2.0, -2.0, 0.0, 0.0]), name="zero_denominators")
    flavours = itertools.cycle(itertools.product(INDICES, INDICES, (False, True), (-1, 4)))
    for seed, ((dtype, dim), (index, offset, weighted, padding)) in enumerate(
        zip(itertools.product(FLOATS, DIMENSIONS), flavours, strict=False)
    ):
        name = f"{dtype}_{dim}_{index}_{offset}".replace("torch.", "")
        flavour = {"index": index, "offset": offset, "padding_idx": padding, "seed": seed}
        yield _random_bags(name, dim=dim, dtype=dtype, weighted=weighted, **flavour)
        yield _random_bags(f"{name}_other", dim=dim, dtype=dtype, weighted=not weighted, **flavour)
    yield _random_bags("empty_first_and_last", lengths=(0, 0, 4, 0, 2, 0))
    yield _random_bags("only_empty_bags", lengths=(0, 0, 0), weighted=True, representative=True)
    yield _random_bags("no_bags", lengths=())
    yield _random_bags("no_bags_no_rows", rows=0, lengths=())
    yield _random_bags("no_rows", rows=0, lengths=(0, 0))
    yield _random_bags("no_columns", dim=0, weighted=True)
    yield _random_bags("one_bag", lengths=(60,), weighted=True, seed=5)
    yield _random_bags("one_row", rows=1, lengths=(50, 50), weighted=True, dtype=torch.float16)
    yield _random_bags("only_padding", rows=1, lengths=(3, 0, 2), padding_idx=0, weighted=True)
    yield _random_bags("padding_after_the_rows", padding_idx=12, seed=4)
    yield _random_bags("padding_after_the_rows_weighted", padding_idx=12, weighted=True, index=torch.int32, seed=4)
    yield _random_bags("padding_after_no_rows", rows=0, padding_idx=0, weighted=True)
    yield _random_bags("one_entry_each", rows=40, lengths=(1,) * 80, padding_idx=7, seed=3)
    yield _random_bags("uneven", rows=90, lengths=(300, 0, 1, 200, 7, 0, 120), dim=5, weighted=True, seed=8)


def _extreme_problems() -> Iterator[_Bags]:
    """Yield lookups with ties, infinities and NaN."""
    for dtype in FLOATS:
        table = torch.tensor([[1.0, 5.0, -0.0], [1.0, 2.0, 0.0], [-3.0, 5.0, 0.0]], dtype=dtype)
        name = str(dtype).removeprefix("torch.")
        bags = torch.tensor([2, 0, 1, 1, 0, 2]), torch.tensor([0, 3, 3, 6])
        grad = torch.arange(1.0, 10.0).reshape(3, 3).to(dtype)
        yield _Bags(f"ties_{name}", table, *bags, None, -1, grad)
        table = table.clone()
        table[0, 0], table[1, 2], table[2, 2], table[2, 1] = torch.nan, torch.nan, torch.nan, torch.inf
        yield _Bags(f"nan_{name}", table, *bags, None, -1, grad)
        infinite = torch.tensor([[-torch.inf, torch.inf, -torch.inf]], dtype=dtype).repeat(3, 1)
        yield _Bags(f"infinities_{name}", infinite, *bags, None, 1, grad)


def bag_modes() -> Iterator[tuple[_Bags, int, bool]]:
    """Yield every problem with every mode it allows but one extreme, with alternating ``scale_grad_by_freq``."""
    sums, extremes = [mode for mode in POOLING.values() if mode not in EXTREMES], itertools.cycle(EXTREMES)
    problems: list[tuple[_Bags, int | None]] = []
    for problem in _bag_problems():
        problems += [(problem, mode) for mode in sums]
        problems += [(problem, None if problem.weights is not None else next(extremes))]
    # Three problems for each dtype: each has both modes.
    problems += zip(_extreme_problems(), extremes, strict=False)
    for i, (problem, mode) in enumerate(problems):
        if mode is not None:
            yield problem, mode, i % 3 == 0


def _argmax(problem: _Bags, mode: int) -> Tensor | None:
    """Return the argmax that the forward gives the backward of an extreme, from the reference."""
    if mode not in EXTREMES:
        return None
    bag = (problem.weight, problem.indices, problem.offsets, None, mode, problem.padding_idx, False, False)
    return embedding_bag(*bag)[1]


_WORDS = {number: word for word, number in POOLING.items()}


def mode_word(mode: int, by_frequency: bool) -> str:
    return _WORDS[mode] + ("-by_frequency" if by_frequency else "")


def is_representative(problem: _Bags, mode: int) -> bool:
    if problem.name == "empty_first_and_last":
        return mode == MIN
    return problem.representative and mode in (MEAN, MAX)


def bag_samples(operator: str) -> Iterator[Sample]:
    for problem, mode, freq in bag_modes():
        arguments = (problem.weight, problem.indices, problem.offsets, problem.weights, mode, problem.padding_idx)
        representative = is_representative(problem, mode)
        yield Sample(operator, f"{problem.name}-{mode_word(mode, freq)}", (*arguments, freq, False), representative)
        if _is_also_by_starts(problem):
            starts = (*arguments[:2], problem.offsets[:-1], *arguments[3:], freq, False, False)
            yield Sample(operator, f"{problem.name}-{mode_word(mode, freq)}-starts", starts)


def _is_also_by_starts(problem: _Bags) -> bool:
    """Say whether the offsets are to be given without the last, too."""
    return problem.name.startswith(("by_hand", "empty", "only_empty", "no_bags", "uneven", "float32_3"))


def backward_samples(operator: str) -> Iterator[Sample]:
    for problem, mode, freq in bag_modes():
        inputs = (problem.grad, problem.indices, problem.offsets, problem.weights, _argmax(problem, mode))
        arguments = (*inputs, problem.weight.shape[0], mode, problem.padding_idx, freq)
        representative = is_representative(problem, mode)
        yield Sample(operator, f"{problem.name}-{mode_word(mode, freq)}", arguments, representative)
        if _is_also_by_starts(problem):
            starts = (*arguments[:2], problem.offsets[:-1], *arguments[3:], False)
            yield Sample(operator, f"{problem.name}-{mode_word(mode, freq)}-starts", starts)
    for dtype, padding, freq in itertools.product(FLOATS, (-1, 2), (False, True)):
        random = Random(9)
        arguments = (random.floats(30, 7, dtype=dtype), random.integers(0, 10, 30, dtype=torch.int64))
        name = f"no_offsets_{dtype}_{padding}_{freq}".replace("torch.", "")
        representative = dtype == torch.float32 and padding == 2 and freq
        yield Sample(operator, name, (*arguments, None, None, None, 10, SUM, padding, freq), representative)
    nothing = torch.empty(0, 4), torch.empty(0, dtype=torch.int32)
    yield Sample(operator, "no_offsets_no_ids", (*nothing, None, None, None, 10, SUM, -1, True))
    # Whole numbers, whose sums are exact in any order; half of the entries name one row.
    random = Random(1)
    ids = random.integers(0, 9, 3000, dtype=torch.int64)
    ids[::2] = 4
    grad = random.integers(-4, 5, 3000, 5, dtype=torch.float32)
    yield Sample(operator, "no_offsets_popular_row", (grad, ids, None, None, None, 12, SUM, 2, False))


def weights_backward_samples(operator: str) -> Iterator[Sample]:

    for problem, mode, _ in bag_modes():
        if problem.weights is None:
            continue
        bag = (problem.indices, problem.offsets, problem.weights)
        output = embedding_bag(problem.weight, *bag, mode, problem.padding_idx, False, False)[0]
        arguments = (problem.grad, problem.weight, *bag, output, mode, problem.padding_idx)
        representative = problem.representative and mode == SQRTN
        yield Sample(operator, f"{problem.name}-{mode_word(mode, False)}", arguments, representative)


def embedding_samples(operator: str) -> Iterator[Sample]:
    table = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    yield Sample(operator, "by_hand", (table, torch.tensor([[2, 0], [1, 2]]), -1, False, False), representative=True)
    shapes = itertools.cycle([(7,), (), (3, 4), (0,), (2, 0, 3), (2, 3, 4)])
    for seed, (dtype, dim) in enumerate(itertools.product(FLOATS, DIMENSIONS)):
        random, index, shape = Random(seed), INDICES[seed % 2], next(shapes)
        arguments = random.floats(19, dim, dtype=dtype), random.integers(0, 19, *shape, dtype=index)
        name = f"{dtype}_{dim}_{index}_rank_{len(shape)}".replace("torch.", "")
        yield Sample(operator, name, (*arguments, (-1, 5)[seed % 2], seed % 3 == 0, False))
    yield Sample(operator, "no_rows", (torch.empty(0, 5), torch.empty(0, dtype=torch.int64), -1, False, False))
    yield Sample(operator, "no_columns", (torch.empty(4, 0), torch.tensor([3, 3]), -1, False, False))


def _smooth_bags() -> Iterator[tuple[_Bags, int, bool]]:
    for weighted, mode, beyond in itertools.product((False, True), POOLING.values(), (False, True)):
        if weighted and mode in EXTREMES:
            continue
        problem = _random_bags(
            "beyond" if beyond else "smooth",
            rows=5,
            lengths=(3, 0, 2, 4),
            dim=2,
            dtype=torch.float64,
            padding_idx=5 if beyond else mode - 1,
            seed=1,
        )
        weights = torch.tensor([0.5, 1.5, 2.0, -0.25, 1.0, 0.75, 3.0, 0.0, 1.25], dtype=torch.float64)
        yield replace(problem, weights=weights if weighted else None), mode, mode == MEAN


def gradient_bag_samples(operator: str) -> Iterator[Sample]:

    for problem, mode, freq in _smooth_bags():
        word = f"{problem.name}-{mode_word(mode, freq)}" + ("-weighted" if problem.weights is not None else "")
        bag = (problem.indices, problem.offsets, problem.weights)
        if operator == "embedding_bag":
            # scale_grad_by_freq is not the derivative of anything: the operator itself is checked without it.
            yield Sample(operator, word, (problem.weight, *bag, mode, problem.padding_idx, False, False))
        elif problem.weights is None and mode not in EXTREMES:
            inputs = (problem.grad, *bag, None, problem.weight.shape[0])
            yield Sample(operator, word, (*inputs, mode, problem.padding_idx, freq))
    if operator.endswith(("dense_backward", "sparse_backward")):
        random = Random(2)
        arguments = random.floats(6, 2, dtype=torch.float64), torch.tensor([0, 3, 3, 1, 0, 3])
        yield Sample(operator, "no_offsets", (*arguments, None, None, None, 5, SUM, 1, True))


def gradient_embedding_samples(operator: str) -> Iterator[Sample]:
    table = Random(1).floats(5, 2, dtype=torch.float64)
    yield Sample(operator, "smooth", (table, torch.tensor([[0, 3], [3, 1]]), -1, False, False))


FAMILY = Family(
    samples={
        "embedding": embedding_samples,
        "embedding_bag": bag_samples,
        "embedding_dense_backward": backward_samples,
        "embedding_sparse_backward": backward_samples,
        "embedding_coo_backward": backward_samples,
        "embedding_weights_backward": weights_backward_samples,
    },
    gradients={
        "embedding": gradient_embedding_samples,
        "embedding_bag": gradient_bag_samples,
        "embedding_dense_backward": gradient_bag_samples,
        "embedding_sparse_backward": gradient_bag_samples,
    },
    read_backs={"embedding_sparse_backward": PRESENT_ROWS, "embedding_coo_backward": PRESENT_ROWS},
)
