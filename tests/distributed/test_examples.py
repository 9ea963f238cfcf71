"""The examples over ranks: the same examples in each step as in one process, and metrics of all that is held out."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from distributed.pool import Pool

from torchsparse_rec.examples._job import ALONE, Job
from torchsparse_rec.examples.dlrm.settings import Settings as DlrmSettings
from torchsparse_rec.examples.dlrm.tables import Placement, statistics
from torchsparse_rec.examples.dlrm.train import make_trainer as dlrm_trainer
from torchsparse_rec.examples.ncf import data
from torchsparse_rec.examples.ncf.settings import Settings as NcfSettings
from torchsparse_rec.examples.ncf.train import make_trainer as ncf_trainer
from torchsparse_rec.examples.wide_deep.settings import Settings as WideDeepSettings
from torchsparse_rec.examples.wide_deep.train import make_trainer as wide_deep_trainer

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torchmetrics") is None, reason="torchmetrics is missing")

# Neither a batch nor what is held out can be divided by 2 or 4.
SIZES: dict[str, Any] = {"samples": 1000, "held_out": 250, "batch_size": 127, "embedding_dim": 4}


def trainer_of(example: str, job: Job) -> Any:
    if example == "ncf":
        settings = NcfSettings(factors=4, layers=(16, 8), batch_size=2719, optimizer="adam")
        return ncf_trainer(settings, data.generate(151, 300, 4500, seed=1), job.device, job=job)
    if example == "wide_deep":
        return wide_deep_trainer(WideDeepSettings(**SIZES, rows=300, mlp=(16, 8), lr=0.5), job.device, job=job)
    settings = DlrmSettings(
        **SIZES, tables=example, buckets=60, bottom=(8,), top=(16,), max_cardinality=100, filter=2, lr=0.05
    )
    return dlrm_trainer(settings, Placement(), job.device, job=job)


def figures_of(example: str, job: Job) -> tuple[list[list[float]], list[list[str]]]:
    """Train two epochs; return losses and metrics of each record, and the statistics of tables that grow."""
    trainer = trainer_of(example, job)
    records = list(trainer.run(2, every=3))
    found = [[record.epoch, record.step, record.loss, *vars(record.metrics).values()] for record in records]
    bags = getattr(trainer.train_on.model, "bags", None)
    lines = [] if bags is None else statistics(bags, job)
    return found, [line.split()[:-1] for line in lines]  # bytes depend on the ranks


def over_ranks(example: str, plan: str, device: str) -> tuple[list[list[float]], list[list[str]]]:
    from torchsparse_rec.examples._ranks import Ranks

    name = f"cuda:{torch.cuda.current_device()}" if device == "cuda" else device
    return figures_of(example, Ranks(torch.device(name), plan))


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
    example: str, plan: str, ranks: int, pool_of: Callable[[int], Pool], device: str
) -> None:
    alone, statistics = figures_of(example, ALONE)
    for found, its in pool_of(ranks).run(over_ranks, example, plan, device):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(alone), atol=1e-5, rtol=0)
        assert its == statistics
