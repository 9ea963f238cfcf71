"""Collections beside single tables: results, gradients and updates; and TorchRec's names."""

from __future__ import annotations

from types import SimpleNamespace
from typing import get_args

import pytest
import torch
from devices import cpu_only
from torch import Tensor

from torchsparse_rec import JaggedTensor, KeyedJaggedTensor, nn, optim, variable
from torchsparse_rec.nn.configs import PoolingType
from torchsparse_rec.typing import Pooling

pytestmark = pytest.mark.usefixtures("kernels")


def config(name: str, rows: int, dim: int, features: list[str], pooling="sum", **more) -> nn.EmbeddingBagConfig:
    """Make the config of a table."""
    return nn.EmbeddingBagConfig(
        name=name, num_embeddings=rows, embedding_dim=dim, feature_names=features, pooling=pooling, **more
    )


MIXED = [
    config("a", 20, 3, ["f"], "mean"),
    config("b", 7, 1, ["g", "f"], "sum"),
    config("c", 11, 16, ["h"], "sqrtn", padding_idx=2),
    config("d", 9, 2, ["g"], "max"),
]
NAMES = ["f@a", "g@b", "f@b", "h", "g@d"]


def batch(size: int = 4, seed: int = 0, weighted: bool = False, sizes: list[int] | None = None) -> KeyedJaggedTensor:
    """Draw ids below 7, which every table of MIXED has, for the features f, g, h."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [size] * 3 if sizes is None else sizes
    lengths = torch.randint(0, 4, (sum(sizes),), generator=generator)
    values = torch.randint(0, 7, (int(lengths.sum()),), generator=generator)
    weights = torch.rand(values.shape[0], generator=generator) if weighted else None
    strides = [[s] for s in sizes] if len(set(sizes)) > 1 else None
    return KeyedJaggedTensor(["f", "g", "h"], values, weights, lengths, stride_per_key_per_rank=strides)


def one_by_one(collection: nn.EmbeddingBagCollection, grad_mode="as the collection") -> list[nn.EmbeddingBag]:
    """Make a module for each table, with a copy of the table's weight."""
    grad_mode = collection.grad_mode if grad_mode == "as the collection" else grad_mode
    made = []
    for its in collection.embedding_bag_configs():
        weight = collection.embedding_bags[its.name].weight.detach().clone()
        made.append(
            nn.EmbeddingBag(
                *weight.shape,
                mode=its.pooling.value.lower(),
                padding_idx=its.padding_idx,
                _weight=weight,
                include_last_offset=True,
                grad_mode=grad_mode,
            )
        )
    return made


def look_up_one_by_one(modules, configs, x: KeyedJaggedTensor) -> list[Tensor]:
    """Look up each feature by itself, in the order of the collection."""
    found = []
    for module, its in zip(modules, configs, strict=True):
        for feature in its.feature_names:
            rows = x[feature]
            found.append(module(rows.values(), rows.offsets(), rows.weights_or_none()))
    return found


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("grad_mode", [None, "sparse"])
def test_results_and_gradients_are_those_of_single_bags_bit_for_bit(grad_mode, weighted: bool) -> None:
    tables = MIXED[:3] if weighted else MIXED
    collection = nn.EmbeddingBagCollection(tables, is_weighted=weighted, grad_mode=grad_mode)
    modules = one_by_one(collection)
    x = batch(weighted=weighted)
    pooled = collection(x)
    singles = look_up_one_by_one(modules, tables, x)
    assert pooled.keys() == (["f@a", "g", "f@b", "h"] if weighted else NAMES)
    assert torch.equal(pooled.values(), torch.cat(singles, 1))
    weights = torch.rand(pooled.values().shape, generator=torch.Generator().manual_seed(5))
    (pooled.values() * weights).sum().backward()
    (torch.cat(singles, 1) * weights).sum().backward()
    for its, module in zip(tables, modules, strict=True):
        grad = collection.embedding_bags[its.name].weight.grad
        assert grad.layout == (torch.sparse_coo if grad_mode == "sparse" else torch.strided)
        want, got = module.weight.grad.to_dense(), grad.to_dense()
        if len(its.feature_names) == 1:
            assert torch.equal(got, want), its.name
        else:
            torch.testing.assert_close(got, want)


@pytest.mark.parametrize("grad_mode", ["dense", "sparse", "fused"])
def test_dtypes_may_differ(grad_mode: str) -> None:
    tables = [
        config("a", 20, 3, ["f"], "mean", data_type="FP16"),
        config("b", 7, 4, ["g"], data_type=torch.bfloat16),
        config("c", 11, 2, ["h"]),
    ]
    collection = nn.EmbeddingBagCollection(tables, grad_mode=grad_mode)
    dtypes = [collection.embedding_bags[t.name].weight.dtype for t in tables]
    assert dtypes == [torch.float16, torch.bfloat16, torch.float32]
    optimizer = optim.SGD(collection.parameters(), lr=0.1, in_backward=True)
    modules = one_by_one(collection, grad_mode=None)
    x = batch()
    pooled = collection(x).values()
    assert pooled.dtype == torch.float32
    assert torch.equal(pooled, torch.cat(look_up_one_by_one(modules, tables, x), 1).float())
    before = {t.name: collection.embedding_bags[t.name].weight.detach().clone() for t in tables}
    pooled.square().sum().backward()
    optimizer.step()
    for t in tables:
        assert not torch.equal(collection.embedding_bags[t.name].weight, before[t.name])


def test_batch_sizes_may_differ() -> None:
    collection = nn.EmbeddingBagCollection(MIXED)
    x = batch(sizes=[2, 5, 3])
    with pytest.raises(ValueError, match="one batch size, or inverse_indices"):
        collection(x)
    found = collection.lookup(x)
    singles = look_up_one_by_one(one_by_one(collection), MIXED, x)
    assert list(found) == NAMES
    for got, want in zip(found.values(), singles, strict=True):
        assert torch.equal(got, want)


def test_inverse_indices_give_the_full_batch() -> None:
    collection = nn.EmbeddingBagCollection(MIXED)
    x = batch(sizes=[2, 3, 4])
    inverse = torch.tensor([[0, 1, 1, 0], [2, 1, 0, 0], [0, 1, 2, 3]])
    with_inverse = KeyedJaggedTensor(
        x.keys(),
        x.values(),
        lengths=x.lengths(),
        stride_per_key_per_rank=x.stride_per_key_per_rank(),
        inverse_indices=(x.keys(), inverse),
    )
    pooled, plain = collection(with_inverse), collection.lookup(x)
    for name in NAMES:
        row = "fgh".index(name[0])
        assert torch.equal(pooled[name], plain[name][inverse[row]])


def test_forms_of_features_and_those_of_other_names() -> None:
    collection = nn.EmbeddingBagCollection(MIXED)
    x = batch()
    want = collection(x).values()
    reordered = x.permute([2, 0, 1])
    assert torch.equal(collection(reordered).values(), want)
    more = KeyedJaggedTensor.concat([KeyedJaggedTensor(["z"], torch.arange(4) + 99, lengths=torch.ones(4).long()), x])
    assert torch.equal(collection(more).values(), want)
    assert torch.equal(collection({key: x[key] for key in x.keys()} | {"z": torch.arange(4)}).values(), want)
    methods = ("keys", "values", "lengths", "weights_or_none", "stride_per_key_per_rank", "variable_stride_per_key")
    torchrecs = SimpleNamespace(**{name: getattr(x, name) for name in methods})
    assert torch.equal(collection(torchrecs).values(), want)
    with pytest.raises(ValueError, match="none named 'f'"):
        collection(KeyedJaggedTensor(["g"], torch.tensor([1]), lengths=torch.tensor([1])))


def test_sequences() -> None:
    tables = [
        nn.EmbeddingConfig(name="a", num_embeddings=20, embedding_dim=3, feature_names=["f"]),
        nn.EmbeddingConfig(name="b", num_embeddings=9, embedding_dim=2, feature_names=["g", "f"]),
    ]
    collection = nn.EmbeddingCollection(tables, need_indices=True)
    x = batch()
    rows = collection(x)
    assert list(rows) == ["f@a", "g", "f@b"]
    for name, table, feature in (("f@a", "a", "f"), ("g", "b", "g"), ("f@b", "b", "f")):
        assert isinstance(rows[name], JaggedTensor)
        assert torch.equal(rows[name].values(), collection.embeddings[table].weight[x[feature].values()])
        assert torch.equal(rows[name].lengths(), x[feature].lengths())
        assert torch.equal(rows[name].weights(), x[feature].values())


@cpu_only
def test_names_fields_and_state_are_torchrecs() -> None:
    collection = nn.EmbeddingBagCollection(MIXED, grad_mode="fused")
    assert list(collection.state_dict()) == [f"embedding_bags.{t.name}.weight" for t in MIXED]
    assert not collection.is_weighted()
    assert collection.embedding_names() == NAMES
    sequences = nn.EmbeddingCollection([nn.EmbeddingConfig(5, 2, "t", "FP32", ["f"])])
    assert list(sequences.state_dict()) == ["embeddings.t.weight"]
    assert [x.value.lower() for x in PoolingType] == [*get_args(Pooling)]
    for name in ("SUM", "mean", PoolingType.MEAN, SimpleNamespace(value="MEAN")):
        assert config("t", 2, 2, ["f"], name).pooling in PoolingType
    with pytest.raises(ValueError, match="pooling must be"):
        config("t", 2, 2, ["f"], "median")
    weight = nn.EmbeddingBagCollection([config("t", 100, 50, ["f"])]).embedding_bags["t"].weight
    assert 0.09 < weight.abs().max() <= 0.1
    filled = config("t", 4, 2, ["f"], init_fn=torch.nn.init.ones_)
    assert (nn.EmbeddingBagCollection([filled]).embedding_bags["t"].weight == 1).all()


@cpu_only
def test_dir_shows_what_is_for_users() -> None:
    collection = nn.EmbeddingBagCollection([config("a", 5, 2, ["f"])])
    shown = {name for name in {*dir(collection)} - {*dir(torch.nn.Module())} if not name.startswith("_")}
    own = {"grad_mode", "describe", "explain", "use_optimizer", "device", "lookup", "is_weighted", "embedding_names"}
    assert shown == own | {"embedding_bags", "embedding_bag_configs"}
    growing = nn.EmbeddingVariable(2)
    shown = {name for name in {*dir(growing)} - {*dir(torch.nn.Module())} if not name.startswith("_")}
    options = {"embedding_dim", "name", "key_dtype", "ev_option", "target_gpu", "max_norm", "scale_grad_by_freq"}
    rows = {"insert", "erase", "evict", "export", "insert_export", "lookup", "prefetch", "total_count", "stats"}
    saving = {"save", "save_delta", "restore", "global_step"}
    assert shown == options | rows | saving | {"grad_mode", "describe", "explain", "use_optimizer", "sparse", "weight"}


@cpu_only
def test_bad_tables_are_refused() -> None:
    for tables, words in (
        ([], "at least one config"),
        ([config("", 2, 2, ["f"])], r"tables\[0\].name must be distinct"),
        ([config("a", 2, 2, ["f"]), config("a", 2, 2, ["g"])], r"tables\[1\].name must be distinct"),
        ([config("a", 2, 2, [])], r"tables\[0\].feature_names"),
        ([config("a", 0, 2, ["f"])], r"tables\[0\].num_embeddings must be at least 1, got 0"),
        (
            [config("a", 2**40, 2, ["f"], ev_option=variable.EmbeddingVariableOption())],
            r"num_embeddings must be .* for table 'a': .* its capacity",
        ),
        ([config("a", 2, 2, ["f"], padding_idx=2)], r"tables\[0\].padding_idx must be None or in \[-2, 2\), got 2"),
        ([config("a", 2, 2, ["f"], data_type="INT8")], "data_type must be"),
    ):
        with pytest.raises(ValueError, match=words):
            nn.EmbeddingBagCollection(tables)


def test_bad_ids_are_named() -> None:
    collection = nn.EmbeddingBagCollection([config("a", 5, 2, ["f"]), config("b", 3, 2, ["g"])])
    x = KeyedJaggedTensor(["f", "g"], torch.tensor([4, 1, 3]), lengths=torch.tensor([2, 1]))
    with pytest.raises(IndexError, match=r"indices\[2\].*3: an id of feature 'g', example 0, .* 3 rows of table 'b'"):
        collection(x)
    x = KeyedJaggedTensor(["g", "f"], torch.tensor([2, -1, 4, 1]), lengths=torch.tensor([1, 0, 0, 0, 1, 2]))
    with pytest.raises(IndexError, match=r"indices\[1\].*-1: an id of feature 'f', example 1, .* 5 rows of table 'a'"):
        collection(x)


@cpu_only
@pytest.mark.parametrize("grows", [False, True])
@pytest.mark.parametrize("pooled", [True, False])
def test_errors_say_lengths_or_offsets_as_they_were_given(pooled: bool, grows: bool) -> None:
    option = variable.EmbeddingVariableOption() if grows else None
    kind = nn.EmbeddingBagConfig if pooled else nn.EmbeddingConfig
    tables = [kind(5, 2, "a", feature_names=["f"], ev_option=option), kind(9, 2, "b", feature_names=["g"])]
    collection = nn.EmbeddingBagCollection(tables) if pooled else nn.EmbeddingCollection(tables)
    for rows, text in (
        ({"lengths": [2, 1, 1, 1]}, r"lengths must add up to the number of values, 4, got 5: {'f': 3, 'g': 2}"),
        ({"lengths": [2, 1, -1, 2]}, r"lengths\[2\] must not be negative, got -1 for feature 'g', example 0"),
        ({"offsets": [0, 1, 2, 3, 5]}, r"offsets\[4\], the last, must be the number of values, 4, got 5"),
        ({"offsets": [1, 1, 2, 3, 4]}, r"offsets\[0\] must be 0, got 1"),
        ({"offsets": [0, 2, 1, 3, 4]}, r"got 2 followed by 1 at position 2, the end of feature 'f', example 1"),
    ):
        given = {name: torch.tensor(x) for name, x in rows.items()}
        with pytest.raises(ValueError, match=text):
            collection(KeyedJaggedTensor(["f", "g"], torch.tensor([1, 2, 3, 4]), **given))


@cpu_only
def test_weights_are_missed() -> None:
    weighted = nn.EmbeddingBagCollection([config("a", 5, 2, ["f"])], is_weighted=True)
    with pytest.raises(ValueError, match="features must have weights, as is_weighted is True, got none"):
        weighted({"f": torch.tensor([1, 2])})


@cpu_only
def test_configs_of_the_other_kind_are_refused() -> None:
    bag, row = config("a", 5, 2, ["f"]), nn.EmbeddingConfig(5, 2, "a", feature_names=["f"])
    for collection, tables, text in (
        (
            nn.EmbeddingCollection,
            [bag],
            r"tables\[0\] must be an EmbeddingConfig, got EmbeddingBagConfig for table 'a'",
        ),
        (
            nn.EmbeddingBagCollection,
            [bag, row],
            r"tables\[1\] must be an EmbeddingBagConfig, .* EmbeddingCollection takes",
        ),
        (nn.EmbeddingBagCollection, row, "tables must be a list, each an EmbeddingBagConfig, got EmbeddingConfig"),
        (nn.EmbeddingCollection, [torch.nn.Embedding(5, 2)], r"tables\[0\] must be an EmbeddingConfig, got Embedding$"),
    ):
        with pytest.raises(TypeError, match=text):
            collection(tables)


@pytest.mark.parametrize("grad_mode", ["dense", "sparse", "fused"])
def test_one_table_may_be_frozen_or_cast_or_saved_alone(grad_mode: str) -> None:
    collection = nn.EmbeddingBagCollection(MIXED[:3], grad_mode=grad_mode)
    optimizer = optim.Adam(collection.parameters(), lr=0.1, in_backward=True)
    collection.embedding_bags["a"].weight.requires_grad_(False)
    collection.embedding_bags["c"].double()
    before = {name: table.weight.detach().clone() for name, table in collection.embedding_bags.items()}
    collection(batch()).values().square().sum().backward()
    optimizer.step()
    assert torch.equal(collection.embedding_bags["a"].weight, before["a"])
    for name in "bc":
        assert not torch.equal(collection.embedding_bags[name].weight, before[name])
    saved = collection.embedding_bags["b"].state_dict()
    other = nn.EmbeddingBagCollection(MIXED[:3], grad_mode=grad_mode)
    other.embedding_bags["b"].load_state_dict(saved)
    assert torch.equal(other.embedding_bags["b"].weight, collection.embedding_bags["b"].weight)


@pytest.mark.parametrize(("in_backward", "choice", "of_small"), [(False, "sparse", "dense"), (True, "fused", "fused")])
def test_auto_chooses_table_by_table_and_says_why(in_backward: bool, choice: str, of_small: str) -> None:
    tables = [config("small", 10, 4, ["f"]), config("large", 200_000, 16, ["g"])]
    collection = nn.EmbeddingBagCollection(tables, grad_mode="auto")
    optimizer = optim.Adam(collection.parameters(), lr=0.1, in_backward=in_backward)
    x = KeyedJaggedTensor(["f", "g"], torch.arange(8), lengths=torch.ones(8).long())
    collection(x).values().sum().backward()
    optimizer.step()
    text = collection.explain()
    assert f"small: grad_mode='auto' -> {of_small}" in text
    assert f"large: grad_mode='auto' -> {choice}" in text
    assert "more rows than a lookup has ids" in text
    assert ("one lookup of both costs less than two" in text) == in_backward
    state = collection.state_dict()
    other = nn.EmbeddingBagCollection(tables, grad_mode="auto")
    other.load_state_dict(state)
    assert "mean of 1" in other.explain()


@pytest.mark.filterwarnings("ignore:Adam. weight_decay=0.1 goes through the second moment")
@pytest.mark.parametrize("obstacle", ["none", "frozen", "decays", "alone"])
def test_a_small_table_under_auto_joins_a_large_one_that_backward_updates(obstacle: str) -> None:
    """All tables end as under dense gradients, and it joins only where its optimizer and its lookups allow it."""
    names = ["small", "large"] if obstacle != "alone" else ["small"]
    rows = {"small": 10, "large": 200_000}
    trained = {}
    for mode in ("auto", "dense"):
        torch.manual_seed(0)
        tables = [config(name, rows[name], 4, [name]) for name in names]
        collection = nn.EmbeddingBagCollection(tables, grad_mode=mode)
        of_small = collection.embedding_bags["small"].weight.requires_grad_(obstacle != "frozen")
        others = [p for p in collection.parameters() if p is not of_small]
        decay = {"params": [of_small], "weight_decay": 0.1 * (obstacle == "decays")}
        optimizer = optim.Adam([decay, *([{"params": others}] if others else [])], lr=0.1, in_backward=True)
        for seed in range(3):
            ids = torch.randint(10, (6 * len(names),), generator=torch.Generator().manual_seed(seed))
            x = KeyedJaggedTensor(names, ids, lengths=torch.tensor([2, 1, 3] * len(names)))
            collection(x).values().square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        if mode == "auto":
            assert f"small: grad_mode='auto' -> {'fused' if obstacle == 'none' else 'dense'}" in collection.explain()
        trained[mode] = collection.state_dict()
    for name, want in trained["dense"].items():
        torch.testing.assert_close(trained["auto"][name], want, rtol=1e-5, atol=1e-7)


def test_the_collate_function_feeds_a_collection() -> None:
    from torchsparse_rec import KeyedJaggedCollate

    examples = [{"f": [1, 2], "g": [3], "h": []}, {"f": [], "g": [0, 1], "h": [4]}]
    features = KeyedJaggedCollate(["f", "g", "h"])(examples)["features"]
    assert nn.EmbeddingBagCollection(MIXED)(features).values().shape == (2, 23)
