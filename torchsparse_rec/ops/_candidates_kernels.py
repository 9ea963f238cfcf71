"""The operators of the family ``candidates``: how they are called, and their fake kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from .autograd import not_differentiable
from .record import check_cpu

# The numbers of CandidateKind in csrc/candidates.h.
UNIFORM, LOG_UNIFORM, FIXED, LEARNED, ALL = range(5)


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
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw ids, with the counts of true classes and theirs; ``name`` is the function's, for errors."""
    check_cpu(name, "generator", generator)
    check_cpu(name, "true_classes", true_classes)
    return torch.ops.torchsparse_rec.candidates_.default(
        generator, counts, unigrams, true_classes, range_max, num_sampled, unique, kind
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
