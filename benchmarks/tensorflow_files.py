"""
A table with Adam's slots from a checkpoint that TensorFlow writes in 8 partitions, and back: seconds and memory.

``python -m benchmarks.tensorflow_files --rows 10000000``. Each part runs in its own process: TensorFlow, which writes;
:func:`load_tables` and :func:`save_tables`, beside reading the file's bytes into new memory and writing them. Memory is
anonymous memory: without the file's mapped pages and, in loading, the table and its states. The disk holds two
checkpoints, and memory as much as one and a half.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .interrupt import run_command
from .machine import memory

WIDTH, PARTITIONS = 64, 8
NAMES = ("users", "users/Adam", "users/Adam_1")


def write_by_tensorflow(folder: Path, rows: int) -> None:
    """Write the checkpoint, as a Saver of ``tf.compat.v1`` does."""
    import numpy as np
    import tensorflow as tf

    generator = np.random.default_rng(0)
    ends = [rows * k // PARTITIONS for k in range(PARTITIONS + 1)]
    names, slices, tensors = ["beta1_power", "beta2_power"], ["", ""], [np.float32(0.9**4), np.float32(0.999**4)]
    for name in NAMES:
        for begin, end in zip(ends, ends[1:], strict=False):
            names.append(name)
            slices.append(f"{rows} {WIDTH} {begin},{end - begin}:0,{WIDTH}")
            tensors.append(tf.constant(generator.random((end - begin, WIDTH), dtype=np.float32)))
    tf.raw_ops.SaveV2(prefix=str(folder / "theirs"), tensor_names=names, shape_and_slices=slices, tensors=tensors)


def measured(call: Callable[[], Any]) -> tuple[float, int]:
    """Return the seconds that a call takes, and by how much anonymous memory was larger meanwhile, at most."""
    before, done = memory("RssAnon"), threading.Event()
    most = [before]

    def watch() -> None:
        while not done.wait(0.002):
            most.append(memory("RssAnon"))

    thread = threading.Thread(target=watch)
    thread.start()
    begin = time.perf_counter()
    call()
    seconds = time.perf_counter() - begin
    done.set()
    thread.join()
    return seconds, max(most) - before


def read_and_write(folder: Path, rows: int) -> dict[str, float]:
    """Measure, after the file has come into the page cache."""
    import numpy as np
    import torch

    from torchsparse_rec import optim
    from torchsparse_rec.compat.checkpoints.format import CheckpointReader
    from torchsparse_rec.compat.tensorflow import load_tables, save_tables

    data = folder / "theirs.data-00000-of-00001"
    buffer = bytearray(2**24)
    with open(data, "rb", buffering=0) as file:
        while file.readinto(buffer):
            pass
    result: dict[str, float] = {"gigabytes": data.stat().st_size / 1e9}
    result["reading_into_new_memory"], _ = measured(lambda: np.fromfile(data, np.uint8))

    def again() -> None:
        with open(data, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass

    result["reading_into_a_buffer"], _ = measured(again)
    table = torch.nn.Embedding(rows, WIDTH, _weight=torch.empty(rows, WIDTH))  # pages come as they are written
    model = torch.nn.ModuleDict({"users": table})
    optimizer = optim.Adam(model.parameters())
    result["load_tables"], memory = measured(lambda: load_tables(folder / "theirs", model, optimizer=optimizer))
    result["load_megabytes_beyond"] = (memory - 3 * rows * WIDTH * 4) / 2**20
    path = folder / "ours"
    save = measured(lambda: save_tables(path, model, optimizer=optimizer, partitions=PARTITIONS))
    result["save_tables"], result["save_megabytes_beyond"] = save[0], save[1] / 2**20
    theirs, ours = CheckpointReader(str(folder / "theirs")), CheckpointReader(str(path))
    for name in NAMES:
        for a, b in zip(theirs.pieces(name), ours.pieces(name), strict=True):
            if a.place != b.place or not torch.equal(a.bytes, b.bytes):
                raise AssertionError(f"{name} has other bits at {a.place}")

    def write() -> None:
        with open(folder / "copy", "wb", buffering=0) as file:
            for x in (table.weight.detach(), *(optimizer.state[table.weight][n] for n in ("exp_avg", "exp_avg_sq"))):
                file.write(x.numpy().data.cast("B"))

    path.with_name("ours.data-00000-of-00001").unlink()
    result["writing"], _ = measured(write)
    return result


def main(arguments: list[str]) -> None:
    """Run the parts, each in its own process, and print their times and memory."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tensorflow_files", description=__doc__)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--part", choices=("write", "measure"))
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args(arguments)
    if options.part == "write":
        write_by_tensorflow(options.folder, options.rows)
    elif options.part == "measure":
        print(json.dumps(read_and_write(options.folder, options.rows)))
    else:
        with tempfile.TemporaryDirectory(prefix="torchsparse_rec-benchmark-", dir=options.folder) as folder:
            command = [sys.executable, "-m", "benchmarks.tensorflow_files", f"--rows={options.rows}"]
            for part in ("write", "measure"):
                call = [*command, f"--part={part}", f"--folder={folder}"]
                output = subprocess.run(call, check=True, stdout=subprocess.PIPE, text=True).stdout
        for name, value in json.loads(output).items():
            print(f"{name:26} {value:10.3f}")


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]))
