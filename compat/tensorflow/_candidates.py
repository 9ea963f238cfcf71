"""Behind :mod:`.random`, :mod:`.nn` and :mod:`.raw_ops`: candidate samplers, their seeds, and their streams."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import ops
from ._sparse_tensor import as_int64
from .arguments import as_size


class SampledCandidates(NamedTuple):
    """What candidate samplers return."""

    #: ``[num_sampled]``, int64, on the device of ``true_classes``, as are all.
    sampled_candidates: Tensor
    #: ``[batch, num_true]``, float32: how often each true class is expected in such a draw.
    true_expected_count: Tensor
    #: ``[num_sampled]``, float32: how often each candidate is.
    sampled_expected_count: Tensor


class AccidentalHits(NamedTuple):
    """What :func:`.nn.compute_accidental_hits` returns, for each hit."""

    #: Its row in ``true_classes``, int32.
    indices: Tensor
    #: Its place in ``sampled_candidates``, int64.
    ids: Tensor
    #: The lowest float32, which takes a logit out of a softmax.
    weights: Tensor


# ---- Seeds and streams -----------------------------------------------------------------------------------------------

_MOST = 2**31 - 1
_DEFAULT_GLOBAL_SEED = 87654321


class Seeds(NamedTuple):
    """The two seeds of a call, and whether calls that are equal, seeds included, go on where this one ends."""

    seed: int
    seed2: int
    goes_on: bool = True


class Eager:
    """
    The global seed, and where each call has come to, as TensorFlow keeps it while it is eager.

    TensorFlow has a kernel for all calls of the same attributes, which keeps its generator's place, and the counts of
    the learned unigrams. A kernel is forgotten when the global seed is set.
    """

    def __init__(self) -> None:
        self.begin(None)

    def begin(self, seed: Any) -> None:
        """Set the global seed, or None, and forget where calls have come to."""
        self.seed = None if seed is None else as_size("seed", seed)
        self._own_seeds = random.Random(self.seed)
        self.streams: dict[tuple[Any, ...], Callable[..., ops.Candidates]] = {}

    def seeds_of(self, seed: Any) -> Seeds:
        """Return the seeds of a call that has one of its own, or None."""
        own = None if seed is None else as_size("seed", seed)
        if self.seed is None:
            return Seeds(0, 0) if own is None else Seeds(_DEFAULT_GLOBAL_SEED, own % _MOST)
        # A seed that is drawn for this call will not come again.
        second = self._own_seeds.randint(0, _MOST) if own is None else own
        seeds = Seeds(self.seed % _MOST, second % _MOST, own is not None)
        return seeds if seeds[:2] != (0, 0) else seeds._replace(seed2=_MOST)


eager = Eager()


def drawn(
    kind: str,
    true_classes: Any,
    num_true: Any,
    num_sampled: Any,
    unique: bool,
    seeds: Seeds,
    range_max: Any,
    *attributes: Any,
) -> SampledCandidates:
    """Draw from the stream of a kind of sampler, of these numbers, seeds and further attributes."""
    classes, num_sampled = _classes(true_classes, num_true), _count(num_sampled)
    attributes = (as_size("range_max", range_max), *attributes)
    key = (kind, classes.shape[1], num_sampled, bool(unique), *seeds[:2], *attributes)
    stream = eager.streams.get(key)
    if stream is None:
        # As in TensorFlow, two zeros are no seeds.
        pair = seeds[:2] if any(seeds[:2]) else (int(torch.randint(2**63 - 1, (), device="cpu")), 0)
        stream = _KINDS[kind](ops.new_candidate_generator(*pair), *attributes)
    result = stream(classes.cpu(), num_sampled, unique=bool(unique))
    if seeds.goes_on:
        eager.streams[key] = stream
    return SampledCandidates(*(x.to(classes.device, non_blocking=True) for x in result))


def _classes(true_classes: Any, num_true: Any) -> Tensor:
    classes, num_true = as_int64("true_classes", true_classes), as_size("num_true", num_true)
    if num_true < 1 or classes.dim() != 2 or classes.shape[1] != num_true:
        raise ValueError(
            f"true_classes must be [batch, num_true] with num_true at least 1, got shape {list(classes.shape)} and "
            f"num_true {num_true}"
        )
    return classes


def _count(num_sampled: Any) -> int:
    count: int = as_size("num_sampled", num_sampled)
    if count < 1:
        raise ValueError(f"num_sampled must be at least 1, got {count}")
    return count


def _learned(generator: Tensor, range_max: int) -> Callable[..., ops.Candidates]:
    return partial(ops.learned_unigram_candidates_, generator, ops.new_unigram_counts(range_max))


def _fixed(
    generator: Tensor,
    range_max: int,
    vocab_file: str,
    distortion: float,
    num_reserved_ids: int,
    num_shards: int,
    shard: int,
    unigrams: tuple[float, ...],
) -> Callable[..., ops.Candidates]:
    if bool(vocab_file) == bool(unigrams):
        raise ValueError("unigrams or vocab_file must be given, and not both")
    table = ops.unigram_table(
        unigrams or _weights_in(vocab_file),
        distortion=distortion,
        num_reserved_ids=num_reserved_ids,
        num_shards=num_shards,
        shard=shard,
    )
    if len(table.weights) != range_max:
        raise ValueError(f"range_max must be the number of ids in unigrams, {len(table.weights)}, got {range_max}")
    return partial(ops.fixed_unigram_candidates_, generator, table=table)


def _weights_in(vocab_file: str) -> list[float]:
    """Return the last field of each line of a file of fields with commas between them."""
    with open(vocab_file, encoding="utf-8") as file:
        lines = [line.rstrip("\n") for line in file]
    try:
        return [float(line.rpartition(",")[2]) for line in lines if line]
    except ValueError as error:
        raise ValueError(f"vocab_file {vocab_file!r} must have a number at the end of each line: {error}") from None


_KINDS: dict[str, Callable[..., Callable[..., ops.Candidates]]] = {
    "uniform": lambda generator, range_max: partial(ops.uniform_candidates_, generator, range_max=range_max),
    "log_uniform": lambda generator, range_max: partial(ops.log_uniform_candidates_, generator, range_max=range_max),
    "learned_unigram": _learned,
    "fixed_unigram": _fixed,
}


# ---- Without a stream ------------------------------------------------------------------------------------------------


def all_ids(true_classes: Any, num_true: Any, num_sampled: Any) -> SampledCandidates:
    """Return every id of ``[0, num_sampled)``."""
    classes = _classes(true_classes, num_true)
    result = ops.all_candidates(classes.cpu(), _count(num_sampled))
    return SampledCandidates(*(x.to(classes.device, non_blocking=True) for x in result))


def accidental_hits(true_classes: Any, sampled_candidates: Any, num_true: Any) -> AccidentalHits:
    """Compute ``tf.nn.compute_accidental_hits``."""
    classes = _classes(true_classes, num_true)
    sampled = as_int64("sampled_candidates", sampled_candidates, device=classes.device)
    if sampled.dim() != 1:
        raise ValueError(f"sampled_candidates must have rank 1, got shape {list(sampled.shape)}")
    rows, places = ops.compute_accidental_hits(classes, sampled)
    lowest = torch.finfo(torch.float32).min
    return AccidentalHits(rows.int(), places, torch.full(rows.shape, lowest, device=rows.device))
