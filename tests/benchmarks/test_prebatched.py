"""The benchmarks of prebatched files: what data is drawn, and that both sides read the same rows."""

import importlib.util

import pytest
import torch

needs_tensorflow = pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="TensorFlow")


@pytest.fixture
def files(benchmarks):
    return benchmarks("prebatched").Files("zipf", benchmarks("rows").Options(quick=True))


def test_ids_are_those_of_their_spread(benchmarks):
    draw = benchmarks("prebatched").draw_ids
    scattered, uniform = (draw(spread, 200_000, 1) for spread in ("zipf", "uniform"))
    for ids in (scattered, uniform):
        assert ids.dtype == torch.int64 and 0 <= int(ids.min()) <= int(ids.max()) < 400_000
    # The most popular of 400,000 rows takes 1 / sum(k ** -1.05) of Zipf(1.05).
    share = 1 / float((torch.arange(1, 400_001, dtype=torch.float64) ** -1.05).sum())
    assert float(scattered.bincount().max()) / 200_000 == pytest.approx(share, rel=0.03)
    assert float(uniform.double().mean()) == pytest.approx(200_000, rel=0.01)
    assert torch.equal(draw("zipf", 100, 5), draw("zipf", 100, 5)) and not torch.equal(
        draw("zipf", 100, 5), draw("zipf", 100, 6)
    )


def test_a_file_that_lacks_rows_is_seen(benchmarks, files, monkeypatch):
    prebatched = benchmarks("prebatched")
    assert files.mapped.exists()
    monkeypatch.setattr(files, "rows", 1_000)
    with pytest.raises(AssertionError, match="mapped: the integers sum to"):
        prebatched.check(files)


@needs_tensorflow
@pytest.mark.tensorflow
def test_tensorflow_reads_the_same_sums(benchmarks, files, tensorflow, restore_threads):
    prebatched = benchmarks("prebatched")
    expected = prebatched.our_sums(prebatched.PrebatchedDataset(files.mapped))
    for peer in (prebatched.EXAMPLES, prebatched.BATCHES):
        integers, floats = prebatched.tensorflow_sums(files, peer)()
        assert int(integers) == expected[0] and float(floats) == pytest.approx(expected[1], abs=1e-2)
