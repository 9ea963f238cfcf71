"""Gather the records of a batch from blocks of TFRecord files, parse them into columns, and locate their faults."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from .. import ops
from ._arrow import arrow
from ._tfrecord_blocks import Records, room


def joined(stream: Iterable[Records], count: int) -> Iterator[list[Records]]:
    """Yield lists of :class:`Records` with ``count`` records together; the last may have fewer."""
    waiting: list[Records] = []
    missing = count
    for records in stream:
        at = 0
        while at < records.size():
            taken = records.part(slice(at, at + missing))
            waiting.append(taken)
            at, missing = at + taken.size(), missing - taken.size()
            if missing == 0:
                yield waiting
                waiting, missing = [], count
    if waiting:
        yield waiting


def parse(records: list[Records], columns: Mapping[str, ops.ExampleColumn]) -> dict[str, ops.ExampleValues]:
    """Parse records into columns; if they are of several blocks, join their bytes first."""
    starts = [0]
    data, ranges = records[0].data, records[0].ranges
    if len(records) > 1:
        pieces = [each.data[each.begin() : each.end()] for each in records]
        for piece in pieces:
            starts.append(starts[-1] + piece.numel())
        data = torch.cat(pieces, out=room(starts[-1]))
        ranges = torch.cat([each.ranges - each.begin() + start for each, start in zip(records, starts, strict=False)])
    try:
        return ops.parse_examples(data, ranges, columns)
    except ops.ExampleError as error:
        which, row = 0, error.record
        while row >= records[which].size():
            row -= records[which].size()
            which += 1
        of_it = records[which]
        offset = error.offset - starts[which] + (of_it.begin() if len(records) > 1 else 0)
        raise of_it.fault(row, offset, error.problem) from error


def check_text(name: str, array: Any, records: list[Records]) -> None:
    """Raise ``DataError`` for the first string of a column that is not UTF-8."""
    pa = arrow("TFRecordReader")
    try:
        array.validate(full=True)
        return
    except pa.ArrowInvalid:
        pass
    texts = array
    row_of = list(range(len(array)))
    while not pa.types.is_large_string(texts.type):
        row_of = [row for row, length in enumerate(texts.value_lengths().to_pylist()) for _ in range(length or 0)]
        texts = texts.flatten()
    for i, text in enumerate(texts.cast(pa.large_binary()).to_pylist()):
        try:
            (text or b"").decode()
        except UnicodeDecodeError as error:
            of_it, record = _record(records, row_of[i])
            begin = int(of_it.ranges[record, 0])
            raise of_it.fault(record, begin, f"feature {name!r} must be UTF-8, got {text[:40]!r}") from error


def _record(records: list[Records], row: int) -> tuple[Records, int]:
    """Return the block of a row's record and the record's position in it; a single record may hold all rows."""
    for each in records:
        if row < each.size():
            return each, row
        row -= each.size()
    return records[0], 0
