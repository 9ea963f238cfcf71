"""Text of LIBSVM and LIBFFM: what is read, and the lines that are malformed."""

import gzip

import pytest
import torch
from data.cases import joined

from torchsparse_rec import features
from torchsparse_rec.data import DataError, _text, read_libsvm, to_tensors

SVM = "+1 3:0.5  7:1\n\n-1\r\n# nothing\n0.5 9223372036854775807:-2e3 # the end\n"


def test_libsvm_and_libffm_are_read(tmp_path, monkeypatch):
    path = tmp_path / "f.svm.gz"
    path.write_bytes(gzip.compress(SVM.encode()))
    rows = [
        {"label": 1.0, "ids": [3, 7], "values": [0.5, 1.0]},
        {"label": -1.0, "ids": [], "values": []},
        {"label": 0.5, "ids": [2**63 - 1], "values": [-2000.0]},
    ]
    assert joined(read_libsvm(path)).to_pylist() == rows
    monkeypatch.setattr(_text.blocks, "__defaults__", (8,))
    found = list(read_libsvm([path, path], batch_size=4, columns=["values", "label"]))
    assert [batch.num_rows for batch in found] == [4, 2]
    assert joined(found).to_pylist() == [{"values": row["values"], "label": row["label"]} for row in rows] * 2
    (tmp_path / "f.ffm").write_text("1 0:3:0.5 1:7:1\n0 2:4:0.25")
    (batch,) = read_libsvm(tmp_path / "f.ffm")
    assert batch.to_pydict() == {
        "label": [1.0, 0.0],
        "fields": [[0, 1], [2]],
        "ids": [[3, 7], [4]],
        "values": [[0.5, 1.0], [0.25]],
    }
    column = features.weighted_categorical_column(features.categorical_column_with_identity("ids", 10), "values")
    made = features.FeatureTransform([column])(batch).weighted
    assert made.values().tolist() == [3, 7, 4] and made.weights().tolist() == [0.5, 1.0, 0.25]
    assert to_tensors(batch)["fields"].lengths().tolist() == [2, 1] and batch["values"].type.value_type == "float"
    (tmp_path / "empty").write_text("# nothing\n")
    (tmp_path / "labels").write_text("1\n0\n")
    assert list(read_libsvm(tmp_path / "empty")) == []
    none = joined(read_libsvm([tmp_path / "empty", tmp_path / "labels"], layout="libffm"))
    assert none.column_names == ["label", "fields", "ids", "values"] and none["ids"].to_pylist() == [[], []]
    assert to_tensors(none.to_batches()[0])["label"].dtype == torch.float32


def test_malformed_lines_are_named(tmp_path):
    for bad, problem in (
        ("1 5", "items must have the form id:value, got 5, got '1 5'"),
        ("1 1:5:2", "items must have the form id:value, got 1:5:2"),
        ("x 1:5", "column 'label': Failed to parse string: 'x'"),
        ("1 a:5", "column 'ids': Failed to parse string: 'a'"),
        ("1 qid:5", "column 'ids': Failed to parse string: 'qid'"),
        ("1 9223372036854775808:5", "column 'ids': Failed to parse string: '9223372036854775808'"),
        ("1 1:", "column 'values': Failed to parse string: ''"),
        ("1 1:1e99", "column 'values' has 1e99, beyond the range of float"),
        ("1 1:\xff", "(Invalid UTF8|invalid UTF-8)"),
    ):
        lines = [b"1 2:0.5 3:1"] * 41 + [bad.encode("latin1")] + [b"0 1:1"] * 10
        (tmp_path / "f.svm").write_bytes(b"\n".join(lines))
        with pytest.raises(DataError, match=f"f.svm: line 42: {problem}"):
            list(read_libsvm(tmp_path / "f.svm"))
    (tmp_path / "f.svm").write_text("1\n1 0:5:2\n")
    assert joined(read_libsvm(tmp_path / "f.svm", layout="libffm"))["fields"].to_pylist() == [[], [0]]
    with pytest.raises(DataError, match="line 1: column 'fields' must be among label, ids, values"):
        (tmp_path / "f.svm").write_text("1 5:2\n")
        list(read_libsvm(tmp_path / "f.svm", columns=["fields"]))
    with pytest.raises(ValueError, match="read_libsvm: layout must be one of libsvm, libffm, got 'svm'"):
        read_libsvm(tmp_path / "f.svm", layout="svm")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="columns must be among label, ids, values, got 'fields'"):
        read_libsvm(tmp_path / "f.svm", layout="libsvm", columns=["fields"])
