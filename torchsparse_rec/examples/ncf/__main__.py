"""The command ``python -m torchsparse_rec.examples.ncf``."""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from .._command import check_given, check_writable, device, ending, positive_float, positive_int, seed
from . import data
from .plot import plot_curves
from .steps import GRAD_MODES, LEARNING_RATES, OPTIMIZERS
from .train import Record, Settings, Trainer, read_checkpoint

DEFAULT_EPOCHS = 30
DEFAULT_OUTPUT = Path("runs/ncf")


def layer_widths(text: str) -> tuple[int, ...]:
    """Parse comma-separated widths: two or more, the first one even."""
    widths = tuple(positive_int(width) for width in text.split(","))
    if len(widths) < 2 or widths[0] % 2:
        raise argparse.ArgumentTypeError(f"must be two or more widths, the first one even, got {text}")
    return widths


def make_parser() -> argparse.ArgumentParser:
    """Return the command's parser. Flags that a checkpoint fixes have no default: so it is known which were given."""
    default = Settings()
    rates = ", ".join(f"{rate:g} for {name}" for name, rate in LEARNING_RATES.items())
    parser = argparse.ArgumentParser(
        prog="python -m torchsparse_rec.examples.ncf", description="Train NeuMF (He et al., 2017) on MovieLens."
    )
    add = parser.add_argument
    add("--dataset", choices=[*data.SOURCES, "generated"], default="ml-100k", help="default ml-100k")
    add("--data-dir", type=Path, help=f"folder of the original files, default ${data.ENVIRONMENT_VARIABLE}")
    add("--grad-mode", choices=GRAD_MODES, help=f"of the tables, default {default.grad_mode}")
    add("--optimizer", choices=OPTIMIZERS, help=f"default {default.optimizer}")
    add("--lr", type=positive_float, help=f"learning rate, default {rates}")
    add("--factors", type=positive_int, help=f"width of the GMF vectors, default {default.factors}")
    widths = ",".join(map(str, default.layers))
    add("--layers", type=layer_widths, help=f"widths of the MLP from its input on, default {widths}")
    add("--negatives", type=positive_int, help=f"per positive and epoch, default {default.negatives}")
    help_text = "never draw the held-out item as a negative, as many published programs do: flatters the metrics"
    add("--exclude-held-out", action="store_true", default=None, help=help_text)
    add("--batch-size", type=positive_int, help=f"samples, default {default.batch_size:,}")
    add("--seed", type=seed, help=f"of weights, batches and candidates, default {default.seed}")
    add("--epochs", type=positive_int, default=DEFAULT_EPOCHS, help=f"in all, default {DEFAULT_EPOCHS}")
    add("--device", type=device, default=torch.device("cpu"), help="cpu or cuda, default cpu")
    add("--output-dir", type=Path, help=f"of checkpoint.pt and curves.png, default {DEFAULT_OUTPUT}")
    add("--resume", type=Path, metavar="CHECKPOINT", help="continue from this checkpoint, bit for bit")
    add("--compare", choices=["tensorflow"], help="train the same network there too and print both")
    return parser


def given_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that were named on the command line."""
    values = {field.name: getattr(arguments, field.name) for field in fields(Settings)}
    return {name: value for name, value in values.items() if value is not None}


def make_trainer(arguments: argparse.Namespace, interactions: data.Interactions) -> Trainer:
    """Return a new trainer, or one that goes on from --resume."""
    given = given_settings(arguments)
    if arguments.resume is None:
        return Trainer(Settings(**given), interactions, arguments.device)
    settings, checkpoint = read_checkpoint(arguments.resume)
    check_given(given, settings, arguments.resume)
    trainer = Trainer(settings, interactions, arguments.device)
    trainer.load(checkpoint)
    if len(trainer.history) >= arguments.epochs:
        raise ValueError(
            f"{arguments.resume} has {len(trainer.history)} epochs already: --epochs must be larger, "
            f"got {arguments.epochs}"
        )
    return trainer


def summary(history: list[Record]) -> str:
    """Return the last line of a run: the last epoch's figures, and the best by HR@10."""
    last = history[-1]
    best = max(history, key=lambda record: (record.metrics.hr, record.metrics.ndcg))
    return (
        f"last epoch {last.epoch}: HR@10 {last.metrics.hr:.4f} NDCG@10 {last.metrics.ndcg:.4f}, "
        f"best epoch {best.epoch}: HR@10 {best.metrics.hr:.4f} NDCG@10 {best.metrics.ndcg:.4f}"
    )


def train(trainer: Trainer, epochs: int, output: Path) -> None:
    """Train up to ``epochs``, with a checkpoint after each; then draw the picture and print the last line."""
    checkpoint, picture = output / "checkpoint.pt", output / "curves.png"
    while len(trainer.history) < epochs:
        print(trainer.run_epoch().line(epochs), flush=True)
        trainer.save(checkpoint)
    title = f"NeuMF on {trainer.interactions.name}, grad_mode={trainer.settings.grad_mode}"
    try:
        plot_curves(trainer.history, title, picture)
        print(f"checkpoint: {checkpoint}, curves: {picture}")
    except ImportError as error:
        print(f"checkpoint: {checkpoint}; no curves: they need matplotlib ({error})")
    print(summary(trainer.history))


def compare(arguments: argparse.Namespace, interactions: data.Interactions) -> int:
    """Run --compare tensorflow; return 1 if the losses differ, else 0."""
    from . import compare_tensorflow

    settings = Settings(**given_settings(arguments))
    found = compare_tensorflow.compare(settings, interactions, arguments.epochs)
    return int(found.largest_difference() > compare_tensorflow.TOLERANCE)


def main(argv: list[str] | None = None) -> int:
    """Run the command, and return its exit code. Unusable input ends the process with one line and code 2."""
    parser = make_parser()
    arguments = parser.parse_args(argv)
    if arguments.compare and arguments.resume:
        parser.error("--compare trains anew: it does not go with --resume")
    if arguments.compare and arguments.device.type != "cpu":
        parser.error(f"--compare runs on the CPU, got --device {arguments.device}")
    output = arguments.output_dir or (arguments.resume.parent if arguments.resume else DEFAULT_OUTPUT)
    with ending(parser, ValueError, OSError):
        if not arguments.compare:
            check_writable(output)
        interactions, where = data.load(arguments.dataset, arguments.data_dir)
        trainer = None if arguments.compare else make_trainer(arguments, interactions)
    print(
        f"data: {where}: {interactions.num_users:,} users, {interactions.num_items:,} items, "
        f"{len(interactions.users):,} interactions"
    )
    if trainer is None:
        try:
            return compare(arguments, interactions)
        except ImportError as error:
            parser.exit(2, f"{parser.prog}: error: --compare tensorflow needs TensorFlow: {error}\n")
    with ending(parser):
        train(trainer, arguments.epochs, output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
