"""A job of several ranks: tables are split over them, dense layers copied, each trains on its part of every batch."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from .. import distributed
from .._agreed import agreed, agreeing
from ..checkpoint import CheckpointStore
from ..distributed.plan import Plans
from ..tables.table import table_if_any
from ._checkpoints import Checkpoint
from ._job import Job, leave
from ._meeting import meet
from ._step import Step

T = TypeVar("T")


class _Checkpoint(Checkpoint):
    """
    A checkpoint that all ranks write, in numbered versions, of which two stay, and those that they are on top of.

    Args:
        alone: that of one process.
        job: of the ranks.
    """

    def __init__(self, alone: Checkpoint, job: Ranks) -> None:
        super().__init__(alone.path.with_suffix(""), f"{alone.form} over ranks")
        self._alone, self._job, self._version = alone, job, 0

    def due(self, step: int, recorded: bool, over: bool) -> bool:
        """Say whether to write after a step, as in one process."""
        return self._alone.due(step, recorded, over)

    def exists(self) -> bool:
        """Say whether ranks have written one. Raise ``ValueError`` if one process has."""
        return self._job.from_first(self._is_there)

    def _is_there(self) -> bool:
        versions = self.path.is_dir() and bool(CheckpointStore(self.path).versions())
        if self._alone.path.exists() and not versions:
            raise ValueError(f"{self._alone.path} is of one process: go on without torchrun, or choose another folder")
        return versions

    def write(self, content: dict[str, Any], train_on: Step) -> None:
        """Write a version: the content, the network with its tables, and the optimizer's state."""
        content = {"format": self.form, "device": train_on.device.type, **content}
        extra = json.loads(json.dumps(content, default=Tensor.tolist))
        (optimizer,) = train_on.optimizers
        delta = self._alone.is_delta(content["position"]["step"])
        distributed.save(self.path, train_on.model, optimizer, extra, delta=delta, keep=2)

    def read(self) -> dict[str, Any]:
        """Return the newest version's content."""
        self._version, content = self._job.from_first(self._newest)
        if not isinstance(content, dict) or content.get("format") != self.form:
            raise ValueError(f"{self.path} is not a checkpoint of this program")
        # JSON has neither tuples nor tensors.
        settings = {name: tuple(x) if isinstance(x, list) else x for name, x in content["settings"].items()}
        states = {name: torch.tensor(x, dtype=torch.uint8) for name, x in content["source_state"].items()}
        return {**content, "settings": settings, "source_state": states}

    def _newest(self) -> tuple[int, Any]:
        version = CheckpointStore(self.path).open().version
        return version.number, version.metadata.get("extra")

    def load(self, content: dict[str, Any], train_on: Step) -> None:
        """Load the version that was read into a network and its optimizer, of any number of ranks."""
        if content["device"] != train_on.device.type:
            raise ValueError(f"the checkpoint was trained on {content['device']}, got device {train_on.device.type}")
        (optimizer,) = train_on.optimizers
        distributed.load(self.path, train_on.model, optimizer, version=self._version)


def begin(device: torch.device, plan: Plans) -> Ranks:
    """Let the ranks that torchrun has started meet, and return their job; see :class:`Ranks`."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store, rank, ranks = next(dist.rendezvous("env://"))
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=meet(store, rank, ranks), rank=rank, world_size=ranks)
    return Ranks(device, plan)


def _is_of_table(parameter: nn.Parameter) -> bool:
    table = table_if_any(parameter)
    return table is not None and table.part is not None


class Ranks(Job):
    """
    The job of all ranks that have met.

    Args:
        device: of this rank's network.
        plan: where tables are.
    """

    def __init__(self, device: torch.device, plan: Plans) -> None:
        super().__init__(device)
        self.rank, self.ranks, self._plan = dist.get_rank(), dist.get_world_size(), plan
        self._group = dist.group.WORLD
        # An agent that has come later has restarted no rank.
        restarts = agreed(self._group, int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)))
        self._is_restart = max(restarts) > 0

    @property
    def is_alone(self) -> bool:
        """Whether there is one process, which torchrun has not started."""
        return False

    @property
    def is_restart(self) -> bool:
        """Whether torchrun has started ranks anew, after one of them ended."""
        return self._is_restart

    def end(self) -> NoReturn:
        """End the process, when no rank needs another any more."""
        dist.barrier()
        leave(0)

    # ---- The network -------------------------------------------------------------------------------------------------

    def split(self, network: nn.Module) -> None:
        """Split a network's tables over the ranks, in place, and print how much each rank has."""
        distributed.shard(network, init_device_mesh(self.device.type, (self.ranks,)), self._plan)
        self.print(str(distributed.plan_of(network)).splitlines()[-1])

    def average(self, network: nn.Module) -> None:
        """
        Average the gradients of a network's dense layers over ranks, as its tables' are.

        Sums of more than two ranks depend on a gradient's place in the message. ``DistributedDataParallel`` changes
        places after its first step, so that a run that goes on from a checkpoint would have other bits than one that
        was not interrupted.
        """
        gradients = [parameter.grad for parameter in network.parameters() if not _is_of_table(parameter)]
        message = torch.cat([gradient.reshape(-1) for gradient in gradients if gradient is not None])
        dist.all_reduce(message)
        message /= self.ranks
        for gradient in gradients:
            if gradient is not None:
                part, message = message.tensor_split([gradient.numel()])
                gradient.copy_(part.view_as(gradient))

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss whose mean over ranks is that of all ranks' examples."""
        losses = nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="none")
        return distributed.global_mean(losses)

    def mean(self, loss: Tensor) -> Tensor:
        """Return the mean over ranks, without a graph."""
        loss = loss.detach().clone()
        dist.all_reduce(loss)
        return loss / self.ranks

    # ---- The data ----------------------------------------------------------------------------------------------------

    def from_first(self, get: Callable[[], T]) -> T:
        """Return what the first rank gets, or raise its error, on all."""
        with agreeing(self._group) as said:
            if self.is_first:
                said.append(get())
        return said[0][0]  # type: ignore[no-any-return]

    def _ends(self, size: int) -> list[int]:
        """Return where each rank's part of so many examples begins, and where the last one ends."""
        return [size * rank // self.ranks for rank in range(self.ranks + 1)]

    def part(self, batch: Any) -> Any:
        """Return this rank's part of a batch, or of the rows of a tensor: as many as another has, or one more."""
        ends = self._ends(len(batch) if isinstance(batch, Tensor) else batch.size)
        begin, end = ends[self.rank : self.rank + 2]
        return batch[begin:end] if isinstance(batch, Tensor) else batch.rows(begin, end)

    def joined(self, part: Tensor, size: int) -> Tensor:
        """Return all ranks' parts of what has ``size`` rows, in order."""
        ends = self._ends(size)
        sizes = [end - begin for begin, end in zip(ends[:-1], ends[1:], strict=True)]
        sent = part.new_zeros(max(sizes), *part.shape[1:])
        sent[: len(part)] = part
        came = [torch.empty_like(sent) for _ in sizes]
        dist.all_gather(came, sent)
        return torch.cat([x[:size] for x, size in zip(came, sizes, strict=True)])

    def sums(self, numbers: dict[str, int]) -> dict[str, int]:
        """Return the sum over ranks of each number."""
        total = torch.tensor(list(numbers.values()), dtype=torch.int64, device=self.device)
        dist.all_reduce(total)
        return dict(zip(numbers, total.tolist(), strict=True))

    # ---- Checkpoints -------------------------------------------------------------------------------------------------

    def own(self, folder: Path) -> Path:
        """Return a folder for this rank alone."""
        return folder / f"rank-{self.rank}"

    def checkpoint(self, alone: Checkpoint) -> Checkpoint:
        """Return a checkpoint that all ranks write, into a folder beside the file of one process."""
        return _Checkpoint(alone, self)

    def resumed(self, given: Checkpoint | None, own: Checkpoint | None) -> Checkpoint | None:
        """Return the ranks' own checkpoint, if they have written one."""
        if given is not None:
            raise ValueError(
                f"--resume {given.path} is of one process: under torchrun a run goes on by itself from what is in its "
                "--output-dir"
            )
        return own if own is not None and own.exists() else None
