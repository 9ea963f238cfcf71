"""Real data through the columns: MovieLens 100K, and rows of Criteo with all their missing values."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from torchsparse_rec import features, ops
from torchsparse_rec.features import FeatureTransform
from torchsparse_rec.nn import EmbeddingBagCollection


def data(*parts: str) -> Path:
    """Return a path in the data folder; skip the test if there is none, but CI must have it."""
    folder = os.environ.get("TORCHSPARSE_REC_DATA")
    if folder is None:
        pytest.skip("TORCHSPARSE_REC_DATA is not set")
    return Path(folder, *parts)


def test_movielens():
    ratings = np.loadtxt(data("ml-100k", "u.data"), dtype=np.int64)
    batches = [dict(zip(("user", "item", "rating", "time"), x.T, strict=True)) for x in np.array_split(ratings, 25)]
    hour = features.numeric_column("time")
    days = features.bucketized_column(hour, num_bins=10)
    user = features.categorical_column_with_vocabulary_list("user", dtype="int64")
    item = features.categorical_column_with_vocabulary_list("item", dtype="int64", max_tokens=1000, num_oov_buckets=5)
    stars = features.numeric_column("rating", normalizer_fn=features.Standardize())
    transform = FeatureTransform(
        [features.embedding_column(user, 8), features.embedding_column(item, 8), stars, days],
        linear_columns=[features.crossed_column([user, days], 10_000)],
    ).adapt(batches)
    assert [x.num_embeddings for x in transform.embedding_bag_configs()] == [943, 1005]
    counts = np.bincount(ratings[:, 1])
    found = transform.columns[1].categorical_column.vocabulary_list
    assert found[0] == counts.argmax() and list(counts[list(found)]) == sorted(counts[list(found)], reverse=True)
    assert transform.columns[2].normalizer_fn.mean == pytest.approx((ratings[:, 2].mean(),))
    assert transform.columns[2].normalizer_fn.variance == pytest.approx((ratings[:, 2].var(),))
    whole = transform({name: ratings[:, k] for k, name in enumerate(("user", "item", "rating", "time"))})
    assert float(whole.dense[:, 0].mean()) == pytest.approx(0, abs=1e-5)
    per_day = whole.dense[:, 1:].sum(0) / len(ratings)
    assert float(per_day.min()) > 0.07 and float(per_day.max()) < 0.13
    words = np.array(transform.columns[0].categorical_column.vocabulary_list)
    assert np.array_equal(words[whole.sparse["user"].values().numpy()], ratings[:, 0])
    unknown = whole.sparse["item"].values() >= 1000
    assert np.array_equal(unknown.numpy(), ~np.isin(ratings[:, 1], found))
    assert EmbeddingBagCollection(transform.embedding_bag_configs())(whole.sparse).values().shape == (100_000, 16)


def criteo() -> dict[str, list]:
    """Return 1,000 rows: the label, 13 integers and 26 hexadecimal words, None for a missing integer."""
    lines = data("criteo-sample", "train.txt").read_text().split("\n")
    rows = [(line.split("\t") + [""] * 40)[:40] for line in lines if line]
    columns = list(zip(*rows, strict=True))
    batch: dict[str, list] = {f"I{k}": [int(x) if x else None for x in columns[k]] for k in range(1, 14)}
    batch |= {f"C{k}": list(columns[13 + k]) for k in range(1, 27)}
    return batch


def test_criteo():
    batch = criteo()
    integers = [features.numeric_column(f"I{k}", default_value=-2) for k in range(1, 14)]
    buckets = [features.bucketized_column(x, [-1.5, 0.5, 1.5, 4.5, 16.5, 64.5]) for x in integers]
    hashed = [features.categorical_column_with_hash_bucket(f"C{k}", 1000 + k) for k in range(1, 14)]
    listed = [
        features.categorical_column_with_vocabulary_list(f"C{k}", num_oov_buckets=1, max_tokens=50)
        for k in range(14, 27)
    ]
    transform = FeatureTransform([features.embedding_column(x, 4) for x in [*buckets, *hashed, *listed]])
    made = transform.adapt([batch])(batch)
    for k in range(1, 14):
        values = batch[f"I{k}"]
        expected = [0 if x is None or x < -1 else 1 + sum(x > limit for limit in (0, 1, 4, 16, 64)) for x in values]
        assert made.sparse[f"I{k}_bucketized"].values().tolist() == expected
        words = [x for x in batch[f"C{k}"] if x]
        assert made.sparse[f"C{k}"].values().tolist() == ops.to_hash_bucket_fast(words, 1000 + k).tolist()
        assert made.sparse[f"C{k}"].lengths().tolist() == [int(x != "") for x in batch[f"C{k}"]]
    for column in transform.columns[26:]:
        key, words = column.categorical_column.key, column.categorical_column.vocabulary_list
        place = {word: k for k, word in enumerate(words)}
        expected = [place.get(x, len(words)) for x in batch[key] if x]
        assert made.sparse[key].values().tolist() == expected
    bags = EmbeddingBagCollection(transform.embedding_bag_configs())
    assert bool(torch.isfinite(bags(made.sparse).values()).all())
