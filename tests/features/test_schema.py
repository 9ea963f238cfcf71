"""Batches whose columns are like those of the batch before: they are not looked at again, and nothing else changes."""

from __future__ import annotations

import collections
import copy
import itertools
import pickle
import sys
from typing import Any

import pytest
import torch
from features.cases import assert_same

from torchsparse_rec import features
from torchsparse_rec.features import FeatureTransform
from torchsparse_rec.jagged import JaggedTensor


def transform(drop_missing: bool = True) -> FeatureTransform:
    """Make a transform of four columns of integers, which are one group, and of two with one default, another."""
    columns = [features.categorical_column_with_identity("a", 50)]
    columns += [features.categorical_column_with_hash_bucket(key, 40 + k, "int64") for k, key in enumerate("bc")]
    columns += [features.categorical_column_with_identity("d", 50)]
    columns += [features.categorical_column_with_identity(key, 9, 5) for key in "ef"]
    return FeatureTransform([*columns, features.numeric_column("n")], drop_missing=drop_missing)


def plain(size: int = 3) -> dict[str, Any]:
    return {key: torch.arange(size) + k for k, key in enumerate("abcdef")} | {"n": torch.ones(size)}


def other_batches() -> dict[str, dict[str, Any]]:
    """Return batches that differ from the plain one in one way."""
    grid = torch.arange(12).reshape(3, 4)
    rows = (torch.arange(5) - 1, torch.tensor([0, 1, 1, 5]))
    columns: dict[str, Any] = {
        "values": torch.tensor([7, 8, 9]),
        "missing values": torch.tensor([-1, 4, -2]),
        "int32": torch.tensor([4, -1, 2], dtype=torch.int32),
        "unsigned": torch.tensor([4, 255, 2], dtype=torch.uint8),
        "huge": torch.tensor([4, 2**63 - 1, 2], dtype=torch.uint64),
        "two a row": grid[:, :2],
        "none a row": grid[:, :0],
        "a view": grid.t()[0, :3],
        "an expanded view": torch.tensor([3]).expand(3),
        "a parameter": torch.nn.Parameter(torch.tensor([1, 2, 3]), requires_grad=False),
        "numpy": grid[:, 0].numpy(),
        "a list": [1, -1, 3],
        "nulls": [1, None, -1],
        "lists": [[1, 2], [], [-1]],
        "offsets": rows,
        "jagged": JaggedTensor(rows[0], offsets=rows[1]),
        "nested": torch.nested.nested_tensor([torch.tensor([1, -1]), torch.tensor([2])], layout=torch.jagged),
    }
    batches = {name: plain() | {key: x} for name, x in columns.items() for key in "c" if name != "nested"}
    batches |= {f"{name}, all": plain() | dict.fromkeys("abcdef", x) for name, x in columns.items() if name != "nested"}
    batches["nested"] = plain(2) | {"b": columns["nested"]}
    batches["more examples"] = plain(5)
    batches["no examples"] = plain(0)
    return batches


@pytest.mark.parametrize("drop_missing", [True, False])
def test_a_batch_gives_the_same_whatever_came_before(drop_missing: bool) -> None:
    kept = transform(drop_missing)
    for batch in other_batches().values():
        expected = transform(drop_missing)(batch)
        # Before it a plain batch, the same one, and after it a plain one.
        for _ in range(2):
            assert_same(kept(plain()), transform(drop_missing)(plain()))
            for _ in range(2):
                assert_same(kept(batch), expected)


def bad_batches() -> dict[str, dict[str, Any]]:
    """Return batches that are refused, by a part of the message."""
    return {
        "batch must have every feature, got none named 'b'": {k: x for k, x in plain().items() if k != "b"},
        "column 'c': must hold integers, got floats, torch.float32": plain() | {"c": torch.ones(3)},
        "column 'c': must hold integers, got bools": plain() | {"c": torch.ones(3) > 0},
        "column 'c': must hold integers, got strings": plain() | {"c": ["x", "y", "z"]},
        "column 'd': 'd' must be of shape": plain() | {"d": torch.ones(3, 1, 2, dtype=torch.int64)},
        "column 'a': a tensor must be strided": plain() | {"a": torch.tensor(3)},
        "column 'b': a tensor must be strided": plain() | {"b": torch.arange(3).to_sparse()},
        "got 3 in 'a' and 4 in 'c'": plain() | {"c": torch.arange(4)},
        "got 3 in 'a' and 4 in 'e'": plain() | {"e": torch.arange(4), "f": torch.arange(4)},
        "got 3 in 'a' and 4 in 'n'": plain() | {"n": torch.ones(4)},
        "got 3 in 'a' and 2 in 'e'": plain() | {key: torch.arange(2) for key in "ef"},
    }


@pytest.mark.parametrize("message", bad_batches())
def test_errors_are_those_of_a_first_batch(message: str) -> None:
    kept, batch = transform(), bad_batches()[message]
    for _ in range(2):
        kept(plain())
        found = []
        for one in (kept, transform()):
            with pytest.raises(ValueError) as error:
                one(batch)
            found.append(str(error.value))
        assert found[0] == found[1] and message in found[0]


def test_what_a_schema_depends_on_may_change() -> None:
    """Follow the option and the device of the module, and keep nothing in copies that they share."""
    batch = plain() | {key: torch.tensor([-1, 4, -2]) for key in "abce"}
    kept = transform()
    for drops in (True, False, True):
        kept.drop_missing = drops
        assert_same(kept(batch), transform(drops)(batch))
    for twin in (pickle.loads(pickle.dumps(kept)), copy.deepcopy(kept)):
        assert_same(twin(batch), transform()(batch))
    kept.drop_missing = False
    assert kept.to("meta")(batch).sparse.values().device.type == "meta"


def test_other_mappings_are_asked_once_for_each_feature() -> None:
    asked = []

    class Asked(collections.UserDict):
        def __getitem__(self, key: str) -> Any:
            asked.append(key)
            return super().__getitem__(key)

    kept = transform()
    for _ in range(2):
        asked.clear()
        assert_same(kept(Asked(plain())), transform()(plain()))
        assert sorted(asked) == sorted(plain())
    made = collections.defaultdict(lambda: torch.arange(3), plain())
    del made["b"]
    with pytest.raises(ValueError, match="got none named 'b'"):
        kept(made)


def test_a_batch_like_the_last_takes_few_calls() -> None:
    """Make at most 70 Python calls for 40 columns, and as many for 80."""
    counts = []
    for count, kinds in itertools.product((40, 80), ("identity", "hash")):
        keys = [f"c{k}" for k in range(count)]
        columns: list[Any] = [
            features.categorical_column_with_identity(key, 1000)
            if kinds == "identity"
            else features.categorical_column_with_hash_bucket(key, 1000 + k, "int64")
            for k, key in enumerate(keys)
        ]
        made = FeatureTransform(columns)
        batch = dict.fromkeys(keys, torch.arange(8))
        made(batch)
        calls = 0

        def count_call(frame: Any, event: str, argument: Any) -> None:
            nonlocal calls
            calls += event == "call"

        sys.setprofile(count_call)
        try:
            made(batch)
        finally:
            sys.setprofile(None)
        counts.append(calls)
    assert max(counts) <= 70 and len(set(counts)) == 1
