"""Missing values in a batch: in columns made by one call, in all examples, and in batches without examples."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from features.cases import HASHED, HASHED_INTEGERS, IDENTITY, WORDS, ids_of, operators_of, rows_of

from torchsparse_rec import features
from torchsparse_rec.features import FeatureTransform

# ---- Several columns in one call ------------------------------------------------------------------------------------


def _columns(kind, count):
    if kind == "hash":
        return [features.categorical_column_with_hash_bucket(f"c{k}", 50, "int64") for k in range(count)]
    default = 3 if kind == "default" else None
    return [features.categorical_column_with_identity(f"c{k}", 50, default) for k in range(count)]


@pytest.mark.parametrize("kind", ["hash", "identity", "default"])
def test_a_null_in_one_column_leaves_the_others_in_one_call(kind):
    pa = pytest.importorskip("pyarrow")
    columns = _columns(kind, 3)
    batch = {"c0": pa.array([1, None, 3]), "c1": torch.tensor([[4, 5], [-1, 7], [8, 9]]), "c2": [7, None, -1]}
    transform = FeatureTransform(columns)
    assert operators_of(lambda: transform(batch)) == ["column_ids"]
    made = transform(batch).sparse
    for column in columns:
        assert rows_of(made, column.name) == ids_of(column, batch[column.name])
    assert [len(row) for row in rows_of(made, "c0")] == [1, 0, 1]
    assert [len(row) for row in rows_of(made, "c1")] == [2, 1, 2]
    assert [len(row) for row in rows_of(made, "c2")] == [1, 0, 0]


@pytest.mark.parametrize("kind", ["hash", "identity", "default"])
def test_rows_of_any_length_and_fixed_forms_in_one_call(kind):
    """Take -1 as a mark in fixed shapes and not in rows, also if one call makes the ids of both."""
    columns = _columns(kind, 3)
    batch = {"c0": torch.tensor([-1, 4]), "c1": [[-1, 5], []], "c2": [[None, -1], [6]]}
    made = FeatureTransform(columns)(batch).sparse
    for column in columns:
        assert rows_of(made, column.name) == ids_of(column, batch[column.name])
    assert [len(row) for row in rows_of(made, "c1")] == [1 if kind == "identity" else 2, 0]
    assert [len(row) for row in rows_of(made, "c2")] == [0 if kind == "identity" else 1, 1]


def test_only_pieces_with_something_missing_are_compacted(monkeypatch):
    from torchsparse_rec.features import _ids

    calls = []
    real = _ids._kept
    monkeypatch.setattr(_ids, "_kept", lambda values, *rest: calls.append(len(values)) or real(values, *rest))
    columns = [*_columns("identity", 2), WORDS, features.categorical_column_with_identity("rows", 9, 8)]
    batch = {"c0": torch.arange(4), "c1": torch.arange(4), "x": ["a", "", "z", "c"], "rows": [[1, 2], [], [3], [-4]]}
    made = FeatureTransform(columns)(batch).sparse
    assert calls == [4]
    assert rows_of(made, "c0") == rows_of(made, "c1") == [[0], [1], [2], [3]]
    assert rows_of(made, "x") == [[0], [], [], [2]] and rows_of(made, "rows") == [[1, 2], [], [3], [8]]
    assert made.offsets().tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 9, 10, 12, 12, 13, 14]


def test_threads_share_a_transform():
    """Give each batch the offsets of its size, whatever another thread stores between two statements."""
    transform = FeatureTransform(_columns("identity", 2))
    assembler = transform._assemblers["sparse"]
    small = {"c0": torch.arange(2), "c1": torch.arange(2)}
    transform(small)

    class Unsteady(type(assembler)):
        """An assembler that gives at each read what another thread has just stored."""

        reads = 0

        @property
        def _known(self):
            Unsteady.reads += 1
            mine = ((2, (1, 1), torch.device("cpu")), torch.arange(5))
            return mine if Unsteady.reads % 2 else ((3, (1, 1), torch.device("cpu")), torch.arange(7))

        @_known.setter
        def _known(self, value):
            pass

    assembler.__dict__.pop("_known")
    assembler.__class__ = Unsteady
    assert transform(small).sparse.offsets().tolist() == [0, 1, 2, 3, 4]


# ---- Empty and all missing ------------------------------------------------------------------------------------------


def _every_column():
    number = features.numeric_column("n", default_value=2.0)
    weighted = features.weighted_categorical_column(IDENTITY, "w")
    return [
        (features.numeric_column("x"), torch.zeros(0)),
        (features.numeric_column("x", normalizer_fn=features.Log()), torch.zeros(0)),
        (features.numeric_column("x", shape=2, normalizer_fn=lambda x: x + 1), torch.zeros(0, 2)),
        (features.numeric_column("x", shape=2), []),
        (features.numeric_column("x", shape=(2, 2), normalizer_fn=features.Log()), np.zeros((0, 4))),
        (features.bucketized_column(features.numeric_column("x"), [1.0]), torch.zeros(0)),
        (features.bucketized_column(features.numeric_column("x", shape=2), [1.0]), torch.zeros(0, 2)),
        (features.indicator_column(IDENTITY), torch.zeros(0, 2, dtype=torch.int64)),
        (IDENTITY, torch.zeros(0, dtype=torch.int64)),
        (HASHED, np.array([], object)),
        (HASHED_INTEGERS, []),
        (WORDS, []),
        (features.crossed_column(["x", IDENTITY], 9), torch.zeros(0, dtype=torch.int64)),
        (features.crossed_column(["x", HASHED.key + "2"], 9), []),
        (features.sequence_numeric_column("x", shape=2), (torch.zeros(0), torch.tensor([0]))),
        (features.sequence_numeric_column("x", normalizer_fn=features.Log()), []),
        (features.sequence_categorical_column_with_hash_bucket("x", 9), []),
        (weighted, []),
        (features.embedding_column(weighted, 2), torch.zeros(0, 3, dtype=torch.int64)),
        (features.bucketized_column(number, [1.0]), []),
    ]


@pytest.mark.parametrize(("column", "values"), _every_column(), ids=lambda x: getattr(x, "name", ""))
def test_no_examples_at_all(column, values):
    weights = values.float() if isinstance(values, torch.Tensor) else []
    made = FeatureTransform([column])({"x": values, "x2": [], "n": [], "w": weights})
    if made.dense is not None:
        assert made.dense.shape == (0, column.width) and made.dense.dtype == torch.float32
    for ids in (made.sparse, made.weighted, made.sequence):
        if ids is not None:
            assert ids.values().shape == (0,) and ids.values().dtype == torch.int64 and ids.stride() == 0
            assert ids.offsets().tolist() == [0]
    if made.sequence_dense is not None:
        assert made.sequence_dense["x"].lengths().shape == (0,)


def _nulls():
    pa = pytest.importorskip("pyarrow")
    kinds = [pa.null(), pa.string(), pa.float32(), pa.float16(), pa.bool_(), pa.int8(), pa.uint64(), pa.large_binary()]
    return [pa.nulls(3, kind) for kind in kinds] + [pa.array([[], None, [None]], pa.list_(kind)) for kind in kinds]


def test_nulls_of_every_type_in_every_column():
    """Accept nulls of every type: a column without any value has no type either."""
    number = features.numeric_column("x", default_value=2.0)
    columns = [IDENTITY, HASHED, HASHED_INTEGERS, WORDS]
    columns += [features.categorical_column_with_vocabulary_list("x", [1, 2], num_oov_buckets=3)]
    columns += [features.crossed_column(["x", "y"], 9), features.crossed_column([IDENTITY, "y"], 9)]
    columns += [features.categorical_column_with_identity("x", 10, default_value=1)]
    for values in _nulls():
        for column in columns:
            made = FeatureTransform([column])({"x": values, "y": ["a", "b", "c"]}).sparse
            assert rows_of(made, column.name) == [[], [], []], (column, values.type)
            assert made.values().dtype == torch.int64
        assert FeatureTransform([features.indicator_column(WORDS)])({"x": values}).dense.tolist() == [[0.0] * 3] * 3
        weighted = features.weighted_categorical_column(features.categorical_column_with_identity("y", 10), "x")
        if str(values.type).startswith("list"):
            steps = FeatureTransform([features.sequence_numeric_column("x")])({"x": values}).sequence_dense["x"]
            assert steps.values().shape == (0, 1) and steps.values().dtype == torch.float32
        else:
            assert FeatureTransform([number])({"x": values}).dense.tolist() == [[2.0]] * 3
            made = FeatureTransform([weighted])({"x": values, "y": [1, 2, 3]}).weighted
            assert made.weights().tolist() == [0.0] * 3 and made.weights().dtype == torch.float32
    merged = [features.categorical_column_with_hash_bucket(key, 9, "int64") for key in "xy"]
    for values in _nulls()[:8]:
        made = FeatureTransform(merged)({"x": values, "y": [1, 2, 3]}).sparse
        assert made.lengths().tolist() == [0, 0, 0, 1, 1, 1] and made.values().dtype == torch.int64
