"""The parity check against the installed TensorFlow: it passes, and it can fail."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from torchsparse_rec.compat import goldens, parity
from torchsparse_rec.compat._parity import OPERATORS, hand_picked, random_cases
from torchsparse_rec.compat.tensorflow import _sparse_segment

pytestmark = [
    pytest.mark.tensorflow,
    pytest.mark.skipif(
        importlib.util.find_spec("tensorflow") is None,
        reason="TensorFlow is not installed: the golden vectors of test_compat.py serve",
    ),
]


# Every run has a new seed, which its report shows. A case that differs is repeated by
# `python -m torchsparse_rec.compat.parity --op NAME --seed S --cases N`, with N larger than the case's position.
CASES, CASES_IN_FULL = 2500, 20_000


@pytest.mark.parametrize("operator", OPERATORS)
def test_hand_picked_and_random_cases(operator, parity_seed):
    picked, share = hand_picked(operator), -(-CASES // len(OPERATORS))
    row = parity.check(operator, [*picked, *random_cases(operator, share, parity_seed)])
    assert row.mismatches == [], f"seed {parity_seed}"
    assert row.cases == len(picked) + share
    assert row.errors >= 1, "no case fails on both sides"


@pytest.mark.full
def test_many_random_cases(capsys, parity_seed):
    code = parity.main(["--cases", str(CASES_IN_FULL), "--seed", str(parity_seed + 1)])
    assert code == 0, capsys.readouterr().out


def test_the_command_writes_the_table(tmp_path, capsys):
    file = tmp_path / "parity.json"
    assert parity.main(["--op", "unique", "--cases", "3", "--seed", "7", "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    assert "unique" in printed and "pass" in printed and "FAIL" not in printed
    (row,) = json.loads(file.read_text())["rows"]
    assert row["operator"] == "unique" and row["mismatches"] == []
    assert {"bool", "string", "float16", "uint64"} <= set(row["dtypes"])


def test_the_command_fails_on_a_mismatch(monkeypatch, capsys):
    right = _sparse_segment._FORWARD["mean"]
    monkeypatch.setitem(_sparse_segment._FORWARD, "mean", lambda *a: right(*a) * (1 + 2.0**-10))
    assert parity.main(["--op", "raw_ops.SparseSegmentMean", "--cases", "0"]) == 1
    assert "FAIL" in capsys.readouterr().out


def test_the_command_takes_beginnings_of_names_and_refuses_unknown_ones(capsys):
    assert parity.main(["--op", "feature_column.numeric,unique", "--cases", "0"]) == 0
    printed = capsys.readouterr().out
    assert "feature_column.numeric_column" in printed and "bucketized" not in printed and "with_counts" not in printed
    for unknown in ("segment_sum", "unique,nothing"):
        with pytest.raises(SystemExit):
            parity.main(["--op", unknown])


def test_random_cases_depend_on_the_seed_alone():
    def first(seed):
        return [case.arguments["x"] for case in random_cases("unique", 12, seed, 10_000) if case.dtype != "string"]

    again = first(1)
    assert all(torch.equal(a, b) for a, b in zip(first(1), again, strict=True) if not a.is_floating_point())
    assert any(a.shape != b.shape for a, b in zip(again, first(2), strict=False))


def test_the_golden_vectors_are_what_tensorflow_answers(tmp_path):
    assert goldens.main(["--record", str(tmp_path)]) == 0
    kept_files = sorted((Path(__file__).parents[1] / "goldens").glob("*.json.gz"))
    assert sorted(file.name for file in tmp_path.iterdir()) == [file.name for file in kept_files]
    for file in kept_files:
        for (case, kept), (_, fresh) in zip(goldens.load(file), goldens.load(tmp_path / file.name), strict=True):
            assert (kept.error is None) == (fresh.error is None), (file.name, case.note)
            assert kept.values.keys() == fresh.values.keys()
