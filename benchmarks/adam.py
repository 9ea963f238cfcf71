"""
Benchmark rows of Adam on a table where a step touches the rows of 8,192 new ids, with the dense update's result.

torch's SparseAdam is a peer for its time alone: it does not update rows without gradient. The moments begin as numbers
other than zero: pages of zeros would not be in memory before a row is first touched.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

import torchsparse_rec
from torchsparse_rec.typing import GradMode

from .ids import SPREADS
from .rows import Call, Case, Make, Options, Row
from .timing import Pair, Plan, clock_block, plan_for

DIM, IDS, LEARNING_RATE = 64, 8_192, 1e-3
# So many batches that within a row's windows no batch comes twice.
BATCHES = 512
# Steps after which rows have been idle for as long as in a long training.
WARM_UP = {"ours": 300, "torch fused dense Adam": 2, "torch SparseAdam": 20}
PEERS = ("torch fused dense Adam", "torch SparseAdam")


@dataclass
class Problem:
    """A table's size, and batches of ids."""

    rows: int
    ids: int
    spread: str
    device: str
    count: int = BATCHES
    # How many dense gradients are made. One is enough: its time does not depend on which of its rows are zero.
    dense_gradients: int = 1

    @cached_property
    def batches(self) -> tuple[Tensor, ...]:
        """``count`` batches of ids, each ``[ids]``."""
        return SPREADS[self.spread](self.ids * self.count, self.rows, self.device).split(self.ids)

    @cached_property
    def distinct(self) -> tuple[Tensor, ...]:
        """Each batch's distinct ids, ascending."""
        return tuple(batch.unique() for batch in self.batches)

    @cached_property
    def gradient(self) -> Tensor:
        """The gradient of a lookup's result, ``[ids, DIM]``. Its first rows serve as the gradient of distinct rows."""
        return torch.randn(self.ids, DIM, generator=self._generator(1), device=self.device)

    def table(self) -> Tensor:
        """Make a table ``[rows, DIM]``, the same at each call."""
        return torch.empty(self.rows, DIM, device=self.device).uniform_(-0.05, 0.05, generator=self._generator(0))

    def _generator(self, seed: int) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(seed)


def module_and_optimizer(
    side: str, grad_mode: GradMode, problem: Problem
) -> tuple[torch.nn.Embedding, torch.optim.Optimizer]:
    """Make a table of ours or torch's, and its Adam."""
    table = problem.table()
    if side == "ours":
        ours = torchsparse_rec.nn.Embedding(problem.rows, DIM, _weight=table, grad_mode=grad_mode)
        return ours, torchsparse_rec.optim.Adam(ours.parameters(), lr=LEARNING_RATE, in_backward=True)
    sparse = side == "torch SparseAdam"
    torchs = torch.nn.Embedding(problem.rows, DIM, _weight=table, sparse=sparse)
    if sparse:
        return torchs, torch.optim.SparseAdam(torchs.parameters(), lr=LEARNING_RATE)
    return torchs, torch.optim.Adam(torchs.parameters(), lr=LEARNING_RATE, fused=True)


@dataclass(frozen=True)
class Training:
    """One side's table, optimizer and step."""

    module: torch.nn.Embedding
    optimizer: torch.optim.Optimizer
    step: Call


def whole_step(side: str, grad_mode: GradMode, problem: Problem) -> Training:
    """Make a training whose step is lookup, backward and update."""
    module, optimizer = module_and_optimizer(side, grad_mode, problem)
    ids = itertools.cycle(problem.batches)

    def step() -> None:
        module(next(ids)).backward(problem.gradient)
        optimizer.step()
        optimizer.zero_grad()

    return Training(module, optimizer, step)


def update_alone(side: str, grad_mode: GradMode, problem: Problem) -> Training:
    """Make a training whose step is the update by given gradients: dense ones for torch's dense Adam, else merged."""
    module, optimizer = module_and_optimizer(side, grad_mode, problem)
    # module.weight would flush all rows of our table.
    (weight,) = module.parameters()
    gradients = dense_gradients(problem) if side == "torch fused dense Adam" else row_gradients(problem)

    def step() -> None:
        weight.grad = next(gradients)
        optimizer.step()

    return Training(module, optimizer, step)


def dense_gradients(problem: Problem) -> Iterator[Tensor]:
    """Return the dense gradients of the first batches, in a circle."""
    made = []
    for rows in problem.distinct[: problem.dense_gradients]:
        made.append(torch.empty(problem.rows, DIM, device=problem.device).zero_())
        made[-1][rows] = problem.gradient[: len(rows)]
    return itertools.cycle(made)


def row_gradients(problem: Problem) -> Iterator[Tensor]:
    """Yield the sparse gradient of each batch, in a circle."""
    for rows in itertools.cycle(problem.distinct):
        yield torch.sparse_coo_tensor(
            rows.unsqueeze(0),
            problem.gradient[: len(rows)],
            (problem.rows, DIM),
            is_coalesced=True,
            check_invariants=False,
        )


KINDS: dict[str, Callable[[str, GradMode, Problem], Training]] = {"update": update_alone, "step": whole_step}


def warm(side: str, training: Training) -> Call:
    """Train until rows have been idle as long as in a long training; return the step."""
    raise_malloc_thresholds()
    training.step()
    for state in training.optimizer.state.values():
        state["exp_avg"].uniform_(-1e-3, 1e-3)
        state["exp_avg_sq"].uniform_(1e-6, 1e-5)
    for _ in range(WARM_UP[side]):
        training.step()
    return training.step


def raise_malloc_thresholds() -> None:
    """
    Make glibc keep freed memory: its thresholds grow to the largest block of up to 32 MB that was ever freed.

    SparseAdam makes and drops temporaries of 2 MB. If each is made of new pages it takes several times as long, which
    would depend on what ran before in the process.
    """
    torch.empty(31 << 20, dtype=torch.uint8)


# ---- Sides in processes of their own --------------------------------------------------------------------------------


def time_side(side: str, kind: str, grad_mode: GradMode, problem: Problem, blocks: int) -> tuple[list[float], Plan]:
    """Return the milliseconds of the calls that count, in so many blocks, and the plan of the calls."""
    step = warm(side, KINDS[kind](side, grad_mode, problem))
    plan = plan_for(clock_block(step, 2, problem.device)[1], False, problem.device)
    times = [clock_block(step, plan.calls, problem.device)[plan.drop :] for _ in range(blocks)]
    return list(itertools.chain(*times)), plan


def print_side(side: str, kind: str, grad_mode: GradMode, rows: int, ids: int, spread: str, threads: int) -> None:
    """Print the milliseconds of two blocks of a side's calls, and their plan, as JSON."""
    torch.set_num_threads(threads)
    times, plan = time_side(side, kind, grad_mode, Problem(rows, ids, spread, "cpu"), 2)
    print(json.dumps([times, plan.__dict__]))


def pair_apart(options: Options, kind: str, grad_mode: GradMode, problem: Problem, peer: str) -> Pair:
    """Time both sides in turn, two blocks in each of four successive processes: memory holds one table."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    kept: dict[str, list[float]] = {"ours": [], peer: []}
    plans = {}
    for side in ("ours", peer) * 2:
        arguments = (side, kind, grad_mode, problem.rows, problem.ids, problem.spread, options.threads)
        command = [sys.executable, "-c", f"from benchmarks.adam import print_side; print_side(*{arguments!r})"]
        run = subprocess.run(command, capture_output=True, text=True, env=environment)
        if run.returncode != 0:
            last = run.stderr.strip().splitlines()[-1:] or [f"exit status {run.returncode}"]
            raise RuntimeError(f"{side}: {last[0]}")
        times, plan = json.loads(run.stdout.splitlines()[-1])
        kept[side] += times
        plans[side] = Plan(**plan)
    return Pair(statistics.median(kept["ours"]), statistics.median(kept[peer]), plans["ours"], plans[peer])


# ---- Rows -----------------------------------------------------------------------------------------------------------


def check(kind: str, grad_mode: GradMode, device: str) -> None:
    """Compare a small table after 30 steps, in which rows were idle, with the table that torch's dense Adam trains."""
    problem = Problem(200, 32, "zipf", device, count=7, dense_gradients=7)
    tables = []
    for side in ("ours", PEERS[0]):
        training = KINDS[kind](side, grad_mode, problem)
        for _ in range(30):
            training.step()
        tables.append(training.module.weight.detach())
    assert not torch.equal(tables[1], problem.table())
    torch.testing.assert_close(tables[0], tables[1], rtol=0, atol=1e-6)


def bytes_moved(kind: str, problem: Problem) -> int:
    """Count the bytes of a step. Row: weight and moments in and out, gradient in. Lookup: id, row, result, gradient."""
    distinct = statistics.mean(len(rows) for rows in problem.distinct[:8])
    lookups = problem.ids * (8 + 4 * DIM * 3) if kind == "step" else 0
    return round(distinct * (8 + 4 * DIM * (7 if kind == "update" else 6))) + lookups


def row(kind: str, spread: str, grad_mode: GradMode, millions: int, targets: dict[str, float]) -> Row:
    """Make a benchmark row of the whole step in a gradient mode, or of the update alone, which has no mode."""

    def build(options: Options) -> Case:
        problem = Problem(
            options.size(millions * 1_000_000, 500),
            options.size(IDS, 64),
            spread,
            options.device,
            options.size(BATCHES, 8),
        )

        def side(name: str) -> Make:
            return lambda: warm(name, KINDS[kind](name, grad_mode, problem))

        large = millions > 1 and options.device == "cpu" and not options.quick
        return Case(
            side("ours"),
            {name: side(name) for name in PEERS},
            lambda: check(kind, grad_mode, options.device),
            bytes_moved(kind, problem),
            ids=problem.ids,
            sizes=f"{problem.rows:,} x {DIM}, {problem.ids:,} ids in a step",
            pair=partial(pair_apart, options, kind, grad_mode, problem) if large else None,
        )

    size = "" if millions == 1 else f"-{millions}M"
    mode = "" if kind == "update" else f"-{grad_mode}"
    what = {"update": "Adam as the dense one, its rows given", "step": f"lookup, backward, the same Adam, {grad_mode}"}
    return Row(f"adam/{kind}{mode}{size}-{spread}", f"{what[kind]}: {millions}M x {DIM}", build, targets)


_UPDATE, _STEP = dict(zip(PEERS, (20.0, 3.5), strict=True)), dict(zip(PEERS, (15.0, 2.0), strict=True))
ROWS = [
    *(row("update", spread, "sparse", 1, _UPDATE) for spread in SPREADS),
    *(row("step", spread, "fused", 1, _STEP) for spread in SPREADS),
    *(row("step", spread, "sparse", 1, {}) for spread in SPREADS),
    row("update", "uniform", "sparse", 10, {PEERS[0]: 100.0}),
    row("step", "uniform", "fused", 10, {PEERS[0]: 100.0}),
]
