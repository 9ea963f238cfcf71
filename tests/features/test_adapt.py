"""``FeatureTransform.adapt``: vocabularies, boundaries, means and variances, and their state."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from features.cases import assert_same, rows_of
from kinds import saved

from torchsparse_rec import features
from torchsparse_rec.features import FeatureTransform

vocabulary = features.categorical_column_with_vocabulary_list


def adaptable() -> FeatureTransform:
    word = vocabulary("word", num_oov_buckets=1, max_tokens=3)
    number = vocabulary("number", dtype="int64")
    return FeatureTransform(
        [
            features.embedding_column(word, 2),
            features.indicator_column(number),
            features.bucketized_column(features.numeric_column("x"), num_bins=4),
            features.numeric_column("y", shape=2, normalizer_fn=features.Standardize()),
        ],
        linear_columns=[features.crossed_column([number, "city"], 10)],
    )


def stream():
    for k in range(3):
        yield {
            "word": ["b", "a", "c", "", None] if k else ["a", "b", "zé", "d", "a"],
            "number": torch.tensor([5, 5, -1, 2**40, 7]),
            "x": torch.arange(5.0) + 5 * k,
            "y": torch.tensor([[1.0, float("nan")]] * 4 + [[k, 2.0]]),
            "city": ["c"] * 5,
        }


def test_adapt_finds_what_is_missing():
    transform = adaptable()
    with pytest.raises(ValueError, match="adapt\\(\\) must find what column 'x_bucketized' needs"):
        transform(next(stream()))
    with pytest.raises(ValueError, match="column 'word': vocabulary_list must be given, or found by adapt"):
        transform.embedding_bag_configs()
    assert transform.adapt(stream()) is transform
    assert transform.columns[0].categorical_column.vocabulary_list == ("a", "b", "c")
    assert transform.columns[1].categorical_column.vocabulary_list == (5, 2**40, 7)
    assert transform.linear_columns[0].keys[0].vocabulary_list == (5, 2**40, 7)
    assert transform.columns[2].boundaries == pytest.approx((2.75, 6.5, 10.25))
    y = np.array([[1.0] * 4 + [k] for k in range(3)]).reshape(-1)
    normalizer = transform.columns[3].normalizer_fn
    assert normalizer.mean == pytest.approx((y.mean(), 2.0)) and normalizer.variance == pytest.approx((y.var(), 0.0))
    assert transform.embedding_bag_configs()[0].num_embeddings == 4
    assert rows_of(transform(next(stream())).sparse, "word") == [[0], [1], [3], [3], [0]]


def test_what_adapt_found_is_state():
    transform = adaptable().adapt(stream())
    batch = next(stream())
    expected = transform(batch)
    fresh = adaptable()
    fresh.load_state_dict(saved(transform.state_dict(), weights_only=True))
    assert fresh.columns == transform.columns
    batch["y"] = torch.ones(5, 2)
    assert_same(fresh(batch), transform(batch))
    assert expected.sparse.keys() == fresh(batch).sparse.keys()
    again = FeatureTransform.from_config(json.loads(json.dumps(transform.to_config())))
    assert again.columns == transform.columns
    with pytest.raises(ValueError, match="a state must be of the columns that adapt"):
        FeatureTransform([features.numeric_column("y")]).load_state_dict(transform.state_dict())


def test_adapting_again_changes_nothing():
    transform = adaptable().adapt(stream())
    columns = transform.columns
    assert transform.adapt([]).columns == columns


def test_words_that_are_no_text_are_found_and_written():
    transform = FeatureTransform([vocabulary("x")])
    transform.adapt([{"x": [b"\xff", b"a\x00", b"a\x00"]}])
    assert rows_of(transform({"x": [b"\xff", b"a", b"a\x00"]}).sparse, "x") == [[1], [], [0]]
    twin = FeatureTransform.from_config(json.loads(json.dumps(transform.to_config())))
    assert rows_of(twin({"x": [b"\xff"]}).sparse, "x") == [[1]]


@pytest.mark.parametrize(
    ("column", "batches", "message"),
    [
        (vocabulary("x"), [], "batches must hold a batch, got none"),
        (vocabulary("x"), [{"x": ["", ""]}], "column 'x': adapt.* must see a word"),
        (vocabulary("x"), [{"x": [1]}], "column 'x': must hold strings, got integers"),
        (vocabulary("x"), [{"x": ["a", "b", "c"]}], "at most max_distinct=2"),
        (vocabulary("x"), [{"y": [1]}], "none named 'x'"),
        (features.numeric_column("x", normalizer_fn=features.Standardize()), [{"x": [float("nan")]}], "see a number"),
        (
            features.numeric_column("x", normalizer_fn=features.Standardize()),
            [{"x": [1.0, float("-inf")]}],
            "column 'x': adapt.* must see finite numbers, got -inf at position 0 of row 1",
        ),
        (features.bucketized_column(features.numeric_column("x"), num_bins=3), [{"x": [1.0]}], "enough numbers"),
    ],
)
def test_adapt_refuses(column, batches, message):
    with pytest.raises(ValueError, match=message):
        FeatureTransform([column]).adapt(batches, max_distinct=2)


def test_adapt_refuses_two_passes():
    number = features.numeric_column("x", normalizer_fn=features.Standardize())
    with pytest.raises(ValueError, match="cannot be found in one pass"):
        FeatureTransform([features.bucketized_column(number, num_bins=3)]).adapt([{"x": [1.0]}])


def test_adapt_refuses_several_dimensions_before_it_reads():
    column = features.numeric_column("x", (2, 2), normalizer_fn=features.Standardize())
    with pytest.raises(
        ValueError, match=r"shape must have one dimension to be standardized by adapt\(\), got \(2, 2\)"
    ):
        FeatureTransform([column]).adapt(iter([]))


def test_marks_are_words_where_they_are_not_missing():
    column = vocabulary("x", dtype="int64")
    batch = {"x": torch.tensor([-1, -1, 3])}
    transform = FeatureTransform([column], drop_missing=False).adapt([batch])
    assert transform.columns[0].vocabulary_list == (-1, 3)
    assert rows_of(transform(batch).sparse, "x") == [[0], [0], [1]]
    assert FeatureTransform([column]).adapt([batch]).columns[0].vocabulary_list == (3,)


@pytest.mark.parametrize("config", [{}, {"columns": []}, None])
def test_what_is_no_configuration_is_named(config):
    with pytest.raises(ValueError, match="config must be a dict with columns and linear_columns, got "):
        FeatureTransform.from_config(config)
    with pytest.raises(ValueError, match="a state must be a dict with what adapt.* found, got "):
        adaptable().set_extra_state(config)


@pytest.mark.parametrize("how", ["number", "no column", "no list", "unknown", "value"])
def test_a_state_that_is_none_changes_nothing(how):
    transform = adaptable().adapt(stream())
    columns, state = [*transform.columns], transform.get_extra_state()
    first = state["adapted"][0]
    its = {
        "number": 3,
        "no column": [{k: x for k, x in first.items() if k != "column"}],
        "no list": [3],
        "unknown": [{**first, "more": 1}, *state["adapted"][1:]],
        "value": [{k: (x if k == "column" else {}) for k, x in first.items()}, *state["adapted"][1:]],
    }[how]
    with pytest.raises(ValueError):
        transform.set_extra_state({"adapted": its})
    assert transform.columns == columns


def test_adapt_looks_through_compose():
    """Find mean and variance of what the normalizers before return: NaN that is filled counts, a null never does."""
    chain = features.Compose(features.FillNaN(0), features.Compose(features.Log(), features.Standardize()))
    own = features.Compose(lambda x: x * 2, features.Standardize(), features.Clip(-1, 1))
    bare = features.numeric_column("bare", normalizer_fn=features.Standardize())
    filled = features.numeric_column("filled", normalizer_fn=features.FillNaN(-5))

    def fresh(*more):
        columns = [features.numeric_column(name, normalizer_fn=x) for name, x in (("chain", chain), ("own", own))]
        return FeatureTransform([*columns, bare, features.bucketized_column(filled, num_bins=2), *more])

    x = [float("nan"), 0.0, 3.0, 3.0]
    batch = {"chain": x, "own": [1.0, 2.0, 3.0, 4.0], "bare": x, "filled": x}
    transform = fresh().adapt([batch, {**batch, "chain": [None, None, 0.0, 3.0]}])
    logs = np.log1p(np.array([0, 0, 3, 3, 0, 3], np.float32))
    (standardize,) = (part for part in transform.columns[0].normalizer_fn.normalizers[1].normalizers[1:])
    assert standardize.mean == pytest.approx([logs.mean()]) and standardize.variance == pytest.approx([logs.var()])
    assert transform.columns[1].normalizer_fn.normalizers[1] == features.Standardize((5.0,), (5.0,))
    assert transform.columns[2].normalizer_fn == features.Standardize((2.0,), (2.0,))
    assert transform.columns[3].boundaries == fresh().adapt([{**batch, "filled": [-5.0, *x[1:]]}]).columns[3].boundaries
    dense = transform(batch)
    again = fresh()
    again.load_state_dict(saved(transform.state_dict(), weights_only=True))
    assert again.columns[0] == transform.columns[0]
    assert torch.allclose(again(batch).dense, dense.dense, equal_nan=True)
    config = json.loads(json.dumps(transform.columns[0].to_config()))
    assert features.column_from_config(config) == transform.columns[0]
    state = transform.get_extra_state()
    state["adapted"][0]["standardizers"] = []
    with pytest.raises(ValueError, match="a state must have 1 means of column 'chain', got 0"):
        fresh().set_extra_state(state)
    # Of a Compose that was complete, states had nothing before.
    state["adapted"] = transform.get_extra_state()["adapted"][2:]
    transform.set_extra_state(state)
    with pytest.raises(ValueError, match="a state must be of the columns that adapt"):
        fresh().set_extra_state(state)


def test_normalizers_of_nan():
    x = torch.tensor([float("nan"), 5.0, float("inf")], dtype=torch.float64)
    assert features.FillNaN(1)(x).tolist() == [1.0, 5.0, float("inf")] and x[0].isnan()
    assert features.FillNaN(1)(torch.tensor([7])).tolist() == [7]
    clip, log = features.Clip(0), features.Log()
    assert features.Compose(clip, log) == features.Compose((clip, log)) == features.Compose(normalizers=[clip, log])
    for wrong in (float("nan"), None, "0"):
        with pytest.raises(ValueError, match=f"FillNaN: value must be a number, got {wrong!r}"):
            features.FillNaN(wrong)
