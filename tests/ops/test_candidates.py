"""Candidate samplers beside their reference and TensorFlow: draws, expected counts, state, and what they refuse."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from calls import assert_same_bits, call, operator
from ops import candidates_of_tensorflow as theirs
from ops import sample_checks
from samples.candidates import CANDIDATES_SAMPLES
from torch import Tensor

from torchsparse_rec import ops
from torchsparse_rec.compat._parity.reference import candidates as reference

INT32_MAX = 2**31 - 1
NO_CLASSES = torch.empty(0, dtype=torch.int64)
SAMPLES = [sample for samples in CANDIDATES_SAMPLES.values() for sample in samples]


# ---- Meaning --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CANDIDATES_SAMPLES)
def test_equals_reference(name: str) -> None:
    for sample in CANDIDATES_SAMPLES[name]:
        print(sample)
        actual = call(sample)
        wanted = getattr(reference, name)(*sample.to("cpu").arguments)
        assert len(actual) == len(wanted)
        for x, y in zip(actual, wanted, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-5 if x.dtype == torch.float32 else 0, atol=0)


@pytest.mark.parametrize("layout", [sample_checks.at_odd_address, sample_checks.every_second, sample_checks.transposed])
def test_other_layouts(layout: Callable[[Tensor], Tensor]) -> None:
    for sample in SAMPLES:
        changed = call(sample_checks.read_only(sample, layout))
        for x, y in zip(changed, call(sample), strict=True):
            assert_same_bits(x, y)


def test_words_are_those_of_philox() -> None:
    """Compare with the vectors of the authors' library, Random123: of zeros, of ones, and of digits of pi."""
    ones = 2**64 - 1
    for seed, seed2, place, wanted in (
        (0, 0, 0, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        (ones, ones, ones, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (0x299F31D0A4093822, 0x0370734413198A2E, 0x85A308D3243F6A88, [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]),
    ):
        assert list(islice(reference.philox_words(seed, seed2, place), 4)) == wanted
    # Of 2^32 ids, each is a word.
    generator = ops.new_candidate_generator(0)
    ids = ops.uniform_candidates_(generator, NO_CLASSES, 2, range_max=2**32, unique=False).ids
    assert ids.tolist() == [0x6627E8D5, 0xBC57AC4C]


@pytest.mark.parametrize("unique", [True, False])
@pytest.mark.parametrize("law", ["uniform", "log_uniform", "fixed", "learned"])
def test_ids_are_drawn_as_often_as_the_counts_say(law: str, unique: bool) -> None:
    """Hold the sum over many calls against what is expected, by chi-square."""
    ids, calls, num_sampled = 20, 2000, 8
    generator, classes = ops.new_candidate_generator(3), torch.arange(ids)
    table = ops.unigram_table(torch.arange(1.0, ids + 1), distortion=0.5)
    weights = torch.arange(1, ids + 1).tolist()
    seen, wanted = torch.zeros(ids, dtype=torch.float64), torch.zeros(ids, dtype=torch.float64)
    for _ in range(calls):
        if law == "uniform":
            drawn = ops.uniform_candidates_(generator, classes, num_sampled, range_max=ids, unique=unique)
        elif law == "log_uniform":
            drawn = ops.log_uniform_candidates_(generator, classes, num_sampled, range_max=ids, unique=unique)
        elif law == "fixed":
            drawn = ops.fixed_unigram_candidates_(generator, classes, num_sampled, table=table, unique=unique)
        else:
            counts = reference.tree_of(weights)
            drawn = ops.learned_unigram_candidates_(generator, counts, classes, num_sampled, unique=unique)
        assert len(set(drawn.ids.tolist())) == num_sampled or not unique
        seen += torch.bincount(drawn.ids, minlength=ids)
        wanted += drawn.target_count
    statistic = float(((seen - wanted) ** 2 / wanted).sum())
    # Of 19 degrees of freedom one statistic in 100,000 is above 60. Counts of unique ids are TensorFlow's
    # approximation, which is off by some percent.
    assert statistic < (400 if unique else 60), (seen, wanted)


def test_later_calls_go_on_where_the_others_ended() -> None:
    generator = ops.new_candidate_generator(-5, 2**63 - 1)
    first = ops.uniform_candidates_(generator, NO_CLASSES, 3, range_max=1000).ids
    assert generator.tolist() == [-5, 2**63 - 1, 1536]
    second = ops.uniform_candidates_(generator, NO_CLASSES, 3, range_max=1000).ids
    assert not torch.equal(first, second)
    again = ops.new_candidate_generator(-5, 2**63 - 1, place=1536)
    assert torch.equal(ops.uniform_candidates_(again, NO_CLASSES, 3, range_max=1000).ids, second)


def test_counts_of_unigrams_end_at_the_largest_int32() -> None:
    counts = reference.tree_of([1, INT32_MAX - 4, 1])
    generator = ops.new_candidate_generator(1)
    ops.learned_unigram_candidates_(generator, counts, torch.tensor([2, 0, 0, 0]), 1)
    assert reference.learned_counts(counts) == [2, INT32_MAX - 4, 2]  # two of the four
    assert counts[0] == INT32_MAX
    ops.learned_unigram_candidates_(generator, counts, torch.tensor([2]), 1)
    assert counts[0] == INT32_MAX


def test_shards_take_their_ids_in_turn() -> None:
    weights = torch.arange(1.0, 8)
    of_shards = [ops.unigram_table(weights, num_shards=3, shard=shard).weights.tolist() for shard in range(3)]
    assert of_shards == [[1, 4, 7], [2, 5], [3, 6]]


# ---- Beside TensorFlow ----------------------------------------------------------------------------------------------


def test_recorded_results_of_tensorflow() -> None:
    """Compare counts nearly: they are the C library's, and that of the recording may be another."""
    for case, wanted in theirs.load():
        print(case)
        for ours, recorded in zip(theirs.run_ours(case), wanted, strict=True):
            assert ours[0] == recorded[0]
            np.testing.assert_allclose(ours[1], recorded[1], rtol=1e-6)
            np.testing.assert_allclose(ours[2], recorded[2], rtol=1e-6)


@pytest.mark.tensorflow
@pytest.mark.parametrize("kind", theirs.KINDS)
def test_no_bit_differs_from_tensorflow(kind: str, tensorflow: Any, parity_seed: int) -> None:
    rng = np.random.default_rng([parity_seed, theirs.KINDS.index(kind)])
    for _ in range(40):
        case = theirs.random_case(rng, kind)
        assert theirs.run_ours(case) == theirs.run_tensorflow(tensorflow, case), (parity_seed, case)


# ---- Accidental hits ------------------------------------------------------------------------------------------------


def test_accidental_hits_equal_the_reference() -> None:
    generator = torch.Generator().manual_seed(0)
    for n, t, s in ((4, 1, 9), (0, 2, 5), (6, 3, 20), (3, 2, 0), (2, 0, 3), (50, 2, 40)):
        true_classes = torch.randint(12, (n, t), generator=generator)
        sampled = torch.randint(12, (s,), generator=generator)
        for index in (torch.int64, torch.int32):
            hits = ops.compute_accidental_hits(true_classes.to(index), sampled.to(index))
            assert tuple(x.tolist() for x in hits) == reference.compute_accidental_hits(true_classes, sampled)
            assert all(x.dtype == torch.int64 for x in hits)


@pytest.mark.tensorflow
def test_accidental_hits_beside_tensorflow(tensorflow: Any, parity_seed: int) -> None:
    rng = np.random.default_rng(parity_seed)
    for _ in range(20):
        true_classes, sampled = rng.integers(0, 15, (rng.integers(1, 9), 2)), rng.integers(0, 15, rng.integers(1, 20))
        rows, places, weights = tensorflow.nn.compute_accidental_hits(true_classes, sampled, 2)
        hits = ops.compute_accidental_hits(torch.tensor(true_classes), torch.tensor(sampled))
        assert [x.tolist() for x in hits] == [rows.numpy().tolist(), places.numpy().tolist()]
        assert set(weights.numpy().tolist()) <= {-torch.finfo(torch.float32).max}


# ---- Registrations --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sample", [x for x in SAMPLES if x.representative], ids=str)
def test_opcheck(sample: Any) -> None:
    torch.library.opcheck(operator(sample.operator), sample.to("cpu").arguments)


# ---- What is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [-1, 10])
def test_a_true_class_out_of_range_is_named_and_nothing_is_written(bad: int) -> None:
    generator, counts = ops.new_candidate_generator(1), ops.new_unigram_counts(10)
    classes, table = torch.tensor([[3, 4], [5, bad]]), ops.unigram_table(torch.ones(10))
    for draw in (
        lambda: ops.uniform_candidates_(generator, classes, 2, range_max=10),
        lambda: ops.log_uniform_candidates_(generator, classes, 2, range_max=10),
        lambda: ops.fixed_unigram_candidates_(generator, classes, 2, table=table),
        lambda: ops.learned_unigram_candidates_(generator, counts, classes, 2),
        lambda: ops.all_candidates(classes, 10),
    ):
        with pytest.raises(IndexError, match=rf"true_classes\[3\] must be in \[0, 10\), got {bad}$"):
            draw()
    assert generator.tolist() == [1, 0, 0] and torch.equal(counts, ops.new_unigram_counts(10))


def test_more_unique_ids_than_there_are() -> None:
    generator = ops.new_candidate_generator(1)
    for draw in (ops.uniform_candidates_, ops.log_uniform_candidates_):
        with pytest.raises(ValueError, match="num_sampled must be at most range_max, 4, as ids are unique, got 5"):
            draw(generator, NO_CLASSES, 5, range_max=4)
        assert len(draw(generator, NO_CLASSES, 5, range_max=4, unique=False).ids) == 5
    with pytest.raises(ValueError, match="num_sampled must be at most range_max, 4, as ids are unique, got 5"):
        ops.learned_unigram_candidates_(generator, ops.new_unigram_counts(4), NO_CLASSES, 5)
    table = ops.unigram_table([1.0, 0.0, 2.0], num_reserved_ids=2)
    with pytest.raises(ValueError, match="ids whose weights are not zero, 2, as ids are unique, got 3"):
        ops.fixed_unigram_candidates_(generator, NO_CLASSES, 3, table=table)


def test_ids_that_cannot_be_drawn_end_no_loop() -> None:
    """Give weights whose shares are zero in float32, and counts that are no longer a tree of such."""
    generator = ops.new_candidate_generator(1)
    tiny = ops.unigram_table([1e38, 1e-38])
    assert tiny.drawable == 2
    with pytest.raises(ValueError, match="ids whose weights are not zero, 1, as ids are unique, got 2"):
        ops.fixed_unigram_candidates_(generator, NO_CLASSES, 2, table=tiny)
    counts = reference.tree_of([3, 0, 0])
    with pytest.raises(ValueError, match="ids whose weights are not zero, 1, as ids are unique, got 2"):
        ops.learned_unigram_candidates_(generator, counts, NO_CLASSES, 2)
    counts = ops.new_unigram_counts(4)
    counts[0] = INT32_MAX
    with pytest.raises(ValueError, match="counts must begin with the sum of all, got 2147483647"):
        ops.learned_unigram_candidates_(generator, counts, NO_CLASSES, 2)
    assert generator[2] == 0


@pytest.mark.parametrize(
    ("unigrams", "options", "match"),
    [
        ([], {}, "unigrams must have a finite sum above 0, got 0"),
        ([0.0, 0.0], {}, "unigrams must have a finite sum above 0, got 0"),
        ([3e38, 3e38], {}, "unigrams must have a finite sum above 0, got inf"),
        ([1.0, -1.0], {}, r"unigrams\[1\] must be at least 0, and finite after distortion, 1, got -1"),
        ([1.0, math.nan], {}, r"unigrams\[1\] must be at least 0, .* got -?nan"),
        ([1.0, 0.0], {"distortion": -1.0}, r"unigrams\[1\] must be at least 0, .* distortion, -1, got 0"),
        (torch.ones(2).double(), {}, "unigrams must be float32, got Double"),
        (torch.ones(2, 2), {}, r"unigrams must have rank 1, got shape \[2, 2\]"),
        (torch.ones(2, device="meta"), {}, "unigrams must be on the CPU, got meta"),
        ([1.0], {"num_reserved_ids": -1}, "num_reserved_ids must be >= 0, got -1"),
        ([1.0], {"num_shards": 2, "shard": 2}, r"shard must be in \[0, num_shards\), got 2 and num_shards 2"),
        ([1.0], {"num_shards": 0}, r"shard must be in \[0, num_shards\), got 0 and num_shards 0"),
    ],
)
def test_weights_that_are_none(unigrams: Any, options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        ops.unigram_table(unigrams, **options)


def test_numbers_and_tensors_that_do_not_fit() -> None:
    generator = ops.new_candidate_generator(1)
    draw = operator("candidates_")
    none: list[Tensor] = []
    counts = ops.new_unigram_counts(4)
    unigrams = list(ops.unigram_table(torch.arange(1.0, 5))[:4])
    for arguments, match in (
        ((generator, None, none, NO_CLASSES, 0, 1, True, 0), r"range_max must be in \[1, 4611686018427387904\], got 0"),
        ((generator, None, none, NO_CLASSES, 4, 0, True, 0), r"num_sampled must be in \[1, 2147483647\], got 0"),
        ((generator, None, none, NO_CLASSES, 4, 1, True, 5), r"kind must be in \[0, 4\], got 5"),
        ((generator, None, none, NO_CLASSES, 4, 3, True, 4), "num_sampled must be range_max, 4, as all .* got 3"),
        ((generator, None, none, NO_CLASSES.float(), 4, 3, True, 0), "true_classes must be int32 or int64, got Float"),
        ((generator[:2], None, none, NO_CLASSES, 4, 3, True, 0), r"generator must be Long of shape \[3\], got Long of"),
        (
            (generator.int(), None, none, NO_CLASSES, 4, 3, True, 0),
            r"generator must be Long of shape \[3\], got Int of",
        ),
        ((torch.zeros(6).long()[::2], None, none, NO_CLASSES, 4, 3, True, 0), "generator must be contiguous"),
        ((torch.tensor([0, 0, -1]), None, none, NO_CLASSES, 4, 3, True, 0), r"a place in \[0, 2\^62\] .* got -1"),
        ((generator, counts, none, NO_CLASSES, 4, 3, True, 0), "counts must be given for kind 3 alone, got kind 0"),
        ((generator, None, none, NO_CLASSES, 4, 3, True, 3), "counts must be given for kind 3 alone, .* without them"),
        ((generator, counts, none, NO_CLASSES, 5, 3, True, 3), r"counts must be Int of shape \[6\], got Int of shape"),
        ((generator, counts.long(), none, NO_CLASSES, 4, 3, True, 3), r"counts must be Int of shape \[5\], got Long"),
        ((generator, counts * 0, none, NO_CLASSES, 4, 3, True, 3), "counts must begin with their sum, at least 4, got"),
        ((generator, None, unigrams, NO_CLASSES, 4, 3, True, 0), "unigrams must be given for kind 2 alone, got kind 0"),
        ((generator, None, none, NO_CLASSES, 4, 3, True, 2), "unigrams must be weights, chances, .* got 0 tensors"),
        ((generator, None, unigrams, NO_CLASSES, 5, 3, True, 2), r"unigrams\[0\] must be Float of shape \[5\], got"),
        (
            (generator, None, [*unigrams[:2], unigrams[2] + 9, unigrams[3]], NO_CLASSES, 4, 4, True, 2),
            r"unigrams\[2\] must be ids in \[0, 4\), got \d+ at position",
        ),
    ):
        with pytest.raises(ValueError, match=match):
            draw(*arguments)
    assert generator[2] == 0
    for seed in (2**63, -(2**63) - 1):
        with pytest.raises(ValueError, match=f"seed must be an integer of 64 bits, got {seed}"):
            ops.new_candidate_generator(seed)
    for range_max in (0, 2**31):
        with pytest.raises(ValueError, match=rf"range_max must be in \[1, 2\^31\), got {range_max}"):
            ops.new_unigram_counts(range_max)


def test_what_is_no_tensor_of_the_cpu() -> None:
    generator: Any = ops.new_candidate_generator(1)
    with pytest.raises(TypeError, match="uniform_candidates_: true_classes must be a tensor, got list"):
        ops.uniform_candidates_(generator, [1], 2, range_max=4)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="uniform_candidates_: true_classes must be on the CPU, got meta"):
        ops.uniform_candidates_(generator, NO_CLASSES.to("meta"), 2, range_max=4)
    with pytest.raises(ValueError, match="uniform_candidates_: generator must be on the CPU, got meta"):
        ops.uniform_candidates_(generator.to("meta"), NO_CLASSES, 2, range_max=4)
    with pytest.raises(ValueError, match=r"compute_accidental_hits: sampled must be int32 or int64 of rank 1, got"):
        ops.compute_accidental_hits(torch.zeros(2, 1).long(), torch.zeros(2))
    with pytest.raises(ValueError, match="sampled must be on the device of true_classes, cpu, got meta"):
        ops.compute_accidental_hits(torch.zeros(2, 1).long(), NO_CLASSES.to("meta"))
