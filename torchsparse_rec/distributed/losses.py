"""Losses over the examples of all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["global_mean"]


def global_mean(losses: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """
    Return the scalar whose gradient, averaged over ranks, is the gradient of the mean over all ranks' examples.

    Gradients of tables over ranks are averaged, as ``DistributedDataParallel`` averages dense layers' gradients. With a
    mean over each rank's examples, an example of a small batch would count for more than one of a large batch. All
    ranks must call it.

    Args:
        losses: this rank's losses, one for each example, of a floating dtype; empty where the rank has no example.
        group: the ranks. Default None: all.

    Returns:
        ``losses.sum() * ranks / (losses of all ranks)``, without dimensions; 0 on a rank without examples, attached to
        the graph. Its mean over ranks is the mean of all losses. Where all ranks have as many, ``losses.mean()``.

    Raises:
        ValueError: ``losses`` has no dimensions: it may be a mean already.

    Source: the division by ranks in torch's ``DistributedDataParallel``.

    Example:
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> global_mean(torch.tensor([1.0, 3.0]))
        tensor(2.)
        >>> dist.destroy_process_group()
    """
    if losses.dim() == 0:
        raise ValueError(
            "global_mean: losses must have one element for each example, got a scalar: take reduction='none'"
        )
    count = torch.tensor(losses.numel(), dtype=torch.float64, device=losses.device)
    dist.all_reduce(count, group=group)
    if losses.numel() == 0:
        return losses.sum()
    mean = losses.mean()
    return mean * (losses.numel() * dist.get_world_size(group) / count).to(mean.dtype)
