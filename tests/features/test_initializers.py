"""One family of initializers: for tensors, for tables that grow, as plain data, and by TensorFlow's names."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from torchsparse_rec import features, initializers, nn, ops

# What features' columns have written ever since, what it makes, torch.nn.init's call of it, and its name for a table.
CASES = {
    '{"class_name": "TruncatedNormal", "config": {"mean": 1.0, "stddev": 0.5}}': (
        *(features.TruncatedNormal(1.0, stddev=0.5), initializers.TruncatedNormal(mean=1.0, std=0.5)),
        lambda x: torch.nn.init.trunc_normal_(x, 1.0, 0.5, 0.0, 2.0),
        ("truncated_normal", (1.0, 0.5)),
    ),
    '{"class_name": "RandomNormal", "config": {"mean": 1.0, "stddev": 0.5}}': (
        *(features.RandomNormal(1.0, stddev=0.5), initializers.Normal(mean=1.0, std=0.5)),
        lambda x: torch.nn.init.normal_(x, 1.0, 0.5),
        ("normal", (1.0, 0.5)),
    ),
    '{"class_name": "RandomUniform", "config": {"minval": -0.5, "maxval": 2.0}}': (
        *(features.RandomUniform(minval=-0.5, maxval=2.0), initializers.Uniform(low=-0.5, high=2.0)),
        lambda x: torch.nn.init.uniform_(x, -0.5, 2.0),
        ("uniform", (-0.5, 2.0)),
    ),
    '{"class_name": "Constant", "config": {"value": 0.5}}': (
        *(features.Constant(0.5), initializers.Constant(value=0.5)),
        lambda x: torch.nn.init.constant_(x, 0.5),
        ("constant", (0.5,)),
    ),
}


@pytest.mark.parametrize("text", CASES)
def test_one_family(text: str) -> None:
    by_tensorflows_names, made, fill, (kind, numbers) = CASES[text]
    column = features.embedding_column(features.categorical_column_with_identity("x", 9), 2, initializer=made)
    config = column.to_config()
    assert json.dumps(config["config"]["initializer"]) == text
    assert features.column_from_config(json.loads(json.dumps(config))).initializer == made == by_tensorflows_names

    torch.manual_seed(3)
    wanted = fill(torch.empty(50, 2))
    torch.manual_seed(3)
    weight = torch.empty(50, 2)
    assert made(weight) is weight and weight.equal(wanted)

    keys = torch.arange(-20, 20)
    rows = torch.empty(40, 2)
    ops.table_initialize_(rows, torch.arange(40), keys, values=None, kind=kind, parameters=numbers, seed=7)
    assert nn.EmbeddingVariable(2, initializer=made, seed=7).lookup(keys).equal(rows)


def test_the_names_of_nn_and_of_numpys_numbers() -> None:
    for name in initializers.__all__:
        assert getattr(nn, name) is getattr(initializers, name) and name not in dir(nn)
    made = features.RandomUniform(np.float32(-0.5), np.int64(2))
    assert made == initializers.Uniform(-0.5, 2) and type(made.low) is float and type(made.high) is int
