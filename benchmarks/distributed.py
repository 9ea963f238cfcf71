"""
Benchmark rows of tables over ranks: a training step of many tables, whose ids and gradients each rank has a part of.

All sides of a row run in the same processes, in alternating blocks. Sides of several ranks run on all processes, with a
thread each. Sides of one process run on the first, with all threads, while the others wait. A call's time is the
slowest rank's. Ranks speak by gloo on loopback.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from .distributed_sides import PEERS, RULE, Average
from .machine import ROOT
from .many_tables import Shape, small
from .rows import Call, Case, CudaTargets, Options, Row, UnavailableError
from .sok import SHAPE as NVIDIA
from .timing import Pair

ONE = "ours on one process"
DDP_SPARSE, DDP_DENSE = "torch's DDP, sparse gradients", "torch's DDP, dense gradients"
TORCHREC = "TorchRec, table-wise"
TENSORFLOW = "TensorFlow embedding_lookup_sparse on one process"


def _run(*arguments: object) -> Any:
    """Run the ranks; return the first one's result: a time, why a side cannot run here, or None if all was right."""
    ranks = arguments[0]
    assert isinstance(ranks, int)
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        command = [sys.executable, "-m", "benchmarks.distributed_ranks"]
        Path(folder, "arguments").write_bytes(pickle.dumps(arguments))
        processes = [
            subprocess.Popen([*command, folder, str(rank)], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
            for rank in range(ranks)
        ]
        try:
            errors = [process.communicate(timeout=1800)[1].decode() for process in processes]
        finally:
            for process in processes:
                process.kill()
        for process, error in zip(processes, errors, strict=True):
            if process.returncode:
                raise RuntimeError(error.strip().rpartition("\n")[2])  # the error itself, without its traceback
        return pickle.loads(Path(folder, "found").read_bytes())


def row(name: str, what: str, shape: Shape, ranks: int, plan: str, skew: bool, targets: dict[str, float]) -> Row:
    """Make a benchmark row, with a peer for each target; a target of 0 stands for none."""

    def build(options: Options) -> Case:
        its = small(shape) if options.quick else shape

        def pair(peer: str) -> Pair:
            found = _run(ranks, its, plan, skew, peer, options, False)
            if isinstance(found, str):
                raise UnavailableError(found)
            assert isinstance(found, Pair)
            return found

        def check() -> None:
            for peer in targets:  # one that cannot run here says so when it is timed
                _run(ranks, small(shape), plan, skew, peer, options, True)

        def not_here() -> Call:
            raise AssertionError("sides run in processes of their own")

        problem = Average(its, 0, ranks, skew)
        return Case(
            not_here,
            dict.fromkeys(targets, not_here),
            check,
            its.bytes_moved(RULE),
            samples=its.batch,
            ids=its.ids(),
            sizes=f"{its.sizes()}, {problem.ids_in_words()}, {ranks} ranks",
            pair=pair,
        )

    wanted = {peer: target for peer, target in targets.items() if target}
    return Row(
        f"distributed/{name}",
        f"forward, backward and Adagrad, {what}",
        build,
        wanted,
        CudaTargets(fastest_peer=None),
        devices=("cpu",),
    )


assert set(PEERS) == {ONE, DDP_SPARSE, DDP_DENSE, TORCHREC, TENSORFLOW}

DLRM = Shape((1,) * 26, 100_000, 8_192, ((16, "sum"),))
KEYS = replace(DLRM, grows=True)
TEN_HOT = Shape((10,) * 26, 100_000, 8_192, ((16, "sum"),))
TEN_IDS = Shape((10,) * 20, 100_000, 2_048, ((16, "sum"),))

ROWS = [
    row("rows-2", "row-wise", DLRM, 2, "row_wise", True, {ONE: 1 / 2.2, DDP_SPARSE: 5.0, DDP_DENSE: 12.0}),
    row("rows-4", "row-wise", DLRM, 4, "row_wise", True, {ONE: 1 / 3.2, DDP_SPARSE: 9.0}),
    row("keys-2", "tables that grow, row-wise", KEYS, 2, "row_wise", True, {ONE: 1 / 2.2}),
    row("tables-2", "table-wise", DLRM, 2, "table_wise", True, {TORCHREC: 1.5, ONE: 0}),
    row("ten-hot-2", "table-wise", TEN_HOT, 2, "table_wise", True, {TORCHREC: 2.0, ONE: 0}),
    row("ten-ids-2", "table-wise", TEN_IDS, 2, "table_wise", True, {ONE: 1 / 1.6}),
    row("nvidia-2", "planned by an example batch, NVIDIA's case", NVIDIA, 2, "auto", False, {TENSORFLOW: 7.9, ONE: 0}),
    row("nvidia-4", "planned by an example batch, NVIDIA's case", NVIDIA, 4, "auto", False, {TENSORFLOW: 0}),
]
