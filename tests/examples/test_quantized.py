"""The examples' networks with tables of fewer bytes: trained, quantised, and as good on held-out examples."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from examples.cases import settings_of, step_of

from torchsparse_rec import nn
from torchsparse_rec.examples import _common, dlrm, wide_deep

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES: dict[str, Any] = {"samples": 16_384, "held_out": 8192, "batch_size": 256, "optimizer": "adagrad"}


@functools.cache
def trained(example: str) -> tuple[torch.nn.Module, Callable[..., Any], Any]:
    """Return an example's network, trained on generated clicks, its logits as a function, and held-out batches."""
    if example == "wide_deep":
        settings = settings_of(wide_deep, rows=300, embedding_dim=7, mlp=[16, 8], **SIZES)
        source, transform = wide_deep.generated_examples(settings), wide_deep.make_transform(settings)
        model: Any = wide_deep.make_model(transform, settings)

        def logits(model: Any, batch: Any) -> torch.Tensor:
            found = transform(batch.columns)
            return model(found.dense, found.sparse)

    else:
        small = {"buckets": 500, "embedding_dim": 8, "bottom": [16], "top": [16], "max_cardinality": 500}
        settings = settings_of(dlrm, **small, **SIZES)
        source, model = dlrm.make_examples(settings), dlrm.make_model(settings)

        def logits(model: Any, batch: Any) -> torch.Tensor:
            return model(batch.numbers, batch.ids)

    step = step_of(model, settings, lambda batch: logits(model, batch))
    for _ in range(2):
        for batch in source.batches(0):
            step(batch)
    return model, logits, source.held_out


@pytest.mark.parametrize("rows", ["int8", "int4", "float16", "bfloat16"])
@pytest.mark.parametrize("example", ["wide_deep", "dlrm"])
def test_the_auc_stays(example: str, rows: str) -> None:
    model, logits, held_out = trained(example)
    quantized = nn.quantize(copy.deepcopy(model), rows)
    assert "rows='" + rows in repr(quantized)
    before, after = (
        _common.metrics_of_clicks(each, functools.partial(logits, each), held_out, _common.Ranks())
        for each in (model, quantized)
    )
    assert before["auc"] > 0.6
    assert before["log_loss"] != after["log_loss"] and abs(after["auc"] - before["auc"]) < 1e-3
