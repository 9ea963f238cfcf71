"""Tables for the tests of the planner."""

from __future__ import annotations

from torchsparse_rec.distributed.machine import MACHINES
from torchsparse_rec.distributed.plan import Planned, TablePlan
from torchsparse_rec.distributed.planner import Use, expected_distinct

GLOO = MACHINES["gloo"]
BATCH = 4096


def used(name: str, rows: int, hotness: int = 1, batch: int = BATCH, dim: int = 16) -> Use:
    """Return a table of float32 with Adagrad's states, whose ids follow the power law."""
    ids = hotness * batch
    return Use(name, rows, dim, 4, 8 * dim, ids, expected_distinct(ids, rows), batch)


def plans(planned: Planned) -> dict[str, TablePlan]:
    """Return the plan of each table."""
    return {name: each.plan for name, each in planned.tables.items()}
