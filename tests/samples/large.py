"""
Samples that use several threads and cross the sizes at which kernels change their algorithms.

``LARGE_SAMPLES``: builders of :class:`sample.Sample`, called only by the test that needs one, since they are large.
``EXACT_SAMPLES``: builders of a sample and its results, for inputs of small whole numbers, computed by torch's own
operations.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from samples.large_sizes import (
    SIZES,
    Build,
    Size,
    floats_of,
    generator_of,
    ids_of,
    offsets_of,
    segment_ids_of,
    whole_of,
)
from samples.row_optimizer import RULES, last_steps_for, states_for
from samples.sample import Random, Sample, families
from torch import Tensor

from torchsparse_rec.compat._parity.reference import EXTREMES, MAX, MEAN, SQRTN, SUM

# ---- Samples --------------------------------------------------------------------------------------------------------


def _segment(operator: str, size: Size, reduction: int, numbers: Callable = floats_of) -> Sample:
    indices, ids = ids_of(size), segment_ids_of(size)
    if operator == "sparse_segment_reduce":
        return Sample(operator, str(size), (numbers(size, size.rows), indices, ids, size.segments, reduction))
    grad = numbers(size, size.segments)
    out: tuple[Tensor, ...] = ()
    if operator.endswith("_out"):
        out = (grad.new_empty(0), indices.new_empty(0)) if "v2" in operator else (grad.new_empty(0),)
    return Sample(operator, str(size), (grad, indices, ids, size.rows, reduction, *out))


def _bag(operator: str, size: Size, mode: int, weighted: bool, numbers: Callable = floats_of) -> Sample:
    indices, offsets = ids_of(size), offsets_of(size)
    padding = int(indices[0]) if size.items > 1 and size.rows > 1 else -1
    weights = torch.rand(size.items, generator=generator_of(size)).to(size.dtype) + 0.5 if weighted else None
    table, grad = numbers(size, size.rows), numbers(size, size.segments)
    forward = (table, indices, offsets, weights, mode, padding, False, False)
    if operator == "embedding_bag":
        return Sample(operator, str(size), forward)
    needs_output = mode in EXTREMES or operator == "embedding_weights_backward"
    output, argmax = torch.ops.torchsparse_rec.embedding_bag.default(*forward) if needs_output else (None, None)
    if operator == "embedding_weights_backward":
        return Sample(operator, str(size), (grad, table, indices, offsets, weights, output, mode, padding))
    argmax = argmax if mode in EXTREMES else None
    return Sample(
        operator, str(size), (grad, indices, offsets, weights, argmax, size.rows, mode, padding, mode == MEAN)
    )


def _per_id(operator: str, size: Size) -> Sample:
    indices = ids_of(size)
    if operator == "embedding":
        return Sample(operator, str(size), (floats_of(size, size.rows), indices, -1, False, False))
    grad = floats_of(size, size.items)
    return Sample(operator, str(size), (grad, indices, None, None, None, size.rows, SUM, -1, True))


def _row_update(size: Size, rule: int, hyperparameters: list[float]) -> Sample:
    """Return an update with one state, whose numbers are positive."""
    weight, indices = floats_of(size, size.rows), ids_of(size)
    grad = floats_of(size, size.items)
    state = weight.abs() + 0.5
    return Sample("row_update", str(size), (weight, state, None, None, grad, indices, rule, hyperparameters))


def _row_optimizer(operator: str, rows: int, dim: int, rule: str, dtype: torch.dtype) -> Sample:
    """Return a call on rows that are stale by up to 1,500 steps; every other row is named in it."""
    number, h = RULES[rule]
    random, steps = Random(rows), 1500
    history = torch.zeros(2 * steps, 8, dtype=torch.float64)
    for step in range(1, steps + 1):
        torch.ops.torchsparse_rec.row_optimizer_advance_.default(history, number, h, step, 0)
    weight, last = random.floats(rows, dim, dtype=dtype), last_steps_for(random, rows, steps)
    states = states_for(random, number, h, rows, dim, dtype)
    named = torch.arange(1, rows, 2)
    if operator == "row_optimizer_advance_":
        return Sample(operator, "", (history[:2048], number, h, 1024, 0))
    if operator == "row_optimizer_current":
        return Sample(operator, "", (weight, states, last, history, named, number, h, steps, 0))
    tables = ([weight], states, [last], history)
    if operator == "row_optimizer_make_current_":
        return Sample(operator, "", (*tables, number, h, steps, 0, []))
    values = [random.floats(named.shape[0], dim, dtype=states[0].dtype if states else dtype)]
    return Sample(operator, "", (*tables, [named], values, None, number, h, steps + 1, 0, False, []))


def _row_optimizer_builds() -> list[Build]:
    builds = []
    kinds = (("momentum", 1), ("adamw", 17), ("adam", 64), ("partial_rowwise_adam", 40), ("rmsprop_both", 9))
    for n, (rule, dim) in enumerate(kinds):
        for m, operator in enumerate(("update_", "current", "make_current_", "advance_")):
            dtype = (torch.float32, torch.float64, torch.bfloat16, torch.float32, torch.float16)[(n + m) % 5]
            name = f"row_optimizer_{operator}"
            build = partial(_row_optimizer, name, 1000, dim, rule, dtype)
            builds.append(Build(f"{name}-1000x{dim}-{rule}_{dtype}".replace("torch.", ""), build))
    return builds


def _integers(operator: str, count: int, low: int, high: int, dtype: torch.dtype) -> Sample:
    x = torch.randint(low, high, (count,), generator=torch.Generator().manual_seed(count)).to(dtype)
    return Sample(operator, "", (x, *HASH_ARGUMENTS.get(operator, ())))


def _columns(columns: int, count: int) -> Sample:
    generator = torch.Generator().manual_seed(columns)
    values = [torch.randint(-2, 10**6, (count,), generator=generator) for _ in range(columns)]
    values = [x.int() if c % 2 else x for c, x in enumerate(values)]
    buckets, missing = [c % 3 * 999 for c in range(columns)], [c % 3 for c in range(columns)]
    return Sample("column_ids", "", (values, buckets, missing))


# The hashes' arguments after their integers or strings.
HASH_ARGUMENTS = {
    "to_hash_bucket_fast": (999_983,),
    "to_hash_bucket_strong": (2**40, 5, -7),
    "to_hash_bucket": (2**50,),
}


def _strings(operator: str, count: int, longest: int) -> Sample:
    generator = torch.Generator().manual_seed(count)
    lengths = torch.randint(0, longest, (count,), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    text = torch.randint(0, 256, (int(offsets[-1]),), generator=generator).to(torch.uint8)
    return Sample(operator, "", (text, offsets, *HASH_ARGUMENTS.get(operator.removeprefix("string_"), ())))


def _crosses(rows: int, longest: int) -> Sample:
    """Return a cross of a jagged column of up to ``longest`` values, a matrix, and a column of one value per row."""
    generator = torch.Generator().manual_seed(rows)
    lengths = torch.randint(0, longest + 1, (rows,), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    sizes = ((int(offsets[-1]),), (rows, 2), (rows,))
    values = [torch.randint(-(2**62), 2**62, size, generator=generator) for size in sizes]
    bounds = [offsets, torch.empty(0, dtype=torch.int64), torch.arange(rows + 1)]
    return Sample("cross_hashed", "", (values, bounds, 999_983, 3))


def _large_samples() -> list[Build]:
    builds = []
    for n, size in enumerate(SIZES):
        reduction = (SUM, MEAN, SQRTN)[n % 3]
        for operator in ("", "_grad", "_grad_out", "_grad_v2", "_grad_v2_out"):
            name = f"sparse_segment_reduce{operator}"
            builds.append(Build(f"{name}-{size}-{reduction}", partial(_segment, name, size, reduction)))
        backwards = "embedding_dense_backward", "embedding_sparse_backward", "embedding_coo_backward"
        for name in ("embedding", *backwards):
            builds.append(Build(f"{name}-{size}-per_id", partial(_per_id, name, size)))
        for name in ("embedding_bag", *backwards):
            mode, weighted = ((MEAN, True), (MAX, False), (SQRTN, False))[n % 3]
            builds.append(Build(f"{name}-{size}-{mode}", partial(_bag, name, size, mode, weighted)))
        rule, hyperparameters = ((1, [0.125, 0.5]), (5, [0.125, 0.0]), (11, [0.125, 0.25, 0.25]))[n % 3]
        builds.append(Build(f"row_update-{size}-{rule}", partial(_row_update, size, rule, hyperparameters)))
        mode = (SQRTN, SUM, MEAN)[n % 3]
        name = "embedding_weights_backward"
        builds.append(Build(f"{name}-{size}-{mode}", partial(_bag, name, size, mode, True)))
    hashes = ("fingerprint64", *HASH_ARGUMENTS)
    ranges = ((0, 1), (0, 1_000), (-(2**62), 2**62), (10**15, 10**15 + 400_000), (0, 2**31))
    for count in (0, 1, 1_000, 200_000):
        for low, high in ranges:
            for name in ("unique", "unique_with_counts", *hashes):
                for dtype in (torch.int64, torch.int32) if -(2**31) <= low and high <= 2**31 else (torch.int64,):
                    build = partial(_integers, name, count, low, high, dtype)
                    builds.append(Build(f"{name}-{count}_from_{low}_to_{high}_{dtype}".replace("torch.", ""), build))
    strings = [(0, 1), (300_000, 20), (20_000, 300)]
    for name in (f"string_{name}" for name in hashes):
        builds += [Build(f"{name}-{n}_to_{size}", partial(_strings, name, n, size)) for n, size in strings]
    for rows, longest in ((0, 3), (200_000, 3), (5_000, 40)):
        builds.append(Build(f"cross_hashed-{rows}_of_{longest}", partial(_crosses, rows, longest)))
    for columns, count in ((1, 0), (3, 200_000), (130, 2_000)):
        builds.append(Build(f"column_ids-{columns}_of_{count}", partial(_columns, columns, count)))
    return builds + _row_optimizer_builds()


# ---- Samples whose results are known --------------------------------------------------------------------------------


def _exact(size: Size) -> bool:
    return size.dtype in (torch.float32, torch.float64)


def _exact_reduce(size: Size) -> tuple[Sample, tuple[Tensor, ...]]:
    sample = _segment("sparse_segment_reduce", size, SUM, whole_of)
    data, indices, ids, segments, _ = sample.arguments
    return sample, (data.new_zeros(segments, size.dim).index_add_(0, ids.long(), data[indices.long()]),)


def _exact_grad(operator: str, size: Size) -> tuple[Sample, tuple[Tensor, ...]]:
    sample = _segment(operator, size, SUM, whole_of)
    grad, indices, ids = sample.arguments[:3]
    dense = grad.new_zeros(size.rows, size.dim).index_add_(0, indices.long(), grad[ids.long()])
    rows = indices.unique()
    return sample, (dense[rows.long()], rows) if "v2" in operator else (dense,)


def _exact_bag(size: Size) -> tuple[Sample, tuple[Tensor, ...]]:
    sample = _bag("embedding_bag", size, SUM, False, whole_of)
    table, indices, offsets, _, _, padding, _, _ = sample.arguments
    kept = (indices != padding).unsqueeze(1)
    bags = torch.repeat_interleave(offsets.diff())
    picked = table[indices.long()].where(kept, torch.zeros((), dtype=table.dtype))
    pooled = table.new_zeros(size.segments, size.dim).index_add_(0, bags, picked)
    return sample, (pooled, torch.empty(0, dtype=torch.int64))


def _exact_unique(name: str, count: int, low: int, high: int) -> tuple[Sample, tuple[Tensor, ...]]:
    sample = _integers(name, count, low, high, torch.int64)
    ascending, inverse, counts = torch.unique(sample.arguments[0], return_inverse=True, return_counts=True)
    first = torch.full(ascending.shape, count).scatter_reduce_(0, inverse, torch.arange(count), "amin")
    order = first.argsort()
    rank = torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0]))
    results = (ascending[order], rank[inverse], counts[order])
    return sample, results if name == "unique_with_counts" else results[:2]


def _exact_samples() -> list[Build]:
    builds = []
    for size in filter(_exact, SIZES):
        builds.append(Build(f"sparse_segment_reduce-{size}", partial(_exact_reduce, size)))
        builds.append(Build(f"embedding_bag-{size}", partial(_exact_bag, size)))
        for operator in ("_grad", "_grad_out", "_grad_v2", "_grad_v2_out"):
            name = f"sparse_segment_reduce{operator}"
            builds.append(Build(f"{name}-{size}", partial(_exact_grad, name, size)))
    for name in ("unique", "unique_with_counts"):
        for count, low, high in (
            (0, 0, 1),
            (300_000, 0, 1),
            (300_000, -50, 50),
            (300_000, 0, 2**62),
            (300_000, 10**15, 10**15 + 100_000),
            (100_000, -(2**40), 2**40),
        ):
            build = partial(_exact_unique, name, count, low, high)
            builds.append(Build(f"{name}-{count}_from_{low}_to_{high}", build))
    return builds


LARGE_SAMPLES = [*_large_samples(), *(build for family in families() for build in family.large)]
# Quick samples, for checks of arithmetic alone.
_QUICK = ("1000x", "1025x", "5000x17", "1000_from")
MIDDLE_SAMPLES = [build for build in LARGE_SAMPLES if build.name.split("-")[1].startswith(_QUICK)]
EXACT_SAMPLES = _exact_samples()
