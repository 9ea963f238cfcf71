"""Benchmark rows of the NCF example: one training step of NeuMF at MovieLens-100k's sizes, in samples per second."""

from __future__ import annotations

import itertools

import torch

from torchsparse_rec.examples.ncf import Batch, make_parser
from torchsparse_rec.typing import GradMode

from .compared_ncf import build_step
from .rows import Call, Case, Make, Options, Row, tensorflow

USERS, ITEMS, BATCH = 943, 1_682, 1_024


def batches(device: str) -> list[Batch]:
    """Draw users, items and labels: users uniform, items with the skew of a catalogue, a fifth of labels positive."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for _ in range(32):
        users = torch.randint(0, USERS, (BATCH,), generator=generator, dtype=torch.int32)
        items = (torch.rand(BATCH, generator=generator) ** 3 * ITEMS).to(torch.int32)
        labels = (torch.rand(BATCH, generator=generator) < 0.2).float()
        made.append(Batch(users.to(device), items.to(device), labels.to(device)))
    return made


def training(kind: str, options: Options, grad_mode: GradMode = "dense", keras_rule: bool = True) -> Call:
    """Return a call that trains on the next batch. Every kind starts from the same weights."""
    settings = make_parser().settings({"grad_mode": grad_mode})
    step = build_step(kind, USERS, ITEMS, settings, options.device, keras_rule)
    prepared = itertools.cycle(step.prepare(batches(options.device)))
    return lambda: step(next(prepared))


def row(grad_mode: GradMode, targets: dict[str, float]) -> Row:
    """Make a benchmark row of our tables in one gradient mode, beside the same network in PyTorch and TensorFlow."""

    def build(options: Options) -> Case:
        def ours() -> Call:
            return training("ours", options, grad_mode)

        def in_torch() -> Call:
            # torch's peer has torch's fused Adam. Under Keras's rule its tables would have our optimizer.
            return training("torch", options, keras_rule=False)

        def in_tensorflow() -> Call:
            tensorflow(options)
            return training("tensorflow", options)

        def check() -> None:
            candidate, reference = training("ours", options, grad_mode, keras_rule=False), in_torch()
            for _ in range(20):
                assert abs(float(candidate()) - float(reference())) < 1e-5

        peers: dict[str, Make] = {"TensorFlow tf.function": in_tensorflow, "PyTorch": in_torch}
        return Case(ours, peers, check, samples=BATCH)

    return Row(f"ncf/{grad_mode}", f"one step of NeuMF, 8 factors, batch {BATCH}, Adam, {grad_mode}", build, targets)


_TARGETS = {"TensorFlow tf.function": 1.5, "PyTorch": 1.0}
ROWS = [row("dense", _TARGETS), row("fused", _TARGETS), row("auto", _TARGETS), row("sparse", _TARGETS)]
