"""MovieLens's releases: reading their files, finding them, and what is generated in their place."""

import io
import os
import socket
from pathlib import Path

import numpy as np
import pytest

from torchsparse_rec.data import _ratings as reader
from torchsparse_rec.data import releases
from torchsparse_rec.data.generated import interactions
from torchsparse_rec.data.movielens import LAYOUTS

DATA = os.environ.get("TORCHSPARSE_REC_DATA")


def file_text(dataset, columns):
    layout = LAYOUTS[dataset]
    separator, rating = layout.separator.decode(), "3.5" if layout.fractional else "4"
    lines = [separator.join([str(u), str(i), rating, str(t)]) for u, i, t in columns.T]
    header = [layout.header.decode()] if layout.header else []
    return "".join(line + "\n" for line in header + lines).encode()


@pytest.mark.parametrize(
    ("dataset", "text"),
    [
        ("ml-100k", b"196\t242\t3\t881250949\n22\t377\t1\t878887116\n"),
        ("ml-1m", b"196::242::3::881250949\n22::377::1::878887116\n"),
        ("ml-20m", b"userId,movieId,rating,timestamp\n196,242,3.5,881250949\n22,377,0.5,878887116\n"),
        ("ml-20m", b"userId,movieId,rating,timestamp\r\n196,242,3.5,881250949\r\n22,377,0.5,878887116\r\n"),
        ("ml-20m", b"userId,movieId,rating,timestamp\n196,242,3,881250949\n22,377,0.5,878887116\n"),
        ("ml-100k", b"196\t242\t3\t881250949\n22\t377\t1\t878887116"),
    ],
)
def test_read_known_lines(dataset, text):
    columns = reader.read_ratings(io.BytesIO(text), "file", LAYOUTS[dataset])
    assert columns.tolist() == [[196, 22], [242, 377], [881250949, 878887116]]


@pytest.mark.parametrize("dataset", LAYOUTS)
def test_read_across_chunks_by_both_paths(dataset, monkeypatch):
    random = np.random.default_rng(0)
    expected = np.stack([random.integers(1, 10 ** random.integers(1, 7, 500)) for _ in range(3)])
    text = file_text(dataset, expected)
    for chunk in (64, 1000, 1 << 20):
        monkeypatch.setattr(reader, "_CHUNK", chunk)
        np.testing.assert_array_equal(reader.read_ratings(io.BytesIO(text), "file", LAYOUTS[dataset]), expected)
    monkeypatch.setattr(reader, "_parse_regular", lambda chunk, layout: None)
    np.testing.assert_array_equal(reader.read_ratings(io.BytesIO(text), "file", LAYOUTS[dataset]), expected)


def test_original_files_take_the_quick_path(monkeypatch):
    monkeypatch.delattr(reader, "_parse_lines")
    for dataset, layout in LAYOUTS.items():
        text = file_text(dataset, np.array([[1, 20], [300, 4], [881250949, 978300760]]))
        assert reader.read_ratings(io.BytesIO(text), "file", layout).shape == (3, 2)


@pytest.mark.parametrize("dataset", LAYOUTS)
@pytest.mark.parametrize(
    "bad",
    ["", "1", "1|2|4|5|6", "x|2|4|5", "1|2|4", "1|2||5", "1|-2|4|5", "1||4|5", "0|2|4|5", "1|2|4|5.0", "1|2|4|", "é|\0",
     "1|2|444|5", "1|99999999|4|5", "1|2|4|1234567890123"],
)  # fmt: skip
def test_read_names_the_bad_line(dataset, bad, monkeypatch):
    monkeypatch.setattr(reader, "_CHUNK", 200)
    layout = LAYOUTS[dataset]
    lines = file_text(dataset, np.full((3, 40), 881250949 % 1000)).split(b"\n")
    lines[29] = bad.encode().replace(b"|", layout.separator)
    with pytest.raises(ValueError, match=r"^some file: line 30: expected user.*got '"):
        reader.read_ratings(io.BytesIO(b"\n".join(lines)), "some file", layout)


def test_file_that_ends_early_is_an_error(tmp_path):
    path = tmp_path / "u.data"
    path.write_bytes(file_text("ml-100k", np.full((3, 7), 5)))
    text = r"u.data ends at line 7 with 7 ratings, expected the 100,000 ratings of ml-100k"
    with pytest.raises(ValueError, match=text):
        releases.read("ml-100k", path)


def test_ids_are_renumbered_without_gaps():
    found = releases.index_ids("x", np.array([7, 3, 7]), np.array([50, 9, 10]), np.array([1, 2, 3]))
    assert (found.users.tolist(), found.items.tolist()) == ([1, 0, 1], [2, 0, 1])
    assert (found.num_users, found.num_items) == (2, 3)


def test_a_file_is_found_in_the_folder_or_below(tmp_path):
    nested = tmp_path / "ml-1m"
    nested.mkdir()
    (nested / "ratings.dat").touch()
    for folder in (tmp_path, nested):
        assert releases.find("ml-1m", folder, "--data-dir") == nested / "ratings.dat"
    with pytest.raises(FileNotFoundError, match="--data-dir is .*, but neither .*ratings.csv nor .*ratings.csv"):
        releases.find("ml-20m", tmp_path, "--data-dir")


@pytest.mark.skipif(DATA is None, reason="$TORCHSPARSE_REC_DATA is not set")
def test_read_ml_100k():
    found = releases.read("ml-100k", releases.find("ml-100k", Path(DATA), "the variable"))
    assert (found.num_users, found.num_items, len(found.users)) == (943, 1682, 100_000)
    assert (found.users[0], found.items[0], found.times[0]) == (195, 241, 881250949)
    assert int(np.bincount(found.items).max()) == 583


# ---- Downloading and generating --------------------------------------------------------------------------------------


def test_connecting_has_a_time_limit():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        with pytest.raises(OSError):
            releases._fetch(f"http://127.0.0.1:{silent.getsockname()[1]}/x.zip", 0.2, 5.0)


def test_generated_interactions():
    users, items, times = interactions(943, 1682, 100_000, seed=0)
    for again, other in zip(interactions(943, 1682, 100_000, 0), interactions(943, 1682, 100_000, 1), strict=True):
        assert len(again) == len(other) == len(users)
    assert (interactions(943, 1682, 100_000, 0)[1] == items).all()
    assert (interactions(943, 1682, 100_000, 1)[1] != items).any() and times.min() > 8e8
    assert len(np.unique(users.astype(np.int64) * 1682 + items)) == 100_000
    popularity = np.sort(np.bincount(items, minlength=1682))[::-1]
    assert popularity[:168].sum() > 3 * 10_000  # a tenth of the items has several times its share
    with pytest.raises(ValueError, match="total must be at most 100"):
        interactions(10, 20, 101, 0)
