"""``FeatureTransform``: numbers, tables, order, devices, compilation, state."""

from __future__ import annotations

import copy
import json
import pickle

import numpy as np
import pytest
import torch
from cuda_cases import sync_debug_mode
from features.cases import IDENTITY, assert_same, every_operator_of, rows_of
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from torchsparse_rec import features
from torchsparse_rec.features import FeatureTransform, _categorical, _groups, _ids
from torchsparse_rec.features.raw import Raw
from torchsparse_rec.nn import EmbeddingBagCollection, EmbeddingCollection

# ---- Numbers --------------------------------------------------------------------------------------------------------


def test_dense_columns_are_sorted_by_name():
    columns = [
        features.numeric_column("z"),
        features.indicator_column(features.categorical_column_with_identity("m", 2)),
        features.bucketized_column(features.numeric_column("b", shape=(2,)), [0.0]),
        features.numeric_column("a", shape=(1, 2)),
    ]
    batch = {"z": [9.0], "m": [1], "b": [[-1.0, 1.0]], "a": torch.tensor([[5, 6]])}
    batch["b"] = torch.tensor(batch["b"])
    transform = FeatureTransform(columns)
    assert transform(batch).dense.tolist() == [[5, 6, 1, 0, 0, 1, 0, 1, 9]]
    assert transform.dense_width == 9
    assert transform.dense_slices() == {
        "a": slice(0, 2),
        "b_bucketized": slice(2, 6),
        "m_indicator": slice(6, 8),
        "z": slice(8, 9),
    }


def test_nan_passes_and_falls_into_the_last_bucket():
    number = features.numeric_column("x")
    made = FeatureTransform([number, features.bucketized_column(number, [0.0, 1.0])])({"x": [float("nan"), 0.5]})
    assert torch.isnan(made.dense[0, 0]) and made.dense[:, 1:].tolist() == [[0, 0, 1], [0, 1, 0]]


def test_missing_numbers_get_the_default_before_the_normalizer():
    column = features.numeric_column("x", default_value=3, normalizer_fn=features.Log(1.0))
    made = FeatureTransform([column])({"x": [None, 0]}).dense
    assert torch.equal(made, torch.log(torch.tensor([[4.0], [1.0]])))
    pair = features.numeric_column("x", shape=(2,), default_value=[1.5, 2.5])
    pa = pytest.importorskip("pyarrow")
    array = pa.array([[None, 1], None], pa.list_(pa.int32(), 2))
    assert FeatureTransform([pair])({"x": array}).dense.tolist() == [[1.5, 1.0], [1.5, 2.5]]


def test_normalizers():
    x = torch.tensor([[1.0, 10.0], [3.0, 30.0]])
    column = features.numeric_column("x", shape=2, normalizer_fn=features.Standardize([2.0, 20.0], [1.0, 0.0]))
    expected = torch.tensor([[-1.0, -10 / 1e-7], [1.0, 10 / 1e-7]])
    assert torch.allclose(FeatureTransform([column])({"x": x}).dense, expected)
    square = torch.arange(8.0).reshape(2, 2, 2)
    for mean in ([[1.0, 2.0], [3.0, 4.0]], (1.0, 2.0, 3.0, 4.0), np.array([[1, 2], [3, 4]])):
        each = features.numeric_column("x", shape=(2, 2), normalizer_fn=features.Standardize(mean, [4.0] * 4))
        expected = (square - torch.tensor([[1.0, 2.0], [3.0, 4.0]])) / 2
        assert torch.equal(FeatureTransform([each])({"x": square}).dense, expected.reshape(2, 4))
    both = features.Compose((features.Clip(0, 5), features.Log(0.0)))
    made = FeatureTransform([features.numeric_column("x", normalizer_fn=both)])({"x": [-3.0, 5.0, 99.0]}).dense
    assert torch.equal(made.flatten(), torch.log(torch.tensor([0.0, 5.0, 5.0])))
    plain = features.numeric_column("x", normalizer_fn=lambda x: x * 2)
    assert FeatureTransform([plain])({"x": [1, 2]}).dense.tolist() == [[2], [4]]


def test_sequences_of_numbers():
    column = features.sequence_numeric_column("x", shape=2, default_value=-1.0)
    made = FeatureTransform([column])({"x": [[1, 2, 3, 4], [], [5, 6]]}).sequence_dense["x"]
    assert made.lengths().tolist() == [2, 0, 1] and made.values().tolist() == [[1, 2], [3, 4], [5, 6]]
    with pytest.raises(ValueError, match="column 'x': rows must have a multiple of 2 numbers, got 3 in example 1"):
        FeatureTransform([column])({"x": [[1, 2], [1, 2, 3]]})


# ---- Tables ---------------------------------------------------------------------------------------------------------


def test_tables_of_embeddings():
    user, item = (features.categorical_column_with_identity(key, 50) for key in ("user", "item"))
    seen = features.categorical_column_with_identity("seen.items", 50)
    shared = features.shared_embeddings([item, seen], 4, "sum", trainable=False)
    transform = FeatureTransform([features.embedding_column(user, 8), *shared])
    tables = {x.name: x for x in transform.embedding_bag_configs()}
    assert list(tables) == ["user_embedding", "item_seen_items_shared_embedding"]
    assert tables["item_seen_items_shared_embedding"].feature_names == ["item", "seen.items"]
    bags = EmbeddingBagCollection(transform.embedding_bag_configs())
    transform.freeze(bags)
    assert [p.requires_grad for p in bags.parameters()] == [True, False]
    weights = bags.embedding_bags["user_embedding"].weight.detach()
    assert 0.1 < float(weights.std()) < 0.6 and float(weights.abs().max()) <= 2 / 8**0.5
    made = transform({"user": [1, 2], "item": [3, 4], "seen.items": [[5, 6], []]})
    pooled = bags(made.sparse)
    rows = bags.embedding_bags["item_seen_items_shared_embedding"].weight
    assert torch.allclose(pooled["seen.items"][0], rows[5] + rows[6]) and not pooled["seen.items"][1].any()


def test_only_the_tables_of_a_column_freeze():
    one = features.embedding_column(features.categorical_column_with_identity("a", 5), 2, trainable=False)
    other = features.embedding_column(features.categorical_column_with_identity("b", 5), 2)
    transform = FeatureTransform([one, other])
    # A module whose own name is that of a table.
    model = torch.nn.ModuleDict({"a_embedding": EmbeddingBagCollection(transform.embedding_bag_configs())})
    transform.freeze(model)
    learns = {name.split(".")[-2]: x.requires_grad for name, x in model.named_parameters()}
    assert learns == {"a_embedding": False, "b_embedding": True}


def test_one_feature_for_two_tables():
    column = features.categorical_column_with_identity("x", 10)
    (shared,) = features.shared_embeddings([column], 2, shared_embedding_collection_name="t")
    transform = FeatureTransform([features.embedding_column(column, 3), shared], [column])
    assert transform({"x": [1]}).sparse.keys() == ["x"]
    bags = EmbeddingBagCollection([*transform.embedding_bag_configs(), *transform.linear_bag_configs()])
    assert bags(transform({"x": [1]}).sparse).keys() == ["x@x_embedding", "x@t", "x@x_weights"]


def test_weighted_columns():
    ids = features.categorical_column_with_identity("x", 10)
    weighted = features.weighted_categorical_column(ids, "w")
    (shared,) = features.shared_embeddings([weighted], 2, "sum", shared_embedding_collection_name="t")
    transform = FeatureTransform([features.embedding_column(weighted, 2, "mean"), shared], [weighted])
    made = transform({"x": [[1, 2, 3], [-2, 4]], "w": [[0.5, -1.0, float("nan")], [1.0, 2.0]]})
    assert made.sparse is None and made.weighted.keys() == ["x_weighted_by_w", "x_weighted_by_w@sum"]
    assert rows_of(made.weighted, "x_weighted_by_w") == [[1], [4]]
    assert rows_of(made.weighted, "x_weighted_by_w@sum") == [[1, 2, 3], [4]]
    assert made.weighted["x_weighted_by_w"].weights().tolist() == [0.5, 2.0]
    assert transform.embedding_bag_configs() == [] == transform.linear_bag_configs()
    assert [x.feature_names for x in transform.weighted_embedding_bag_configs()] == [
        ["x_weighted_by_w"],
        ["x_weighted_by_w@sum"],
    ]
    assert [x.feature_names for x in transform.weighted_linear_bag_configs()] == [["x_weighted_by_w@sum"]]


def test_a_shared_table_with_weights_for_some():
    ids = [features.categorical_column_with_identity(key, 10) for key in "ab"]
    pair = features.shared_embeddings([features.weighted_categorical_column(ids[0], "w"), ids[1]], 2, "sum")
    made = FeatureTransform(pair)({"a": [1], "b": [2], "w": [0.5]}).weighted
    assert made.keys() == ["a_weighted_by_w", "b"] and made.weights().tolist() == [0.5, 1.0]


def test_weights_in_other_forms_than_ids():
    column = features.weighted_categorical_column(features.categorical_column_with_identity("x", 10), "w")
    transform = FeatureTransform([column])
    dense = transform({"x": torch.tensor([[3, -1], [4, 5]]), "w": torch.tensor([[0.5, 0.0], [1.0, 2.0]])}).weighted
    assert rows_of(dense, "x_weighted_by_w") == [[3], [4, 5]] and dense.weights().tolist() == [0.5, 1.0, 2.0]
    mixed = transform({"x": [[3], [4, 5]], "w": torch.tensor([[0.5, 0.0], [1.0, 2.0]])}).weighted
    assert rows_of(mixed, "x_weighted_by_w") == [[3], [4, 5]] and mixed.weights().tolist() == [0.5, 1.0, 2.0]
    with pytest.raises(ValueError, match="must be a weight for each id, got 1 ids and 2 weights in example 0"):
        transform({"x": [[3], [4]], "w": [[0.5, 1.0], [1.0]]})
    with pytest.raises(ValueError, match="weights must be numbers, got strings"):
        transform({"x": [3], "w": ["a"]})


def test_weights_that_are_null_or_0():
    """Count a null as 0, whatever its memory holds; keep a weight of 0 with its id if both have one dense shape."""
    column = features.weighted_categorical_column(features.categorical_column_with_identity("x", 10), "w")
    transform = FeatureTransform([column])
    pa = pytest.importorskip("pyarrow")
    for dtype in (np.float16, np.float32):
        weights = pa.array(np.array([5, 2], dtype), mask=np.array([True, False]))
        assert transform({"x": [1, 2], "w": weights}).weighted.weights().tolist() == [0.0, 2.0]
    kept = transform({"x": torch.tensor([[3, 4], [5, -1]]), "w": torch.tensor([[0.0, 1.0], [2.0, 3.0]])}).weighted
    assert rows_of(kept, "x_weighted_by_w") == [[3, 4], [5]] and kept.weights().tolist() == [0.0, 1.0, 2.0]


def test_sequences_have_tables_of_their_own():
    column = features.sequence_categorical_column_with_vocabulary_list("x", ["a", "b"], num_oov_buckets=1)
    transform = FeatureTransform([features.embedding_column(column, 4)])
    made = transform({"x": [["b", "a"], [], ["?"]]})
    assert made.sparse is None and rows_of(made.sequence, "x") == [[1, 0], [], [2]]
    rows = EmbeddingCollection(transform.embedding_configs())(made.sequence)["x"]
    assert rows.values().shape == (3, 4) and rows.lengths().tolist() == [2, 0, 1]


# ---- Devices, compilation, state ------------------------------------------------------------------------------------


def every_kind() -> FeatureTransform:
    age = features.numeric_column("age", normalizer_fn=features.Log())
    word = features.categorical_column_with_vocabulary_list("word", ["a", "b"], num_oov_buckets=2)
    user = features.categorical_column_with_identity("user", 10)
    years = features.bucketized_column(features.numeric_column("years"), [18, 30.5])
    return FeatureTransform(
        [
            age,
            years,
            features.embedding_column(user, 3, initializer=features.Constant(1.0)),
            features.embedding_column(features.weighted_categorical_column(word, "weight"), 2, "sum"),
            features.indicator_column(word),
            features.embedding_column(features.sequence_categorical_column_with_hash_bucket("query", 20), 2),
            features.sequence_numeric_column("times"),
        ],
        linear_columns=[years, features.crossed_column([user, years, "city"], 100, hash_key=7)],
        linear_combiner="mean",
    )


BATCH = {
    "age": [3.0, 4.0],
    "years": [20.0, 40.0],
    "user": [1, 2],
    "word": ["a", "z"],
    "weight": [0.5, 1.5],
    "query": [["q"], ["r", "s"]],
    "times": [[1.0], [2.0, 3.0]],
    "city": ["Oslo", "Lima"],
}


def test_copies_behave_alike():
    transform = every_kind()
    expected = transform(BATCH)
    for twin in (
        pickle.loads(pickle.dumps(transform)),
        copy.deepcopy(transform),
        FeatureTransform.from_config(json.loads(json.dumps(transform.to_config()))),
        FeatureTransform(transform.columns, transform.linear_columns, linear_combiner="mean"),
    ):
        assert_same(twin(BATCH), expected)
        assert twin.columns == transform.columns and hash(twin.columns[0]) == hash(transform.columns[0])
    assert "age" in repr(transform) and "IdentityCategoricalColumn" in repr(transform.columns[2])


def test_numbers_of_numpy_are_written_as_pythons():
    """Make the same columns from NumPy's numbers as from Python's."""

    def made(integer, number, text):
        source = features.numeric_column(
            "n", integer(1), default_value=number(1.5), normalizer_fn=features.Log(number(2))
        )
        words = features.categorical_column_with_vocabulary_list("w", [text("a"), text("b")], default_value=integer(1))
        ids = features.categorical_column_with_identity("x", integer(9), integer(2))
        return [
            source,
            features.numeric_column("m", normalizer_fn=features.Standardize(number(1), number(2))),
            features.numeric_column("k", shape=(integer(2),), default_value=[number(1), number(2)]),
            features.bucketized_column(source, [number(1), number(2)], epsilon=number(0.5)),
            features.bucketized_column(features.numeric_column("b"), num_bins=integer(3)),
            features.embedding_column(words, integer(2), max_norm=number(1), initializer=features.Constant(number(1))),
            features.crossed_column(["x", "y"], integer(5), integer(7)),
            features.categorical_column_with_hash_bucket("h", integer(5)),
            features.categorical_column_with_vocabulary_list("v", max_tokens=integer(3)),
            *features.shared_embeddings([ids], integer(2), max_norm=number(2)),
        ]

    plain = made(int, float, str)
    for column, expected in zip(made(np.int32, np.float32, np.str_), plain, strict=True):
        assert column == expected and hash(column) == hash(expected)
        assert json.dumps(column.to_config()) == json.dumps(expected.to_config())
        assert features.column_from_config(json.loads(json.dumps(column.to_config()))) == expected


def test_everything_comes_to_the_modules_device():
    transform = every_kind().to("meta")
    assert {x.device.type for x in transform.buffers()} == {"meta"}
    # Tensors of the meta device have no values: code that read one would fail here, and on CUDA wait for the GPU.
    number = features.numeric_column("n", normalizer_fn=features.Standardize(1.0, 4.0))
    columns = [IDENTITY, features.categorical_column_with_hash_bucket("h", 10, "int64")]
    columns += [features.crossed_column([IDENTITY, features.bucketized_column(number, [0.0])], 10), number]
    columns += [features.bucketized_column(number, [0.0, 1.0]), features.indicator_column(IDENTITY)]
    batch = {"x": torch.ones(4, 2, dtype=torch.int32), "h": torch.ones(4, dtype=torch.int64), "n": np.ones(4)}
    made = FeatureTransform(columns, drop_missing=False).to("meta")(batch)
    assert made.sparse.values().device.type == made.dense.device.type == "meta"
    assert made.sparse.lengths().shape == (12,) and made.dense.shape == (4, 104)


def test_casts_and_empty_memory_leave_the_columns_alone():
    """Keep boundaries apart that 16 bits cannot tell apart, and fill memory without values again."""
    number = features.numeric_column("n")
    words = features.categorical_column_with_vocabulary_list("w", ["a", "b"])
    columns = [features.bucketized_column(number, [65000.0, 69990.0, 70001.0]), features.embedding_column(words, 2)]
    batch = {"n": [65000.0, 69991.0, 7e7], "w": ["b", "a", "b"]}
    expected = FeatureTransform(columns)(batch)
    with torch.device("meta"):
        made = FeatureTransform(columns)
    assert {x.device.type for x in made.buffers()} == {"meta"}
    for transform in (
        FeatureTransform(columns).half(),
        FeatureTransform(columns).bfloat16().double(),
        torch.nn.Sequential(FeatureTransform(columns)).half()[0],
        FeatureTransform(columns).to_empty(device="cpu"),
        FeatureTransform(columns).to("meta").to_empty(device="cpu"),
        made.to_empty(device="cpu"),
    ):
        assert_same(transform(batch), expected)
        assert {x.device.type for x in transform.buffers()} == {"cpu"}


def test_dense_numbers_are_float32_whatever_the_default():
    number = features.numeric_column("n", normalizer_fn=features.Standardize((1.0, 2.0), (1.0, 2.0)), shape=2)
    columns = [number, features.bucketized_column(number, [0.0]), features.indicator_column(IDENTITY)]
    batch = {"n": torch.ones(3, 2), "x": [1, 2, 3]}
    expected = FeatureTransform(columns)(batch)
    torch.set_default_dtype(torch.float64)
    try:
        for column in columns:
            assert FeatureTransform([column])(batch).dense.dtype == torch.float32
        assert_same(FeatureTransform(columns)(batch), expected)
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_users_normalizer_does_not_write_into_the_batch():
    x = torch.tensor([1.0, 2.0])
    for own in (torch.Tensor.neg_, features.Compose((features.Clip(), torch.Tensor.neg_))):
        assert FeatureTransform([features.numeric_column("x", normalizer_fn=own)])({"x": x}).dense.tolist() == [
            [-1],
            [-2],
        ]
        steps = FeatureTransform([features.sequence_numeric_column("x", normalizer_fn=own)])
        assert steps({"x": (x, torch.tensor([0, 2]))}).sequence_dense["x"].values().tolist() == [[-1], [-2]]
    assert x.tolist() == [1.0, 2.0]


@pytest.mark.cuda
def test_a_gpu_gives_the_same_without_waiting():
    transform = every_kind()
    expected = transform(BATCH)
    assert_same(
        torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.cpu, transform.to("cuda")(BATCH)), expected
    )
    columns = [features.categorical_column_with_identity(f"c{k}", 100) for k in range(3)]
    columns += [features.categorical_column_with_hash_bucket(f"h{k}", 100, "int64") for k in range(3)]
    columns += [features.bucketized_column(features.numeric_column("n"), [0.0, 1.0])]
    quick = FeatureTransform(columns, drop_missing=False).to("cuda")
    batch = {f"{kind}{k}": torch.arange(8, device="cuda") for kind in "ch" for k in range(3)}
    batch["n"] = torch.randn(8, device="cuda")
    quick(batch)
    with sync_debug_mode("error"):
        quick(batch)


def test_what_is_left_out_is_asked_of_a_gpu_once_a_batch(monkeypatch):
    """Do on the CPU what is done on CUDA, where ``nonzero`` waits, as ``masked_select`` would."""
    columns = [features.categorical_column_with_identity(f"c{k}", 100) for k in range(3)]
    columns += [features.categorical_column_with_identity("d", 100, default_value=7)]
    columns += [features.categorical_column_with_vocabulary_list("v", ["a", "b"])]
    weighted = [features.weighted_categorical_column(features.categorical_column_with_identity("w", 9), "n")]
    batch = {
        **{f"c{k}": torch.tensor([[k, -1], [3, 4], [-1, -1]]) for k in range(3)},
        "d": torch.tensor([-1, 200, 5]),
        "v": ["a", "", "z"],
        "w": torch.tensor([[1, -1], [2, 3], [-1, 4]]),
        "n": torch.tensor([[0.5, 1.0], [0.0, 2.0], [3.0, -4.0]]),
    }
    for its in (columns, columns[:1], weighted):
        transform = FeatureTransform(its)
        expected = transform(batch)
        with monkeypatch.context() as patch:
            for module in (_ids, _groups):
                patch.setattr(module, "is_cheap_to_ask", lambda x: False)
            found = []
            names = every_operator_of(lambda: found.append(transform(batch)))  # noqa: B023
        assert_same(found[0], expected)
        assert names.count("nonzero") == 1 and "masked_select" not in names


@pytest.mark.cuda
def test_a_transform_on_the_cpu_waits_for_a_batch_from_a_gpu() -> None:
    numbers = torch.randn(2**24)
    transform = FeatureTransform([features.numeric_column("n")])
    assert torch.equal(transform({"n": numbers.cuda()}).dense, transform({"n": numbers}).dense)


def test_only_copies_to_a_gpu_are_not_waited_for() -> None:
    found = {}

    class Copies(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func is not torch.Tensor.to:
                return func(*args, **(kwargs or {}))
            found[args[1].type] = kwargs["non_blocking"]
            return args[0]

    with Copies():
        for device in ("cpu", "cuda"):
            Raw("x", torch.arange(2, device="meta"), 2).to(torch.device(device))
    assert found == {"cpu": False, "cuda": True}


def test_compiles_to_one_graph():
    columns = [features.categorical_column_with_identity(f"c{k}", 100) for k in range(3)]
    columns += [features.categorical_column_with_hash_bucket(f"h{k}", 100, "int64") for k in range(3)]
    number = features.numeric_column("n", normalizer_fn=features.Standardize(1.0, 4.0))
    columns = [features.embedding_column(column, 2) for column in columns]
    columns += [number, features.bucketized_column(number, [0.0, 1.0])]
    linear = [features.crossed_column(["c0", features.categorical_column_with_identity("c1", 100), "h0"], 50)]
    transform = FeatureTransform(columns, linear, drop_missing=False)
    compiled = torch.compile(transform, fullgraph=True, backend="eager")
    # After the first size, torch.compile makes sizes symbols.
    for size in (4, 7, 9):
        batch = {f"{kind}{k}": torch.arange(2 * size).reshape(size, 2) for kind in "ch" for k in range(3)}
        batch["n"] = torch.randn(size)
        assert_same(compiled(batch), transform(batch))


def test_dense_features_are_sorted_by_name_together():
    """Sort by name whichever collection the features come from, and whatever their results are called there."""
    user = features.categorical_column_with_identity("user", 5)
    word = features.weighted_categorical_column(features.categorical_column_with_identity("word", 5), "w")
    transform = FeatureTransform(
        [
            features.numeric_column("z"),
            features.numeric_column("a"),
            features.embedding_column(user, 1, initializer=features.Constant(1.0)),
            *features.shared_embeddings(
                [user, features.categorical_column_with_identity("m", 5)], 2, "sum", features.Constant(2.0)
            ),
            features.embedding_column(word, 1, "sum", features.Constant(3.0)),
            features.embedding_column(features.sequence_categorical_column_with_identity("q", 5), 2),
        ]
    )
    pooled = EmbeddingBagCollection(transform.embedding_bag_configs())
    weighted = EmbeddingBagCollection(transform.weighted_embedding_bag_configs(), is_weighted=True)
    batch = {"z": [0.5], "a": [0.25], "user": [3], "m": [[1, 1]], "word": [[1]], "w": [[2.0]], "q": [[1]]}
    made = transform(batch)
    given = made, pooled(made.sparse), weighted(made.weighted)
    # a, m_shared_embedding, user_embedding, user_shared_embedding, word_weighted_by_w_embedding, z
    assert transform.dense_features(*given).tolist() == [[0.25, 4, 4, 1, 2, 2, 6, 0.5]]
    with pytest.raises(ValueError, match="dense_features: weighted must hold the result of column 'word_weighted_by_w"):
        transform.dense_features(*given[:2])
    with pytest.raises(ValueError, match="dense_features: there must be a column that is no sequence"):
        steps = FeatureTransform([features.sequence_numeric_column("q")])
        steps.dense_features(steps({"q": [[1]]}))


def test_sequences_are_compiled():
    column = features.sequence_categorical_column_with_identity("x", 9)
    transform = FeatureTransform([column, features.indicator_column(column)], drop_missing=False)
    compiled = torch.compile(transform, fullgraph=True, backend="eager")
    batch = {"x": torch.tensor([[3, 1], [8, 0]])}
    assert_same(compiled(batch), transform(batch))


def test_ids_outside_an_identity_column_get_its_default() -> None:
    column = features.categorical_column_with_identity("user", 10, default_value=3)
    transform = FeatureTransform([features.indicator_column(column)])
    dense = transform({"user": torch.tensor([0, 9, 10, 11])}).dense
    assert dense.argmax(1).tolist() == [0, 9, 3, 3]


# ---- Vocabularies ---------------------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """Notes the most elements that an operator's result has."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        sizes = [x.numel() for x in torch.utils._pytree.tree_leaves(result) if isinstance(x, torch.Tensor)]
        self.most = max([self.most, *sizes])
        return result


@pytest.mark.parametrize("numbers", [False, True])
def test_a_vocabulary_is_encoded_once(numbers, tmp_path, monkeypatch):
    """Count the words that are encoded or read for a batch: none; and no operator's result has as many elements."""
    counts = {"encoded": 0, "lines_of": 0, "integer_of": 0}

    def counted(name):
        function = getattr(_categorical, name)

        def call(x):
            counts[name] += 1
            return function(x)

        return call

    for name in counts:
        monkeypatch.setattr(_categorical, name, counted(name))
    words = [7 * k if numbers else f"w{k}" for k in range(999)]
    (tmp_path / "words").write_text("\n".join(map(str, words)))
    plain = features.categorical_column_with_vocabulary_list("a", words)
    filed = features.categorical_column_with_vocabulary_file(
        "b", tmp_path / "words", dtype="int64" if numbers else "string", num_oov_buckets=3
    )
    steps = features.sequence_categorical_column_with_vocabulary_list("c", words)
    columns = [
        features.embedding_column(plain, 2),
        features.embedding_column(features.weighted_categorical_column(filed, "w"), 2),
        features.embedding_column(features.crossed_column([plain, "b"], 50), 2),
        *features.shared_embeddings([steps, features.categorical_column_with_vocabulary_list("d", words)], 2),
    ]
    transform = FeatureTransform(columns, [plain, filed])
    assert counts["lines_of"] and bool(counts["integer_of"]) == numbers and bool(counts["encoded"]) != numbers
    before = dict(counts)
    batch = {
        "a": words[:2],
        "b": [words[5], words[9]],
        "c": [[words[4], words[2]], []],
        "d": words[8:6:-1],
        "w": [1, 2],
    }
    largest = Largest()
    with largest:
        made = [transform(batch) for _ in range(3)]
    for call in ("embedding_bag_configs", "weighted_embedding_bag_configs", "embedding_configs", "linear_bag_configs"):
        assert getattr(transform, call)()
    assert counts == before and largest.most < 100
    assert rows_of(made[2].sequence, "c") == [[4, 2], []] and rows_of(made[2].sequence, "d") == [[8], [7]]
