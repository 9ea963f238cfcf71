"""Text files of sparse rows, as LIBSVM and LIBFFM write them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..files import PathLike
from ..typing import SparseTextLayout
from ._arrow import arrow
from ._rows import BATCH_SIZE, check_known, check_reader, path_list, rebatched
from ._text import blocks, check_texts, parse_block
from .csv import check_range

if TYPE_CHECKING:
    import pyarrow

__all__ = ["read_libsvm"]

#: The parts of an item, between colons, by layout; each is a column of lists.
LAYOUTS = {"libsvm": ("ids", "values"), "libffm": ("fields", "ids", "values")}


def read_libsvm(
    paths: PathLike | Sequence[PathLike],
    *,
    batch_size: int = BATCH_SIZE,
    columns: Sequence[str] | None = None,
    layout: SparseTextLayout | None = None,
) -> Iterator[pyarrow.RecordBatch]:
    r"""
    Read files whose lines are a label and items, ``1 3:0.5 7:1`` as of LIBSVM or ``1 0:3:0.5 1:7:1`` as of LIBFFM.

    Ids stay as they are in the file, where LIBSVM's begin with 1. Empty lines, and what follows a ``#``, are skipped.

    Args:
        paths: a file, or several that are read in order; ``.gz``, ``.bz2`` and ``.zst`` are decompressed in reading.
        batch_size: rows of a batch; the last may have fewer. Default 65,536.
        columns: the names of the columns to yield, in this order. Default None: all.
        layout: ``"libsvm"`` or ``"libffm"``. Default None: that of the first item; of 16 MiB without any, LIBSVM's.

    Yields:
        ``pyarrow.RecordBatch`` of ``label``, float32, and of lists: ``ids``, int64, ``values``, float32, and with
        LIBFFM's layout ``fields``, int64, before them.

    Raises:
        ImportError: without pyarrow.
        ValueError: an unknown column or layout.
        DataError: a malformed line, with its number: an item of another form, an id or a field that is no integer of 64
            bits, a label or a value that is no number or beyond the range of float32, or a ``qid``.
        OSError: a file that cannot be opened.

    Source: https://www.csie.ntu.edu.tw/~cjlin/libsvm, https://github.com/ycjuan/libffm.

    Example:
        >>> import tempfile
        >>> path = f"{tempfile.mkdtemp()}/train.svm"
        >>> with open(path, "w") as file:
        ...     _ = file.write("+1 3:0.5 7:1\n-1\n")
        >>> next(read_libsvm(path)).to_pylist()
        [{'label': 1.0, 'ids': [3, 7], 'values': [0.5, 1.0]}, {'label': -1.0, 'ids': [], 'values': []}]
    """
    arrow("read_libsvm")
    files = path_list(paths)
    check_reader("read_libsvm", files, batch_size, columns)
    if layout not in (None, *LAYOUTS):
        raise ValueError(f"read_libsvm: layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")
    check_known("read_libsvm", columns, ("label", *LAYOUTS[layout or "libffm"]))
    check_texts(files)
    parser = _Parser(columns, layout)
    return rebatched((batch for path in files for batch in parser.read(path)), batch_size)


class _Parser:
    """Turns blocks of lines into tables; the first item says which layout all have."""

    def __init__(self, columns: Sequence[str] | None, layout: str | None) -> None:
        self.pa, self.columns, self.layout = arrow("read_libsvm"), columns, layout

    def read(self, path: PathLike) -> Iterator[Any]:
        for line, block in blocks(path):
            yield from parse_block(self.table, path, line, block).to_batches()

    def table(self, block: bytes) -> Any:
        """Return a block of lines as a table, or raise ``ValueError`` if a line is malformed."""
        pa, compute = self.pa, self.pa.compute
        lines = pa.array(block[:-1].split(b"\n"), pa.binary()).cast(pa.large_string())
        if b"#" in block:
            lines = compute.replace_substring_regex(lines, "#.*", "")
        lines = compute.utf8_trim_whitespace(lines)
        tokens = compute.utf8_split_whitespace(lines.filter(compute.not_equal(lines, "")))
        items = compute.list_slice(tokens, 1)
        if self.layout is None and len(tokens):
            first = compute.list_flatten(items).slice(0, 1).to_pylist()
            self.layout = "libffm" if first and first[0].count(":") == 2 else "libsvm"
        found = {"label": self._numbers("label", compute.list_element(tokens, 0))}
        offsets = np.concatenate([[0], np.cumsum(compute.list_value_length(items).to_numpy(zero_copy_only=False))])
        for name, values in self._parts(items.flatten()).items():
            found[name] = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), values)
        for name in self.columns or ():
            if name not in found:
                raise ValueError(f"column {name!r} must be among {', '.join(found)}, of the layout {self.layout}")
        return pa.table({name: found[name] for name in self.columns or found})

    def _parts(self, items: Any) -> dict[str, Any]:
        """Return the fields, ids and values of items."""
        pa, compute = self.pa, self.pa.compute
        names = LAYOUTS[self.layout or "libsvm"]
        parts = compute.split_pattern(items, ":")
        wrong = compute.not_equal(compute.list_value_length(parts), len(names))
        if compute.any(wrong).as_py():
            form = ":".join(name.removesuffix("s") for name in names)
            raise ValueError(f"items must have the form {form}, got {items.filter(wrong)[0]}")
        flat, count = parts.flatten(), len(names)
        each = {name: flat.take(pa.array(np.arange(k, len(flat), count))) for k, name in enumerate(names)}
        return {
            name: self._numbers(name, text) if name == "values" else self._integers(name, text)
            for name, text in each.items()
        }

    def _integers(self, name: str, text: Any) -> Any:
        try:
            return text.cast(self.pa.int64())
        except self.pa.ArrowException as error:
            raise ValueError(f"column {name!r}: {error}") from None

    def _numbers(self, name: str, text: Any) -> Any:
        try:
            values = self.pa.compute.replace_substring_regex(text, r"^\+", "").cast(self.pa.float32())
        except self.pa.ArrowException as error:
            raise ValueError(f"column {name!r}: {error}") from None
        check_range(name, text, values)
        return values
