"""Clients of torch that train in several processes. Two processes run all of them, one after the other."""

from __future__ import annotations

import datetime
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from clients.cases import MODES, Client, Outcome, Results, Side, learned, outcome, train
from processes import run_two
from torch.nn.parallel import DistributedDataParallel


def ddp(side: Side, **arguments: Any) -> Results:
    """Train by DistributedDataParallel, each process on its half of the batch."""
    model, optimizer, schedule = side.made()
    train(DistributedDataParallel(model, **arguments), optimizer, schedule, rank=dist.get_rank())
    return learned(model)


def ddp_finding(side: Side) -> Results:
    """Train by DistributedDataParallel as models are whose batches may leave out parts."""
    return ddp(side, find_unused_parameters=True)


def ddp_static(side: Side) -> Results:
    """Train by DistributedDataParallel as models are that are the same in every batch."""
    return ddp(side, static_graph=True)


def fsdp2(side: Side) -> Results:
    """Train with each parameter in two halves."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = side.model()
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(model.table, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = side.optimizer(model.parameters())
    train(model, optimizer, side.schedule(optimizer), rank=dist.get_rank())
    return {name: value.full_tensor() for name, value in model.state_dict().items()}


def zero(side: Side) -> Results:
    """Train with the optimizer's states in two halves."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = side.model()
    cls, arguments = side.adam
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=cls, **arguments)
    train(DistributedDataParallel(model), optimizer, side.schedule(optimizer), rank=dist.get_rank())
    return learned(model)


CLIENTS = [
    Client("DDP", ddp),
    Client("DDP, `find_unused_parameters=True`", ddp_finding),
    Client("DDP, `static_graph=True`", ddp_static),
    Client("FSDP2 (`fully_shard`)", fsdp2),
    Client("ZeRO (`ZeroRedundancyOptimizer`)", zero),
]


PROGRAM = f"""
sys.path.insert(0, {str(Path(__file__).resolve().parents[1])!r})
from clients.of_processes import main
main(rank, folder)
"""


def outcomes() -> dict[tuple[str, str], Outcome]:
    """Return the outcomes of all clients in all modes; where the processes differ, the worse one."""
    with tempfile.TemporaryDirectory() as folder:
        printed = run_two(PROGRAM, Path(folder), 600)
    both = [[(tuple(key), Outcome(*value)) for key, value in json.loads(each.splitlines()[-1])] for each in printed]
    return {key: one if other.is_good else other for (key, one), (_, other) in zip(*both, strict=True)}


class Apart:
    """A client before each of whose runs the processes meet anew, so that nothing is left of an error."""

    def __init__(self, client: Client, rank: int, folder: str) -> None:
        self.client, self.rank, self.folder, self.runs = client, rank, folder, 0

    def __call__(self, side: Side) -> Results:
        """Run the client once."""
        dist.destroy_process_group()
        self.runs += 1
        store = f"file://{self.folder}/{self.client.run.__name__}-{self.runs}"
        wait = datetime.timedelta(seconds=60)
        dist.init_process_group("gloo", init_method=store, rank=self.rank, world_size=2, timeout=wait)
        return self.client.run(side)


def main(rank: int, folder: str) -> None:
    """Run all clients in all modes, and print the outcomes as JSON."""
    found = []
    for client in CLIENTS:
        apart = replace(client, run=Apart(client, rank, folder))
        for mode in MODES:
            one = outcome(apart, mode)
            found.append(((client.name, mode), (one.word, one.message)))
    print(json.dumps(found))
