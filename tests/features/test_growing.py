"""Columns whose tables grow: their keys, their tables, their configurations, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import pytest
import torch

from torchsparse_rec import JaggedTensor, nn, variable
from torchsparse_rec.features import (
    Constant,
    FeatureTransform,
    categorical_column_with_embedding,
    categorical_column_with_hash_bucket,
    categorical_column_with_identity,
    embedding_column,
    indicator_column,
    sequence_categorical_column_with_identity,
    shared_embeddings,
)

OPTION = variable.EmbeddingVariableOption(
    filter_option=variable.CBFFilter(0, 1000, 0.01, torch.int8),
    evict_option=[variable.GlobalStepEvict(3), variable.LRUEvict(10)],
    init_option=variable.InitializerOption(initializer=Constant(0.5)),
)

PLAIN = variable.EmbeddingVariableOption()


def rows(ids: JaggedTensor) -> list[list[int]]:
    return [row.tolist() for row in ids.to_dense()]


def test_keys() -> None:
    """Integers are keys, strings' keys are hashes of 63 bits; alone and beside other columns of integers."""
    item, user = categorical_column_with_embedding("item", "int64"), categorical_column_with_embedding("user")
    shop = categorical_column_with_hash_bucket("shop", 9, "int64")
    batch = {"item": [10**12, -1, -7], "user": ["ann", "", "bob"], "shop": [3, 4, -1]}
    hashes = FeatureTransform([categorical_column_with_hash_bucket("user", 2**63 - 1)])(batch).sparse
    found = FeatureTransform([item, user, shop])(batch).sparse
    alone = FeatureTransform([item])(batch).sparse
    assert rows(found["item"]) == rows(alone["item"]) == [[10**12], [], [-7]]
    assert rows(found["user"]) == rows(hashes["user"]) and len(found["shop"].values()) == 2


def test_tables_grow() -> None:
    item = categorical_column_with_embedding("item", "int64", ev_option=OPTION)
    shop = categorical_column_with_identity("shop", 10**12)
    columns = [embedding_column(item, 2), embedding_column(shop, 2, "mean", Constant(2.0), ev_option=PLAIN)]
    transform = FeatureTransform(columns, linear_columns=[item])
    sparse = transform({"item": [10**12, -1], "shop": [7, 10**11]}).sparse
    assert [config.num_embeddings for config in transform.embedding_bag_configs()] == [1024, 1024]
    tables = nn.EmbeddingBagCollection(transform.embedding_bag_configs(), grad_mode="sparse")
    with torch.no_grad():
        pooled = tables(sparse).to_dict()
    assert pooled["item"].tolist() == [[0.5, 0.5], [0.0, 0.0]] and pooled["shop"].tolist() == [[2.0, 2.0]] * 2
    assert [table.total_count() for table in tables.embedding_bags.values()] == [1, 2]
    linear = nn.EmbeddingBagCollection(transform.linear_bag_configs())
    assert isinstance(linear.embedding_bags["item_weights"], nn.EmbeddingVariable)


def test_columns_share_a_table_that_grows() -> None:
    keys = [categorical_column_with_embedding(name, "int64", ev_option=OPTION) for name in ("seen", "bought")]
    (config,) = FeatureTransform(shared_embeddings(keys, 4)).embedding_bag_configs()
    assert config.feature_names == ["seen", "bought"] and config.ev_option == OPTION


def test_options_are_in_the_configuration() -> None:
    columns = [
        embedding_column(categorical_column_with_embedding("user", ev_option=OPTION), 4),
        embedding_column(categorical_column_with_identity("city", 9), 4, ev_option=OPTION),
        embedding_column(categorical_column_with_identity("shop", 9), 4),
    ]
    transform = FeatureTransform(columns)
    made = FeatureTransform.from_config(json.loads(json.dumps(transform.to_config())))
    assert made.columns == transform.columns and list(map(hash, made.columns)) == list(map(hash, transform.columns))


ITEM = categorical_column_with_embedding("item", "int64")
REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "options": (lambda: embedding_column(ITEM, 4, ev_option=3), "'item': ev_option must be None or an Embedding.*3"),
    "parts": (
        lambda: categorical_column_with_embedding("x", partition_num=4),  # type: ignore[arg-type]
        "'x': partition_num must be None, got 4: distributed.shard splits tables",
    ),
    "counts": (lambda: indicator_column(ITEM), "indicator_column: .* got the keys of a table that grows, 'item'"),
    "two initializers": (
        lambda: embedding_column(ITEM, 4, initializer=Constant(1.0), ev_option=OPTION),
        r"embedding_column 'item': initializer must be None where ev_option.init_option has one, got Constant",
    ),
    "sequence": (
        lambda: embedding_column(sequence_categorical_column_with_identity("s", 9), 4, ev_option=OPTION),
        "embedding_column 's': ev_option must be None for a sequence",
    ),
    "different options": (
        lambda: shared_embeddings([ITEM, categorical_column_with_embedding("b", "int64", ev_option=OPTION)], 4),
        "shared_embeddings: categorical_columns must be of one kind",
    ),
    "too large": (
        lambda: FeatureTransform([ITEM])({"item": np.array([1, 2**63 + 5], np.uint64)}),
        "column 'item': ids must be below 2\\*\\*63, got 9223372036854775813 at 1: view",
    ),
    "a function": (
        lambda: embedding_column(
            categorical_column_with_embedding(
                "x",
                ev_option=variable.EmbeddingVariableOption(
                    init_option=variable.InitializerOption(initializer=torch.nn.init.zeros_)
                ),
            ),
            4,
        ).to_config(),
        "ev_option: options must be numbers or have a to_config",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    make, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        make()
