"""Benchmark rows of the ``route`` family: one rank's ids of 26 tables, beside unique and arithmetic table by table."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from torchsparse_rec import ops

from .ids import zipf_ids
from .rows import Call, Case, CudaTargets, Make, Options, Row

TABLES = 26
RANKS = 2
BLOCKS = 4096


def composed(ids: Tensor, starts: list[int], numbers: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Route by torch's own functions: each table's distinct ids are sorted, by value and then by rank."""
    each = BLOCKS // RANKS
    parts, ranks, inverses = [], [], []
    for begin, end in pairwise(starts):
        values, inverse = torch.unique(ids[begin:end], return_inverse=True)
        block = numbers[values & (BLOCKS - 1)]
        rank = block // each
        parts.append(((values // BLOCKS) * each + block - rank * each).int())
        ranks.append(rank)
        inverses.append(inverse)
    counts = torch.stack([torch.bincount(rank, minlength=RANKS) for rank in ranks], 1).cpu()
    order = torch.cat(ranks).argsort(stable=True)
    positions = torch.empty_like(order)
    positions[order] = torch.arange(len(order), device=order.device)
    places = [mine[inverse] for mine, inverse in zip(positions.split([len(p) for p in parts]), inverses, strict=True)]
    return torch.cat(parts)[order], counts, torch.cat(places)


def row(name: str, what: str, keys: bool) -> Row:
    """Make a benchmark row of ids, or of keys, for which torch has no function."""

    def build(options: Options) -> Case:
        batch, rows = options.size(4096, 512, 65536), options.size(100_000, 65_536)
        ids = torch.cat([zipf_ids(batch, rows, options.device, seed=t) for t in range(TABLES)])
        starts = [batch * t for t in range(TABLES + 1)]
        # The numbers from 0 to 4,095 with their 12 bits turned round.
        numbers = torch.tensor([int(f"{n:012b}"[::-1], 2) for n in range(BLOCKS)], device=options.device)
        arguments = (ids, starts, [rows] * TABLES, [BLOCKS] * TABLES, RANKS)

        def ours() -> Call:
            return lambda: ops.route_keys(ids, starts, RANKS) if keys else ops.route(*arguments)

        def torch_unique() -> Call:
            return lambda: composed(ids, starts, numbers)

        def check() -> None:
            if keys:
                routed = ops.route_keys(ids, starts, RANKS)
                assert torch.equal(routed.keys[routed.places], ids)
                assert int(routed.occurrences.sum()) == ids.numel()
                return
            sent, counts, places = ops.route(*arguments)
            peer_sent, peer_counts, peer_places = composed(ids, starts, numbers)
            assert torch.equal(sent[places], peer_sent[peer_places]) and torch.equal(counts, peer_counts)

        peers: dict[str, Make] = {} if keys else {"torch (unique by table)": torch_unique}
        distinct = int(ops.route_keys(ids, starts, RANKS).counts.sum())
        sizes = f"{TABLES} tables x {batch:,} int64 of {rows:,}, {distinct:,} distinct"
        return Case(ours, peers, check, 16 * ids.numel() + 4 * distinct, ids=ids.numel(), sizes=sizes)

    return Row(f"route/{name}", what, build, {} if keys else {"torch (unique by table)": 4.0}, CudaTargets())


ROWS = [
    row("ids", "ranks and rows of popular ids of 26 tables, of 2 ranks", keys=False),
    row("keys", "the same ids as keys of tables that grow", keys=True),
]
