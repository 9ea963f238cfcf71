"""List the examples, each with its command: ``python -m torchsparse_rec.examples``."""

from __future__ import annotations

import importlib
import pkgutil
import re

from .. import examples
from .._interrupt import run_command


def commands() -> dict[str, str]:
    """Return what each example trains, by the command that runs it: both are in the first line of its docstring."""
    found = {}
    for module in pkgutil.iter_modules(examples.__path__):
        if not module.name.startswith("_"):
            program = importlib.import_module(f"{examples.__name__}.{module.name}")
            line = re.match(r"(.*): ``(.*)``\.", program.__doc__ or "")
            assert line is not None, program
            found[line[2]] = line[1]
    return found


def main() -> int:
    """Print each example's command and what it trains."""
    for command, what in commands().items():
        print(f"{command}  {what}")
    print("Each trains on generated data too, as its --help says.")
    return 0


if __name__ == "__main__":
    run_command(main)
