"""Checkpoints of models whose tables are split over ranks: versions in a folder, which all ranks write and read."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from ..variable.checkpoint import CheckpointStore, ShardWriter, Writer
from ..variable.saving import metadata_of, shards_of
from ._contents import Contents, FixedTable
from ._restored import Restored
from ._values import encoded
from .agreed import agreed, together
from .boxes import Box

__all__ = ["load", "save"]

# Bytes of a table in a file, which are in memory twice while they are written.
_BYTES = 2**24
# Seconds that a rank waits for what another has written in the folder: caches of network file systems show it late.
_PATIENCE = 30.0


@torch.no_grad()
def save(
    folder: str | os.PathLike[str],
    module: Module,
    optimizer: Optimizer | None = None,
    extra: Any = None,
    *,
    keep: int | None = None,
    on_phase: Callable[[str], None] | None = None,
) -> int:
    """
    Write a model with tables over ranks, and its optimizer, as the next version in a folder; all ranks call it.

    Each rank writes its own parts of tables and of their optimizer states, the first one what all ranks have alike. One
    rename at the end makes it a version: whenever a rank is killed, and whatever fails, earlier versions stay whole. It
    can be loaded by any number of ranks, under any plan, and by one process without ``torch.distributed``, which can
    also save. A run that saves and goes on, and one that loads it with as many ranks and the same plan, have the same
    bits.

    Args:
        folder: for these checkpoints alone, which all ranks see; it is made if it is missing.
        module: that :func:`shard` was given, or another, also in a ``DistributedDataParallel``. Evict options of
            variables are applied first.
        optimizer: that holds parameters of the module alone: one of :mod:`torchsparse_rec.optim`, or of torch.
        extra: of the first rank, for :func:`load` to return: None, numbers, strings, tensors, and lists, tuples and
            mappings of them, such as the number of steps and the state of a random generator.
        keep: how many of the last versions stay. Default: all.
        on_phase: is called with the name of each phase on this rank: see ``CheckpointStore.writer``.

    Returns:
        The version's number.

    Raises:
        BlockingIOError: another job is writing in the folder.
        RuntimeError: ranks call different things.
        ImportError: safetensors is missing (the extra ``checkpoint``).
        OSError: the disk of a rank is full or fails, or a rank does not see what the first has written.
        ValueError: a state that cannot be stored.
            All errors are raised on all ranks; nothing is published then.

    Source: DeepRec's full checkpoints. The files are safetensors.

    Example:
        >>> import tempfile
        >>> from torchsparse_rec import nn, optim
        >>> folder, table = tempfile.mkdtemp(), nn.Embedding(10, 2)
        >>> optimizer = optim.Adagrad(table.parameters(), lr=0.1)
        >>> save(folder, table, optimizer, extra={"step": 7})
        1
        >>> load(folder, nn.Embedding(10, 2))
        {'step': 7}
    """
    contents, found, error = Contents(module, optimizer, "save"), {}, None
    try:
        store = CheckpointStore(folder, keep=keep)
        found = contents.read()
        found["said"] |= {"extra": encoded(extra, "extra", found["tensors"]), "ranks": contents.ranks}
    except Exception as raised:
        error = raised
    group, first = contents.group, contents.rank == 0
    metadata = _joined(agreed(group, found.get("said"), error))
    with ExitStack() as stack:
        token, writer = secrets.token_hex(8), None
        try:
            if first:
                writer = stack.enter_context(store.writer("full", metadata, on_phase=on_phase, rank=0))
                (store.partial(writer.number) / f".token-{token}").touch()
        except Exception as raised:
            error = raised
        number, token = agreed(group, (writer and writer.number, token), error)[0]
        _await(group, store.partial(number) / f".token-{token}")
        to = writer or store.shard_writer(number, contents.rank, on_phase)
        together(group, _written(contents, found["tensors"] if first else {}, to))
        of_ranks = agreed(group, to.shards if isinstance(to, ShardWriter) else [])
        try:
            if writer is not None:
                (store.partial(number) / f".token-{token}").unlink()
                for shards in of_ranks:
                    writer.add(shards)
                writer.commit()
        except Exception as raised:
            error = raised
        agreed(group, None, error)
    return int(number)


def _joined(of_ranks: list[Any]) -> dict[str, Any]:
    """Return what the first rank says, with what others know of the optimizer's states of tables that it has not."""
    result: dict[str, Any] = of_ranks[0]
    for key, table in result["tables"].items():
        for said in of_ranks[1:]:
            other = said["tables"][key]
            table["states"] |= other["states"]
            table["numbers"] = table["numbers"] or other["numbers"]
    return result


def _await(group: Any, path: Path) -> None:
    """Wait for a file; raise ``OSError`` on all ranks if one does not see it."""
    end = time.monotonic() + _PATIENCE
    while not path.exists() and time.monotonic() < end:
        time.sleep(0.05)
    seen = agreed(group, path.exists())
    if not all(seen):
        raise OSError(
            f"{path}: ranks {[rank for rank, sees in enumerate(seen) if not sees]} do not see what rank 0 has written: "
            "folder must be the same for all ranks, as on a network file system"
        )


def _written(contents: Contents, tensors: Mapping[str, Tensor], to: Writer | ShardWriter) -> Iterator[None]:
    """Write this rank's shards, one at a step."""
    for name, its, about in _shards_of(contents, tensors):
        to.write(name, its, about)
        yield
    if isinstance(to, ShardWriter):
        to.sync()


def _shards_of(
    contents: Contents, tensors: Mapping[str, Tensor]
) -> Iterator[tuple[str, dict[str, Tensor], dict[str, Any]]]:
    """Yield the name, tensors and description of each shard that this rank writes."""
    if contents.rank == 0:
        yield "rest", dict(tensors), {}
    for key, its in contents.fixed.items():
        if its.writes:
            for state, x in its.parts().items():
                for box, values in _pieces(its, x):
                    yield "table", {"values": values}, {"table": key, "state": state, "box": box}
    for key, growing in contents.growing.items():
        if growing.plan is not None or contents.rank == 0:
            variable = growing.variable
            with variable._settled():
                variable._rows.evict()
                variable._store.states.flush()
                about = {"variable": key, "rank": contents.rank, "metadata": metadata_of(variable._rows)}
                for name, part in shards_of(variable._rows):
                    yield name, part, about


def _pieces(its: FixedTable, x: Tensor) -> Iterator[tuple[Box, Tensor]]:
    """Yield this rank's part of a weight or state in boxes of few bytes."""
    kept = its.kept_of(x)
    (begin, end), blocks, columns = kept.box
    width = (blocks[1] - blocks[0]) * (columns[1] - columns[0])
    step = max(1, _BYTES // max(1, width * x.element_size()))
    rows = x.view(len(x), -1) if len(x) else x
    for at in range(begin, end if width else begin, step):
        box = kept.box._replace(places=(at, min(at + step, end)))
        yield box, kept.read(rows, box)


# ---- Loading ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def load(
    folder: str | os.PathLike[str], module: Module, optimizer: Optimizer | None = None, *, version: int | None = None
) -> Any:
    """
    Load what :func:`save` has written into a model, in place; all ranks call it.

    Each rank reads those files that hold some of its own parts, one after the other. All that it reads is checked, with
    its checksum, before anything is changed.

    Args:
        folder: of the checkpoints.
        module: with the same tables, split by any plan over any number of ranks, or whole.
        optimizer: of the same class, with the same parameters in the same groups. Default None: its states are not
            loaded.
        version: the checkpoint's number. Default: the newest.

    Returns:
        ``extra`` of :func:`save`, with tensors on the CPU.

    Raises:
        FileNotFoundError: there is no checkpoint.
        OSError: a file cannot be read. If it disappears while tables are written, they are partly loaded.
        ValueError: no such version; the model has other tables, parameters or dtypes, or another optimizer; the
            checkpoint is damaged, and the error names the file. Nothing is changed then, on any rank. The filter of a
            variable, ``CBFFilter``, has counters of another size or dtype.

    Counts of a ``CBFFilter`` are added up over ranks if there were others, and may then be too high, by which keys come
    in earlier.

    Example:
        >>> import tempfile
        >>> from torchsparse_rec import nn
        >>> folder, table = tempfile.mkdtemp(), nn.Embedding(10, 2)
        >>> number = save(folder, table, extra={"step": 7})
        >>> load(folder, table)
        {'step': 7}
    """
    contents, error, number, restored = Contents(module, optimizer, "load"), None, None, None
    group, store = contents.group, CheckpointStore(folder)
    try:
        if contents.rank == 0:
            number = store.open(version).version.number
    except Exception as raised:
        error = raised
    number = agreed(group, number, error)[0]
    _await(group, store.manifest(number))
    try:
        restored = Restored(contents, store.open(number))
    except Exception as raised:
        error = raised
    agreed(group, None, error)
    assert restored is not None
    together(group, restored.check())
    together(group, restored.write())
    return restored.extra()
