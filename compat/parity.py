"""
Compares every operator of compat.tensorflow with the installed TensorFlow, and prints a table.

    python -m torchsparse_rec.compat.parity [--json FILE] [--cases N] [--seed S] [--op NAME]

Exit code 1 on any mismatch. Outputs, dtypes, order, gradients (dense and sparse) and which calls fail are compared;
compat/_parity explains how. Faults of TensorFlow 2.21 are not compared: the dense gradient of empty indices is
uninitialised memory. Three others occur in no case: subnormal numbers are taken for zero, unique of half types
distinguishes -0.0 from 0.0, and a num_segments of 2^32 and more is cut to its low 32 bits.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from .._interrupt import run_command
from ..files import whole_file
from ._parity import OPERATORS, hand_picked, random_cases
from ._parity.case import Case
from ._parity.compare import compare
from ._parity.evaluate import run_ours, run_tensorflow, tensorflow_version

_SHOWN = 5


@dataclass
class Row:
    """One operator's row of the printed table."""

    operator: str
    #: The dtypes of the compared results.
    dtypes: list[str] = field(default_factory=list)
    cases: int = 0
    #: How many cases fail on both sides, as they should.
    errors: int = 0
    #: The largest error of our floats, as a fraction of the allowed one, and TensorFlow's.
    our_error: float = 0.0
    their_error: float = 0.0
    #: The case and what differs.
    mismatches: list[str] = field(default_factory=list)


def check(operator: str, cases: Iterable[Case]) -> Row:
    """Run the cases of one operator on both sides, and count and compare."""
    row = Row(operator)
    dtypes = set()
    for position, case in enumerate(cases):
        ours, theirs = run_ours(case), run_tensorflow(case)
        verdict = compare(case, ours, theirs)
        row.cases += 1
        row.errors += theirs.error is not None and ours.error is not None
        if theirs.error is None:
            dtypes.add(case.dtype)
        row.our_error = max(row.our_error, verdict.our_error)
        row.their_error = max(row.their_error, verdict.their_error)
        row.mismatches += [f"case {position} ({case.note}): {text}" for text in verdict.mismatches]
    row.dtypes = sorted(dtypes)
    return row


def run(cases: int, seed: int, operators: Sequence[str]) -> Iterator[Row]:
    """Yield a row per operator: its hand-picked cases, and its even share of ``cases`` random ones."""
    for position, operator in enumerate(operators):
        share = cases // len(operators) + (position < cases % len(operators))
        yield check(operator, [*hand_picked(operator), *random_cases(operator, share, seed)])


def _shortened(dtypes: list[str]) -> str:
    """Return the names of dtypes in short: ``int8 int16`` as ``int8/16``."""
    kinds: dict[str, list[str]] = {}
    for dtype in sorted(dtypes, key=lambda name: int("".join(filter(str.isdigit, name)) or 0)):
        kinds.setdefault(dtype.rstrip("0123456789"), []).append(dtype.lstrip("abcdefghijklmnopqrstuvwxyz"))
    return " ".join(kind + "/".join(sizes) for kind, sizes in sorted(kinds.items()))


def _print(row: Row) -> None:
    error = f"{row.our_error:.2f} ({row.their_error:.2f})" if row.our_error or row.their_error else "0"
    verdict = "FAIL" if row.mismatches else "pass"
    print(f"{row.operator:41}{row.cases:>6}{row.errors:>8}  {error:<15}{verdict}  {_shortened(row.dtypes)}", flush=True)
    for text in row.mismatches[:_SHOWN]:
        print(f"    {text}")
    if len(row.mismatches) > _SHOWN:
        print(f"    and {len(row.mismatches) - _SHOWN} more")


def _named(parser: argparse.ArgumentParser, name: str) -> list[str]:
    """Return the operator of a name, or the operators whose names begin with it."""
    found = [name] if name in OPERATORS else [x for x in OPERATORS if name and x.startswith(name)]
    if not found:
        parser.error(f"argument --op: no operator is called {name!r} or so at its beginning: {', '.join(OPERATORS)}")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m torchsparse_rec.compat.parity", description=__doc__.split("\n")[1])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table to a file as well")
    parser.add_argument("--cases", type=int, default=440, metavar="N", help="random cases in all (default 440)")
    parser.add_argument("--seed", type=int, metavar="S", help="of the random cases (default: a new one, printed)")
    parser.add_argument(
        "--op",
        metavar="NAMES",
        help="only these operators, or those whose names begin so, with commas between them, such as "
        "feature_column,keras.layers: " + ", ".join(OPERATORS),
    )
    options = parser.parse_args(arguments)
    operators = list(OPERATORS)
    if options.op is not None:
        operators = [name for part in options.op.split(",") for name in _named(parser, part)]
    seed = secrets.randbelow(2**31) if options.seed is None else options.seed
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    started = time.perf_counter()
    print(f"TensorFlow {tensorflow_version()}, torch {torch.__version__}, seed {seed}")
    print(f"{'operator':41}{'cases':>6}{'errors':>8}  {'largest error*':<15}      dtypes")
    rows = []
    for row in run(options.cases, seed, operators):
        rows.append(row)
        _print(row)
    failed = sum(bool(row.mismatches) for row in rows)
    print("* of floats, ours (TensorFlow's), as a fraction of what is allowed; errors: cases that fail on both sides")
    seconds = time.perf_counter() - started
    print(
        f"{sum(row.cases for row in rows)} cases in {seconds:.0f} s, {failed} of {len(rows)} operators with mismatches"
    )
    if options.json:
        report = {"tensorflow": tensorflow_version(), "torch": torch.__version__, "seed": seed}
        with whole_file(options.json) as file:
            file.write(f"{json.dumps({**report, 'rows': [asdict(row) for row in rows]}, indent=1)}\n".encode())
    return 1 if failed else 0


if __name__ == "__main__":
    run_command(main)
