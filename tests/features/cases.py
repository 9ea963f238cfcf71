"""What the tests of feature columns share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torchsparse_rec import features
from torchsparse_rec.features import FeatureTransform

IDENTITY = features.categorical_column_with_identity("x", 100)
HASHED = features.categorical_column_with_hash_bucket("x", 1000)
HASHED_INTEGERS = features.categorical_column_with_hash_bucket("x", 1000, "int64")
WORDS = features.categorical_column_with_vocabulary_list("x", ["a", "é", "c"])


def rows_of(x, key):
    return [row.tolist() for row in x[key].to_dense()]


def ids_of(column, values):
    """Return the ids that a single column makes of one raw feature, by example."""
    return rows_of(FeatureTransform([column])({column.features()[0]: values}).sparse, column.name)


def assert_same(one, other):
    leaves, again = ([y for y in torch.utils._pytree.tree_leaves(x) if y is not None] for x in (one, other))
    assert len(leaves) == len(again)
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(leaves, again, strict=True))


def every_operator_of(call: Callable[[], Any]) -> list[str]:
    """Return the names of the operators that a call calls: torch's, and those of libraries after the library's name."""
    names = []

    class Operators(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            names.append(function._schema.name.removeprefix("aten::"))
            return function(*args, **(kwargs or {}))

    with Operators():
        call()
    return names


def operators_of(call: Callable[[], Any]) -> list[str]:
    """Return the names of the library's operators that a call calls."""
    return [name.partition("::")[2] for name in every_operator_of(call) if name.startswith("torchsparse_rec::")]
