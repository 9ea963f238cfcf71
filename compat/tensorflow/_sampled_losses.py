"""Behind :mod:`.nn` and :mod:`.compat.v1.nn`: TensorFlow's losses over classes that were sampled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ...nn.sampled_losses import Logits, sampled_logits
from ...ops.candidates import Candidates
from ...typing import PartitionStrategy
from ._embedding import lookup, shards_of
from ._sparse_tensor import as_int64
from .arguments import as_size, as_tensor
from .random import log_uniform_candidate_sampler


def sampled_loss(
    losses_of: Callable[[Logits], Tensor],
    weights: Any,
    biases: Any,
    labels: Any,
    inputs: Any,
    num_sampled: Any,
    num_classes: int,
    num_true: Any,
    sampled_values: Any,
    remove_accidental_hits: bool,
    partition_strategy: PartitionStrategy,
    sparse_gradient: bool,
    seed: int | None = None,
) -> Tensor:
    """Compute ``tf.nn.sampled_softmax_loss`` or ``tf.nn.nce_loss``, as ``losses_of`` says."""
    inputs = as_tensor("inputs", inputs)
    labels = as_int64("labels", labels, device=inputs.device)
    num_true, num_sampled = as_size("num_true", num_true), as_size("num_sampled", num_sampled)
    if inputs.dim() != 2 or not inputs.is_floating_point():
        raise ValueError(f"inputs must be [batch, dim] of floats, got {inputs.dtype} of shape {list(inputs.shape)}")
    if num_true < 1 or list(labels.shape) != [inputs.shape[0], num_true]:
        raise ValueError(
            f"labels must be [batch, num_true], [{inputs.shape[0]}, {num_true}], got shape {list(labels.shape)}"
        )
    tables = {"weights": shards_of("weights", weights), "biases": shards_of("biases", biases)}
    if tables["weights"][0].shape[1:] != inputs.shape[1:] or tables["biases"][0].dim() != 1:
        shapes = " and ".join(str(list(table[0].shape)) for table in tables.values())
        raise ValueError(f"weights must have rows of {inputs.shape[1]} numbers, and biases one of each, got {shapes}")
    if sampled_values is None:
        with _named("labels"):
            sampled_values = log_uniform_candidate_sampler(labels, num_true, num_sampled, True, num_classes, seed)
    candidates = _candidates(sampled_values, labels, inputs)
    if remove_accidental_hits and candidates.ids.shape[0] != num_sampled:
        raise ValueError(f"num_sampled must be that of sampled_values, {candidates.ids.shape[0]}, got {num_sampled}")
    ids = torch.cat([labels.reshape(-1), candidates.ids])
    # As TensorFlow does, cast tables to the dtype of inputs.
    wide, found = torch.promote_types(inputs.dtype, torch.float32), []
    for argument, table in tables.items():
        with _named(argument):
            found.append(lookup(table, ids, partition_strategy, None, sparse_gradient).to(inputs.dtype).to(wide))
    rows, values = found
    logits = sampled_logits(inputs.to(wide), rows, values, labels, candidates, remove_accidental_hits)
    return losses_of(logits).to(inputs.dtype)


def _candidates(sampled_values: Any, labels: Tensor, inputs: Tensor) -> Candidates:
    if len(sampled_values) != 3:
        raise ValueError(f"sampled_values must be a sampler's three tensors, got {len(sampled_values)}")
    sampled, *counts = sampled_values
    sampled = as_int64("sampled_values", sampled, device=inputs.device)
    counts = [as_tensor("sampled_values", x, device=inputs.device).detach() for x in counts]
    if sampled.dim() != 1 or [x.shape for x in counts] != [labels.shape, sampled.shape]:
        shapes = ", ".join(str(list(x.shape)) for x in (sampled, *counts))
        raise ValueError(
            f"sampled_values must be [num_sampled], the shape of labels {list(labels.shape)}, and [num_sampled], got "
            f"{shapes}"
        )
    for x in counts:
        if x.dtype != inputs.dtype:
            raise ValueError(
                f"inputs must have the dtype of the counts in sampled_values, {x.dtype}, got {inputs.dtype}"
            )
    return Candidates(*(x.to(inputs.device, non_blocking=True) for x in (sampled, *counts)))


@contextmanager
def _named(argument: str) -> Iterator[None]:
    """Name an argument in errors of ids out of range."""
    try:
        yield
    except IndexError as error:
        raise IndexError(f"{argument}: {error}") from None
