"""The processes that train an example together: this one alone, or all that torchrun has started."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypeVar

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from ._checkpoints import Checkpoint

T = TypeVar("T")


class Job:
    """
    The job of one process. What it does to a run of one process is nothing.

    Args:
        device: of the network.
    """

    rank, ranks = 0, 1

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)

    @property
    def is_alone(self) -> bool:
        """Whether there is one process, which torchrun has not started."""
        return True

    @property
    def is_restart(self) -> bool:
        """Whether torchrun has started the ranks anew, after one of them ended."""
        return False

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that prints and draws."""
        return self.rank == 0

    def print(self, *lines: str) -> None:
        """Print lines, once for all ranks."""
        if self.is_first and lines:
            print(*lines, sep="\n", flush=True)

    def end(self) -> int:
        """Return the exit code of a run that went well, where the process does not end here, with its job."""
        return 0

    # ---- The network -------------------------------------------------------------------------------------------------

    def split(self, network: nn.Module) -> None:
        """Split a network's tables over the ranks, in place, before its optimizers are made."""

    def average(self, network: nn.Module) -> None:
        """Average the gradients of a network's dense layers over ranks, as its tables' are."""

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the mean loss of this rank's examples as a part of that of all ranks' examples."""
        return nn.functional.binary_cross_entropy_with_logits(logits, labels)

    def mean(self, loss: Tensor) -> Tensor:
        """Return the mean loss of all ranks' examples, without a graph."""
        return loss.detach()

    # ---- The data ----------------------------------------------------------------------------------------------------

    def from_first(self, get: Callable[[], T]) -> T:
        """Return what the first rank gets, or raise its error."""
        return get()

    def part(self, batch: T) -> T:
        """Return this rank's part of what has ``size`` and ``rows``, a batch, or of the rows of a tensor."""
        return batch

    def joined(self, part: Tensor, size: int) -> Tensor:
        """Return all ranks' parts ``[b, ...]`` of what has ``size`` rows, in order."""
        return part

    def sums(self, numbers: dict[str, int]) -> dict[str, int]:
        """Return the sum over ranks of each number."""
        return numbers

    # ---- Checkpoints -------------------------------------------------------------------------------------------------

    def own(self, folder: Path) -> Path:
        """Return a folder for this rank alone."""
        return folder

    def checkpoint(self, alone: Checkpoint) -> Checkpoint:
        """Return the checkpoint in the place of that of one process, written when that would be."""
        return alone

    def resumed(self, given: Checkpoint | None, own: Checkpoint | None) -> Checkpoint | None:
        """Return the checkpoint from which to go on, if any: the one given, or that which ranks have written."""
        return given


def leave(code: int) -> NoReturn:
    """
    End the process of a rank at once, with all that it still holds.

    A thread of gloo that is the last to hold a tensor made in Python wants the interpreter, which may be gone when a
    process ends by itself, or waits for that thread where it lets go of a group.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


ALONE: Job = Job()
