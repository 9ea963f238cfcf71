"""`make sanitize` can fail: a read out of bounds in a sanitized library ends the process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(
    "sanitized" not in os.environ.get("TORCHSPARSE_REC_LIBRARY", "") or "TORCHSPARSE_REC_ONLY" in os.environ,
    reason="the library is not a sanitized one, or not as a whole",
)

# A program that shrinks a tensor's storage, and then reads the tensor.
SHRUNKEN = """
import torch, torchsparse_rec.ops as ops
x, ids = torch.zeros(4096, 2), torch.arange(4096)
{tensor}.untyped_storage().resize_(64)
{call}
"""
CALLS = {
    "embedding_bag": ("x", "ops.embedding_bag(x, ids, torch.tensor([0, 4096]))"),
    "unique": ("ids", "ops.unique(ids)"),
}


def _run(program: str) -> subprocess.CompletedProcess:
    # Looking up the names of functions would take minutes; the library's name is enough.
    environment = {**os.environ, "ASAN_OPTIONS": f"{os.environ.get('ASAN_OPTIONS', '')}:symbolize=0"}
    command = [sys.executable, "-c", program]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", CALLS)
def test_a_read_out_of_bounds_ends_the_process(name: str) -> None:
    tensor, call = CALLS[name]
    run = _run(SHRUNKEN.format(tensor=tensor, call=call))
    assert run.returncode != 0
    assert "heap-buffer-overflow" in run.stderr and "sanitized/torchsparse_rec/_C.so" in run.stderr


def test_the_same_without_the_fault_passes() -> None:
    run = _run(
        SHRUNKEN.format(tensor="x", call="\n".join(call for _, call in CALLS.values())).replace("(64)", "(32768)")
    )
    assert run.returncode == 0, run.stderr
