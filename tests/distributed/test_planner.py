"""Which plan the planner chooses: the fastest by its model, of those that fit and that the user allows."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
import torch
from distributed.planner_cases import BATCH, GLOO, plans, used

from torchsparse_rec.data.generated import zipf
from torchsparse_rec.distributed.machine import MACHINES, Machine
from torchsparse_rec.distributed.plan import ColumnWise, Replicated, RowWise, TablePlan, TableWise
from torchsparse_rec.distributed.planner import Use, choose, expected_distinct
from torchsparse_rec.examples.dlrm import CARDINALITIES
from torchsparse_rec.tables.blocks import Blocks

# ---- The model -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plan", "rows", "pooled", "sent"),
    [
        # Bytes that leave one of 4 ranks: 100 distinct of 400 ids in 50 bags, rows of 8 float32.
        (RowWise(), 10_000, True, 3 / 4 * 100 * (4 + 2 * 32)),
        (RowWise(), 10_000, False, 3 / 4 * 100 * (4 + 2 * 32)),
        (TableWise(0), 10_000, True, 3 / 4 * (400 * 4 + 50 * 2 * 32)),
        (TableWise(0), 10_000, False, 3 / 4 * 100 * (4 + 2 * 32)),
        (ColumnWise([0, 1]), 10_000, True, 3 / 4 * (2 * 400 * 4 + 50 * 2 * 32)),
        (Replicated(), 120, True, 3 * 100 * (4 + 32)),
        (Replicated(), 10_000, True, 3 * 100 * (4 + 32)),
    ],
    ids=str,
)
def test_bytes_sent(plan: TablePlan, rows: int, pooled: bool, sent: float) -> None:
    use = Use("t", rows, 8, 4, 64, ids=400, distinct=100, bags=50, pooled=pooled)
    assert choose([use], 4, None, GLOO, {"t": plan}).tables["t"].sent == sent


@pytest.mark.parametrize("constant", ["message_seconds", "bytes_per_second", "rows_per_second", "copied_per_second"])
@pytest.mark.parametrize("plan", ["row_wise", "table_wise", "column_wise", "data_parallel"])
def test_each_constant_counts(constant: str, plan: str) -> None:
    # Half as fast: a step takes longer; with all four twice as slow it takes twice as long.
    by_rows = replace(used("t", 100_000), distinct=10)
    slower = 2.0 if constant == "message_seconds" else 0.5
    half = replace(GLOO, **{constant: slower * getattr(GLOO, constant)})
    once, twice = (max(choose([by_rows], 4, None, machine, {"t": plan}).seconds) for machine in (GLOO, half))
    assert once < twice < 2 * once
    slow = Machine(
        2 * GLOO.message_seconds, *(getattr(GLOO, f"{n}_per_second") / 2 for n in ("bytes", "rows", "copied"))
    )
    assert max(choose([by_rows], 4, None, slow, {"t": plan}).seconds) == pytest.approx(2 * once)


@pytest.mark.parametrize("ranks", [2, 3, 5, 64])
@pytest.mark.parametrize("rows", [1, 17, 100, 5000, 123_457])
def test_bytes_of_ranks_are_those_of_blocks(ranks: int, rows: int) -> None:
    use, blocks = used("t", rows), Blocks(rows)
    got = choose([use], ranks, None, GLOO, {"t": RowWise()}).bytes
    assert got == [blocks.rows_of(rank, ranks) * use.row_bytes for rank in range(ranks)]
    assert choose([use], ranks, None, GLOO, {"t": TableWise(1)}).bytes == [0, use.bytes(), *[0] * (ranks - 2)]
    assert choose([use], ranks, None, GLOO, {"t": Replicated()}).bytes == [use.bytes()] * ranks
    assert sum(choose([use], ranks, None, GLOO, {"t": ColumnWise()}).bytes) == use.bytes()


@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.0, 1.05, 2.0])
@pytest.mark.parametrize(("ids", "rows"), [(0, 10), (1, 1), (1, 1000), (4096, 3), (4096, 1000), (1000, 2_000_000)])
def test_expected_distinct_is_the_sum_over_all_ids(ids: int, rows: int, exponent: float) -> None:
    edges = torch.arange(1, rows + 2, dtype=torch.float64)
    below = edges.log() if exponent == 1 else (edges ** (1 - exponent) - 1) / (1 - exponent)
    chance = below.diff() / below[-1]
    want = float(-torch.expm1(ids * torch.log1p(-chance.clamp_max(1 - 1e-16))).sum())
    assert expected_distinct(ids, rows, exponent) == pytest.approx(want, rel=1e-4, abs=1e-9)


def test_expected_distinct_is_what_is_counted() -> None:
    random = torch.Generator().manual_seed(0)
    drawn = zipf(torch.rand(100, BATCH, generator=random, dtype=torch.float64), 100_000)
    counted = sum(each.unique().numel() for each in drawn) / 100
    assert expected_distinct(BATCH, 100_000) == pytest.approx(counted, rel=0.01)


# ---- What is chosen --------------------------------------------------------------------------------------------------


def test_tiny_tables_are_replicated_and_large_ones_split_by_rows() -> None:
    chosen = plans(choose([used(f"C{v}", v) for v in CARDINALITIES], 64, None, GLOO))
    assert {chosen[f"C{v}"] for v in CARDINALITIES if v < 5} == {Replicated()}
    assert {chosen[f"C{v}"] for v in CARDINALITIES if v > 100} == {RowWise()}


def test_tables_of_long_bags_are_whole_on_ranks_that_share_them() -> None:
    chosen = plans(choose([used(f"t{k}", 100_000, hotness=10) for k in range(8)], 4, None, GLOO))
    assert sorted(str(plan) for plan in chosen.values()) == sorted(2 * [str(TableWise(rank)) for rank in range(4)])


def test_the_largest_go_first_to_the_rank_with_the_least_to_do() -> None:
    # Of sizes 7, 6, 5, 4, 3 in this order: 7 + 4 + 3 and 6 + 5.
    uses = [used(f"t{size}", 100_000, hotness=10, batch=1000 * size) for size in (3, 6, 4, 7, 5)]
    chosen = plans(choose(uses, 2, None, GLOO, {use.name: "table_wise" for use in uses}))
    assert chosen == {
        **{f"t{size}": TableWise(0) for size in (7, 4, 3)},
        **{f"t{size}": TableWise(1) for size in (6, 5)},
    }


def test_a_table_with_most_of_the_work_is_split_by_rows() -> None:
    cold = [used(f"cold{k}", 100_000, hotness=10, batch=512) for k in range(8)]
    hot = used("hot", 100_000, hotness=10, batch=8 * BATCH)
    alone = choose([hot, *cold], 4, None, GLOO, {"hot": TableWise(0)})
    planned = choose([hot, *cold], 4, None, GLOO)
    assert plans(planned)["hot"] == RowWise()
    assert "had more to do than others" in planned.tables["hot"].why
    assert max(planned.seconds) <= 1.2 * sum(planned.seconds) / 4
    assert max(planned.seconds) < max(alone.seconds)


def test_tables_so_short_that_messages_take_longest_are_all_replicated() -> None:
    uses = [replace(used(f"t{k}", 5000, batch=64), distinct=20) for k in range(3)]
    planned = choose(uses, 4, None, replace(GLOO, message_seconds=1.0))
    assert set(plans(planned).values()) == {Replicated()}
    assert set(plans(choose(uses, 4, None, replace(GLOO, message_seconds=0.0))).values()) == {RowWise()}
    # Unless one of them may not be.
    mixed = choose(uses, 4, None, replace(GLOO, message_seconds=1.0), {"t0": RowWise()})
    assert plans(mixed)["t0"] == RowWise()


def test_a_single_rank_has_all_tables() -> None:
    uses = [used("a", 3), used("b", 10**7), replace(used("c", 7), rows=None), replace(used("d", 10**5), pooled=False)]
    assert set(plans(choose(uses, 1, None, GLOO)).values()) == {TableWise(0)}


def test_tables_that_grow_are_split_by_keys() -> None:
    planned = choose([replace(used("t", 1000), rows=None)], 4, 1, GLOO)
    assert plans(planned) == {"t": RowWise()} and planned.tables["t"].why == "it grows"


@pytest.mark.parametrize("backend", MACHINES)
@pytest.mark.parametrize("seed", range(6))
def test_no_other_plans_are_much_faster(seed: int, backend: str) -> None:
    drawn = random.Random(seed)
    uses = [used(f"t{k}", int(10 ** drawn.uniform(0.5, 6)), drawn.choice([1, 2, 10, 50])) for k in range(4)]
    options: list[TablePlan] = [RowWise(), TableWise(0), TableWise(1), Replicated()]
    machine = MACHINES[backend]
    every = (
        max(choose(uses, 2, None, machine, dict(zip("t0 t1 t2 t3".split(), each, strict=True))).seconds)
        for each in itertools.product(options, repeat=4)
    )
    assert max(choose(uses, 2, None, machine).seconds) <= 1.25 * min(every)


# ---- What the user says ----------------------------------------------------------------------------------------------


def test_given_plans_are_kept() -> None:
    uses = [used(f"t{k}", v) for k, v in enumerate([10, 10**7, 10**5, 1000, 50])]
    given = {"t0": "row_wise", "t1": TableWise(2), "t2": ColumnWise([3, 1]), "t3": Replicated()}
    planned = choose(uses, 4, None, GLOO, given)
    assert plans(planned) == {"t0": RowWise(), **{k: v for k, v in given.items() if k != "t0"}, "t4": RowWise()}
    assert [each.why for each in planned.tables.values()][:4] == ["given"] * 4


@pytest.mark.parametrize("allowed", ["row_wise", "table_wise", "column_wise", "data_parallel"])
def test_constraints_are_kept(allowed: str) -> None:
    uses = [used("a", 10), used("b", 10**6, hotness=20), used("hot", 10**6, batch=10 * BATCH)]
    want = {"row_wise": RowWise, "table_wise": TableWise, "column_wise": ColumnWise, "data_parallel": Replicated}
    planned = choose(uses, 4, None, GLOO, constraints={use.name: [allowed] for use in uses})
    assert {type(plan) for plan in plans(planned).values()} == {want[allowed]}
    both = choose(uses, 4, None, GLOO, constraints={use.name: [allowed, TableWise(3)] for use in uses})
    assert all(isinstance(plan, want[allowed]) or plan == TableWise(3) for plan in plans(both).values())


@pytest.mark.parametrize(
    ("given", "constraints", "message"),
    [
        ({"u": "row_wise"}, {}, r"plan must name tables of the module, \['grows', 'long', 't'\], got 'u'"),
        ({}, {"u": ["row_wise"]}, r"constraints must name tables of the module, \['grows', 'long', 't'\], got 'u'"),
        ({"t": "row_wise"}, {"t": ["row_wise"]}, "table 't' must have a plan or constraints, got both"),
        ({}, {"t": []}, "constraints of table 't' must have a plan, got none"),
        ({}, {"t": ["rows"]}, "plan of table 't' must be one of row_wise, .*, got 'rows'"),
        (
            {"t": ColumnWise([0, 1])},
            {},
            r"table 't' must not be ColumnWise\(ranks=\(0, 1\)\): .* needs whole rows",
        ),
        ({}, {"t": ["column_wise"]}, "needs whole rows"),
        (
            {"grows": Replicated()},
            {},
            r"'grows', which grows, must be RowWise\(\) or TableWise\(\), got Replicated\(\)",
        ),
        ({"long": RowWise()}, {}, "'long' must have fewer than 2.31 rows to be RowWise or Replicated, got 2147483648"),
        ({}, {"long": ["data_parallel", "table_wise"]}, "'long' must have fewer than 2.31 rows"),
        ({"grows": ColumnWise()}, {}, r"which grows, must be RowWise\(\) or TableWise\(\)"),
    ],
)
def test_what_a_table_cannot_have(given: dict, constraints: dict, message: str) -> None:
    uses = [replace(used("t", 100), whole_rows=True), replace(used("grows", 100), rows=None), used("long", 2**31)]
    with pytest.raises(ValueError, match=f"^shard: .*{message}"):
        choose(uses, 2, None, GLOO, given, constraints)


def test_columns_are_not_chosen_for_a_table_whose_rows_must_stay_whole() -> None:
    use, constraints = used("t", 100), {"t": ["column_wise", TableWise(1)]}
    slow_rows = replace(GLOO, copied_per_second=1.0)  # of which two ranks copy a half each
    assert plans(choose([use], 2, None, slow_rows, constraints=constraints)) == {"t": ColumnWise((0, 1))}
    use = replace(use, whole_rows=True)
    assert plans(choose([use], 2, None, slow_rows, constraints=constraints)) == {"t": TableWise(1)}


def test_a_table_too_long_for_blocks_is_whole() -> None:
    uses = [used("long", 2**31), used("longest", 2**31 - 1)]
    planned = choose(uses, 2, 2 * uses[0].bytes(), GLOO)
    assert [type(plan) for plan in plans(planned).values()] == [TableWise, RowWise]
    assert plans(choose(uses, 2, None, GLOO, {"long": ColumnWise()}))["long"] == ColumnWise((0, 1))


def test_what_choose_refuses() -> None:
    with pytest.raises(ValueError, match="^shard: names of tables must differ, got .'t', 't'.$"):
        choose([used("t", 1), used("t", 2)], 2, None, GLOO)
    with pytest.raises(ValueError, match="^choose: ranks must be at least 1, got 0$"):
        choose([], 0, None, GLOO)


# ---- Memory ----------------------------------------------------------------------------------------------------------


def test_a_table_too_large_for_a_rank_is_split_by_rows() -> None:
    # Ids that all differ and are sent slowly: by rows much more is sent than by bags, so the table would be whole.
    slow_wire = replace(GLOO, bytes_per_second=1e6)
    use = Use("t", 10**6, 16, 4, 128, ids=100_000, distinct=100_000, bags=10)
    assert plans(choose([use], 2, use.bytes(), slow_wire)) == {"t": TableWise(0)}
    planned = choose([use], 2, use.bytes() - 1, slow_wire)
    assert plans(planned) == {"t": RowWise()}
    assert "TableWise does not fit" in planned.tables["t"].why


def test_tables_are_replicated_if_there_is_room() -> None:
    # A step of replicated tables alone has a message less.
    uses = [used(f"t{k}", 1000 + k, batch=10) for k in range(10)]
    slow_messages = replace(GLOO, message_seconds=1.0)
    planned = choose(uses, 2, None, slow_messages)
    assert set(plans(planned).values()) == {Replicated()}
    memory = sum(use.bytes() for use in uses)
    assert plans(choose(uses, 2, memory, slow_messages)) == plans(planned)
    planned = choose(uses, 2, memory - 1, slow_messages)
    assert set(plans(planned).values()) != {Replicated()}
    assert max(planned.bytes) < memory


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("seed", range(5))
def test_every_rank_has_room(ranks: int, seed: int) -> None:
    drawn = random.Random(seed)
    uses = [used(f"t{k}", int(10 ** drawn.uniform(2, 6)), drawn.choice([1, 10, 50])) for k in range(40)]
    # Blocks of a table need not be as many on all ranks, and have rows without an id.
    memory = int(1.13 * sum(use.bytes() for use in uses) / ranks)
    planned = choose(uses, ranks, memory, GLOO)
    assert max(planned.bytes) <= memory
    assert sum(planned.bytes) >= sum(use.bytes() for use in uses)


def test_a_table_that_must_be_whole_finds_room_before_those_that_need_not() -> None:
    uses = [used("whole", 60_000), *(used(f"t{k}", 30_000, hotness=50) for k in range(4))]
    memory = int(1.1 * sum(use.bytes() for use in uses) / 2)
    planned = choose(uses, 2, memory, GLOO, {"whole": "table_wise"})
    assert max(planned.bytes) <= memory and isinstance(plans(planned)["whole"], TableWise)


def test_full_ranks_split_their_tables_for_those_of_others() -> None:
    # Two ranks in eight have all the work, and of memory no more than their table takes.
    uses = [used("a", 50_000, hotness=10), used("b", 49_999, hotness=10)]
    planned = choose(uses, 8, uses[0].bytes(), GLOO)
    assert set(plans(planned).values()) == {RowWise()}
    # Unless one of them must not be split.
    memory = int(1.001 * uses[0].bytes())
    planned = choose(uses, 8, memory, GLOO, {"a": TableWise(0)})
    assert plans(planned) == {"a": TableWise(0), "b": TableWise(1)} and max(planned.bytes) <= memory


@pytest.mark.parametrize("given", ["row_wise", "table_wise", "data_parallel", None])
def test_nothing_fits(given: str | None) -> None:
    uses = [used("users", 10**6), used("days", 7)]
    with pytest.raises(
        ValueError, match="^shard: memory must hold the tables and their states, got 1,000 bytes"
    ) as error:
        choose(uses, 2, 1000, GLOO, {} if given is None else {"users": given})
    text = str(error.value)
    assert text.splitlines()[1].split()[:4] == ["table", "rows", "bytes", "plan"]
    assert "users  1,000,000  128 MB" in text and "days   7" in text
