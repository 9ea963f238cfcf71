"""Criteo's files: what they hold, what is written, and the number of a line that is wrong."""

import gzip
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from data.cases import joined

from torchsparse_rec.data import (
    DataError,
    _text,
    read_criteo,
    write_criteo,
)
from torchsparse_rec.data.criteo import CATEGORIES, COLUMNS, INTEGERS

DATA = os.environ.get("TORCHSPARSE_REC_DATA")


def criteo_lines(rows, seed=0):
    """Return the fields of random rows, and their lines as in the real files."""
    random = np.random.default_rng(seed)
    fields, lines = [], []
    for _ in range(rows):
        row = [str(random.integers(0, 2))]
        row += ["" if random.random() < 0.3 else str(random.integers(-3, 10**7)) for _ in INTEGERS]
        row += ["" if random.random() < 0.3 else f"{random.integers(0, 2**32):08x}" for _ in CATEGORIES]
        for place in range(40 - random.integers(0, 6), 40):
            row[place] = ""
        fields.append(row)
        line = "\t".join(row)
        lines.append(line.rstrip("\t") if random.random() < 0.5 else line)
    return fields, "\n".join(lines).encode()


def expected_criteo(fields):
    convert = [int] * 14 + [str] * 26
    return [
        {name: (to(value) if value else None) for name, to, value in zip(COLUMNS, convert, row, strict=True)}
        for row in fields
    ]


@pytest.mark.parametrize("block", [300, 5000, 1 << 24])
@pytest.mark.parametrize("end", [b"", b"\n"])
@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
def test_criteo_lines_with_empty_and_missing_fields(block, end, newline, tmp_path, monkeypatch):
    monkeypatch.setattr(_text.blocks, "__defaults__", (block,))
    fields, text = criteo_lines(100)
    (tmp_path / "train.txt").write_bytes((text + end).replace(b"\n", newline))
    batches = list(read_criteo(tmp_path / "train.txt", batch_size=30))
    assert [batch.num_rows for batch in batches] == [30, 30, 30, 10]
    assert joined(batches).to_pylist() == expected_criteo(fields)


def test_the_criteo_sample_itself():
    if not DATA:
        pytest.skip("needs TORCHSPARSE_REC_DATA, with criteo-sample/train.txt")
    path = Path(DATA) / "criteo-sample" / "train.txt"
    lines = path.read_text().split("\n")
    found = joined(read_criteo(path))
    assert found.num_rows == len(lines) == 1000
    assert sorted({line.count("\t") + 1 for line in lines}) == [37, 38, 40]
    padded = [(line.split("\t") + [""] * 40)[:40] for line in lines]
    assert found.to_pylist() == expected_criteo(padded)


def test_criteo_without_labels_by_columns_and_compressed(tmp_path):
    fields, text = criteo_lines(20)
    unlabeled = b"\n".join(line.split(b"\t", 1)[1] for line in text.split(b"\n"))
    for suffix, opened in (("", open), (".gz", gzip.open)):
        with opened(tmp_path / f"test.txt{suffix}", "wb") as file:
            file.write(unlabeled)
        found = joined(read_criteo(tmp_path / f"test.txt{suffix}", label=False, columns=["C3", "I1"]))
        expected = [{"C3": row["C3"], "I1": row["I1"]} for row in expected_criteo(fields)]
        assert found.to_pylist() == expected
    with pytest.raises(ValueError, match="columns must be among I1, .*, got 'label'"):
        read_criteo(tmp_path / "test.txt", label=False, columns=["label"])


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda fields: fields.__setitem__(0, ""), "the label must be 0 or 1"),
        (lambda fields: fields.__setitem__(0, "2"), "the label must be 0 or 1"),
        (lambda fields: fields.__setitem__(0, "-1"), "the label must be 0 or 1"),
        (lambda fields: fields.__setitem__(5, "12x"), "column 'I5': .*invalid value '12x'"),
        (lambda fields: fields.__setitem__(5, "9" * 20), "invalid value"),
        (lambda fields: fields.append("more"), "expected at most 40 fields, found 41"),
        (lambda fields: fields.__setitem__(30, b"\xff\xfe".decode("latin1")), "column 'C17': .*invalid UTF8"),
        (lambda fields: fields.__setitem__(30, "a\rb"), "carriage return"),
        (lambda fields: fields.clear(), "the label must be 0 or 1"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
@pytest.mark.parametrize("block", [2000, 1 << 24])
def test_criteo_names_the_malformed_line(change, text, block, tmp_path, monkeypatch):
    monkeypatch.setattr(_text.blocks, "__defaults__", (block,))
    fields, _ = criteo_lines(50)
    change(fields[36])
    lines = "\n".join("\t".join(row) for row in fields)
    (tmp_path / "train.txt").write_bytes(lines.encode("latin1"))
    with pytest.raises(DataError, match=f"train.txt: line 37: .*{text}") as raised:
        list(read_criteo(tmp_path / "train.txt"))
    assert (raised.value.offset, raised.value.unit) == (37, "line")


def test_criteo_is_written_as_it_is_read(tmp_path):
    fields, text = criteo_lines(40)
    (tmp_path / "a.txt").write_bytes(text)
    batches = list(read_criteo(tmp_path / "a.txt", batch_size=15))
    assert write_criteo(tmp_path / "b.txt.gz", [batch.select(COLUMNS[::-1]) for batch in batches]) == 40
    assert joined(read_criteo(tmp_path / "b.txt.gz")).equals(joined(batches))
    with pytest.raises(ValueError, match="columns must be label, I1, ..., C26, got"):
        write_criteo(tmp_path / "c.txt", [pa.record_batch({"label": [1]})])
    bad = batches[0].set_column(14, "C1", pa.array(["a\tb"] * 15))
    with pytest.raises(ValueError, match="row 0 or one after it cannot be written"):
        write_criteo(tmp_path / "c.txt", [bad])
    assert not (tmp_path / "c.txt").exists()


@pytest.mark.parametrize(
    ("name", "values", "text"),
    [
        ("label", [0, 2], "column 'label' must be 0 or 1, got 2 in row 3"),
        ("label", [0, None], "column 'label' must be 0 or 1, got None in row 3"),
        ("I3", [1.0, 1.5], "column 'I3' of double cannot be written"),
        ("I3", pa.array([1, 2**63], pa.uint64()), "column 'I3' of uint64 cannot be written"),
        ("C2", ["a", ""], "column 'C2' must be a null or not empty, got '' in row 3"),
        ("C2", [0.5, 1.5], "column 'C2' must hold strings or integers, got double"),
        ("C2", ["a", 'b"c'], "row 2 or one after it cannot be written"),
    ],
)
def test_what_criteo_files_cannot_hold(name, values, text, tmp_path):
    fields, lines = criteo_lines(2)
    (tmp_path / "a.txt").write_bytes(lines)
    (batch,) = read_criteo(tmp_path / "a.txt")
    bad = batch.set_column(COLUMNS.index(name), name, pa.array(values))
    with pytest.raises(ValueError, match=text):
        write_criteo(tmp_path / "b.txt", [batch, bad])
    assert not (tmp_path / "b.txt").exists()


def test_criteo_takes_other_types_of_the_same_values(tmp_path):
    fields, lines = criteo_lines(2)
    (tmp_path / "a.txt").write_bytes(lines)
    (batch,) = read_criteo(tmp_path / "a.txt")
    for name, values in (
        ("label", pa.array([True, False])),
        ("I2", pa.array([1.0, None])),
        ("C1", pa.array([5, None])),
        ("C2", pa.array(["x", None]).dictionary_encode()),
        ("C3", pa.array([b"x", None])),
        ("C4", pa.nulls(2)),
    ):
        batch = batch.set_column(COLUMNS.index(name), name, values)
    assert write_criteo(tmp_path / "b.txt", [batch.slice(0, 0), batch]) == 2
    found = joined(read_criteo(tmp_path / "b.txt")).select(["label", "I2", "C1", "C2", "C3", "C4"]).to_pydict()
    expected = {"label": [1, 0], "I2": [1, None], "C1": ["5", None], "C2": ["x", None], "C3": ["x", None]}
    assert found == {**expected, "C4": [None, None]}


def test_lines_longer_than_what_is_parsed_at_once(tmp_path):
    """Parse a line longer than two of pyarrow's default blocks of 1 MiB."""
    fields, _ = criteo_lines(3)
    fields[1][20] = "x" * 2_500_000
    (tmp_path / "train.txt").write_text("\n".join("\t".join(row) for row in fields))
    assert joined(read_criteo(tmp_path / "train.txt")).to_pylist() == expected_criteo(fields)


def test_damaged_compression_names_the_line(tmp_path):
    fields, text = criteo_lines(2000)
    packed = bytearray(gzip.compress(text))
    for name, data in (
        ("cut", packed[: len(packed) // 2]),
        ("flipped", packed[:9000] + b"\xff\xff\xff" + packed[9003:]),
    ):
        (tmp_path / f"{name}.txt.gz").write_bytes(data)
        with pytest.raises(DataError, match=rf"{name}.txt.gz: line \d+: "):
            list(read_criteo(tmp_path / f"{name}.txt.gz"))
