"""Every form of ids that modules take, as a KeyedJaggedTensor; and the batches that KeyedJaggedCollate makes."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader

from torchsparse_rec import JaggedTensor, KeyedJaggedCollate, KeyedJaggedTensor, ops
from torchsparse_rec.compat.tensorflow import RaggedTensor, SparseTensor
from torchsparse_rec.jagged.inputs import as_keyed_jagged_tensor
from torchsparse_rec.nn import lookup_sparse

Row = list[int]


def rows(x: JaggedTensor) -> list[Row]:
    return [row.tolist() for row in x.to_dense()]


def features(x: KeyedJaggedTensor) -> dict[str, list[Row]]:
    return {key: rows(x[key]) for key in x.keys()}


# ---- Tensors of compat.tensorflow ----------------------------------------------------------------------------------


def test_tensors_of_compat_are_rows() -> None:
    ragged = RaggedTensor.from_row_lengths([3, 1, 4], [2, 0, 1])
    for tensor in (ragged, ragged.to_sparse(), SparseTensor([[0, 1], [0, 5], [2, 0]], [3, 1, 4], [3, 9])):
        assert features(as_keyed_jagged_tensor({"f": tensor})) == {"f": [[3, 1], [], [4]]}
    with pytest.raises(ValueError, match=r"'f'.*must be \[N, 2\], \[N\] and of two sizes"):
        as_keyed_jagged_tensor({"f": SparseTensor([[0, 1, 0]], [3], [3, 9, 1])})
    with pytest.raises(TypeError, match="'f'.*must be a JaggedTensor"):
        as_keyed_jagged_tensor({"f": SparseTensor([[0, 1]], ["a"], [3, 9])})


def test_lookups_of_sparse_tensors() -> None:
    """Look up sparse tensors by the call that SparseOperationKit has."""
    table = torch.nn.Parameter(torch.arange(10.0).reshape(5, 2))
    ids = SparseTensor([[0, 0], [0, 3], [2, 1]], [3, 1, 4], [3, 4])
    weights = SparseTensor(ids.indices, [0.5, 2.0, 1.0], ids.dense_shape)
    (plain,) = lookup_sparse([table], [ids], ["sum"])
    assert plain.tolist() == [[8, 10], [0, 0], [8, 9]]
    assert lookup_sparse(table, ids, "sum", weights).tolist() == [[7, 9.5], [0, 0], [8, 9]]
    assert lookup_sparse(table, ids, "mean", weights.values).tolist()[2] == [8, 9]


# ---- Inputs ---------------------------------------------------------------------------------------------------------


class TheirJaggedTensor:
    """The methods of TorchRec's JaggedTensor by which the library recognises it."""

    def __init__(self, x: JaggedTensor) -> None:
        self.values, self.lengths, self.weights_or_none = x.values, x.lengths, x.weights_or_none


class TheirKeyedJaggedTensor:
    """The methods of TorchRec's KeyedJaggedTensor by which the library recognises it."""

    def __init__(self, x: KeyedJaggedTensor) -> None:
        for name in ("values", "lengths", "weights_or_none", "variable_stride_per_key", "inverse_indices_or_none"):
            setattr(self, name, getattr(x, name))
        for name in ("keys", "stride_per_key_per_rank", "length_per_key_or_none"):
            setattr(self, name, getattr(x, name))


ROWS = [[3, 1], [], [4, 1, 5]]
VALUES, OFFSETS = torch.tensor([3, 1, 4, 1, 5]), torch.tensor([0, 2, 2, 5])
JAGGED = JaggedTensor(VALUES, offsets=OFFSETS)
# Entries of the last row before those of the first, two of them in one place.
UNSORTED = torch.sparse_coo_tensor(
    torch.tensor([[2, 0, 2, 2, 0], [0, 0, 1, 1, 1]]), torch.tensor([4, 3, 1, 5, 1]), (3, 4), check_invariants=True
)
FORMS: dict[str, tuple[Any, list[Row]]] = {
    "jagged": (JAGGED, ROWS),
    "theirs": (TheirJaggedTensor(JAGGED), ROWS),
    "vector": (torch.tensor([3, 1, 4]), [[3], [1], [4]]),
    "matrix": (torch.tensor([[3, 1], [-1, 0], [4, 1]]), [[3, 1], [-1, 0], [4, 1]]),
    "matrix_transposed": (torch.tensor([[3, 1, 4], [1, 5, 9]]).T, [[3, 1], [1, 5], [4, 9]]),
    "no_columns": (torch.empty(3, 0, dtype=torch.int64), [[], [], []]),
    "nested": (ops.jagged_to_nested(VALUES, OFFSETS), ROWS),
    "pair": ((VALUES, OFFSETS), ROWS),
    "triple": (ops.jagged_to_sparse(VALUES, OFFSETS), ROWS),
    "triple_of_tensors": ((*ops.jagged_to_sparse(VALUES, OFFSETS)[:2], torch.tensor([3, 3])), ROWS),
    "coo": (UNSORTED, ROWS),
    "coo_coalesced": (torch.eye(3, dtype=torch.int64).to_sparse(), [[1], [1], [1]]),
}


@pytest.mark.parametrize(("feature", "wanted"), FORMS.values(), ids=FORMS)
def test_every_form_of_a_feature(feature: Any, wanted: list[Row]) -> None:
    x = as_keyed_jagged_tensor({"a": feature, "b": torch.tensor([7, 8, 9])})
    assert features(x) == {"a": wanted, "b": [[7], [8], [9]]}
    assert x.weights_or_none() is None and not x.variable_stride_per_key()


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_csr() -> None:
    csr = torch.sparse_csr_tensor(OFFSETS, torch.tensor([0, 1, 0, 1, 2]), VALUES, (3, 4), check_invariants=True)
    assert features(as_keyed_jagged_tensor({"a": csr})) == {"a": ROWS}


def test_weights_of_some_are_ones_for_the_others() -> None:
    weights = torch.tensor([0.5, 1, 2, 3, 4], dtype=torch.float64)
    x = as_keyed_jagged_tensor({"a": torch.tensor([7, 8, 9]), "b": (VALUES, OFFSETS, weights)})
    assert x["a"].weights().tolist() == [1, 1, 1] and x["b"].weights().tolist() == weights.tolist()
    assert x.weights().dtype == torch.float64


def test_keys_choose_and_order() -> None:
    given = {"a": JAGGED, "b": torch.tensor([7, 8, 9]), "c": torch.tensor([1])}
    assert features(as_keyed_jagged_tensor(given, ["b", "a"])) == {"b": [[7], [8], [9]], "a": ROWS}
    x = as_keyed_jagged_tensor(given)
    assert x.variable_stride_per_key() and x.stride_per_key() == [3, 3, 1]
    assert as_keyed_jagged_tensor(x) is x and as_keyed_jagged_tensor(x, ["a", "b", "c"]) is x
    chosen = as_keyed_jagged_tensor(x, ["c", "a"])
    assert chosen.keys() == ["c", "a"] and features(chosen) == {"c": [[1]], "a": ROWS}


@pytest.mark.parametrize("strides", [None, [[2], [4]]])
def test_their_keyed_jagged_tensor(strides: Any) -> None:
    x = KeyedJaggedTensor(
        ["a", "b"],
        torch.arange(8),
        torch.rand(8),
        lengths=torch.tensor([2, 0, 1, 1, 1, 3], dtype=torch.int32),
        stride_per_key_per_rank=strides,
        inverse_indices=(["a", "b"], torch.zeros(2, 4)),
    )
    same = as_keyed_jagged_tensor(TheirKeyedJaggedTensor(x))
    assert type(same) is KeyedJaggedTensor and features(same) == features(x)
    assert torch.equal(same.weights(), x.weights()) and same.inverse_indices()[0] == ["a", "b"]
    assert same.variable_stride_per_key() == x.variable_stride_per_key()
    assert as_keyed_jagged_tensor(TheirKeyedJaggedTensor(x), ["b"]).keys() == ["b"]


VALUE_ERRORS: dict[str, tuple[Any, str]] = {
    "missing": ({"b": VALUES}, r"input: features must have every key, got none named 'a' \(key 0\)"),
    "missing_of_kjt": (KeyedJaggedTensor.empty(), r"got none named 'a' \(key 0\)"),
    "floats": ({"a": VALUES.float()}, r"input\['a'\] must be int32 or int64, got torch.float32"),
    "booleans": ({"a": VALUES > 0, "b": VALUES}, r"input\['a'\] must be int32 or int64, got torch.bool"),
    "sum": ({"a": JaggedTensor(VALUES, lengths=OFFSETS)}, r"input\['a'\]: lengths must add up to .* 5, got 9"),
    "decreasing": (
        {"a": (VALUES, torch.tensor([0, 4, 3, 5]))},
        r"input\['a'\]: offsets must not decrease, got 4 followed by 3 at position 2, the end of example 1",
    ),
    "rank": ({"a": torch.ones(2, 2, 2)}, r"must have shape \[B\] or \[B, L\], got \[2, 2, 2\]"),
    "nested_rank": (
        {"a": ops.jagged_to_nested(torch.ones(5, 2), OFFSETS)},
        r"ids must have rank 1, got values of shape \[5, 2\]",
    ),
    "jagged_rank": ({"a": JaggedTensor(torch.ones(5, 2), offsets=OFFSETS)}, r"input\['a'\]: ids must have rank"),
    "offsets_dtype": ({"a": (VALUES, OFFSETS.float())}, r"input\['a'\]: offsets must be a vector of int32 or"),
    "weights": ({"a": (VALUES, OFFSETS, OFFSETS)}, r"input\['a'\]: weights must have one element for each"),
    "offsets_of_bags": ({"a": (VALUES, OFFSETS[:-1])}, "go from 0 to the number of values, 5, got 0 and 2"),
    "triple": ({"a": (torch.zeros(5, 3), VALUES, (3, 3, 3))}, r"got shapes \[5, 3\] and \[5\] and dense_sh"),
}
ERRORS: dict[str, tuple[type[Exception], Any, str]] = {
    **{name: (ValueError, *case) for name, case in VALUE_ERRORS.items()},
    "no_mapping": (TypeError, [VALUES], "input: features must be .*, got list: give {name: ids}"),
    "no_name": (TypeError, JaggedTensor(VALUES, offsets=OFFSETS), "got JaggedTensor: give KeyedJaggedTensor.from_jt_"),
    "list": (TypeError, {"a": [1, 2]}, r"input\['a'\]: must be a JaggedTensor, .* got list: torch.tensor\(...\)"),
    "lists": (TypeError, {"a": [[1], [2, 3]]}, r"got list: torch.nested.nested_tensor\(..., layout=torch.jagged\)"),
    "strings": (TypeError, {"a": ["x"]}, "got list: ops.to_hash_bucket_fast"),
    "array_of_strings": (TypeError, {"a": np.array(["x"])}, "got <U1: ops.to_hash_bucket_fast"),
    "keyed": (TypeError, {"a": KeyedJaggedTensor.empty()}, "got KeyedJaggedTensor: a collection such as"),
    "tuple": (TypeError, {"a": (VALUES,)}, "got a tuple of 1"),
}


@pytest.mark.parametrize(("kind", "given", "text"), ERRORS.values(), ids=ERRORS)
def test_errors_name_the_feature_and_what_it_is(kind: type[Exception], given: Any, text: str) -> None:
    with pytest.raises(kind, match=text):
        as_keyed_jagged_tensor(given, ["a"])


def test_inputs_are_compiled_in_one_graph() -> None:
    def function(values: Tensor, offsets: Tensor, dense: Tensor) -> Tensor:
        x = as_keyed_jagged_tensor({"a": (values, offsets), "b": dense, "c": JaggedTensor(values, offsets=offsets)})
        return ops.segment_sum(x.values().float(), offsets=x.offsets())

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=True)
    arguments = (VALUES, OFFSETS, torch.tensor([[1, 2], [3, 4], [5, 6]]))
    assert torch.equal(compiled(*arguments), function(*arguments))


# ---- Collating ------------------------------------------------------------------------------------------------------

MAKERS: list[Callable[[Row], Any]] = [list, tuple, np.array, torch.tensor, lambda row: np.array(row, np.int32)]
ENTRY = st.tuples(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=4), st.sampled_from(MAKERS))


@given(st.lists(st.tuples(ENTRY, ENTRY), min_size=1, max_size=5), st.booleans())
@settings(max_examples=60)
def test_collated_batches_are_their_examples(examples: list, as_lists: bool) -> None:
    wanted: dict[str, list[Row]] = {"a": [], "b": []}
    given = []
    for example in examples:
        made = {}
        for key, (row, maker) in zip("ab", example, strict=True):
            wanted[key].append(row)
            made[key] = None if not row and maker is torch.tensor else row[0] if len(row) == 1 else maker(row)
            made[key] = row if as_lists else made[key]
        given.append(made)
    x = KeyedJaggedCollate(["a", "b"])(given)["features"]
    assert features(x) == wanted and x.length_per_key_or_none() == [sum(map(len, wanted[key])) for key in "ab"]
    assert (x.values().dtype, x.lengths().dtype, x.weights_or_none()) == (torch.int64, torch.int64, None)


def test_collated_weights_and_other_entries() -> None:
    collate = KeyedJaggedCollate(["a", "b"], weighted=["b"], name="ids")
    batch = collate(
        [
            {"a": 7, "b": ([1, 2], torch.tensor([0.5, 2])), "label": 1, "text": "x"},
            {"a": np.int64(8), "b": None, "label": 0, "text": "y"},
            {"a": [], "b": (3, 4), "label": 1, "text": "z"},
        ]
    )
    assert features(batch["ids"]) == {"a": [[7], [8], []], "b": [[1, 2], [], [3]]}
    assert batch["ids"].weights().tolist() == [1, 1, 0.5, 2, 4] and batch["ids"].weights().dtype == torch.float32
    assert batch["label"].tolist() == [1, 0, 1] and batch["text"] == ["x", "y", "z"] and len(batch) == 3


@pytest.mark.always("the only one with processes of a DataLoader")
def test_collated_in_worker_processes() -> None:
    examples = [{"a": i, "b": list(range(i)), "label": float(i)} for i in range(7)]
    collate = pickle.loads(pickle.dumps(KeyedJaggedCollate(["a", "b"])))
    # Spawned, not forked: everything goes through pickle, as on Windows and macOS.
    loader = DataLoader(
        examples,  # type: ignore[arg-type]
        batch_size=4,
        collate_fn=collate,
        num_workers=2,
        multiprocessing_context="spawn",
    )
    batches = list(loader)
    assert [batch["label"].tolist() for batch in batches] == [[0, 1, 2, 3], [4, 5, 6]]
    assert features(batches[1]["features"]) == {"a": [[4], [5], [6]], "b": [list(range(i)) for i in (4, 5, 6)]}
    assert batches[0]["features"].length_per_key_or_none() == [4, 6]


def ids(*entries: Any, **options: Any) -> Callable[[], object]:
    return lambda: KeyedJaggedCollate(["a"], **options)([{"a": entry} for entry in entries])


COLLATE_ERRORS: dict[str, tuple[Callable[[], object], str]] = {
    "no_keys": (lambda: KeyedJaggedCollate([]), "at least one key, got none"),
    "keys_twice": (lambda: KeyedJaggedCollate(["a", "a"]), "distinct, got 'a' at 0 and at 1"),
    "weighted": (lambda: KeyedJaggedCollate(["a"], weighted=["b"]), r"weighted must name keys, \['a'\], got 'b'"),
    "no_examples": (ids(), "examples must have at least one element"),
    "missing": (lambda: KeyedJaggedCollate(["a"])([{"a": 1}, {}]), "the key 'a', got none at 1"),
    "name": (lambda: KeyedJaggedCollate(["a"])([{"a": 1, "features": 2}]), "no entry 'features'"),
    "float": (ids(1, [2], 1.5), "'a' must be integers in the range of int64, of rank 0 or 1, got 1.5 at 2"),
    "float_in_lists": (ids([1], [2, 0.5]), r"got \[2, 0.5\] at 1"),
    "bool": (ids([1], np.array([True])), r"got array\(\[ True\]\) at 1"),
    "string": (ids("x"), "got 'x' at 0"),
    "large": (ids(1, 2**63), "got 9223372036854775808 at 1"),
    "huge": (ids([1], [2**70]), r"got \[1180591620717411303424\] at 1"),
    "kinds": (ids(np.array([1]), np.array([1], np.uint64)), "got kinds of integers that have no common dtype"),
    "rank": (ids(np.array([1]), np.ones((1, 1), np.int64)), r"got array\(\[\[1\]\]\) at 1"),
    "rank_in_lists": (ids([1], [[2, 3], [4]]), r"got \[\[2, 3\], \[4\]\] at 1"),
    "no_pair": (ids(([1], [1.0]), [1, 2, 3], weighted=["a"]), r"a pair \(ids, weights\), got \[1, 2, 3\] at 1"),
    "weights_number": (ids(([1], [1.0]), ([1], []), weighted=["a"]), "as many weights as ids, got 0 for 1 at 1"),
    "weights_kind": (ids(([1], ["x"]), weighted=["a"]), r"the weights of 'a' must be numbers, .* got \['x'\] at 0"),
}


@pytest.mark.parametrize(("call", "text"), COLLATE_ERRORS.values(), ids=COLLATE_ERRORS)
def test_collate_errors_name_the_feature_and_the_example(call: Callable[[], object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        call()
