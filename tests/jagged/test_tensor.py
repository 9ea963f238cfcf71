"""JaggedTensor, KeyedJaggedTensor and KeyedTensor: compared with Python's lists, and what each refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from torchsparse_rec import JaggedTensor, KeyedJaggedTensor, KeyedTensor

VALUES, LENGTHS = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6]), torch.tensor([2, 0, 1, 1, 1, 3])
KEYS = ["user", "item"]

Row = list[int]


def rows(x: JaggedTensor | KeyedJaggedTensor) -> list[Row]:
    bounds = x.offsets().tolist()
    return [x.values()[a:b].tolist() for a, b in zip(bounds, bounds[1:], strict=False)]


def features(x: KeyedJaggedTensor) -> dict[str, list[Row]]:
    return {key: rows(x[key]) for key in x.keys()}


def jagged(given: list[Row], form: str = "lengths", dtype: torch.dtype = torch.int64) -> JaggedTensor:
    values = torch.tensor([i for row in given for i in row], dtype=torch.int64)
    lengths = torch.tensor([len(row) for row in given], dtype=dtype)
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0, dtype=dtype)])
    both = {"lengths": lengths, "offsets": offsets}
    # The weight of an id is a tenth of it, so that a wrong order of either shows.
    return JaggedTensor(values, values / 10, **(both if form == "both" else {form: both[form]}))


def keyed(given: dict[str, list[Row]], form: str = "lengths", dtype: torch.dtype = torch.int64) -> KeyedJaggedTensor:
    all_rows = jagged([row for of_key in given.values() for row in of_key], form, dtype)
    sizes = [len(of_key) for of_key in given.values()]
    varies = {"stride_per_key_per_rank": [[size] for size in sizes]} if len(set(sizes)) > 1 else {}
    return KeyedJaggedTensor(
        list(given),
        all_rows.values(),
        all_rows.weights(),
        lengths=all_rows.lengths() if form != "offsets" else None,
        offsets=all_rows.offsets() if form != "lengths" else None,
        **varies,
    )


def weights_follow(x: JaggedTensor | KeyedJaggedTensor) -> bool:
    return torch.equal(x.weights(), x.values() / 10)


ROWS = st.lists(st.lists(st.integers(-99, 99), max_size=4), max_size=5)
FORMS = st.sampled_from(["lengths", "offsets", "both"])
DTYPES = st.sampled_from([torch.int32, torch.int64])


@st.composite
def keyed_rows(draw: st.DrawFn) -> dict[str, list[Row]]:
    """Draw one to four features, often of one batch size."""
    count, size = draw(st.integers(1, 4)), draw(st.integers(0, 4))
    sizes = draw(st.one_of(st.just([size] * count), st.lists(st.integers(0, 4), min_size=count, max_size=count)))
    row = st.lists(st.integers(-99, 99), max_size=3)
    return {f"key{i}": draw(st.lists(row, min_size=n, max_size=n)) for i, n in enumerate(sizes)}


# ---- JaggedTensor ---------------------------------------------------------------------------------------------------


@given(ROWS, FORMS, DTYPES)
@settings(max_examples=60)
def test_jagged_tensor_is_its_rows(given: list[Row], form: str, dtype: torch.dtype) -> None:
    x = jagged(given, form, dtype)
    sizes = [len(row) for row in given]
    assert (x.lengths_or_none() is None) == (form == "offsets")
    assert (x.offsets_or_none() is None) == (form == "lengths")
    assert x.lengths().tolist() == sizes and rows(x) == given
    assert x.lengths_or_none() is x.lengths() and x.offsets_or_none() is x.offsets()
    assert x.lengths().dtype == dtype and x.offsets().dtype == (torch.int64 if form == "lengths" else dtype)
    assert [row.tolist() for row in x.to_dense()] == given
    weights = x.to_dense_weights()
    assert weights is not None and all(torch.equal(w, v / 10) for w, v in zip(weights, x.to_dense(), strict=True))
    width = max(sizes, default=0)
    assert x.to_padded_dense(padding_value=-100).tolist() == [row + [-100] * (width - len(row)) for row in given]
    assert x.to_padded_dense(2).tolist() == [(row + [0, 0])[:2] for row in given]
    padded = x.to_padded_dense_weights(2, 0.5)
    assert padded is not None and padded.shape == (len(given), 2)
    if given:
        back = JaggedTensor.from_dense_lengths(x.to_padded_dense(), x.lengths(), x.to_padded_dense_weights())
        again = JaggedTensor.from_dense(x.to_dense(), x.to_dense_weights())
        assert rows(back) == rows(again) == given and weights_follow(back) and weights_follow(again)


def test_jagged_tensor_of_vectors() -> None:
    x = JaggedTensor(torch.arange(6.0).reshape(3, 2).requires_grad_(), lengths=torch.tensor([1, 2]))
    assert x.weights_or_none() is None and x.to_dense_weights() is None and x.to_padded_dense_weights() is None
    assert x.to_padded_dense().tolist() == [[[0, 1], [0, 0]], [[2, 3], [4, 5]]]
    x.to_padded_dense().sum().backward()
    assert torch.equal(x.values().grad, torch.ones(3, 2))  # type: ignore[arg-type]


def test_empty() -> None:
    x = JaggedTensor.empty(is_weighted=True, values_dtype=torch.int64, weights_dtype=torch.float64)
    assert (x.values().dtype, x.weights().dtype, x.lengths().dtype) == (torch.int64, torch.float64, torch.int32)
    assert rows(x) == [] and x.offsets().tolist() == [0]
    y = KeyedJaggedTensor.empty(lengths_dtype=torch.int64)
    assert y.keys() == [] and y.stride() == 0 and y.offset_per_key() == [0] and y.to_dict() == {}
    like = KeyedJaggedTensor.empty_like(keyed({"a": [[1], [2, 3]]}))
    assert like.stride() == 2 and like.keys() == [] and like.weights().numel() == 0
    assert like.values().dtype == torch.int64 and like.split([]) == []


# ---- KeyedJaggedTensor ----------------------------------------------------------------------------------------------


@given(keyed_rows(), FORMS, DTYPES)
@settings(max_examples=60)
def test_keyed_jagged_tensor_is_its_rows(given: dict[str, list[Row]], form: str, dtype: torch.dtype) -> None:
    x = keyed(given, form, dtype)
    sizes = [len(of_key) for of_key in given.values()]
    items = [sum(map(len, of_key)) for of_key in given.values()]
    assert x.keys() == list(given) and x.index_per_key() == {key: i for i, key in enumerate(given)}
    assert x.stride_per_key() == sizes and x.stride() == max(sizes)
    assert x.stride_per_key_per_rank() == [[size] for size in sizes]
    assert x.variable_stride_per_key() == (len(set(sizes)) > 1)
    assert (x.length_per_key_or_none() is None) == (x.offset_per_key_or_none() is None) == (len(given) > 1)
    assert x.length_per_key() == items and x.offset_per_key() == [sum(items[:i]) for i in range(len(items) + 1)]
    assert x.length_per_key_or_none() == items and x.offset_per_key_or_none() == x.offset_per_key()
    assert x.lengths_offset_per_key() == [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    assert features(x) == given and {key: rows(y) for key, y in x.to_dict().items()} == given
    assert all(weights_follow(y) for y in x.to_dict().values())
    assert features(KeyedJaggedTensor.from_jt_dict(x.to_dict())) == given


@given(keyed_rows(), FORMS, st.booleans(), st.data())
@settings(max_examples=60)
def test_split_permute_concat(given: dict[str, list[Row]], form: str, synced: bool, data: st.DataObject) -> None:
    x = keyed(given, form)
    x = x.sync() if synced else x.unsync()
    keys = list(given)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(keys)), max_size=3)))
    bounds = list(zip([0, *cuts], [*cuts, len(keys)], strict=True))
    parts = x.split([b - a for a, b in bounds])
    assert [part.keys() for part in parts] == [keys[a:b] for a, b in bounds]
    for part in parts:
        assert features(part) == {key: given[key] for key in part.keys()} and weights_follow(part)
        assert part.keys() == [] or part.stride_per_key() == [len(given[key]) for key in part.keys()]
    whole = KeyedJaggedTensor.concat(parts)
    assert features(whole) == given and list(features(whole)) == keys and weights_follow(whole)
    order = data.draw(st.lists(st.sampled_from(range(len(keys))), unique=True))
    chosen = x.permute(order)
    assert features(chosen) == {keys[i]: given[keys[i]] for i in order} and weights_follow(chosen)
    assert chosen.keys() == [keys[i] for i in order]
    assert chosen.length_per_key() == [x.length_per_key()[i] for i in order]


@given(keyed_rows(), FORMS, st.data())
@settings(max_examples=40)
def test_places_of_a_permutation_without_reading_back(given: dict[str, list[Row]], form: str, data: Any) -> None:
    """Run on the CPU the code that replaces a read-back on CUDA."""
    x = keyed(given, form)
    order = data.draw(st.permutations(range(len(given))))
    assert torch.equal(x.values()[x._places(order)], x.permute(order).values())


def test_batch_sizes_by_key_and_rank() -> None:
    x = KeyedJaggedTensor.from_lengths_sync(
        KEYS, VALUES, LENGTHS, stride_per_key_per_rank=[[1, 1], [3, 1]], inverse_indices=(KEYS, torch.zeros(2, 4))
    )
    assert features(x) == {"user": [[3, 1], []], "item": [[4], [1], [5], [9, 2, 6]]}
    assert x.stride_per_key_per_rank() == [[1, 1], [3, 1]] and x.stride() == 4 and x.length_per_key_or_none() == [2, 6]
    assert x.inverse_indices()[0] == KEYS and x.permute([1, 0]).stride_per_key_per_rank() == [[3, 1], [1, 1]]
    assert x.permute([1, 0]).inverse_indices_or_none() is None
    for same in ({"stride_per_key": [2, 4]}, {"stride_per_key_per_rank": torch.tensor([[1, 1], [1, 3]])}):
        y = KeyedJaggedTensor(KEYS, VALUES, offsets=x.offsets(), **same)  # type: ignore[arg-type]
        assert features(y) == features(x) and y.stride_per_key() == [2, 4]
    equal = KeyedJaggedTensor.concat(KeyedJaggedTensor(KEYS, VALUES, lengths=LENGTHS).split([1, 1]))
    assert not equal.variable_stride_per_key() and equal.flatten_lengths() is equal


def test_lengths_by_key_are_known_without_reading_back() -> None:
    parts = KeyedJaggedTensor.from_offsets_sync(KEYS, VALUES, jagged([[]] * 5 + [[1] * 8]).offsets()).split([1, 1])
    assert [part.length_per_key_or_none() for part in parts] == [[0], [8]]
    assert KeyedJaggedTensor.concat(parts).length_per_key_or_none() == [0, 8]
    assert KeyedJaggedTensor.from_jt_dict({"a": parts[1]["item"], "b": parts[0]["user"]})._length_per_key == [8, 0]
    unsynced = KeyedJaggedTensor(KEYS, VALUES, lengths=LENGTHS)
    assert unsynced.split([0, 2, 0])[1].length_per_key_or_none() is None
    assert unsynced.sync() is unsynced and unsynced.length_per_key_or_none() == [3, 5]
    assert unsynced.unsync().length_per_key_or_none() is None
    assert KeyedJaggedTensor(KEYS, VALUES, lengths=LENGTHS, length_per_key=[3, 5]).offset_per_key() == [0, 3, 8]


def test_weights_keep_their_gradient() -> None:
    weights = torch.rand(8, requires_grad=True)
    x = KeyedJaggedTensor(KEYS, VALUES, weights, LENGTHS)
    (x.permute([1, 0])["item"].weights().sum() * 2 + x["user"].weights().sum()).backward()
    assert weights.grad is not None and weights.grad.tolist() == [1] * 3 + [2] * 5


# ---- KeyedTensor ----------------------------------------------------------------------------------------------------


def test_keyed_tensor() -> None:
    parts = [torch.arange(6.0).reshape(3, 2), torch.arange(3.0).reshape(3, 1), torch.empty(3, 0)]
    x = KeyedTensor.from_tensor_list(["a", "b", "c"], parts)
    assert x.keys() == ["a", "b", "c"] and x.key_dim() == 1 and x.device().type == "cpu"
    assert x.length_per_key() == [2, 1, 0] and x.offset_per_key() == [0, 2, 3, 3]
    for key, part in zip(x.keys(), parts, strict=True):
        assert torch.equal(x[key], part) and torch.equal(x.to_dict()[key], part)
    other = KeyedTensor(["d"], [3], torch.ones(3, 3))
    grouped = KeyedTensor.regroup_as_dict([x, other], [["d", "a"], ["b"], ["a"]], ["one", "two", "three"])
    assert torch.equal(grouped["one"], torch.cat([torch.ones(3, 3), parts[0]], 1))
    assert torch.equal(grouped["two"], parts[1]) and torch.equal(grouped["three"], parts[0])
    first = KeyedTensor.from_tensor_list(["a", "b"], [torch.zeros(2), torch.ones(1)], key_dim=0, cat_dim=0)
    assert first.key_dim() == 0 and first["b"].tolist() == [1]
    assert KeyedTensor([], [], torch.empty(3, 0)).to_dict() == {} and KeyedTensor.regroup([], []) == []


# ---- Errors ---------------------------------------------------------------------------------------------------------


def kjt(keys: Any = KEYS, values: Any = VALUES, weights: Any = None, **others: Any) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(keys, values, weights, **(others or {"lengths": LENGTHS}))


def strided(strides: Any, **others: Any) -> KeyedJaggedTensor:
    return kjt(lengths=LENGTHS, stride_per_key_per_rank=strides, **others)


X = kjt()
PAIR = KeyedTensor(["a", "b"], [1, 1], torch.ones(3, 2))
FLOATS: Tensor = torch.ones(6)
VALUE_ERRORS: dict[str, tuple[Callable[[], object], str]] = {
    "neither": (lambda: JaggedTensor(VALUES), "JaggedTensor: lengths or offsets must be given, got neither"),
    "values_scalar": (lambda: JaggedTensor(VALUES[0], lengths=LENGTHS), "rank >= 1, got a scalar"),
    "values_rank": (lambda: kjt(values=VALUES.reshape(4, 2)), r"values must have rank 1, got shape \[4, 2\]"),
    "weights_number": (lambda: kjt(weights=FLOATS), r"each of the 8 values, got shape \[6\]"),
    "weights_rank": (lambda: kjt(weights=torch.ones(8, 1)), r"weights must have rank 1, got shape \[8, 1\]"),
    "weights_missing": (lambda: X.weights(), "KeyedJaggedTensor.weights: it was made without weights"),
    "weights_device": (lambda: kjt(weights=torch.ones(8, device="meta")), "on the device of values, cpu, got"),
    "lengths_dtype": (lambda: kjt(lengths=FLOATS), r"lengths must be a vector of int32 or int64, got torch.f"),
    "lengths_rank": (lambda: kjt(lengths=LENGTHS.reshape(2, 3)), r"got torch.int64 of shape \[2, 3\]"),
    "offsets_none": (lambda: kjt(offsets=LENGTHS[:0]), "offsets must have at least one element"),
    "offsets_number": (lambda: kjt(offsets=LENGTHS, lengths=LENGTHS), "one element more than lengths, 7, got 6"),
    "rows": (lambda: kjt(["a", "b", "c", "d"]), r"number of rows for each of the 4 keys \['a', .*got 6 rows"),
    "rows_of_offsets": (lambda: kjt(offsets=LENGTHS), "offsets must have the same number of rows .* got 5 rows"),
    "rows_without_keys": (lambda: kjt([]), "must have no rows when there are no keys, got 6"),
    "stride": (lambda: kjt(lengths=LENGTHS, stride=2), r"stride rows for each key, 2 \* 2, got 6"),
    "keys_twice": (lambda: kjt(["a", "b", "a"]), "keys must be distinct, got 'a' at 0 and at 2"),
    "strides_and_stride": (
        lambda: strided([[3], [3]], stride=3),
        "stride must not be given with stride_per_key or stride_per_key_per_rank, got 3",
    ),
    "strides_number": (lambda: strided([[6]]), "batch sizes must be given for each of the 2 keys, got 1"),
    "strides_sum": (lambda: strided([[2], [1, 2]]), r"batch sizes must add up to the rows of lengths, 6, got \[2, 3\]"),
    "strides_negative": (lambda: strided([[2], [5, -1]]), r"sizes that are not negative, got \[5, -1\] at 1"),
    "strides_flat": (lambda: strided([2, 4]), "stride_per_key_per_rank must have lists of sizes .*, got 2 at 0"),
    "strides_of_keys": (
        lambda: strided([[1, 1], [4]], stride_per_key=[3, 3]),
        r"must be the sums of stride_per_key_per_rank, \[2, 4\], got \[3, 3\]",
    ),
    "length_per_key": (
        lambda: kjt(lengths=LENGTHS, length_per_key=[3, 4]),
        r"add up to the number of values, 8, got \[3, 4\]",
    ),
    "sum": (lambda: kjt(values=VALUES[:7]).sync(), "lengths must add up to the number of values, 7, got 8"),
    "inverse_missing": (lambda: X.inverse_indices(), "made without inverse_indices"),
    "split": (lambda: X.split([1, 2]), r"add up to the number of keys, 2, got \[1, 2\]"),
    "split_negative": (lambda: X.split([3, -1]), r"got \[3, -1\]"),
    "permute_twice": (lambda: X.permute([1, 1]), "indices must be distinct, got 1 twice, last at 1"),
    "concat_none": (lambda: KeyedJaggedTensor.concat([]), "at least one element, got none"),
    "concat_twice": (lambda: KeyedJaggedTensor.concat([X, X]), "distinct, got 'user' at 0 and at 2"),
    "concat_weights": (
        lambda: KeyedJaggedTensor.concat([X, kjt(["a", "b"], weights=torch.ones(8))]),
        "got one with weights at 1 and one without at 0",
    ),
    "dict_none": (lambda: KeyedJaggedTensor.from_jt_dict({}), "at least one feature, got none"),
    "dense_none": (lambda: JaggedTensor.from_dense([]), "at least one row, got none"),
    "dense_weights": (lambda: JaggedTensor.from_dense([VALUES], [FLOATS]), r"of values, \[8\], got \[6\]"),
    "dense_lengths": (
        lambda: JaggedTensor.from_dense_lengths(VALUES.reshape(4, 2), LENGTHS),
        r"values must be \[S, L, ...\] and lengths \[S\], got shapes \[4, 2\] and \[6\]",
    ),
    "dense_lengths_weights": (
        lambda: JaggedTensor.from_dense_lengths(VALUES.reshape(4, 2), LENGTHS[:4], torch.ones(4, 3)),
        r"weights must have the first two sizes of values, \[4, 2\], got shape \[4, 3\]",
    ),
    "kt_number": (lambda: KeyedTensor(["a"], [1, 1], torch.ones(3, 2)), r"each of the 1 keys, got \[1, 1\]"),
    "kt_sum": (lambda: KeyedTensor(["a"], [1], torch.ones(3, 2)), r"in dimension 1, 2, got \[1\]"),
    "kt_dim": (lambda: KeyedTensor(["a"], [1], FLOATS), "a dimension of values, 0 to 0, got 1"),
    "kt_list": (lambda: KeyedTensor.from_tensor_list(["a"], []), "got 0 for 1 keys"),
    "kt_cat_dim": (lambda: KeyedTensor.from_tensor_list(["a", "b"], [FLOATS, FLOATS], 0), "key_dim, 0, got 1"),
    "group_key": (lambda: KeyedTensor.regroup([PAIR], [["a"], ["b", "c"]]), r"got 'c' at \[1\]\[1\], which none"),
    "group_twice": (lambda: KeyedTensor.regroup([PAIR, PAIR], [["a"]]), r"'a' at \[0\]\[0\], which several"),
    "group_empty": (lambda: KeyedTensor.regroup([PAIR], [["a"], []]), "at least one key each, got none at 1"),
    "group_names": (lambda: KeyedTensor.regroup_as_dict([PAIR], [["a"]], []), "as many as groups, 1, got 0"),
    "group_dims": (
        lambda: KeyedTensor.regroup([PAIR, KeyedTensor(["c"], [3], torch.ones(3, 1), 0)], [["a"]]),
        r"the same key_dim, got \[1, 0\]",
    ),
}
ERRORS: dict[str, tuple[type[Exception], Callable[[], object], str]] = {
    **{name: (ValueError, *case) for name, case in VALUE_ERRORS.items()},
    "values_type": (TypeError, lambda: kjt(values=[1]), "values must be a tensor, got list"),
    "offsets_type": (TypeError, lambda: kjt(offsets=[0, 1]), "offsets must be a tensor, got list"),
    "keys_type": (TypeError, lambda: kjt(["a", 7]), "keys must be strings, got 7 at 1"),
    "keys_string": (TypeError, lambda: kjt("ab"), "keys must be a list of strings, got the string 'ab'"),
    "no_key": (KeyError, lambda: X["users"], r"no key 'users', only \['user', 'item'\]"),
    "permute_range": (IndexError, lambda: X.permute([0, 2]), r"indices must be in \[0, 2\), got 2 at 1"),
    "kt_no_key": (KeyError, lambda: PAIR["c"], r"no key 'c', only \['a', 'b'\]"),
}


@pytest.mark.parametrize(("kind", "call", "text"), ERRORS.values(), ids=ERRORS)
def test_errors_name_the_argument_and_the_value(kind: type[Exception], call: Callable[[], object], text: str) -> None:
    with pytest.raises(kind, match=text):
        call()


# ---- Arguments that say the same -------------------------------------------------------------------------------------

FIVE = torch.tensor([1, 1, 1, 0, 0, 1, 1, 1, 1, 1])  # of each of two keys
CONTRADICTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "of other keys": (
        {"length_per_key": [5, 3]},
        r"length_per_key must be that of the keys' rows, \[3, 5\], got \[5, 3\]",
    ),
    "negative": ({"length_per_key": [-1, 9]}, r"length_per_key must have 2 lengths .* 8, got \[-1, 9\]"),
    "of other rows": ({"offset_per_key": [0, 5, 8]}, r"offset_per_key must be that .* \[0, 3, 8\], got \[0, 5, 8\]"),
    "other batches": ({"stride_per_key": [6, 4], "length_per_key": [3, 5]}, r"keys' rows, \[4, 4\], got \[3, 5\]"),
    "offsets": (
        {"offsets": torch.tensor([0, 1, 2, 3, 3, 4, 4, 5, 6, 7, 8])},
        r"must say the same, got offsets \[3, 4\] around row 4 and lengths \[0\]: give one of them",
    ),
    "offsets that begin later": (
        {"offsets": torch.tensor([1, 2, 3, 4, 4, 4, 5, 6, 7, 8, 9])},
        r"offsets \[1, 2\] around row 0",
    ),
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_arguments_that_contradict_each_other_are_refused(case: str) -> None:
    options, text = CONTRADICTIONS[case]
    with pytest.raises(ValueError, match=text):
        KeyedJaggedTensor(["user", "item"], torch.arange(8), lengths=FIVE, **options)


def test_arguments_that_agree_are_taken() -> None:
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), FIVE.cumsum(0)])
    both = {"lengths": FIVE.int(), "offsets": offsets}
    for rows in (both, {"offsets": offsets}, {"lengths": FIVE}):
        x = KeyedJaggedTensor(["a", "b"], torch.arange(8), **rows, length_per_key=[3, 5], offset_per_key=[0, 3, 8])
        assert x.length_per_key() == [3, 5] and torch.equal(x.lengths().long(), FIVE)
        assert torch.equal(JaggedTensor(torch.arange(8), **rows).offsets(), offsets)
    with pytest.raises(ValueError, match="JaggedTensor: lengths and offsets must say the same"):
        JaggedTensor(torch.arange(8), lengths=FIVE.flip(0), offsets=offsets)
    assert KeyedJaggedTensor([], torch.zeros(0), lengths=FIVE[:0], offsets=offsets[:1], length_per_key=[]).keys() == []
