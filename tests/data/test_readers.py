"""What all readers and writers of columns share: the arguments that they refuse."""

import bz2
import gzip
import lzma

import pyarrow as pa
import pytest

from torchsparse_rec.data import (
    DataError,
    read_criteo,
    read_csv,
    read_movielens,
    read_parquet,
)


@pytest.mark.parametrize("read", [read_criteo, read_csv, read_movielens, read_parquet])
def test_wrong_arguments_are_errors_at_once(read, tmp_path):
    with pytest.raises(ValueError, match="paths must have at least one file, got none"):
        read([])
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        read(tmp_path / "f.data", batch_size=0)
    for columns in ([], ["user", "user"], "user"):
        with pytest.raises(ValueError, match="columns must be distinct names, at least one, got"):
            read(tmp_path / "f.data", columns=columns)
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "f.data")


TEXT = b"id,x\n7,1\n"


@pytest.mark.parametrize("read", [read_criteo, read_csv, read_movielens])
@pytest.mark.parametrize(
    ("data", "what"),
    [
        (gzip.compress(TEXT, mtime=0), "compressed by gzip: its name must end in .gz"),
        (bz2.compress(TEXT), "compressed by bzip2: its name must end in .bz2"),
        (pa.compress(TEXT, "zstd", asbytes=True), "compressed by zstd: its name must end in .zst"),
        (lzma.compress(TEXT), "compressed by xz"),
        (b"PK\3\4", "a zip archive"),
        (TEXT.decode().encode("utf-16"), "text in UTF-16"),
        (TEXT.decode().encode("utf-16-le"), "text in UTF-16"),
        (TEXT.decode().encode("utf-16-be"), "text in UTF-16"),
        (TEXT.decode().encode("utf-32"), "text in UTF-16 or UTF-32"),
        (b"\0\0\xfe\xff" + TEXT.decode().encode("utf-32-be"), "text in UTF-32"),
        (b"PAR1", "a Parquet file: read_parquet"),
        (b"ARROW1\0\0", "an Arrow file"),
    ],
    ids=str,
)
def test_files_that_are_no_plain_text_are_named(read, data, what, tmp_path):
    for name, given in (("a.csv", data), ("a.csv.gz", gzip.compress(data))):
        (tmp_path / name).write_bytes(given)
        with pytest.raises(DataError, match=f"{name}: line 1: the file is {what}"):
            list(read(tmp_path / name))


@pytest.mark.parametrize(("suffix", "kind"), [(".gz", "gzip"), (".bz2", "bz2"), (".zst", "zstd")])
def test_plain_text_under_the_name_of_a_compression_is_named(suffix, kind, tmp_path):
    (tmp_path / f"a.csv{suffix}").write_bytes(TEXT)
    with pytest.raises(DataError, match=f"line 1: the file is damaged, or not compressed by {kind}: "):
        list(read_csv(tmp_path / f"a.csv{suffix}"))


def test_text_that_begins_like_another_file_is_text(tmp_path):
    (tmp_path / "a.csv").write_bytes(b"\xef\xbb\xbfBZh,PK\n7,1\n")
    (tmp_path / "b.csv").write_bytes(b"BZh1,PK\n7,1\n")
    assert [next(read_csv(tmp_path / name)).schema.names for name in ("a.csv", "b.csv")] == [
        ["BZh", "PK"],
        ["BZh1", "PK"],
    ]
