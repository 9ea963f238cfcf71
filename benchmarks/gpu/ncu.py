"""
Figures of single kernels by Nsight Compute: ``ncu`` runs ``python -m benchmarks.gpu.ncu``.

The program calls benchmark rows, each once while ``ncu`` watches, and ends in good time before the moment it is given:
``ncu`` writes only then. Reading what ``ncu`` wrote needs no torch.
"""

from __future__ import annotations

import csv
import re
import sys
import time
from pathlib import Path

# Each kernel's benchmark row, which launches it.
KERNELS = {
    "bags_kernel": "embedding/bag-sum-128-zipf",
    "four_blocks_bags_kernel": "embedding/bag-sum-128-zipf",
    "short_bags_kernel": "segment/segment_max",
    "parts_kernel": "sok/adagrad",
    "move_entries_kernel": "sok/adagrad",
    "entries_kernel": "sok/adagrad",
    "collection_update_kernel": "sok/adagrad",
    "row_update_kernel": "row_update/sgd",
    "flag_rows_kernel": "sparse_tensor/fill-unordered",
    "row_optimizer_update_kernel": "adam/update-zipf",
    "lookup_kernel": "embedding_variable/lookup",
}
# The metrics, and their names in the report.
METRICS = {
    "gpu__time_duration.sum": "us",
    "dram__bytes.sum.per_second": "GB/s",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "% of peak bandwidth",
    "l1tex__average_t_sectors_per_request_pipe_lsu_mem_global_op_ld.ratio": "sectors per load",
    "l1tex__average_t_sectors_per_request_pipe_lsu_mem_global_op_st.ratio": "sectors per store",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "% occupancy",
    "launch__registers_per_thread": "registers",
}
# Factors to ncu's base units, which are nanoseconds and bytes per second.
_BASE = {"us": 1e3, "GB/s": 1e9}
# What ncu prints where the counters may not, or cannot, be read.
REFUSED = "ERR_NVGPUCTRPERM|Failed to initialize the profiler"


def command(ncu: str, program: list[str], out: Path) -> list[str]:
    """Return ncu's command line. It watches the kernels of a program and writes a line for each launch."""
    names = "|".join(KERNELS)
    watch = [ncu, "--profile-from-start", "off", "--clock-control", "none", "--kernel-name", f"regex:^({names})$"]
    write = ["--csv", "--page", "raw", "--print-units", "base", "--log-file", str(out)]
    return [*watch, *write, "--metrics", ",".join(METRICS), *program]


def read(text: str) -> list[dict[str, str | float]]:
    """
    Read the output of ``ncu --csv --page raw``: messages, a head, a line of units, and a line for each launch.

    A metric that this GPU or version does not have is left out.
    """
    lines = [line for line in text.splitlines() if line.startswith('"')]
    found: list[dict[str, str | float]] = []
    for cells in list(csv.DictReader(lines))[1:]:
        name = re.search(r"(\w+)\s*(?:<|\(|$)", cells["Kernel Name"])
        entry: dict[str, str | float] = {"kernel": name[1] if name else cells["Kernel Name"]}
        for metric, called in METRICS.items():
            if re.fullmatch(r"[\d.,]+(e[+-]?\d+)?", cells.get(metric) or ""):
                entry[called] = float(cells[metric].replace(",", "")) / _BASE.get(called, 1.0)
        found.append(entry)
    return found


def main(until: float) -> None:
    """Call each row twice unseen, then once while ncu watches, until the time ``until`` (seconds since 1970)."""
    import torch

    from ..__main__ import choose
    from ..rows import Options

    for name in dict.fromkeys(KERNELS.values()):
        if time.time() > until:
            break
        try:
            run = choose([name], "cuda")[0].build(Options("cuda")).ours()
            run()
            run()
            torch.cuda.synchronize()
            torch.cuda.profiler.start()
            run()
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()
        except Exception as error:  # An error of one row must not stop the others.
            print(f"{name}: {type(error).__name__}: {error}", flush=True)


if __name__ == "__main__":
    main(float(sys.argv[1]))
