"""What makes a loss NaN is named: the column, the row of a table, the parameter or the module; and nothing changes."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
import torch
from torch import Tensor

from torchsparse_rec import KeyedJaggedTensor, nn
from torchsparse_rec.features import (
    Compose,
    FeatureTransform,
    FillNaN,
    Log,
    Standardize,
    bucketized_column,
    categorical_column_with_embedding,
    categorical_column_with_identity,
    embedding_column,
    indicator_column,
    numeric_column,
    sequence_numeric_column,
    weighted_categorical_column,
)
from torchsparse_rec.profiling import find_nan

NAN, INF = math.nan, math.inf


class Model(torch.nn.Module):
    """A model with columns, a fixed and a growing table, and layers."""

    def __init__(self, price: object = None, grad_mode: str | None = "auto") -> None:
        super().__init__()
        torch.manual_seed(0)
        words = weighted_categorical_column(categorical_column_with_identity("words", 5), "tf")
        self.transform = FeatureTransform(
            [
                embedding_column(categorical_column_with_identity("user", 10), 4),
                embedding_column(categorical_column_with_embedding("item", "int64"), 4),
                numeric_column("price", normalizer_fn=price),
                numeric_column("xy", shape=2, default_value=0.0, normalizer_fn=FillNaN(0)),
                bucketized_column(numeric_column("age"), [18.0, 65.0]),
                indicator_column(words),
            ]
        )
        self.tables = nn.EmbeddingBagCollection(self.transform.embedding_bag_configs(), grad_mode=grad_mode)
        width = self.transform.dense_width + 8
        self.layers = torch.nn.Sequential(torch.nn.Linear(width, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))

    def forward(self, batch: dict) -> Tensor:
        made = self.transform(batch)
        return self.layers(self.transform.dense_features(made, self.tables(made.sparse)))


BATCH = {
    "user": [1, 2, 3],
    "item": [10**12, 5, 7],
    "price": [1.0, 2.0, 3.0],
    "xy": [[1.0, 2.0], [NAN, 0.0], [0.0, 1.0]],
    "age": [20.0, NAN, 70.0],
    "words": [1, 2, 3],
    "tf": [1.0, 2.0, 3.0],
}


def test_a_healthy_model_is_left_as_it_is() -> None:
    """Find nothing where NaN is filled or falls into a bucket; insert, count and average nothing."""
    model = Model(Log())
    model(BATCH)
    model.layers[1].eval()
    state = {name: x.clone() for name, x in model.state_dict().items() if isinstance(x, Tensor)}
    item = model.tables.embedding_bags["item_embedding"]
    before, modes = item.export(), [part.training for part in model.modules()]
    assert find_nan(model, BATCH | {"item": [1, 2, 5]}) is None
    assert find_nan(model, batch=BATCH) is None
    assert [part.training for part in model.modules()] == modes
    after = item.export()
    assert all(torch.equal(*both) for both in zip(before, after, strict=True))
    for name, x in model.state_dict().items():
        assert not isinstance(x, Tensor) or torch.equal(x, state[name]), name
    assert not any(part._forward_hooks for part in model.modules())


@pytest.mark.parametrize(
    ("normalizer", "price", "said"),
    [
        (
            None,
            [1.0, NAN, 2.0],
            "column 'price': has nan in example 1: put FillNaN(value) into its normalizer_fn, or a ",
        ),
        (Log(), np.array([1.0, 2.0, NAN]), "column 'price': has nan in example 2: put FillNaN(value) into"),
        (None, [-INF, 1.0, NAN], "column 'price': has -inf in example 0: put Clip(low, high) into its normalizer_fn"),
        (None, np.array([1.0, 1e300, 2.0]), "column 'price': has inf in example 1: put Clip(low, high) into"),
        (
            Log(),
            [1.0, -5.0, 2.0],
            "column 'price': Log(shift=1.0) makes nan of -5 in example 1: put Clip(low, high) before it, or "
            "FillNaN(value) after it",
        ),
        (
            Compose(FillNaN(0.0), Log(0.0), Standardize(1.0, 4.0)),
            [1.0, NAN, 2.0],
            "column 'price': Log(shift=0.0) makes -inf of 0 in example 1: put Clip(low, high) before or after it",
        ),
    ],
)
def test_a_column_is_named_with_its_example_and_value(normalizer: object, price: object, said: str) -> None:
    found = find_nan(Model(normalizer), BATCH | {"price": price})
    assert found is not None and found.startswith(said)


def test_other_numbers_of_columns_are_named() -> None:
    model = Model()
    assert find_nan(model, BATCH | {"xy": [[1.0, 2.0], [0.0, 0.0], [0.0, -INF]]}) == (
        "column 'xy': has -inf in example 2, element 1: put Clip(low, high) into its normalizer_fn"
    )
    assert find_nan(model, BATCH | {"tf": [1.0, INF, 1.0]}) == (
        "column 'words_weighted_by_tf': has the weight inf in example 1: put a number in its place, or a null, which "
        "counts as 0"
    )
    steps = FeatureTransform([sequence_numeric_column("t", normalizer_fn=Log())])
    found = find_nan(steps, {"t": [[1.0, 2.0], [], [3.0, -1.0]]})
    assert found is not None and found.startswith("column 't': Log(shift=1.0) makes -inf of -1 in example 2: put")


@pytest.mark.parametrize("grad_mode", [None, "sparse", "fused", "auto"])
def test_a_row_of_a_table_is_named(grad_mode: str | None) -> None:
    model = Model(grad_mode=grad_mode)
    if grad_mode == "fused":
        from torchsparse_rec import optim

        optim.Adam(model.parameters(), in_backward=True)
    with torch.no_grad():
        model.tables.embedding_bags["user_embedding"].weight[2, 3] = INF
    wrote = (
        ", which module 'tables' (EmbeddingBagCollection) reads: a step wrote it; ask again with the first batch whose "
        "loss is not finite"
    )
    assert find_nan(model, BATCH) == f"table 'tables.embedding_bags.user_embedding': has inf in row 2{wrote}"
    assert find_nan(model, BATCH | {"user": [1, 3, 3]}) is None
    model.tables.embedding_bags["item_embedding"].insert([10**12], [[0.0, NAN, 0.0, 0.0]])
    assert find_nan(model, BATCH | {"user": [1, 3, 3]}) == (
        f"table 'tables.embedding_bags.user_embedding': has inf in row 2{wrote}"
    )
    with torch.no_grad():
        model.tables.embedding_bags["user_embedding"].weight[2, 3] = 0.0
    found = find_nan(model, BATCH)
    assert found == f"table 'tables.embedding_bags.item_embedding': has nan in the row of key 1000000000000{wrote}"


def test_tables_of_torch_and_parameters_are_named() -> None:
    table = torch.nn.EmbeddingBag(70_000, 2)
    with torch.no_grad():
        table.weight[66_000, 1] = NAN
    found = find_nan(torch.nn.Sequential(table), torch.tensor([[1, 66_000]]))
    assert found is not None and found.startswith(
        "table '0': has nan in row 66000, which module '0' (EmbeddingBag) reads"
    )
    model = Model()
    with torch.no_grad():
        model.layers[0].weight[1, 2] = NAN
    found = find_nan(model, BATCH)
    assert found is not None
    assert found.startswith(
        "parameter 'weight' of module 'layers.0': has nan at [1, 2], which module 'layers.0' (Linear)"
    )
    model.layers[0].weight.data.zero_()
    model.layers[1].running_var[3] = INF
    model.layers[1].running_mean[3] = INF
    found = find_nan(model, BATCH)
    assert found is not None and found.startswith("parameter 'running_mean' of module 'layers.1': has inf at [3]")


class Function(torch.nn.Module):
    """A module that calls a function before its layer."""

    def __init__(self, function: object) -> None:
        super().__init__()
        self.function, self.layer = function, torch.nn.Linear(2, 1)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.layer(self.function(x) * scale)


class Called(torch.nn.Module):
    """A function as a module."""

    def __init__(self, function: object) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


X = torch.tensor([[1.0, -1.0]])


def test_the_first_module_is_named() -> None:
    chain = torch.nn.Sequential(Called(torch.log), torch.nn.Linear(2, 1))
    said = "module '0' (Called): returns nan in output[0, 1], and all that it takes is finite"
    assert find_nan(chain, X) == said
    assert find_nan(torch.compile(chain), X) == said.replace("'0'", "'_orig_mod.0'")
    assert find_nan(Called(lambda x: {"loss": x.sum() / 0.0 - x[0]}), X + 1.0) == (
        "the model (Called): returns inf in output['loss'][0], and all that it takes is finite"
    )
    assert find_nan(Called(lambda x: (x * INF).nan_to_num()), X) is None
    # What is made and not used is no cause.
    assert find_nan(torch.nn.Sequential(Called(torch.log), Called(torch.nan_to_num)), X) is None


def test_numbers_that_no_module_returned_are_traced_to_the_inputs_or_to_code() -> None:
    said = "module 'layer' (Linear): is given nan in inputs[0][0, 1], which no module before it has returned: "
    assert find_nan(Function(torch.log), X) == said + "code between modules makes it"
    there = X.clone()
    there[0, 1] = NAN
    assert find_nan(Function(torch.abs), x=there) == said + "the model is given nan in inputs['x'][0, 1]"
    assert find_nan(Function(torch.abs), X, scale=NAN) == (
        said.replace("[0, 1]", "[0, 0]") + "the model is given nan in inputs['scale']"
    )
    ids = KeyedJaggedTensor(["a"], torch.tensor([1, 2]), torch.tensor([1.0, INF]), lengths=torch.tensor([2]))
    bags = [nn.EmbeddingBagConfig(5, 2, name="t", feature_names=["a"])]
    found = find_nan(nn.EmbeddingBagCollection(bags, is_weighted=True), ids)
    assert found is not None and re.search(r"is given inf in inputs\[0\]\.weights\[1\], which", found)


def test_a_model_that_refuses_its_own_numbers_is_answered() -> None:
    def refuse(x: Tensor) -> Tensor:
        raise FloatingPointError("not finite")

    found = find_nan(torch.nn.Sequential(Called(torch.log), Called(refuse)), X)
    assert found is not None and found.startswith("module '0' (Called): returns nan in output[0, 1]")
    assert found.endswith("; then the forward raised FloatingPointError: not finite")
    model = torch.nn.Sequential(Called(refuse))
    with pytest.raises(FloatingPointError, match="not finite"):
        find_nan(model, X)
    assert model.training and not model[0]._forward_hooks
    with pytest.raises(TypeError, match=re.escape("find_nan: model must be a torch.nn.Module, got function")):
        find_nan(refuse, X)  # type: ignore[arg-type]
