"""
Benchmark rows against a report on Keras: a table of 793,471 x 512, where a step touches 2,560 rows.

One step is forward, loss, backward, update and clearing the gradient. All sides look up the same batches.
"""

from __future__ import annotations

import itertools
import os
import statistics
import subprocess
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import torchsparse_rec
from torchsparse_rec.typing import GradMode

from .machine import begin_peak_anew, memory
from .rows import Call, Case, Fact, Make, Options, Row, fbgemm, tensorflow
from .timing import clock_block

ROWS_FULL, ROWS_QUICK, DIM = 793_471, 2_000, 512
BATCH, IDS, LEARNING_RATE = 128, 20, 0.01
PEAK_LIMIT_MB = 64.0


def make_table(rows: int, device: str) -> Tensor:
    """Draw Keras's initial values: uniform in [-0.05, 0.05)."""
    return torch.empty(rows, DIM, device=device).uniform_(-0.05, 0.05)


def draw_batches(rows: int, device: str) -> list[Tensor]:
    """Draw sixteen batches of random ids, so that no step finds the rows of the last one in the cache."""
    generator = torch.Generator(device).manual_seed(0)
    return [torch.randint(0, rows, (BATCH, IDS), generator=generator, device=device) for _ in range(16)]


def draw_target(device: str) -> Tensor:
    """Draw the target of the loss for the looked-up rows, ``[BATCH, IDS, DIM]``."""
    return torch.rand(BATCH, IDS, DIM, device=device)


def torch_step(module: nn.Embedding, batches: list[Tensor], target: Tensor) -> Call:
    """Make a step of a module with torch's interface under torch's SGD, or of a fused module under ours."""
    if getattr(module, "grad_mode", None) == "fused":
        optimizer: torch.optim.Optimizer = torchsparse_rec.optim.SGD(
            module.parameters(), lr=LEARNING_RATE, in_backward=True
        )
    else:
        optimizer = torch.optim.SGD(module.parameters(), lr=LEARNING_RATE)
    if isinstance(module, torchsparse_rec.nn.Embedding):
        module.use_optimizer(optimizer)
    ids = itertools.cycle(batches)

    def step() -> None:
        mse_loss(module(next(ids)), target).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def our_step(grad_mode: GradMode, table: Tensor, batches: list[Tensor], target: Tensor) -> Call:
    """Make a step of our module on the given table."""
    module = torchsparse_rec.nn.Embedding(table.shape[0], DIM, _weight=table, grad_mode=grad_mode)
    return torch_step(module, batches, target)


def tensorflow_step(tf: Any, rows: int, batches: list[Tensor], target: Tensor) -> Call:
    """Make a step in one tf.function that scatters IndexedSlices into the variable, without an optimizer object."""
    table = tf.Variable(lambda: tf.random.uniform([rows, DIM], -0.05, 0.05))
    goal = tf.constant(target.numpy())
    ids = itertools.cycle([tf.constant(batch.numpy()) for batch in batches])

    @tf.function
    def step(batch: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.math.squared_difference(tf.nn.embedding_lookup(table, batch), goal))
        slices = tape.gradient(loss, table)
        assert isinstance(slices, tf.IndexedSlices)
        table.scatter_sub(tf.IndexedSlices(LEARNING_RATE * slices.values, slices.indices))
        return loss

    return lambda: step(next(ids))


def keras_step(tf: Any, rows: int, batches: list[Tensor], target: Tensor) -> Call:
    """Make a step of Keras's own training call."""
    model = tf.keras.Sequential([tf.keras.layers.Embedding(rows, DIM)])
    model.compile(optimizer=tf.keras.optimizers.SGD(LEARNING_RATE), loss="mse")
    goal = tf.constant(target.numpy())
    ids = itertools.cycle([tf.constant(batch.numpy()) for batch in batches])
    return lambda: model.train_on_batch(next(ids), goal)


def fbgemm_step(training: Any, rows: int, batches: list[Tensor], target: Tensor) -> Call:
    """Make a step of FBGEMM's table with SGD inside backward, one id in a bag, in the faster of two ways to look up."""
    goal = target.reshape(-1, DIM)
    offsets = torch.arange(BATCH * IDS + 1)
    flat = [batch.reshape(-1) for batch in batches]

    def build(pooling: Any, table_rows: int) -> Call:
        place = (table_rows, DIM, training.EmbeddingLocation.HOST, training.ComputeDevice.CPU)
        module = training.SplitTableBatchedEmbeddingBagsCodegen(
            [place],
            optimizer=training.OptimType.EXACT_SGD,
            learning_rate=LEARNING_RATE,
            pooling_mode=pooling,
            device=torch.device("cpu"),
        )
        module.init_embedding_weights_uniform(-0.05, 0.05)
        ids = itertools.cycle([batch % table_rows for batch in flat])
        return lambda: mse_loss(module(next(ids), offsets), goal).backward()

    def time_small(pooling: Any) -> float:
        return statistics.median(clock_block(build(pooling, min(rows, 50_000)), 12, "cpu")[4:])

    poolings = [training.PoolingMode.NONE, training.PoolingMode.SUM]
    return build(min(poolings, key=time_small), rows)


def check_modes(grad_mode: GradMode, device: str) -> None:
    """Compare the weights after three steps on a small table with torch.nn.Embedding's with a dense gradient."""
    rows = 5_000
    batches, target, table = draw_batches(rows, device), draw_target(device), make_table(rows, device)
    ours, expected = table.clone(), table.clone()
    step = our_step(grad_mode, ours, batches, target)
    reference = torch_step(nn.Embedding(rows, DIM, _weight=expected), batches, target)
    for _ in range(3):
        step()
        reference()
    assert not torch.equal(expected, table)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-7)


def peak_beyond_table(options: Options, grad_mode: GradMode) -> list[Fact]:
    """Return the peak of memory in five steps beyond that before the first, in MB (10^6 bytes), in a fresh process."""
    if options.device == "cuda":
        return [Fact("peak memory beyond the table", cuda_peak(options, grad_mode), "MB", PEAK_LIMIT_MB)]
    if options.device != "cpu" or not sys.platform.startswith("linux"):
        return []
    rows = options.size(ROWS_FULL, ROWS_QUICK)
    code = f"from benchmarks.keras_report import print_peak; print_peak({rows}, {grad_mode!r})"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code]
    printed = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
    return [Fact("peak memory beyond the table", float(printed.split()[-1]), "MB", PEAK_LIMIT_MB)]


def cuda_peak(options: Options, grad_mode: GradMode) -> float:
    """Return the peak of GPU memory in five steps, in MB (10^6 bytes). torch counts it, without a fresh process."""
    rows = options.size(ROWS_FULL, ROWS_QUICK)
    batches, target, table = draw_batches(rows, "cuda"), draw_target("cuda"), make_table(rows, "cuda")
    step = our_step(grad_mode, table, batches, target)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(5):
        step()
    return (torch.cuda.max_memory_allocated() - before) / 1e6


def print_peak(rows: int, grad_mode: GradMode) -> None:
    """Print the peak of this process's memory in five steps, in MB (10^6 bytes)."""
    batches, target, table = draw_batches(rows, "cpu"), draw_target("cpu"), make_table(rows, "cpu")
    step = our_step(grad_mode, table, batches, target)
    before = memory("VmRSS")
    begin_peak_anew()
    for _ in range(5):
        step()
    print((memory("VmHWM") - before) / 1e6)


def build_case(grad_mode: GradMode, options: Options) -> Case:
    """Build our step in one mode beside every peer. The peers in torch work on the same table as ours."""
    rows, device = options.size(ROWS_FULL, ROWS_QUICK), options.device
    batches, target = draw_batches(rows, device), draw_target(device)
    table = make_table(rows, device)

    def in_torch(sparse: bool) -> Make:
        return lambda: torch_step(nn.Embedding(rows, DIM, _weight=table, sparse=sparse), batches, target)

    peers: dict[str, Make] = {
        "torch dense": in_torch(False),
        "torch sparse": in_torch(True),
        "TensorFlow IndexedSlices": lambda: tensorflow_step(tensorflow(options), rows, batches, target),
        "Keras train_on_batch": lambda: keras_step(tensorflow(options), rows, batches, target),
        "FBGEMM TBE": lambda: fbgemm_step(fbgemm(options), rows, batches, target),
    }
    if grad_mode == "dense":
        peers = {"torch dense": peers["torch dense"]}
    if grad_mode == "auto":
        peers = {"torch sparse": peers["torch sparse"]}
    row_bytes = BATCH * IDS * DIM * 4
    # Lookup: read, write. Loss: read two. Its gradient: read two, write one. Rows' gradient: read, write. Update: read
    # two, write one. In dense mode this is over the whole table, and the gradient is written besides. Fused, the rows'
    # gradient is not written and read again.
    moved = 9 * row_bytes + (4 * rows * DIM * 4 if grad_mode == "dense" else 3 * row_bytes)
    if grad_mode == "fused":
        moved -= 2 * row_bytes
    facts = (lambda: peak_beyond_table(options, grad_mode)) if grad_mode in ("sparse", "fused") else list
    return Case(
        lambda: our_step(grad_mode, table, batches, target),
        peers,
        lambda: check_modes(grad_mode, device),
        moved,
        facts=facts,
    )


def row(grad_mode: GradMode, targets: dict[str, float]) -> Row:
    """Make a benchmark row for one gradient mode."""
    what = f"one step, table 793,471 x 512, batch 128 x 20, mse_loss, SGD, {grad_mode}"
    return Row(f"keras_report/{grad_mode}", what, lambda options: build_case(grad_mode, options), targets)


ROWS = [
    row("fused", {"torch dense": 150.0, "torch sparse": 1.15, "TensorFlow IndexedSlices": 1.4}),
    row("sparse", {"torch dense": 150.0, "torch sparse": 1.0, "TensorFlow IndexedSlices": 1.2}),
    row("auto", {}),
    row("dense", {}),
]
