"""quantize: models with tables of fewer bytes look up what the decoded tables have, and refuse what they cannot do."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from kinds import saved
from nn.cases import train_squares
from torch import Tensor

from torchsparse_rec import KeyedJaggedTensor, distributed, nn, optim, variable
from torchsparse_rec.nn.quantized import QuantizedEmbedding, QuantizedEmbeddingBag, QuantizedTable
from torchsparse_rec.ops.quantized import ROW_FORMATS

FORMATS = tuple(ROW_FORMATS)
each_format = pytest.mark.parametrize("rows", FORMATS)
ROWS, DIM = 20, 6
IDS = torch.tensor([[1, 2, 19], [3, 19, 0]])
KEYED = KeyedJaggedTensor(
    ["f", "g"], torch.tensor([1, 2, 19, 7, 7, 3]), torch.tensor([1.0, 0.5, 2, -1, 3, 0.25]), torch.tensor([2, 1, 0, 3])
)
FILTERED = variable.EmbeddingVariableOption(
    filter_option=variable.CounterFilter(filter_freq=2),
    init_option=variable.InitializerOption(default_value_no_permission=0.5),
)


def bags(is_weighted: bool = True, **growing: Any) -> nn.EmbeddingBagCollection:
    """Make two tables that share a feature, the second of which grows if an option is given."""
    make = nn.EmbeddingBagConfig
    tables = [
        make(ROWS, DIM, "a", feature_names=["f", "g"][: 1 + is_weighted], pooling="mean"),
        make(ROWS, 4, "b", feature_names=["g"], **growing),
    ]
    return nn.EmbeddingBagCollection(tables, is_weighted=is_weighted)


def sequences() -> nn.EmbeddingCollection:
    make = nn.EmbeddingConfig
    tables = [make(name="a", num_embeddings=ROWS, embedding_dim=DIM, feature_names=["f", "g"])]
    return nn.EmbeddingCollection([*tables, make(name="b", num_embeddings=20, embedding_dim=4, feature_names=["g"])])


def grown(**options: Any) -> nn.EmbeddingVariable:
    table = nn.EmbeddingVariable(DIM, **options)
    table(IDS.to(table.key_dtype))
    return table


MODELS: dict[str, Any] = {
    "embedding": (lambda: nn.Embedding(ROWS, DIM, padding_idx=3), (IDS,)),
    "sum": (lambda: nn.EmbeddingBag(ROWS, DIM, mode="sum", padding_idx=19), (IDS, None, IDS * 0.5 + 1)),
    "mean": (lambda: nn.EmbeddingBag(ROWS, DIM, padding_idx=-2), (torch.arange(18), torch.tensor([0, 4, 4]))),
    "sqrtn": (
        lambda: nn.EmbeddingBag(ROWS, DIM, mode="sqrtn", include_last_offset=True),
        (torch.arange(18).int(), torch.tensor([0, 0, 4, 18]), torch.arange(18.0)),
    ),
    "max": (lambda: nn.EmbeddingBag(ROWS, DIM, mode="max"), (IDS,)),
    "torchs": (lambda: torch.nn.EmbeddingBag(ROWS, DIM), (IDS,)),
    "bags": (bags, (KEYED,)),
    "plain_bags": (lambda: bags(False), (KEYED,)),
    "sequences": (sequences, (KEYED,)),
    "growing": (grown, (torch.tensor([[1, 19], [777, -3]]),)),
}
each_model = pytest.mark.parametrize("name", MODELS)


def made(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    return MODELS[name][0]().eval()


def looked_up(model: torch.nn.Module, name: str) -> list[Tensor]:
    result = model(*MODELS[name][1])
    if isinstance(result, dict):
        return [x.values() for x in result.values()]
    return [result if isinstance(result, Tensor) else result.values()]


def decoded(model: torch.nn.Module, quantized: torch.nn.Module) -> torch.nn.Module:
    """Return a model that has the decoded tables of another."""
    tables = dict(quantized.named_modules())
    with torch.no_grad():
        for name, weight in model.named_parameters():
            table = tables[name.rpartition(".")[0]]
            if isinstance(model, nn.EmbeddingVariable):
                model.insert(model.export().keys, table.dequantized())
            else:
                weight.copy_(table.dequantized())
    return model


# ---- Results --------------------------------------------------------------------------------------------------------


@each_format
@each_model
def test_results_are_those_of_the_decoded_tables(name: str, rows: str, kernels: str) -> None:
    model = made(name)
    quantized = nn.quantize(copy.deepcopy(model), rows)
    actual, floats = looked_up(quantized, name), looked_up(model, name)
    for x, y, z in zip(actual, looked_up(decoded(model, quantized), name), floats, strict=True):
        assert x.dtype == torch.float32 and not x.requires_grad
        torch.testing.assert_close(x, y, rtol=0 if kernels == "cpu" else 1e-6, atol=0 if kernels == "cpu" else 1e-6)
        assert not torch.equal(x, z) or rows.endswith("16")
        assert (x - z).abs().max() < 1.5  # of normal numbers, in int4 and in sums too


def test_nested_ids() -> None:
    ids = torch.nested.nested_tensor([torch.tensor([1, 2]), torch.tensor([3])], layout=torch.jagged)
    table, pooled = nn.quantize(made("embedding")), nn.quantize(made("max"))
    assert torch.equal(table(ids).values(), table(ids.values()))
    assert torch.equal(pooled(ids), pooled(ids.values(), ids.offsets()[:-1]))


def test_features_of_different_batch_sizes() -> None:
    features = KeyedJaggedTensor(
        ["f", "g"],
        torch.tensor([1, 2, 5, 3]),
        torch.ones(4),
        torch.tensor([1, 2, 1]),
        stride_per_key_per_rank=[[1], [2]],
        inverse_indices=(["f", "g"], torch.tensor([[0, 0, 0], [1, 0, 1]])),
    )
    model = made("bags")
    quantized = nn.quantize(copy.deepcopy(model))
    model = decoded(model, quantized)
    assert torch.equal(quantized(features).values(), model(features).values())
    for name, wanted in model.lookup(features).items():
        assert torch.equal(quantized.lookup(features)[name], wanted)


@each_format
@pytest.mark.parametrize("pooling", ["sum", "mean"])
def test_a_collection_with_a_table_that_grows(pooling: str, rows: str) -> None:
    model = bags(False, ev_option=variable.EmbeddingVariableOption(), pooling=pooling)
    model(KEYED)
    model.eval()
    quantized = nn.quantize(copy.deepcopy(model), rows)
    alone = KeyedJaggedTensor(["f", "g"], torch.tensor([1, 2**40, -5, 2**50]), None, torch.tensor([1, 0, 2, 1]))
    for features in (KEYED, alone):
        actual, wanted = quantized(features), model(features)
        assert (actual.values() - wanted.values()).abs().max() < 0.5
    # What is unknown is pooled with its initial value, which is not quantised.
    assert torch.equal(actual["g"], wanted["g"]) and not torch.equal(actual["f"], wanted["f"])


@pytest.mark.parametrize("key_dtype", [torch.int64, torch.int32])
def test_keys_of_a_table_that_grows(key_dtype: torch.dtype) -> None:
    table = grown(key_dtype=key_dtype, seed=5).eval()
    ids = torch.tensor([19, 5, -1], dtype=key_dtype)
    wanted = table(ids)
    quantized = nn.quantize(table)
    assert torch.equal(quantized(ids)[1:], wanted[1:])  # unknown keys have their initial values
    assert 0 < (quantized(ids)[0] - wanted[0]).abs().max() < 0.02
    assert torch.equal(quantized.train().lookup(ids), quantized.eval()(ids))
    if key_dtype == torch.int32:
        with pytest.raises(ValueError, match="input must be of the key_dtype, int32, got torch.int64"):
            quantized(ids.long())


def test_tables_that_grow_with_filters_tiers_and_without_keys(tmp_path: Any) -> None:
    filtered = nn.EmbeddingVariable(DIM, ev_option=FILTERED, initializer=2.0)
    for _ in range(3):
        filtered(torch.tensor([4]))
    quantized = nn.quantize(filtered.eval())
    torch.testing.assert_close(quantized(torch.tensor([4, 9])), torch.tensor([[2.0], [0.5]]).expand(2, DIM))
    storage = variable.StorageOption("DRAM_SSD", storage_path=str(tmp_path), storage_size=[1 << 10])
    cold = nn.EmbeddingVariable(DIM, ev_option=variable.EmbeddingVariableOption(storage_option=storage))
    for first in range(0, 400, 20):
        cold(torch.arange(first, first + 20))
    cold.eval()
    assert cold.cold is not None and len(cold.cold) > 0
    ids = torch.arange(0, 400, 7)
    wanted = cold(ids)
    assert (nn.quantize(cold)(ids) - wanted).abs().max() < 0.02
    empty = nn.EmbeddingVariable(DIM, initializer=3.0).eval()
    assert torch.equal(nn.quantize(empty)(torch.tensor([1])), torch.full((1, DIM), 3.0))


def test_stale_rows_and_largest_norms() -> None:
    """Quantise rows as a lookup would give them: all steps made, and clipped."""
    for make in (nn.Embedding, nn.EmbeddingBag):
        table = make(ROWS, DIM, grad_mode="sparse")
        optimizer = optim.Adam(table.parameters(), lr=0.1)
        train_squares(table, optimizer, (IDS, IDS[:, :1]))
        quantized = nn.quantize(copy.deepcopy(table), "float16")
        assert torch.equal(quantized.dequantized(), table.weight.detach().half().float())
        clipped = make(ROWS, DIM, max_norm=1.0).eval()
        wanted = copy.deepcopy(clipped)(IDS).detach()
        torch.testing.assert_close(nn.quantize(clipped, "float16")(IDS), wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("option", [None, nn.EmbeddingVariableOption(), FILTERED])
def test_rows_that_a_collection_clips(option: nn.EmbeddingVariableOption | None) -> None:
    """Clip also the rows of a table that grows, and those of ids that it does not have."""
    config = nn.EmbeddingBagConfig(ROWS, DIM, "t", feature_names=["f"], max_norm=0.01, ev_option=option)
    model = nn.EmbeddingBagCollection([config])
    model({"f": IDS[:, :1]})
    wanted = model.eval()({"f": IDS}).values()
    assert wanted.any()
    torch.testing.assert_close(nn.quantize(model, "float16")({"f": IDS}).values(), wanted, rtol=1e-3, atol=1e-5)


# ---- Modules --------------------------------------------------------------------------------------------------------


def test_modules_stay_and_keep_what_they_hold() -> None:
    model = torch.nn.ModuleDict(
        {"users": nn.Embedding(7, 4), "bags": nn.EmbeddingBag(5, 4), "top": torch.nn.Linear(4, 1)}
    )
    model["again"] = model["users"]
    model["users"].register_buffer("seen", torch.arange(7))
    calls: list[str] = []
    model["users"].register_forward_hook(lambda *_: calls.append("hook"))
    growing = grown()
    growing.register_forward_hook(lambda *_: calls.append("growing"))
    users, model["growing"] = model["users"], growing
    model["bags"].eval()
    assert nn.quantize(model, "int4") is model
    assert model["users"] is users is model["again"] and type(users) is QuantizedEmbedding
    assert type(model["bags"]) is QuantizedEmbeddingBag and not model["bags"].training and users.training
    with torch.no_grad():
        model["users"](torch.tensor([1]))
        model["growing"](torch.tensor([1]))
    assert calls == ["hook", "growing"]
    assert {name for name, _ in model.named_parameters()} == {"top.weight", "top.bias"}
    assert {"users.seen", "users.table", "bags.table", "growing.table"} <= set(model.state_dict())
    assert repr(users) == "QuantizedEmbedding(7, 4, rows='int4', 42 bytes)"
    assert "mode='mean'" in repr(model["bags"]) and "name='embedding_variable'" in repr(model["growing"])


@each_format
@each_model
def test_copies_and_states(name: str, rows: str) -> None:
    model = nn.quantize(made(name), rows)
    wanted = looked_up(model, name)
    state = saved(model.state_dict(), weights_only=True)
    torch.manual_seed(1)
    other = nn.quantize(MODELS[name][0]().eval(), rows)
    assert not all(map(torch.equal, looked_up(other, name), wanted)) or name == "growing"
    other.load_state_dict(state)
    for same in (other, copy.deepcopy(model), pickle.loads(pickle.dumps(model)), saved(model, weights_only=False)):
        assert all(map(torch.equal, looked_up(same, name), wanted)) and repr(same) == repr(model)


@pytest.mark.parametrize("name", ["embedding", "plain_bags", "growing"])
def test_checkpoints(name: str, tmp_path: Any) -> None:
    """Write and read what ``distributed.save`` writes, also in one process: tables are buffers as others are."""
    model, other = (torch.nn.Sequential(nn.quantize(MODELS[name][0]().eval())) for _ in range(2))
    distributed.save(tmp_path, model)
    distributed.load(tmp_path, other)
    assert all(map(torch.equal, looked_up(other[0], name), looked_up(model[0], name)))


def test_a_state_of_more_keys() -> None:
    large, small = nn.quantize(grown().eval()), nn.quantize(nn.EmbeddingVariable(DIM).eval())
    small.load_state_dict(large.state_dict())
    assert torch.equal(small(IDS), large(IDS))


def test_a_state_whose_keys_are_not_of_its_table_changes_nothing() -> None:
    large, small = nn.quantize(grown().eval()), nn.quantize(nn.EmbeddingVariable(DIM).eval())
    state, before = large.state_dict(), small(IDS)
    for keys in (state["keys.entries"][:-1], state["keys.entries"].float(), None):
        with pytest.raises(RuntimeError, match="of 'embedding_variable': keys.entries must be"):
            small.load_state_dict({**state, "keys.entries": keys})
        assert torch.equal(small(IDS), before)


@pytest.mark.parametrize("wanted, given", [("int8", "float16"), ("float16", "bfloat16"), ("int8", "int4")])
def test_a_state_of_another_format_is_refused(wanted: str, given: str) -> None:
    width = {"int8": 8, "int4": 24 if wanted == "int8" else 8}.get(given, 16 if wanted == "int8" else 8)
    model, other = nn.quantize(nn.Embedding(3, 8), wanted), nn.quantize(nn.Embedding(3, width), given)
    before = model.table.clone()
    assert other.table.shape == before.shape  # torch alone would take it
    with pytest.raises(RuntimeError, match=f"table must have rows='{wanted}', of .*, got '{given}'"):
        model.load_state_dict(other.state_dict())
    assert torch.equal(model.table, before)
    with pytest.raises(RuntimeError, match='Missing key.*"table".*\n.*Unexpected key.*"weight"'):
        model.load_state_dict(nn.Embedding(3, 8).state_dict())


def test_a_model_on_meta_can_be_loaded() -> None:
    model = nn.quantize(made("bags"), "int4")
    with torch.device("meta"):
        empty = nn.quantize(bags(), "int4").eval()
    empty.load_state_dict(model.state_dict(), assign=True)
    assert torch.equal(empty(KEYED).values(), model(KEYED).values())


# ---- Compilers ------------------------------------------------------------------------------------------------------


class FromIds(torch.nn.Module):
    """A model that is called with ids ``[B, L]``."""

    def __init__(self, table: torch.nn.Module) -> None:
        super().__init__()
        self.table = table

    def forward(self, ids: Tensor) -> Tensor:
        """Return the looked-up rows."""
        if not isinstance(self.table, nn.EmbeddingBagCollection):
            return self.table(ids)
        return self.table({"f": ids, "g": ids[:, :1]}).values()


KINDS = ("embedding", "sum", "max", "plain_bags", "growing")


@pytest.mark.parametrize("name", KINDS)
def test_compiles_in_one_graph(name: str) -> None:
    torch._dynamo.reset()
    model = FromIds(nn.quantize(made(name)))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
    for ids in (IDS, torch.cat([IDS, IDS, IDS])):
        assert torch.equal(compiled(ids), model(ids))


@each_format
@pytest.mark.parametrize("name", KINDS)
def test_exports(name: str, rows: str) -> None:
    model = FromIds(nn.quantize(made(name), rows))
    program = torch.export.export(model, (IDS,), dynamic_shapes=[{0: torch.export.Dim("B", min=1)}])
    for ids in (IDS, torch.cat([IDS, IDS, IDS])):
        assert torch.equal(program.module()(ids), model(ids))


# ---- What is refused ------------------------------------------------------------------------------------------------


@each_model
def test_training_is_refused(name: str) -> None:
    model = nn.quantize(made(name)).train()
    with pytest.raises(RuntimeError, match=r"no gradient: call eval\(\) on the model.*before nn.quantize\(\)"):
        looked_up(model, name)
    with torch.no_grad():
        looked_up(model, name)
    assert not hasattr(model, "weight")


def test_gradients_of_weights_are_refused() -> None:
    with pytest.raises(RuntimeError, match="per_sample_weights must not require a gradient"):
        nn.quantize(made("sum"))(IDS, None, torch.ones(2, 3, requires_grad=True))
    weights = torch.ones(6, requires_grad=True)
    with pytest.raises(RuntimeError, match="per_sample_weights must not require a gradient"):
        nn.quantize(made("bags"))(KeyedJaggedTensor(["f", "g"], KEYED.values(), weights, KEYED.lengths()))


def test_collections_refuse_optimizers_and_modes() -> None:
    model = nn.quantize(made("bags"))
    with pytest.raises(RuntimeError, match="quantised tables are for inference"):
        model.grad_mode = "sparse"
    with pytest.raises(RuntimeError, match="quantised tables are for inference"):
        model.use_optimizer(torch.optim.SGD(torch.nn.Linear(1, 1).parameters()))
    assert model.grad_mode is None and model.device == torch.device("cpu")
    assert nn.explain(model) == (
        "a: no gradient: 20, 6, rows='int8', 280 bytes\nb: no gradient: 20, 4, rows='int8', 240 bytes"
    )


def test_ids_of_no_row_are_named() -> None:
    with pytest.raises(IndexError, match=r"QuantizedEmbedding: input\[1, 0\] must be in \[0, 20\), got 20"):
        nn.quantize(made("embedding"))(torch.tensor([[0, 1], [20, 1]]))
    with pytest.raises(IndexError, match=r"QuantizedEmbeddingBag: input\[0, 1\] must be in \[0, 20\), got -1"):
        nn.quantize(made("max"))(torch.tensor([[0, -1]]))
    features = KeyedJaggedTensor(["f", "g"], torch.tensor([1, 2, 20]), torch.ones(3), torch.tensor([2, 1]))
    for name in ("bags", "sequences"):
        with pytest.raises(IndexError, match=r"Quantized\w+Collection: feature 'g': .*indices\[\d\].*got 20"):
            nn.quantize(made(name))(features)


def test_what_cannot_be_looked_up() -> None:
    table = nn.quantize(made("sum"))
    with pytest.raises(ValueError, match="input must be int32 or int64, got torch.float32"):
        table(torch.ones(2, 2))
    with pytest.raises(ValueError, match="offsets must be given when input has rank 1"):
        table(torch.tensor([1]))
    with pytest.raises(ValueError, match=r"offsets\[0\] must be 0, got 1"):
        table(torch.tensor([1, 2]), torch.tensor([1]))
    with pytest.raises(ValueError, match=r"per_sample_weights\[0\] must be a number, got nan"):
        table(torch.tensor([1]), torch.tensor([0]), torch.tensor([torch.nan]))


class Special(torch.nn.Embedding):
    """A subclass."""


def test_modules_of_other_classes_stay() -> None:
    model = torch.nn.Sequential(
        Special(4, 3), nn.Embedding(4, 3), nn.Embedding(4, 3, _weight=torch.ones(4, 3).int(), _freeze=True)
    )
    text = r"quantize: left unchanged: 0 \(Special: a class of its own\), 2 \(Embedding: it holds integers\)$"
    with pytest.warns(UserWarning, match=text):
        nn.quantize(model)
    assert type(model[0]) is Special and type(model[1]) is QuantizedEmbedding
    with pytest.warns(UserWarning, match=r"1 \(QuantizedEmbedding: it is quantised already\)"):
        nn.quantize(model)
    with pytest.warns(
        UserWarning, match=r"left unchanged: the model itself \(QuantizedEmbeddingBagColl.*quantised alr"
    ):
        nn.quantize(nn.quantize(bags()))
    with pytest.warns(UserWarning, match="quantize: nothing was changed: the model has no module of tables"):
        nn.quantize(torch.nn.Linear(1, 1))
    table = nn.Embedding(4, 3)
    torch.nn.utils.parametrizations.weight_norm(table)
    with pytest.warns(UserWarning, match="left unchanged"):
        nn.quantize(table)


def test_nothing_is_changed_where_a_table_does_not_fit() -> None:
    model = torch.nn.ModuleDict({"a": nn.Embedding(4, 2), "b": nn.EmbeddingBag(4, 3), "c": bags()})
    with pytest.raises(
        ValueError, match=r"^quantize: b: weight must have an even number of columns.*got shape \(4, 3\)"
    ):
        nn.quantize(model, "int4")
    with torch.no_grad():
        model["c"].embedding_bags["b"].weight[2, 1] = torch.nan
    with pytest.raises(ValueError, match="^quantize: c.b: weight must be finite .* got a row 2 from nan"):
        nn.quantize(model)
    with pytest.raises(ValueError, match="quantize: rows must be one of 'int8', .* got 'int2'"):
        nn.quantize(model, "int2")
    with pytest.raises(TypeError, match="quantize: model must be a torch.nn.Module, got list"):
        nn.quantize([model])
    assert not any(isinstance(x, QuantizedTable) for x in model.modules()) and model["a"].weight.requires_grad
