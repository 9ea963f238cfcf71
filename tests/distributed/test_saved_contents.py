"""Checkpoints over ranks: nothing is lost on the way, and what ranks do not have alike is refused."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from torchsparse_rec import _agreed, distributed, nn, optim
from torchsparse_rec.checkpoint import CheckpointStore
from torchsparse_rec.checkpoint.store import Chain
from torchsparse_rec.distributed import ColumnWise, RowWise, TableWise
from torchsparse_rec.variable import (
    CBFFilter,
    CounterFilter,
    EmbeddingVariableOption,
    GlobalStepEvict,
    LRUEvict,
    StorageOption,
    cold,
    rows,
)

# ---- Tables that grow ------------------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Any] = {
    "Adam": lambda its: optim.Adam(its, lr=0.1),
    "momentum": lambda its: optim.SGD(its, lr=0.1, momentum=0.9),
    "Adagrad": lambda its: optim.Adagrad(its, lr=0.1, lr_decay=0.5),
}


def growing(kind: str, plan: Any) -> tuple[Any, Any]:
    model = torch.nn.ModuleDict({"grows": nn.EmbeddingVariable(2, initializer=torch.nn.init.ones_)})
    distributed.shard(model, plan={"grows": plan})
    return model, OPTIMIZERS[kind](model.parameters())


def step(model: Any, optimizer: Any) -> None:
    model["grows"](torch.arange(8)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def goes_on_elsewhere(folder: str, kind: str, plan: Any) -> list[Any]:
    """Train and save; return the rows one step later, and those of a model that has loaded under another plan."""
    model, optimizer = growing(kind, TableWise(1))
    for _ in range(3):
        step(model, optimizer)
    distributed.save(folder, model, optimizer)
    other = growing(kind, plan)
    distributed.load(folder, *other)
    step(model, optimizer)
    step(*other)
    return [each["grows"](torch.arange(8)).detach() for each in (model.eval(), other[0].eval())]


@pytest.mark.parametrize("plan", [TableWise(0), TableWise(1), RowWise()], ids=["first", "same", "rows"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_states_of_a_table_that_the_first_rank_does_not_have_are_kept(two, tmp_path, kind: str, plan: Any) -> None:
    for wanted, found in two.run(goes_on_elsewhere, str(tmp_path), kind, plan):
        assert torch.equal(wanted, found)


def counters(folder: str) -> list[int]:
    """Return the sum of a filter's counters over ranks, as trained, and after each of some loads by other plans."""

    def made(plan: str) -> Any:
        option = EmbeddingVariableOption(CBFFilter(3, max_element_size=1000, false_positive_probability=0.01))
        return distributed.shard(torch.nn.ModuleDict({"grows": nn.EmbeddingVariable(2, ev_option=option)}), plan=plan)

    def count(model: Any) -> int:
        total = model["grows"].admission.sketch.sum()
        dist.all_reduce(total)
        return int(total)

    model = made("row_wise")
    model["grows"](torch.arange(20)).sum().backward()
    found = [count(model)]
    for plan in ["table_wise", "row_wise", "table_wise", "row_wise"]:
        distributed.save(folder, model)
        model = made(plan)
        distributed.load(folder, model)
        found.append(count(model))
    return found


def test_counts_of_a_filter_do_not_grow_by_loads(two, tmp_path) -> None:
    first, *later = two.run(counters, str(tmp_path))[0]
    assert 0 < later[0] <= first <= later[1] <= 2 * later[0] and later[2:] == later[:2]  # one rank, and both


def losing(plan: Any) -> tuple[Any, Any]:
    """Make a table whose keys need to come twice, and go when they do not come for some steps."""
    option = EmbeddingVariableOption(CounterFilter(2), GlobalStepEvict(6, 1))
    model = torch.nn.ModuleDict({"grows": nn.EmbeddingVariable(2, ev_option=option), "fixed": nn.Embedding(9, 2)})
    distributed.shard(model, plan={"grows": plan, "fixed": "data_parallel"})
    return model, optim.Adagrad(model.parameters(), lr=0.1)


def slides(model: Any, optimizer: Any, steps: range) -> None:
    for n in steps:
        keys = torch.arange(10 * (n // 3), 10 * (n // 3) + 20)
        (model["grows"](keys).square().sum() + model["fixed"](keys % 9).square().sum()).backward()
        optimizer.step()
        optimizer.zero_grad()


def rows_of(model: Any, _: Any) -> list[Any]:
    """Return what all ranks have of each key, by key, and the fixed table."""
    its: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(its, [x.tolist() for x in model["grows"].export()])
    return [sorted(row for rank in its for row in zip(*rank, strict=True)), model["fixed"].weight.tolist()]


def changes(folder: str, other: str, plans: list[Any]) -> list[Any]:
    """Save three versions, and go on under each plan; return the rows that there are at last without and with loads."""
    model = losing(plans[0])
    for n in range(3):
        slides(*model, range(4 * n, 4 * n + 4))
        distributed.save(folder, *model, extra=n, delta=True)
    found: list[Any] = []
    for plan in plans:
        loaded = losing(plan)
        assert distributed.load(folder, *loaded, version=3) == 2
        slides(*loaded, range(12, 14))
        found.append(rows_of(*loaded))
        distributed.save(folder, *loaded, delta=True)
        distributed.save(other, *loaded, delta=True)
    slides(*model, range(12, 14))
    return [rows_of(*model), *found]


def test_a_delta_has_what_has_changed(two, tmp_path) -> None:
    folder, other = tmp_path / "folder", tmp_path / "other"
    plans = [RowWise(), RowWise(), TableWise(0), TableWise(1)]
    wanted, *found = two.run(changes, str(folder), str(other), plans)[0]
    assert len(wanted[0]) > 20 and all(rows == wanted for rows in found)
    versions = CheckpointStore(folder).versions()
    assert [(each.kind, each.base) for each in versions] == [
        *[("full", None), ("delta", 1), ("delta", 2)],  # by the model that goes on
        *[("delta", 3), ("delta", 3), ("full", None), ("full", None)],  # loaded: as many ranks, the same plan or not
    ]
    assert {each.kind for each in CheckpointStore(other).versions()} == {"full"}


KEYS = torch.arange(0, 6000, 3)[torch.randperm(2000, generator=torch.Generator().manual_seed(1))]


def in_small_files(folder: str, plan: Any, others: list[tuple[Any, Any]]) -> list[Any]:
    """
    Save keys in files of 100 rows, and load them under other plans and options.

    Returns:
        This rank's keys in the order of its rows as saved; then of each load the same, and how many of the files with
        rows this rank has read.
    """

    def made(plan: Any, option: Any = None) -> Any:
        model = torch.nn.ModuleDict({"grows": nn.EmbeddingVariable(2, ev_option=option)})
        return distributed.shard(model, plan={"grows": plan})

    def keys_of(model: Any) -> list[int]:
        keys, values, _, frequencies = model["grows"].export()
        assert torch.equal(values[:, 0], keys.float()) and torch.equal(frequencies, keys % 7)
        return keys.tolist()

    def reads(chain: Chain, path: Path, shard: Any) -> Any:
        if shard.name == "rows":
            read.add(shard.file)
        return read_shard(chain, path, shard)

    model, read_shard, found = made(plan), Chain.read_shard, []
    model["grows"].insert(KEYS, KEYS.float().unsqueeze(1).repeat(1, 2), frequencies=KEYS % 7)
    with patch.object(rows, "_PART_ROWS", 100), patch.object(Chain, "read_shard", reads):
        distributed.save(folder, model)
        for plan_and_option in others:
            other, read = made(*plan_and_option), set()
            distributed.load(folder, other)
            found.append((keys_of(other), len(read)))
    return [keys_of(model), *found]


def test_a_rank_reads_the_files_of_its_blocks_alone(two, tmp_path) -> None:
    (first, into_rows, away), (nothing, into_others, back) = two.run(
        in_small_files, str(tmp_path / "one"), TableWise(0), [(RowWise(), None), (TableWise(1), None)]
    )
    assert first == KEYS.tolist() and nothing == []
    assert sorted(into_rows[0] + into_others[0]) == sorted(first) and len(into_rows[0]) > 900 < len(into_others[0])
    # 20 files block by block: each rank reads half of them, and the one in the middle.
    assert into_rows[1] <= 11 and into_others[1] <= 11
    assert away == ([], 0) and back == (first, 20)


def test_who_reads_all_keys_has_them_in_the_order_of_rows(two, tmp_path) -> None:
    small = EmbeddingVariableOption(evict_option=LRUEvict(capacity=1000))
    one, other = two.run(
        in_small_files, str(tmp_path), RowWise(), [(RowWise(), None), (TableWise(1), None), (RowWise(), small)]
    )
    for saved, again, *_ in (one, other):
        assert again[0] == saved == [key for key in KEYS.tolist() if key in {*saved}]
    assert other[2][0] == one[0] + other[0]
    assert len(one[3][0]) == len(other[3][0]) == 500  # of a table that cannot have them all


def test_rows_of_other_tiers_are_not_in_memory_at_once(tmp_path, monkeypatch) -> None:
    def made(name: str) -> nn.EmbeddingVariable:
        storage = StorageOption("DRAM_SSD", str(tmp_path / name), [20_000])
        return nn.EmbeddingVariable(16, ev_option=EmbeddingVariableOption(storage_option=storage))

    monkeypatch.setattr(cold, "STATE_DICT_BYTES", 1000)
    table, other = made("one"), made("two")
    table.insert(torch.arange(2000), torch.rand(2000, 16))
    distributed.save(tmp_path / "saved", torch.nn.ModuleList([table]))
    distributed.load(tmp_path / "saved", torch.nn.ModuleList([other]))
    assert len(other.cold) > 1000 and all(map(torch.equal, table.export(), other.export()))


class Named(nn.EmbeddingVariable):
    """A table that grows, with a parameter beside it."""

    def __init__(self) -> None:
        super().__init__(2)
        self.scale = torch.nn.Parameter(torch.ones(3))


def test_what_is_beside_a_table_that_grows_in_its_module_is_kept(tmp_path) -> None:
    table, other = Named(), Named()
    torch.nn.init.zeros_(table.scale)
    table.insert([7], [[1.0, 2.0]])
    distributed.save(tmp_path, table)
    distributed.load(tmp_path, other)
    assert torch.equal(other.scale, table.scale) and all(map(torch.equal, other.export(), table.export()))


# ---- Beside tables ---------------------------------------------------------------------------------------------------


def test_keys_with_dots_are_keys_of_their_own(tmp_path) -> None:
    table = nn.Embedding(4, 2)
    distributed.save(tmp_path, table, extra={"ema": {"w.x": torch.ones(2)}, "ema.w": {"x": torch.zeros(2)}})
    extra = distributed.load(tmp_path, table)
    assert extra["ema"]["w.x"].tolist() == [1, 1] and extra["ema.w"]["x"].tolist() == [0, 0]


class Scale(torch.nn.Module):
    """A module whose first version had other units."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.by = torch.nn.Parameter(torch.ones(2))

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *args: Any) -> None:
        if metadata.get("version", 1) < 2:
            state[f"{prefix}by"] = state[f"{prefix}by"] * 100
        super()._load_from_state_dict(state, prefix, metadata, *args)


def test_a_module_knows_by_which_version_of_it_a_state_was_written(tmp_path) -> None:
    model = torch.nn.ModuleDict({"scale": Scale(), "table": nn.Embedding(4, 2)})
    distributed.save(tmp_path, model)
    distributed.load(tmp_path, model)
    assert model["scale"].by.tolist() == [1, 1]


@pytest.mark.parametrize("beside", [lambda dtype: torch.nn.Linear(2, 2, dtype=dtype), None], ids=["layer", "table"])
def test_other_dtypes_are_refused(tmp_path, beside: Any) -> None:
    saved, other = (
        nn.EmbeddingVariable(2, dtype=dtype) if beside is None else beside(dtype)
        for dtype in (torch.float32, torch.bfloat16)
    )
    distributed.save(tmp_path, torch.nn.ModuleDict({"x": saved}))
    with pytest.raises(ValueError, match="must be .*float32.*, got .*bfloat16"):
        distributed.load(tmp_path, torch.nn.ModuleDict({"x": other}))


# ---- What ranks do not have alike ------------------------------------------------------------------------------------


def fixed(plan: Any = "row_wise") -> Any:
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"table": nn.Embedding(64, 4)})
    return distributed.shard(model, plan=plan)


def unlike(folder: str, what: str) -> None:
    first, model = dist.get_rank() == 0, fixed()
    optimizer = optim.Adagrad(model.parameters(), lr=0.1)
    if what == "save":
        distributed.save(folder, model, optimizer if first else None)
    if what == "states":
        by_row = ByRow([*model.parameters()])
        if first:
            by_row.step()
        distributed.save(folder, model, by_row)
    distributed.save(folder, model, optimizer)
    if what == "load":
        distributed.load(folder, model, optimizer if first else None)
    if what == "version":
        distributed.load(folder, model, optimizer, version=None if first else 1)
    if what == "folder":
        distributed.load(folder if first else "x" * 300, model)
    if what == "none":
        distributed.load(folder if first else None, model)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("what", "kind", "text"),
    [
        ("save", RuntimeError, "save: the optimizer must be the same on all ranks, got None on rank 1, .*Adagrad"),
        ("states", RuntimeError, r"states of table 'table.weight' must be .*, got \[\] on rank 1, \['sum'\] on rank 0"),
        ("load", RuntimeError, "load: the optimizer must be the same on all ranks, got None on rank 1, .*Adagrad"),
        ("version", RuntimeError, "load: the version must be the same on all ranks, got 1 on rank 1, None on rank 0"),
        ("folder", OSError, "rank 1: .*File name too long"),
        ("none", TypeError, "rank 1: "),
    ],
)
def test_ranks_that_are_given_different_things_are_told(two, tmp_path, what: str, kind: Any, text: str) -> None:
    for error in two.errors(unlike, str(tmp_path), what):
        assert isinstance(error, kind)
        with pytest.raises(kind, match=text):
            raise error
    assert what not in ("save", "states") or not CheckpointStore(tmp_path).versions()


def other_folders(folder: str) -> None:
    """Load from folders of the same name on two machines, each with a first version of its own."""
    model = fixed()
    for name in ("host0", "host1"):
        distributed.save(Path(folder) / name, model)
        step = torch.optim.SGD(model.parameters(), lr=1.0)
        model["table"](torch.arange(64)).sum().backward()
        step.step()
    store = CheckpointStore.__init__

    def mine(self: CheckpointStore, path: Any, keep: int | None = None) -> None:
        store(self, Path(path) / f"host{dist.get_rank()}", keep)

    CheckpointStore.__init__ = mine  # type: ignore[method-assign]
    try:
        distributed.load(folder, model)
    finally:
        CheckpointStore.__init__ = store  # type: ignore[method-assign]


def test_folders_of_one_name_on_two_machines_are_not_mixed(two, tmp_path) -> None:
    for error in two.errors(other_folders, str(tmp_path)):
        assert isinstance(error, OSError) and "ranks [1] do not see what rank 0 sees" in str(error)


class ByRow(torch.optim.Optimizer):
    """Adagrad with a number for each row, as somebody may write it."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["sum"] = torch.ones(len(parameter))


def by_columns(folder: str) -> None:
    model = fixed(ColumnWise())
    optimizer = ByRow([*model.parameters()])
    optimizer.step()
    distributed.save(folder, model, optimizer)


def test_numbers_of_rows_whose_columns_are_split_are_refused(two, tmp_path) -> None:
    for error in two.errors(by_columns, str(tmp_path)):
        assert isinstance(error, ValueError)
        assert r"state 'sum' of table 'table.weight' must be [64, 2], by columns, something for each row" in str(error)


def waits_not(folder: str) -> bool:
    """Fail on the first rank while the second is in the middle of a table; say whether another thread can write it."""
    model = torch.nn.ModuleDict({"grows": nn.EmbeddingVariable(2)})
    distributed.shard(model, plan={"grows": "row_wise"})
    model["grows"](torch.arange(64)).sum().backward()

    def phase(name: str) -> None:
        if name == "write shard 0" and dist.get_rank() == 0:
            raise OSError(28, "No space left on device")

    rounds, _agreed._ROUND = _agreed._ROUND, 1e-4
    try:
        distributed.save(folder, model, on_phase=phase)
    except OSError as error:
        assert error.errno == 28
        thread = threading.Thread(target=model["grows"].insert, args=([1], [[1.0, 2.0]]), daemon=True)
        thread.start()
        thread.join(10)
        return not thread.is_alive()
    finally:
        _agreed._ROUND = rounds
    return False


def test_no_lock_is_held_after_an_error(two, tmp_path) -> None:
    assert two.run(waits_not, str(tmp_path)) == [True, True]
