"""
Install the wheel in new environments, each with another torch, and use it there from another folder.

usage: wheel_environments.py FOLDER [NAME ...]    FOLDER: where the wheel is. NAME: only torch of these versions

It is no part of CI: for each torch gigabytes may be downloaded. An environment is removed after use. It prints a table,
and exits with 1 if one of them failed or could not be made.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

# A torch, and the Python to try it with: the first of these that the machine has.
ENVIRONMENTS = {
    "2.10.0": ("3.10",),
    "2.11.0": ("3.12",),
    "2.12.*": ("3.13",),
    "2.13.0": ("3.14", "3.11"),
    "newest": ("3.14t", "3.14", "3.11"),
}


# ---- In an environment -----------------------------------------------------------------------------------------------


def use_operators() -> None:
    """Call an operator and its gradient, by both of its names, and one that must refuse its input."""
    import torch

    from torchsparse_rec import ops
    from torchsparse_rec.compat import tensorflow

    data = torch.arange(6.0).view(3, 2).requires_grad_()
    segment_ids = torch.tensor([0, 0, 2])
    sums = ops.segment_sum(data, segment_ids)
    sums.square().sum().backward()
    assert sums.tolist() == [[2.0, 4.0], [0.0, 0.0], [4.0, 5.0]]
    assert data.grad is not None and torch.equal(data.grad, 2 * sums.detach()[segment_ids])
    assert torch.equal(tensorflow.math.segment_sum(data, segment_ids), sums)
    try:
        ops.embedding(data.detach(), torch.tensor([3]))
    except IndexError as error:
        assert "3" in str(error), error
    else:
        raise AssertionError("an id out of range was accepted")


def use_modules() -> None:
    """Train a table by steps in backward, beside torch's dense one; then one that grows."""
    import torch

    from torchsparse_rec import nn, optim

    ours = nn.EmbeddingBag(10, 4, mode="sum", grad_mode="fused")
    theirs = torch.nn.EmbeddingBag(10, 4, mode="sum")
    theirs.load_state_dict(ours.state_dict())
    by_rows = optim.Adam(ours.parameters(), lr=0.1, in_backward=True)
    dense = torch.optim.Adam(theirs.parameters(), lr=0.1)
    ids = torch.tensor([[1, 2, 2], [3, 1, 9]])
    for step in range(3):
        for bag, optimizer in ((ours, by_rows), (theirs, dense)):
            optimizer.zero_grad()
            bag(ids[:, step:]).square().sum().backward()
            optimizer.step()
    torch.testing.assert_close(ours.state_dict()["weight"], theirs.state_dict()["weight"])

    table = nn.EmbeddingVariable(4, name="items")
    growing = optim.Adagrad(table.parameters(), lr=0.1)
    keys = torch.tensor([9_000_000_000, -4, 9_000_000_000])
    before = table(keys)
    before.square().sum().backward()
    growing.step()
    assert table.total_count() == 2
    assert not torch.equal(table(keys), before)


def use_compilers() -> None:
    """Compile and export a lookup."""
    import torch

    from torchsparse_rec import nn

    bag, ids = nn.EmbeddingBag(10, 4, grad_mode="dense").eval(), torch.tensor([[1, 2, 2], [3, 1, 9]])
    assert torch.equal(torch.compile(bag, fullgraph=True)(ids), bag(ids))
    assert torch.equal(torch.export.export(bag, (ids,)).module()(ids), bag(ids))


def use() -> None:
    """Use the package that is installed with this Python, and print with what."""
    import numpy
    import torch

    import torchsparse_rec
    import torchsparse_rec.examples.ncf

    folder = Path(torchsparse_rec.__file__).parent
    assert folder.is_relative_to(sys.prefix), folder
    assert (folder / "py.typed").exists()
    use_operators()
    use_modules()
    use_compilers()
    print(f"torch {torch.__version__}, Python {platform.python_version()}, numpy {numpy.__version__}")


# ---- Around it -------------------------------------------------------------------------------------------------------


def interpreter(version: str) -> str | None:
    """Return a Python of this version (with t: without the GIL) that can make environments; None if there is none."""
    installed = sorted((Path.home() / ".pyenv/versions").glob(f"{version.removesuffix('t')}.*/bin/python"))
    t = "'t' * bool(sysconfig.get_config_var('Py_GIL_DISABLED'))"
    program = f"import sys, sysconfig, venv, ensurepip; sys.exit('%d.%d' % sys.version_info[:2] + {t} != '{version}')"
    for candidate in (f"python{version}", *map(str, installed)):
        found = shutil.which(candidate)
        if found and subprocess.run([found, "-c", program], capture_output=True).returncode == 0:
            return found
    return None


def tried(wheel: Path, torch: str, python: str) -> str:
    """Make an environment, install the wheel with a torch, use it, and remove all; return what was found."""
    with tempfile.TemporaryDirectory() as made:
        there = str(Path(made, "environment/bin/python"))
        named = "torch" if torch == "newest" else f"torch=={torch}"
        options = ("-q", "--disable-pip-version-check", "--no-cache-dir")
        commands = [
            (python, "-m", "venv", str(Path(made, "environment"))),
            (there, "-m", "pip", "install", *options, str(wheel), named),
            (there, str(Path(__file__).resolve()), "--use"),
        ]
        variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        variables["TORCHINDUCTOR_CACHE_DIR"] = str(Path(made, "compiled"))
        for command in commands:
            done = subprocess.run(command, cwd=made, env=variables, capture_output=True, text=True)
            if done.returncode != 0:
                print(done.stdout + done.stderr, flush=True)
                return f"failed: {(done.stderr or done.stdout or 'without a word').strip().splitlines()[-1]}"
        return f"ok: {done.stdout.strip().splitlines()[-1]}"


def main() -> int:
    """Try the environments, print the table, and return the exit status."""
    if sys.argv[1:] == ["--use"]:
        use()
        return 0
    folder, names = Path(sys.argv[1]), sys.argv[2:] or list(ENVIRONMENTS)
    if unknown := set(names) - set(ENVIRONMENTS):
        print(f"no such torch: {', '.join(sorted(unknown))}; there are {', '.join(ENVIRONMENTS)}")
        return 2
    wheels = sorted(folder.resolve().glob("torchsparse_rec-*.whl"))
    if len(wheels) != 1:
        print(f"{folder} must hold one wheel of torchsparse_rec, got {len(wheels)}: make wheel")
        return 2
    rows = []
    for name in names:
        found = next(((v, path) for v in ENVIRONMENTS[name] if (path := interpreter(v))), None)
        start = time.monotonic()
        result = "failed: no such Python here" if found is None else tried(wheels[0], name, found[1])
        version = " or ".join(ENVIRONMENTS[name]) if found is None else found[0]
        rows.append(f"{name:<8} {version:<12} {time.monotonic() - start:5.0f} s  {result}")
        print(rows[-1], flush=True)
    print("", "torch    Python       time     result", *rows, sep="\n")
    return 1 if any("failed: " in row for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
