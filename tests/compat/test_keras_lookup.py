"""``StringLookup`` and ``IntegerLookup`` against Keras: vocabularies, adapting, configurations, errors, oddities."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from kinds import saved

from torchsparse_rec.compat import keras as ours
from torchsparse_rec.compat.tensorflow import RaggedTensor, SparseTensor

BATCHES: dict[str, list[Any]] = {
    "matrices": [np.array([["a", "b"], ["a", ""]]), np.array([["[UNK]", "é"], ["c", "b"]])],
    "vectors": [np.array(["a", "b", "a"]), np.array(["c"])],
}


@pytest.fixture(scope="module")
def keras(tensorflow: Any) -> Any:
    import keras

    return keras


@pytest.mark.tensorflow
@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"max_tokens": 3},
        {"mask_token": "", "max_tokens": 4},
        {"num_oov_indices": 0},
        {"num_oov_indices": 3, "salt": [1, 2]},
        {"output_mode": "count", "mask_token": ""},
        {"output_mode": "count", "max_tokens": 9, "pad_to_max_tokens": True},
        {"output_mode": "tf_idf"},
        {"output_mode": "tf_idf", "max_tokens": 9, "pad_to_max_tokens": True},
    ],
    ids=str,
)
def test_strings_adapt(keras: Any, arguments: dict[str, Any], name: str) -> None:
    data = BATCHES[name]
    mine, theirs = ours.StringLookup(**arguments), keras.layers.StringLookup(**arguments)
    mine.adapt(iter(data))
    theirs.adapt(iter(data))
    assert mine.get_vocabulary() == [str(x) for x in theirs.get_vocabulary()]
    assert mine.vocabulary_size() == theirs.vocabulary_size()
    assert mine.get_vocabulary(False) == [str(x) for x in theirs.get_vocabulary(False)]
    given = np.array([["a", "c"], ["b", "a"]])
    assert np.allclose(mine(given).numpy(), np.array(theirs(given)), rtol=1e-6)
    if "tf_idf" in arguments.values():
        assert np.allclose(mine.idf_weights.numpy(), theirs.idf_weights.numpy(), rtol=1e-6)
    mine, theirs = ours.StringLookup(**arguments), keras.layers.StringLookup(**arguments)
    mine.adapt(iter(data), steps=1)
    theirs.adapt(iter(data), steps=1)
    assert mine.get_vocabulary() == [str(x) for x in theirs.get_vocabulary()]


@pytest.mark.tensorflow
def test_one_array_is_all_data(keras: Any) -> None:
    for data in (["b", "a", "b"], [["b", "a"], ["b", "c"]], np.array(["x", "y"]), "b"):
        mine, theirs = (module.StringLookup(output_mode="tf_idf") for module in (ours, keras.layers))
        mine.adapt(data)
        theirs.adapt(data)
        assert mine.get_vocabulary() == [str(x) for x in theirs.get_vocabulary()]
        assert np.allclose(mine.idf_weights.numpy(), theirs.idf_weights.numpy(), rtol=1e-6)


@pytest.mark.tensorflow
@pytest.mark.parametrize(
    ("layer", "arguments"),
    [
        ("StringLookup", {"vocabulary": ["a", "é"], "num_oov_indices": 3, "salt": 4, "mask_token": "m", "name": "n"}),
        ("StringLookup", {"vocabulary": ["a"], "idf_weights": [0.5], "output_mode": "tf_idf", "name": "n"}),
        ("IntegerLookup", {"vocabulary": [3, 4], "oov_method": "farmhash", "max_tokens": 9, "name": "n"}),
        ("IntegerLookup", {"vocabulary": np.array([3, 4]), "invert": True, "name": "n"}),
    ],
    ids=str,
)
def test_configurations_travel_both_ways(keras: Any, layer: str, arguments: dict[str, Any]) -> None:
    mine, theirs = getattr(ours, layer)(**arguments), getattr(keras.layers, layer)(**arguments)
    expected = {**theirs.get_config(), "dtype": "float32"}
    expected["vocabulary"] = [x if isinstance(x, str) else int(x) for x in expected["vocabulary"]]
    assert mine.get_config() == expected
    from_theirs = type(mine).from_config(theirs.get_config())
    from_mine = type(theirs).from_config(mine.get_config())
    x = np.array([["a", "z"]]) if layer == "StringLookup" else np.array([[3, 99]])
    if not arguments.get("invert"):
        assert np.allclose(from_theirs(x).numpy(), np.array(from_mine(x)))
    else:
        assert from_theirs(torch.tensor([1, 0])).tolist() == [3, -1]
    assert "max_tokens" in repr(mine)


def test_a_file_is_read_as_tensorflow_reads_it(tmp_path: Any) -> None:
    file = tmp_path / "words"
    file.write_bytes("x\r\né\n[UNK]".encode())
    layer = ours.StringLookup(vocabulary=str(file))
    assert layer.get_vocabulary() == ["[UNK]", "x", "é", "[UNK]"] and layer(["é", "q", "[UNK]"]).tolist() == [2, 0, 3]
    assert layer.get_config()["vocabulary"] is None
    (tmp_path / "numbers").write_text("7\n-3\n")
    assert ours.IntegerLookup(vocabulary=tmp_path / "numbers")([-3, 7, 1]).tolist() == [2, 1, 0]
    for text, message in ((b"a\n\nb", "no empty line, got one: line 2"), (b"a\na", "not hold a token twice, got 'a'")):
        file.write_bytes(text)
        with pytest.raises(ValueError, match=message):
            ours.StringLookup(vocabulary=str(file))
    file.write_bytes(b"x")
    with pytest.raises(ValueError, match="vocabulary must hold integers of 64 bits, got b'x' in line 1"):
        ours.IntegerLookup(vocabulary=str(file))
    with pytest.raises(ValueError, match="vocabulary must be a file that exists, or tokens, got 'nothing'"):
        ours.StringLookup(vocabulary="nothing")
    with pytest.raises(ValueError, match="vocabulary must not be a file for output_mode 'tf_idf'"):
        ours.StringLookup(vocabulary=str(file), output_mode="tf_idf", idf_weights=[1.0])


@pytest.mark.tensorflow
@pytest.mark.parametrize(
    ("name", "special", "token"),
    [("StringLookup", ["[UNK]"], "a"), ("IntegerLookup", [-1], 7)],
    ids=["string", "integer"],
)
def test_a_vocabulary_without_tokens_is_refused(
    name: str, special: list[Any], token: Any, keras: Any, tensorflow: Any, tmp_path: Any
) -> None:
    errors = tensorflow.errors
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "one").write_text(str(token))
    for vocabulary, text in (
        (str(tmp_path / "empty"), "vocabulary file .*empty must hold a token, got none"),
        ([], "vocabulary must not be empty"),
        (special, "vocabulary must hold a token that is not special, got"),
    ):
        with pytest.raises((ValueError, errors.InvalidArgumentError, errors.OutOfRangeError)):
            getattr(keras.layers, name)(vocabulary=vocabulary)
        with pytest.raises(ValueError, match=text):
            getattr(ours, name)(vocabulary=vocabulary)
    for vocabulary in (str(tmp_path / "one"), [token], [*special, token]):
        found = [getattr(layers, name)(vocabulary=vocabulary).vocabulary_size() for layers in (keras.layers, ours)]
        assert found == [2, 2]


def test_what_adapt_found_is_state() -> None:
    layer = ours.StringLookup(output_mode="tf_idf")
    layer.adapt([[b"a", b"\xff"], [b"a", b"b"]])
    fresh = ours.StringLookup(output_mode="tf_idf")
    fresh.load_state_dict(saved(layer.state_dict(), weights_only=True))
    assert torch.equal(fresh([["a", "q"]]), layer([["a", "q"]])) and fresh.vocabulary_size() == 4
    fresh.load_state_dict(ours.StringLookup(output_mode="tf_idf").state_dict())
    with pytest.raises(ValueError, match="vocabulary must be given, or found by adapt"):
        fresh([["a"]])
    bins = ours.Discretization(num_bins=3)
    bins.adapt(np.arange(30.0))
    other = ours.Discretization(num_bins=3)
    other.load_state_dict(bins.state_dict())
    assert (
        other.bin_boundaries == bins.bin_boundaries
        and ours.Discretization.from_config(bins.get_config()).get_config() == bins.get_config()
    )


def test_inverted_lookups_of_every_form() -> None:
    layer = ours.StringLookup(vocabulary=["a", "c"], invert=True, mask_token="")
    assert layer([[0, 1], [2, 99]]).tolist() == [[b"", b"[UNK]"], [b"a", b"[UNK]"]]
    ragged = RaggedTensor.from_row_splits(torch.tensor([2, 3]), [0, 2, 2])
    assert layer(ragged).values.tolist() == [b"a", b"c"]
    with pytest.raises(ValueError, match="inputs must be integers with invert, got strings"):
        layer(["a"])


def test_where_keras_is_wrong() -> None:
    """Test the rows of PARITY.md that name what is not copied from Keras."""
    layer = ours.StringLookup(vocabulary=["a", "b"], mask_token="m", output_mode="one_hot", sparse=True)
    assert layer([["a", "m"]]).indices.tolist() == [[0, 0, 1]]  # Keras: an index of 2 ** 63 - 1 for the mask
    layer = ours.StringLookup(vocabulary=["a", "b"], output_mode="tf_idf", idf_weights=[0.5, 2.0], sparse=True)
    made = layer([["a", "b"], ["b", "b"]])  # Keras: an error
    assert made.indices.tolist() == [[0, 1], [0, 2], [1, 2]] and made.values.tolist() == [0.5, 2.0, 4.0]
    assert ours.CategoryEncoding(4, output_mode="one_hot", sparse=True)([9, 1]).indices.tolist() == [[1, 1]]
    three = torch.tensor([[[0, -1], [1, 1]]])
    assert ours.CategoryEncoding(4, sparse=True)(three).indices.tolist() == [[0, 0, 0], [0, 0, 1], [0, 1, 1]]
    sparse = SparseTensor([[0, 0], [1, 1]], torch.tensor([1, 9]), [2, 2])
    looked_up = ours.IntegerLookup(vocabulary=[1, 2])(sparse)  # Keras: dense, with zeros looked up
    assert looked_up.values.tolist() == [1, 0] and looked_up.shape == (2, 2)
    assert ours.CategoryEncoding(3)(torch.tensor([1], dtype=torch.int8)).tolist() == [0, 1, 0]  # Keras: an error


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ours.StringLookup()(["a"]), "vocabulary must be given, or found by adapt"),
        (
            lambda: ours.StringLookup(vocabulary=["a"]).adapt(["b"]),
            "adapt must not be called for layer 'string_lookup'",
        ),
        (lambda: ours.StringLookup(vocabulary=["a"])([1]), "inputs must be strings, got torch.int32"),
        (lambda: ours.StringLookup(vocabulary=[1]), r"vocabulary\[0\] must be a string, got 1"),
        (lambda: ours.StringLookup(vocabulary=["a"], num_oov_indices=0)(["a", "z"]), "got b'z' at position 1"),
        (lambda: ours.StringLookup(bogus=1), r"got arguments that it does not have: \['bogus'\]"),
        (lambda: ours.IntegerLookup(vocabulary=[2**63]), "must be an integer of 64 bits"),
        (lambda: ours.IntegerLookup(vocabulary=[1], vocabulary_dtype="int32"), "vocabulary_dtype must be 'int64'"),
        (lambda: ours.IntegerLookup(vocabulary=[1], salt=1), "salt must be None unless oov_method is 'farmhash'"),
        (lambda: ours.IntegerLookup(output_mode="tf_idf").adapt(np.zeros((1, 1, 1))), "data must have two dimensions"),
        (lambda: ours.Discretization([1.0])(["a"]), "inputs must be numbers, got strings"),
        (lambda: ours.Discretization(["a"]), "bin_boundaries must be numbers"),
        (lambda: ours.Discretization([1.0]).adapt([1.0]), "adapt must not be called for a layer that was given bin_b"),
        (lambda: ours.CategoryEncoding(3)(["a"]), "inputs must be integers, got strings"),
        (lambda: ours.CategoryEncoding(3)([1], count_weights=[1.0]), "count_weights must be None for output_mode"),
        (
            lambda: ours.CategoryEncoding(3, "count")([[1]], count_weights=[1.0]),
            r"count_weights must have the shape of inputs, \[1, 1\], got \[1\]",
        ),
        (lambda: ours.CategoryEncoding(3)([[0, -2]]), r"must not be negative .* got -2 at position \[0, 1\]"),
    ],
)
def test_errors(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_type_errors() -> None:
    with pytest.raises(TypeError, match="mask_token must be an integer, got 1.0"):
        ours.IntegerLookup(mask_token=1.0)
    with pytest.raises(TypeError, match="inputs must be integers, got"):
        ours.IntegerLookup(vocabulary=[1])([1.5])
    with pytest.raises(TypeError, match="inputs must be integers, got strings"):
        ours.IntegerLookup(vocabulary=[1])(["1"])


def test_a_vocabulary_is_replaced() -> None:
    layer = ours.StringLookup(vocabulary=["a"])
    layer.set_vocabulary(["q", "r"])
    assert layer.get_vocabulary() == ["[UNK]", "q", "r"]
    fixed = ours.StringLookup(vocabulary=["a"], output_mode="count")
    with pytest.raises(ValueError, match="vocabulary must keep its size"):
        fixed.set_vocabulary(["q", "r"])
    with pytest.raises(ValueError, match="idf_weights must be given for output_mode 'tf_idf' alone"):
        fixed.set_vocabulary(["q"], idf_weights=[1.0])


def test_words_that_are_no_text_are_shown_and_written() -> None:
    layer = ours.StringLookup(vocabulary=[b"a", b"\xff"])
    assert "StringLookup" in repr(layer) and layer.get_vocabulary() == ["[UNK]", "a", "\udcff"]
    twin = ours.StringLookup.from_config(layer.get_config())
    assert twin([b"\xff", b"a", b"z"]).tolist() == layer([b"\xff", b"a", b"z"]).tolist() == [2, 1, 0]
    # A configuration holds the words as they were given, whatever their encoding.
    latin = ours.StringLookup(vocabulary=["é"], encoding="latin-1")
    assert ours.StringLookup.from_config(latin.get_config())(["é"]).tolist() == [1]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"a\rb\n", ["a\rb"]),
        (b"a\r\r\nb\r\n", ["a\r", "b"]),
        (b"a\nb\r", ["a", "b"]),
        (b"a\n\r", ["a"]),
        (b"\ra\n", ["\ra"]),
    ],
)
def test_one_carriage_return_ends_a_line(tmp_path: Any, text: bytes, words: list[str]) -> None:
    """Read one file by a layer and by a column: both use one function."""
    from torchsparse_rec import features

    file = tmp_path / "words"
    file.write_bytes(text)
    assert ours.StringLookup(vocabulary=str(file)).get_vocabulary(include_special_tokens=False) == words
    column = features.categorical_column_with_vocabulary_file("x", file)
    assert column.words() == [word.encode() for word in words] and column.num_buckets == len(words)


def test_a_file_of_integers_holds_no_underscores(tmp_path: Any) -> None:
    file = tmp_path / "numbers"
    for text in ("1_0", "1.0", "9223372036854775808"):
        file.write_text(text)
        with pytest.raises(ValueError, match=f"vocabulary must hold integers of 64 bits, got b'{text}' in line 1"):
            ours.IntegerLookup(vocabulary=file)


def test_tf_idf_of_data_that_has_nothing_but_the_token_for_others() -> None:
    """Give NaN as the token's weight: the token is no entry of the vocabulary, and Keras warns of an empty mean."""
    layer = ours.StringLookup(output_mode="tf_idf")
    layer.adapt(["[UNK]", "[UNK]"])
    assert layer.get_vocabulary() == ["[UNK]"] and torch.isnan(layer.idf_weights).all()


# ---- Precision, negative ids, other libraries' arrays ---------------------------------------------------------------


class Foreign:
    """An array of a library that knows neither ``dtype`` nor ``copy``."""

    def __init__(self, array: Any) -> None:
        self.array = np.array(array)

    def __array__(self) -> np.ndarray:
        return self.array


NUMBERS = (
    np.array([0.1, 0.10001, 1.00001, 0.99999, 2049.0], np.float32),
    np.array([0.1, 0.1000000001, 1.00000000001, 0.99999999999]),
    np.array([0.1, 1.0, 2048.0], np.float16),
)


def test_bins_are_found_in_float32() -> None:
    """Find bins in float32 as Keras 3.15 does, whatever the dtype: float16 has neither 0.99999 nor 2049."""
    for dtype in ("float16", "bfloat16", "float64"):
        layer = ours.Discretization([0.1, 1.0, 2048.5], dtype=dtype)
        assert layer(NUMBERS[0]).tolist() == [1, 1, 2, 1, 3]
        assert layer(NUMBERS[1]).tolist() == [1, 1, 2, 2]


@pytest.mark.tensorflow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_bins_of_every_dtype_are_keras(tensorflow: Any, dtype: str) -> None:
    import keras

    for mode in ("int", "one_hot"):
        arguments: dict[str, Any] = {"bin_boundaries": [0.1, 1.0, 2048.5], "dtype": dtype, "output_mode": mode}
        for numbers in NUMBERS:
            wanted = keras.layers.Discretization(**arguments)(numbers)
            made = ours.Discretization(**arguments)(numbers)
            assert str(made.dtype).removeprefix("torch.") == wanted.dtype.name
            assert made.tolist() == wanted.numpy().astype(np.float64).tolist()


@pytest.mark.tensorflow
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("mode", ["multi_hot", "count", "one_hot"])
@pytest.mark.parametrize("shape", [[2, 2], [4]], ids=str)
def test_negative_ids_of_sparse_inputs(tensorflow: Any, shape: list[int], mode: str, sparse: bool) -> None:
    """Leave padding out where Keras leaves it out, and refuse it where Keras refuses it."""
    import keras

    places = [[0, 0], [0, 1], [1, 0], [1, 1]] if len(shape) == 2 else [[0], [1], [2], [3]]
    arguments: dict[str, Any] = {"num_tokens": 4, "output_mode": mode, "sparse": sparse}
    given = tensorflow.SparseTensor(places, np.array([1, -1, 3, -2]), shape)
    layer, own = ours.CategoryEncoding(**arguments), SparseTensor(places, np.array([1, -1, 3, -2]), shape)
    try:
        wanted = keras.layers.CategoryEncoding(**arguments)(given)
    except (ValueError, tensorflow.errors.InvalidArgumentError):
        with pytest.raises(ValueError, match="inputs must not be"):
            layer(own)
        return
    assert layer(own).tolist() == wanted.numpy().tolist()


def test_padding_of_sparse_inputs_does_not_count() -> None:
    inputs = SparseTensor([[0, 0], [0, 1], [1, 0]], [1, -1, 3], [2, 2])
    assert ours.CategoryEncoding(4, "count")(inputs).tolist() == [[0, 1, 0, 0], [0, 0, 0, 1]]


@pytest.mark.tensorflow
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of NumPy, called by Keras
@pytest.mark.filterwarnings("ignore:Exception encountered when calling:DeprecationWarning")
@pytest.mark.parametrize(
    ("layer", "arguments", "inputs"),
    [
        ("Discretization", {"bin_boundaries": [0.0, 1.0]}, [0.5, 3.0]),
        ("CategoryEncoding", {"num_tokens": 4}, [[1, 2]]),
        ("Hashing", {"num_bins": 7}, [1, 2]),
        ("IntegerLookup", {"vocabulary": [1, 2]}, [1, 5]),
        ("StringLookup", {"vocabulary": ["a"]}, ["a", "b"]),
    ],
)
def test_arrays_of_other_libraries(tensorflow: Any, layer: str, arguments: dict[str, Any], inputs: Any) -> None:
    import keras

    wanted = getattr(keras.layers, layer)(**arguments)(Foreign(inputs))
    made = getattr(ours, layer)(**arguments)(Foreign(inputs))
    assert made.tolist() == wanted.numpy().tolist()
