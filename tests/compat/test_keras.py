"""``compat.keras`` against Keras itself: every output mode, kind of input, mask, salt and error."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from torchsparse_rec.compat import keras as ours
from torchsparse_rec.compat._parity.case import Case
from torchsparse_rec.compat._parity.compare import compare
from torchsparse_rec.compat._parity.evaluate import run_ours, run_tensorflow
from torchsparse_rec.compat.tensorflow import RaggedTensor, SparseTensor

pytestmark = pytest.mark.tensorflow

MODES = ("int", "one_hot", "multi_hot", "count")
WORDS = np.array([[b"a", b"b"], [b"", b"\xff\x00"]], dtype=object)
SPARSE = SparseTensor([[0, 0], [0, 1], [2, 0]], torch.tensor([5, 6, 7]), [3, 4])
INPUTS: dict[str, Any] = {
    "scalar": 5,
    "word": "a",
    "vector_of_one": [4],
    "one": [[1]],
    "rank_3_of_ones": [[[1], [1]], [[2], [3]]],
    "rank_4": np.arange(24).reshape(2, 3, 2, 2) % 5,
    "no_rows": np.zeros((0, 3), np.int32),
    "no_columns": np.zeros((2, 0), np.int32),
    "floats": [1.9, -2.7, 0.0, -0.0, 3e9],
    "doubles": np.array([1.9, -2.7, 1e18]),
    "tensor": torch.arange(-3, 5).reshape(4, 2),
    "bytes": np.array([[200, 3]], np.uint8),
    "sparse_words": SparseTensor([[0, 0], [0, 1], [2, 0]], np.array([b"5", b"6", b"5"], object), [3, 4]),
    "sparse_vector": SparseTensor([[0], [3]], torch.tensor([5, 6]), [4]),
    "ragged_words": RaggedTensor.from_row_splits(np.array([b"a", b"b"], object), [0, 0, 2]),
}


@pytest.fixture(scope="module")
def check(tensorflow: Any) -> Callable[..., None]:
    """Check that both layers give equal results, or that both raise an error."""

    def compared(layer: str, inputs: Any, **arguments: Any) -> None:
        case = Case(f"keras.layers.{layer}", arguments | {"inputs": inputs}, "", names=())
        assert compare(case, run_ours(case), run_tensorflow(case)).mismatches == []

    return compared


@pytest.mark.parametrize("name", INPUTS)
def test_hashing(check: Callable[..., None], subtests: pytest.Subtests, name: str) -> None:
    for mode, sparse in product(MODES, (False, True)):
        with subtests.test(f"{mode}, {sparse=}"):
            if sparse and name == "no_rows" and mode in ("multi_hot", "count"):
                layer = ours.Hashing(4, output_mode=mode, sparse=True)
                assert layer(INPUTS[name]).shape == (0, 4)  # Keras: an error of the count kernel
                continue
            check("Hashing", INPUTS[name], num_bins=4, output_mode=mode, sparse=sparse)
            check("Hashing", INPUTS[name], num_bins=7, output_mode=mode, sparse=sparse, salt=[-5, 2**63 - 1])


@pytest.mark.parametrize("bins", [1, 2, 5])
@pytest.mark.parametrize(
    ("mask", "inputs"),
    [
        (5, [5, 6, 7]),
        (5, np.array([5, 6], np.int64)),
        (5.5, [5.5, 5.0]),
        (5, [5.0, 5.5]),
        (0.1, np.array([0.1, 0.2], np.float32)),
        (0.1, np.array([0.1, 0.2], np.float64)),
        (2**63, np.array([1], np.int64)),
        ("a", WORDS),
        (b"a", ["a", "b"]),
        (True, [True, False]),
        (6, SPARSE),
        ("a", [1, 2]),
        (5, ["5"]),
        (1, [True, False]),
        (5.5, [5, 6]),
        (True, [1, 2]),
        (2**64 - 1, np.array([2**64 - 1, 5], np.uint64)),
        (300, np.array([44, 5], np.uint8)),
        (-1, np.array([255, 5], np.uint8)),
    ],
)
def test_masks(check: Callable[..., None], mask: Any, inputs: Any, bins: int) -> None:
    check("Hashing", inputs, num_bins=bins, mask_value=mask)
    check("Hashing", inputs, num_bins=bins, mask_value=mask, salt=3, output_mode="count")


@pytest.mark.parametrize("salt", [0, 3, -5, True, [1, 2], (1, -2), [1], 3.5, np.int64(3), [1, 2, 3]])
def test_salts(check: Callable[..., None], salt: Any) -> None:
    check("Hashing", [["a"], ["b"]], num_bins=1000, salt=salt)
    check("Hashing", [[1], [-2]], num_bins=1000, salt=salt)


@pytest.mark.parametrize("dtype", ["int32", "int64", "float32", "float64"])
@pytest.mark.parametrize("mode", MODES)
def test_dtypes(check: Callable[..., None], mode: str, dtype: str) -> None:
    check("Hashing", [[1, 2], [1, 1]], num_bins=3, output_mode=mode, dtype=dtype)
    check("HashedCrossing", ([1, 2], [1, 1]), num_bins=3, output_mode=mode, dtype=dtype)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("mode", ["int", "one_hot"])
@pytest.mark.parametrize(
    "inputs",
    [
        ([1], [2]),
        ([[1]], [[2]]),
        ("a", 2),
        (["a", "b"], [1, 2], [3, -4]),
        (np.array([1, 2], np.uint8), torch.tensor([2**62, -1])),
        (SPARSE, SPARSE),
    ],
    ids=str,
)
def test_hashed_crossing(check: Callable[..., None], inputs: Any, mode: str, sparse: bool) -> None:
    check("HashedCrossing", inputs, num_bins=5, output_mode=mode, sparse=sparse)


@pytest.mark.parametrize(
    "arguments",
    [{"num_bins": 0}, {"num_bins": -1}, {"num_bins": None}, {"num_bins": 3, "output_mode": "x"}]
    + [{"num_bins": 3, "sparse": True}, {"num_bins": 3, "dtype": "float32"}],
    ids=str,
)
def test_arguments_that_are_refused(check: Callable[..., None], arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="num_bins|output_mode|sparse|dtype"):
        ours.Hashing(**arguments)
    check("Hashing", [1], **arguments)


def test_configs_travel_both_ways(tensorflow: Any) -> None:
    import keras

    arguments = {"num_bins": 9, "salt": 4, "mask_value": "x", "name": "h"}
    own = ours.Hashing(**arguments)
    copy = ours.Hashing.from_config(keras.layers.Hashing(**arguments).get_config())
    assert copy.get_config() == own.get_config()
    assert keras.layers.Hashing.from_config(own.get_config()).get_config()["salt"] == [4, 4]
    assert copy(["a", "x"]).tolist() == keras.layers.Hashing.from_config(own.get_config())(["a", "x"]).numpy().tolist()
    crossing = ours.HashedCrossing(5, output_mode="one_hot", name="c")
    theirs_ = keras.layers.HashedCrossing(5, output_mode="one_hot", name="c")
    assert crossing.get_config() == theirs_.get_config()
    assert ours.HashedCrossing.from_config(theirs_.get_config()).get_config() == crossing.get_config()
    assert "num_bins=9" in repr(own)


def test_errors_name_the_argument() -> None:
    with pytest.raises(ValueError, match="num_bins must be an integer of at least 1, got '4'"):
        ours.Hashing("4")
    with pytest.raises(TypeError, match="mask_value must be a string like the inputs, got 5"):
        ours.Hashing(4, mask_value=5)(["5"])
    with pytest.raises(ValueError, match=r"inputs\[1\] must hold integers or strings, got torch.float32"):
        ours.HashedCrossing(4)(([1], [2.0]))
    with pytest.raises(ValueError, match=r"inputs must have equal shapes, got \[2\] and, in position 1, \[2, 1\]"):
        ours.HashedCrossing(4)(([1, 2], [[1], [2]]))
