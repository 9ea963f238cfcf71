"""
The Keras report in Keras 3 on torch: a table of 793,471 x 512 in a small model, plain and converted.

``python -m benchmarks.keras_training`` prints four numbers of each side: the median and the least of
``train_on_batch``'s times, the largest memory during steps, and how far the weights are from plain Keras's after six
steps. Each side runs in its own process, without TensorFlow: Keras on torch imports it to train, if it is installed,
for 0.4 GB. Plain Adam takes 12 GB.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time

import numpy as np

from .interrupt import run_command
from .machine import begin_peak_anew, memory

DIM, BATCH, IDS, SAME = 512, 128, 20, 6
# Whose layers and whose optimizer.
SIDES = ("keras-SGD", "convert-SGD", "ours-SGD", "keras-Adam", "ours-Adam")


def train(side: str, rows: int, folder: str) -> None:
    """Train one side, leave some of its weights in a folder, and print its times and memory."""
    os.environ["KERAS_BACKEND"] = "torch"
    sys.modules["tensorflow"] = None  # type: ignore[assignment]
    import keras

    import torchsparse_rec.keras as ours

    whose, optimizer = side.split("-")
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.layers.Embedding(rows, DIM), keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(1)]
    )
    model.build((None, IDS))
    if whose != "keras":
        ours.convert(model)
    module = ours.optimizers if whose == "ours" else keras.optimizers
    model.compile(getattr(module, optimizer)(0.01), "mse")
    random = np.random.default_rng(0)
    batches = [random.integers(0, rows, (BATCH, IDS)) for _ in range(16)]
    target = random.random((BATCH, 1), dtype="float32")
    times = []
    for k in range(SAME if whose == "keras" else 40):
        if k == 1:
            begin_peak_anew()
        began = time.perf_counter()
        model.train_on_batch(batches[k % 16], target)
        times.append(time.perf_counter() - began)
        if k == SAME - 1:
            touched = np.unique(np.concatenate([batch.ravel() for batch in batches[:SAME]]))
            chosen = np.concatenate([touched, np.arange(0, rows, 97)])
            np.save(f"{folder}/{side}.npy", model.layers[0].embeddings.value[chosen].detach().numpy())
    peak = memory("VmHWM") / 1e9
    print(f"{statistics.median(times[2:]) * 1000:.2f} {min(times[2:]) * 1000:.2f} {peak:.2f}")


def main() -> None:
    """Run all sides in turn."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.keras_training", description=__doc__)
    parser.add_argument("--rows", type=int, default=793_471, help="of the table (default %(default)s)")
    parser.add_argument("--side", nargs=2, metavar=("SIDE", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        return train(options.side[0], options.rows, options.side[1])
    plain: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for side in SIDES:
            command = [sys.executable, "-m", "benchmarks.keras_training", f"--rows={options.rows}"]
            command += ["--side", side, folder]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode != 0:
                sys.exit(f"{side}: {done.stderr}")
            median, least, gigabytes = map(float, done.stdout.split()[-3:])
            whose, optimizer = side.split("-")
            text = f"{side:12} {median:9.2f} ms, least {least:.2f}, {gigabytes:.2f} GB"
            if whose == "keras":
                plain[optimizer] = median
            else:
                theirs, ours = (np.load(f"{folder}/{x}-{optimizer}.npy") for x in ("keras", whose))
                text += (
                    f", 1/{plain[optimizer] / median:.0f} of Keras's, weights within {np.abs(theirs - ours).max():.1e}"
                )
            print(text, flush=True)


if __name__ == "__main__":
    run_command(main)
