"""
``_C_cuda.so`` is complete: every operator has kernels for CPU and CUDA.

This needs no GPU, and no CUDA in torch: the library is opened with its symbols left unresolved, and only asked what it
registers. It runs in a process of its own, since such a library must not be loaded where its kernels could be called.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cpu_only import CPU_ONLY

import torchsparse_rec

LIBRARY = Path(torchsparse_rec.__file__).parent / "_C_cuda.so"
# This operator has one kernel for all devices, which asks the host.
HOST_ONLY = {"cpu_level", "row_optimizer_rule"}
PROGRAM = f"""
import ctypes, json, os
import torch, torchsparse_rec
if torchsparse_rec.config()["CUDA library"] != "loaded":
    ctypes.CDLL({str(LIBRARY)!r}, mode=os.RTLD_LAZY)
has = torch._C._dispatch_has_kernel_for_dispatch_key
print(json.dumps({{
    name.removeprefix("torchsparse_rec::"): [
        key for key in ("CPU", "CUDA", "CompositeExplicitAutograd") if has(name, key)
    ]
    for name in torch._C._dispatch_get_all_op_names() if name.startswith("torchsparse_rec::")
}}))
"""


@pytest.fixture(scope="module")
def kernels() -> dict[str, set[str]]:
    """Return, for each operator, the dispatch keys that it has kernels for."""
    if not LIBRARY.exists():
        wish = os.environ.get("TORCHSPARSE_REC_CUDA", "auto")
        if wish == "0" or (wish == "auto" and torch.version.cuda is None):
            pytest.skip(f"TORCHSPARSE_REC_CUDA={wish}: the CUDA library is not wanted with this torch")
        if shutil.which("nvcc") or Path("/usr/local/cuda/bin/nvcc").exists():
            pytest.fail(f"nvcc is here, but {LIBRARY} has not been built")
        pytest.skip("no nvcc, hence no CUDA library")
    result = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return {name: set(keys) for name, keys in json.loads(result.stdout.splitlines()[-1]).items()}


def test_every_operator_has_a_cuda_kernel(kernels: dict[str, set[str]]) -> None:
    assert len(kernels) > len(HOST_ONLY | set(CPU_ONLY))
    for name, keys in kernels.items():
        wanted = {"CompositeExplicitAutograd"} if name in HOST_ONLY else {"CPU", "CUDA"}
        assert (wanted - {"CUDA"} if name in CPU_ONLY else wanted) <= keys, name
        assert not (name in CPU_ONLY and "CUDA" in keys), name


def test_no_symbol_of_torchs_unstable_interface(kernels: dict[str, set[str]]) -> None:
    """Allow torch's C shims alone among undefined symbols, not torch's C++: one build serves every torch."""
    nm = shutil.which("nm")
    if nm is None:
        pytest.skip("no nm")
    listing = subprocess.run([nm, "-D", "--undefined-only", str(LIBRARY)], capture_output=True, text=True, check=True)
    mangled = [line.split()[-1] for line in listing.stdout.splitlines()]
    assert any("aoti_torch" in symbol for symbol in mangled)
    assert not [symbol for symbol in mangled if symbol.startswith(("_ZN2at", "_ZN3c10", "_ZN5torch", "_ZNK2at"))]
