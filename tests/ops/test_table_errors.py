"""Bad arguments of the family ``table``: the error's text, that nothing has been written, and that nothing crashes."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from calls import assert_same_bits, operator, written
from devices import KERNELS, cpu_only
from pairs import in_pairs
from samples.table import filled, state_of
from torch import Tensor

from torchsparse_rec import ops

pytestmark = pytest.mark.usefixtures("kernels")

_LONG = torch.int64


def _valid() -> dict[str, dict[str, object]]:
    """Return a valid call of every operator, by the names in its schema."""
    index, entries, counters, free_rows = state_of(filled(2, 6, [5, 6, 7], 2))
    table = {"index": index, "entries": entries}
    ids = torch.tensor([5, 8, 8])
    initial = {"values": None, "kind": 0, "parameters": [0.5], "seed": 0}
    weight = torch.ones(6, 4)
    return {
        "table_find": {**table, "ids": ids},
        "table_find_or_insert_": {
            **table,
            "counters": counters,
            "free_rows": free_rows,
            "ids": ids,
            "allowed": torch.tensor([True, True, False]),
            "frequencies": torch.zeros(3, dtype=torch.int32),
            "version": 3,
            "count": True,
        },
        "table_erase_": {**table, "ids": ids, "mask": torch.tensor([True, True, False])},
        "table_rehash": {"entries": entries, "counters": counters, "buckets": 3, "seed": 0},
        "table_initialize_": {"weight": weight, "rows": torch.tensor([0, 2]), "keys": torch.tensor([5, 7]), **initial},
        "table_lookup": {**table, "weight": weight, "ids": ids, "missing": torch.ones(4), **initial},
        "table_assign_": {"weight": weight, "rows": torch.tensor([0, 2]), "values": torch.zeros(2, 4)},
        "count_min_sketch_": {
            "sketch": torch.zeros(9, dtype=torch.int16),
            "ids": ids,
            "mask": torch.tensor([True, True, False]),
            "num_hashes": 2,
            "count": True,
        },
    }


@dataclass(frozen=True)
class Bad:
    """One argument that is wrong, and the error's text."""

    operator: str
    argument: str
    value: object
    text: str
    error: type[Exception] = ValueError
    others: tuple[tuple[str, object], ...] = ()

    def arguments(self) -> dict[str, object]:
        given = {**_valid()[self.operator], **dict(self.others)}
        value = self.value(given[self.argument]) if callable(self.value) else self.value
        return {**given, self.argument: value}


def _zeros(*shape: int, dtype: torch.dtype = _LONG) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def _apart(x: Tensor) -> Tensor:
    """Return the same numbers in a tensor that is not contiguous."""
    return torch.stack([x, x], -1)[..., 0]


def _state() -> list[Bad]:
    bad = []
    of_index = "index must be contiguous int32 [buckets, 16], or with a seed [(buckets + 1) * 16], got "
    of_entries = "entries must be contiguous int64 [rows, 2], rows below 2^31, got "
    of_counters = "counters must be contiguous int64 [8], got "
    for name in ("table_find", "table_find_or_insert_", "table_erase_", "table_lookup"):
        bad += [
            Bad(name, "index", _zeros(2, 16), of_index + "Long [2, 16]"),
            Bad(name, "index", _zeros(2, 15, dtype=torch.int32), of_index + "Int [2, 15]"),
            Bad(name, "index", _zeros(0, 16, dtype=torch.int32), of_index + "Int [0, 16]"),
            Bad(name, "index", _zeros(16, dtype=torch.int32), of_index + "Int [16]"),
            Bad(name, "index", _zeros(40, dtype=torch.int32), of_index + "Int [40]"),
            Bad(name, "index", _zeros(1, 1, 16, dtype=torch.int32), of_index + "Int [1, 1, 16]"),
            Bad(name, "index", _apart, of_index + "Int [2, 16]"),
            Bad(name, "entries", _zeros(6, 2, dtype=torch.int32), of_entries + "Int [6, 2]"),
            Bad(name, "entries", _zeros(6, 3), of_entries + "Long [6, 3]"),
            Bad(name, "entries", _zeros(6), of_entries + "Long [6]"),
            Bad(name, "entries", _apart, of_entries + "Long [6, 2]"),
        ]
    for name in ("table_find_or_insert_", "table_rehash"):
        bad += [
            Bad(name, "counters", _zeros(7), of_counters + "Long [7]"),
            Bad(name, "counters", _zeros(8, 1), of_counters + "Long [8, 1]"),
            Bad(name, "counters", _zeros(8, dtype=torch.int32), of_counters + "Int [8]"),
            Bad(name, "counters", _apart, of_counters + "Long [8]"),
        ]
    bad += [
        Bad("table_rehash", "entries", _zeros(6, 3), of_entries + "Long [6, 3]"),
        Bad("table_rehash", "entries", _apart, of_entries + "Long [6, 2]"),
    ]
    return bad


def _ids() -> list[Bad]:
    bad = []
    for name, argument in {
        "table_find": "ids",
        "table_find_or_insert_": "ids",
        "table_erase_": "ids",
        "table_lookup": "ids",
        "count_min_sketch_": "ids",
        "table_initialize_": "keys",
    }.items():
        bad += [
            Bad(name, argument, _zeros(3, 1), f"{argument} must have rank 1, got shape [3, 1]"),
            Bad(name, argument, _zeros(), f"{argument} must have rank 1, got shape []"),
            Bad(name, argument, torch.ones(3), f"{argument} must be int32 or int64, got Float"),
            Bad(name, argument, _zeros(3, dtype=torch.int16), f"{argument} must be int32 or int64, got Short"),
        ]
    for name, argument in {
        "table_find_or_insert_": "allowed",
        "table_erase_": "mask",
        "count_min_sketch_": "mask",
    }.items():
        of_each = f"{argument} must be Bool [3], one for each id, got "
        bad += [
            Bad(name, argument, _zeros(2, dtype=torch.bool), of_each + "Bool [2]"),
            Bad(name, argument, _zeros(3, 1, dtype=torch.bool), of_each + "Bool [3, 1]"),
            Bad(name, argument, _zeros(3), of_each + "Long [3]"),
        ]
    of_each = "frequencies must be Int [3], one for each id, got "
    return bad + [
        Bad("table_find_or_insert_", "frequencies", _zeros(4, dtype=torch.int32), of_each + "Int [4]"),
        Bad("table_find_or_insert_", "frequencies", _zeros(3), of_each + "Long [3]"),
    ]


def _inserting() -> list[Bad]:
    name = "table_find_or_insert_"
    of_rows = "free_rows must be contiguous int32 of rank 1, got "
    used = _zeros(8).index_fill(0, torch.tensor([0]), 3)
    return [
        Bad(name, "free_rows", _zeros(3), of_rows + "Long [3]"),
        Bad(name, "free_rows", _zeros(3, 1, dtype=torch.int32), of_rows + "Int [3, 1]"),
        Bad(name, "free_rows", _apart, of_rows + "Int [2]"),
        Bad(name, "version", -2, "version must be in [-1, 2^31), got -2"),
        Bad(name, "version", 2**31, "version must be in [-1, 2^31), got 2147483648"),
        Bad(name, "counters", used + torch.tensor([4] + [0] * 7), "counters[0] must be in [0, 6], got 7"),
        Bad(name, "counters", used - torch.tensor([4] + [0] * 7), "counters[0] must be in [0, 6], got -1"),
        Bad(name, "counters", used + torch.tensor([0, 3] + [0] * 6), "counters[1] must be in [0, 2], got 3"),
        Bad(name, "counters", used - torch.tensor([0, 1] + [0] * 6), "counters[1] must be in [0, 2], got -1"),
    ] + [
        Bad(
            name,
            "free_rows",
            torch.tensor(rows, dtype=torch.int32),
            f"free_rows[{k}] must be in [0, 3), without a key and more than the one before it, got {rows[k]}",
        )
        for rows, k in (([0, 3], 1), ([-1, 0], 0), ([1, 2], 0), ([2, 2], 1), ([2, 0], 1))
    ]


def _rows() -> list[Bad]:
    bad = []
    for name in ("table_initialize_", "table_lookup", "table_assign_"):
        bad += [
            Bad(name, "weight", torch.ones(6), "weight must be contiguous, of rank 2, got shape [6]"),
            Bad(name, "weight", _apart, "weight must be contiguous, of rank 2, got shape [6, 4]"),
            Bad(
                name,
                "weight",
                _zeros(6, 4),
                "weight must be float16, bfloat16, float32 or float64, got Long",
                others=(("missing", _zeros(4)),) if name == "table_lookup" else (),
            ),
        ]
    of_bytes = "weight must be float16, bfloat16, float32 or float64, got Byte"
    bytes_ = _zeros(6, 4, dtype=torch.uint8)
    bad += [
        Bad("table_initialize_", "weight", bytes_, of_bytes),
        Bad("table_lookup", "weight", bytes_, of_bytes, others=(("missing", None),)),
    ]
    for name in ("table_initialize_", "table_assign_"):
        bad += [
            Bad(name, "rows", _zeros(2, dtype=torch.int32), "rows must be int64 of rank 1, got Int [2]"),
            Bad(name, "rows", _zeros(2, 1), "rows must be int64 of rank 1, got Long [2, 1]"),
            Bad(name, "rows", torch.tensor([0, 6]), "rows[1] must be below 6, got 6", IndexError),
            Bad(name, "rows", torch.tensor([2**62, 0]), "rows[0] must be below 6, got 4611686018427387904", IndexError),
        ]
    of_values, of_missing = "values must be Float [", "missing must be Float [4], got "
    return bad + [
        Bad("table_initialize_", "keys", _zeros(3), "keys must be as many as rows, 2, got 3"),
        Bad("table_assign_", "values", torch.ones(3, 4), of_values + "2, 4], got Float [3, 4]"),
        Bad("table_assign_", "values", torch.ones(2, 3), of_values + "2, 4], got Float [2, 3]"),
        Bad("table_assign_", "values", torch.ones(8), of_values + "2, 4], got Float [8]"),
        Bad("table_assign_", "values", _zeros(2, 4), of_values + "2, 4], got Long [2, 4]"),
        Bad("table_lookup", "weight", torch.ones(5, 4), "weight must have a row for each of entries, 6, got 5"),
        Bad("table_lookup", "missing", torch.ones(5), of_missing + "Float [5]"),
        Bad("table_lookup", "missing", torch.ones(1, 4), of_missing + "Float [1, 4]"),
        Bad("table_lookup", "missing", torch.ones(4).double(), of_missing + "Double [4]"),
    ]


def _initial() -> list[Bad]:
    bad = []
    for name in ("table_initialize_", "table_lookup"):
        of_values, of_parameters = "values must be Float [rows, 4], got ", "parameters must be "
        bad += [
            Bad(name, "values", torch.ones(0, 4), of_values + "Float [0, 4]"),
            Bad(name, "values", torch.ones(2, 3), of_values + "Float [2, 3]"),
            Bad(name, "values", torch.ones(4), of_values + "Float [4]"),
            Bad(name, "values", torch.ones(2, 4).half(), of_values + "Half [2, 4]"),
            Bad(name, "kind", 4, "kind must be in [0, 4), got 4"),
            Bad(name, "kind", -1, "kind must be in [0, 4), got -1"),
            Bad(name, "parameters", [], of_parameters + "1 numbers for kind 0, got 0"),
            Bad(name, "parameters", [1.0, 2.0], of_parameters + "1 numbers for kind 0, got 2"),
        ]
        for kind in (1, 2, 3):
            text = f"{of_parameters}2 numbers for kind {kind}, got 1"
            bad.append(Bad(name, "parameters", [1.0], text, others=(("kind", kind),)))
    return bad


def _others() -> list[Bad]:
    name = "count_min_sketch_"
    of_sketch = "sketch must be contiguous, of rank 1 and not empty, got shape "
    bad = [
        Bad("table_rehash", "buckets", value, f"buckets must be in [1, 2^40), got {value}")
        for value in (0, -1, 2**40, 2**62)
    ]
    return bad + [
        Bad(name, "sketch", _zeros(0), of_sketch + "[0]"),
        Bad(name, "sketch", _zeros(3, 3), of_sketch + "[3, 3]"),
        Bad(name, "sketch", _apart, of_sketch + "[9]"),
        Bad(name, "sketch", torch.ones(9), "sketch must be int8, int16, int32 or int64, got Float"),
        Bad(name, "sketch", _zeros(9, dtype=torch.uint8), "sketch must be int8, int16, int32 or int64, got Byte"),
        Bad(name, "num_hashes", 0, "num_hashes must be in [1, 64], got 0"),
        Bad(name, "num_hashes", 65, "num_hashes must be in [1, 64], got 65"),
    ]


CASES = {(x.operator, x.text): x for x in (*_state(), *_ids(), *_inserting(), *_rows(), *_initial(), *_others())}
TEXTS = dict.fromkeys(text for _, text in CASES)


def _clones(arguments: dict[str, object]) -> dict[str, object]:
    return {name: x.clone() if isinstance(x, Tensor) else x for name, x in arguments.items()}


@pytest.mark.parametrize("name", _valid())
def test_valid_arguments_are_valid(name: str) -> None:
    """Call every operator: else the tests of bad arguments would show nothing."""
    operator(name)(*_valid()[name].values())
    assert [x.name for x in operator(name)._schema.arguments] == list(_valid()[name])


# Both kinds of kernels meet every check; where several operators have it, each of them meets it on one kind.
@in_pairs(lambda name, text, _: (name, text) in CASES, name=_valid(), text=TEXTS, kernels=KERNELS)
def test_bad_arguments(name: str, text: str, kernels: str) -> None:
    """Name operator, argument, what was expected and what was given; leave the outputs as they were."""
    case = CASES[name, text]
    arguments = case.arguments()
    before = _clones(arguments)
    with pytest.raises(case.error, match=f"^{re.escape(f'{case.operator}: {case.text}')}$"):
        operator(case.operator)(*arguments.values())
    if kernels == "emulated" and case.error is IndexError:
        return  # the bad row is left out, and the others are written
    for place in written(case.operator):
        name = operator(case.operator)._schema.arguments[place].name
        if isinstance(before[name], Tensor):
            assert_same_bits(arguments[name], before[name])


@pytest.mark.parametrize("name", ["table_initialize_", "table_assign_"])
def test_the_first_of_several_bad_rows_is_told(name: str, restore_threads: None) -> None:
    """Name the first bad row also if several threads look for one."""
    rows = torch.arange(400_000) % 6
    rows[123_456:] = 9
    valid = _valid()[name]
    if name == "table_initialize_":
        valid |= {"rows": rows, "keys": rows}
    else:
        valid |= {"rows": rows, "values": torch.zeros(len(rows), 4)}
    for threads in (1, 2):
        torch.set_num_threads(threads)
        with pytest.raises(IndexError, match=rf"^{name}: rows\[123456\] must be below 6, got 9$"):
            operator(name)(*valid.values())


@cpu_only
def test_the_python_functions_name_their_argument() -> None:
    weight, ids = torch.ones(6, 4), torch.tensor([5])
    index, entries, _, _ = state_of(filled(2, 6, [5, 6, 7], 2))
    kinds = "kind must be one of 'constant', 'uniform', 'normal', 'truncated_normal', got 'gauss'"
    with pytest.raises(ValueError, match=f"^table_initialize_: {kinds}$"):
        ops.table_initialize_(weight, ids, ids, kind="gauss")
    with pytest.raises(ValueError, match=f"^table_lookup: {kinds}$"):
        ops.table_lookup(index, entries, weight, ids, kind="gauss")


# ---- State that is not a table's ------------------------------------------------------------------------------------


def _damages() -> dict[str, Callable[[Tensor, Tensor], object]]:
    generator = torch.Generator().manual_seed(1)
    return {
        "rows_beyond": lambda index, entries: index[:, 4:].fill_(2**31 - 1),
        "rows_below": lambda index, entries: index[:, 4:].fill_(-(2**31)),
        "all_tags": lambda index, entries: index[:, :3].fill_(-1),
        "passed_below_zero": lambda index, entries: index[:, 3].fill_(-(2**31)),
        "passed_too_often": lambda index, entries: index[:, 3].fill_(2**31 - 1),
        "garbage": lambda index, entries: index.random_(generator=generator),
        "entries": lambda index, entries: entries.random_(generator=generator),
        "entries_free": lambda index, entries: entries.fill_(-1),
        "everything": lambda index, entries: (index.random_(generator=generator), entries.random_(generator=generator)),
    }


@pytest.mark.parametrize("damage", _damages())
def test_damaged_state_neither_crashes_nor_gives_rows_that_are_not_there(damage: str) -> None:
    """Run under AddressSanitizer with `make sanitize`."""
    for seed in range(5):
        index, entries, counters, free_rows = state_of(filled(130, 500, list(range(400)), 3, seed % 2))
        _damages()[damage](index.view(-1, 16), entries)  # damage the row that holds the seed, too
        ids = torch.arange(seed, 600 + seed)
        weight = torch.ones(500, 3)
        rows = ops.table_find(index, entries, ids)
        assert ((rows >= -1) & (rows < 500)).all()
        assert ops.table_lookup(index, entries, weight, ids).shape == (600, 3)
        freed = ops.table_erase_(index, entries, ids[::3])
        assert ((freed >= -1) & (freed < 500)).all()
        try:
            inserted = ops.table_find_or_insert_(index, entries, counters, free_rows, ids, version=2, count=True)
        except ValueError as error:
            assert "without a key and more than the one before it" in str(error) and "entries_free" != damage
            assert (entries[free_rows.long(), 1] != -1).any()
        else:
            for x in inserted:
                assert ((x >= -1) & (x < 500)).all()
        assert ops.table_rehash(entries, counters, 7).shape == (7, 16)


# ---- Autograd -------------------------------------------------------------------------------------------------------


@cpu_only
def test_a_lookup_has_no_gradient() -> None:
    index, entries, _, _ = state_of(filled(2, 6, [5, 6, 7], 2))
    weight = torch.ones(6, 4, requires_grad=True)
    assert not ops.table_lookup(index, entries, weight, torch.tensor([6])).requires_grad


@cpu_only
@pytest.mark.parametrize("name", ["table_initialize_", "table_assign_"])
def test_autograd_notices_rows_that_are_written(name: str) -> None:
    """Raise in the backward if a saved tensor was overwritten, rather than give a wrong gradient."""
    weight = torch.ones(6, 4)
    leaf = torch.ones(6, 4, requires_grad=True)
    loss = (leaf * weight).sum()
    rows = torch.tensor([1])
    with torch.no_grad():
        if name == "table_initialize_":
            ops.table_initialize_(weight, rows, rows, parameters=(3.0,))
        else:
            ops.table_assign_(weight, rows, torch.full((1, 4), 3.0))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@cpu_only
@pytest.mark.parametrize("name", ["table_initialize_", "table_assign_"])
def test_parameters_are_written_without_grad_mode_alone(name: str) -> None:
    """Refuse to write a leaf that requires grad while autograd records, as operations in place do."""
    weight = torch.nn.Parameter(torch.ones(6, 4))
    rows = torch.tensor([1])

    def write() -> None:
        if name == "table_initialize_":
            ops.table_initialize_(weight, rows, rows, parameters=(3.0,))
        else:
            ops.table_assign_(weight, rows, torch.full((1, 4), 3.0))

    with pytest.raises(RuntimeError, match="no_grad"):
        write()
    assert weight.eq(1).all()
    with torch.no_grad():
        write()
    assert weight[1].eq(3).all()
