"""
``make zoo`` writes docs/zoo.md: models of other libraries, without and with our lines.

Each library has an environment in .cache/zoo, made from requirements/zoo, which also sees this environment's packages.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import sysconfig
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PLACE = ROOT / ".cache/zoo"
SIZES = (1_000_000, 10_000_000)
# The name says library, model and setting.
MODELS = {
    "recbole.neumf": "",
    "rechub.deepfm": "",
    "rechub.deepfm.1e-5": 'its default `weight_decay`; ours with `decay="seen"`, another algorithm',
    "deepctr.deepfm": "",
    "deepctr.deepfm.1e-5": 'its default `l2_reg_embedding`; ours with `decay="seen"` in its place, another algorithm',
    "deepctr.din": "",
    "fuxictr.dcnv2": "",
    "replay.sasrec": "",
    "transformers.bert": "",
}
_HEAD = """# Models of other libraries

Each model trains in its own library's trainer, without and with the lines below. All else is the library's. Losses are
compared step by step, from the same start. A batch has 1,024 ids of the large table, or sequences of so many in all,
and rows have 16 columns. `make zoo` writes this page ([tests/zoo](../tests/zoo) has the whole programs).

| model | ids | largest relative difference of a loss | step, own | step, ours | ratio | memory, own | memory, ours | |
|---|---|---|---|---|---|---|---|---|
"""
_LINES = """
## The lines

A trainer that is given an optimizer gets ours. One that looks it up in `torch.optim` by its name finds ours there.
"""
_OTHERS = """
## Others

- pytorch-widedeep 1.7.0 imports torchvision, whose operators do not load beside this torch.
- RecTools 0.19.0 has not been tried.
- RecBole's other models share the trainer of NeuMF, and take the same lines.
"""


def main(names: list[str]) -> None:
    """Measure the chosen models, and write the page."""
    rows = []
    for name, remark in MODELS.items():
        if names and not any(part in name for part in names):
            continue
        python = environment(name.partition(".")[0])
        for size in SIZES:
            rows.append(row(name, size, *(measured(python, name, way, size) for way in ("own", "ours")), remark))
            print(rows[-1], flush=True)
            (ROOT / "docs/zoo.md").write_text(_HEAD + "\n".join(rows) + "\n" + _LINES + lines() + _OTHERS)


def lines() -> str:
    """Return the lines of each library's program that make a model ours: what it does ``if ours``."""
    parts = []
    for library in dict.fromkeys(name.partition(".")[0] for name in MODELS):
        text = (ROOT / f"tests/zoo/of_{library}.py").read_text()
        blocks = [x for x in ast.walk(ast.parse(text)) if isinstance(x, ast.If) and ast.unparse(x.test) == "ours"]
        blocks.sort(key=lambda x: x.lineno)
        code = [textwrap.dedent("\n".join(text.splitlines()[x.lineno : x.end_lineno])) for x in blocks]
        parts.append(f"\n{library}:\n\n```python\n" + "\n".join(code) + "\n```\n")
    return "".join(parts)


def environment(library: str) -> Path:
    """Return the Python of a library's environment, which is made if its requirements have changed."""
    folder, wanted = PLACE / library, ROOT / f"requirements/zoo/{library}.txt"
    python, made = folder / "bin/python", folder / "made"
    if not made.exists() or made.read_text() != wanted.read_text():
        subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", folder], check=True)
        ours = sysconfig.get_path("purelib")
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        (folder / f"lib/{version}/site-packages/zz_ours.pth").write_text(ours)
        subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", "-r", wanted], check=True)
        made.write_text(wanted.read_text())
    return python


def measured(python: Path, name: str, way: str, size: int) -> dict[str, object]:
    """Return what a run in a process of its own has measured."""
    paths = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(ROOT / "tests"), str(ROOT)])
    command = [python, "-W", "ignore", "-m", "zoo.run", name, way, str(size)]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout)


def row(name: str, size: int, own: dict, ours: dict, remark: str) -> str:
    """Return a row of the table."""
    pairs = zip(own["losses"], ours["losses"], strict=True)
    worst = max(abs(one - other) / abs(one) for one, other in pairs)
    times = f"{own['step'] * 1e3:,.0f} ms | {ours['step'] * 1e3:,.0f} ms | {own['step'] / ours['step']:.1f}"
    memory = " | ".join(f"{one['bytes'] / 1e9:.1f} GB" for one in (own, ours))
    return f"| {name} | {size:,} | {f'{worst:.0e}' if worst else '0'} | {times} | {memory} | {remark} |"


if __name__ == "__main__":
    main(sys.argv[1:])
