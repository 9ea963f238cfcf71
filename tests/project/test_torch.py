"""Private names of torch stand in two files, this torch has them, and what stands in for one gives its results."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from torchsparse_rec._torch import private

ROOT = Path(__file__).resolve().parents[2]
FILES = ("_torch.py", "_torch_modules.py")
NAMES = [
    x for file in FILES for x in re.findall(r'\bprivate\("([\w.]+)"', (ROOT / "torchsparse_rec" / file).read_text())
]
# Private to torch, of tensors, modules and modes.
OF_OBJECTS = {
    *("_coalesced_", "_version", "_backward_hooks", "_post_accumulate_grad_hooks", "_execution_engine", "_schema"),
    *("_load_state_dict_post_hooks", "_compiled_call_impl", "_current_level", "_active_ddp_module"),
}


def private_names(path: Path) -> set[str]:
    """Return the names in a file that are private to torch: a module's, or an attribute of something of torch."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and re.fullmatch(r"torch(\.\w+)+", ast.unparse(node)):
            found |= {part for part in ast.unparse(node).split(".") if part.startswith("_")}
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            found |= {name for name in names if name.startswith("_")}
        if isinstance(node, ast.Attribute) and node.attr in OF_OBJECTS and ast.unparse(node.value) != "self":
            found.add(node.attr)
    return {name for name in found if not name.startswith("__")}


def test_they_stand_in_two_files():
    files = [x for folder in ("torchsparse_rec", "compat") for x in (ROOT / folder).rglob("*.py")]
    found = {str(x.relative_to(ROOT)): private_names(x) for x in files}
    assert {name for name in found if found[name]} == {f"torchsparse_rec/{file}" for file in FILES}


@pytest.mark.representative
@pytest.mark.parametrize("name", [name for name in NAMES if "cuda" not in name or torch.cuda.is_available()])
def test_this_torch_has_it(name):
    assert private(name, None) is not None


# A step in each mode, a gradient of a gradient, and a vmap; run where a name is gone, and where none is: each time in a
# process forked from one that has imported torch, which takes longer than all else.
PROGRAM = """
import importlib.util, os, pathlib, sys, types, torch, torch._dynamo
folder = pathlib.Path(importlib.util.find_spec("torchsparse_rec").origin).parent
for gone in sys.argv[1:]:
    print(f"== {gone}", flush=True)
    if not (pid := os.fork()):
        break
    if os.waitpid(pid, 0)[1]:
        sys.exit(f"without {gone}")
else:
    sys.exit()
for name in ("_torch", "_torch_modules"):
    path = folder / f"{name}.py"
    source = path.read_text().replace(f'private("{gone}"', 'private("gone"')
    module = sys.modules[f"torchsparse_rec.{name}"] = types.ModuleType(f"torchsparse_rec.{name}")
    module.__package__ = "torchsparse_rec"
    exec(compile(source, str(path), "exec"), vars(module))
from torchsparse_rec import nn, ops, optim

def trained(mode):
    torch.manual_seed(0)
    bag = nn.EmbeddingBag(50, 4, grad_mode=mode)
    optimizer = optim.Adam(bag.parameters(), lr=0.1, in_backward=mode == "fused")
    for k in range(3):
        optimizer.zero_grad()
        (bag(torch.tensor([[k, 1, 2], [3, 3, k]])).square().sum() + bag(torch.tensor([[k]])).sum()).backward()
        optimizer.step()
    return bag.state_dict()["weight"]

for mode in ("dense", "sparse", "fused"):
    try:
        print(mode, trained(mode).double().sum().item())
    except (AttributeError, RuntimeError) as error:
        print(mode, error)
data, ids = torch.arange(6.0, dtype=torch.float64).view(3, 2).requires_grad_(), torch.tensor([0, 0, 1])
print(torch.autograd.gradgradcheck(lambda x: ops.segment_prod(x, ids), data))
print(torch.func.grad(lambda x: ops.segment_sum(x, ids).square().sum())(data).tolist())
try:
    print(torch.vmap(lambda x: ops.segment_sum(x, ids))(data.detach().expand(2, 3, 2)).tolist())
except RuntimeError as error:
    print(error)
"""
# What cannot be done without a name says so; everything else is what it is with it.
REFUSED = {
    "_C._current_graph_task_id": "grad_mode='fused' cannot tell one backward from another, as torch",
    "_C._will_engine_execute_node": "grad_mode='fused' cannot tell one backward from another, as torch",
}


def run_without(*names: str) -> dict[str, list[str]]:
    """Return the lines that the program prints in a process whose torch lacks a name, for each of them."""
    command = [sys.executable, "-c", PROGRAM, *names]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    texts = dict(part.split("\n", 1) for part in done.stdout.split("== ")[1:])
    return {name: text.splitlines() for name, text in texts.items()}


@pytest.mark.always("the only one whose torch lacks names")
def test_without_each_results_are_the_same_or_refused():
    names = [name for name in NAMES if name.startswith(("_C.", "Tensor.")) and "cuda" not in name]
    found = run_without("none of them", *names)
    with_all = found.pop("none of them")
    assert list(found) == names and len(with_all) > 5
    for name, lines in found.items():
        if name in REFUSED:
            assert any(REFUSED[name] in line for line in lines), name
        assert [
            a for a, b in zip(lines, with_all, strict=True) if a != b and REFUSED.get(name, "no refusal") not in a
        ] == [], name
