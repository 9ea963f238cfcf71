"""
Damaged files of every kind: 2,000 mutations, in a process of its own with little memory.

No file leads to a crash or a wild allocation. Prebatched files give an error that names file and byte, or the right
rows, since checksums cover all that is read; TFRecord files likewise, or the first rows, where whole records are gone.
Parquet gives an error too, or rows, which are right wherever only data is damaged (see its own test). Text formats
give an error that names file and line, or rows.
"""

import os
import subprocess
import sys

import pytest

# Bytes beyond the memory that the process has before the first mutation.
MEMORY = 1 << 30

PROGRAM = r"""
import faulthandler, re, resource, sys, warnings
from pathlib import Path
import numpy as np, pyarrow as pa, torch
from torchsparse_rec.data import (DataError, PrebatchedDataset, infer_features, read_criteo, read_csv, read_movielens,
    read_parquet, read_prebatched, read_tfrecord, write_criteo, write_csv, write_movielens, write_parquet,
    write_prebatched, write_tfrecord)
from torchsparse_rec.data.criteo import CATEGORIES, COLUMNS, INTEGERS

faulthandler.enable()
torch.set_num_threads(1)
pa.set_cpu_count(1); pa.set_io_thread_count(1)
folder, count, memory, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
random = np.random.default_rng(seed)

def rows(n):
    lists = [random.integers(0, 400_000, random.integers(0, 4)).tolist() for _ in range(n)]
    return pa.record_batch({
        "label": pa.array(random.integers(0, 2, n)), "price": pa.array(random.standard_normal(n).astype("f4")),
        "count": pa.array(random.integers(0, 99, n), mask=random.random(n) < 0.3),
        "pair": pa.FixedSizeListArray.from_arrays(pa.array(random.integers(0, 400_000, 2 * n)), 2),
        "seen": pa.array(lists, pa.list_(pa.int64())), "city": pa.array([f"city {len(x)}" for x in lists]),
        "tags": pa.array([["t"] * len(x) for x in lists], pa.list_(pa.string()))})

def criteo(n):
    columns = {"label": pa.array(random.integers(0, 2, n))}
    columns |= {name: pa.array(random.integers(0, 99, n), mask=random.random(n) < 0.3) for name in INTEGERS}
    columns |= {name: pa.array([f"{x:08x}" for x in random.integers(0, 2**32, n)]) for name in CATEGORIES}
    return pa.record_batch(columns)

def ratings(n):
    names = ("user", "item", "rating", "timestamp")
    return pa.record_batch({name: pa.array(random.integers(1, 6, n) + 10**5 * (name == "timestamp")) for name in names})

batches = [rows(int(n)) for n in (40, 7, 60)]
write_prebatched(folder / "mapped.arrow", batches)
write_prebatched(folder / "compressed.arrow", batches, compression="zstd")
write_parquet(folder / "a.parquet", batches, row_group_size=50)
write_csv(folder / "a.csv", [b.select(["label", "price", "count", "city"]) for b in batches])
write_csv(folder / "b.csv.gz", batches)
write_csv(folder / "lists.csv", batches)
lists = {name: batches[0].schema.field(name).type for name in ("pair", "seen", "tags")}
write_criteo(folder / "train.txt", [criteo(60)])
write_criteo(folder / "train.txt.gz", [criteo(60)])
for name in ("u.data", "ratings.dat", "ratings.csv"):
    write_movielens(folder / name, [ratings(80)])
features = {}
for name in ("rows.tfrecord", "batches.tfrecord", "rows.tfrecord.gz"):
    whole, prebatched = [b.drop_columns("count") for b in batches], name.startswith("batches")
    write_tfrecord(folder / name, whole, prebatched=prebatched, compression="gzip" if name.endswith(".gz") else None)
    features[name] = infer_features(folder / name, prebatched=prebatched)

def read(path):
    if path.suffix == ".arrow":
        return read_prebatched(path)
    if path.suffix == ".parquet":
        return read_parquet(path)
    name = path.name.removeprefix("damaged-")
    if "tfrecord" in name:
        return read_tfrecord(path, features[name], prebatched=name.startswith("batches"))
    if "train" in name:
        return read_criteo(path)
    if name == "lists.csv":
        return read_csv(path, types=lists)
    return read_csv(path) if name in ("a.csv", "b.csv.gz") else read_movielens(path)

def mutate(data):
    data = bytearray(data)
    kind = random.integers(0, 6)
    if kind == 0:  # cut
        return bytes(data[: random.integers(0, len(data))])
    for _ in range(random.integers(1, 4)):
        # Half of the damage near the ends, where formats keep what they rely on.
        near = random.integers(0, 600)
        anywhere = random.integers(0, len(data))
        place = int([near, len(data) - 1 - near, anywhere, anywhere][random.integers(0, 4)])
        place = min(max(place, 0), len(data) - 1)
        if kind == 1:
            data[place] ^= 1 << random.integers(0, 8)
        elif kind == 2:
            data[place] = random.integers(0, 256)
        elif kind == 3:
            extremes = [b"\xff" * 8, b"\0" * 8, bytes(random.integers(0, 256, 8, "u1"))]
            data[place : place + 8] = extremes[random.integers(0, 3)]
        elif kind == 4:
            data[place:place] = bytes(random.integers(0, 256, random.integers(1, 30), "u1"))
        else:
            del data[place : place + random.integers(1, 30)]
    return bytes(data)

originals = {}
for path in sorted(folder.iterdir()):
    originals[path] = path.read_bytes(), [batch.to_pylist() for batch in read(path)]

with open("/proc/self/statm") as statm:
    used = int(statm.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + memory, used + memory))
outcomes = {}
for number in range(count):
    original = list(originals)[number % len(originals)]
    data, expected = originals[original]
    damaged = mutate(data)
    path = folder / ("damaged-" + original.name)
    path.write_bytes(damaged)
    unit = "byte" if path.suffix in (".arrow", ".parquet") or "tfrecord" in path.name else "line"
    try:
        found = list(read(path))
        if path.suffix == ".arrow":
            assert [b.to_pylist() for b in found] == expected, (number, path.name, "wrong rows")
            list(PrebatchedDataset(path, fill=0, shuffle_rows_window=2, batch_size=9))
        if "tfrecord" in path.name:
            some, all_rows = sum((b.to_pylist() for b in found), []), sum(expected, [])
            assert some == all_rows[: len(some)], (number, path.name, "wrong rows")
        for batch in found:
            batch.validate(full=True)
        outcome = "read"
    except DataError as error:
        assert str(error).startswith(str(path)), (number, path.name, error)
        # What concerns the whole file, such as its version, has no place in it.
        assert re.match(re.escape(str(path)) + rf": {unit} \d+: ", str(error)), (number, path.name, error)
        outcome = "named"
    except BaseException as error:
        raise AssertionError((number, path.name, type(error), error)) from error
    # What checksums do not cover may still be read, with guards.
    if path.suffix == ".arrow":
        try:
            for batch in PrebatchedDataset(path, verify="never", fill=0):
                for column in batch.values():
                    column.to_pylist() if isinstance(column, pa.Array) else str(column)
        except DataError:
            pass
    outcomes[original.name, outcome] = outcomes.get((original.name, outcome), 0) + 1
for (name, outcome), n in sorted(outcomes.items()):
    print(name, outcome, n)
print("all", sum(outcomes.values()))
"""


@pytest.mark.parametrize(
    ("count", "seed"), [(2000, 0), *(pytest.param(10_000, seed, marks=pytest.mark.full) for seed in range(1, 6))]
)
def test_thousands_of_mutations(count, seed, tmp_path):
    # The limit counts addresses: arenas of threads, and holes left by large blocks, would use it up.
    allocator = {"ARROW_DEFAULT_MEMORY_POOL": "system", "MALLOC_ARENA_MAX": "2", "MALLOC_MMAP_THRESHOLD_": "1000000"}
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **allocator}
    command = [sys.executable, "-c", PROGRAM, tmp_path, str(count), str(MEMORY), str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, env=variables)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    assert lines[-1] == f"all {count}"
    # Both outcomes must happen: otherwise the mutations would test nothing.
    assert {line.split()[1] for line in lines[:-1]} == {"read", "named"}
    # Without a checksum a changed digit is just another number.
    read = {line.split()[0] for line in lines if " read " in line}
    assert {"a.csv", "lists.csv", "train.txt", "u.data", "ratings.csv"} <= read
    named = {line.split()[0] for line in lines if " named " in line}
    assert {"mapped.arrow", "compressed.arrow", "a.parquet", "a.csv", "train.txt", "u.data", "ratings.dat"} <= named
    assert {"rows.tfrecord", "batches.tfrecord", "rows.tfrecord.gz"} <= named
