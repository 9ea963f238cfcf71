"""The constants of the planner's model: shipped for each backend, or measured in the job."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..profiling.bandwidth import copy_bytes_per_second

__all__ = ["MACHINES", "Machine", "calibrate"]

# The sizes that are measured: a message that takes long, and rows of a table beyond the caches.
_SENT_BYTES = 1 << 24
_TABLE_ROWS, _TABLE_DIM, _READ_ROWS = 1 << 21, 16, 1 << 18
_REPEATS = 9


@dataclass(frozen=True)
class Machine:
    """
    The constants by which the planner estimates a step's time.

    Args:
        message_seconds: the seconds of a message among all ranks, however short it is.
        bytes_per_second: the bytes that leave a rank.
        rows_per_second: the rows that a rank reads at random places of a table beyond its caches, however short they
            are.
        copied_per_second: the bytes that a rank reads and writes in order.

    Example:
        >>> Machine(message_seconds=1e-4, bytes_per_second=1e9, rows_per_second=5e7, copied_per_second=1e10)
        Machine(message_seconds=0.0001, bytes_per_second=1000000000.0, rows_per_second=50000000.0, ...)
    """

    message_seconds: float
    bytes_per_second: float
    rows_per_second: float
    copied_per_second: float


# gloo: by calibrate, two ranks on two cores of an EPYC. nccl: seven and eight tenths of NVIDIA's figures for an H100
# SXM, 3.35 TB/s of memory and 400 Gb/s of InfiniBand. Two assumptions: a message takes 30 us, and random reads of 64
# bytes reach a tenth of the memory's bandwidth.
MACHINES = {
    "gloo": Machine(1.4e-4, 1.3e9, 5e7, 1.2e10),
    "nccl": Machine(3e-5, 4e10, 5e9, 2.3e12),
}


def calibrate(mesh: DeviceMesh | dist.ProcessGroup | None = None) -> Machine:
    """
    Measure the planner's constants in the job, in about a second. All ranks call it.

    Args:
        mesh: the mesh of the ranks, or their process group. Default: all ranks.

    Returns:
        The constants of the slowest rank in each: the same on all ranks.

    Raises:
        ValueError: the mesh has more than one dimension.

    Example:
        >>> from torch.distributed import TCPStore, destroy_process_group, init_process_group
        >>> init_process_group("gloo", store=TCPStore("localhost", 0, 1, is_master=True), rank=0, world_size=1)
        >>> calibrate().rows_per_second > 0
        True
        >>> destroy_process_group()
    """
    if isinstance(mesh, DeviceMesh) and mesh.ndim != 1:
        raise ValueError(f"calibrate: mesh must have one dimension, got {mesh.ndim}")
    group = mesh.get_group() if isinstance(mesh, DeviceMesh) else mesh
    kind = mesh.device_type if isinstance(mesh, DeviceMesh) else "cuda" if "nccl" in dist.get_backend(mesh) else "cpu"
    device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
    ranks = dist.get_world_size(group)

    def sent(elements: int) -> float:
        x = torch.zeros(ranks * elements, device=device)
        out = torch.empty_like(x)
        return _seconds(lambda: dist.all_to_all_single(out, x, group=group), device)

    elements = max(1, _SENT_BYTES // (4 * ranks))
    message, long = sent(1), sent(elements)
    # A single rank sends to itself alone.
    leaves = 4 * elements * max(1, ranks - 1) / (long - message if long > message else long)
    table = torch.ones(_TABLE_ROWS, _TABLE_DIM, device=device)
    ids = torch.randint(_TABLE_ROWS, (_READ_ROWS,), device=device, generator=torch.Generator(device).manual_seed(0))
    read = _READ_ROWS / _seconds(lambda: table.index_select(0, ids), device)
    copied = copy_bytes_per_second(device)
    # Rates of the slowest, so that the worst of each is the least.
    mine = torch.tensor([1 / message, leaves, read, copied], dtype=torch.float64, device=device)
    dist.all_reduce(mine, dist.ReduceOp.MIN, group=group)
    rates = mine.tolist()
    return Machine(1 / rates[0], *rates[1:])


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    """Return the least seconds of several calls, after one that connects ranks and takes memory."""
    seconds = []
    for _ in range(1 + _REPEATS):
        began = perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(perf_counter() - began)
    return min(seconds[1:])
