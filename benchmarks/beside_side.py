"""
A program that times rows of the checkout that is its folder, as ``beside.py`` asks it to.

It is run by its path, in checkouts that may be older than it: its imports come from them.
"""

import gc
import json
import os
import sys

import torch

from benchmarks.__main__ import ROWS
from benchmarks.rows import Options
from benchmarks.timing import Call, clock_block


def main() -> None:
    """Answer each line of stdin: a row's name, by making its call, or a number of calls, by their milliseconds."""
    device, quick, threads = json.loads(sys.argv[1])
    torch.set_num_threads(threads)
    rows = {row.name: row for row in ROWS}
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # others print too
    calls: list[Call] = []
    for line in sys.stdin:
        wanted = json.loads(line)
        answer: list[float] | str = []
        try:
            if isinstance(wanted, str):
                calls.clear()
                gc.collect()
                calls.append(rows[wanted].build(Options(device, quick, threads)).ours())
            else:
                answer = clock_block(calls[0], wanted, device)
        except Exception as error:  # Whatever the error is, it is the row's.
            answer = f"{type(error).__name__}: {error}"
        print(json.dumps(answer), file=answers, flush=True)


main()
