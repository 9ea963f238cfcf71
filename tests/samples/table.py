"""Sample inputs of the family ``table``: tables as the reference fills them, and what to ask of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from samples.sample import FLOATS, Family, Random, Sample
from torch import Tensor

from torchsparse_rec.compat._parity.reference import table as reference_table
from torchsparse_rec.compat._parity.reference.table import ReferenceTable, keys_at
from torchsparse_rec.compat._parity.reference.table_rows import CONSTANT, NORMAL, TRUNCATED_NORMAL, UNIFORM

EXTREMES = [0, -1, 2**63 - 1, -(2**63), 1, 2**31 - 1, -(2**31), 2**32]
KINDS: dict[str, tuple[int, list[float]]] = {
    "constant": (CONSTANT, [0.3]),
    "uniform": (UNIFORM, [-0.05, 0.3]),
    "normal": (NORMAL, [0.1, 0.7]),
    "truncated_normal": (TRUNCATED_NORMAL, [-0.2, 1.3]),
}
# By name: buckets, rows, inserted keys, and n if every n-th key was erased again (0: none).
_SHAPES = {
    "one_bucket": (1, 12, 12, 0),
    "sparse": (9, 30, 20, 3),
    "crowded": (4, 60, 48, 5),
    "two_regions": (130, 900, 800, 4),
    "no_room": (2, 40, 24, 0),
    "no_rows": (3, 0, 0, 0),
}


def state_of(table: ReferenceTable) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return index, entries, counters and free rows; the rows of all erased keys are free."""
    free = [row for row in range(table.used) if table.entries[row].version is None]
    table.free_rows, table.reused = free, 0
    tensors = reference_table.index_tensor(table), reference_table.entries_tensor(table)
    return *tensors, reference_table.counters_tensor(table), torch.tensor(free, dtype=torch.int32)


def keys_of(count: int, seed: int = 0, dtype: torch.dtype = torch.int64) -> list[int]:
    """Return different keys, the extremes among them."""
    info = torch.iinfo(dtype)
    extremes = [key for key in EXTREMES if info.min <= key <= info.max]
    random = Random(seed).integers(info.min, info.max, 2 * count + 1, dtype=torch.int64).tolist()
    return list(dict.fromkeys([*extremes, *random]))[:count]


def filled(buckets: int, rows: int, keys: Sequence[int], erase_every: int = 0, seed: int = 0) -> ReferenceTable:
    """Return a table into which keys were inserted and from which some were erased."""
    table = ReferenceTable.empty(buckets, rows, seed)
    table.find_or_insert(keys, frequencies=[5 * k for k in range(len(keys))], version=3)
    if erase_every:
        table.erase(keys[::erase_every])
    return table


def _queries(keys: list[int], dtype: torch.dtype, count: int = 60) -> Tensor:
    """Return keys of the table and other keys, most of them twice."""
    pool = torch.tensor(keys + keys_of(10, seed=9, dtype=dtype), dtype=dtype)
    return pool[Random(4).integers(0, len(pool), count, dtype=torch.int64)]


def _tables() -> Iterator[tuple[str, ReferenceTable, Tensor]]:
    for dtype in (torch.int64, torch.int32):
        for name, (buckets, rows, count, erase_every) in _SHAPES.items():
            keys = keys_of(count, dtype=dtype)
            ids = _queries(keys, dtype, 60 if count < 100 else 700)
            yield f"{name}_{dtype}".replace("torch.", ""), filled(buckets, rows, keys, erase_every), ids
    crowd = keys_at(70, 69, 0, 40) + keys_at(70, 69, 255, 10)
    yield "collisions", filled(70, 60, crowd[:45], 4), _queries(crowd, torch.int64, 90)
    crowd = keys_at(130, 20, 255, 40, seed=-6) + keys_of(600)
    yield "seed", filled(130, 900, crowd[:500], 4, seed=-6), _queries(crowd, torch.int64, 700)
    yield "seed_one_bucket", filled(1, 12, keys_of(12), seed=2**63 - 1), _queries(keys_of(12), torch.int64)
    yield "no_ids", filled(2, 9, [7, 8]), torch.empty(0, dtype=torch.int64)


def _by_hand() -> ReferenceTable:
    return filled(2, 4, [5, -1, 2**63 - 1])


def find_samples(operator: str) -> Iterator[Sample]:
    ids = torch.tensor([-1, 6, 5, -1, 2**63 - 1])
    yield Sample(operator, "by_hand", (*state_of(_by_hand())[:2], ids), representative=True)
    for name, table, ids in _tables():
        yield Sample(operator, name, (*state_of(table)[:2], ids))


def insert_samples(operator: str) -> Iterator[Sample]:
    def sample(name: str, table: ReferenceTable, ids: Tensor, *rest: object, **flags: bool) -> Sample:
        return Sample(operator, name, (*state_of(table), ids, *rest), **flags)

    ids = torch.tensor([7, -1, 7, 8, 9, 5])
    yield sample("by_hand", _by_hand(), ids, None, None, -1, False, representative=True)
    allowed = torch.tensor([False, True, True, False, True, True])
    frequencies = torch.arange(6, dtype=torch.int32)
    yield sample("all_arguments", _by_hand(), ids, allowed, frequencies, 6, True, representative=True)
    for name, table, ids in _tables():
        n = len(ids)
        allowed = Random(n).integers(0, 2, n, dtype=torch.bool)
        frequencies = Random(n).integers(0, 2**31 - 1, n, dtype=torch.int32)
        yield sample(name, table, ids, None, None, 7, True)
        yield sample(f"{name}_allowed", table, ids, allowed, None, -1, True)
        yield sample(f"{name}_frequencies", table, ids, None, frequencies, 2**31 - 1, False)
        yield sample(f"{name}_all", table, ids, allowed, frequencies, 0, True)


def together_samples(operator: str) -> Iterator[Sample]:
    def sample(name: str, tables: list[tuple[ReferenceTable, Tensor]], gap: int, **flags: bool) -> Sample:
        """Return a call for several tables, with ``gap`` ids of no table before, between and after the tables' ids."""
        states = [list(state) for state in zip(*(state_of(table) for table, _ in tables), strict=True)]
        none = torch.arange(gap, dtype=tables[0][1].dtype)
        pieces, begins, ends = [none], [], []
        for _, ids in tables:
            begins.append(sum(map(len, pieces)))
            pieces += [ids, none]
            ends.append(begins[-1] + len(ids))
        versions = [5 * k - 1 for k in range(len(tables))]
        return Sample(operator, name, (*states, torch.cat(pieces), begins, ends, versions, True), **flags)

    hand = torch.tensor([7, -1, 7, 8, 9, 5])
    yield sample("by_hand", [(_by_hand(), hand), (_by_hand(), hand[:3])], 2, representative=True)
    for dtype in (torch.int64, torch.int32):
        tables = [(table, ids) for _, table, ids in _tables() if ids.dtype == dtype]
        yield sample(f"all_{dtype}".replace("torch.", ""), tables, 0)
        yield sample(f"one_{dtype}".replace("torch.", ""), tables[:1], 1)


def erase_samples(operator: str) -> Iterator[Sample]:
    ids = torch.tensor([5, -1, 6, 5, -1])
    mask = torch.tensor([False, True, True, True, True])
    state = state_of(_by_hand())[:2]
    yield Sample(operator, "by_hand", (*state, ids, None), representative=True)
    yield Sample(operator, "masked", (*state, ids, mask), representative=True)
    for name, table, ids in _tables():
        mask = Random(len(ids)).integers(0, 2, len(ids), dtype=torch.bool)
        yield Sample(operator, name, (*state_of(table)[:2], ids, None))
        yield Sample(operator, f"{name}_masked", (*state_of(table)[:2], ids, mask))


def rehash_samples(operator: str) -> Iterator[Sample]:
    yield Sample(operator, "by_hand", (*state_of(_by_hand())[1:3], 3, 0), representative=True)
    yield Sample(operator, "by_hand_seed", (*state_of(_by_hand())[1:3], 3, 77), representative=True)
    for name, table, _ in _tables():
        for buckets in (1, 5, 64, 129, 200):
            seed = (0, 0, -(2**63), 1, 5)[buckets % 5] if "int32" in name else 0
            yield Sample(operator, f"{name}_to_{buckets}", (*state_of(table)[1:3], buckets, seed))


def _initials(dtype: torch.dtype, dim: int) -> Iterator[tuple[str, tuple]]:
    for name, (kind, parameters) in KINDS.items():
        yield name, (None, kind, parameters, 11)
    values = Random(3).floats(7, dim, dtype=dtype)
    yield "values", (values, CONSTANT, [0.0], -5)


def initialize_samples(operator: str) -> Iterator[Sample]:
    rows, keys = torch.tensor([2, -1, 0]), torch.tensor([5, 6, -7])
    for name, initial in _initials(torch.float32, 3):
        arguments = (torch.zeros(4, 3), rows, keys, *initial)
        yield Sample(operator, f"by_hand_{name}", arguments, representative=name in ("values", "normal"))
    for dtype in FLOATS:
        for dim in (0, 1, 8, 17, 64):
            for name, initial in _initials(dtype, dim):
                index = torch.int64 if dim % 2 else torch.int32
                keys = torch.tensor(keys_of(20, dtype=index), dtype=index)
                rows = torch.randperm(40, generator=Random(dim).generator)[: len(keys)]
                rows[::5] = -1 - rows[::5]
                arguments = (Random(1).floats(40, dim, dtype=dtype), rows, keys, *initial)
                yield Sample(operator, f"{name}_{dtype}_{dim}".replace("torch.", ""), arguments)
    empty = torch.empty(0, dtype=torch.int64)
    yield Sample(operator, "no_rows", (torch.zeros(0, 3), empty, empty, None, CONSTANT, [1.0], 0))


def lookup_samples(operator: str) -> Iterator[Sample]:
    def sample(name: str, table: ReferenceTable, ids: Tensor, dim: int, dtype: torch.dtype, *rest: object) -> Sample:
        rows = len(table.entries)
        bytes_ = dtype == torch.uint8
        integers = Random(6).integers(0, 256, rows, dim, dtype=dtype)
        weight = integers if bytes_ else Random(6).floats(rows, dim, dtype=dtype)
        arguments = (*state_of(table)[:2], weight, ids, *rest)
        return Sample(operator, name, arguments, representative=name.startswith("by_hand"))

    ids = torch.tensor([-1, 6, 5, -1, 2**63 - 1, -9])
    row = torch.tensor([1.0, 2.0, 3.0])
    yield sample("by_hand", _by_hand(), ids, 3, torch.float32, None, None, UNIFORM, [0.0, 1.0], 1)
    yield sample("by_hand_missing", _by_hand(), ids, 3, torch.float32, row, None, CONSTANT, [0.0], 1)
    dims = [0, 1, 8, 17, 33]
    for k, (name, table, ids) in enumerate(_tables()):
        dtype, dim = FLOATS[k % 4], dims[k % 5]
        for kind, initial in _initials(dtype, dim):
            yield sample(f"{name}_{kind}", table, ids, dim, dtype, None, *initial)
        missing = Random(8).floats(dim, dtype=dtype)
        yield sample(f"{name}_missing", table, ids, dim, dtype, missing, None, CONSTANT, [0.0], 0)
        missing = torch.arange(dim, dtype=torch.uint8)
        yield sample(f"{name}_bytes", table, ids, dim, torch.uint8, missing, None, CONSTANT, [0.0], 0)


def assign_samples(operator: str) -> Iterator[Sample]:
    rows = torch.tensor([2, -1, 0, 2])
    values = Random(1).floats(4, 3, dtype=torch.float32)
    yield Sample(operator, "by_hand", (torch.zeros(4, 3), rows, values), representative=True)
    for dtype in (*FLOATS, torch.uint8):
        for dim in (0, 1, 8, 17, 64, 130):
            for items in (0, 300):
                rows = Random(dim).integers(-3, 40, items, dtype=torch.int64)
                numbers = Random(dim).integers(0, 256, items, dim, dtype=torch.int64).to(dtype)
                weight = torch.zeros(40, dim, dtype=dtype)
                name = f"{items}x{dim}_{dtype}".replace("torch.", "")
                yield Sample(operator, name, (weight, rows, numbers))


def sketch_samples(operator: str) -> Iterator[Sample]:
    def sample(name: str, sketch: Tensor, ids: Tensor, *rest: object, **flags: bool) -> Sample:
        return Sample(operator, name, (sketch, ids, *rest), **flags)

    ids = torch.tensor([5, 5, -1, 7, 5])
    mask = torch.tensor([True, False, True, True, True])
    yield sample("by_hand", torch.zeros(50, dtype=torch.int64), ids, None, 3, True, representative=True)
    yield sample("masked", torch.ones(50, dtype=torch.int8), ids, mask, 4, True, representative=True)
    for dtype in (torch.int8, torch.int16, torch.int32, torch.int64):
        most = torch.iinfo(dtype).max
        for index in (torch.int64, torch.int32):
            for width, num_hashes in ((1, 1), (3, 64), (40, 2), (1000, 4)):
                ids = _queries(keys_of(30, dtype=index), index, 200)
                mask = Random(width).integers(0, 4, len(ids), dtype=torch.int64) > 0
                name = f"{width}_{num_hashes}_{dtype}_{index}".replace("torch.", "")
                nothing = torch.zeros(width, dtype=dtype)
                full = most - Random(2).integers(0, 40, width, dtype=torch.int64)
                yield sample(name, nothing, ids, None, num_hashes, True)
                yield sample(f"{name}_almost_full", full.to(dtype), ids, mask, num_hashes, True)
                yield sample(f"{name}_read", full.to(dtype), ids, mask, num_hashes, False)
    yield sample("no_ids", torch.ones(3, dtype=torch.int8), ids[:0], None, 4, True)


FAMILY = Family(
    samples={
        "table_find": find_samples,
        "table_find_or_insert_": insert_samples,
        "tables_find_or_insert_": together_samples,
        "table_erase_": erase_samples,
        "table_rehash": rehash_samples,
        "table_initialize_": initialize_samples,
        "table_lookup": lookup_samples,
        "table_assign_": assign_samples,
        "count_min_sketch_": sketch_samples,
    }
)
