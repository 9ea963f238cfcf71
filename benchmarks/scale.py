"""
A training step of 10 TB of tables over 1,024 GPUs, on paper: the planner's model of it. Nothing is run.

``python -m benchmarks.scale`` plans tables with the library's planner for growing numbers of ranks, with as many bytes
and examples for each rank. It prints what three things would buy: a two-level exchange, which is modelled and not
built; bfloat16 on the wire; ids that travel ahead of their step. ``--measure`` runs the ranks of
:mod:`benchmarks.distributed` on this machine, and prints the model's error for them, with constants that the same
processes measure.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torchsparse_rec.distributed.cost import expected_distinct, option
from torchsparse_rec.distributed.machine import MACHINES, Machine
from torchsparse_rec.distributed.plan import Planned, RowWise
from torchsparse_rec.distributed.planner import Use, choose

from .distributed import DLRM, TEN_HOT, TEN_IDS, Modelled, modelled
from .interrupt import run_command
from .rows import Options

# GPUs in a node, as in a DGX H100.
NODE = 8
# Bytes per second that leave a GPU inside its node: NVIDIA's data sheet of the H100 SXM has 900 GB/s for both
# directions together. Eight tenths of it are taken. (NVIDIA/nccl, issue 2169, shows 358 for an all-to-all of four.)
NVLINK = 0.8 * 450e9
# To other nodes: 400 Gb/s of InfiniBand for each GPU, as NVIDIA's data sheet of the DGX H100 says; eight tenths.
NETWORK = MACHINES["nccl"].bytes_per_second
# What a message takes for each rank that it goes to, beside MACHINES["nccl"].message_seconds: an assumption.
PEER = 1e-6
# 16 of 80 GB are left for all else.
MEMORY = 64 * 10**9
# A header has three words and a count for each table, of eight bytes.
_HEADER_WORDS, _WORD = 3, 8


@dataclass(frozen=True)
class Model:
    """The tables of a model like DLRM, the largest first, and its batch."""

    bytes_a_rank: float = 1e13 / 1024
    tables: int = 100
    batch: int = 512
    dims: Sequence[int] = (128, 64)
    hots: Sequence[int] = (1, 5, 20)

    def uses(self, ranks: int, wire_bytes: int | None = None) -> list[Use]:
        """Return the tables: table k takes a share of all bytes in proportion to ``1 / (k + 1)``."""
        shares = [1 / (k + 1) for k in range(self.tables)]
        found = []
        for k, share in enumerate(shares):
            dim, ids = self.dims[k % len(self.dims)], self.hots[k % len(self.hots)] * self.batch
            row_bytes = 2 * 4 * dim  # float32, and Adagrad's sums
            rows = max(1, round(self.bytes_a_rank * ranks * share / sum(shares) / row_bytes))
            distinct = expected_distinct(ids, rows)
            found.append(Use(f"t{k}", rows, dim, 4, row_bytes, ids, distinct, self.batch, wire_bytes=wire_bytes))
        return found


def machine_of(ranks: int, peer: float = PEER) -> Machine:
    """Return the planner's constants of so many GPUs: NVLink's inside one node, else the network's."""
    nccl = MACHINES["nccl"]
    rate = NVLINK if ranks <= NODE else min(NVLINK, NETWORK * (ranks - 1) / (ranks - NODE))
    return replace(nccl, message_seconds=nccl.message_seconds + (ranks - 1) * peer, bytes_per_second=rate)


# ---- What is sent ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Message:
    """Bytes that a rank sends, the mean of all: inside its node, and to other nodes."""

    inside: float
    across: float

    def __add__(self, other: Message) -> Message:
        return Message(self.inside + other.inside, self.across + other.across)

    def seconds(self, ranks: int, two_level: bool, peer: float) -> float:
        """Return the time of the message: on one level both kinds of links work at once, on two levels in turn."""
        start, node = MACHINES["nccl"].message_seconds, min(ranks, NODE)
        if ranks <= NODE or not two_level:
            return start + (ranks - 1) * peer + max(self.inside / NVLINK, self.across / NETWORK)
        peers = node - 1 + ranks // node - 1
        return 2 * start + peers * peer + self.inside / NVLINK + self.across / NETWORK


def in_node(use: Use, ranks: int) -> float:
    """Return the number of different ids in the batches of a node, for each of its ranks: at most a rank's number."""
    node = min(ranks, NODE)
    assert use.rows is not None
    return min(expected_distinct(node * use.ids, use.rows) / node, use.distinct)


def messages(planned: Planned, two_level: bool) -> list[Message]:
    """
    Return the messages that a rank sends in a step: header, ids, results and gradients.

    On two levels, a message for a rank of another node first goes to the rank of the own node that has the same place
    there. That rank makes the node's ids distinct, and adds up the node's gradients. Bags are not made distinct.
    """
    ranks = len(planned.seconds)
    node = min(ranks, NODE)
    two_level = two_level and ranks > NODE

    def message(total: float, kept: float) -> Message:
        across = total * (ranks - node) / ranks
        if two_level:
            return Message(total * (node - 1) / node, across * kept)
        return Message(total * (node - 1) / ranks, across)

    header = message(_WORD * (_HEADER_WORDS + len(planned.tables)) * ranks, 1 / node)
    ids = results = Message(0.0, 0.0)
    for each in planned.tables.values():
        use = each.use
        by_rows = isinstance(each.plan, RowWise)
        asked, got = (use.distinct, use.distinct) if by_rows else (use.ids, use.bags)
        kept = in_node(use, ranks) / use.distinct if by_rows else 1.0
        ids += message(4 * asked, kept)
        results += message(use.width_on_the_way() * got, kept)
    return [header, ids, results, results]


# ---- What a step takes -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """A step by the model, on the slowest rank."""

    ranks: int
    table_bytes: int
    plans: dict[str, int]
    most_bytes: int
    inside: float
    across: float
    seconds: float
    slowest_over_mean: float
    samples_per_second: float


def plan(model: Model, ranks: int, wire_bytes: int | None = None, peer: float = PEER) -> Planned:
    """Plan a model's tables, by rows or by tables: none of them is short enough for copies on all ranks to pay."""
    uses = model.uses(ranks, wire_bytes)
    may = {use.name: ["row_wise", "table_wise"] for use in uses}
    return choose(uses, ranks, MEMORY, machine_of(ranks, peer), constraints=may)


def step(
    model: Model, ranks: int, two_level: bool = False, bfloat16: bool = False, ahead: bool = False, peer: float = PEER
) -> Step:
    """
    Return a step of a model, by the planner's model.

    Ids of tables by rows are made distinct ahead too.

    Args:
        model: the tables.
        ranks: W; above 8 a multiple of it.
        two_level: whether what crosses nodes is put together in each of them.
        bfloat16: whether results and gradients are as narrow on the way.
        ahead: whether header and ids travel while dense layers are computed, which take at least as long.
        peer: seconds that a message takes for each rank that it goes to.
    """
    if ranks > NODE and ranks % NODE:
        raise ValueError(f"scale: ranks must be at most {NODE} or a multiple of it, got {ranks}")
    planned, machine = plan(model, ranks, 2 if bfloat16 else None, peer), machine_of(ranks, peer)
    one, sent = messages(planned, False), messages(planned, two_level)
    # The planner's seconds less its seconds for messages: the rest is work, and what a slow owner sends more.
    of_messages = sum(each.sent for each in planned.tables.values()) / machine.bytes_per_second
    work = max(planned.seconds) - of_messages - len(one) * machine.message_seconds
    by_rows = [each.use for each in planned.tables.values() if isinstance(each.plan, RowWise)]
    if two_level and ranks > NODE:
        work += sum(_work_of_node(use, ranks, machine) for use in by_rows)
    seconds = [each.seconds(ranks, two_level, peer) for each in sent]
    total = work + sum(seconds)
    if ahead:
        total -= sum(seconds[:2]) + sum(use.ids for use in by_rows) / machine.rows_per_second
    return Step(
        ranks,
        sum(each.use.bytes() for each in planned.tables.values()),
        dict(Counter(type(each.plan).__name__ for each in planned.tables.values())),
        max(planned.bytes),
        sum(each.inside for each in sent),
        sum(each.across for each in sent),
        total,
        max(planned.seconds) * ranks / sum(planned.seconds),
        model.batch * ranks / total,
    )


def _work_of_node(use: Use, ranks: int, machine: Machine) -> float:
    """
    Return the seconds that two levels add to a rank's work for a table by rows, less the work that they spare its
    owner.

    A node's ids are made distinct, its rows are read once for each of its ranks, and their gradients added up.
    """
    silent = replace(machine, bytes_per_second=float("inf"))
    before, after = (
        option(each, RowWise(), ranks, silent).slowest() for each in (use, replace(use, distinct=in_node(use, ranks)))
    )
    moved = use.distinct * (2 / machine.rows_per_second + 3 * use.width() / machine.copied_per_second)
    return after - before + moved


WAYS: dict[str, dict[str, bool]] = {
    "as built": {},
    "two levels": {"two_level": True},
    "bfloat16": {"bfloat16": True},
    "ids ahead": {"ahead": True},
    "bfloat16, ids ahead": {"bfloat16": True, "ahead": True},
    "all three": {"two_level": True, "bfloat16": True, "ahead": True},
}


# ---- The model beside ranks of this machine --------------------------------------------------------------------------

SHAPES = [
    ("26 features, 8,192 examples", DLRM, 2, "row_wise"),
    ("26 features, 8,192 examples", DLRM, 4, "row_wise"),
    ("26 features, 8,192 examples", DLRM, 2, "table_wise"),
    ("26 features of ten ids, 8,192 examples", TEN_HOT, 2, "row_wise"),
    ("26 features of ten ids, 8,192 examples", TEN_HOT, 2, "table_wise"),
    ("20 features of ten ids, 2,048 examples", TEN_IDS, 4, "table_wise"),
]


def measured(options: Options) -> list[dict[str, Any]]:
    """Run ranks on this machine; return a step's milliseconds by the model and by a clock."""
    found = []
    for what, shape, ranks, way in SHAPES:
        got = modelled(shape, ranks, way, options)
        error = got.predicted_ms / got.measured_ms - 1
        found.append({"what": what, "ranks": ranks, "plan": way, **got._asdict(), "error": error})
    return found


# ---- Output ----------------------------------------------------------------------------------------------------------


def _table(lines: Sequence[Sequence[str]]) -> str:
    head, *rest = (f"| {' | '.join(line)} |" for line in lines)
    return "\n".join([head, "|---" * len(lines[0]) + "|", *rest])


def _ways(ways: dict[str, Step], across: bool) -> list[str]:
    sent = [f", {each.across / 1e6:.0f} MB" if across else "" for each in ways.values()]
    return [f"{each.seconds * 1e3:.2f} ms{more}" for each, more in zip(ways.values(), sent, strict=True)]


def _report(found: dict[str, Any]) -> str:
    steps = [["ranks", "tables", "plans", "a rank has", "NVLink", "network", "step", "slowest / mean", "examples/s"]]
    for ways in found["steps"]:
        built = ways["as built"]
        line = [f"{built.ranks:,}", f"{built.table_bytes / 1e12:.2f} TB"]
        line += [
            ", ".join(f"{count} {name}" for name, count in built.plans.items()),
            f"{built.most_bytes / 1e9:.1f} GB",
        ]
        line += [f"{sent / 1e6:.1f} MB" for sent in (built.inside, built.across)]
        line += [f"{built.seconds * 1e3:.2f} ms", f"{built.slowest_over_mean:.2f}"]
        steps.append([*line, f"{built.samples_per_second / 1e6:.1f} M"])
    buys = [[f"{ways['as built'].ranks:,}", *_ways(ways, True)] for ways in found["steps"]]
    peers = [[f"{peer * 1e6:g} us", *_ways(ways, False)] for peer, ways in found["peers"].items()]
    parts = [
        "A model, not a measurement. A step, and what a rank sends in it:",
        _table(steps),
        "What each buys: a step, and what a rank sends to other nodes:",
        _table([["ranks", *WAYS], *buys]),
        "The same with the most ranks, if a message takes more or less for each rank that it goes to:",
        _table([["", *WAYS], *peers]),
    ]
    if found["measured"]:
        lines = [["step", "ranks", "plan", "by the model", "measured", "measured again", "error"]]
        for row in found["measured"]:
            times = [f"{row[name]:.1f} ms" for name in Modelled._fields]
            lines.append([row["what"], str(row["ranks"]), row["plan"], *times, f"{row['error']:+.0%}"])
        parts += ["The model, with constants of calibrate(), beside ranks of this machine:", _table(lines)]
    return "\n\n".join(parts)


def main(arguments: list[str] | None = None) -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 256, 1024], help="default: 8 64 256 1024")
    parser.add_argument("--measure", action="store_true", help="run ranks on this machine beside the model")
    parser.add_argument("--quick", action="store_true", help="run them at small sizes: show that all of it runs")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the figures there")
    given = parser.parse_args(arguments)
    model = Model()
    found = {
        "steps": [{name: step(model, ranks, **way) for name, way in WAYS.items()} for ranks in given.ranks],
        "peers": {
            peer: {name: step(model, given.ranks[-1], peer=peer, **way) for name, way in WAYS.items()}
            for peer in (PEER / 4, PEER, 4 * PEER)
        },
        "measured": measured(Options(quick=given.quick)) if given.measure else [],
    }
    print(_report(found))
    if given.json:
        given.json.write_text(json.dumps(found, default=asdict, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    run_command(main)
