"""compat.tensorflow's candidate samplers and sampled losses, beyond the parity check: streams, files, other names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import torchsparse_rec.compat.tensorflow as ours

CLASSES = np.array([[1, 4], [0, 1]])


@pytest.fixture(autouse=True)
def no_seed() -> Iterator[None]:
    ours.random.set_seed(None)
    yield
    ours.random.set_seed(None)


def draw(seed: int | None = None, num_sampled: int = 5) -> list[int]:
    result: list[int] = ours.random.uniform_candidate_sampler(
        CLASSES, 2, num_sampled, True, 10**6, seed
    ).sampled_candidates.tolist()
    return result


def test_equal_calls_go_on_and_set_seed_begins_again() -> None:
    ours.random.set_seed(3)
    first = [draw(1), draw(2), draw(1), draw(), draw(), draw(1, num_sampled=4)]
    assert len({tuple(x) for x in first}) == 6 and first[5] == first[0][:4]
    ours.random.set_seed(3)
    assert [draw(1), draw(1), draw(2), draw(), draw()] == [first[i] for i in (0, 2, 1, 3, 4)]
    ours.compat.v1.set_random_seed(4)
    assert draw(1) != first[0]


def test_without_a_seed_torchs_generator_gives_one() -> None:
    draws = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        ours.random.set_seed(None)
        draws.append([draw(), draw()])
    assert draws[0] == draws[1] != draws[2] and draws[0][0] != draws[0][1]


@pytest.mark.parametrize(("global_seed", "seed", "learns"), [(None, None, True), (2, 7, True), (2, None, False)])
def test_unigrams_are_learned_where_a_stream_goes_on(global_seed: int | None, seed: int | None, learns: bool) -> None:
    ours.random.set_seed(global_seed)
    for _ in range(2):
        result = ours.random.learned_unigram_candidate_sampler([[1], [1]], 1, 1, True, 4, seed=seed)
    assert result.true_expected_count.flatten().tolist() == ([0.5, 0.5] if learns else [0.25, 0.25])


def test_other_names_are_the_same_functions() -> None:
    for law in ("uniform", "log_uniform", "learned_unigram", "fixed_unigram", "all"):
        function = getattr(ours.random, f"{law}_candidate_sampler")
        assert getattr(ours.compat.v1.nn, function.__name__) is getattr(ours.compat.v1.random, function.__name__)
        assert getattr(ours.compat.v1.random, function.__name__) is function
        raw: Callable[..., Any] = getattr(ours.raw_ops, law.title().replace("_", "") + "CandidateSampler")
        arguments = {"true_classes": CLASSES, "num_true": 2, "num_sampled": 5, "unique": True}
        arguments |= {} if law == "all" else {"range_max": 5}
        arguments |= {"unigrams": [1.0, 2.0, 3.0, 4.0, 5.0]} if law == "fixed_unigram" else {}
        by_name = function(**arguments, seed=8)
        ours.random.set_seed(None)
        for x, y in zip(raw(**arguments, seed=87654321, seed2=8), by_name, strict=True):
            assert torch.equal(x, y)
    hits = ours.raw_ops.ComputeAccidentalHits(true_classes=CLASSES, sampled_candidates=[4, 1], num_true=2)
    assert hits.indices.tolist() == [0, 0, 1] and hits.ids.tolist() == [1, 0, 1]


def test_weights_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "words.csv"
    file.write_text("a,1\nb,x,2.5\n4\n")
    for seed in range(5):
        arguments = ([[0]], 1, 2, True, 3)
        by_file = ours.random.fixed_unigram_candidate_sampler(*arguments, vocab_file=str(file), seed=seed)
        given = ours.random.fixed_unigram_candidate_sampler(*arguments, unigrams=[1.0, 2.5, 4.0], seed=seed)
        assert all(torch.equal(x, y) for x, y in zip(by_file, given, strict=True))
    file.write_text("a,1\nb\n")
    with pytest.raises(ValueError, match="vocab_file .*words.csv' must have a number at the end of each line: .*'b'"):
        ours.random.fixed_unigram_candidate_sampler([[0]], 1, 1, True, 2, vocab_file=str(file))
    with pytest.raises(ValueError, match="unigrams or vocab_file must be given, and not both"):
        ours.random.fixed_unigram_candidate_sampler([[0]], 1, 1, True, 2, vocab_file=str(file), unigrams=[1.0])


@pytest.mark.tensorflow
def test_weights_from_a_file_beside_tensorflow(tensorflow: Any, tmp_path: Path) -> None:
    file = tmp_path / "words.csv"
    file.write_text("a,1\nb,x,2.5\n4\nc, 3\n")
    results = []
    for tf in (tensorflow, ours):
        tf.random.set_seed(5)
        drawn = tf.random.fixed_unigram_candidate_sampler(CLASSES, 2, 3, True, 5, str(file), 0.75, 1, seed=2)
        results.append([x.numpy().tolist() for x in drawn])
    assert results[0] == results[1]


# ---- Losses ----------------------------------------------------------------------------------------------------------


def test_shards_are_split_as_the_version_says() -> None:
    weights, biases = torch.randn(6, 3), torch.randn(6)
    inputs, labels = torch.randn(2, 3), torch.tensor([[1], [4]])
    arguments = (labels, inputs, 4, 6, 1, ours.random.uniform_candidate_sampler(labels, 1, 4, True, 6))
    for name in ("sampled_softmax_loss", "nce_loss"):
        of_2, of_1 = getattr(ours.nn, name), getattr(ours.compat.v1.nn, name)
        wanted = of_2(weights, biases, *arguments)
        assert torch.equal(of_2([weights[:3], weights[3:]], [biases[:3], biases[3:]], *arguments), wanted)
        assert torch.equal(of_1([weights[::2], weights[1::2]], [biases[::2], biases[1::2]], *arguments), wanted)


def test_sparse_gradients_are_coalesced() -> None:
    weights, biases = torch.randn(100, 3, requires_grad=True), torch.randn(100, requires_grad=True)
    loss = ours.nn.nce_loss(weights, biases, [[1], [4]], torch.ones(2, 3), 4, 100, sparse_gradient=True)
    loss.sum().backward()
    for table in (weights, biases):
        assert table.grad is not None and table.grad.is_coalesced() and len(table.grad.indices()[0]) <= 6


@pytest.mark.tensorflow
@pytest.mark.parametrize("name", ["sampled_softmax_loss", "nce_loss"])
def test_half_types(tensorflow: Any, name: str) -> None:
    rng = np.random.default_rng(0)
    weights, biases, inputs = (rng.standard_normal(shape).astype(np.float16) for shape in ((6, 3), (6,), (2, 3)))
    # No hits: TensorFlow's loss is NaN then, as -inf times 0.
    values = (np.array([0, 2, 3, 5]), np.ones((2, 1), np.float16), np.full(4, 0.5, np.float16))
    labels = np.array([[1], [4]])
    results = [
        getattr(tf.nn, name)(weights, biases, convert(labels), convert(inputs), 4, 6, 1, tuple(map(convert, values)))
        for tf, convert in ((tensorflow, tensorflow.constant), (ours, torch.tensor))
    ]
    assert results[1].dtype == torch.float16
    np.testing.assert_allclose(results[1], results[0], rtol=1e-2)


def test_what_a_loss_refuses() -> None:
    weights, biases, inputs, labels = torch.zeros(6, 3), torch.zeros(6), torch.zeros(2, 3), torch.zeros(2, 1).long()
    arguments = (weights, biases, labels, inputs, 4, 6)
    values = ours.random.uniform_candidate_sampler(labels, 1, 4, True, 6)
    for changed, error, match in (
        ({2: labels.float()}, ValueError, "labels must be int64, got torch.float32"),
        ({3: inputs[0]}, ValueError, r"inputs must be \[batch, dim\] of floats, got torch.float32 of shape \[3\]"),
        ({0: biases}, ValueError, r"weights must have rows of 3 numbers, and biases one of each, got \[6\] and \[6\]"),
        ({2: labels + 6}, IndexError, r"labels: .*true_classes\[0\] must be in \[0, 6\), got 6"),
        ({2: labels + 3, 1: biases[:3]}, IndexError, r"biases: .*\[0\] must be in \[0, 3\), got 3"),
    ):
        wrong = [changed.get(i, x) for i, x in enumerate(arguments)]
        with pytest.raises(error, match=match):
            ours.nn.nce_loss(*wrong)
    for given, match in (
        (values[:2], "sampled_values must be a sampler's three tensors, got 2"),
        ((values[0], values[1][0], values[2]), r"sampled_values must be .* \[2, 1\], and .* got \[4\], \[1\], \[4\]"),
        ((values[0], values[1].double(), values[2]), "inputs must have the dtype of the counts .* got torch.float32"),
    ):
        with pytest.raises(ValueError, match=match):
            ours.nn.nce_loss(*arguments, 1, given)
