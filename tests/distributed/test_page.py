"""The program on the page of tables over ranks prints what the page says, under torchrun with two ranks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs/distributed.md"


def test_the_program_prints_what_the_page_says(tmp_path: Path) -> None:
    program, printed = re.findall(
        r"```python\n(.*?)```\s*```console\n\$ torchrun [^\n]*--nproc-per-node 2 train.py\n(.*?)```",
        PAGE.read_text(),
        re.DOTALL,
    )[0]
    (tmp_path / "train.py").write_text(program)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1", "PYTHONPATH": str(PAGE.parents[1])}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == printed.strip()
    # One process loads what it has saved.
    one = "import torch, train; print(train.Model().load_state_dict(torch.load('model.pt')))"
    done = subprocess.run([sys.executable, "-c", one], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == "<All keys matched successfully>", done.stderr
