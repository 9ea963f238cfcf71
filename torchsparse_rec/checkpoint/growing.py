"""Checkpoints of a variable in folders; a checkpoint is checked as a whole before its restoration changes anything."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..variable.arguments import LOAD_INSTEAD, SAVE_INSTEAD, check_whole
from ..variable.filters import CounterAdmission, SketchAdmission
from ..variable.keys import packed, unpacked
from ..variable.records import RowPart
from ..variable.rows import TableRows
from ._checks import ContentChecks, check_metadata
from .parts import Growing
from .store import Chain, CheckpointStore

__all__ = ["check_metadata", "checks_of", "metadata_of", "refill", "restore", "save", "seen_of", "shards_of"]


@torch.no_grad()
def save(
    table: Growing, kind: str, path: str | os.PathLike[str], keep: int | None, on_phase: Callable[[str], None] | None
) -> int:
    """
    Write a version of a checkpoint, note it as the base of the next delta, and return its number.

    A ``"delta"`` is on top of the version that the rows have noted. See :meth:`EmbeddingVariable.save`.
    """
    rows, method = table.table_rows, "EmbeddingVariable.save" if kind == "full" else "EmbeddingVariable.save_delta"
    check_whole(table.stored_weight(), method, SAVE_INSTEAD)
    if kind == "delta" and (rows.saved is None or rows.saved[1] != os.path.abspath(path)):
        last = "there is none" if rows.saved is None else f"the last one is in {rows.saved[1]}"
        raise ValueError(f"{method}: path must be the last checkpoint's, but {last}: save()")
    with table.settled():
        folder, states = CheckpointStore(path, keep=keep), rows.store.states
        rows.evict()
        since = base = None
        if kind == "delta" and not rows.all_changed:
            assert rows.saved is not None
            step, _, base = rows.saved
            since = None if states.moves_all_rows() else step
        states.flush()
        metadata = metadata_of(rows)
        with folder.writer("full" if base is None else "delta", metadata, base=base, on_phase=on_phase) as writer:
            for name, tensors in shards_of(rows, since, base is not None):
                writer.write(name, tensors)
        # Only now: a checkpoint that failed has saved nothing.
        rows.note_saved((rows.store.step, os.path.abspath(path), writer.number))
    return writer.number


def metadata_of(rows: TableRows) -> dict[str, Any]:
    """Return a variable's metadata for a checkpoint, beside its shards."""
    store = rows.store
    optimizer = store.states.optimizer
    return {
        "name": store.name,
        "embedding_dim": store.weight.shape[1],
        "dtype": str(store.weight.dtype).removeprefix("torch."),
        "key_dtype": str(store.key_dtype).removeprefix("torch."),
        "global_step": store.step,
        "evicted": rows.evicted,
        "seen": rows.seen,
        "optimizer": None if optimizer is None else type(optimizer).__name__,
        "optimizer_steps": store.states.steps(),
        "states": [column.name for column in store.states.columns()],
    }


def shards_of(
    rows: TableRows,
    since: int | None = None,
    delta: bool = False,
    order: Callable[[Tensor], Tensor] | None = None,
) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """
    Yield the names and tensors of a variable's shards, whose rows are up to date.

    Args:
        rows: the rows of the variable.
        since: the step since which rows must have changed to be written. Default: all are written.
        delta: whether they are on top of others.
        order: the order of the first tier's keys in shards "rows", see :meth:`TableRows.parts`. A shard "order" then
            has the keys in the order of rows, for readers of all keys. Default: "rows" has this order.
    """
    if delta and rows.erased:
        yield "erased", {"keys": torch.cat(rows.erased).unique()}
    if order is not None and len(keys := rows.first_tier(since)[1]):
        yield "order", {"keys": keys}
    for part in rows.parts(since, order):
        if len(part.keys) or not delta:
            yield "rows", part.tensors()
    admission = rows.admission
    if isinstance(admission, SketchAdmission):
        yield "sketch", {"sketch": admission.sketch}
    elif isinstance(admission, CounterAdmission):
        candidates = admission.candidates
        entries = candidates.entries[candidates.rows()]
        frequencies, versions = unpacked(entries[:, 1])
        if since is not None:
            entries, frequencies, versions = (x[versions >= since] for x in (entries, frequencies, versions))
        yield "candidates", {"keys": entries[:, 0].contiguous(), "frequencies": frequencies, "versions": versions}


# ---- Restoration -----------------------------------------------------------------------------------------------------


def _checked(rows: TableRows, paths: Sequence[str | os.PathLike[str]], version: int | None) -> list[Chain]:
    """
    Open the checkpoints of some folders, and read them, to see that they can all be restored.

    The version and the errors are as in :meth:`EmbeddingVariable.restore`.
    """
    chains = [CheckpointStore(one).open(version) for one in paths]
    store, states, checks = rows.store, rows.store.states, checks_of(rows)
    for chain in chains:
        metadata = chain.version.metadata
        for name, has in (
            ("embedding_dim", store.weight.shape[1]),
            ("key_dtype", str(store.key_dtype).removeprefix("torch.")),
        ):
            if metadata.get(name) != has:
                raise ValueError(
                    f"EmbeddingVariable.restore: of {store.name!r}: the checkpoint's {name} must be {has}, got "
                    f"{metadata.get(name)} in {chain.manifest_path}"
                )
        check_metadata(chain.manifest_path, metadata)
        for path, name, tensors in chain.read():
            newest = path.parent == chain.manifest_path.parent
            checks.check_shard(path, name, tensors, metadata["states"] if newest else ())
            if name == "sketch" and not _takes(rows.admission, tensors["sketch"]):
                warnings.warn(
                    "EmbeddingVariable.restore: the checkpoint's counting Bloom filter has another size: it starts "
                    "empty",
                    stacklevel=4,
                )
    metadata = chains[0].version.metadata
    if states.optimizer is None and metadata["states"]:
        warnings.warn(
            f"EmbeddingVariable.restore: the checkpoint has states of {metadata['optimizer']}, and no optimizer of "
            "torchsparse_rec.optim holds the table: make it before, to have them",
            stacklevel=4,
        )
    return chains


def checks_of(rows: TableRows) -> ContentChecks:
    """Return the checks of shards that a variable's rows can be restored from."""
    store = rows.store
    return ContentChecks(store.weight.shape[1], store.key_dtype, store.states.known_states())


def restore(
    table: Growing,
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    version: int | None,
    shard: int,
    num_shards: int,
) -> None:
    """Replace all rows by the rows of checkpoints, see :meth:`EmbeddingVariable.restore`."""
    check_whole(table.stored_weight(), "EmbeddingVariable.restore", LOAD_INSTEAD)
    if not 0 <= shard < num_shards:
        raise ValueError(f"EmbeddingVariable.restore: shard must be in [0, {num_shards}), got {shard}")
    paths = [path] if isinstance(path, (str, os.PathLike)) else list(path)
    if not paths:
        raise ValueError("EmbeddingVariable.restore: path must be a folder or several, got none")
    rows = table.table_rows
    chains = _checked(rows, paths, version)

    def wanted() -> Iterator[tuple[str, dict[str, Tensor]]]:
        for chain in chains:
            for _, name, tensors in chain:
                if num_shards > 1 and name != "sketch":
                    mine = tensors["keys"].remainder(num_shards) == shard
                    tensors = {key: x[mine] for key, x in tensors.items()}
                yield name, tensors

    with torch.no_grad(), table.replacing():
        for _ in refill(rows, [chain.version.metadata for chain in chains], wanted()):
            pass
        if len(chains) == num_shards == 1:
            newest = chains[0].version
            rows.note_saved((rows.store.step, os.path.abspath(chains[0].path), newest.number))


def refill(
    rows: TableRows, metadata: Sequence[Mapping[str, Any]], shards: Iterable[tuple[str, dict[str, Tensor]]]
) -> Generator[None, None, None]:
    """
    Replace all rows of a variable by the shards' rows, one shard at a step.

    Args:
        rows: the rows of the variable.
        metadata: the metadata of the checkpoints that the shards are of, see :func:`metadata_of`.
        shards: their names and tensors, as of :func:`shards_of`, which have been checked.
    """
    store, admission = rows.store, rows.admission
    rows.note_saved(None)
    store.keys.clear(store.keys.capacity, store.weight.device)
    if rows.cold is not None:
        rows.cold.clear()
    if isinstance(admission, CounterAdmission):
        admission.candidates.clear(1024, store.weight.device)
    if isinstance(admission, SketchAdmission):
        admission.sketch.zero_()
    # One that had no rows has no states either.
    states = dict.fromkeys(name for each in metadata for name in each["states"])
    store.states.start_over(list(states), max(each["optimizer_steps"] for each in metadata))
    store.step = max(each["global_step"] for each in metadata)
    for name, tensors in shards:
        _restore_shard(rows, name, tensors)
        yield
    rows.shrink()
    rows.evicted = sum(each["evicted"] for each in metadata)
    rows.seen = max(seen_of(each) for each in metadata)


def seen_of(state: Mapping[str, Any]) -> int:
    """Return the step of the last lookup from a saved state; older formats only have the step that came next."""
    return state.get("seen", max(state["global_step"] - 1, 0))


def _restore_shard(rows: TableRows, name: str, tensors: dict[str, Tensor]) -> None:
    admission, device = rows.admission, rows.store.weight.device
    if name == "sketch":
        if isinstance(admission, SketchAdmission) and _takes(admission, tensors["sketch"]):
            admission.sketch.copy_(tensors["sketch"])
        return
    part = {key: x.to(device) for key, x in tensors.items()}
    keys = part["keys"]
    if name == "order":
        rows.reserve(keys)
        return
    if name == "erased":
        rows.erase(keys)
    elif name == "rows":
        if rows.cold is not None:
            rows.cold.erase(keys)
        rows.put(RowPart.of_tensors(part, device))
    if not isinstance(admission, CounterAdmission):
        return
    if name == "candidates":
        # A key that has a row is no candidate any more.
        absent = rows.store.keys.find(keys) < 0
        places, _ = admission.candidates.insert(keys[absent])
        admission.candidates.entries[places, 1] = packed(part["frequencies"][absent], part["versions"][absent])
    else:
        admission.candidates.erase(keys)


def _takes(admission: CounterAdmission | SketchAdmission | None, sketch: Tensor) -> bool:
    """Say whether a saved Bloom filter fits the variable's own, or the variable has none."""
    if not isinstance(admission, SketchAdmission):
        return True
    return sketch.shape == admission.sketch.shape and sketch.dtype == admission.sketch.dtype
