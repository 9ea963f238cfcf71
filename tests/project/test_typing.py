"""The words of torchsparse_rec.typing are those that arguments take when a program runs."""

from __future__ import annotations

import importlib
from typing import Any, get_args

import pytest

from torchsparse_rec import typing

WORDS = [
    ("GradMode", "nn.grad_mode", "GRAD_MODES", {None}),
    ("Pooling", "_reduction", "POOLING", set()),
    ("Combiner", "_reduction", "COMBINERS", set()),
    ("PartitionStrategy", "ops.embedding_lookup", "_STRATEGIES", set()),
    ("InitialKind", "ops.table_rows", "INITIAL_KINDS", set()),
    ("RowsFormat", "ops.quantized", "ROW_FORMATS", set()),
    ("ExampleDtype", "ops.record_examples", "_DTYPES", set()),
    ("FileFormat", "data.convert", "FORMATS", set()),
    ("RatingsLayout", "data.movielens", "LAYOUTS", set()),
    ("SparseTextLayout", "data.libsvm", "LAYOUTS", set()),
    ("RecordCompression", "data.tfrecord", "_COMPRESSIONS", {None, "auto"}),
    ("RecordCompression", "data._tfrecord_blocks", "_WINDOW_BITS", set()),
    ("Verify", "data._prebatched_file", "VERIFY", set()),
    ("CheckpointKind", "checkpoint.manifest", "KINDS", set()),
    ("PlanName", "distributed.plan", "_NAMES", set()),
    ("Encoding", "compat.keras.encode", "ENCODINGS", set()),
    ("OutputMode", "compat.keras.arguments", "MODES", set()),
]


@pytest.mark.parametrize(("name", "module", "found", "more"), WORDS, ids=lambda x: x if isinstance(x, str) else "")
def test_types_have_the_words_of_the_code(name: str, module: str, found: str, more: set[Any]) -> None:
    words = getattr(importlib.import_module(f"torchsparse_rec.{module}"), found)
    assert {*get_args(getattr(typing, name)), *more} == set(words)


def test_all_types_are_compared_but_those_without_a_list_of_words() -> None:
    assert {name for name, *_ in WORDS} == set(typing.__all__) - {"OovMethod", "ShardBy"}
