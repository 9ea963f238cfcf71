"""Candidate samplers as modules that keep their place: training that is resumed draws what it would have drawn."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..jagged.checks import check_tensor
from ..ops.candidates import (
    Candidates,
    all_candidates,
    fixed_unigram_candidates_,
    learned_unigram_candidates_,
    log_uniform_candidates_,
    new_candidate_generator,
    new_unigram_counts,
    uniform_candidates_,
    unigram_table,
)

__all__ = [
    "AllSampler",
    "FixedUnigramSampler",
    "LearnedUnigramSampler",
    "LogUniformSampler",
    "UniformSampler",
]


class _Sampler(torch.nn.Module):
    """
    What the samplers share: the generator, and how it is kept.

    The generator is no buffer. It stays on the CPU wherever the module is moved, and DistributedDataParallel leaves
    each rank its own.
    """

    # Each sampler's own: the candidates for targets on the CPU.
    _draw: Callable[[Tensor], Candidates]

    def __init__(self, range_max: int, num_sampled: int, unique: bool, seed: int | None, *, most: int) -> None:
        super().__init__()
        name = type(self).__name__
        if range_max < 1:
            raise ValueError(f"{name}: range_max must be at least 1, got {range_max}")
        if num_sampled < 1:
            raise ValueError(f"{name}: num_sampled must be at least 1, got {num_sampled}")
        if unique and num_sampled > most:
            what = "range_max" if most == range_max else "the number of ids whose weights are not zero"
            raise ValueError(
                f"{name}: num_sampled must be at most {what}, {most}, where unique=True, got {num_sampled}"
            )
        if seed is None:
            seed = int(torch.randint(2**63 - 1, (), device="cpu"))
        self.range_max, self.num_sampled, self.unique = range_max, num_sampled, unique
        self.generator = new_candidate_generator(seed)

    def forward(self, target: Tensor) -> Candidates:
        """
        Draw candidates for a batch.

        Args:
            target: the true classes, of any shape, int32 or int64, in ``[0, range_max)``.

        Returns:
            ``ids`` ``[num_sampled]``, int64; ``target_count``, float32, in the shape of ``target``; ``count``
            ``[num_sampled]``, float32. All are on the device of ``target``. One on CUDA is waited for: nothing waits
            where a batch's targets are passed before they are moved there.

        Raises:
            IndexError: a target outside ``[0, range_max)``; then nothing has been drawn.
            ValueError: a target of another dtype.
            TypeError: a target that is no tensor.
        """
        check_tensor(type(self).__name__, "target", target)
        drawn = self._draw(target.detach().cpu())
        return Candidates(*(x.to(target.device, non_blocking=True) for x in drawn))

    def get_extra_state(self) -> Tensor:
        """Return seed and place for ``state_dict()``."""
        return self.generator.clone()

    def set_extra_state(self, state: Tensor) -> None:
        """Take over the result of :meth:`get_extra_state`."""
        wanted = self.get_extra_state()
        if not isinstance(state, Tensor) or state.shape != wanted.shape or state.dtype != wanted.dtype:
            got = f"{state.dtype} of shape {tuple(state.shape)}" if isinstance(state, Tensor) else repr(state)
            raise ValueError(
                f"{type(self).__name__}: the extra state must be {wanted.dtype} of shape {tuple(wanted.shape)}, as "
                f"this sampler's is, got {got}"
            )
        self.generator.copy_(state[:3])

    def extra_repr(self) -> str:
        """Return the arguments, for ``repr``."""
        return f"range_max={self.range_max}, num_sampled={self.num_sampled}, unique={self.unique}"


class LogUniformSampler(_Sampler):
    """
    Draw the other classes of a sampled loss, low ids more often: for ids that are ordered by falling frequency.

    Id v has the probability ``log((v + 2) / (v + 1)) / log(range_max + 1)``.

    Args:
        range_max: the number of ids.
        num_sampled: the number of ids to draw for a batch.
        unique: whether they are distinct. Default True.
        seed: the seed. Samplers of equal seeds draw the same, also on several ranks. Default: drawn from torch's own
            generator, which ``torch.manual_seed`` sets.

    Raises:
        ValueError: numbers below 1, and more unique ids than there are.

    ``state_dict()`` has seed and place: a model that is loaded goes on with the draws that come next.

    Source: ``tf.random.log_uniform_candidate_sampler``, whose bits these are.

    Example:
        >>> sampler = LogUniformSampler(range_max=1000, num_sampled=5, seed=1)
        >>> ids, target_count, count = sampler(torch.tensor([0, 999]))
        >>> ids.shape, target_count.shape, count.shape
        (torch.Size([5]), torch.Size([2]), torch.Size([5]))
        >>> bool(target_count[0] > target_count[1])
        True
    """

    def __init__(self, range_max: int, num_sampled: int, unique: bool = True, seed: int | None = None) -> None:
        super().__init__(range_max, num_sampled, unique, seed, most=range_max)

    def _draw(self, target: Tensor) -> Candidates:
        return log_uniform_candidates_(
            self.generator, target, self.num_sampled, range_max=self.range_max, unique=self.unique
        )


class UniformSampler(_Sampler):
    """
    Draw the other classes of a sampled loss, each as likely as the others.

    Args:
        range_max: the number of ids.
        num_sampled: the number of ids to draw for a batch.
        unique: whether they are distinct. Default True.
        seed: the seed, as that of :class:`LogUniformSampler`.

    Raises:
        ValueError: numbers below 1, and more unique ids than there are.

    Source: ``tf.random.uniform_candidate_sampler``, whose bits these are.

    Example:
        >>> UniformSampler(range_max=10, num_sampled=10, seed=1)(torch.tensor([3])).ids.sort().values
        tensor([0, 1, 2, 3, 4, 5, 6, 7, 8, 9])
    """

    def __init__(self, range_max: int, num_sampled: int, unique: bool = True, seed: int | None = None) -> None:
        super().__init__(range_max, num_sampled, unique, seed, most=range_max)

    def _draw(self, target: Tensor) -> Candidates:
        return uniform_candidates_(
            self.generator, target, self.num_sampled, range_max=self.range_max, unique=self.unique
        )


class FixedUnigramSampler(_Sampler):
    """
    Draw the other classes of a sampled loss by weights that are given, such as the frequencies of items.

    Args:
        unigrams: the weights of ids from ``num_reserved_ids`` on: ``[n]``, float32, on the CPU, or numbers.
        num_sampled: the number of ids to draw for a batch.
        unique: whether they are distinct. Default True.
        seed: the seed, as that of :class:`LogUniformSampler`.
        distortion: the power to which each weight is raised. Default 1.
        num_reserved_ids: the number of ids before them, which are never drawn. Default 0.

    Raises:
        ValueError: numbers below 1, more unique ids than there are weights that are not zero, and weights that are
            negative, not finite, or all zero.

    ``state_dict()`` has seed and place, but no weights.

    Source: ``tf.random.fixed_unigram_candidate_sampler``, whose bits these are.

    Example:
        >>> FixedUnigramSampler([1.0, 0.0, 5.0], num_sampled=2, seed=1)(torch.tensor([1])).ids.sort().values
        tensor([0, 2])
    """

    def __init__(
        self,
        unigrams: Tensor | Sequence[float],
        num_sampled: int,
        unique: bool = True,
        seed: int | None = None,
        *,
        distortion: float = 1.0,
        num_reserved_ids: int = 0,
    ) -> None:
        table = unigram_table(unigrams, distortion=distortion, num_reserved_ids=num_reserved_ids)
        super().__init__(table.weights.shape[0], num_sampled, unique, seed, most=table.drawable)
        self.table = table

    def _draw(self, target: Tensor) -> Candidates:
        return fixed_unigram_candidates_(self.generator, target, self.num_sampled, table=self.table, unique=self.unique)


class LearnedUnigramSampler(_Sampler):
    """
    Draw the other classes of a sampled loss as often as they were targets so far, and once more.

    Args:
        range_max: the number of ids.
        num_sampled: the number of ids to draw for a batch.
        unique: whether they are distinct. Default True.
        seed: the seed, as that of :class:`LogUniformSampler`.

    Raises:
        ValueError: numbers below 1, and more unique ids than there are.

    ``state_dict()`` has seed, place and counts. In ``eval()`` targets are counted too: TensorFlow knows no such mode.

    Source: ``tf.random.learned_unigram_candidate_sampler``, whose bits these are.

    Example:
        >>> sampler = LearnedUnigramSampler(range_max=4, num_sampled=1, seed=1)
        >>> for _ in range(2):
        ...     target_count = sampler(torch.tensor([2, 2, 2, 2])).target_count
        >>> target_count[0]  # 5 of 8
        tensor(0.6250)
    """

    def __init__(self, range_max: int, num_sampled: int, unique: bool = True, seed: int | None = None) -> None:
        super().__init__(range_max, num_sampled, unique, seed, most=range_max)
        self.counts = new_unigram_counts(range_max)

    def _draw(self, target: Tensor) -> Candidates:
        return learned_unigram_candidates_(self.generator, self.counts, target, self.num_sampled, unique=self.unique)

    def get_extra_state(self) -> Tensor:
        """Return seed, place and counts for ``state_dict()``."""
        return torch.cat([self.generator, self.counts.long()])

    def set_extra_state(self, state: Tensor) -> None:
        """Take over the result of :meth:`get_extra_state`."""
        super().set_extra_state(state)
        self.counts.copy_(state[3:])


class AllSampler(_Sampler):
    """
    Return all ids, in order, in the place of some that are drawn.

    Args:
        range_max: the number of ids.

    Raises:
        ValueError: a number below 1.

    Source: ``tf.random.all_candidate_sampler``.

    Example:
        >>> AllSampler(3)(torch.tensor([1]))
        Candidates(ids=tensor([0, 1, 2]), target_count=tensor([1.]), count=tensor([1., 1., 1.]))
    """

    def __init__(self, range_max: int) -> None:
        super().__init__(range_max, range_max, True, 0, most=range_max)

    def _draw(self, target: Tensor) -> Candidates:
        return all_candidates(target, self.range_max)
