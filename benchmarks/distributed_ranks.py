"""One rank of a benchmark row of :mod:`benchmarks.distributed`, in a process of its own."""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .distributed_sides import OURS, PEERS, RULE, Average, Sided
from .many_tables import Shape, reference_tables
from .rows import Options, UnavailableError
from .timing import clock_block, compare

_CHECKED_STEPS = 3


def _made(name: str, problem: Average, plan: str, options: Options) -> Sided:
    """Make a side; if one rank cannot, all return why."""
    error, side = None, None
    try:
        side = OURS(problem, plan) if name == "ours" else PEERS[name](problem, options)
    except UnavailableError as raised:
        error = str(raised)
    said: list[str | None] = [None] * problem.ranks
    dist.all_gather_object(said, error)
    if (first := next(filter(None, said), None)) is not None:
        raise UnavailableError(first)
    assert side is not None
    return side


def _clock(side: Sided, calls: int, threads: int) -> list[float]:
    """Return each call's time on the slowest rank, the same on all ranks."""
    times = torch.zeros(calls, dtype=torch.float64)
    dist.barrier()
    if not side.alone:
        times += torch.tensor(clock_block(side.step, calls, "cpu"), dtype=torch.float64)
    elif dist.get_rank() == 0:
        torch.set_num_threads(threads)
        times += torch.tensor(clock_block(side.step, calls, "cpu"), dtype=torch.float64)
        torch.set_num_threads(1)
    dist.all_reduce(times, dist.ReduceOp.MAX)
    return times.tolist()


def _check(name: str, side: Sided, problem: Average) -> None:
    """Compare the tables that a side trains with the formulas'."""
    for _ in range(_CHECKED_STEPS):
        if not side.alone or problem.rank == 0:
            side.step()
    tables = side.tables() if not side.alone or problem.rank == 0 else []
    if problem.rank == 0:
        for found, wanted in zip(tables, reference_tables(problem.whole(), RULE, _CHECKED_STEPS), strict=True):
            torch.testing.assert_close(found, wanted, rtol=0, atol=2e-6, msg=f"{name}: {{}}".format)


def _work(
    rank: int, ranks: int, shape: Shape, plan: str, skew: bool, peer: str, options: Options, only_check: bool
) -> Any:
    problem = Average(shape, rank, ranks, skew)

    def clock(side: Any, calls: int, device: str) -> list[float]:
        return _clock(side, calls, options.threads)

    try:
        names = ["ours", peer]
        sides = [_made(name, problem, plan, options) for name in names]
    except UnavailableError as error:
        return str(error)
    if only_check:
        for name, side in zip(names, sides, strict=True):
            _check(name, side, problem)
        return None

    return compare(sides[0], sides[1], "cpu", options.quick, clock)  # type: ignore[arg-type]


def main(folder: str, rank: int) -> None:
    """Run one rank, with the arguments that lie in the folder; the first rank writes its result there."""
    ranks, *arguments = pickle.loads(Path(folder, "arguments").read_bytes())
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    found = _work(rank, ranks, *arguments)
    if rank == 0:
        Path(folder, "found").write_bytes(pickle.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
    # The interpreter's own end may meet threads of gloo that still hold tensors, and be aborted.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
