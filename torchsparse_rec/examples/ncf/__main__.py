"""The command ``python -m torchsparse_rec.examples.ncf``."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from .. import _command
from .._checkpoints import Checkpoint
from .._command import check_unfinished, check_writable, ending
from .._job import Job
from .._settings import device, positive_int
from .._trainer import Trainer
from . import data
from .sampling import Batch
from .settings import Settings
from .train import make_trainer

DEFAULT_EPOCHS = 30
DEFAULT_OUTPUT = Path("runs/ncf")
FORM = "ncf 2"


def make_parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    parser = argparse.ArgumentParser(
        prog="python -m torchsparse_rec.examples.ncf", description="Train NeuMF (He et al., 2017) on MovieLens."
    )
    add = parser.add_argument
    add(
        "--dataset",
        choices=[*data.SOURCES, "generated"],
        default="ml-100k",
        help="the ratings, default ml-100k",
    )
    add("--data-dir", type=Path, help=f"folder of the original files, default ${data.ENVIRONMENT_VARIABLE}")
    Settings.add_flags(parser)
    add("--epochs", type=positive_int, default=DEFAULT_EPOCHS, help=f"epochs in total, default {DEFAULT_EPOCHS}")
    add("--device", type=device, default=torch.device("cpu"), help="cpu or cuda, default cpu")
    add("--output-dir", type=Path, help=f"folder for checkpoint.pt and curves.png, default {DEFAULT_OUTPUT}")
    add("--resume", type=Path, metavar="CHECKPOINT", help="resume from this checkpoint, bit for bit")
    add("--compare", choices=["tensorflow"], help="train the same network in TensorFlow too, and print both")
    _command.add_flag(parser)
    return parser


def start(arguments: argparse.Namespace, interactions: data.Interactions, output: Path, job: Job) -> Trainer[Batch]:
    """Return a new trainer, or one that goes on from --resume, or from where the ranks of a job have come."""
    checkpoint = job.checkpoint(Checkpoint(output / "checkpoint.pt", FORM))
    saved = job.resumed(None if arguments.resume is None else Checkpoint(arguments.resume, FORM), checkpoint)
    content = None if saved is None else saved.read()
    settings = Settings.of(Settings.given(arguments), content, None if saved is None else saved.path)
    trainer = make_trainer(settings, interactions, job.device, checkpoint, job)
    if saved is not None and content is not None:
        trainer.resume(content, saved)
        check_unfinished(trainer, saved.path, arguments.epochs)
    return trainer


def compare(arguments: argparse.Namespace, interactions: data.Interactions) -> int:
    """Run --compare tensorflow; return 1 if the losses differ, else 0."""
    from . import compare_tensorflow

    settings = Settings(**Settings.given(arguments))
    found = compare_tensorflow.compare(settings, interactions, arguments.epochs)
    return int(found.largest_difference() > compare_tensorflow.TOLERANCE)


def main(argv: list[str] | None = None) -> int:
    """Run the command, and return its exit code. Unusable input ends the process with one line and code 2."""
    parser = make_parser()
    arguments = parser.parse_args(argv)
    wrong = _command.compare_refusal(arguments, "trains anew and writes nothing", "resume", "plan", "output_dir")
    if wrong is not None:
        parser.error(wrong)
    output = arguments.output_dir or (arguments.resume.parent if arguments.resume else DEFAULT_OUTPUT)
    with ending(parser, ValueError, OSError, ImportError):
        job = _command.begin(arguments)
        compares = _command.compares(arguments)
        if not compares:
            check_writable(output)
        interactions, where = job.from_first(lambda: data.load(arguments.dataset, arguments.data_dir))
        trainer = None if compares else start(arguments, interactions, output, job)
    job.print(
        f"data: {where}: {interactions.num_users:,} users, {interactions.num_items:,} items, "
        f"{len(interactions.users):,} interactions"
    )
    if trainer is None:
        return compare(arguments, interactions)
    with ending(parser, OSError):  # a disk that is full
        _command.train(trainer, arguments.epochs)
        _command.finish(trainer, f"NeuMF on {interactions.name}, grad_mode={trainer.settings.grad_mode}", output)
    return job.end()


if __name__ == "__main__":
    _command.run(main)
