"""docs/clients.md: written from the outcomes of the clients, and read again."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from clients import of_compilers, of_others, of_processes, of_torch
from clients.cases import MODES, Client, Outcome
from clients.known import KNOWN

PATH = Path(__file__).resolve().parents[2] / "docs/clients.md"
CLIENTS: list[Client] = [*of_torch.CLIENTS, *of_compilers.CLIENTS, *of_processes.CLIENTS, *of_others.CLIENTS]

# The word of a cell, and its text below the table.
Cell = tuple[str, str]
Cells = Mapping[tuple[str, str], Cell]

_HEAD = """# What other programs make of our tables

Each row is a way in which programs use a model and its optimizer. It is run with torch's modules, dense gradients and
`torch.optim.Adam`, and again with `nn.Embedding`, `nn.EmbeddingBag` and `nn.EmbeddingBagCollection` in each mode and
`optim.Adam`. Both runs must give the same numbers, to rounding. The tables have 40 rows, and a step reads a few of
them. The learning rate falls, so that rows without gradient move as well. The tables of `"auto"` are larger, so that it
chooses COO gradients, or fused ones if `in_backward=True` allows them. In the last two columns the tables grow:
`nn.EmbeddingVariable`, and a collection with `ev_option`. They begin with 8 rows, with torch's initial values, and the
rows of torch's ids are compared.

* right: the numbers are the same.
* refused: an error says what is not supported, or a warning says that a tool skips tables. The number is that of the
  message below.
* **wrong**: anything else. The reason is below.

`make clients` writes this page ([tests/clients](../tests/clients)). The tests run every cell. They fail if a cell is
wrong and not known to be, or if it is not what this page says. The mode `fused` is for optimizers made with
`in_backward=True`: see [embeddings.md](embeddings.md).
"""
_MODES = (
    *("`dense`", "`sparse`", "`fused`", "`auto`", "`auto`, `in_backward=True`"),
    *("tables that grow, `sparse`", "tables that grow, `fused`"),
)


def cell(name: str, mode: str, outcome: Outcome) -> Cell:
    """Return the cell that shows an outcome."""
    if outcome.is_good:
        return outcome.word, f"``{outcome.message}``" if outcome.message else ""
    return "**wrong**", KNOWN.get((name, mode), f"not known: {outcome.message}")


def write(cells: Cells) -> str:
    """Return the page as Markdown."""
    texts = list(dict.fromkeys(text for _, text in cells.values() if text))
    head = ["client", *_MODES]
    table = [head, ["---"] * len(head)]
    for client in CLIENTS:
        table.append([client.name, *(_shown(*cells[client.name, mode], texts) for mode in MODES)])
    ways = [["client", "instead"], ["---"] * 2, *([client.name, client.way] for client in CLIENTS if client.way)]
    numbered = [f"{number}. {text}" for number, text in enumerate(texts, 1)]
    rest = ["", "## Messages", "", *numbered, "", "## What to do instead", "", *map(_row, ways)]
    return "\n".join([_HEAD, *map(_row, table), *rest]) + "\n"


def read(text: str) -> Cells:
    """Return the cells of a page."""
    texts = dict(re.findall(r"^(\d+)\. (.*)$", text, flags=re.MULTILINE))
    cells = {}
    for line in text.splitlines():
        columns = [column.strip() for column in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(columns) == len(MODES) + 1 and columns[0] not in ("client", "---"):
            for mode, shown in zip(MODES, columns[1:], strict=True):
                word, _, number = shown.partition(" ")
                cells[columns[0], mode] = (word, texts[number.strip("()")] if number else "")
    return cells


def _row(columns: list[str]) -> str:
    return f"| {' | '.join(columns)} |" if columns[0] != "---" else "|" + "---|" * len(columns)


def _shown(word: str, text: str, texts: list[str]) -> str:
    return f"{word} ({texts.index(text) + 1})" if text else word
