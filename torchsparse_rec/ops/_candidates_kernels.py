"""The operators of the family ``candidates``: how they are called, and their fake kernels."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .autograd import not_differentiable
from .record import check_cpu

# The numbers of CandidateKind in csrc/candidates.h.
UNIFORM, LOG_UNIFORM, FIXED, LEARNED, ALL = range(5)


class Candidates(NamedTuple):
    """
    Some ids that were drawn, and how often each of them and each true class is expected in such a draw.

    Attributes:
        ids: ``[num_sampled]``, int64, in the order in which they were drawn.
        target_count: the expected counts of the true classes, float32, in their shape.
        count: ``[num_sampled]``, float32: the expected counts of ``ids``.

    Example:
        >>> from torchsparse_rec import ops
        >>> ops.all_candidates(torch.tensor([[1]]), 2)
        Candidates(ids=tensor([0, 1]), target_count=tensor([[1.]]), count=tensor([1., 1.]))
    """

    ids: Tensor
    target_count: Tensor
    count: Tensor  # type: ignore[assignment]  # in the place of tuple's function


def drawn(
    name: str,
    generator: Tensor,
    counts: Tensor | None,
    unigrams: list[Tensor],
    true_classes: Tensor,
    range_max: int,
    num_sampled: int,
    unique: bool,
    kind: int,
) -> Candidates:
    """Draw candidates by the operator; ``name`` is the function's, for errors."""
    check_cpu(name, "generator", generator)
    check_cpu(name, "true_classes", true_classes)
    return Candidates(
        *torch.ops.torchsparse_rec.candidates_.default(
            generator, counts, unigrams, true_classes, range_max, num_sampled, unique, kind
        )
    )


@torch.library.register_fake("torchsparse_rec::candidates_")
def _candidates_fake(generator, counts, unigrams, true_classes, range_max, num_sampled, unique, kind):
    return (
        true_classes.new_empty((num_sampled,), dtype=torch.int64),
        true_classes.new_empty(true_classes.shape, dtype=torch.float32),
        true_classes.new_empty((num_sampled,), dtype=torch.float32),
    )


@torch.library.register_fake("torchsparse_rec::candidates_unigrams")
def _unigrams_fake(unigrams, reserved, distortion):
    size = unigrams.shape[0] + reserved
    return (
        unigrams.new_empty((size,)),
        unigrams.new_empty((size,)),
        unigrams.new_empty((size,), dtype=torch.int32),
        unigrams.new_empty((1,)),
    )


not_differentiable("candidates_unigrams")
