"""
Benchmark rows of the ``quantized`` family: bags of a table of int8 and int4 rows, beside torch's, FBGEMM's and float32.

Bytes are counted by formula, as for ``embedding``: ids, a row for each id, offsets and the result.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchsparse_rec import nn, ops
from torchsparse_rec.ops.quantized import ROW_FORMATS
from torchsparse_rec.typing import RowsFormat

from .embedding import Batch, Problem, in_turn, mean_ids
from .rows import Case, Make, Options, Row, fbgemm

ROWS_OF_TABLE, IDS, DIM = 1_000_000, 1_000_000, 64


class Bags(Problem):
    """Bags of about 20 of a million ids in a table of a million rows; small ones in quick mode."""

    def rows(self, options: Options) -> int:
        """Return the number of rows of the table."""
        return options.size(ROWS_OF_TABLE, 4_000)

    def bags(self, options: Options) -> int:
        """Return the number of bags in a batch."""
        return options.size(IDS, 4_000) * 2 // (self.shortest + self.longest)


def torchs(rows: str) -> Callable[[Tensor, Batch], Tensor]:
    """Return torch's pooled lookup in its quantised table."""
    lookup = {
        "int8": torch.ops.quantized.embedding_bag_byte_rowwise_offsets,
        "int4": torch.ops.quantized.embedding_bag_4bit_rowwise_offsets,
    }[rows]
    return lambda table, batch: lookup(table, batch.ids, batch.offsets, False, 0, False, None, None, True)


def fbgemms(options: Options, rows: str, table: Tensor, batches: list[Batch]) -> Make:
    """Return FBGEMM's tables for inference, of as many rows."""

    def make() -> Callable[[], Any]:
        fbgemm(options)
        from fbgemm_gpu.split_embedding_configs import SparseType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
        from fbgemm_gpu.split_table_batched_embeddings_ops_inference import IntNBitTableBatchedEmbeddingBagsCodegen

        kind = {"int8": SparseType.INT8, "int4": SparseType.INT4}[rows]
        specs = [("t", table.shape[0], DIM, kind, EmbeddingLocation.HOST)]
        module = IntNBitTableBatchedEmbeddingBagsCodegen(specs, device="cpu", output_dtype=SparseType.FP32)
        module.fill_random_weights()
        given = [(batch.ids.int(), batch.offsets.int()) for batch in batches]
        turns = itertools.cycle(given)
        return lambda: module(*next(turns))

    return make


def row(rows: RowsFormat, spread: str) -> Row:
    """Make the benchmark row of one format and one distribution of ids."""
    problem = Bags(DIM, spread)

    def build(options: Options) -> Case:
        weight, batches = problem.table(options), problem.batches(options, 4)
        table, ids = ops.quantize_rows(weight, rows), mean_ids(batches)
        plain = nn.EmbeddingBag.from_pretrained(weight, mode="sum", include_last_offset=True).eval()

        def ours(table: Tensor, batch: Batch) -> Tensor:
            return ops.quantized_embedding_bag(table, batch.ids, batch.offsets, rows=rows)

        def check() -> None:
            for batch in batches[:2]:
                torch.testing.assert_close(ours(table, batch), torchs(rows)(table, batch), rtol=1e-5, atol=1e-5)

        peers = {
            f"torch {rows}": in_turn(torchs(rows), table, batches),
            f"FBGEMM {rows}": fbgemms(options, rows, weight, batches),
            "our float32": in_turn(lambda _, batch: plain(batch.ids, batch.offsets), weight, batches),
        }
        bags = problem.bags(options)
        moved = (8 + ROW_FORMATS[rows].width(DIM)) * ids + (8 + 4 * DIM) * bags
        return Case(in_turn(ours, table, batches), peers, check, moved, ids=ids, sizes=problem.sizes(options, ids))

    targets = {f"torch {rows}": 1.0, f"FBGEMM {rows}": 1.2, "our float32": 1.5} if rows == "int8" else {}
    name = f"quantized/{rows}-{spread}"
    return Row(name, f"quantized_embedding_bag, {rows} rows, sum, 1M x 64, 1M ids", build, targets=targets)


FORMATS: tuple[RowsFormat, ...] = ("int8", "int4")
ROWS = [row(rows, spread) for rows in FORMATS for spread in ("uniform", "zipf")]
