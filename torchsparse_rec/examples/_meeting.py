"""
Where the ranks of a job meet: a part of torchrun's store that no earlier start of the ranks has written to.

torchrun keeps one store for all restarts, in which addresses of ranks that have ended stay: new ranks that read them
connect to nobody, and fail, or wait for half an hour. How often an agent has restarted its ranks does not tell one
start from another, as agents that have come later count otherwise.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from datetime import timedelta

import torch.distributed as dist

__all__ = ["meet"]

_PLACE = "torchsparse_rec/meeting"
_SECONDS = 0.02


def meet(store: dist.Store, rank: int, ranks: int, timeout: timedelta = timedelta(minutes=5)) -> dist.Store:
    """
    Return the part of a store for this start of the ranks, once all of them have come.

    Each rank gives itself a name. Rank 0 says which names it has read, perhaps old ones, and says so again when they
    change; that all are new is known when each rank has found its own name there and has answered.

    Args:
        store: that all ranks share, perhaps with ranks that have ended.
        rank: of this process.
        ranks: how many must come.
        timeout: after which a rank gives up.

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
    """Read the names of all ranks; say whether all have one, and others than before."""
    keys = [f"{_PLACE}/{rank}" for rank in range(ranks)]
    if not store.check(keys):
        return False
    found = [store.get(key).decode() for key in keys]
    changed, names[:] = found != names, found
    return changed
