"""
The needs of a program that torchrun starts, and restarts: ranks that meet, and processes that end.

torchrun keeps one store for all restarts, and the addresses of ended ranks stay there. New ranks that read them find no
process, and fail, or wait for half an hour. The number of an agent's restarts does not identify a start, because agents
that have come later count otherwise. Therefore ranks meet in a part of the store that no earlier start has written to.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module, Parameter

from .. import _interrupt
from .._agreed import agreed, agreeing
from ..tables.table import table_if_any

T = TypeVar("T")

__all__ = ["Ranks", "is_under_torchrun", "join", "meet", "run_command"]

_PLACE = "torchsparse_rec/meeting"
_SECONDS = 0.02


def is_under_torchrun() -> bool:
    """Say whether torchrun has started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def join(device: torch.device) -> torch.device:
    """
    Make the default process group of the ranks that torchrun has started, once all of them have met.

    Args:
        device: the kind of device that ranks have. They speak by NCCL if it is ``cuda``, else by gloo.

    Returns:
        This rank's device.
    """
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    store, rank, ranks = next(dist.rendezvous("env://"))
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=meet(store, rank, ranks), rank=rank, world_size=ranks)
    return device


class Ranks:
    """
    The processes that train a model together: all of the default process group, or this one alone.

    Example:
        >>> ranks = Ranks()
        >>> ranks.rank, ranks.size, ranks.span(10)
        (0, 1, slice(0, 10, None))
    """

    def __init__(self) -> None:
        self.group = dist.group.WORLD if dist.is_initialized() else None
        self.rank, self.size = (0, 1) if self.group is None else (dist.get_rank(), dist.get_world_size())

    def print(self, *lines: str) -> None:
        """Print lines, once for all ranks."""
        if self.rank == 0 and lines:
            print(*lines, sep="\n", flush=True)

    def from_first(self, get: Callable[[], T]) -> T:
        """Return the first rank's result, or raise its error, on all."""
        with agreeing(self.group) as said:
            if self.rank == 0:
                said.append(get())
        return said[0][0]  # type: ignore[no-any-return]

    def span(self, size: int) -> slice:
        """Return which of so many examples are this rank's: as many as another has, or one more."""
        return slice(size * self.rank // self.size, size * (self.rank + 1) // self.size)

    def joined(self, part: Tensor) -> Tensor:
        """Return the parts of all ranks, in order."""
        return part if self.group is None else torch.cat(agreed(self.group, part.cpu())).to(part.device)

    def average(self, tensors: Sequence[Tensor]) -> None:
        """
        Average tensors over the ranks, in place, in one message.

        Sums of more than two ranks depend on an element's place in the message. ``DistributedDataParallel`` changes
        places after its first step, so that a run that goes on from a checkpoint has other bits than one that was not
        interrupted.
        """
        if self.group is None:
            return
        message = torch.cat([x.reshape(-1) for x in tensors])
        dist.all_reduce(message)
        message /= self.size
        for x, part in zip(tensors, message.split([x.numel() for x in tensors]), strict=True):
            x.copy_(part.view_as(x))

    def average_gradients(self, module: Module) -> None:
        """Average the gradients of a module's dense layers, as its tables' over ranks are."""
        self.average([p.grad for p in module.parameters() if p.grad is not None and not _is_split(p)])


def _is_split(parameter: Parameter) -> bool:
    table = table_if_any(parameter)
    return table is not None and table.part is not None


def run_command(main: Callable[[], int]) -> NoReturn:
    """
    Run a command, and end the process with its exit code, or after Ctrl-C with a line and 130.

    A rank ends at once, with all that it still holds, when no rank needs it any more. A thread of gloo that is the last
    to hold a tensor made in Python wants the interpreter, which may be gone when a process ends by itself.

    Args:
        main: the command; it returns the exit code.
    """
    _interrupt.run_command((lambda: _run_rank(main)) if is_under_torchrun() else main)


def _run_rank(main: Callable[[], int]) -> NoReturn:
    code: Any = 1
    try:
        code = main()
        if code == 0 and dist.is_initialized():
            dist.barrier()
    except KeyboardInterrupt:
        raise
    except SystemExit as end:
        code = end.code or 0
    except BaseException:  # Python would print it likewise, were it to end the process
        traceback.print_exc()
    if not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    _leave(code)


def _leave(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def meet(store: dist.Store, rank: int, ranks: int, timeout: timedelta = timedelta(minutes=5)) -> dist.Store:
    """
    Return the part of a store for this start of the ranks, once all of them have come.

    Each rank gives itself a name. Rank 0 publishes the names that it has read, perhaps old ones, and again when they
    change. All names are new once each rank has found its own name there and has answered.

    Args:
        store: the store that all ranks share, perhaps with ranks that have ended.
        rank: the rank of this process.
        ranks: how many must come.
        timeout: the time after which a rank gives up.

    Raises:
        RuntimeError: a rank has not come in time.

    Example:
        >>> store = dist.HashStore()
        >>> meet(store, 0, 1).set("a", "b")
        >>> store.check(["a"])
        False
    """
    mine, end = secrets.token_hex(8), time.monotonic() + timeout.total_seconds()
    store.set(f"{_PLACE}/{rank}", mine)
    names: list[str] = []
    while time.monotonic() < end:
        if rank == 0:
            if _read(store, names, ranks):
                store.set(f"{_PLACE}/names", json.dumps(names))
        elif store.check([f"{_PLACE}/names"]):
            names = json.loads(store.get(f"{_PLACE}/names"))
        if len(names) == ranks and names[rank] == mine:
            place = f"{_PLACE}/{hashlib.sha256(' '.join(names).encode()).hexdigest()}"
            store.set(f"{place}/{rank}", "")
            if rank == 0 and store.check([f"{place}/{each}" for each in range(ranks)]):
                store.set(f"{place}/all", "")
            if store.check([f"{place}/all"]):
                return dist.PrefixStore(place, store)
        time.sleep(_SECONDS)
    raise RuntimeError(f"rank {rank} of {ranks}: not all ranks have come within {timeout}")


def _read(store: dist.Store, names: list[str], ranks: int) -> bool:
    """Read the names of all ranks; return whether all have one, and whether they are others than before."""
    keys = [f"{_PLACE}/{rank}" for rank in range(ranks)]
    if not store.check(keys):
        return False
    found = [store.get(key).decode() for key in keys]
    changed, names[:] = found != names, found
    return changed
