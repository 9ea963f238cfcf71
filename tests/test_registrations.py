"""Every schema of csrc/library.cpp is complete: kernels for both devices, a fake kernel, and a stand on gradients."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import torchsparse_rec

FOLDER = Path(torchsparse_rec.__file__).resolve().parent
NAMES = sorted(n for n in torch._C._dispatch_get_all_op_names() if n.startswith("torchsparse_rec::"))
# They ask the machine, not a tensor: no kernel for a device, and nothing to differentiate.
WITHOUT_TENSORS = {"torchsparse_rec::cpu_level"}
# Waits for a device and raises what kernels recorded there.
WITHOUT_RESULT = {"torchsparse_rec::check_errors"}
OPERATORS = [n for n in NAMES if n not in WITHOUT_TENSORS | WITHOUT_RESULT]


def schema(name: str) -> torch.FunctionSchema:
    """The schema that the dispatcher knows."""
    return getattr(torch.ops.torchsparse_rec, name.split("::")[1]).default._schema


def has(name: str, key: str) -> bool:
    """Whether the operator has a kernel of its own for the key."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, key)


def test_there_are_operators():
    assert OPERATORS and set(NAMES) >= WITHOUT_TENSORS | WITHOUT_RESULT


@pytest.mark.parametrize("name", OPERATORS)
def test_operator_is_complete(name):
    assert has(name, "CPU")
    assert torch._library.simple_registry.singleton.find(name).fake_impl.kernel is not None
    # torch refuses an autograd formula for an operator that writes into its arguments.
    assert has(name, "Autograd") != schema(name).is_mutable


@pytest.mark.parametrize("name", NAMES)
def test_schema_uses_what_the_stable_abi_passes_well(name):
    types = {str(a.type) for a in schema(name).arguments} | {str(r.type) for r in schema(name).returns}
    assert types <= {"Tensor", "Optional[Tensor]", "int", "Optional[int]", "bool", "float", "List[int]", "List[Tensor]"}


# In another process: a library with CUDA kernels, once in, stays. Lazily: a CPU-only torch lacks what its kernels call.
CUDA_KERNELS = """
import ctypes, os, sys, torch, torchsparse_rec
if torchsparse_rec.config()["CUDA library"] != "loaded":
    ctypes.CDLL(sys.argv[1], mode=os.RTLD_LAZY)
print(*(n for n in sys.argv[2:] if not torch._C._dispatch_has_kernel_for_dispatch_key(n, "CUDA")))
"""


def test_every_operator_has_a_cuda_kernel():
    library = FOLDER / "_C_cuda.so"
    if not library.exists():
        pytest.skip("_C_cuda.so is not built: no nvcc")
    found = subprocess.run(
        [sys.executable, "-c", CUDA_KERNELS, library, *OPERATORS, *WITHOUT_RESULT], capture_output=True, text=True
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout.split() == []
