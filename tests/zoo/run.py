"""
``python -m zoo.run NAME own|ours ROWS``: train one model in its library's own trainer, and print what was measured.

The lines are the same for every library: the loss is what ``backward`` is called on, and a step is the time from one
``backward`` to the next.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import sys
import tempfile
import time
from statistics import median

import torch

SEED, STEPS, FIRST, BATCH, DIM = 0, 6, 2, 1024, 16


def ids(rows: int, *shape: int) -> torch.Tensor:
    """Return ids from 1 to ``rows - 1``, small ones more often, so that steps meet rows of earlier steps."""
    return (torch.rand(*shape, dtype=torch.float64).pow(4) * (rows - 1)).long() + 1


def labels(count: int) -> torch.Tensor:
    """Return labels 0.0 and 1.0 at random."""
    return torch.randint(2, (count,)).float()


def measured(name: str, ours: bool, rows: int) -> dict[str, object]:
    """Return the losses of the steps, the median time of a step in seconds, and the peak memory in bytes."""
    losses, times = [], []
    backward = torch.Tensor.backward

    def noted(loss: torch.Tensor, *args: object, **options: object) -> None:
        losses.append(float(loss.detach()))
        times.append(time.perf_counter())
        backward(loss, *args, **options)  # type: ignore[arg-type]

    # The name of a file here, of a function in it, and that function's setting.
    library, model, *setting = name.split(".", 2)
    train = getattr(importlib.import_module(f"zoo.of_{library}"), model)
    torch.manual_seed(SEED)
    torch.Tensor.backward = noted  # type: ignore[method-assign, assignment]
    train(rows, ours, *setting)
    steps = [after - before for before, after in zip(times[FIRST - 1 :], times[FIRST:], strict=False)]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"losses": losses, "step": median(steps), "bytes": peak}


if __name__ == "__main__":
    out = os.dup(1)
    os.dup2(2, 1)  # the libraries print as they train
    os.chdir(tempfile.mkdtemp())  # and write files
    found = measured(sys.argv[1], sys.argv[2] == "ours", int(sys.argv[3]))
    os.write(out, json.dumps(found).encode())
