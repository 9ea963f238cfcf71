"""
Fail if a CUDA kernel keeps registers in memory, or if one of a few kernels takes more registers than it may.

What ptxas printed when .ci/nvcc compiled the kernels is read. The limit on registers leaves room for as many threads as
keep memory busy.

usage: check_spills.py [folder of object files] [architecture ...]; TORCHSPARSE_REC_ONLY as for setup.py
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_ROOT = Path(__file__).resolve().parent.parent
# Parts of names of kernels that may use memory for their registers, each with the reason.
ALLOWED: dict[str, str] = {}
# Patterns in kernels' names, and how many registers of a thread leave room for enough warps to keep memory busy. The
# second pattern leaves out tables of float64.
MOST_REGISTERS = {r"four_blocks_bags_kernel": 64, r"collection_update_kernel\w+RuleIf": 128}
# CUB chooses its own trade between registers and memory, per architecture.
_FOREIGN = ("_ZN3cub", "_ZN6thrust")

_ENTRY = re.compile(r"Compiling entry function '(\S+)' for '(\S+)'")
_PROPERTIES = re.compile(r"Function properties for (\S+)")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")


class Kernel(NamedTuple):
    """A kernel, or a device function that is not inlined, in one architecture's code."""

    name: str
    architecture: str
    stack: int
    spills: int
    registers: int

    @property
    def is_bad(self) -> bool:
        """Whether the function keeps registers in memory without being in ALLOWED."""
        allowed = self.name.startswith(_FOREIGN) or any(part in self.name for part in ALLOWED)
        return (self.stack > 0 or self.spills > 0) and not allowed


def parse(log: str) -> Iterator[Kernel]:
    """Yield the kernels of a log of ``ptxas -v``. A function that is not inlined has no registers of its own."""
    architecture, waiting = "", None
    for line in log.splitlines():
        if match := _ENTRY.search(line):
            architecture = match[2]
        elif match := _PROPERTIES.search(line):
            if waiting:
                yield waiting
            waiting = Kernel(match[1], architecture, 0, 0, 0)
        elif waiting and (match := _STACK.search(line)):
            waiting = waiting._replace(stack=int(match[1]), spills=int(match[2]) + int(match[3]))
        elif waiting and (match := _REGISTERS.search(line)):
            yield waiting._replace(registers=int(match[1]))
            waiting = None
    if waiting:
        yield waiting


def _readable(name: str) -> str:
    if shutil.which("c++filt") is None:
        return name
    return subprocess.run(["c++filt", name], capture_output=True, text=True, check=True).stdout.strip()


def check(folder: Path, architectures: list[str]) -> list[str]:
    """Print each file's largest kernel, and return what is wrong, one line each."""
    wrong = []
    sources = sorted((_ROOT / "csrc/cuda").glob("*.cu"))
    if (only := os.environ.get("TORCHSPARSE_REC_ONLY")) is not None:
        sources = [x for x in sources if str(x.relative_to(_ROOT)) in only.split()]
    print(f"{'':24}{'kernels':>8}" + "".join(f"{'registers in ' + x:>22}" for x in architectures))
    for source in sources:
        log = folder / f"{source.stem}.o.ptxas"
        if not log.exists():
            wrong.append(f"{log} is missing: remove {log.with_suffix('')} and build with PYTORCH_NVCC=.ci/nvcc")
            continue
        kernels = list(parse(log.read_text()))
        own = [k for k in kernels if not k.name.startswith(_FOREIGN)]
        most = [max((k.registers for k in own if k.architecture == x), default=0) for x in architectures]
        print(f"{source.name:24}{len(own):8}" + "".join(f"{registers or '-':>22}" for registers in most))
        for architecture in architectures if kernels else []:
            if not any(k.architecture == architecture for k in kernels):
                wrong.append(f"{source.name} has kernels, but none for {architecture}")
        for k in kernels:
            if k.is_bad:
                text = f"{k.stack} bytes of stack, {k.spills} bytes spilled: {_readable(k.name)}"
                wrong.append(f"{source.name}, {k.architecture}: {text}")
            for pattern, limit in MOST_REGISTERS.items():
                if k.registers > limit and re.search(pattern, k.name):
                    text = f"{k.registers} registers, {limit} at most: {_readable(k.name)}"
                    wrong.append(f"{source.name}, {k.architecture}: {text}")
    if not sources:
        wrong.append("there are no CUDA sources")
    return wrong


def main(arguments: list[str]) -> int:
    """Check the logs in a folder, print what is wrong, and return the exit status."""
    folder = Path(arguments[0]) if arguments else _ROOT / "build/temp/csrc/cuda"
    wrong = check(folder, arguments[1:] or ["sm_80", "sm_90"])
    print(*wrong, sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
