"""The planner's constants, measured in a job."""

from __future__ import annotations

from dataclasses import astuple

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from torchsparse_rec.distributed.machine import calibrate


def measured() -> list[tuple[float, ...]]:
    """Measure with all ranks, in each way to say so, and last with this rank alone."""
    mesh = init_device_mesh("cpu", (2,))
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    with pytest.raises(ValueError, match="^calibrate: mesh must have one dimension, got 2$"):
        calibrate(init_device_mesh("cpu", (2, 1)))
    return [astuple(calibrate(of)) for of in (None, mesh, mesh.get_group(), alone)]


@pytest.mark.parametrize("device", ["cpu"], indirect=True)
def test_all_ranks_measure_the_same(two) -> None:
    first, second = two.run(measured)
    assert first[:3] == second[:3]
    for constants in (*first, second[3]):
        assert len(constants) == 4 and all(0 < each < float("inf") for each in constants)
