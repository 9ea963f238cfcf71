"""The page on serving: its C++ program, built as the page says, gives the model's scores."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

PAGE = (Path(__file__).resolve().parents[2] / "docs/serving.md").read_text()


def blocks(language: str) -> list[str]:
    """Return the page's pieces of code in a language."""
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.always("the only one in which a C++ program serves a model")
@pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning")  # torch warns of torch itself
def test_the_program_of_the_page(tmp_path: Path) -> None:
    setup, package = blocks("python")
    (tmp_path / "serve.cpp").write_text(*blocks("cpp"))
    names = {}
    exec(setup, names)
    names["folder"] = str(tmp_path)
    exec(package, names)
    program = "".join(blocks("sh"))
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-ec", program], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    wanted = names["model"](torch.tensor([[3, 14, 15]])).item()
    # Generated code rounds otherwise than torch's own operators, by the processor that it was generated for.
    assert float(done.stdout) == pytest.approx(wanted, rel=1e-6)
