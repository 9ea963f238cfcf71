"""The command ``python -m torchsparse_rec.examples.wide_deep``."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from ...data import DataError
from .._command import check_given, check_writable, device, ending, positive_float, positive_int, seed, widths
from .._figures import plot_curves, summary, torchmetrics
from . import columns as features
from . import data
from .model import GRAD_MODES
from .sources import make_source
from .steps import LEARNING_RATES, OPTIMIZERS
from .train import Settings, Trainer, read_checkpoint

DEFAULT_EPOCHS = 3
DEFAULT_OUTPUT = Path("runs/wide_deep")
COMPARED_STEPS = 100


def make_parser() -> argparse.ArgumentParser:
    """Return the command's parser. Flags that a checkpoint fixes have no default: so it is known which were given."""
    default = Settings()
    rates = ", ".join(f"{rate:g} for {name}" for name, rate in LEARNING_RATES.items())
    mlp = ",".join(map(str, default.mlp))
    parser = argparse.ArgumentParser(
        prog="python -m torchsparse_rec.examples.wide_deep",
        description="Train Wide & Deep (Cheng et al., 2016) on generated examples or on Criteo's.",
    )
    add = parser.add_argument
    add("--columns", choices=features.KINDS, help=f"of generated ids, default {default.columns}")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--rows", type=positive_int, help=f"of each table, default {default.rows:,}")
    size.add_argument("--table-gb", type=positive_float, metavar="GB", help="instead: 10^9 bytes of all tables")
    add("--samples", type=positive_int, help=f"generated for an epoch, default {default.samples:,}")
    add("--held-out", type=positive_int, help=f"samples for the metrics, default {default.held_out:,}")
    add("--batch-size", type=positive_int, help=f"samples, default {default.batch_size:,}")
    add("--distribution", choices=data.DISTRIBUTIONS, help=f"of generated ids, default {default.distribution}")
    add("--embedding-dim", type=positive_int, help=f"of each feature, default {default.embedding_dim}")
    add("--mlp", type=widths, help=f"widths of the hidden layers, default {mlp}")
    add("--grad-mode", choices=GRAD_MODES, help=f"of the tables, default {default.grad_mode}")
    add("--optimizer", choices=OPTIMIZERS, help=f"default {default.optimizer}")
    add("--lr", type=positive_float, help=f"learning rate, default {rates}")
    add("--seed", type=seed, help=f"of weights and examples, default {default.seed}")
    add("--criteo", type=Path, metavar="TRAIN.TXT", help="train on this file of Criteo's instead of generated examples")
    add("--prebatched", type=Path, metavar="PATH", help="keep generated batches in this file; made if it is not there")
    add("--epochs", type=positive_int, help=f"in all, default {DEFAULT_EPOCHS}")
    add("--steps", type=positive_int, help="end after so many steps, in all")
    add("--evaluate-every", type=positive_int, metavar="STEPS", help="also within epochs")
    add("--device", type=device, default=torch.device("cpu"), help="cpu or cuda, default cpu")
    add("--threads", type=positive_int, help="of torch and TensorFlow, default torch's")
    add("--output-dir", type=Path, help=f"of checkpoint.pt and curves.png, default {DEFAULT_OUTPUT}")
    add("--no-checkpoint", action="store_true", help="write none: it is as large as the tables")
    add("--resume", type=Path, metavar="CHECKPOINT", help="go on bit for bit as the run that wrote this")
    add("--compare", choices=["tensorflow"], help=f"train there too, --steps of each, default {COMPARED_STEPS}")
    return parser


def epochs_of(arguments: argparse.Namespace) -> int:
    """Return the number of epochs in all. The flag has no default, which shows whether it was given."""
    return arguments.epochs or DEFAULT_EPOCHS


def given_settings(arguments: argparse.Namespace, base: Settings | None = None) -> dict[str, Any]:
    """Return the settings named on the command line. The others are those of ``base``, or else the defaults."""
    values = {field.name: getattr(arguments, field.name) for field in fields(Settings)}
    found = {name: value for name, value in values.items() if value is not None}
    if arguments.table_gb is not None:
        tables = len(features.CRITEO_STRINGS) if arguments.criteo else len(data.HOTS)
        dim = found.get("embedding_dim", (base or Settings()).embedding_dim)
        found["rows"] = max(1, round(arguments.table_gb * 1e9 / (tables * (dim + 1) * 4)))
    return found


def make_columns(settings: Settings, criteo: Path | None) -> features.Columns:
    """Return the features of generated examples, or of Criteo's."""
    if criteo is not None:
        return features.criteo_columns(settings.rows, settings.embedding_dim)
    return features.generated_columns(settings.columns, settings.rows, settings.embedding_dim)


def make_trainer(arguments: argparse.Namespace) -> Trainer:
    """Return a new trainer, or one that goes on from --resume."""
    if arguments.resume is None:
        settings, checkpoint = Settings(**given_settings(arguments)), None
    else:
        settings, checkpoint = read_checkpoint(arguments.resume)
        check_given(given_settings(arguments, settings), settings, arguments.resume)
    source = make_source(settings, arguments.criteo, arguments.prebatched)
    trainer = Trainer(settings, source, make_columns(settings, arguments.criteo), arguments.device)
    if checkpoint is not None:
        trainer.load(checkpoint)
        if trainer.epoch >= epochs_of(arguments):
            raise ValueError(
                f"{arguments.resume} has {trainer.epoch} epochs already: --epochs must be larger, got "
                f"{epochs_of(arguments)}"
            )
        if arguments.steps is not None and trainer.step >= arguments.steps:
            raise ValueError(
                f"{arguments.resume} has {trainer.step} steps already: --steps must be larger, got {arguments.steps}"
            )
    return trainer


def describe(trainer: Trainer) -> str:
    """Return the first line of a run: its data, and the size of its tables."""
    weights = [
        table.num_embeddings * table.embedding_dim for table in trainer.train_on.model.bags.embedding_bag_configs()
    ]
    return f"data: {trainer.source.fingerprint()}; {len(weights)} tables, {4e-9 * sum(weights):.3g} GB"


def train(trainer: Trainer, arguments: argparse.Namespace, output: Path) -> None:
    """Train, with a checkpoint after each record; then draw the picture and print the last line."""
    checkpoint, picture = output / "checkpoint.pt", output / "curves.png"
    epochs = epochs_of(arguments)
    for record in trainer.run(epochs, arguments.steps, arguments.evaluate_every):
        print(record.line(epochs), flush=True)
        if not arguments.no_checkpoint:
            trainer.save(checkpoint)
    written = "none" if arguments.no_checkpoint else str(checkpoint)
    try:
        data_set = "Criteo" if arguments.criteo else f"{trainer.settings.columns} columns"
        plot_curves(trainer.history, f"Wide & Deep, {data_set}", picture)
        print(f"checkpoint: {written}, curves: {picture}")
    except ImportError as error:
        print(f"checkpoint: {written}; no curves: they need matplotlib ({error})")
    print(summary(trainer.history))


def compare(arguments: argparse.Namespace) -> int:
    """Run --compare tensorflow; return 1 if the losses differ, else 0."""
    from . import compare_tensorflow

    settings = Settings(**given_settings(arguments))
    source, columns = make_source(settings, None, arguments.prebatched), make_columns(settings, None)
    found = compare_tensorflow.compare(settings, source, columns, arguments.steps or COMPARED_STEPS)
    return int(found.largest_difference() > compare_tensorflow.TOLERANCE)


def refusal(arguments: argparse.Namespace) -> str | None:
    """Return an error message if flags were given that do not go together, else None."""
    if arguments.criteo is not None:
        for name in ("columns", "samples", "distribution", "prebatched"):
            if getattr(arguments, name) is not None:
                return f"--{name} is of generated examples: it does not go with --criteo"
    if arguments.compare is None:
        return None
    if arguments.resume is not None or arguments.criteo is not None:
        return "--compare trains anew, on generated examples: it does not go with --resume or --criteo"
    if arguments.device.type != "cpu":
        return f"--compare runs on the CPU, got --device {arguments.device}"
    if arguments.optimizer not in (None, "sgd"):
        return f"--compare trains by gradient descent, got --optimizer {arguments.optimizer}"
    for name in ("epochs", "held_out", "evaluate_every", "output_dir", "no_checkpoint"):
        if getattr(arguments, name):
            return f"--compare trains --steps and writes nothing: it does not go with --{name.replace('_', '-')}"
    return None


def main(argv: list[str] | None = None) -> int:
    """Run the command, and return its exit code. Unusable input ends the process with one line and code 2."""
    parser = make_parser()
    arguments = parser.parse_args(argv)
    wrong = refusal(arguments)
    if wrong is not None:
        parser.error(wrong)
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    output = arguments.output_dir or (arguments.resume.parent if arguments.resume else DEFAULT_OUTPUT)
    with ending(parser, ValueError, OSError, ImportError):
        if arguments.compare:
            if importlib.util.find_spec("tensorflow") is None:
                raise ImportError("--compare tensorflow needs TensorFlow: pip install 'torchsparse-rec[tensorflow]'")
            return compare(arguments)
        torchmetrics()
        check_writable(output)
        trainer = make_trainer(arguments)
    print(describe(trainer))
    with ending(parser, DataError, OSError):  # a file that is damaged further in, or a disk that is full
        train(trainer, arguments, output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
