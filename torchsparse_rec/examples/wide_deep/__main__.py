"""The command ``python -m torchsparse_rec.examples.wide_deep``."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ...data import DataError
from ...data.criteo import CATEGORIES
from .. import _command
from .._checkpoints import Checkpoint
from .._clicks import torchmetrics
from .._command import COMPARED_STEPS, check_unfinished, check_writable, ending
from .._job import Job
from .._settings import device, positive_float, positive_int
from .._trainer import Trainer
from . import data
from .data import Batch
from .settings import Settings
from .sources import make_source
from .train import make_columns, make_trainer

DEFAULT_EPOCHS = 3
DEFAULT_OUTPUT = Path("runs/wide_deep")
FORM = "wide_deep 2"


def make_parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    parser = argparse.ArgumentParser(
        prog="python -m torchsparse_rec.examples.wide_deep",
        description="Train Wide & Deep (Cheng et al., 2016) on generated examples or on Criteo's.",
    )
    add = parser.add_argument
    Settings.add_flags(parser)
    add("--table-gb", type=positive_float, metavar="GB", help="size of all tables in 10^9 bytes, instead of --rows")
    add("--criteo", type=Path, metavar="TRAIN.TXT", help="train on this file of Criteo's instead of generated examples")
    add("--prebatched", type=Path, metavar="PATH", help="keep the generated batches in this file, made if missing")
    add("--epochs", type=positive_int, help=f"epochs in total, default {DEFAULT_EPOCHS}")
    add("--steps", type=positive_int, help="stop after this many steps in total")
    add("--evaluate-every", type=positive_int, metavar="STEPS", help="steps between metrics within an epoch")
    add("--device", type=device, default=torch.device("cpu"), help="cpu or cuda, default cpu")
    add("--threads", type=positive_int, help="threads of torch and TensorFlow, default torch's choice")
    add("--output-dir", type=Path, help=f"folder for checkpoint.pt and curves.png, default {DEFAULT_OUTPUT}")
    add("--no-checkpoint", action="store_true", help="write no checkpoint, which is as large as the tables")
    add("--resume", type=Path, metavar="CHECKPOINT", help="resume from this checkpoint, bit for bit")
    add("--compare", choices=["tensorflow"], help=f"train --steps in TensorFlow too, default {COMPARED_STEPS}")
    _command.add_flag(parser)
    return parser


def epochs_of(arguments: argparse.Namespace) -> int:
    """Return the number of epochs in all. The flag has no default, which shows whether it was given."""
    return arguments.epochs or DEFAULT_EPOCHS


def given_settings(arguments: argparse.Namespace, saved: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the settings named on the command line. The others are those of a checkpoint, or else the defaults."""
    found = Settings.given(arguments)
    if arguments.table_gb is not None:
        tables = len(CATEGORIES) if arguments.criteo else len(data.HOTS)
        dim = {"embedding_dim": Settings.embedding_dim, **(saved or {}), **found}["embedding_dim"]
        found["rows"] = max(1, round(arguments.table_gb * 1e9 / (tables * (dim + 1) * 4)))
    return found


def start(arguments: argparse.Namespace, output: Path, job: Job) -> Trainer[Batch]:
    """Return a new trainer, or one that goes on from --resume, or from where the ranks of a job have come."""
    checkpoint = None if arguments.no_checkpoint else job.checkpoint(Checkpoint(output / "checkpoint.pt", FORM))
    saved = job.resumed(None if arguments.resume is None else Checkpoint(arguments.resume, FORM), checkpoint)
    content = None if saved is None else saved.read()
    given = given_settings(arguments, content and content["settings"])
    settings = Settings.of(given, content, None if saved is None else saved.path)
    if arguments.prebatched is not None:  # the first rank writes it, where it is not there
        job.from_first(lambda: bool(make_source(settings, prebatched=arguments.prebatched)))
    trainer = make_trainer(settings, job.device, checkpoint, arguments.criteo, arguments.prebatched, job)
    if saved is not None and content is not None:
        trainer.resume(content, saved)
        check_unfinished(trainer, saved.path, epochs_of(arguments), arguments.steps)
    return trainer


def describe(trainer: Trainer) -> str:
    """Return the first line of a run: its data, and the size of its tables."""
    weights = [
        table.num_embeddings * table.embedding_dim for table in trainer.train_on.model.bags.embedding_bag_configs()
    ]
    return f"data: {trainer.source.fingerprint()}; {len(weights)} tables, {4e-9 * sum(weights):.3g} GB"


def compare(arguments: argparse.Namespace) -> int:
    """Run --compare tensorflow; return 1 if the losses differ, else 0."""
    from . import compare_tensorflow

    settings = Settings(**given_settings(arguments))
    source = make_source(settings, prebatched=arguments.prebatched)
    found = compare_tensorflow.compare(settings, source, make_columns(settings), arguments.steps or COMPARED_STEPS)
    return int(found.largest_difference() > compare_tensorflow.TOLERANCE)


def refusal(arguments: argparse.Namespace) -> str | None:
    """Return an error message if flags were given that do not go together, else None."""
    if arguments.criteo is not None:
        for name in ("columns", "samples", "distribution", "prebatched"):
            if getattr(arguments, name) is not None:
                return f"--{name} is of generated examples: it does not go with --criteo"
    if arguments.rows is not None and arguments.table_gb is not None:
        return "argument --table-gb: not allowed with argument --rows"
    if arguments.compare is not None and arguments.optimizer not in (None, "sgd"):
        return f"--compare trains by gradient descent, got --optimizer {arguments.optimizer}"
    names = ("resume", "criteo", "plan", "epochs", "held_out", "evaluate_every", "output_dir", "no_checkpoint")
    return _command.compare_refusal(arguments, "trains --steps anew on generated examples and writes nothing", *names)


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
        if _command.compares(arguments):
            return compare(arguments)
        torchmetrics()
        job = _command.begin(arguments)
        check_writable(output)
        trainer = start(arguments, output, job)
    job.print(describe(trainer))
    with ending(parser, DataError, OSError):  # a file that is damaged further in, or a disk that is full
        _command.train(trainer, epochs_of(arguments), arguments.steps, arguments.evaluate_every)
        data_set = "Criteo" if arguments.criteo else f"{trainer.settings.columns} columns"
        _command.finish(trainer, f"Wide & Deep, {data_set}", output)
    return job.end()


if __name__ == "__main__":
    _command.run(main)
