"""The examples over ranks: the same examples in each step as in one process, and metrics of all that is held out."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed.pool import Pool

from torchsparse_rec.checkpoint import CheckpointStore
from torchsparse_rec.examples import dlrm, ncf, wide_deep

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torchmetrics") is None, reason="torchmetrics is missing")

# Neither a batch nor what is held out can be divided by 2 or 4.
SIZES = "--samples 1000 --held-out 250 --batch-size 127 --embedding-dim 4 --epochs 2 --evaluate-every 3"
DLRM = f"{SIZES} --bottom 8 --top 16 --max-cardinality 100 --lr 0.05 --tables"
FLAGS: dict[str, tuple[Any, str]] = {
    "ncf": (ncf, "--factors 4 --layers 16,8 --batch-size 2719 --optimizer adam --epochs 2 --output-dir"),
    "wide_deep": (wide_deep, f"{SIZES} --rows 300 --mlp 16,8 --lr 0.5 --output-dir"),
    "hashed": (dlrm, f"{DLRM} hashed --buckets 60 --checkpoint"),
    "dynamic": (dlrm, f"{DLRM} dynamic --filter 2 --checkpoint"),
}


def figures_of(example: str, plan: str | None, device: str, folder: Path) -> tuple[list[list[float]], list[list[str]]]:
    """Train two epochs; return losses and metrics of each record, and the statistics of tables that grow."""
    command, flags = FLAGS[example]
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patched, contextlib.redirect_stdout(printed):
        patched.setattr(ncf, "load", lambda *_: (ncf.generated(151, 300, 4500, seed=1), "small data"))
        # The process group is there, as where torchrun has started the ranks.
        patched.setattr(command._common, "begin", lambda *_: command._common.Ranks())
        where = [folder, "--device", device, *(["--plan", plan] if plan else [])]
        assert command.main([*flags.split(), *map(str, where)]) == 0
    said = CheckpointStore(folder / "checkpoint").open().version.metadata["extra"]
    found = [[x for name, x in each.items() if name != "samples_per_second"] for each in said["run"]["history"]]
    tables = [line.split()[:-1] for line in printed.getvalue().splitlines() if re.match(r"(C\d+|all) ", line)]
    return found, tables  # without bytes, which depend on the ranks


def over_ranks(example: str, plan: str, device: str, folder: Path) -> tuple[list[list[float]], list[list[str]]]:
    name = f"cuda:{torch.cuda.current_device()}" if device == "cuda" else device
    return figures_of(example, plan, name, folder)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    ("example", "plan"),
    [
        ("ncf", "auto"),
        ("ncf", "row_wise"),
        ("wide_deep", "auto"),
        ("wide_deep", "table_wise"),
        ("hashed", "row_wise"),
        ("hashed", "column_wise"),
        ("hashed", "data_parallel"),
        ("dynamic", "auto"),
        ("dynamic", "table_wise"),
    ],
)
def test_losses_and_metrics_are_those_of_one_process(
    example: str, plan: str, ranks: int, pool_of: Callable[[int], Pool], device: str, tmp_path: Path
) -> None:
    alone, statistics = figures_of(example, None, "cpu", tmp_path / "alone")
    of_first, *others = pool_of(ranks).run(over_ranks, example, plan, device, tmp_path / "ranks")
    for found, _ in (of_first, *others):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(alone), atol=1e-5, rtol=0)
    assert of_first[1] == statistics  # the first rank alone prints
