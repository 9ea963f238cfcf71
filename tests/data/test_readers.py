"""What all readers and writers of columns share: the arguments that they refuse."""

import pytest

from torchsparse_rec.data import (
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
