"""The rules that name causes from the measurements. Every threshold is in :mod:`.thresholds`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from ..nn.auto import as_bytes
from ._rows import RowWork
from ._tables import TableUse
from ._trace import Copies, Profile
from .diagnosis import Finding
from .thresholds import (
    BIG_TABLE_BYTES,
    DENSE_GRADIENT_SHARE,
    HEAVY_DENSE_SHARE,
    HOST_SYNC_SHARE,
    IDLE_ROWS,
    LEAST_WAIT_MS,
    LOADER_COPY_SHARE,
    LOADER_SHARE,
    MANY_LOOKUPS,
    MATRIX_PRODUCT_SHARE,
    NEEDLESS_COPY_SHARE,
    ROW_WORK_SHARE,
    UNFUSED_LOOKUP_SHARE,
)

__all__ = ["CAUSES", "Measured", "find_causes", "wasteful"]


@dataclass
class Measured:
    """The numbers that the rules take. Shares are of the loop's time; None: could not be measured."""

    loader_share: float = 0.0
    wait_ms: float = math.inf
    """The wait for a batch."""
    step_share: float = 1.0
    """The step's share of the loop's time; the rest is the wait."""
    best_step_ms: float = math.inf
    """The time of a step in the fastest round without a profiler."""
    dense_share: float | None = None
    table_gradient_share: float | None = None
    row_work: RowWork | None = None
    workers: int | None = None
    """The number of the loader's worker processes; None if it is no DataLoader."""
    tables: list[TableUse] = field(default_factory=list)
    parameters: int = 0
    """The number of parameters that the optimizers hold, tables among them."""
    profile: Profile = field(default_factory=Profile)

    def part_of_loop(self, ms: float) -> float:
        """Return the share of the loop's time of something that takes ``ms`` in all profiled steps together."""
        return self.step_share * ms / self.profile.step_ms if self.profile.step_ms else 0.0

    def loader_copies(self) -> Copies:
        """Return the copies that the loader made for the profiled batches."""
        return self.profile.copies.get("loader", Copies())


def wasteful(tables: list[TableUse]) -> list[TableUse]:
    """Return the tables with a dense gradient most of whose rows are zeros, or none if they are small together."""
    found = [table for table in tables if table.gradient == "dense" and table.idle >= IDLE_ROWS]
    return found if sum(table.idle_bytes for table in found) >= BIG_TABLE_BYTES else []


def find_causes(measured: Measured) -> list[Finding]:
    """
    Apply every rule to the measured numbers.

    Args:
        measured: the numbers.

    Returns:
        The causes, the largest share first. Empty for a healthy loop.

    Example:
        >>> find_causes(Measured(loader_share=0.1))
        []
        >>> [finding.cause for finding in find_causes(Measured(loader_share=0.7, step_share=0.3))]
        ['slow_loader']
    """
    found = [finding for rule in CAUSES.values() if (finding := rule(measured)) is not None]
    return sorted(found, key=lambda finding: -finding.share)


def _is_waited_for(m: Measured) -> bool:
    return m.loader_share >= LOADER_SHARE and m.wait_ms >= LEAST_WAIT_MS


def _blamed_on_rows(m: Measured) -> bool:
    return m.row_work is not None and m.row_work.share >= ROW_WORK_SHARE


def _loader_copies_share(m: Measured) -> float:
    """Return the share of the loop's time of the loader's copies, or 0 unless they are most of a slow loader's work."""
    profiled = m.profile.host_ms["loader"]
    part = min(m.loader_copies().ms / profiled, 1.0) if profiled else 0.0
    slow = _is_waited_for(m) and not _blamed_on_rows(m)
    return part * m.loader_share if slow and part >= LOADER_COPY_SHARE else 0.0


def _slow_loader(m: Measured) -> Finding | None:
    if not _is_waited_for(m) or _blamed_on_rows(m) or _loader_copies_share(m):
        return None
    seen = f"the step waits {m.loader_share:.0%} of the time for its next batch"
    if m.workers:
        setting = (
            f"{m.workers} workers do not keep up: more of them (num_workers, prefetch_factor), or do the work once and "
            "store its result with torchsparse_rec.data.write_prebatched"
        )
    else:
        setting = (
            "prefetch: wrap the loader in torchsparse_rec.data.DeviceLoader, or give its DataLoader num_workers > 0; "
            "if it is still too slow, do the work once and store its result with torchsparse_rec.data.write_prebatched"
        )
    return Finding("slow_loader", m.loader_share, seen, setting)


def _per_row_records(m: Measured) -> Finding | None:
    if not _is_waited_for(m) or not _blamed_on_rows(m):
        return None
    assert m.row_work is not None
    runs = f"{m.row_work.runs_per_example:.3g} times for each example"
    seen = (
        f"the step waits {m.loader_share:.0%} of the time for its next batch, and {m.row_work.share:.0%} of the "
        f"loader's work runs row by row: {m.row_work.place} runs {runs}"
    )
    setting = (
        "prebatch: write the records once with torchsparse_rec.data.write_prebatched (or python -m "
        "torchsparse_rec.data convert) and read whole batches with PrebatchedDataset"
    )
    return Finding("per_row_records", m.loader_share, seen, setting)


def _dense_gradient(m: Measured) -> Finding | None:
    tables = wasteful(m.tables)
    if not tables or m.table_gradient_share is None:
        return None
    idle = sum(table.idle_bytes for table in tables) / sum(table.bytes for table in tables)
    share = m.table_gradient_share * idle
    if share < DENSE_GRADIENT_SHARE:
        return None
    largest = max(tables, key=lambda table: table.idle_bytes)
    seen = (
        f"{len(tables)} table(s) get a gradient of all their rows, and a batch does not touch {idle:.1%} of them; the "
        f"largest is {largest.describe()}"
    )
    mode = "'sparse' or 'auto', or 'fused' with an optimizer of torchsparse_rec.optim made with in_backward=True"
    if any(table.grad_mode == "'auto'" for table in tables):
        setting = (
            "an optimizer of torchsparse_rec.optim, or torchsparse_rec.nn.use_optimizer(model, optimizer): "
            "grad_mode='auto' had to choose dense, explain() says why"
        )
    elif all(table.grad_mode for table in tables):
        setting = f"grad_mode={mode}"
    else:
        setting = f"torchsparse_rec.nn.convert(model, grad_mode=...) with {mode}; torch's own tables: sparse=True"
    return Finding("dense_gradient", share, seen, setting)


def _needless_copies(m: Measured) -> Finding | None:
    copies, on_gpu = m.profile.copies, bool(m.profile.device_ms)
    if on_gpu:
        between = [copies.get(direction, Copies()) for direction in ("HtoD", "DtoH")]
        in_step = m.part_of_loop(sum(c.ms for c in between))
        count, size = sum(c.count for c in between), sum(c.bytes for c in between)
    else:
        own = copies.get("step", Copies())
        in_step, count, size = m.step_share * m.profile.copy_share(m.best_step_ms), own.count, own.bytes
    in_loader = _loader_copies_share(m)
    share = in_step + in_loader
    if share < NEEDLESS_COPY_SHARE:
        return None
    steps = max(m.profile.steps, 1)
    seen = f"copies of tensors take {in_step:.0%} of the loop's time in the step"
    seen += f": {count / steps:.0f} a step, {as_bytes(size // steps)}" if count else ""
    if in_loader:
        made = m.loader_copies()
        seen += (
            f", and {in_loader:.0%} in the loader: {made.count / steps:.0f} a batch, {as_bytes(made.bytes // steps)}"
        )
    if on_gpu:
        pinned = (
            "pin the batches (pin_memory=True) and copy with non_blocking=True, or use DeviceLoader"
            if (m.profile.pageable)
            else "copy the next batch while this one computes: torchsparse_rec.data.DeviceLoader"
        )
        setting = f"{pinned}; leave results on the device"
    else:
        setting = (
            "store the batches in the dtype, layout and order in which the step uses them, so that it needs no "
            "clone(), to(dtype) or contiguous(), and fill batches in place instead of collating copies"
        )
    return Finding("needless_copies", share, seen, setting)


def _heavy_mlp(m: Measured) -> Finding | None:
    product_share = m.profile.product_share(m.best_step_ms)
    # The experiment cannot take out all layers; the share of all matrix products covers the rest.
    share = max(m.dense_share or 0.0, m.step_share * product_share)
    if share < HEAVY_DENSE_SHARE or product_share < MATRIX_PRODUCT_SHARE:
        return None
    seen = (
        f"the dense layers take {share:.0%} of the loop's time, matrix products alone {product_share:.0%} of the step: "
        "the embeddings are not the problem"
    )
    setting = (
        "make the dense layers cheaper: torch.autocast (bfloat16), torch.compile, narrower layers, or a GPU; other "
        "settings of tables and loader change little"
    )
    return Finding("heavy_mlp", share, seen, setting)


def _unfused_lookups(m: Measured) -> Finding | None:
    count = m.profile.lookups / max(m.profile.steps, 1)
    # The tables' part of the optimizer's time counts too, since it updates table by table.
    trained = sum(table.gradient != "none" for table in m.tables) / max(m.parameters, 1)
    in_step = m.profile.share("lookup") + m.profile.share("lookup backward") + trained * m.profile.share("optimizer")
    share = m.step_share * in_step
    if count < MANY_LOOKUPS or share < UNFUSED_LOOKUP_SHARE:
        return None
    seen = f"{count:.0f} lookups a step, one by one, take {share:.0%} of the loop's time with backward and update"
    setting = "one torchsparse_rec.nn.EmbeddingBagCollection (or EmbeddingCollection) for all tables, grad_mode='fused'"
    return Finding("unfused_lookups", share, seen, setting)


def _host_sync(m: Measured) -> Finding | None:
    # Only waiting for an idle device costs time: if the device is busy, its work is what takes the time.
    idle_ms = max(m.profile.step_ms - sum(m.profile.device_ms.values()), 0.0)
    share = m.part_of_loop(min(m.profile.wait_ms, idle_ms))
    if not m.profile.device_ms or share < HOST_SYNC_SHARE:
        return None
    worst = sorted(m.profile.waits, key=lambda name: -m.profile.waits[name])[:3]
    seen = f"the host waits for a device that has nothing to do {share:.0%} of the loop's time, in {', '.join(worst)}"
    setting = (
        "read losses and metrics back every few hundred steps only; no .item(), .cpu(), nonzero() or if on tensors"
    )
    return Finding("host_sync", share, seen, setting)


#: The rules by the names of the causes that they find.
CAUSES: dict[str, Callable[[Measured], Finding | None]] = {
    "slow_loader": _slow_loader,
    "per_row_records": _per_row_records,
    "dense_gradient": _dense_gradient,
    "needless_copies": _needless_copies,
    "heavy_mlp": _heavy_mlp,
    "unfused_lookups": _unfused_lookups,
    "host_sync": _host_sync,
}
