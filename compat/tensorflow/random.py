"""``tf.random``: the candidate samplers, with TensorFlow's bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from . import _candidates
from ._candidates import SampledCandidates, eager

__all__ = [
    "all_candidate_sampler",
    "fixed_unigram_candidate_sampler",
    "learned_unigram_candidate_sampler",
    "log_uniform_candidate_sampler",
    "set_seed",
    "uniform_candidate_sampler",
]


def set_seed(seed: int | None) -> None:
    """
    Set the global seed of the candidate samplers, and begin all streams of draws again.

    Calls of the same sampler, of the same arguments but ``true_classes``, go on in one stream of draws, which is kept
    until the global seed is set. So the n-th call draws what the n-th call of TensorFlow draws while it is eager:

    * with ``seed``, with or without a global seed: always;
    * with a global seed alone: if no other random operator of TensorFlow is called in between;
    * with neither: not at all. The stream's seed comes from torch's own generator.

    In a ``tf.function`` TensorFlow has a stream for each place of a call. Here there is none, and draws differ. No
    other random numbers depend on this seed: ``torch.manual_seed`` sets torch's.

    Args:
        seed: the global seed, or None.

    Source: ``tf.random.set_seed``.

    Example:
        >>> draws = []
        >>> for _ in range(2):
        ...     set_seed(5)
        ...     draws.append(uniform_candidate_sampler([[1]], 1, 3, True, 1000).sampled_candidates)
        >>> draws
        [tensor([886, 704, 363]), tensor([886, 704, 363])]
    """
    eager.begin(seed)


def uniform_candidate_sampler(
    true_classes: Any,
    num_true: int,
    num_sampled: int,
    unique: bool,
    range_max: int,
    seed: int | None = None,
    name: str | None = None,
) -> SampledCandidates:
    """
    Draw ids of ``[0, range_max)``, each as likely as the others.

    Args:
        true_classes: ``[batch, num_true]``, int64, in ``[0, range_max)``.
        num_true: the number of its columns.
        num_sampled: the number of ids to draw.
        unique: whether they are distinct.
        range_max: the number of ids.
        seed: the seed of this call; see :func:`set_seed`.
        name: the name, ignored.

    Returns:
        The ids, and how often true classes and ids are expected in such a draw.

    Raises:
        IndexError: a true class outside ``[0, range_max)``.
        ValueError: numbers out of their range, more unique ids than there are, wrong dtypes or shapes.

    Source: ``tf.random.uniform_candidate_sampler``.

    Example:
        >>> uniform_candidate_sampler([[1]], 1, 4, True, 4).sampled_candidates.sort().values
        tensor([0, 1, 2, 3])
    """
    return _candidates.drawn("uniform", true_classes, num_true, num_sampled, unique, eager.seeds_of(seed), range_max)


def log_uniform_candidate_sampler(
    true_classes: Any,
    num_true: int,
    num_sampled: int,
    unique: bool,
    range_max: int,
    seed: int | None = None,
    name: str | None = None,
) -> SampledCandidates:
    """
    Draw ids of ``[0, range_max)``, id v with probability ``log((v + 2) / (v + 1)) / log(range_max + 1)``.

    Arguments, result and errors are those of :func:`uniform_candidate_sampler`.

    Source: ``tf.random.log_uniform_candidate_sampler``.

    Example:
        >>> log_uniform_candidate_sampler([[0, 99]], 2, 5, True, 100).true_expected_count.shape
        torch.Size([1, 2])
    """
    return _candidates.drawn(
        "log_uniform", true_classes, num_true, num_sampled, unique, eager.seeds_of(seed), range_max
    )


def learned_unigram_candidate_sampler(
    true_classes: Any,
    num_true: int,
    num_sampled: int,
    unique: bool,
    range_max: int,
    seed: int | None = None,
    name: str | None = None,
) -> SampledCandidates:
    """
    Draw ids as often as they were true classes of earlier calls of the stream, and once more.

    With a global seed and no ``seed`` each call is a stream of its own, as in TensorFlow: then nothing is learned.
    Arguments, result and errors are those of :func:`uniform_candidate_sampler`.

    Source: ``tf.random.learned_unigram_candidate_sampler``.

    Example:
        >>> for _ in range(2):
        ...     result = learned_unigram_candidate_sampler([[2], [2]], 1, 1, True, 3, seed=1)
        >>> result.true_expected_count.flatten()  # 3 of 5
        tensor([0.6000, 0.6000])
    """
    return _candidates.drawn(
        "learned_unigram", true_classes, num_true, num_sampled, unique, eager.seeds_of(seed), range_max
    )


def fixed_unigram_candidate_sampler(
    true_classes: Any,
    num_true: int,
    num_sampled: int,
    unique: bool,
    range_max: int,
    vocab_file: str = "",
    distortion: float = 1.0,
    num_reserved_ids: int = 0,
    num_shards: int = 1,
    shard: int = 0,
    unigrams: Sequence[float] = (),
    seed: int | None = None,
    name: str | None = None,
) -> SampledCandidates:
    """
    Draw ids by weights that are given, such as their frequencies.

    Args:
        true_classes: the argument of :func:`uniform_candidate_sampler`.
        num_true: the argument of :func:`uniform_candidate_sampler`.
        num_sampled: the argument of :func:`uniform_candidate_sampler`.
        unique: the argument of :func:`uniform_candidate_sampler`.
        range_max: the number of weights of the shard, with those that are reserved.
        vocab_file: a file with a line for each id, of fields with commas between them, whose last one is the weight.
        distortion: the power to which each weight is raised.
        num_reserved_ids: the number of ids before the weights, which are never drawn.
        num_shards: the number of parts that ids are dealt to in turn.
        shard: the part to take.
        unigrams: the weights, instead of ``vocab_file``.
        seed: the argument of :func:`uniform_candidate_sampler`.
        name: the name, ignored.

    Returns:
        As :func:`uniform_candidate_sampler`.

    Raises:
        IndexError: a true class outside ``[0, range_max)``.
        OSError: the file cannot be read.
        ValueError: weights that are negative or not finite, too few that are not zero; numbers out of their range.

    Source: ``tf.random.fixed_unigram_candidate_sampler``.

    Example:
        >>> fixed_unigram_candidate_sampler([[0]], 1, 2, True, 3, unigrams=[1, 0, 5]).sampled_candidates.sort().values
        tensor([0, 2])
    """
    weights = (vocab_file, distortion, num_reserved_ids, num_shards, shard, tuple(unigrams))
    seeds = eager.seeds_of(seed)
    return _candidates.drawn("fixed_unigram", true_classes, num_true, num_sampled, unique, seeds, range_max, *weights)


def all_candidate_sampler(
    true_classes: Any, num_true: int, num_sampled: int, unique: bool, seed: int | None = None, name: str | None = None
) -> SampledCandidates:
    """
    Return all ids of ``[0, num_sampled)``, in order, each with an expected count of 1.

    Source: ``tf.random.all_candidate_sampler``.

    Example:
        >>> all_candidate_sampler([[1]], 1, 3, True).sampled_candidates
        tensor([0, 1, 2])
    """
    return _candidates.all_ids(true_classes, num_true, num_sampled)
