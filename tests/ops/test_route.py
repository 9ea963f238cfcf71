"""route and route_keys: whose each id's row is, in which order it is sent, and what is wrong with ids."""

from __future__ import annotations

import pytest
import torch
from devices import cpu_only
from ops.test_unique import colliding_keys
from samples.route import starts_of
from torch import Tensor

from torchsparse_rec.compat._parity.reference import route as reference
from torchsparse_rec.ops import route, route_keys, unique

pytestmark = pytest.mark.usefixtures("kernels")


def ids_below(rows: int, count: int, seed: int = 0) -> Tensor:
    return torch.randint(0, rows, (count,), generator=torch.Generator().manual_seed(seed))


def test_blocks_are_dealt_as_torch_chunks_them_and_rows_numbered_within():
    """Ranks 0 to 2 of 3 have 3, 3 and 2 of 8 blocks; row v is in block reverse(v % 8)."""
    rows, counts, places = route(torch.arange(16), [0, 16], [16], [8], 3)
    reverse = [0, 4, 2, 6, 1, 5, 3, 7]
    wanted = []
    for v in range(16):
        rank, place = divmod(reverse[v % 8], 3)
        wanted.append((rank, v // 8 * (2 if rank == 2 else 3) + place))
    owners = torch.arange(3).repeat_interleave(counts[:, 0])
    assert list(zip(owners[places].tolist(), rows[places].tolist(), strict=True)) == wanted
    assert counts.tolist() == [[6], [6], [4]]


@pytest.mark.parametrize(("rows", "blocks", "ranks"), [(1000, 64, 4), (77, 8, 3), (4096, 4096, 5), (3, 1, 2)])
def test_rows_of_a_rank_fill_its_box(rows, blocks, ranks):
    """Send every row: each rank gets different ones, of its box of ceil(V / S) by its blocks."""
    sent, counts, places = route(torch.arange(rows), [0, rows], [rows], [blocks], ranks)
    depth, each = -(-rows // blocks), -(-blocks // ranks)
    for rank, mine in enumerate(sent.split(counts[:, 0].tolist())):
        own = max(0, min(each, blocks - rank * each))
        assert len(mine.unique()) == len(mine) and bool((mine < depth * own).all())
    assert places.sort().values.equal(torch.arange(rows))


def test_both_dtypes_of_a_key_are_of_the_same_rank():
    keys = torch.tensor([-5, 17, -(2**31), 2**31 - 1, 0])
    wide, narrow = (route_keys(keys.to(dtype), [0, 5], 64) for dtype in (torch.int64, torch.int32))
    assert wide.counts.equal(narrow.counts) and wide.places.equal(narrow.places)


@cpu_only
def test_keys_with_equal_low_bits_fall_evenly():
    counts = route_keys(torch.arange(100_000) << 32, [0, 100_000], 8).counts
    assert counts.min() > 0.95 * 12_500 and counts.max() < 1.05 * 12_500


@cpu_only
def test_ids_sorted_by_frequency_fall_evenly():
    """Beginnings of van der Corput's sequence are spread evenly: ids 0 to n - 1 of 4,096 blocks, on any ranks."""
    for n, ranks in ((10, 2), (100, 8), (1000, 64), (999, 3)):
        counts = route(torch.arange(n), [0, n], [100_000], [4096], ranks).counts
        assert counts.max() <= 1.1 * n / ranks + 2


@cpu_only
@pytest.mark.parametrize("rows", [50_000, 10**7])
@pytest.mark.parametrize("ranks", [1, 3])
def test_many_tables_on_every_number_of_threads(rows, ranks, restore_threads):
    """Tables of few rows are numbered by row, those of many by a hash table; both as unique numbers them."""
    lengths = [9_000, 0, 20_000, 1, 11_000, 15_000]
    ids = torch.cat([ids_below(rows if t % 2 else 5_000, n, t) for t, n in enumerate(lengths)])
    starts, blocks = starts_of(lengths), [1024] * 6
    seen = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        seen.append((*route(ids, starts, [rows] * 6, blocks, ranks), *route_keys(ids, starts, ranks)))
    for other in seen[1:]:
        assert all(x.equal(y) for x, y in zip(seen[0], other, strict=True))
    sent, counts, places, keys, _, key_counts, key_places = seen[0]
    assert keys[key_places].equal(ids)
    for t in range(6):
        part = slice(starts[t], starts[t + 1])
        distinct = unique(ids[part]).values
        assert counts[:, t].sum() == key_counts[:, t].sum() == len(distinct)
    if ranks == 1:
        wanted = reference.route(ids[:200], [0, 200], [rows], [1024], 1, True)[0]
        assert sent[places[:200]].unique().equal(wanted.unique())


@cpu_only
@pytest.mark.parametrize("n", [4_000, 300_000])
def test_keys_made_to_collide_are_not_quadratic(n):
    """Finish in time: the square of the larger number is a quarter of an hour of steps."""
    keys = colliding_keys(n)
    sent, occurrences, _, places = route_keys(torch.cat([keys, keys.flip(0)]), [0, 2 * n], 1)
    assert sent.equal(keys) and bool(occurrences.eq(2).all())
    assert places.equal(torch.cat([torch.arange(n), torch.arange(n).flip(0)]))


# ---- Errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_the_first_bad_id_is_named_with_its_table(dtype):
    ids = torch.tensor([0, 1, 9, 0, 0, 1000, -7, 1000]).to(dtype)
    with pytest.raises(IndexError, match=r"^route: ids\[5\] must be in \[0, 1000\), as of table 2, got 1000$"):
        route(ids, [0, 3, 3, 8], [10, 0, 1000], [1, 1, 16], 2)
    with pytest.raises(IndexError, match=r"^route: ids\[0\] must be in \[0, 0\), as of table 0, got 0$"):
        route(ids, [0, 8], [0], [1], 2)
    with pytest.raises(IndexError, match=r"^route: ids\[6\] must be in \[0, 1001\), as of table 0, got -7$"):
        route(ids, [0, 8], [1001], [1], 2, distinct=False)


IDS = torch.tensor([0, 1, 2])


@pytest.mark.parametrize("name", ["route", "route_keys"])
@pytest.mark.parametrize(
    ("ids", "starts", "ranks", "message"),
    [
        (torch.zeros(2, 2).long(), [0, 4], 1, r"{} must have rank 1, got shape \[2, 2\]"),
        (torch.zeros(3), [0, 3], 1, "{} must be int32 or int64, got Float"),
        (IDS, [], 1, "starts must have an entry more than there are tables, got none"),
        (IDS, [1, 3], 1, r"starts\[0\] must be 0, got 1"),
        (IDS, [0, 2, 1, 3], 1, "starts must not decrease, got 2 followed by 1 at position 2"),
        (IDS, [0, 2], 1, r"starts\[1\], the last, must be the number of {}, 3, got 2"),
        (IDS, [0, 3], 0, r"ranks must be in \[1, 2\^31\), got 0"),
        (IDS, [0, 3], 2**31, r"ranks must be in \[1, 2\^31\), got 2147483648"),
        (IDS, [0, 3, 3], 2**30, r"ranks times tables must be below 2\^31, got 1073741824 ranks and 2 tables"),
    ],
)
def test_errors_of_both(name, ids, starts, ranks, message):
    argument = "ids" if name == "route" else "keys"
    tables = max(0, len(starts) - 1)
    with pytest.raises(ValueError, match=f"^{name}: {message.format(argument)}$"):
        if name == "route":
            route(ids, starts, [5] * tables, [1] * tables, ranks)
        else:
            route_keys(ids, starts, ranks)


@pytest.mark.parametrize(
    ("sizes", "blocks", "message"),
    [
        ([5, 5], [1], "sizes must have an entry for each of the 1 tables, got 2"),
        ([5], [], "blocks must have an entry for each of the 1 tables, got 0"),
        ([-1], [1], r"sizes\[0\] must be in \[0, 2\^31\), got -1"),
        ([2**31], [1], r"sizes\[0\] must be in \[0, 2\^31\), got 2147483648"),
        ([5], [0], r"blocks\[0\] must be a power of two in \[1, 4096\], got 0"),
        ([5], [3], r"blocks\[0\] must be a power of two in \[1, 4096\], got 3"),
        ([5], [8192], r"blocks\[0\] must be a power of two in \[1, 4096\], got 8192"),
    ],
)
def test_errors_of_tables(sizes, blocks, message):
    with pytest.raises(ValueError, match=f"^route: {message}$"):
        route(IDS, [0, 3], sizes, blocks, 1)


def test_as_many_ids_as_32_bits_are_too_many():
    many = torch.zeros(1, dtype=torch.int32).expand(2**31)
    with pytest.raises(ValueError, match=r"^route: ids must be fewer than 2\^31, got 2147483648$"):
        route(many, [0, 2**31], [1], [1], 1)
    with pytest.raises(ValueError, match=r"^route_keys: keys must be fewer than 2\^31, got 2147483648$"):
        route_keys(many, [0, 2**31], 1)
