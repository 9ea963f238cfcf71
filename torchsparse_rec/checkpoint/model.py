"""Checkpoints of whole models: versions in a folder, which one process or all ranks of a job write and read."""

from __future__ import annotations

import hashlib
import os
import secrets
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from .._agreed import agreeing, together
from ..tables.blocks import block_range
from ..tables.boxes import Box
from ..typing import CheckpointKind
from ._contents import Contents, FixedTable
from ._restored import Restored
from ._values import encoded
from ._writer import ShardWriter, Writer
from .store import CheckpointStore

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
    delta: bool = False,
    keep: int | None = None,
    on_phase: Callable[[str], None] | None = None,
) -> int:
    """
    Write a model and its optimizer as the next version in a folder; where there are ranks, all call it.

    Each rank writes its parts of tables and of their optimizer states; the first rank also writes everything
    replicated. A final rename publishes the version: whenever a rank is killed, and whatever fails, earlier versions
    stay whole. It can be loaded by any number of ranks, under any plan, and by one process without
    ``torch.distributed``, which can also save. A run that saves and goes on, and one that loads it with as many ranks
    and the same plan, have the same bits.

    Args:
        folder: a folder only for these checkpoints, which all ranks see; it is made if it is missing.
        module: a module of any class, with tables or without, also in a ``DistributedDataParallel``. Evict options of
            variables are applied first.
        optimizer: an optimizer whose parameters all belong to the module, of :mod:`torchsparse_rec.optim` or of torch.
            Default None: there is none to save.
        extra: the value that :func:`load` will return; the first rank's is saved. None, numbers, strings, tensors, and
            lists, tuples and mappings of them, such as the number of steps and the state of a random generator.
        delta: whether to write only the changes of tables that grow, on top of the version that this model has saved or
            loaded last. All is written if that was in another folder, or by other ranks or plans. Rows that optimizers
            move in every step have always changed, see :meth:`EmbeddingVariable.save_delta`. Default False.
        keep: the number of last versions that stay, besides the versions that they build on. Default: all.
        on_phase: a function that is called with the name of each phase on this rank: see ``CheckpointStore.writer``.

    Returns:
        The version's number.

    Raises:
        BlockingIOError: another job is writing in the folder.
        RuntimeError: ranks call different things.
        ImportError: safetensors is missing (the extra ``checkpoint``).
        OSError: the disk of a rank is full or fails, or a rank does not see the first rank's files.
        ValueError: a state that cannot be stored.
            All errors are raised on all ranks; nothing is published then.

    Source: DeepRec's full checkpoints. The files are safetensors.

    Example:
        >>> import tempfile
        >>> from torchsparse_rec import nn, optim
        >>> from torchsparse_rec.checkpoint import load, save
        >>> folder, table = tempfile.mkdtemp(), nn.Embedding(10, 2)
        >>> optimizer = optim.Adagrad(table.parameters(), lr=0.1)
        >>> save(folder, table, optimizer, extra={"step": 7})
        1
        >>> load(folder, nn.Embedding(10, 2))
        {'step': 7}
    """
    contents = Contents(module, optimizer, "save")
    group, first = contents.group, contents.rank == 0
    with agreeing(group) as said:
        store, found = CheckpointStore(folder, keep=keep), contents.read()
        extra = encoded(extra, "extra", found["tensors"])
        of_rank = {**found["said"], "extra": extra, "ranks": contents.ranks}
        said += [{**contents.alike(), "argument delta": delta}, of_rank, contents.base(folder) if delta else None]
    _check_alike("save", [alike for alike, *_ in said])
    metadata = _joined([of_rank for _, of_rank, _ in said])
    bases = {base for *_, base in said}
    base = bases.pop() if len(bases) == 1 else None
    kind: CheckpointKind = "full" if base is None else "delta"
    with ExitStack() as stack:
        with agreeing(group) as said:
            if first:
                writer = stack.enter_context(store.writer(kind, metadata, base=base, on_phase=on_phase, rank=0))
                token = f".token-{secrets.token_hex(8)}"
                (store.partial(writer.number) / token).touch()
                said += [writer.number, token]
        number, token = said[0]
        _await(group, store.partial(number) / token)
        with agreeing(group):
            to = writer if first else store.shard_writer(number, contents.rank, on_phase)
        together(group, _written(contents, found["tensors"] if first else {}, to, base is not None))
        with agreeing(group) as said:
            said += to.shards if isinstance(to, ShardWriter) else []
        with agreeing(group):
            if first:
                (store.partial(number) / token).unlink()
                for shards in said:
                    writer.add(shards)
                writer.commit()
    for its in contents.growing.values():
        its.note_saved(folder, number)
    return int(number)


def _check_alike(what: str, of_ranks: list[dict[str, Any]]) -> None:
    """Raise ``RuntimeError`` if ranks were given different things."""
    for rank, its in enumerate(of_ranks):
        for name, wanted in of_ranks[0].items():
            if its[name] != wanted:
                raise RuntimeError(
                    f"{what}: the {name} must be the same on all ranks, got {its[name]} on rank {rank}, {wanted} on "
                    "rank 0"
                )


def _joined(of_ranks: list[Any]) -> dict[str, Any]:
    """Return the first rank's description, completed by the other ranks' states of tables that it does not have."""
    result: dict[str, Any] = of_ranks[0]
    for key in result["tables"]:
        its = [said["tables"][key] for said in of_ranks]
        with_rows = [rank for rank, each in enumerate(its) if each.pop("has_rows")]
        first = with_rows[0] if with_rows else 0
        for rank in with_rows:
            if its[rank]["states"] != its[first]["states"]:
                got, wanted = (sorted(its[k]["states"].keys() - {""}) for k in (rank, first))
                raise RuntimeError(
                    f"save: the optimizer's states of table {key!r} must be the same on all ranks that have rows of "
                    f"it, got {got} on rank {rank}, {wanted} on rank {first}: all ranks must take the same steps"
                )
        result["tables"][key] = its[first]
    for key, variable in result["variables"].items():
        variable["of_ranks"] = [said["variables"][key]["of_ranks"] for said in of_ranks]
    return result


def _await(group: Any, path: Path) -> None:
    """Wait for a file; raise ``OSError`` on all ranks if one does not see it."""
    end = time.monotonic() + _PATIENCE
    with agreeing(group) as seen:
        while not path.exists() and time.monotonic() < end:
            time.sleep(0.05)
        seen.append(path.exists())
    _check_seen(path, [sees for (sees,) in seen])


def _check_seen(path: Path, seen: list[Any]) -> None:
    """Raise ``OSError`` if a rank does not see what the first rank sees."""
    if unlike := [rank for rank, sees in enumerate(seen) if not sees or sees != seen[0]]:
        raise OSError(
            f"{path}: ranks {unlike} do not see what rank 0 sees: folder must be the same for all ranks, as on a "
            "network file system"
        )


def _written(
    contents: Contents, tensors: Mapping[str, Tensor], to: Writer | ShardWriter, delta: bool
) -> Generator[None, None, None]:
    """Write this rank's shards, one at a step."""
    for name, its, about in _shards_of(contents, tensors, delta):
        to.write(name, its, about)
        yield
    if isinstance(to, ShardWriter):
        to.sync()


def _shards_of(
    contents: Contents, tensors: Mapping[str, Tensor], delta: bool
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
        if growing.writes:
            for name, part in growing.shards(delta):
                about: dict[str, Any] = {"variable": key, "rank": contents.rank}
                if name == "rows":  # elsewhere keys of all blocks are mixed
                    about["blocks"] = block_range(part["keys"])
                yield name, part, about


def _pieces(its: FixedTable, x: Tensor) -> Iterator[tuple[Box, Tensor]]:
    """Yield this rank's part of a weight or state in boxes of few bytes."""
    kept = its.kept.of_state(x)
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
    Load what :func:`save` has written into a model, in place; where there are ranks, all call it.

    Each rank reads the files that hold some of its parts, one by one. Everything that it reads is checked, with its
    checksum, before anything is changed; the whole manifest is checked too, also the optimizer's options and ``extra``.
    If one rank finds a fault, all ranks refuse.

    Args:
        folder: the folder of the checkpoints.
        module: a module with the same tables, split by any plan over any number of ranks, or whole.
        optimizer: an optimizer of the same class, with the same parameters in the same groups. Default None: its states
            are not loaded.
        version: the checkpoint's number. Default: the newest.

    Returns:
        ``extra`` of :func:`save`, with tensors on the CPU.

    Raises:
        FileNotFoundError: there is no checkpoint.
        RuntimeError: ranks call different things.
        OSError: a file cannot be read, or ranks see different ones. If one disappears while tables are written, they
            are partly loaded.
        ValueError: no such version; the model has other tables, parameters or dtypes, or another optimizer. Also if the
            filter of a variable, ``CBFFilter``, has counters of another size or dtype, a module refuses its state, or
            the checkpoint is damaged. The error names the file, and nothing is changed then, on any rank.

    If there were other ranks, a counter of a ``CBFFilter`` is the largest of the ranks' counters: never too low.

    Example:
        >>> import tempfile
        >>> from torchsparse_rec import nn
        >>> from torchsparse_rec.checkpoint import load, save
        >>> folder, table = tempfile.mkdtemp(), nn.Embedding(10, 2)
        >>> number = save(folder, table, extra={"step": 7})
        >>> load(folder, table)
        {'step': 7}
    """
    contents = Contents(module, optimizer, "load")
    group = contents.group
    with agreeing(group) as said:
        store = CheckpointStore(folder)
        number = store.open(version).version.number if contents.rank == 0 else None
        said += [{**contents.alike(), "version": version}, number]
    _check_alike("load", [alike for alike, _ in said])
    manifest = store.manifest(said[0][1])
    _await(group, manifest)
    with agreeing(group) as said:
        said.append(hashlib.sha256(manifest.read_bytes()).hexdigest())
        restored = Restored(contents, store.open(int(manifest.parent.name)))
    _check_seen(manifest, [digest for (digest,) in said])
    together(group, restored.check())
    try:
        with agreeing(group):
            restored.write_rest()
    except BaseException:
        restored.take_back_rest()
        raise
    together(group, restored.write())
    return restored.extra()
