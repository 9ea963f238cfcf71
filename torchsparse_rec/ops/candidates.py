"""
Family ``candidates``: TensorFlow's candidate samplers, bit for bit, for losses over some of many classes. CPU only.

Contract: csrc/candidates.h. Kernels: csrc/cpu/candidates.cpp.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..jagged.checks import check_tensor
from ._candidates_kernels import ALL, FIXED, LEARNED, LOG_UNIFORM, UNIFORM, drawn
from .record import check_cpu

__all__ = [
    "Candidates",
    "UnigramTable",
    "all_candidates",
    "compute_accidental_hits",
    "fixed_unigram_candidates_",
    "learned_unigram_candidates_",
    "log_uniform_candidates_",
    "new_candidate_generator",
    "new_unigram_counts",
    "uniform_candidates_",
    "unigram_table",
]

_INT64 = range(-(2**63), 2**63)

_ops = torch.ops.torchsparse_rec


class Candidates(NamedTuple):
    """
    Some ids that were drawn, and how often each of them and each true class is expected in such a draw.

    Attributes:
        ids: ``[num_sampled]``, int64, in the order in which they were drawn.
        target_count: the expected counts of the true classes, float32, in their shape.
        count: ``[num_sampled]``, float32: the expected counts of ``ids``.

    Example:
        >>> all_candidates(torch.tensor([[1]]), 2)
        Candidates(ids=tensor([0, 1]), target_count=tensor([[1.]]), count=tensor([1., 1.]))
    """

    ids: Tensor
    target_count: Tensor
    count: Tensor  # type: ignore[assignment]  # in the place of tuple's function


def new_candidate_generator(seed: int, seed2: int = 0, place: int = 0) -> Tensor:
    """
    Make the state of a generator of random words, Philox 4x32-10, from which candidates are drawn.

    Args:
        seed: the key, an integer of 64 bits.
        seed2: the upper half of the counter, an integer of 64 bits. With ``tf.random.set_seed(seed)``, TensorFlow's
            samplers have its global seed here and their own there. Default 0.
        place: the lower half of the counter. Each draw moves it on. Default 0.

    Returns:
        ``[3]``, int64, on the CPU: these three numbers.

    Raises:
        ValueError: a number that is no integer of 64 bits.

    Source: Salmon et al., https://doi.org/10.1145/2063384.2063405.

    Example:
        >>> new_candidate_generator(7)
        tensor([7, 0, 0])
    """
    for name, number in (("seed", seed), ("seed2", seed2), ("place", place)):
        if number not in _INT64:
            raise ValueError(f"new_candidate_generator: {name} must be an integer of 64 bits, got {number}")
    return torch.tensor([seed, seed2, place], dtype=torch.int64, device="cpu")


def uniform_candidates_(
    generator: Tensor, true_classes: Tensor, num_sampled: int, *, range_max: int, unique: bool = True
) -> Candidates:
    """
    Draw ids of ``[0, range_max)``, each as likely as the others.

    Not differentiable. Writes the generator's place.

    Args:
        generator: the result of :func:`new_candidate_generator`; written.
        true_classes: ids of any shape, int32 or int64, on the CPU.
        num_sampled: the number of ids to draw, from 1 to 2^31 - 1.
        range_max: the number of ids, from 1 to 2^62.
        unique: whether an id that has been drawn is drawn again, so that all are distinct. Default True.

    Returns:
        The ids, and the expected counts. With ``unique`` these are ``1 - (1 - p) ** n`` for an id of probability p,
        where n is the number of draws that it took; without, ``p * num_sampled``.

    Raises:
        IndexError: a true class outside ``[0, range_max)``; then nothing has been written.
        ValueError: numbers out of their range, more unique ids than there are, wrong dtypes, shapes or devices.
        TypeError: an argument that must be a tensor and is none.

    Source: ``tf.random.uniform_candidate_sampler``.

    Example:
        >>> generator = new_candidate_generator(7)
        >>> ids, target_count, count = uniform_candidates_(generator, torch.tensor([2]), 4, range_max=4)
        >>> ids.sort().values, target_count > 0
        (tensor([0, 1, 2, 3]), tensor([True]))
    """
    return Candidates(
        *drawn("uniform_candidates_", generator, None, [], true_classes, range_max, num_sampled, unique, UNIFORM)
    )


def log_uniform_candidates_(
    generator: Tensor, true_classes: Tensor, num_sampled: int, *, range_max: int, unique: bool = True
) -> Candidates:
    """
    Draw ids of ``[0, range_max)``, id v with probability ``log((v + 2) / (v + 1)) / log(range_max + 1)``.

    It is nearly Zipf's law, of ids that are ordered by falling frequency. Not differentiable. Writes the generator's
    place.

    Args:
        generator: the result of :func:`new_candidate_generator`; written.
        true_classes: ids of any shape, int32 or int64, on the CPU.
        num_sampled: the number of ids to draw, from 1 to 2^31 - 1.
        range_max: the number of ids, from 1 to 2^62.
        unique: whether an id that has been drawn is drawn again, so that all are distinct. Default True.

    Returns:
        The ids, and the expected counts, as :func:`uniform_candidates_` returns them.

    Raises:
        IndexError: a true class outside ``[0, range_max)``; then nothing has been written.
        ValueError: numbers out of their range, more unique ids than there are, wrong dtypes, shapes or devices.
        TypeError: an argument that must be a tensor and is none.

    Source: ``tf.random.log_uniform_candidate_sampler``.

    Example:
        >>> generator = new_candidate_generator(7)
        >>> ids, _, _ = log_uniform_candidates_(generator, torch.tensor([2]), 1000, range_max=10**6, unique=False)
        >>> bool((ids < 1000).sum() > 400)  # half of the logarithm's range
        True
        >>> generator[2]  # 2,048 words for each id, 4 at a place
        tensor(512000)
    """
    name = "log_uniform_candidates_"
    return Candidates(*drawn(name, generator, None, [], true_classes, range_max, num_sampled, unique, LOG_UNIFORM))


# ---- By weights -----------------------------------------------------------------------------------------------------


class UnigramTable(NamedTuple):
    """
    The weights by which ids are drawn, with Walker's aliases, which make a draw cost the same for any number of ids.

    Attributes:
        weights: ``[V]``, float32.
        chances: ``[V]``, float32: of V ids drawn alike, the share of each that stays as it is.
        aliases: ``[V]``, int32: the ids that the others become.
        total: ``[1]``, float32: the sum of the weights.
        drawable: the number of weights that are not zero.

    Example:
        >>> unigram_table([1.0, 3.0, 0.0]).drawable
        2
    """

    weights: Tensor
    chances: Tensor
    aliases: Tensor
    total: Tensor
    drawable: int


def unigram_table(
    unigrams: Tensor | Sequence[float],
    *,
    distortion: float = 1.0,
    num_reserved_ids: int = 0,
    num_shards: int = 1,
    shard: int = 0,
) -> UnigramTable:
    """
    Prepare the weights of ids, for draws by :func:`fixed_unigram_candidates_`.

    Not differentiable.

    Args:
        unigrams: the weights, or frequencies, of ids from ``num_reserved_ids`` on: ``[n]``, float32, on the CPU.
        distortion: the power to which each is raised. Default 1.
        num_reserved_ids: the number of ids before them, which are never drawn. Default 0.
        num_shards: the number of parts that ids are dealt to in turn. Default 1.
        shard: the part to take; its ids count from 0. Default 0.

    Returns:
        The table, of all ids of the shard.

    Raises:
        ValueError: weights that are negative or not finite, or whose sum is 0; numbers out of their range.

    Source: ``tf.random.fixed_unigram_candidate_sampler``; Walker, https://doi.org/10.1145/355744.355749.

    Example:
        >>> unigram_table([4.0, 9.0], distortion=0.5, num_reserved_ids=1)
        UnigramTable(weights=tensor([0., 2., 3.]), chances=tensor([0.0000, 1.0000, 0.8000]), \
aliases=tensor([2, 1, 1], dtype=torch.int32), total=tensor([5.]), drawable=2)
    """
    name = "unigram_table"
    given = unigrams if isinstance(unigrams, Tensor) else torch.tensor(unigrams, dtype=torch.float32, device="cpu")
    check_cpu(name, "unigrams", given)
    if num_shards < 1 or not 0 <= shard < num_shards:
        raise ValueError(f"{name}: shard must be in [0, num_shards), got {shard} and num_shards {num_shards}")
    if num_reserved_ids < 0:
        raise ValueError(f"{name}: num_reserved_ids must be >= 0, got {num_reserved_ids}")
    # As in TensorFlow, weights are numbered from the shard's reserved ids on, whatever other shards have reserved.
    reserved = len(range(shard, num_reserved_ids, num_shards))
    own = given[(shard - reserved) % num_shards :: num_shards]
    weights, chances, aliases, total = _ops.candidates_unigrams.default(own, reserved, distortion)
    return UnigramTable(weights, chances, aliases, total, int((weights > 0).sum()))


def fixed_unigram_candidates_(
    generator: Tensor, true_classes: Tensor, num_sampled: int, *, table: UnigramTable, unique: bool = True
) -> Candidates:
    """
    Draw ids with the probabilities ``table.weights / table.total``.

    Not differentiable. Writes the generator's place.

    Args:
        generator: the result of :func:`new_candidate_generator`; written.
        true_classes: ids of any shape, int32 or int64, on the CPU.
        num_sampled: the number of ids to draw, from 1 to 2^31 - 1.
        table: the result of :func:`unigram_table`.
        unique: whether an id that has been drawn is drawn again, so that all are distinct. Default True.

    Returns:
        The ids, and the expected counts, as :func:`uniform_candidates_` returns them. The count of a true class whose
        weight is zero is 0.

    Raises:
        IndexError: a true class outside ``[0, V)``; then nothing has been written.
        ValueError: more unique ids than there are weights that are not zero, wrong dtypes, shapes or devices.
        TypeError: an argument that must be a tensor and is none.

    Source: ``tf.random.fixed_unigram_candidate_sampler``.

    Example:
        >>> table = unigram_table([1.0, 0.0, 2.0])
        >>> fixed_unigram_candidates_(new_candidate_generator(7), torch.tensor([0]), 2, table=table).ids.sort().values
        tensor([0, 2])
    """
    name = "fixed_unigram_candidates_"
    if unique and num_sampled > table.drawable:
        raise ValueError(
            f"{name}: num_sampled must be at most the number of ids whose weights are not zero, {table.drawable}, as "
            f"ids are unique, got {num_sampled}"
        )
    unigrams = list(table[:4])
    return Candidates(
        *drawn(name, generator, None, unigrams, true_classes, table.weights.shape[0], num_sampled, unique, FIXED)
    )


def new_unigram_counts(range_max: int) -> Tensor:
    """
    Make the counts of ids for :func:`learned_unigram_candidates_`: of each id 1.

    Args:
        range_max: the number of ids, from 1 to 2^31 - 1.

    Returns:
        ``[range_max + 1]``, int32, on the CPU: a binary indexed tree. Entry i is the sum of as many counts as the
        lowest bit of i says, those before id i; entry 0 is the sum of all.

    Raises:
        ValueError: ``range_max`` out of its range.

    Source: Fenwick, https://doi.org/10.1002/spe.4380240306.

    Example:
        >>> new_unigram_counts(6)
        tensor([6, 1, 2, 1, 4, 1, 2], dtype=torch.int32)
    """
    if not 1 <= range_max < 2**31:
        raise ValueError(f"new_unigram_counts: range_max must be in [1, 2^31), got {range_max}")
    places = torch.arange(range_max + 1, dtype=torch.int32, device="cpu")
    counts = places & -places
    counts[0] = range_max
    return counts


def learned_unigram_candidates_(
    generator: Tensor, counts: Tensor, true_classes: Tensor, num_sampled: int, *, unique: bool = True
) -> Candidates:
    """
    Draw ids as often as they were true classes of earlier calls, and once more; then count the true classes.

    Not differentiable. Writes the generator's place, and the counts until their sum is 2^31 - 1.

    Args:
        generator: the result of :func:`new_candidate_generator`; written.
        counts: the result of :func:`new_unigram_counts`; written.
        true_classes: ids of any shape, int32 or int64, on the CPU.
        num_sampled: the number of ids to draw, from 1 to 2^31 - 1.
        unique: whether an id that has been drawn is drawn again, so that all are distinct. Default True.

    Returns:
        The ids, and the expected counts, as :func:`uniform_candidates_` returns them, from before the true classes are
        counted.

    Raises:
        IndexError: a true class outside ``[0, range_max)``; then nothing has been written.
        ValueError: more unique ids than there are, wrong dtypes, shapes or devices.
        TypeError: an argument that must be a tensor and is none.

    Source: ``tf.random.learned_unigram_candidate_sampler``.

    Example:
        >>> generator, counts = new_candidate_generator(7), new_unigram_counts(3)
        >>> _ = learned_unigram_candidates_(generator, counts, torch.tensor([1, 1]), 2)
        >>> counts[0]  # 3 ids and 2 true classes
        tensor(5, dtype=torch.int32)
    """
    name = "learned_unigram_candidates_"
    check_cpu(name, "counts", counts)
    return Candidates(
        *drawn(name, generator, counts, [], true_classes, counts.numel() - 1, num_sampled, unique, LEARNED)
    )


def all_candidates(true_classes: Tensor, range_max: int) -> Candidates:
    """
    Return every id of ``[0, range_max)`` once, in order, each with an expected count of 1.

    Not differentiable.

    Args:
        true_classes: ids of any shape, int32 or int64, on the CPU.
        range_max: the number of ids, from 1 to 2^31 - 1.

    Returns:
        The ids, and the expected counts.

    Raises:
        IndexError: a true class outside ``[0, range_max)``.
        ValueError: ``range_max`` out of its range, wrong dtypes or devices.
        TypeError: ``true_classes`` that are no tensor.

    Source: ``tf.random.all_candidate_sampler``.

    Example:
        >>> all_candidates(torch.tensor([1]), 3)
        Candidates(ids=tensor([0, 1, 2]), target_count=tensor([1.]), count=tensor([1., 1., 1.]))
    """
    unused = new_candidate_generator(0)
    return Candidates(*drawn("all_candidates", unused, None, [], true_classes, range_max, range_max, True, ALL))


# ---- Accidental hits ------------------------------------------------------------------------------------------------


def compute_accidental_hits(true_classes: Tensor, sampled: Tensor) -> tuple[Tensor, Tensor]:
    """
    Find the samples that are no other classes, but true ones of a row: a sampled loss leaves them out of that row.

    Of an id that was sampled several times, the last place counts, as in TensorFlow. Not differentiable. On CUDA the
    number of hits is read back.

    Args:
        true_classes: ``[N, T]``, int32 or int64.
        sampled: ``[S]``, int32 or int64, on the same device: ids that were drawn.

    Returns:
        An entry for each hit, in the order of the true classes along their rows: its row, and its place in ``sampled``,
        ``[H]`` each, int64.

    Raises:
        ValueError: wrong dtypes, shapes or devices.
        TypeError: an argument that is no tensor.

    Source: ``tf.nn.compute_accidental_hits``, whose weights are ``-torch.finfo(torch.float32).max`` for each hit.

    Example:
        >>> compute_accidental_hits(torch.tensor([[3], [5], [4]]), torch.tensor([4, 3, 9]))
        (tensor([0, 2]), tensor([1, 0]))
    """
    name = "compute_accidental_hits"
    for argument, x, dims in (("true_classes", true_classes, 2), ("sampled", sampled, 1)):
        check_tensor(name, argument, x)
        if x.dim() != dims or x.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"{name}: {argument} must be int32 or int64 of rank {dims}, got {x.dtype} of shape {tuple(x.shape)}"
            )
    if true_classes.device != sampled.device:
        raise ValueError(
            f"{name}: sampled must be on the device of true_classes, {true_classes.device}, got {sampled.device}"
        )
    places = last_places(true_classes, sampled).reshape(-1)
    found = (places >= 0).nonzero()[:, 0]
    return found // max(true_classes.shape[1], 1), places[found]


def last_places(true_classes: Tensor, sampled: Tensor) -> Tensor:
    """Return the last place in ``sampled`` of each true class, or -1, in their shape; nothing is read back."""
    wanted = true_classes.reshape(-1).long().contiguous()
    if sampled.numel() == 0:
        return torch.full_like(wanted, -1).view(true_classes.shape)
    ids, order = sampled.long().sort(stable=True)
    # The place of the last of the ids that are not greater; of the first one, if all are.
    last = (torch.searchsorted(ids, wanted, right=True) - 1).clamp_min(0)
    return order[last].where(ids[last] == wanted, -1).view(true_classes.shape)
