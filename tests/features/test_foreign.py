"""Frames and columns of every library that people have, each with a missing value: all give the same ids."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pytest
import torch
from features.cases import rows_of

from torchsparse_rec import KeyedJaggedCollate, data, features
from torchsparse_rec.data import to_record_batch, to_tensors
from torchsparse_rec.features import FeatureTransform
from torchsparse_rec.jagged.inputs import as_keyed_jagged_tensor

NAN = float("nan")
COLUMNS = {"id": [3, None, 7], "word": ["a", None, "é"], "tags": [[5, 4], [], [6]]}
TABLE = pa.table(COLUMNS)
IDS = {"id": [[3], [], [7]], "tags": [[5, 4], [], [6]]}
# Of the vocabulary that adapt() finds: of words that are equally frequent the greater is first.
WANTED = {**IDS, "word": [[1], [], [0]]}


class Handed:
    """What another library hands over by one method of Arrow's, and nothing else."""

    def __init__(self, arrow, method):
        setattr(type(self), method, lambda self, schema=None: getattr(arrow, method)(schema))


def handed(arrow, method="__arrow_c_stream__"):
    return type("Handed", (Handed,), {})(arrow, method)


class Series:
    """A column of pandas' with a dtype of numpy's."""

    def __init__(self, values, dtype):
        self.values = np.array(values, dtype)
        self.dtype = self.values.dtype

    def __array__(self):
        return self.values


class Frame:
    """A frame of pandas': no Mapping, although it is read as one is."""

    def __init__(self, **columns):
        self._columns = columns
        self.columns, self.keys = list(columns), columns.keys

    def __getitem__(self, name):
        return self._columns[name]

    def __iter__(self):
        return iter(self.columns)

    def __contains__(self, name):
        return name in self._columns


class Column(Sequence):
    """A column of ``datasets``, which is read by a slice."""

    def __init__(self, values):
        self._values = values

    def __getitem__(self, place):
        return self._values[place]

    def __len__(self):
        return len(self._values)


class Dataset:
    """A data set of ``datasets``: it hands over Arrow's tables if it is asked for them."""

    def __init__(self, table, kind=None):
        self._table, self._kind, self.num_rows = table, kind, table.num_rows

    def with_format(self, kind):
        return Dataset(self._table, kind)

    def iter(self, batch_size):
        assert self._kind == "arrow"
        return iter([self._table[:2], self._table[2:]])

    def __getitem__(self, place):
        return self._table[place] if self._kind == "arrow" else {x: self._table[x].to_pylist() for x in COLUMNS}

    def __iter__(self):
        yield from self._table.to_pylist()


def categories(words):
    """Return words as polars hands categories over: a dictionary of views."""
    coded = pa.array(words).dictionary_encode()
    return pa.DictionaryArray.from_arrays(coded.indices, coded.dictionary.cast(pa.string_view()))


def every_form():
    yield "lists", COLUMNS
    yield (
        "numpy",
        {
            "id": np.ma.masked_array([3, 9, 7], [False, True, False]),
            "word": np.array(["a", NAN, "é"], object),
            "tags": np.array([np.array([5, 4]), np.array([], np.int64), np.array([6])], object),
        },
    )
    nested = torch.nested.nested_tensor_from_jagged(torch.tensor([5, 4, 6]), torch.tensor([0, 2, 2, 3]))
    yield "torch", {"id": torch.tensor([3, -1, 7]), "word": ["a", NAN, "é"], "tags": nested}
    yield "a table", TABLE
    yield "a record batch", TABLE.to_batches()[0]
    # As polars and DuckDB hand their frames over.
    views = pa.schema({"id": pa.int64(), "word": pa.string_view(), "tags": pa.large_list(pa.int64())})
    yield "a stream of columns", handed(TABLE.cast(views))
    coded = TABLE.set_column(1, "word", TABLE["word"].dictionary_encode())
    yield "columns", handed(coded.combine_chunks().to_batches()[0], "__arrow_c_array__")
    yield "categories", TABLE.set_column(1, "word", categories(COLUMNS["word"]))
    chunks = pa.chunked_array([categories(["a"]), categories([None, "é"])])
    yield "categories in chunks", TABLE.set_column(1, "word", chunks)
    yield "a dataset", Dataset(TABLE)
    yield "its columns as series", {name: Column(values) for name, values in COLUMNS.items()}
    yield "series", {name: handed(TABLE[name]) for name in COLUMNS}
    series = Series(["a", NAN, "é"], object)
    yield "a frame", Frame(id=handed(TABLE["id"]), word=series, tags=Series([[5, 4], [], [6]], object))
    if importlib.util.find_spec("pandas"):
        import pandas as pd

        frame = pd.DataFrame(COLUMNS).astype({"id": "Int64"})
        yield from {"pandas": frame, "pandas' series": dict(frame.items())}.items()
    if importlib.util.find_spec("polars"):
        import polars as pl

        yield from {"polars": pl.DataFrame(COLUMNS), "polars' series": pl.DataFrame(COLUMNS).to_dict()}.items()
    if importlib.util.find_spec("datasets"):
        import datasets

        dataset = datasets.Dataset.from_dict(COLUMNS)
        yield from {"datasets": dataset, "datasets' series": {name: dataset[name] for name in COLUMNS}}.items()
    if importlib.util.find_spec("duckdb"):
        import duckdb

        yield "duckdb", duckdb.from_arrow(TABLE)


def adapted(batches):
    columns = [features.categorical_column_with_identity(name, 10) for name in IDS]
    return FeatureTransform([*columns, features.categorical_column_with_vocabulary_list("word")]).adapt(batches)


def check(form, batch):
    for batches in ([batch], batch):  # a batch alone is a stream of one
        transform = adapted(batches)
        for again in (batch, to_record_batch(batch)) if form not in ("numpy", "torch") else (batch,):
            made = transform(again).sparse
            assert {name: rows_of(made, name) for name in made.keys()} == WANTED, form


def test_every_form_gives_the_same_ids():
    for form, batch in every_form():
        check(form, batch)
        if form not in ("lists", "torch", "numpy", "a frame"):
            made = as_keyed_jagged_tensor(batch, ["id", "tags"])
            assert {name: rows_of(made, name) for name in IDS} == IDS, form
            if not form.endswith("series"):  # which are a dict of columns
                assert to_tensors(batch, fill={"id": 0})["tags"].values().tolist() == [5, 4, 6], form
    reader = pa.RecordBatchReader.from_batches(TABLE.schema, TABLE.to_batches())
    assert to_tensors(reader, fill={"id": 0})["id"].tolist() == [3, 0, 7]  # which can be read once
    reader = pa.RecordBatchReader.from_batches(TABLE.schema, TABLE.to_batches() * 2)
    assert adapted(reader).columns[2].vocabulary_list == ("é", "a")
    masked = np.ma.masked_array([[3, 9], [9, 9], [7, 8]], [[False, True], [True, True], [False, False]])
    parts = (np.array([5, 4, 6]), np.array([0, 2, 2, 3]))
    made = as_keyed_jagged_tensor({"id": masked, "tags": parts, "row": np.array([1, 2, 4], ">i4")})
    assert [rows_of(made, x) for x in ("id", "tags", "row")] == [[[3], [], [7, 8]], IDS["tags"], [[1], [2], [4]]]
    examples = [{"x": x} for x in (handed(pa.chunked_array([[3, None]])), [None, 7], None, pa.array([5]))]
    assert rows_of(KeyedJaggedCollate(["x"])(examples)["features"], "x") == [[3], [7], [], [5]]


@pytest.mark.tensorflow
def test_every_form_of_tensorflow(tensorflow):
    tf = tensorflow
    words = {"id": tf.constant([3, -1, 7]), "word": tf.constant(["a", "", "é"])}
    ragged = {name: tf.ragged.constant([[x] if x else [] for x in COLUMNS[name]]) for name in words}
    tags = tf.ragged.constant(COLUMNS["tags"])
    check("tensors", {**words, "tags": tags})
    check("ragged tensors", {**ragged, "tags": tags})
    check("sparse tensors", {name: x.to_sparse() for name, x in {**ragged, "tags": tags}.items()})
    for form in (ragged["id"], ragged["id"].to_sparse()):
        made = as_keyed_jagged_tensor({"id": form, "row": tf.constant([[1, 2], [3, 4], [5, 6]])})
        assert rows_of(made, "id") == IDS["id"] and rows_of(made, "row") == [[1, 2], [3, 4], [5, 6]]
    batch = KeyedJaggedCollate(["x"])([{"x": tf.constant(3)}, {"x": tf.constant([4, 5])}])
    assert rows_of(batch["features"], "x") == [[3], [4, 5]]


def test_nan_is_missing_among_strings_and_a_number_among_numbers():
    """Read NaN of a frame as that of a Parquet file: a number, that stays."""
    number = FeatureTransform([features.numeric_column("x", default_value=9.0)])
    for x in (Series([1.0, NAN], float), pa.array([1.0, NAN]), [1.0, NAN], Series([1.0, NAN], object)):
        for batch in ({"x": x}, Frame(x=x)):
            assert number(batch).dense.isnan().tolist() == [[False], [True]]
            assert to_record_batch(batch)["x"].null_count == 0
    # A frame without any string has NaN alone, as numbers.
    word = features.categorical_column_with_vocabulary_list("x", ["a"])
    columns = [word, features.crossed_column(["x", "y"], 5)]
    made = FeatureTransform(columns)({"x": Series([NAN, NAN], float), "y": ["u", "v"]}).sparse
    assert made.lengths().tolist() == [0] * 4
    with pytest.raises(ValueError, match="adapt.* must see a word, got none"):
        FeatureTransform([features.categorical_column_with_vocabulary_list("x")]).adapt([{"x": [NAN, None]}])


def test_marks_and_objects_of_frames():
    """Read pandas' NA among strings and numbers of lists, and objects of NumPy's as ids."""
    mark = type("NAType", (), {"__module__": "pandas._libs.missing"})()
    words = FeatureTransform([features.categorical_column_with_vocabulary_list("x", ["a", "é"])])
    assert rows_of(words({"x": ["a", mark, "é"]}).sparse, "x") == [[0], [], [1]]
    number = FeatureTransform([features.numeric_column("x", default_value=9.0)])
    assert number({"x": [1.5, mark]}).dense.tolist() == [[1.5], [9.0]]
    rows = np.array([np.array([3, 1]), None], object)
    for x, wanted in ((np.array([3, None], object), [[3], []]), (rows, [[3, 1], []])):
        assert rows_of(as_keyed_jagged_tensor({"x": x}), "x") == wanted


def test_integers_that_became_floats_are_told_the_way_out():
    identity = FeatureTransform([features.categorical_column_with_identity("x", 10)])
    way_out = (
        r"float64: pandas makes floats of integers beside missing ones, and astype\('Int64'\) keeps them integers$"
    )
    for x in (Series([3, NAN], float), np.array([3, NAN]), pa.array([3, NAN])):
        with pytest.raises(ValueError, match=r"column 'x': must hold integers, got floats, torch." + way_out):
            identity({"x": x})
        with pytest.raises(TypeError, match=r"input\['x'\]: must hold integers, the ids, got (torch.)?" + way_out):
            as_keyed_jagged_tensor({"x": x})
    with pytest.raises(ValueError, match="got floats, torch.float64$"):
        identity({"x": [1.5]})


def test_categories_of_views_are_written(tmp_path):
    batch = to_record_batch({"x": categories(["a", None, "é"]), "n": [1, 2, 3]})
    for kind in ("parquet", "csv", "tfrecord", "prebatched"):
        path = tmp_path / f"x.{kind}"
        getattr(data, f"write_{kind}")(path, [batch])
        words = next(iter(getattr(data, f"read_{kind}")(path))).column("x").to_pylist()
        assert [x.decode() if isinstance(x, bytes) else x for x in words] == ["a", None, "é"], kind


def test_what_is_no_batch_says_so():
    identity = FeatureTransform([features.categorical_column_with_identity("x", 10)])
    twice = pa.table([pa.array([1]), pa.array([2])], names=["x", "x"])
    for read in (identity, to_record_batch, as_keyed_jagged_tensor):
        with pytest.raises(ValueError, match="distinct names, got 'x' twice"):
            read(twice)
        with pytest.raises(ValueError, match="Handed cannot be read as columns"):
            read(handed(pa.chunked_array([[1]])))
    with pytest.raises(ValueError, match="column 'x': must hold str or bytes that can be encoded, got 5 at position 2"):
        identity({"x": ["a", NAN, 5]})
    with pytest.raises(TypeError, match=r"input\['x'\]: must hold integers, the ids, got torch.float64"):
        as_keyed_jagged_tensor({"x": pa.array([1.5])})
    with pytest.raises(TypeError, match=r"input\['x'\]: must hold integers, the ids, got strings"):
        as_keyed_jagged_tensor({"x": pa.array(["a"])})
