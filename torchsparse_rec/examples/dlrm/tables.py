"""The tables: Embedding Variables keyed by raw ids, or fixed ones of hashed ids."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ... import nn, ops
from ...data.criteo import CATEGORIES

if TYPE_CHECKING:
    from .train import Settings

KINDS = ("dynamic", "hashed")
TIERS = ("DRAM", "HBM", "HBM_DRAM", "DRAM_SSD", "HBM_DRAM_SSD")


@dataclass(frozen=True)
class Placement:
    """
    Where the rows of dynamic tables are. It does not change what is trained.

    Args:
        tiers: one of TIERS.
        hbm_rows, dram_rows: of each table, in these tiers, where there is another below.
        ssd_path: the folder of the SSD tier.
    """

    tiers: str = "DRAM"
    hbm_rows: int = 1 << 16
    dram_rows: int = 1 << 16
    ssd_path: Path | None = None

    def storage(self, name: str, embedding_dim: int) -> Any:
        """The option of one table. A row has as many bytes of optimizer state as it has of weights."""
        rows = {"HBM": self.hbm_rows, "DRAM": self.dram_rows}
        sizes = [rows[tier] * embedding_dim * 4 * 2 for tier in self.tiers.split("_")[:-1]]
        path = None if self.ssd_path is None else str(self.ssd_path / name)
        return nn.StorageOption(storage_type=self.tiers, storage_path=path, storage_size=sizes or None)


def table_configs(settings: Settings, placement: Placement) -> list[Any]:
    """A table for each category."""
    common = {"embedding_dim": settings.embedding_dim}
    if settings.tables == "hashed":
        common["num_embeddings"] = settings.buckets
        return [nn.EmbeddingBagConfig(name=name, feature_names=[name], **common) for name in CATEGORIES]
    return []


def table_ids(settings: Settings, ids: Tensor) -> Tensor:
    """Raw ids as the tables take them."""
    return ids if settings.tables == "dynamic" else ops.to_hash_bucket_fast(ids, settings.buckets)


def statistics(bags: Any) -> list[str]:
    """Lines of a table of what is in each Embedding Variable, and of their sums; none without one."""
    found = {name: table.stats() for name, table in bags.embedding_bags.items() if hasattr(table, "stats")}
    if not found:
        return []
    rows = {name: _figures(stats) for name, stats in found.items()}
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
