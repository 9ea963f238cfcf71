"""Record batches as tensors and back: values, memory, nulls, and what is refused."""

import math
import re

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchsparse_rec import JaggedTensor
from torchsparse_rec.data import PrebatchedDataset, to_record_batch, to_tensors, write_prebatched


def address(array):
    """Return the address of a primitive array's values."""
    return array.buffers()[1].address + array.offset * array.type.bit_width // 8


@pytest.mark.parametrize(
    "kind",
    [pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.float16(), pa.float32(), pa.float64()],
    ids=str,
)
def test_numbers_share_the_batchs_memory(kind):
    array = pa.array([1, 2, 3, 4], pa.float64()).cast(kind)
    tensor = to_tensors(pa.record_batch({"x": array}))["x"]
    assert tensor.tolist() == [1, 2, 3, 4] and tensor.data_ptr() == address(array)
    sliced = to_tensors(pa.record_batch({"x": array}).slice(1, 2))["x"]
    assert sliced.tolist() == [2, 3] and sliced.data_ptr() == address(array) + kind.bit_width // 8


def test_fixed_size_lists_are_matrices_in_the_batchs_memory():
    values = pa.array(range(12), pa.int32())
    batch = pa.record_batch({"x": pa.FixedSizeListArray.from_arrays(values, 3)})
    tensor = to_tensors(batch)["x"]
    assert tensor.tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]] and tensor.data_ptr() == address(values)
    assert to_tensors(batch.slice(2))["x"].tolist() == [[6, 7, 8], [9, 10, 11]]
    deep = pa.FixedSizeListArray.from_arrays(pa.FixedSizeListArray.from_arrays(values, 3), 2)
    assert to_tensors(pa.record_batch({"x": deep}).slice(1))["x"].tolist() == [[[6, 7, 8], [9, 10, 11]]]


@pytest.mark.parametrize(
    ("column", "shape"),
    [
        (pa.array([[], [], []], pa.list_(pa.int64(), 0)), (3, 0)),
        (pa.array([[], None], pa.list_(pa.float32(), 0)), (2, 0)),
        (pa.array([], pa.list_(pa.bool_(), 0)), (0, 0)),
        (pa.array([[[], []]] * 3, pa.list_(pa.list_(pa.int32(), 0), 2)), (3, 2, 0)),
        (pa.array([[], []], pa.list_(pa.list_(pa.int64(), 3), 0)), (2, 0, 3)),
    ],
)
def test_lists_of_no_items_are_matrices_without_columns(column, shape, tmp_path):
    batch = pa.record_batch({"x": column, "y": pa.array(range(len(column)), pa.int64())})
    assert to_tensors(batch)["x"].shape == shape
    if len(column):
        write_prebatched(tmp_path / "f", [batch])
        (found,) = PrebatchedDataset(tmp_path / "f")
        assert found["x"].shape == shape
        assert to_tensors(batch.slice(1))["x"].shape == (shape[0] - 1, *shape[1:])
    rows = pa.array([[[], []], [[], []]], pa.list_(pa.list_(pa.int64(), 0)))
    assert to_tensors(pa.record_batch({"x": rows}))["x"].values().shape == (4, 0)


@pytest.mark.parametrize("kind", [pa.list_(pa.int64()), pa.large_list(pa.int64())], ids=str)
def test_lists_are_jagged_tensors(kind):
    batch = pa.record_batch({"x": pa.array([[3, 1], [], [4], [1, 5]], kind)})
    x = to_tensors(batch)["x"]
    assert isinstance(x, JaggedTensor) and x.values().tolist() == [3, 1, 4, 1, 5]
    assert x.offsets().tolist() == [0, 2, 2, 3, 5]
    assert x.offsets().dtype == (torch.int64 if kind == pa.large_list(pa.int64()) else torch.int32)
    assert x.values().data_ptr() == address(batch.column("x").values)
    sliced = to_tensors(batch.slice(2))["x"]
    assert sliced.values().tolist() == [4, 1, 5] and sliced.offsets().tolist() == [0, 1, 3]
    assert to_tensors(batch.slice(0, 1))["x"].values().tolist() == [3, 1]
    assert to_tensors(batch.slice(4))["x"].offsets().tolist() == [0]


def test_strings_and_lists_of_strings_stay_arrow():
    batch = pa.record_batch(
        {
            "s": ["a", None],
            "t": [["b"], []],
            "b": pa.array([b"x", b""], pa.large_binary()),
            "f": pa.array([["a", "b"], None], pa.list_(pa.string(), 2)),
            "d": pa.array([[["a"]], []], pa.list_(pa.list_(pa.string(), 1))),
        }
    )
    columns = to_tensors(batch)
    assert list(columns) == batch.schema.names
    assert all(columns[name].equals(batch.column(name)) for name in columns)


def test_booleans_and_dictionaries():
    batch = pa.record_batch({"b": [True, False, True], "d": pa.array([7, 8, 7]).dictionary_encode()})
    columns = to_tensors(batch.slice(1))
    assert columns["b"].tolist() == [False, True] and columns["b"].dtype == torch.bool
    assert columns["d"].tolist() == [8, 7]


# ---- Nulls ----------------------------------------------------------------------------------------------------------


def test_null_floats_are_nan_and_the_batch_keeps_its_values():
    batch = pa.record_batch(
        {"x": pa.array([1.5, None, 2.5]), "k": pa.array([[1.0, None], None, [3, 4]], pa.list_(pa.float32(), 2))}
    )
    columns = to_tensors(batch)
    torch.testing.assert_close(columns["x"], torch.tensor([1.5, math.nan, 2.5], dtype=torch.float64), equal_nan=True)
    expected = torch.tensor([[1.0, math.nan], [math.nan, math.nan], [3, 4]])
    torch.testing.assert_close(columns["k"], expected, equal_nan=True)
    assert batch.column("x").to_pylist() == [1.5, None, 2.5]
    assert to_tensors(batch.slice(1, 1), fill=9)["k"].tolist() == [[9, 9]]


def test_null_integers_need_a_fill():
    batch = pa.record_batch({"a": pa.array([5, 6], pa.int8()), "x": pa.array([None, 7], pa.int8())})
    with pytest.raises(ValueError, match=r"column 'x' has a null at row 0, and int8 has no value for it: give fill="):
        to_tensors(batch)
    assert to_tensors(batch, fill={"x": -1})["x"].tolist() == [-1, 7]
    assert to_tensors(batch, fill=0)["x"].tolist() == [0, 7]
    with pytest.raises(ValueError, match=r"fill of column 'x' must be a int8, got 300"):
        to_tensors(batch, fill=300)
    assert to_tensors(batch, fill=300, integers=torch.int64)["x"].tolist() == [300, 7]


def test_fill_of_nan_makes_integers_floats_in_every_batch():
    batch = pa.record_batch({"x": pa.array([None, 7], pa.int16())})
    for rows in (batch, batch.slice(1)):
        x = to_tensors(rows, fill={"x": math.nan})["x"]
        assert x.dtype == torch.float32 and x[-1] == 7
    assert math.isnan(to_tensors(batch, fill=math.nan)["x"][0])


def test_null_booleans_and_null_lists():
    batch = pa.record_batch({"b": [True, None], "l": pa.array([None, [1, 2]], pa.list_(pa.int64()))})
    with pytest.raises(ValueError, match="column 'b' has a null at row 1"):
        to_tensors(batch)
    columns = to_tensors(batch, fill=False)
    assert columns["b"].tolist() == [True, False]
    assert columns["l"].lengths().tolist() == [0, 2] and columns["l"].values().tolist() == [1, 2]
    inside = pa.record_batch({"l": pa.array([[1, None]], pa.list_(pa.int64()))})
    with pytest.raises(ValueError, match="column 'l' has a null at value 1"):
        to_tensors(inside)


def test_integers_of_one_dtype():
    batch = pa.record_batch({"a": pa.array([1], pa.int8()), "l": pa.array([[2]], pa.list_(pa.int16())), "f": [0.5]})
    columns = to_tensors(batch, integers=torch.int64)
    assert columns["a"].dtype == columns["l"].values().dtype == torch.int64 and columns["f"].dtype == torch.float64
    with pytest.raises(ValueError, match="integers must be an integer dtype, got torch.float32"):
        to_tensors(batch, integers=torch.float32)


@pytest.mark.parametrize(
    ("column", "text"),
    [
        (pa.array([1, 2**40 + 5]), "has 1099511627781 at row 1, not torch.int32"),
        (pa.array([3, None, -(2**31) - 1]), "has -2147483649 at row 2, not torch.int32"),
        (pa.array([2**63], pa.uint64()), "has 9223372036854775808 at row 0, not torch.int32"),
        (pa.array([[1, 2], [3, 2**31]], pa.list_(pa.int64(), 2)), "has 2147483648 at row 1, not torch.int32"),
        (pa.array([[1], [2, 2**31]]), "has 2147483648 at value 2, not torch.int32"),
    ],
    ids=lambda x: "",
)
def test_integers_that_the_dtype_lacks(column, text):
    with pytest.raises(ValueError, match=f"column 'x' {text}"):
        to_tensors(pa.record_batch({"x": column}), integers=torch.int32, fill=0)


def test_values_under_nulls_are_not_cast():
    values = pa.array([1, 2, 2**40, 5])
    rows = pa.FixedSizeListArray.from_arrays(values, 2, mask=pa.array([False, True]))
    hidden = pa.Array.from_buffers(pa.int64(), 4, [pa.py_buffer(b"\x0b"), values.buffers()[1]])
    columns = to_tensors(pa.record_batch({"f": rows}), integers=torch.int8, fill=9)
    assert columns["f"].tolist() == [[1, 2], [9, 9]]
    assert to_tensors(pa.record_batch({"x": hidden}), integers=torch.int8, fill=9)["x"].tolist() == [1, 2, 9, 5]


@pytest.mark.parametrize("kind", [pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64(), pa.float16()], ids=str)
def test_nulls_of_every_width_are_filled(kind):
    x = pa.array([np.float16(7), None], kind) if kind == pa.float16() else pa.array([7, None], kind)
    filled = to_tensors(pa.record_batch({"x": x}), fill=3)["x"]
    assert filled.tolist() == [7, 3] and filled.numpy().dtype == kind.to_pandas_dtype()
    (rows,) = to_tensors(pa.record_batch({"f": pa.FixedSizeListArray.from_arrays(x, 2)}), fill=3).values()
    assert rows.tolist() == [[7, 3]]


@pytest.mark.parametrize("fill", ["x", [1], {"x": "y"}, 1j], ids=str)
def test_fills_that_are_no_numbers(fill):
    with pytest.raises(ValueError, match="to_tensors: fill must be a number, or numbers by column, got"):
        to_tensors(pa.record_batch({"x": [1]}), fill=fill)


@pytest.mark.parametrize(
    ("column", "fill"),
    [([1, None], math.inf), ([1, None], 0.5), ([True, None], 2), (pa.array([0.5, None], pa.float32()), 1e300)],
    ids=str,
)
def test_fills_that_the_column_lacks(column, fill):
    with pytest.raises(ValueError, match=f"fill of column 'x' must be a .*, got {re.escape(str(fill))}"):
        to_tensors(pa.record_batch({"x": column}), fill=fill)


@pytest.mark.parametrize(
    "column", [pa.array([0], pa.timestamp("s")), pa.array([{"a": 1}]), pa.nulls(1)], ids=lambda x: str(x.type)
)
def test_types_without_tensors(column):
    with pytest.raises(ValueError, match="column 'x' must hold numbers, booleans, strings or lists of them, got"):
        to_tensors(pa.record_batch({"x": column}))


def test_wrong_batches():
    with pytest.raises(TypeError, match="batch must be a pyarrow.RecordBatch or a frame, got dict"):
        to_tensors({"x": [1]})
    twice = pa.RecordBatch.from_arrays([pa.array([1]), pa.array([2])], names=["x", "x"])
    with pytest.raises(ValueError, match="distinct names, got 'x' twice"):
        to_tensors(twice)


# ---- The reverse ----------------------------------------------------------------------------------------------------


def test_tensors_become_columns_without_a_copy():
    x = torch.arange(6, dtype=torch.int32)
    batch = to_record_batch({"x": x, "m": x.view(6, 1), "n": np.arange(6.0), "s": list("abcdef"), "b": x > 2})
    assert batch.schema.types == [pa.int32(), pa.list_(pa.int32(), 1), pa.float64(), pa.string(), pa.bool_()]
    assert batch.column("x").buffers()[1].address == x.data_ptr()


def test_numpy_arrays_of_any_layout():
    x = np.arange(6, dtype=np.int32)
    frozen = x.copy()
    frozen.flags.writeable = False
    columns = {"r": x[::-1], "b": x.astype(">i4"), "s": np.repeat(x, 2)[::2], "f": frozen, "m": x.reshape(6, 1)[::-1]}
    batch = to_record_batch(columns)
    assert all(batch.column(name).to_pylist() == column.tolist() for name, column in columns.items())
    assert set(batch.schema.types[:4]) == {pa.int32()}


numbers = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=5)


@settings(max_examples=50)
@given(rows=st.lists(numbers, min_size=0, max_size=8), wide=st.booleans(), start=st.integers(0, 8))
def test_round_trip_of_jagged_rows(rows, wide, start):
    kind = pa.large_list(pa.int64()) if wide else pa.list_(pa.int64())
    batch = pa.record_batch({"x": pa.array(rows, kind)}).slice(start)
    again = to_record_batch(to_tensors(batch))
    assert again.column("x").to_pylist() == rows[start:]


def test_jagged_vectors_and_lengths():
    x = JaggedTensor(torch.arange(6.0).view(3, 2), lengths=torch.tensor([2, 0, 1]))
    batch = to_record_batch({"x": x})
    assert batch.column("x").to_pylist() == [[[0, 1], [2, 3]], [], [[4, 5]]]
    assert to_tensors(batch)["x"].values().tolist() == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize(
    ("columns", "error", "text"),
    [
        ({}, ValueError, "columns must have at least one column"),
        ([1], TypeError, "columns must be a mapping or a frame, got list"),
        ({"x": torch.tensor(1)}, ValueError, "column 'x' must have rank >= 1, got a scalar"),
        ({"x": torch.ones(2), "y": torch.ones(3)}, ValueError, "one number of rows, got 2 in 'x' and 3 in 'y'"),
        ({"x": torch.ones(2, dtype=torch.bfloat16)}, ValueError, "column 'x' has no Arrow type for torch.bfloat16"),
        ({"x": torch.ones(2, dtype=torch.complex64)}, ValueError, "column 'x' has no Arrow type for torch.complex64"),
        ({"x": torch.ones(2, 0)}, ValueError, "column 'x' must have no dimension of size 0"),
        ({"x": np.ones(2, np.longdouble)}, ValueError, "column 'x' has no tensor for numpy's float128"),
        ({"x": 5}, TypeError, "column 'x' must be a tensor, a JaggedTensor, .* got int"),
        ({"x": ["a", 1]}, ValueError, "column 'x' cannot be made an Arrow array"),
        (
            {"x": JaggedTensor(torch.ones(2), torch.ones(2), lengths=torch.tensor([2]))},
            ValueError,
            "column 'x' must have no weights",
        ),
        (
            {"x": JaggedTensor(torch.ones(2), offsets=torch.tensor([0, 3]))},
            ValueError,
            "offsets of column 'x' must rise from 0 to the number of values, 2, got 0 to 3",
        ),
        ({"x": JaggedTensor(torch.ones(2), offsets=torch.tensor([0, 3, 2]))}, ValueError, "offsets of column 'x' must rise"),  # noqa: E501
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)  # fmt: skip
def test_what_cannot_become_a_batch(columns, error, text):
    with pytest.raises(error, match=text):
        to_record_batch(columns)
