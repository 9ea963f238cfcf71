"""What the tests of feature columns share."""

from __future__ import annotations

import torch

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
