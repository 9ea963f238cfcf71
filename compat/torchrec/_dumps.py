"""
What dynamicemb and SOK dump of tables that grow: files of keys, of rows and of states, one number after the other.

Both need GPUs to train. Their Python wrote the files in tests/goldens/dumps on CPUs, with tables that stand in for
theirs.

Source: NVIDIA/recsys-examples, corelib/dynamicemb/dynamicemb (dump_load.py, batched_dynamicemb_tables.py,
key_value_table.py, optimizer.py); NVIDIA-Merlin/HugeCTR, sparse_operation_kit/dump_load.py.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ... import optim
from ...optim.row_optimizer import RowOptimizer
from ..checkpoints.format import Piece, mapped_file
from ..checkpoints.growing import GrowingRows
from ..checkpoints.sources import MOST_STEPS, Found, listed

__all__ = ["Dump", "dynamicemb_dumps", "sok_dumps"]


class Dump(NamedTuple):
    """A table that grows, in files."""

    name: str
    rows: Callable[[int, RowOptimizer | None], tuple[list[GrowingRows], int | None]]
    """
    Takes the width of rows, and the optimizer whose states are wanted, if any; returns the rows of each part, and how
    many steps have been taken, if the files say it.
    """


def _column(
    path: Path, name: str, dtype: torch.dtype, shape: tuple[int, ...], begin: int = 0, columns: slice | None = None
) -> Found:
    """
    Return a tensor that lies in a file.

    Args:
        path: the file.
        name: the name of the tensor.
        dtype: the dtype of its elements.
        shape: the shape that the file's content should have.
        begin: the start of its bytes.
        columns: the wanted columns of ``[N, width]``. Default: all.

    Raises:
        ValueError: the file has another size.
    """
    size = torch.Size(shape).numel() * dtype.itemsize
    if os.path.getsize(path) != begin + size:
        raise ValueError(
            f"{path} must have {list(shape)} numbers of {dtype}, {begin + size} bytes, got {os.path.getsize(path)}"
        )
    wanted = shape if columns is None else (shape[0], columns.stop - columns.start)

    def pieces() -> list[Piece]:
        content = mapped_file(str(path))[begin:]
        if columns is not None:
            width = dtype.itemsize
            by_row = content.view(shape[0], shape[1] * width)
            content = by_row[:, columns.start * width : columns.stop * width].reshape(-1)
        return [Piece(tuple(slice(0, n) for n in wanted), wanted, dtype, content, None, str(path))]

    return Found(name, wanted, dtype, 1, pieces)


# ---- dynamicemb -----------------------------------------------------------------------------------------------------

# Our optimizers, and the states of a row in order, by "opt_type" in the file of arguments.
_DYNAMICEMB: dict[str, tuple[tuple[type, ...], tuple[str, ...]]] = {
    "adam": ((optim.Adam, optim.AdamW), ("exp_avg", "exp_avg_sq")),
    "exact_adagrad": ((optim.Adagrad,), ("sum",)),
    "exact_row_wise_adagrad": ((optim.RowWiseAdagrad,), ("sum",)),
    "sgd": ((optim.SGD,), ()),
    "exact_sgd": ((optim.SGD,), ()),  # dumps from before February 2026
}


def dynamicemb_dumps(folder: str) -> list[Dump]:
    """
    Return the tables in a folder of dynamicemb's ``DynamicEmbDump``, also in folders of its collections.

    Raises:
        ValueError: files of a rank are missing, or of another dump.
    """
    ranks: dict[tuple[Path, str], set[tuple[int, int]]] = {}
    for path in sorted(Path(folder).rglob("*_emb_keys.rank_*.world_size_*")):
        match = re.fullmatch(r"(.+)_emb_keys\.rank_(\d+)\.world_size_(\d+)", path.name)
        if match:
            ranks.setdefault((path.parent, match[1]), set()).add((int(match[2]), int(match[3])))
    result = []
    for (parent, table), its in ranks.items():
        sizes = sorted({world for _, world in its})
        if len(sizes) > 1:
            raise ValueError(
                f"{parent}: table {table!r} must have files of one dump, got those of world sizes {sizes}: remove the "
                "older ones"
            )
        (count,) = sizes
        if (has := sorted(rank for rank, _ in its)) != list(range(count)):
            raise ValueError(f"{parent}: table {table!r} must have files of ranks 0 to {count - 1}, got {has}")
        within = ".".join(parent.relative_to(folder).parts)
        name = f"{within}.{table}" if within else table
        result.append(Dump(name, _rows_of_dynamicemb(parent, table, name, count)))
    return result


def _rows_of_dynamicemb(parent: Path, table: str, name: str, count: int) -> Callable[..., Any]:
    def rows(width: int, optimizer: RowOptimizer | None) -> tuple[list[GrowingRows], int | None]:
        path = parent / f"{table}_opt_args.json"
        about = _arguments(path)
        states: tuple[str, ...] = ()
        if optimizer is not None:
            kind = about.get("opt_type")
            if not isinstance(kind, str) or kind not in _DYNAMICEMB:
                raise ValueError(
                    f"{path} must say opt_type, one of {', '.join(_DYNAMICEMB)}, where an optimizer is to take over "
                    f"states, got {kind if path.exists() else 'no such file'}: without optimizer rows are loaded alone"
                )
            kinds, states = _DYNAMICEMB[kind]
            if not isinstance(optimizer, kinds):
                raise ValueError(
                    f"{path}: optimizer must be {' or '.join(x.__name__ for x in kinds)}, as its opt_type {kind!r} "
                    f"says, got {type(optimizer).__name__}"
                )
        result = []
        for rank in range(count):
            end = f".rank_{rank}.world_size_{count}"

            def file(item: str, end: str = end) -> Path:
                return parent / f"{table}_{item}{end}"

            keys = file("emb_keys")
            number = os.path.getsize(keys) // 8
            if not file("emb_values").exists():
                raise FileNotFoundError(f"{file('emb_values')} is missing, beside {keys.name}")
            frequencies = None
            if "lfu" in str(about.get("evict_strategy")).lower():
                if not file("emb_scores").exists():
                    raise FileNotFoundError(
                        f"{file('emb_scores')} is missing: where {path.name} says LFU, scores are frequencies"
                    )
                frequencies = _column(file("emb_scores"), f"{name}_emb_scores{end}", torch.int64, (number,))
            result.append(
                GrowingRows(
                    _column(keys, f"{name}_emb_keys{end}", torch.int64, (number,)),
                    _column(file("emb_values"), f"{name}_emb_values{end}", torch.float32, (number, width)),
                    frequencies,
                    None,
                    _states_of_dynamicemb(file, f"{name}_opt_values{end}", number, width, states, optimizer),
                )
            )
        steps = about.get("iters")
        if steps is not None and (type(steps) is not int or not 0 <= steps <= MOST_STEPS):
            raise ValueError(f"{path}: iters must be an integer of at least 0, got {steps!r}")
        return result, steps

    return rows


def _arguments(path: Path) -> dict[str, Any]:
    """Return a dump's description of its optimizer, if it has one."""
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} must be JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} must be an object of JSON, got a {type(found).__name__}")
    return found


def _states_of_dynamicemb(
    file: Callable[[str], Path],
    name: str,
    number: int,
    width: int,
    states: tuple[str, ...],
    optimizer: RowOptimizer | None,
) -> dict[str, tuple[Found, Found | None, float]]:
    """Return the states of a rank's rows, which lie side by side in each row of a file."""
    if optimizer is None or not states:
        return {}
    # Older versions write the one name, newer ones the other.
    has = [x for x in (file("emb_opt_values"), file("opt_values")) if x.exists()]
    if not has:
        raise ValueError(f"{file('emb_keys').parent}: {name} is missing: DynamicEmbDump writes it where optim=True")
    if len(has) > 1:
        raise ValueError(f"{has[0]} and {has[1].name} must not be both there: remove that of the older dump")
    (path,) = has
    each = os.path.getsize(path) // (4 * max(number, 1))
    if optimizer.per_row & set(states):
        # One number a row; older dumps have it before others that have no meaning, 16 bytes in the table's dtype.
        if each not in (1, 4, 8) and number:
            raise ValueError(f"{path} must have 1, 4 or 8 numbers for each of {number} rows, got {each}")
        whole = _column(path, name, torch.float32, (number, each), columns=slice(0, 1))

        def first() -> list[Piece]:
            return [piece._replace(place=piece.place[:1], shape=piece.shape[:1]) for piece in whole.pieces()]

        return {states[0]: (whole._replace(shape=(number,), pieces=first), None, 1.0)}
    shape = (number, len(states) * width)
    return {
        state: (_column(path, name, torch.float32, shape, columns=slice(k * width, (k + 1) * width)), None, 1.0)
        for k, state in enumerate(states)
    }


# ---- SOK ------------------------------------------------------------------------------------------------------------

_SOK_HEAD = 296
_SOK_DTYPES = {0: torch.int32, 1: torch.int64, 3: torch.int64, 4: torch.float16, 5: torch.float32, 6: torch.float64}
# Our optimizers, their names in the files, and the names of the slots by our states. The files of Adamax are called
# Adam's: its name has Adam in it.
_SOK: list[tuple[tuple[type, ...], str, dict[str, tuple[str, ...]]]] = [
    ((optim.Adam,), "Adam", {"exp_avg": ("m",), "exp_avg_sq": ("v",)}),
    ((optim.Adagrad,), "Adagrad", {"sum": ("accumulator",)}),
    ((optim.Ftrl,), "Ftrl", {"accumulator": ("accumulator", "accum"), "linear": ("linear",)}),
]


def sok_dumps(folder: str) -> list[Dump]:
    """Return the tables in a folder of ``sok.dump``: names with a file of keys and one of rows."""
    keys = [path for path in sorted(Path(folder).glob("*-key")) if path.with_name(f"{path.name[:-4]}-weight").exists()]
    return [Dump(path.name[:-4], _rows_of_sok(path.parent, path.name[:-4])) for path in keys]


def _rows_of_sok(parent: Path, table: str) -> Callable[..., Any]:
    def rows(width: int, optimizer: RowOptimizer | None) -> tuple[list[GrowingRows], int | None]:
        path = parent / f"{table}-key"
        dtype = _sok_dtype(path, 0)
        number = (os.path.getsize(path) - _SOK_HEAD) // dtype.itemsize
        keys = _column(path, f"{table}-key", dtype, (number,), _SOK_HEAD)

        def values(name: str, kind: int) -> Found:
            of_file = _sok_dtype(parent / name, kind)
            return _column(parent / name, name, of_file, (number, width), _SOK_HEAD)

        states: dict[str, tuple[Found, Found | None, float]] = {}
        if optimizer is not None:
            for state, name in _sok_slots(parent, table, optimizer).items():
                states[state] = values(name, 2), None, 1.0
        return [GrowingRows(keys, values(f"{table}-weight", 1), None, None, states)], None

    return rows


def _sok_slots(parent: Path, table: str, optimizer: RowOptimizer) -> dict[str, str]:
    """Return the files of slots by the states that they are."""
    has = [path.name for path in parent.glob(f"{table}-*-*")]
    if isinstance(optimizer, optim.SGD) and not has:
        return {}
    for kinds, scope, slots in _SOK:
        if isinstance(optimizer, kinds):
            found = {
                state: next((f"{table}-{scope}-{slot}" for slot in names if f"{table}-{scope}-{slot}" in has), "")
                for state, names in slots.items()
            }
            if all(found.values()) and set(found.values()) == set(has):
                return found
    known = ", ".join(kind.__name__ for kinds, _, _ in _SOK for kind in kinds)
    raise ValueError(
        f"{parent}: {table!r} must have the slots of {type(optimizer).__name__}, one of {known}; it has "
        f"{listed(has) or 'none'}"
    )


def _sok_dtype(path: Path, kind: int) -> torch.dtype:
    """Return the dtype in a file's head, after a name, the file's kind, and a slot's name."""
    with open(path, "rb") as file:
        head = file.read(_SOK_HEAD)
    its_kind, number = (int.from_bytes(head[at : at + 4], "big") for at in (256, 292))
    dtype = _SOK_DTYPES.get(number)
    if len(head) < _SOK_HEAD or its_kind != kind or dtype is None or (kind == 0) == dtype.is_floating_point:
        raise ValueError(
            f"{path} must begin with the head of a file of SOK, of kind {kind} and a dtype that this reads, got kind "
            f"{its_kind} and dtype {number}"
        )
    return dtype
