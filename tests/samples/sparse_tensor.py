"""Sample inputs of the family ``sparse_tensor``."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from samples.sample import FLOATS, Family, Random, ReadBack, Sample
from samples.unique import INTEGERS
from torch import Tensor

EXTREMES = (0, 1, -1, 2**31, -(2**31), 2**32 + 5, 2**62, -(2**62), 2**63 - 1, -(2**63))
# From one shape to others of as many elements: every rank from 0 to 9, sizes of 1, powers of two and odd ones.
SHAPES = (
    ([6, 35], [5, 42], [210], [7, 5, 3, 2], [1, 210, 1], [2, 1, 3, 1, 5, 1, 7, 1, 1]),
    ([2**31, 2**31 - 1], [2**20, 2**11, 2**31 - 1], [2**31 - 1, 2**31], [(2**31 - 1) * 2**31]),
    ([1], [], [1, 1]),
    ([3, 5, 7, 11], [1155], [33, 35], [11, 7, 5, 3]),
)


def _indices(random: Random, shape: list[int], entries: int) -> Tensor:
    if not shape:
        return torch.empty(entries, 0, dtype=torch.int64)
    return torch.stack([random.integers(0, size, entries, dtype=torch.int64) for size in shape], 1)


def reshape_samples(operator: str) -> Iterator[Sample]:
    yield Sample(operator, "by_hand", (torch.tensor([[0, 2], [1, 0]]), [2, 3], [3, 2]), representative=True)
    for shapes in SHAPES:
        for n, shape in enumerate(shapes):
            other = shapes[(n + 1) % len(shapes)]
            indices = _indices(Random(n), shape, 50)
            yield Sample(operator, f"{'x'.join(map(str, shape))}_to_{len(other)}", (indices, shape, other))
    extremes = torch.tensor([[a, b] for a in EXTREMES for b in EXTREMES])
    yield Sample(operator, "any_indices", (extremes, [6, 35], [5, 42]))
    yield Sample(operator, "any_indices_of_a_large_shape", (extremes, [2**31, 2**31], [2**12, 2**30, 2**20]))
    yield Sample(operator, "same_shape", (extremes, [6, 35], [6, 35]))
    yield Sample(operator, "no_entries", (torch.empty(0, 2, dtype=torch.int64), [4, 6], [8, 3]))
    yield Sample(operator, "no_elements", (torch.empty(0, 2, dtype=torch.int64), [0, 6], [3, 0, 2]))


def _sparse(random: Random, rows: int, entries: int, rank: int, order: str) -> Tensor:
    row = random.integers(0, max(rows, 1), entries, dtype=torch.int64)
    if order == "sorted":
        row = row.sort().values
    if order == "sparse":  # rows in every third place, and long runs of empty ones
        row = (row // 3 * 3).sort().values
    columns = [random.integers(-(2**40), 2**40, entries, dtype=torch.int64) for _ in range(rank - 1)]
    return torch.stack([row, *columns], 1)


def _values(random: Random, entries: int, dtype: torch.dtype) -> Tensor:
    if dtype.is_complex:
        return torch.complex(random.floats(entries, dtype=torch.float64), random.floats(entries, dtype=torch.float64))
    if dtype.is_floating_point:
        return random.floats(entries, dtype=dtype)
    return random.integers(0, 2 if dtype == torch.bool else 100, entries, dtype=dtype)


def fill_samples(operator: str) -> Iterator[Sample]:
    def sample(name: str, indices: Tensor, values: Tensor, rows: int, default: float, **flags: bool) -> Sample:
        return Sample(operator, name, (indices, values, rows, torch.tensor(default, dtype=values.dtype)), **flags)

    by_hand = torch.tensor([[1, 9], [0, 3], [1, 2]])
    yield sample("by_hand", by_hand, torch.tensor([1.0, 2.0, 3.0]), 4, -1.0, representative=True)
    for dtype in (*FLOATS, *INTEGERS, torch.bool, torch.complex128):
        word = str(dtype).removeprefix("torch.")
        for order in ("sorted", "unsorted"):
            random = Random(1)
            indices = _sparse(random, 40, 60, 2, order)
            yield sample(f"{order}_{word}", indices, _values(random, 60, dtype), 40, 1)
    for rank in (1, 3, 5):
        for order in ("sorted", "unsorted", "sparse"):
            random = Random(rank)
            yield sample(
                f"{order}_rank_{rank}",
                _sparse(random, 300, 200, rank, order),
                random.floats(200, dtype=torch.float32),
                300,
                0.5,
            )
    for name, rows, entries in (("no_entries", 5, 0), ("nothing", 0, 0), ("one_row", 1, 70), ("few_in_many", 3000, 3)):
        random = Random(2)
        yield sample(
            name, _sparse(random, rows, entries, 2, "unsorted"), _values(random, entries, torch.int32), rows, 7
        )
    full = torch.arange(64).unsqueeze(1)
    yield sample("no_empty_rows", full, torch.arange(64), 64, 0)
    yield sample("descending", full.flip(0), torch.arange(64), 70, 0)


def fill_grad_samples(operator: str) -> Iterator[Sample]:
    by_hand = torch.tensor([2, 0, 3])
    yield Sample(operator, "by_hand", (by_hand, torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0])), representative=True)
    for dtype in (*FLOATS, *INTEGERS):
        random = Random(1)
        positions = random.integers(0, 300, 100, dtype=torch.int64)
        word = str(dtype).removeprefix("torch.")
        yield Sample(operator, f"repeated_{word}", (positions, _values(random, 300, dtype)))
    none = torch.empty(0, dtype=torch.int64)
    yield Sample(operator, "all_default", (none, Random(2).floats(9000, dtype=torch.float32)))
    yield Sample(operator, "nothing", (none, torch.empty(0)))
    yield Sample(operator, "no_default", (torch.arange(40).flip(0), Random(3).floats(40, dtype=torch.float64)))


def reorder_samples(operator: str) -> Iterator[Sample]:
    yield Sample(operator, "by_hand", (torch.tensor([[1, 0], [0, 2], [0, 1]]),), representative=True)
    for rank in (1, 2, 3, 8):
        random = Random(rank)
        indices = torch.stack([random.integers(-3, 4, 200, dtype=torch.int64) for _ in range(rank)], 1)
        yield Sample(operator, f"rank_{rank}", (indices,))
        yield Sample(operator, f"sorted_rank_{rank}", (torch.tensor(sorted(indices.tolist())),))
    yield Sample(operator, "extremes", (torch.tensor([[a, b] for a in EXTREMES for b in EXTREMES]),))
    yield Sample(operator, "wide_column", (Random(4).integers(-(2**61), 2**60, 300, 1, dtype=torch.int64),))
    large = torch.cat([_indices(Random(5), [1000, 1000], 300), torch.tensor([[0, 0]] * 30)])
    yield Sample(operator, "repeated", (large,))
    yield Sample(operator, "no_entries", (torch.empty(0, 3, dtype=torch.int64),))
    yield Sample(operator, "no_columns", (torch.empty(4, 0, dtype=torch.int64),))


def dense_samples(operator: str) -> Iterator[Sample]:
    def sample(
        name: str, indices: Tensor, shape: list[int], values: Tensor, validate: bool, default: float = 1, **flags: bool
    ) -> Sample:
        arguments = (indices, shape, values, torch.tensor(default, dtype=values.dtype), validate)
        return Sample(operator, name, arguments, **flags)

    by_hand = torch.tensor([[0, 2], [1, 0]])
    yield sample("by_hand", by_hand, [2, 3], torch.tensor([5.0, 6.0]), True, -1.0, representative=True)
    again = torch.tensor([[1, 0], [0, 2], [1, 0]])
    yield sample("last_wins", again, [2, 3], torch.tensor([5.0, 6.0, 7.0]), False, -1.0, representative=True)
    for dtype in (*FLOATS, *INTEGERS, torch.bool, torch.complex128):
        random = Random(1)
        indices = _indices(random, [7, 9], 40)
        word = str(dtype).removeprefix("torch.")
        yield sample(f"unsorted_{word}", indices, [7, 9], _values(random, 40, dtype), False)
    for shape in ([50], [6, 7], [3, 4, 5], [2, 3, 2, 3, 2, 1, 1, 2]):
        random = Random(len(shape))
        indices = torch.tensor(sorted(set(map(tuple, _indices(random, shape, 30).tolist()))))
        yield sample(
            f"sorted_rank_{len(shape)}", indices, shape, random.floats(len(indices), dtype=torch.float32), True
        )
    for name, shape in (("no_entries", [3, 4]), ("no_elements", [3, 0])):
        yield sample(name, torch.empty(0, 2, dtype=torch.int64), shape, torch.empty(0), True)
    yield sample("scalar", torch.empty(2, 0, dtype=torch.int64), [], torch.tensor([3.0, 4.0]), False)


def offsets_samples(operator: str) -> Iterator[Sample]:
    yield Sample(operator, "by_hand", (torch.tensor([0, 0, 2]), 4), representative=True)
    for dtype in (torch.int32, torch.int64):
        ids = Random(1).integers(0, 90, 200, dtype=dtype).sort().values
        word = str(dtype).removeprefix("torch.")
        yield Sample(operator, f"random_{word}", (ids, 100))
        yield Sample(operator, f"column_{word}", (torch.stack([ids, ids + 1000, ids - 1000], 1)[:, 0], 90))
    yield Sample(operator, "far_apart", (torch.tensor([7, 4000, 4001]), 9000))
    yield Sample(operator, "no_items", (torch.empty(0, dtype=torch.int32), 3))
    yield Sample(operator, "nothing", (torch.empty(0, dtype=torch.int64), 0))


def row_ids_samples(operator: str) -> Iterator[Sample]:
    yield Sample(operator, "by_hand", (torch.tensor([0, 2, 2, 3]), 3), representative=True)
    for dtype in (torch.int32, torch.int64):
        offsets = torch.cat([torch.zeros(1), Random(1).integers(0, 5, 200, dtype=dtype).cumsum(0)]).to(dtype)
        yield Sample(operator, f"random_{str(dtype).removeprefix('torch.')}", (offsets, int(offsets[-1])))
    yield Sample(operator, "long_and_empty", (torch.tensor([0, 0, 0, 3000, 3000, 3001]), 3001))
    yield Sample(operator, "no_items", (torch.tensor([0, 0, 0]), 0))
    yield Sample(operator, "no_rows", (torch.tensor([0]), 0))


def gradient_fill_samples(operator: str) -> Iterator[Sample]:
    random = Random(1)
    default = torch.tensor(0.5, dtype=torch.float64)
    for order in ("sorted", "unsorted"):
        indices = _sparse(random, 8, 6, 2, order)
        yield Sample(operator, order, (indices, random.floats(6, dtype=torch.float64), 8, default))
    nothing = torch.empty(0, 1, dtype=torch.int64)
    yield Sample(operator, "no_entries", (nothing, torch.empty(0, dtype=torch.float64), 3, default))


def gradient_fill_grad_samples(operator: str) -> Iterator[Sample]:
    random = Random(2)
    yield Sample(operator, "repeated", (torch.tensor([2, 0, 2, 5]), random.floats(7, dtype=torch.float64)))
    yield Sample(operator, "none", (torch.empty(0, dtype=torch.int64), random.floats(3, dtype=torch.float64)))


def gradient_dense_samples(operator: str) -> Iterator[Sample]:
    random = Random(3)
    default = torch.tensor(0.5, dtype=torch.float64)
    ordered = torch.tensor([[0, 1], [1, 0], [1, 2]])
    yield Sample(operator, "sorted", (ordered, [2, 3], random.floats(3, dtype=torch.float64), default, True))
    again = torch.tensor([[1, 2], [0, 1], [1, 2], [1, 0], [0, 1]])
    yield Sample(operator, "repeated", (again, [2, 3], random.floats(5, dtype=torch.float64), default, False))
    scalar = torch.empty(1, 0, dtype=torch.int64)
    yield Sample(operator, "scalar", (scalar, [], random.floats(1, dtype=torch.float64), default, True))


FAMILY = Family(
    samples={
        "sparse_reshape": reshape_samples,
        "sparse_fill_empty_rows": fill_samples,
        "sparse_fill_empty_rows_grad": fill_grad_samples,
        "sparse_reorder": reorder_samples,
        "sparse_to_dense": dense_samples,
        "row_ids_to_offsets": offsets_samples,
        "offsets_to_row_ids": row_ids_samples,
    },
    gradients={
        "sparse_fill_empty_rows": gradient_fill_samples,
        "sparse_fill_empty_rows_grad": gradient_fill_grad_samples,
        "sparse_to_dense": gradient_dense_samples,
    },
    read_backs={"sparse_fill_empty_rows": ReadBack("the number of empty rows")},
)
