"""Thousands of damaged TFRecord files and examples: an error that names the place or a result, never a crash."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc")

# The process may map 512 MiB more than after its imports: a damaged length must not be allocated.
# Damaged frames fail by their checksums, so most mutations are inside the frames.
PROGRAM = """
import gzip, pathlib, random, resource, sys
from torchsparse_rec.compat._parity.reference import record as reference
import pyarrow as pa
from torchsparse_rec import data, ops
from torchsparse_rec.data import DataError, FixedLenFeature, TFRecordReader, VarLenFeature

folder, seed, mutations = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
random.seed(seed)
FEATURES = {
    "id": FixedLenFeature([], "int64"), "small": FixedLenFeature([2], "int32", 0), "name": FixedLenFeature([], "str"),
    "price": FixedLenFeature([], "float32", nullable=True), "clicks": VarLenFeature("int64"),
    "words": VarLenFeature("bytes"), "weights": VarLenFeature("float32"),
}
batch = pa.record_batch({
    "id": list(range(-3, 12)), "small": [[i, -i] for i in range(15)], "name": [f"n{i}" for i in range(15)],
    "price": pa.array([i / 2 for i in range(15)], pa.float32()),
    "clicks": [list(range(0, 90 * i, 9)) for i in range(15)],
    "words": [["w" * i] * (i % 3) for i in range(15)], "weights": [[0.5] * (i % 4) for i in range(15)],
})
batch = batch.cast(pa.schema([f.with_type(pa.list_(pa.int32(), 2)) if f.name == "small" else f for f in batch.schema]))

def messages(prebatched):
    data.write_tfrecord(f"{folder}/whole", [batch], prebatched=prebatched)
    content = pathlib.Path(f"{folder}/whole").read_bytes()
    return [content[a:b] for a, b in reference.frames(content)[0]]

def mutated(content):
    content = bytearray(content)
    for _ in range(random.choice([1, 1, 1, 2, 5])):
        kind, at = random.randrange(6), random.randrange(len(content) + 1)
        if kind == 0 and at < len(content): content[at] ^= 1 << random.randrange(8)
        if kind == 1 and at < len(content): content[at] = random.choice([0, 1, 0x7F, 0x80, 0xFF, 0x0A, 0x12, 0x1A])
        if kind == 2: del content[at:]
        if kind == 3: del content[at : at + random.randrange(20)]
        if kind == 4: content[at:at] = random.randbytes(random.randrange(12))
        if kind == 5: content[at:at] = reference.varint_bytes(random.choice([2**31, 2**32 - 1, 2**40, 2**64 - 1]))
    return bytes(content)

def outcome(path, prebatched):
    try:
        rows = 0
        for part in TFRecordReader(path, FEATURES, 4, prebatched=prebatched):
            part.validate(full=True)
            rows += part.num_rows
        return "read"
    except DataError as error:
        assert str(error).startswith(path + ": ") and error.offset is not None, error
        return "fault"

counts = {"read": 0, "fault": 0}
kinds = {prebatched: messages(prebatched) for prebatched in (False, True)}
status = pathlib.Path("/proc/self/status").read_text().splitlines()
mapped = next(int(line.split()[1]) << 10 for line in status if line.startswith("VmSize"))
resource.setrlimit(resource.RLIMIT_AS, (mapped + (512 << 20), resource.RLIM_INFINITY))
for i in range(mutations):
    prebatched = i % 2 == 1
    records = list(kinds[prebatched])
    if i % 5 < 3:
        at = random.randrange(len(records))
        records[at] = mutated(records[at])
        content = reference.framed(records[: at + 1])
    else:
        content = mutated(reference.framed(records[:3]))
    if i % 7 == 0:
        content = mutated(gzip.compress(content))
    path = f"{folder}/{i % 3}"
    with open(path, "wb") as file:
        file.write(content)
    counts[outcome(path, prebatched)] += 1
    try:
        data.infer_features(path, prebatched=prebatched)
    except DataError:
        pass
print(counts)
"""


@pytest.mark.parametrize("mutations", [600, pytest.param(20_000, marks=pytest.mark.full)])
def test_damaged_files_are_errors_or_read(tmp_path: Path, mutations: int) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, sys.path)]),
    }
    command = [sys.executable, "-W", "error", str(program), str(tmp_path), "0", str(mutations)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0 and not run.stderr, run.stderr[-3000:]
    counts = eval(run.stdout.splitlines()[-1])
    assert sum(counts.values()) == mutations and min(counts.values()) > mutations / 50
