"""What the planner chooses is the same everywhere, spreads the work of Criteo's tables, and can be read."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from distributed.planner_cases import BATCH, GLOO, plans, used

from torchsparse_rec.data.generated import zipf
from torchsparse_rec.distributed.machine import MACHINES
from torchsparse_rec.distributed.plan import ColumnWise, Planned, Replicated, RowWise, TableWise
from torchsparse_rec.distributed.planner import Use, choose
from torchsparse_rec.examples.dlrm import CARDINALITIES
from torchsparse_rec.tables.blocks import Blocks

# ---- The same everywhere ---------------------------------------------------------------------------------------------


def mixed(count: int) -> list[Use]:
    """Return tables of which some get each plan, and some are split to balance others."""
    drawn = random.Random(1)
    return [
        used(f"t{k}", int(10 ** drawn.uniform(0.5, 6)), drawn.choice([1, 20]), drawn.choice([100, 1000, 10_000]))
        for k in range(count)
    ]


PROGRAM = """
from test_planned import GLOO, choose, mixed
print(choose(mixed(200), 16, 10**9, GLOO).digest())
"""


def test_the_same_plans_whatever_the_hash_seed() -> None:
    here = os.path.dirname(__file__)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join([here, *sys.path])},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in ("1", "2")
    ]
    digests = {process.communicate(timeout=300)[0].strip() for process in processes}
    planned = choose(mixed(200), 16, 10**9, GLOO)
    assert digests == {planned.digest()}
    assert {type(plan) for plan in plans(planned).values()} == {RowWise, TableWise, Replicated}


def test_the_same_plans_whatever_the_order_of_tables() -> None:
    uses = mixed(100)
    want = plans(choose(uses, 8, 10**9, GLOO))
    for seed in range(3):
        random.Random(seed).shuffle(uses)
        assert plans(choose(uses, 8, 10**9, GLOO)) == want


def test_steps_grow_with_tables_as_those_of_sorting() -> None:
    def steps(count: int) -> int:
        uses, calls = mixed(count), 0

        def note(frame: object, event: str, argument: object) -> None:
            nonlocal calls
            calls += event in ("call", "c_call")

        sys.setprofile(note)
        try:
            choose(uses, 64, 10**11, GLOO)
        finally:
            sys.setprofile(None)
        return calls

    assert steps(5000) <= 12 * steps(500)


# ---- Criteo's tables -------------------------------------------------------------------------------------------------


def rows_read(planned: Planned, batches: dict[str, torch.Tensor]) -> list[int]:
    """
    Return how many rows each rank reads for all ranks: of replicated tables all read alike.

    Args:
        planned: the plans.
        batches: ids of each table, a row for each rank.
    """
    ranks = len(planned.seconds)
    read = torch.zeros(ranks, dtype=torch.int64)
    for name, each in planned.tables.items():
        distinct = [ids.unique() for ids in batches[name]]
        assert each.use.rows is not None
        if isinstance(each.plan, RowWise):
            blocks = Blocks(each.use.rows)
            begins = torch.tensor([blocks.begin(rank, ranks) for rank in range(1, ranks)])
            owners = torch.bucketize(blocks.reversed[torch.cat(distinct) % blocks.count], begins, right=True)
            read += owners.bincount(minlength=ranks)
        elif isinstance(each.plan, TableWise):
            read[each.plan.rank] += batches[name].numel()
    return read.tolist()


@pytest.mark.parametrize("backend", MACHINES)
def test_no_rank_reads_many_more_rows_than_the_mean(backend: str) -> None:
    ranks, random = 64, torch.Generator().manual_seed(0)
    batches = {
        str(rows): zipf(torch.rand(ranks, BATCH, generator=random, dtype=torch.float64), rows) for rows in CARDINALITIES
    }
    uses = [used(str(rows), rows) for rows in CARDINALITIES]

    def most(planned: Planned) -> float:
        read = rows_read(planned, batches)
        return max(read) / (sum(read) / ranks)

    # Short tables have fewer blocks than there are ranks.
    assert most(choose(uses, ranks, None, MACHINES[backend], {use.name: RowWise() for use in uses})) > 1.25
    assert most(choose(uses, ranks, None, MACHINES[backend])) <= 1.2


# ---- What is said ----------------------------------------------------------------------------------------------------


def test_what_is_printed() -> None:
    uses = [used("users", 10**6), replace(used("grows", 100), rows=None), used("days", 7)]
    text = str(choose(uses, 2, None, GLOO, {"users": ColumnWise([1, 0])}))
    lines = text.splitlines()
    assert lines[0].split() == "table rows bytes plan ranks sent a step time why".split()
    assert lines[1].startswith("users  1,000,000  128 MB       ColumnWise  1, 0   279 kB")
    assert lines[2].startswith("grows  grows      128 B a row  RowWise     all")
    assert lines[3].startswith("days   7          896 B        Replicated  all")
    assert lines[4].startswith("2 ranks: a step takes ") and "rank 0 has 64 MB" in lines[4]


def test_to_dict_is_json() -> None:
    uses = [used("a", 1000), used("b", 10**6), replace(used("c", 100), rows=None)]
    planned = choose(uses, 2, None, GLOO, {"b": TableWise(1)})
    said = json.loads(json.dumps(planned.to_dict()))
    assert said == planned.to_dict()
    assert said["tables"]["b"]["plan"] == "TableWise" and said["tables"]["b"]["ranks"] == [1]
    assert said["tables"]["c"]["rows"] is None and said["tables"]["c"]["ranks"] is None
    assert said["bytes"] == list(planned.bytes) and said["seconds"] == list(planned.seconds)


def test_digests_differ_with_plans_alone() -> None:
    uses = [used("a", 1000), used("b", 10**6)]
    want = choose(uses, 2, None, GLOO, {"a": TableWise(0), "b": RowWise()}).digest()
    assert choose(uses, 2, None, MACHINES["nccl"], {"a": TableWise(0), "b": RowWise()}).digest() == want
    assert choose(uses, 2, None, GLOO, {"a": TableWise(1), "b": RowWise()}).digest() != want
    assert choose(uses, 3, None, GLOO, {"a": TableWise(0), "b": RowWise()}).digest() != want
    assert choose([uses[0], used("b", 10**6 + 1)], 2, None, GLOO, {"a": TableWise(0), "b": RowWise()}).digest() != want
