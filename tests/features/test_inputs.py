"""Every form in which a batch may hold a raw feature, and how each marks missing values."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from features.cases import HASHED, HASHED_INTEGERS, IDENTITY, WORDS, ids_of, operators_of, rows_of

from torchsparse_rec import JaggedTensor, features, ops
from torchsparse_rec.features import FeatureTransform

# ---- Forms of input -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "values",
    [
        torch.tensor([3, -1, 7]),
        torch.tensor([3, -1, 7], dtype=torch.int8),
        torch.tensor([[3], [-1], [7]]),
        torch.tensor([0, 3, 0, -1, 0, 7])[1::2],
        np.array([3, -1, 7]),
        np.array([3, -1, 7], ">i4"),
        [3, -1, 7],
        [3, None, 7],
        [[3], [], [7]],
        [[3], None, [7]],
        [np.array([3]), np.array([], np.int64), np.array([7])],
        ([3, 7], torch.tensor([0, 1, 1, 2])),
        (np.array([3, 7]), np.array([0, 1, 1, 2], np.int32)),
        (np.array([3, 7]), np.array([0, 1, 1, 2], ">i8")),
        (np.array([3, 7]), np.frombuffer(np.array([0, 1, 1, 2]).tobytes(), np.int64)),  # read-only
        JaggedTensor(torch.tensor([3, 7]), lengths=torch.tensor([1, 0, 1])),
        torch.nested.nested_tensor_from_jagged(torch.tensor([3, 7]), torch.tensor([0, 1, 1, 2])),
    ],
    ids=lambda x: type(x).__name__,
)
def test_integers_in_every_form(values):
    assert ids_of(IDENTITY, values) == [[3], [], [7]]


def test_integers_of_pyarrow():
    pa = pytest.importorskip("pyarrow")
    for array in (
        pa.array([3, None, 7]),
        pa.array([9, 3, -1, 7], pa.int32())[1:],
        pa.chunked_array([[3], [None, 7]]),
        pa.array([3, None, 7]).dictionary_encode(),
        pa.array([[3], [], [7]]),
        pa.array([[3], None, [7, None]], pa.large_list(pa.int64())),
        pa.array([[1, 2], [3, None], None, [7, -1]], pa.list_(pa.int64(), 2))[1:],
        pa.array([[8], [3], [], [7]])[1:],
    ):
        assert ids_of(IDENTITY, array) == [[3], [], [7]], array.type
    batch = pa.RecordBatch.from_pydict({"x": [3, 4], "y": [0.5, None]})
    transform = FeatureTransform([IDENTITY, features.numeric_column("y", default_value=9.0)])
    for form in (batch, pa.table(batch), {"x": batch["x"], "y": batch["y"]}):
        assert transform(form).dense.tolist() == [[0.5], [9.0]]
        assert rows_of(transform(form).sparse, "x") == [[3], [4]]
    assert ids_of(IDENTITY, pa.nulls(2)) == [[], []]
    assert ids_of(HASHED, pa.nulls(2)) == [[], []]
    assert ids_of(WORDS, pa.nulls(2)) == [[], []]


STRINGS = ["green", "", "réd"]


@pytest.mark.parametrize(
    "values",
    [
        STRINGS,
        [x.encode() for x in STRINGS],
        ["green", None, "réd"],
        np.array(STRINGS),
        np.array(STRINGS, object),
        np.array([x.encode() for x in STRINGS]),
        [["green"], [], ["réd"]],
        (["green", "réd"], torch.tensor([0, 1, 1, 2])),
    ],
    ids=lambda x: type(x).__name__,
)
def test_strings_in_every_form(values):
    hashes = ops.to_hash_bucket_fast(["green", "réd"], 1000).tolist()
    assert ids_of(HASHED, values) == [[hashes[0]], [], [hashes[1]]]


def test_strings_of_pyarrow():
    pa = pytest.importorskip("pyarrow")
    hashes = ops.to_hash_bucket_fast(["green", "réd"], 1000).tolist()
    kinds = [pa.string(), pa.large_string(), pa.binary(), pa.large_binary(), pa.dictionary(pa.int8(), pa.string())]
    if hasattr(pa, "string_view"):
        kinds += [pa.string_view(), pa.binary_view()]
    for kind in kinds:
        array = pa.array(["skipped", *STRINGS, None]).cast(kind)[1:]
        assert ids_of(HASHED, array) == [[hashes[0]], [], [hashes[1]], []], kind
    lists = pa.array([["green", None], None, ["réd"]])
    assert ids_of(HASHED, lists) == [[hashes[0]], [], [hashes[1]]]
    assert ids_of(HASHED, pa.array([b"abc", b"abd"], pa.binary(3))) == [
        [x] for x in ops.to_hash_bucket_fast(["abc", "abd"], 1000).tolist()
    ]


def test_results_do_not_lie_in_the_memory_of_the_batch():
    x, y = torch.tensor([3, 4]), torch.tensor([1.0, 2.0])
    transform = FeatureTransform([IDENTITY, features.numeric_column("y")])
    made = transform({"x": x, "y": y})
    made.sparse.values().zero_()
    made.dense.zero_()
    assert x.tolist() == [3, 4] and y.tolist() == [1.0, 2.0]


# ---- Missing values -------------------------------------------------------------------------------------------------


def test_marks_are_missing_in_fixed_forms_and_values_in_rows():
    minus_one, empty = ops.to_hash_bucket_fast(["-1", ""], 1000).tolist()
    assert ids_of(HASHED_INTEGERS, [[-1], [-1]]) == [[minus_one], [minus_one]]
    assert ids_of(HASHED_INTEGERS, torch.tensor([[-1, 5], [-1, -1]]))[1] == []
    assert ids_of(HASHED, [[""], []]) == [[empty], []]
    # -1 cannot mark a missing value among unsigned integers.
    assert ids_of(HASHED_INTEGERS, torch.tensor([255], dtype=torch.uint8)) == [
        ops.to_hash_bucket_fast(["255"], 1000).tolist()
    ]


def test_integers_of_several_columns_are_read_by_one_operator():
    """Call one operator for all hashed and identity columns, and another for those that share a default."""
    columns = [features.categorical_column_with_hash_bucket(f"c{k}", 50, "int64") for k in range(4)]
    columns.append(features.categorical_column_with_hash_bucket("other", 51, "int64"))
    columns.append(features.categorical_column_with_identity("id", 100))
    columns += [features.categorical_column_with_identity(f"d{k}", 100, 7) for k in range(2)]
    batch = {f"c{k}": torch.arange(6).reshape(3, 2) + k for k in range(3)} | {"c3": torch.tensor([-1, 4, 5])}
    batch |= {key: torch.tensor([1, -2, 300]) for key in ("other", "id", "d0", "d1")}
    transform = FeatureTransform(columns)
    assert operators_of(lambda: transform(batch)) == ["column_ids"] * 2
    made = transform(batch).sparse
    for k in range(3):
        assert made[f"c{k}"].values().tolist() == ops.to_hash_bucket_fast(batch[f"c{k}"].reshape(-1), 50).tolist()
    four, five = ops.to_hash_bucket_fast(torch.tensor([[4], [5]]), 50).tolist()
    assert rows_of(made, "c3") == [[], four, five]
    assert made["other"].values().tolist() == ops.to_hash_bucket_fast(batch["other"], 51).tolist()
    assert rows_of(made, "id") == [[1], [], [300]] and made["d0"].values().tolist() == [1, 7, 7]


@pytest.mark.parametrize("dtypes", [("int32", "int64"), ("uint8", "int64"), ("int8", "int16"), ("uint64", "int64")])
def test_columns_of_different_dtypes(dtypes):
    columns = [features.categorical_column_with_hash_bucket(key, 50, "int64") for key in "ab"]
    columns += [features.categorical_column_with_identity(key, 2**40) for key in "cd"]
    a, b = (torch.tensor([5, 100], dtype=getattr(torch, dtype)) for dtype in dtypes)
    made = FeatureTransform(columns)({"a": a, "b": b, "c": a, "d": b}).sparse
    expected = ops.to_hash_bucket_fast(["5", "100"], 50).tolist()
    assert made["a"].values().tolist() == made["b"].values().tolist() == expected
    assert made["c"].values().tolist() == made["d"].values().tolist() == [5, 100]
    assert made.values().dtype == torch.int64


def test_without_a_look_at_missing_values():
    columns = [IDENTITY, features.categorical_column_with_hash_bucket("y", 10, "int64")]
    batch = {"x": torch.tensor([-1, 3]), "y": torch.tensor([-1, 3])}
    made = FeatureTransform(columns, drop_missing=False)(batch).sparse
    assert made["x"].values().tolist() == [-1, 3]
    assert made["y"].values().tolist() == ops.to_hash_bucket_fast(["-1", "3"], 10).tolist()
    # Unknown words have no id, whatever the options.
    assert rows_of(FeatureTransform([WORDS], drop_missing=False)({"x": ["z", "a"]}).sparse, "x") == [[], [0]]


def test_no_examples():
    columns = [features.numeric_column("n"), features.indicator_column(WORDS)]
    transform = FeatureTransform([features.embedding_column(IDENTITY, 2), *columns])
    made = transform({"x": [], "n": []})
    assert made.dense.shape == (0, 4) and made.sparse.values().shape == (0,)


# ---- Numbers of several dimensions ----------------------------------------------------------------------------------


def test_numbers_in_rows_of_one_length():
    pa = pytest.importorskip("pyarrow")
    rows = [[1.0, 2.0], [3.0, 4.0]]
    column = features.numeric_column("x", shape=2)
    forms = [rows, [np.array(row) for row in rows], pa.array(rows), pa.array(rows, pa.large_list(pa.float32()))]
    forms += [pa.array([[9.0], *rows])[1:], (torch.tensor(rows).flatten(), torch.tensor([0, 2, 4]))]
    forms += [JaggedTensor(torch.tensor(rows).flatten(), lengths=torch.tensor([2, 2]))]
    for form in forms:
        assert FeatureTransform([column])({"x": form}).dense.tolist() == rows
    with pytest.raises(ValueError, match="must hold 2 numbers per example, got 1 in example 0"):
        FeatureTransform([column])({"x": [[1.0], [2.0, 3.0, 4.0]]})
    filled = features.numeric_column("x", shape=2, default_value=[5.0, 6.0])
    assert FeatureTransform([filled])({"x": pa.array([[None, 2.0], [3.0, None]])}).dense.tolist() == [[5, 2], [3, 6]]


def test_numbers_in_tensors_of_the_columns_shape():
    numbers = torch.arange(8.0).reshape(2, 2, 2)
    seen = []
    column = features.numeric_column("x", shape=(2, 2), normalizer_fn=lambda x: seen.append(x.shape) or x)
    for form in (numbers, numbers.numpy(), numbers.reshape(2, 4)):
        assert torch.equal(FeatureTransform([column])({"x": form}).dense, numbers.reshape(2, 4))
    assert seen == [(2, 2, 2)] * 3


# ---- Slices ---------------------------------------------------------------------------------------------------------


def test_a_slice_of_strings_brings_its_own_bytes_alone():
    pa = pytest.importorskip("pyarrow")
    from torchsparse_rec.features.inputs import read_raw

    array = pa.array(["skipped" * 100, "ab", None, "c", "behind" * 100])[1:4]
    for kind in (pa.string(), pa.large_string(), pa.binary(), pa.large_binary()):
        strings = read_raw(array.cast(kind), "x").values
        assert bytes(strings.bytes.tolist()) == b"abc" and strings.offsets.tolist() == [0, 2, 2, 3]


# ---- Large numbers --------------------------------------------------------------------------------------------------


def test_unsigned_numbers_beyond_int64_are_hashed_as_they_are():
    large = torch.tensor([2**63 + 5, 7], dtype=torch.uint64)
    assert ids_of(HASHED_INTEGERS, large) == [
        [x] for x in ops.to_hash_bucket_fast([str(2**63 + 5), "7"], 1000).tolist()
    ]


@pytest.mark.parametrize("id", [2**63, 2**64 - 1])
def test_unsigned_ids_beyond_int64_are_errors(id):
    """Name column, value and place, where wrapped the id would be negative, and another word of a vocabulary."""
    x = torch.tensor([7, id], dtype=torch.uint64)
    words = features.categorical_column_with_vocabulary_list("x", [7, id - 2**64], num_oov_buckets=9)
    together = [IDENTITY, features.categorical_column_with_identity("y", 100)]
    replaced = features.categorical_column_with_identity("x", 100, default_value=3)
    message = rf"column 'x': ids must be below 2\*\*63, got {id} at 1: view\(torch.int64\)"
    for columns in ([IDENTITY], together, [replaced], [words], [features.crossed_column(["y", words], 9)]):
        with pytest.raises(ValueError, match=message):
            FeatureTransform(columns)({"x": x, "y": torch.tensor([7, 8])})
    with pytest.raises(ValueError, match=message):
        FeatureTransform([features.categorical_column_with_vocabulary_list("x", dtype="int64")]).adapt([{"x": x}])
    assert ids_of(words, x[:1]) == [[0]] and ids_of(IDENTITY, x[:1]) == [[7]]
    assert FeatureTransform([IDENTITY], drop_missing=False).to("meta")({"x": x}).sparse.values().shape == (2,)
    # A null may hold anything.
    pa = pytest.importorskip("pyarrow")
    assert ids_of(IDENTITY, pa.array([id, 7], pa.uint64(), mask=np.array([True, False]))) == [[], [7]]


# ---- Rarer containers -----------------------------------------------------------------------------------------------


def test_masked_arrays():
    masked = np.ma.masked_array([3, 99, 7], [False, True, False])
    assert ids_of(IDENTITY, masked) == [[3], [], [7]]
    assert ids_of(IDENTITY, np.ma.masked_array([[3, 1], [99, 98]], [[False, True], [True, True]])) == [[3], []]
    assert ids_of(WORDS, np.ma.masked_array(["a", "c"], [True, False])) == [[], [2]]
    assert ids_of(WORDS, np.ma.masked_array([None, "c"], [False, False])) == [[], [2]]
    assert ids_of(IDENTITY, np.ma.masked_array([3, "?"], [False, True], object)) == [[3], []]
    number = features.numeric_column("x", default_value=5.0)
    nan = np.ma.masked_array([1.0, np.nan], [False, True])
    assert FeatureTransform([number])({"x": nan}).dense.tolist() == [[1.0], [5.0]]


def test_numbers_wider_than_torchs():
    made = FeatureTransform([features.numeric_column("x")])({"x": np.array([1.5, 2.5], np.longdouble)}).dense
    assert made.tolist() == [[1.5], [2.5]]


def test_views_of_lists_and_runs_of_equal_values():
    pa = pytest.importorskip("pyarrow")
    if not hasattr(pa, "list_view"):
        pytest.skip("needs pyarrow's list views")
    for kind in (pa.list_view(pa.int8()), pa.large_list_view(pa.int64())):
        assert ids_of(IDENTITY, pa.array([[9], [3], None, [7, 4]], kind)[1:]) == [[3], [], [7, 4]]
    runs = pa.RunEndEncodedArray.from_arrays([2, 3, 4], pa.array([5, None, 6]))
    assert ids_of(IDENTITY, runs) == [[5], [5], [], [6]]
    assert ids_of(IDENTITY, runs[1:]) == [[5], [], [6]]


# ---- Arrays of other libraries --------------------------------------------------------------------------------------


class Foreign:
    """An array that knows one protocol only, with an attribute of numpy's that says nothing of nulls."""

    def __init__(self, protocol, array):
        self.protocol, self.array = protocol, array

    def __getattr__(self, name):
        if name != self.protocol:
            raise AttributeError(name)
        return {
            "__array__": lambda: self.array.to_numpy(zero_copy_only=False),
            "__arrow_array__": lambda type=None: self.array,
            "__arrow_c_array__": lambda schema=None: self.array.__arrow_c_array__(schema),
            "__arrow_c_stream__": lambda schema=None: pyarrow_chunks(self.array).__arrow_c_stream__(schema),
        }[name]


def pyarrow_chunks(array):
    import pyarrow as pa

    return pa.chunked_array([array.slice(0, 1), array.slice(1)])


@pytest.mark.parametrize("protocol", ["__array__", "__arrow_array__", "__arrow_c_array__", "__arrow_c_stream__"])
def test_arrays_of_other_libraries(protocol):
    pa = pytest.importorskip("pyarrow")
    assert ids_of(WORDS, Foreign(protocol, pa.array(["a", None, "c"]))) == ids_of(WORDS, ["a", None, "c"])
    assert ids_of(IDENTITY, Foreign(protocol, pa.array([3, 5, 7]))) == [[3], [5], [7]]
    if protocol != "__array__":  # numpy makes floats of integers with nulls
        assert ids_of(IDENTITY, Foreign(protocol, pa.array([3, None, 7]))) == [[3], [], [7]]


@pytest.mark.parametrize(
    ("x", "text"),
    [
        (object(), "must be a tensor, a numpy array .* got object"),
        (Foreign("__array__", None), "Foreign cannot be read as an array: 'NoneType' object has no attribute"),
        (np.float32(1.0), r"an array must have shape \[B\] or \[B, k\], got \[\]"),
    ],
    ids=["an object", "a broken array", "a scalar"],
)
def test_what_is_no_array_names_the_column(x, text):
    with pytest.raises(ValueError, match=f"column 'x': {text}"):
        ids_of(IDENTITY, x)


@pytest.mark.tensorflow
def test_tensors_of_tensorflow(tensorflow):
    tf = tensorflow
    assert (
        ids_of(IDENTITY, tf.constant([3, -1, 7])) == ids_of(IDENTITY, tf.constant([[3], [-1], [7]])) == [[3], [], [7]]
    )
    assert ids_of(WORDS, tf.constant(["a", "", "c"])) == ids_of(WORDS, ["a", None, "c"])
    assert ids_of(IDENTITY, tf.ragged.constant([[3], [], [7, 4]])) == [[3], [], [7, 4]]
    assert ids_of(WORDS, tf.ragged.constant([["a", "c"], []])) == ids_of(WORDS, [["a", "c"], []])
    sparse = tf.SparseTensor([[0, 0], [2, 0], [2, 3]], [3, 7, 4], [3, 4])
    assert ids_of(IDENTITY, sparse) == [[3], [], [7, 4]]
    numbers = FeatureTransform([features.numeric_column("x", 2)])({"x": tf.constant([[1.0, 2.0]])})
    assert numbers.dense.tolist() == [[1.0, 2.0]]
    wrong = [
        tf.SparseTensor([[3, 0]], [3], [3, 4]),
        tf.ragged.constant([[[1]], []]),
        tf.constant([1.0], tf.bfloat16),
        tf.constant("a"),
        tf.IndexedSlices(tf.constant([1]), tf.constant([0])),
    ]
    for x in wrong:
        with pytest.raises(ValueError, match="column 'x': "):
            ids_of(IDENTITY, x)
    graph = tf.function(lambda x: ids_of(IDENTITY, x), autograph=False)
    with pytest.raises(ValueError, match="column 'x': SymbolicTensor cannot be read as an array"):
        graph(tf.constant([1]))
