"""The command ``python -m torchsparse_rec.serving``: checks whether a folder's published version is whole."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from .._interrupt import run_command
from ._folder import problems


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command ``check``."""
    parser = argparse.ArgumentParser(prog="python -m torchsparse_rec.serving", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    check = commands.add_parser("check", help="compare all checksums; nothing is unpickled")
    check.add_argument("folder", metavar="FOLDER", help="of save_for_serving")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code: 0, or 1 after a line for each problem."""
    given = make_parser().parse_args(arguments)
    found = problems(given.folder)
    for problem in found:
        print(f"{given.command}: {problem}", file=sys.stderr)
    return int(bool(found))


if __name__ == "__main__":
    run_command(main)
