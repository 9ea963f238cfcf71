"""
What torchrun starts on each rank to run several commands in turn, each a job of its own as if torchrun had started it.

To import torch and all that an example needs takes a rank longer than to train. A rank that runs this file imports
once, and is then forked for each command, which runs as ``python -m`` would, under the environment that torchrun has
set. As after a restart, ranks of a later command meet in a store in which addresses of ended ranks have stayed.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any, NoReturn

# Those that the commands import only when they have begun.
_IMPORTED = ("torchmetrics.classification", "matplotlib.backends.backend_agg", "matplotlib.figure", "safetensors.torch")


def main(listed: str) -> int:
    """
    Run the commands in the JSON file ``listed``, each an object of these entries, until one fails; return its code.

    - ``module`` and ``arguments``: as they stand after ``python -m``.
    - ``alone``: whether the first rank alone runs it, as one process that torchrun has not started.
    - ``log``: the file for what it prints; that of another rank than the first gets the rank's number as a suffix.
    """
    rank = int(os.environ["RANK"])
    jobs = json.loads(Path(listed).read_text())
    for name in (*sorted({job["module"] for job in jobs}), *_IMPORTED):
        importlib.import_module(name)
    for job in jobs:
        if job["alone"] and rank:
            continue
        pid = os.fork()
        if not pid:
            _run(job, job["log"] if rank == 0 else f"{job['log']}.{rank}")
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if code:
            return code if code > 0 else 1
    return 0


def _run(job: dict[str, Any], log: str) -> NoReturn:
    """Run a command in this process, and end it as Python ends a program: with its exit code, or an error's words."""
    with open(log, "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    if job["alone"]:
        for name in [name for name in os.environ if name.startswith("TORCHELASTIC_")]:
            del os.environ[name]
    sys.argv = [job["module"], *job["arguments"]]
    # Imported as a module already: as a program it runs anew.
    sys.modules.pop(job["module"])
    runpy.run_module(job["module"], run_name="__main__", alter_sys=True)
    sys.exit()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
