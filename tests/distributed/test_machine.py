"""The planner's constants, measured in a job."""

from __future__ import annotations

from pathlib import Path

from processes import run_two

PROGRAM = """
import dataclasses
from torch.distributed.device_mesh import init_device_mesh
from torchsparse_rec.distributed.machine import calibrate

mesh = init_device_mesh("cpu", (2,))
for of in (None, mesh, mesh.get_group(), dist.new_group([rank], use_local_synchronization=True)):
    print(*dataclasses.astuple(calibrate(of)))
try:
    calibrate(init_device_mesh("cpu", (2, 1)))
except ValueError as error:
    print(error)
"""


def test_all_ranks_measure_the_same(tmp_path: Path) -> None:
    first, second = (output.splitlines() for output in run_two(PROGRAM, tmp_path, 300))
    # The last is of each rank alone.
    assert first[:3] == second[:3]
    for line in (*first[:4], second[3]):
        constants = [float(word) for word in line.split()]
        assert len(constants) == 4 and all(0 < each < float("inf") for each in constants)
    assert first[4] == second[4] == "calibrate: mesh must have one dimension, got 2"
