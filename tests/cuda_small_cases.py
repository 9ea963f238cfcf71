"""
Runs many small calls of every operator, for a checker of memory accesses or races to watch.

``python tests/cuda_small_cases.py --until TIME`` ends in good time before that moment (seconds since 1970).
It begins with the calls that differ most: each operator in turn, first its representative samples.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from calls import call  # noqa: E402
from samples.large import MIDDLE_SAMPLES  # noqa: E402
from samples.operators import SAMPLES  # noqa: E402
from samples.sample import Sample  # noqa: E402

import torchsparse_rec  # noqa: E402

Make = Callable[[], Sample]


def in_turn(lists: list[list[Make]]) -> Iterator[Make]:
    """Yield the first of each list, then the second of each, and so on."""
    return (make for turn in itertools.zip_longest(*lists) for make in turn if make is not None)


def cases() -> list[Make]:
    """Return all calls, the most different first."""
    small = [[lambda x=x: x for x in samples] for samples in SAMPLES.values()]
    first = [[lambda x=x: x for x in samples if x.representative] for samples in SAMPLES.values()]
    middle: dict[str, list[Make]] = {}
    for build in MIDDLE_SAMPLES:
        middle.setdefault(build.name.split("-")[0], []).append(build)
    return [*in_turn(first), *in_turn(list(middle.values())), *in_turn(small)]


def main(arguments: list[str] | None = None) -> int:
    """Run all cases, and raise the errors that they report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--until", type=float, default=float("inf"))
    parser.add_argument("--most", type=int, default=sys.maxsize, help="cases at most")
    parser.add_argument("--device", default="cuda")
    given = parser.parse_args(arguments)
    everything, done = cases(), 0
    for make in everything[: given.most]:
        if time.time() > given.until:
            break
        call(make().to(given.device))
        done += 1
    torchsparse_rec.check_errors(given.device)
    print(f"{done} of {len(everything)} cases")
    return 0 if done else 1


if __name__ == "__main__":
    sys.exit(main())
