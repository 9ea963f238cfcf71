"""The tables of the categories: Embedding Variables keyed by raw ids, or fixed tables of hashed ids."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ... import initializers, nn, ops, variable
from ...data.criteo import CATEGORIES
from .._job import ALONE, Job
from .._optimizers import STATES
from .settings import Settings

# The rows for which a dynamic table has room at first. It grows.
FIRST_CAPACITY = 1024
TIERS = ("DRAM", "HBM", "HBM_DRAM", "DRAM_SSD", "HBM_DRAM_SSD")


@dataclass(frozen=True)
class Placement:
    """
    Where the rows of dynamic tables are. This does not change what is trained.

    Args:
        tiers: one of TIERS.
        hbm_rows, dram_rows: rows of each table in these tiers, where there is another tier below.
        ssd_path: the folder of the SSD tier.
    """

    tiers: str = "DRAM"
    hbm_rows: int = 1 << 16
    dram_rows: int = 1 << 16
    ssd_path: Path | None = None

    def storage(self, embedding_dim: int, states: int) -> variable.StorageOption:
        """Return a table's storage option. A row has ``states`` numbers beside each weight; its key takes 24 bytes."""
        rows = {"HBM": self.hbm_rows, "DRAM": self.dram_rows}
        sizes = [rows[tier] * (embedding_dim * 4 * (1 + states) + 24) for tier in self.tiers.split("_")[:-1]]
        path = None if self.ssd_path is None else str(self.ssd_path)
        return variable.StorageOption(self.tiers, path, sizes)


def table_configs(settings: Settings, placement: Placement) -> list[nn.EmbeddingBagConfig]:
    """Return a table's config for each category."""
    hashed = settings.tables == "hashed"
    rows = settings.buckets if hashed else FIRST_CAPACITY
    option, start = (None, None) if hashed else (_option(settings, placement), initializers.Uniform(-0.01, 0.01))
    return [
        nn.EmbeddingBagConfig(
            rows, settings.embedding_dim, name, feature_names=[name], ev_option=option, initializer=start
        )
        for name in CATEGORIES
    ]


def _option(settings: Settings, placement: Placement) -> variable.EmbeddingVariableOption:
    evict = None
    if settings.evict is not None:
        evict = variable.GlobalStepEvict(settings.evict, settings.evict_every or settings.evict)
    return variable.EmbeddingVariableOption(
        filter_option=None if settings.filter is None else variable.CounterFilter(settings.filter),
        evict_option=evict,
        storage_option=placement.storage(settings.embedding_dim, STATES[settings.optimizer]),
    )


def table_ids(settings: Settings, ids: Tensor) -> Tensor:
    """Return the ids by which the tables look up raw ids: the same ones, or their hashes."""
    return ids if settings.tables == "dynamic" else ops.to_hash_bucket_fast(ids, settings.buckets)


def variables(bags: nn.EmbeddingBagCollection) -> dict[str, nn.EmbeddingVariable]:
    """Return the dynamic tables by name."""
    found = bags.get_submodule("embedding_bags").named_children()
    return {name: table for name, table in found if isinstance(table, nn.EmbeddingVariable)}


def statistics(bags: nn.EmbeddingBagCollection, job: Job = ALONE) -> list[str]:
    """Return the lines of a report on each dynamic table and their sums; no lines where no table is dynamic."""
    rows = {name: job.sums(_figures(table.stats())) for name, table in variables(bags).items()}
    if not rows:
        return []
    rows["all"] = {heading: sum(row[heading] for row in rows.values()) for heading in _HEADINGS}
    widths = {heading: max(len(heading), *(len(f"{row[heading]:,}") for row in rows.values())) for heading in _HEADINGS}
    lines = ["table  " + "  ".join(f"{heading:>{widths[heading]}}" for heading in _HEADINGS)]
    for name, row in rows.items():
        lines.append(f"{name:<5}  " + "  ".join(f"{row[heading]:>{widths[heading]},}" for heading in _HEADINGS))
    return lines


_HEADINGS = ("keys", "filtered", "evicted", "bytes")


def _figures(stats: dict[str, Any]) -> dict[str, int]:
    total = sum(value for name, value in stats.items() if name.startswith("bytes"))
    return {**{heading: int(stats[heading]) for heading in _HEADINGS[:-1]}, "bytes": int(total)}
