"""
``make clients`` writes docs/clients.md. Cells of clients whose packages are missing stay as they are.

Arguments: names of clients, or parts of names; default: all.
"""

from __future__ import annotations

import importlib.util
import sys

from clients import of_processes, page
from clients.cases import MODES, Outcome, outcome


def main(names: list[str]) -> None:
    """Try the chosen clients whose packages are installed, and write the page after each."""
    chosen = [one for one in page.CLIENTS if not names or any(name in one.name for name in names)]
    if any(one in of_processes.CLIENTS for one in chosen):
        write(of_processes.outcomes())
    for client in chosen:
        absent = [package for package in client.needs if importlib.util.find_spec(package) is None]
        if absent:
            print(f"{client.name}: left as it was, without {', '.join(absent)}")
        elif client not in of_processes.CLIENTS:
            write({(client.name, mode): outcome(client, mode) for mode in MODES})


def write(found: dict[tuple[str, str], Outcome]) -> None:
    """Print the outcomes, and write them into the page. Cells that were never tried say so."""
    cells = page.read(page.PATH.read_text()) if page.PATH.exists() else {}
    order = [(client.name, mode) for client in page.CLIENTS for mode in MODES]
    old = {key: cells.get(key, ("untried", "")) for key in order}
    page.PATH.write_text(page.write({**old, **{key: page.cell(*key, one) for key, one in found.items()}}))
    for (name, mode), one in found.items():
        print(f"{name}, {mode}: {one.word} {one.message}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
