"""The examples' networks with tables of fewer bytes: trained, quantised, and as good on held-out examples."""

from __future__ import annotations

import copy
import functools

import pytest

from torchsparse_rec import nn
from torchsparse_rec.examples._clicks import Clicks
from torchsparse_rec.examples._trainer import Trainer
from torchsparse_rec.examples.dlrm import tables
from torchsparse_rec.examples.dlrm import train as dlrm
from torchsparse_rec.examples.dlrm.settings import Settings as DlrmSettings
from torchsparse_rec.examples.wide_deep import train as wide_deep
from torchsparse_rec.examples.wide_deep.settings import Settings as WideDeepSettings

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES = {"samples": 16_384, "held_out": 8192, "batch_size": 256, "optimizer": "adagrad"}


@functools.cache
def trained(example: str) -> Trainer:
    """Train an example's network on generated clicks, until it can be told from chance."""
    if example == "wide_deep":
        trainer = wide_deep.make_trainer(WideDeepSettings(rows=300, embedding_dim=7, mlp=(16, 8), **SIZES))
    else:
        small = {"buckets": 500, "embedding_dim": 8, "bottom": (16,), "top": (16,), "max_cardinality": 500}
        trainer = dlrm.make_trainer(DlrmSettings(**small, **SIZES), tables.Placement())
    for _ in trainer.run(epochs=2):
        pass
    return trainer


@pytest.mark.parametrize("rows", ["int8", "int4", "float16", "bfloat16"])
@pytest.mark.parametrize("example", ["wide_deep", "dlrm"])
def test_the_auc_stays(example: str, rows: str) -> None:
    trainer = trained(example)
    step = copy.copy(trainer.train_on)
    before = Clicks.of(step, trainer.source)
    step.model = nn.quantize(copy.deepcopy(step.model), rows)
    assert "rows='" + rows in repr(step.model)
    after = Clicks.of(step, trainer.source)
    assert before.auc is not None and after.auc is not None and before.auc > 0.6
    assert before.log_loss != after.log_loss and abs(after.auc - before.auc) < 1e-3
