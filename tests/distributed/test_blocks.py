"""Where the rows of a row-wise table are: reversed block numbers, boxes of Shard(1), and how evenly ids fall."""

from __future__ import annotations

import pytest
import torch

from torchsparse_rec.tables.blocks import Blocks

SIZES = (1, 2, 15, 16, 31, 32, 33, 50, 100, 1000, 4097, 65_535, 65_536, 100_000)
RANKS = (1, 2, 3, 4, 7, 64)


def reverse(number: int, bits: int) -> int:
    return int(f"{number:0{bits}b}"[::-1], 2) if bits else 0


@pytest.mark.parametrize(
    ("rows", "count"),
    [(1, 1), (31, 1), (32, 2), (50, 2), (63, 2), (64, 4), (1000, 32), (65_535, 2048), (65_536, 4096), (10**9, 4096)],
)
def test_the_number_of_blocks_is_the_largest_power_of_two_that_leaves_each_16_rows(rows: int, count: int) -> None:
    blocks = Blocks(rows)
    assert blocks.count == count and blocks.places == -(-rows // count)
    assert blocks.count <= 4096 and (16 * blocks.count <= rows or blocks.count == 1)


@pytest.mark.parametrize("rows", [1, 32, 64, 1000, 100_000])
def test_reversed_numbers_are_their_own_inverse(rows: int) -> None:
    blocks = Blocks(rows)
    bits = blocks.count.bit_length() - 1
    assert blocks.reversed.tolist() == [reverse(number, bits) for number in range(blocks.count)]
    assert torch.equal(blocks.reversed[blocks.reversed], torch.arange(blocks.count))


def test_the_first_ids_of_eight_blocks() -> None:
    blocks = Blocks(128)
    assert blocks.reversed.tolist() == [0, 4, 2, 6, 1, 5, 3, 7]
    assert blocks.ids_of(0, 2)[:4].tolist() == [0, 4, 2, 6] and blocks.ids_of(1, 2)[:4].tolist() == [1, 5, 3, 7]


@pytest.mark.parametrize("rows", SIZES)
def test_boundaries_are_those_of_torch_chunk(rows: int) -> None:
    blocks = Blocks(rows)
    for ranks in RANKS:
        chunks = [len(chunk) for chunk in torch.arange(blocks.count).chunk(ranks)]
        chunks += [0] * (ranks - len(chunks))
        assert [blocks.begin(k + 1, ranks) - blocks.begin(k, ranks) for k in range(ranks)] == chunks
        assert [blocks.rows_of(k, ranks) for k in range(ranks)] == [blocks.places * count for count in chunks]


@pytest.mark.parametrize("rows", SIZES)
def test_every_row_is_on_one_rank(rows: int) -> None:
    blocks = Blocks(rows)
    for ranks in RANKS:
        ids = torch.cat([blocks.ids_of(rank, ranks) for rank in range(ranks)])
        assert torch.equal(ids[ids < rows].sort().values, torch.arange(rows))
        # Rows without an id: at most one for each block but the first, and a sixteenth of the table.
        assert len(ids) - rows == blocks.count * blocks.places - rows <= min(blocks.count - 1, rows // 16)


@pytest.mark.parametrize("rows", SIZES)
@pytest.mark.parametrize("shape", [(), (3,)])
def test_parts_make_up_the_whole(rows: int, shape: tuple[int, ...]) -> None:
    blocks = Blocks(rows)
    table = torch.rand(rows, *shape, generator=torch.Generator().manual_seed(0)) + 0.5
    for ranks in RANKS:
        parts = [blocks.part_of(table, rank, ranks) for rank in range(ranks)]
        assert [len(part) for part in parts] == [blocks.rows_of(rank, ranks) for rank in range(ranks)]
        boxes = [part.reshape(blocks.places, -1, *shape) for part in parts if len(part)]
        assert torch.equal(blocks.whole(torch.cat(boxes, 1)), table)
        for rank, part in enumerate(parts):
            nobodys = blocks.ids_of(rank, ranks) >= rows
            assert not part[nobodys].any() and part[~nobodys].all()


def owners(blocks: Blocks, ids: torch.Tensor, ranks: int) -> torch.Tensor:
    """Return the rank of each id, from the formula."""
    block = blocks.reversed[ids % blocks.count]
    return block // -(-blocks.count // ranks)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 64])
def test_every_beginning_of_the_ids_falls_evenly(ranks: int) -> None:
    blocks = Blocks(100_000)
    by_rank = torch.nn.functional.one_hot(owners(blocks, torch.arange(8192), ranks), ranks).cumsum(0)
    # The discrepancy of van der Corput's sequence grows with the logarithm of its length.
    allowed = torch.arange(1, 8193).log2().add(2)
    share = torch.tensor([blocks.begin(k + 1, ranks) - blocks.begin(k, ranks) for k in range(ranks)]) / blocks.count
    assert ((by_rank - torch.arange(1, 8193).unsqueeze(1) * share).abs().amax(1) <= allowed).all()


@pytest.mark.parametrize(("ranks", "most"), [(2, 1.01), (4, 1.02), (8, 1.03), (16, 1.04), (32, 1.06), (64, 1.08)])
def test_the_slowest_rank_has_little_more_than_the_mean(ranks: int, most: float) -> None:
    generator = torch.Generator().manual_seed(0)
    rows, tables, examples = 100_000, 26, 4096
    blocks = Blocks(rows)
    chances = 1 / torch.arange(1, rows + 1, dtype=torch.float64) ** 1.05
    drawn = torch.multinomial(chances, tables * examples, replacement=True, generator=generator)
    counts = torch.zeros(ranks)
    for ids in drawn.view(tables, examples):
        counts += torch.bincount(owners(blocks, ids.unique(), ranks), minlength=ranks)
    assert 1.0 <= (counts.max() / counts.mean()).item() <= most
