"""
Record the checkpoints of TorchRec in tests/goldens/torchrec, which needs TorchRec and FBGEMM: requirements/torchrec.txt
and fbgemm-gpu-cpu.

    python tests/compat/torchrec_goldens.py DIR

A small DLRM, as TorchRec's documents have it, is trained by two processes on CPUs, and saved by
torch.distributed.checkpoint: tables on one rank, tables split by columns, tables on both. TorchRec has no row-wise
tables on CPUs: these are made of the same tables by hand, with TorchRec's class and its ranges of rows.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

RANKS, BATCH, STEPS, DIM = 2, 12, 4, 8
ROWS = {"t_user": 23, "t_item": 14, "t_cart": 17}
KEYS = ["user", "item", "cart"]
LR = 0.1
#: The optimizer of the tables, and where each of them is: one rank, or "columns", or "both".
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "adagrad": ("Adagrad", {"t_user": 0, "t_item": 1, "t_cart": "columns"}),
    "row_wise_adagrad": ("RowWiseAdagrad", {"t_user": 0, "t_item": 1, "t_cart": "columns"}),
    "both_styles": ("Adam", {"t_user": "both", "t_item": "both", "t_cart": "both"}),
}


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return numbers ``[B, 3]``, ids of all features one after the other, their lengths, and labels ``[B]``."""
    random = torch.Generator().manual_seed(1000 + step)
    lengths = torch.randint(0, 4, (len(KEYS) * BATCH,), generator=random)
    ids = [
        torch.randint(0, ROWS[f"t_{key}"], (int(its.sum()),), generator=random)
        for key, its in zip(KEYS, lengths.view(len(KEYS), BATCH), strict=True)
    ]
    labels = torch.randint(0, 2, (BATCH,), generator=random).float()
    return torch.rand(BATCH, 3, generator=random), torch.cat(ids), lengths, labels


def part(step: int, rank: int) -> tuple[Any, Any, torch.Tensor]:
    """Return what a rank has of a batch, as TorchRec takes it."""
    import torchrec

    numbers, ids, lengths, labels = batch(step)
    jagged = torchrec.KeyedJaggedTensor(KEYS, ids, lengths=lengths)
    mine, each = slice(rank * BATCH // RANKS, (rank + 1) * BATCH // RANKS), []
    for key in KEYS:
        its = jagged[key]
        begins = its.offsets()
        each.append((its.values()[begins[mine.start] : begins[mine.stop]], its.lengths()[mine]))
    values, counts = (torch.cat(parts) for parts in zip(*each, strict=True))
    return numbers[mine], torchrec.KeyedJaggedTensor(KEYS, values, lengths=counts), labels[mine]


def model_of(case: str) -> tuple[Any, Any]:
    """Return a DLRM over both ranks, and its optimizer."""
    import torchrec
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.sharding_plan import (
        column_wise,
        construct_module_sharding_plan,
        data_parallel,
        table_wise,
    )
    from torchrec.models.dlrm import DLRM
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
    from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
    from torchrec.optim.optimizers import in_backward_optimizer_filter

    name, places = CASES[case]
    torch.manual_seed(7)
    device = torch.device("cpu")
    tables = [torchrec.EmbeddingBagConfig(rows, DIM, t, feature_names=[t[2:]]) for t, rows in ROWS.items()]
    bags = torchrec.EmbeddingBagCollection(tables, device=device)
    dlrm = DLRM(bags, 3, [DIM], [4, 1], dense_device=device)
    if name != "Adam":
        kind = torch.optim.Adagrad if name == "Adagrad" else torchrec.optim.RowWiseAdagrad
        apply_optimizer_in_backward(kind, dlrm.sparse_arch.parameters(), {"lr": LR, "eps": 1e-8})
    sharder = EmbeddingBagCollectionSharder()
    where = {
        table: {"columns": lambda: column_wise(ranks=[0, 1], compute_kernel="fused"), "both": data_parallel}[place]()
        if isinstance(place, str)
        else table_wise(rank=place, compute_kernel="fused")
        for table, place in places.items()
    }
    plan = construct_module_sharding_plan(
        bags, where, sharder=sharder, local_size=RANKS, world_size=RANKS, device_type="cpu"
    )
    model = torchrec.distributed.DistributedModelParallel(
        dlrm,
        device=device,
        plan=torchrec.distributed.types.ShardingPlan({"sparse_arch.embedding_bag_collection": plan}),
        sharders=[sharder],
    )
    rest = dict(in_backward_optimizer_filter(model.named_parameters()))
    dense = KeyedOptimizerWrapper(rest, lambda its: torch.optim.Adam(its, lr=LR))
    return model, CombinedOptimizer([model.fused_optimizer, dense])


def step(model: Any, optimizer: Any, number: int, rank: int) -> float:
    """Take a step, and return the loss, the mean over all ranks."""
    numbers, features, labels = part(number, rank)
    optimizer.zero_grad()
    loss = torch.nn.functional.binary_cross_entropy_with_logits(model(numbers, features).squeeze(-1), labels)
    loss.backward()
    optimizer.step()
    total = loss.detach().clone()
    dist.all_reduce(total)
    return float(total) / RANKS


def save(state: dict[str, Any], folder: str) -> dict[str, Any]:
    """Save a state of all ranks, and return it with whole tensors, as torch reads them, on the first rank."""
    dcp.save(state, checkpoint_id=folder)
    if dist.get_rank():
        return {}
    with tempfile.TemporaryDirectory() as made:
        dcp_to_torch_save(folder, os.path.join(made, "whole.pt"))
        return torch.load(os.path.join(made, "whole.pt"), weights_only=True)


def by_rows(state: dict[str, Any], rank: int) -> dict[str, Any]:
    """Return whole tables and states of rows split as TorchRec splits row-wise tables."""
    from torch.distributed._shard.sharded_tensor import Shard, init_from_local_shards

    result = {}
    for name, x in state.items():
        if isinstance(x, dict):
            result[name] = by_rows(x, rank)
        elif name.rpartition(".")[2] in ("weight", "momentum1") and "t_" in name:
            each = -(-len(x) // RANKS)
            begin = min(rank * each, len(x))
            shard = x[begin : begin + each].clone()
            shards = [Shard.from_tensor_and_offsets(shard, [begin, 0][: x.dim()], rank)]
            result[name] = init_from_local_shards(shards, *x.shape)
        else:
            result[name] = x
    return result


def work(rank: int, folder: str, store: str) -> None:
    """Train and save all cases on one of the ranks."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    for case in CASES:
        model, optimizer = model_of(case)
        losses = [step(model, optimizer, k, rank) for k in range(STEPS)]
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        found = save(state, os.path.join(folder, case))
        if case == "row_wise_adagrad":
            said: list[Any] = [whole_tables(found) if rank == 0 else {}]
            dist.broadcast_object_list(said)
            save(by_rows(said[0], rank), os.path.join(folder, "by_rows"))
        numbers, features, _ = part(STEPS, rank)
        with torch.no_grad():
            logits = model(numbers, features).squeeze(-1)
        all_logits = [torch.empty_like(logits) for _ in range(RANKS)]
        dist.all_gather(all_logits, logits)
        losses.append(step(model, optimizer, STEPS, rank))
        after = save({"model": model.state_dict()}, os.path.join(store + "-after", case))
        if rank == 0:
            expected = {"logits": torch.cat(all_logits), "losses": torch.tensor(losses), "after": after["model"]}
            expected["batch"] = batch(STEPS)
            torch.save(expected, os.path.join(folder, f"{case}.pt"))
            if case == "adagrad":  # the state of a model in one process, as TorchRec has it before sharding
                torch.save(found["model"], os.path.join(folder, "whole.pt"))
    dist.barrier()
    dist.destroy_process_group()


def whole_tables(found: dict[str, Any]) -> dict[str, Any]:
    """Return the tables of a checkpoint and their states, those split by columns left out."""

    def wanted(its: dict[str, Any]) -> dict[str, Any]:
        return {name: x for name, x in its.items() if "t_user" in name or "t_item" in name}

    return {"model": wanted(found["model"]), "optimizer": {"state": wanted(found["optimizer"]["state"])}}


def main(folder: str) -> None:
    """Record all cases."""
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    to = Path(folder)
    to.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as made:
        (Path(made) / "goldens").mkdir()
        torch.multiprocessing.spawn(work, (os.path.join(made, "goldens"), os.path.join(made, "store")), RANKS)
        for path in (Path(made) / "goldens").iterdir():
            if path.is_dir():
                shutil.rmtree(to / path.name, ignore_errors=True)
                shutil.copytree(path, to / path.name)
            elif path.suffix == ".pt":
                shutil.copy(path, to / path.name)
    versions = {name: importlib.metadata.version(name) for name in ("torch", "torchrec", "fbgemm-gpu-cpu")}
    (to / "versions.json").write_text(json.dumps(versions, indent=2) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
