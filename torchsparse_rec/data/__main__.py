"""The command ``python -m torchsparse_rec.data``: converts files of training data, and prints what a file contains."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .._interrupt import run_command
from .._progress import progress_bar
from ._types import arrow_types
from .convert import BATCH_SIZE, FORMATS, Options, convert, format_of, read_format
from .errors import DataError
from .prebatched import PrebatchedDataset


def parse_columns(text: str) -> tuple[list[str], dict[str, Any]]:
    """
    Parse ``label:int64,seen:int64[],topics:int64[10],city`` into all names, and types by name where one is given.

    Raises:
        ValueError: an unknown Arrow type, a name that is empty or occurs twice.

    Example:
        >>> parse_columns("label:int64,topics:int64[10],city")
        (['label', 'topics', 'city'],
         {'label': DataType(int64), 'topics': FixedSizeListType(fixed_size_list<item: int64>[10])})
    """
    names: list[str] = []
    types: dict[str, str] = {}
    for item in text.split(","):
        match = re.fullmatch(r"([^:]+)(?::(\w+(?:\[\d*\])?))?", item.strip())
        if match is None or match[1] in names:
            raise ValueError(
                f"--columns must be distinct names, or name:type, name:type[] or name:type[10], got {item!r}"
            )
        names.append(match[1])
        if match[2] is not None:
            types[match[1]] = match[2]
    return names, arrow_types("--columns", types)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the flags of ``convert`` and ``info``."""
    parser = argparse.ArgumentParser(prog="python -m torchsparse_rec.data", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    formats = ", ".join(f"{name} ({' '.join(of_it.suffixes) or 'by name only'})" for name, of_it in FORMATS.items())
    one = commands.add_parser("convert", help="write the rows of files as one file of another format")
    add = one.add_argument
    add("sources", nargs="+", metavar="SOURCE", help=f"one format, the same columns: {formats}; text may be .gz")
    add("target", metavar="TARGET", help="the file to be written")
    add("--from", dest="source_format", choices=list(FORMATS), help="default: by the suffix")
    add("--to", dest="target_format", choices=list(FORMATS), help="default: by the suffix")
    add("--batch-size", type=int, default=BATCH_SIZE, metavar="N", help=f"rows of a batch, default {BATCH_SIZE:,}")
    add(
        "--compression",
        metavar="NAME",
        help="zstd for prebatched files (default none); any of Parquet's (default zstd)",
    )
    add(
        "--columns",
        metavar="NAMES",
        help="their names; with types where the source has none: label:int64,seen:int64[],t:int64[9]",
    )
    add("--prebatched-records", action="store_true", help="for a TFRecord target: write each batch as one record")
    two = commands.add_parser("info", help="the columns and the number of rows of a file")
    two.add_argument("file", metavar="FILE")
    two.add_argument("--from", dest="source_format", choices=list(FORMATS), help="default: by the suffix")
    two.add_argument("--columns", metavar="NAMES", help="as for convert")
    return parser


def run_convert(given: argparse.Namespace) -> None:
    """Run the command ``convert``."""
    columns, types = parse_columns(given.columns) if given.columns else (None, {})
    rows = convert(
        given.sources,
        given.target,
        source_format=given.source_format,
        target_format=given.target_format,
        batch_size=given.batch_size,
        columns=columns,
        types=types,
        compression=given.compression,
        prebatched_records=given.prebatched_records,
    )
    print(f"{given.target}: {rows:,} rows, {os.path.getsize(given.target):,} bytes")


def run_info(given: argparse.Namespace) -> None:
    """Run the command ``info``, which reads all rows unless the file is prebatched."""
    columns, types = parse_columns(given.columns) if given.columns else (None, {})
    name = format_of(given.file, given.source_format)
    size = os.path.getsize(given.file)
    if name == "prebatched" and not types:
        dataset = PrebatchedDataset(given.file, columns=columns, rank=0, world_size=1)
        layout = "compressed" if dataset.is_compressed() else "uncompressed"
        print(
            f"{given.file}: prebatched, {layout}, {dataset.num_rows():,} rows in {len(dataset)} batches, {size:,} bytes"
        )
        _print_columns(dataset.schema)
        return
    count, schema = 0, None
    batches = read_format(given.file, Options(columns=columns, types=types), name)
    for batch in progress_bar(batches, Path(given.file).name, "batch"):
        count, schema = count + batch.num_rows, batch.schema
    print(f"{given.file}: {name}, {count:,} rows, {size:,} bytes")
    _print_columns(schema or ())


def _print_columns(schema: Any) -> None:
    for column in schema:
        print(f"  {column.name}: {column.type}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0, or 1 after one line with the error."""
    given = make_parser().parse_args(arguments)
    try:
        (run_convert if given.command == "convert" else run_info)(given)
    except (DataError, ValueError, OSError, ImportError) as error:
        print(f"{given.command}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    run_command(main)
