"""Random configurations of every kind of column and layer against TensorFlow and Keras, different in every run."""

from __future__ import annotations

import pytest

from torchsparse_rec.compat import parity
from torchsparse_rec.compat._parity import columns, columns_together, keras_layers, random_cases

pytestmark = pytest.mark.tensorflow

# The command for 10,000: python -m torchsparse_rec.compat.parity --op feature_column,keras.layers --cases 10000
CASES = 30


@pytest.mark.parametrize("operator", [*columns.OPERATORS, *columns_together.OPERATORS, *keras_layers.OPERATORS])
def test_random_configurations(operator, parity_seed, tensorflow):
    row = parity.check(operator, random_cases(operator, CASES, parity_seed + 2))
    assert row.mismatches == [] and row.cases == CASES, f"seed {parity_seed + 2}"


def test_the_check_can_fail(monkeypatch, tensorflow):
    from torchsparse_rec.features import vocabulary

    monkeypatch.setattr(
        vocabulary, "hashed", lambda values, count: vocabulary.ops.to_hash_bucket_fast(values, count + 1)
    )
    operator = "feature_column.categorical_column_with_vocabulary_list"
    assert parity.check(operator, random_cases(operator, 40, 1)).mismatches


def test_beginnings_of_names_are_taken(capsys):
    assert parity.main(["--op", "feature_column.numeric,unique", "--cases", "0"]) == 0
    printed = capsys.readouterr().out
    assert "feature_column.numeric_column" in printed and "bucketized" not in printed and "with_counts" not in printed
    with pytest.raises(SystemExit):
        parity.main(["--op", "unique,nothing"])
