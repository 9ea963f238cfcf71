"""The command ``python -m torchsparse_rec.examples.dlrm``."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path

import torch

from ..._extras import extra_module
from .. import _command
from .._checkpoints import Checkpoint
from .._clicks import torchmetrics
from .._command import COMPARED_STEPS, check_writable, ending
from .._job import Job
from .._settings import device, positive_int
from .._trainer import Trainer
from .checkpoints import Checkpoints
from .data import Batch
from .settings import Settings
from .sources import make_source
from .tables import TIERS, Placement, statistics
from .train import make_trainer

DEFAULT_EPOCHS = 1


def make_parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    place = Placement()
    parser = argparse.ArgumentParser(
        prog="python -m torchsparse_rec.examples.dlrm",
        description="Train DLRM (Naumov et al., 2019) on Criteo's files, or on generated examples of their shape.",
    )
    add = parser.add_argument
    add("--data", type=Path, nargs="+", metavar="FILE", help="Criteo's files, text or prebatched (.arrow, .prebatched)")
    Settings.add_flags(parser)
    add("--tiers", choices=TIERS, help=f"the storage of dynamic tables' rows, default {place.tiers}")
    add("--hbm-rows", type=positive_int, help=f"each table's rows in HBM above DRAM or SSD, default {place.hbm_rows:,}")
    add("--dram-rows", type=positive_int, help=f"each table's rows in DRAM above SSD, default {place.dram_rows:,}")
    add("--ssd-path", type=Path, metavar="FOLDER", help="the folder of the SSD tier, default ssd in --checkpoint")
    add("--checkpoint", type=Path, metavar="FOLDER", help="write checkpoints there, and resume from one found there")
    add(
        "--save-every",
        type=positive_int,
        metavar="STEPS",
        help="steps between full checkpoints, default: at the end",
    )
    add("--delta-every", type=positive_int, metavar="STEPS", help="steps between checkpoints of the changed rows alone")
    add("--epochs", type=positive_int, help=f"epochs in total, default {DEFAULT_EPOCHS}")
    add("--steps", type=positive_int, help="stop after this many steps in total")
    add("--evaluate-every", type=positive_int, metavar="STEPS", help="steps between metrics within an epoch")
    add("--device", type=device, default=torch.device("cpu"), help="cpu or cuda, default cpu")
    add("--threads", type=positive_int, help="threads of torch and TensorFlow, default torch's choice")
    add("--compare", choices=["tensorflow"], help=f"train --steps in TensorFlow too, default {COMPARED_STEPS}")
    _command.add_flag(parser)
    return parser


def epochs_of(arguments: argparse.Namespace) -> int:
    """Return the number of epochs in all. The flag has no default, which shows whether it was given."""
    return arguments.epochs or DEFAULT_EPOCHS


def make_placement(arguments: argparse.Namespace, job: Job) -> Placement:
    """Return where the rows of dynamic tables are."""
    values = {field.name: getattr(arguments, field.name) for field in fields(Placement)}
    found = {name: value for name, value in values.items() if value is not None}
    if "SSD" in found.get("tiers", "") and "ssd_path" not in found:
        found["ssd_path"] = arguments.checkpoint / "ssd"
    if "ssd_path" in found:
        found["ssd_path"] = job.own(found["ssd_path"])
    return Placement(**found)


def start(arguments: argparse.Namespace, job: Job) -> Trainer[Batch]:
    """Return a new trainer, or one that goes on from the checkpoint."""
    checkpoints: Checkpoint | None = None
    content, path = None, None
    if arguments.checkpoint is not None:
        check_writable(arguments.checkpoint)
        checkpoints = job.checkpoint(Checkpoints(arguments.checkpoint, arguments.save_every, arguments.delta_every))
        path = checkpoints.path
        content = checkpoints.read() if checkpoints.exists() else None
    settings = Settings.of(Settings.given(arguments), content, path)
    check_fit(arguments, settings)
    if checkpoints is not None and settings.tables == "dynamic":
        # At the start, and not after an hour's training.
        extra_module("safetensors.torch", "checkpoint", "--checkpoint of dynamic tables")
    place = make_placement(arguments, job)
    trainer = make_trainer(settings, place, job.device, checkpoints, arguments.data, job)
    if content is not None and checkpoints is not None:
        trainer.resume(content, checkpoints)
        if trainer.is_over(epochs_of(arguments), arguments.steps) and not job.is_restart:
            raise ValueError(
                f"{path} has {trainer.epoch} epochs and {trainer.step} steps already: --epochs or --steps "
                "must be larger, or --checkpoint another folder"
            )
    return trainer


def compare(arguments: argparse.Namespace) -> int:
    """Run --compare tensorflow; return 1 if the losses differ, else 0."""
    from . import compare_tensorflow

    settings = Settings(**Settings.given(arguments))
    found = compare_tensorflow.compare(settings, make_source(settings), arguments.steps or COMPARED_STEPS)
    return int(found.largest_difference() > compare_tensorflow.TOLERANCE)


def check_fit(arguments: argparse.Namespace, settings: Settings) -> None:
    """Raise ``ValueError`` if a flag was given that means nothing to this kind of tables."""
    of_the_other = {
        "dynamic": ("buckets",),
        "hashed": ("filter", "evict", "tiers", "delta_every"),
    }
    for name in of_the_other[settings.tables]:
        if getattr(arguments, name) is not None:
            raise ValueError(f"--{name.replace('_', '-')} does not go with --tables {settings.tables}")


def refusal(arguments: argparse.Namespace) -> str | None:
    """Return an error message if flags were given that do not go together, else None."""
    if arguments.data is not None:
        for name in ("samples", "max_cardinality"):
            if getattr(arguments, name) is not None:
                return f"--{name.replace('_', '-')} is of generated examples: it does not go with --data"
    tiers = arguments.tiers or ""
    needs = {
        "--checkpoint": (arguments.checkpoint is not None, ("save_every", "delta_every")),
        "--evict": (arguments.evict is not None, ("evict_every",)),
        "--tiers with more below HBM": (tiers.startswith("HBM_"), ("hbm_rows",)),
        "--tiers with SSD": (tiers.endswith("_SSD"), ("dram_rows", "ssd_path")),
    }
    for what, (given, names) in needs.items():
        for name in names:
            if getattr(arguments, name) is not None and not given:
                return f"--{name.replace('_', '-')} needs {what}"
    if tiers.endswith("_SSD") and arguments.ssd_path is None and arguments.checkpoint is None:
        return f"--tiers {tiers} needs --ssd-path or --checkpoint"
    if arguments.compare is not None:
        if arguments.optimizer not in (None, "adagrad", "sgd"):
            return f"--compare trains by adagrad or sgd, got --optimizer {arguments.optimizer}"
        if arguments.tables != "hashed":
            return "--compare needs --tables hashed: TensorFlow has no tables that grow"
    names = ("data", "checkpoint", "plan", "epochs", "held_out", "evaluate_every")
    return _command.compare_refusal(arguments, "trains --steps anew on generated examples and writes nothing", *names)


def describe(trainer: Trainer) -> str:
    """Return the first lines of a run: its data, its tables, and the step from which it goes on."""
    settings = trainer.settings
    rows = f"of {settings.buckets:,} rows and" if settings.tables == "hashed" else "of"
    tables = len(trainer.train_on.model.bags.embedding_bag_configs())
    text = (
        f"data: {trainer.source.fingerprint()}; {tables} {settings.tables} tables {rows} dim {settings.embedding_dim}"
    )
    if trainer.step:
        text += f"\ngoing on from step {trainer.step:,} of {trainer.checkpoint.path}"  # type: ignore[union-attr]
    return text


def main(argv: list[str] | None = None) -> int:
    """Run the command, and return its exit code. Unusable input ends the process with one line and code 2."""
    parser = make_parser()
    arguments = parser.parse_args(argv)
    wrong = refusal(arguments)
    if wrong is not None:
        parser.error(wrong)
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    with ending(parser, ValueError, OSError, ImportError):
        if arguments.compare is not None:
            check_fit(arguments, Settings(tables=arguments.tables))
        if _command.compares(arguments):
            return compare(arguments)
        torchmetrics()
        job = _command.begin(arguments)
        trainer = start(arguments, job)
    job.print(describe(trainer))
    with ending(parser, ValueError, OSError):  # a file that is damaged further in, or a disk that is full
        _command.train(trainer, epochs_of(arguments), arguments.steps, arguments.evaluate_every)
        job.print(*statistics(trainer.train_on.model.bags, job))
        _command.finish(trainer, f"DLRM, {trainer.settings.tables} tables", arguments.checkpoint)
    return job.end()


if __name__ == "__main__":
    _command.run(main)
