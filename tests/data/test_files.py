"""Files that appear whole or not at all: an earlier file of that name, links, permissions, names."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from torchsparse_rec.data import DataError
from torchsparse_rec.files import whole_file


def write(path: Path | str | bytes, content: bytes = b"new") -> None:
    with whole_file(path) as file:  # type: ignore[arg-type]
        file.write(content)


def test_a_file_that_is_replaced_leaves_its_permissions(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"old")
    path.chmod(0o600)
    write(path)
    assert path.read_bytes() == b"new" and stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_of_a_link_it_is_the_file_behind_it(tmp_path: Path) -> None:
    behind, link, dangling = tmp_path / "behind", tmp_path / "link", tmp_path / "dangling"
    behind.write_bytes(b"old")
    link.symlink_to(behind)
    dangling.symlink_to(tmp_path / "made")
    for path in (link, dangling):
        write(path)
        assert path.is_symlink() and path.read_bytes() == b"new"
    assert behind.read_bytes() == b"new"


def test_what_is_no_file_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path, error in ((tmp_path, IsADirectoryError), (pipe, FileExistsError)):
        with pytest.raises(error, match=path.name), whole_file(path):
            raise AssertionError("the block must not run")
    assert stat.S_ISFIFO(pipe.stat().st_mode) and list(tmp_path.iterdir()) == [pipe]
    with pytest.raises(ValueError, match="path must name a file, got an empty name"):
        write("")


def test_names_of_every_length_and_kind(tmp_path: Path) -> None:
    longest = tmp_path / ("n" * 255)
    write(longest)
    assert longest.read_bytes() == b"new"
    write(os.fsencode(tmp_path / "b\xe4"))
    assert (tmp_path / "b\xe4").read_bytes() == b"new"
    assert str(DataError(b"a name", None, "is bad")) == "a name: is bad"  # type: ignore[arg-type]


def test_what_fails_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"old")
    with pytest.raises(KeyError), whole_file(path) as file:
        file.write(b"new")
        raise KeyError
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]
