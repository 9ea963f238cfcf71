"""Fixtures that several files of tests of data use."""

import pytest


@pytest.fixture
def path(tmp_path):
    """Return where a test writes its prebatched file."""
    return tmp_path / "f.arrow"


@pytest.fixture
def small_chunks(monkeypatch):
    """Read TFRecord files a few hundred bytes at a time, so that records and headers lie across the borders."""
    monkeypatch.setattr("torchsparse_rec.data.tfrecord._CHUNK", 173)
    monkeypatch.setattr("torchsparse_rec.data._tfrecord_blocks._COMPRESSED", 61)
