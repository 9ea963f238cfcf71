"""What the examples' commands share: how they begin and end, checks before a run, what is printed and drawn."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NoReturn

from .._extras import extra_module
from .._interrupt import run_command
from ._job import Job, leave
from ._records import plot_curves, summary
from ._trainer import Trainer

#: Steps of --compare where no --steps are given.
COMPARED_STEPS = 100


def is_under_torchrun() -> bool:
    """Say whether torchrun has started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def add_flag(parser: argparse.ArgumentParser) -> None:
    """Add the flag of what only several ranks have."""
    plans = ("auto", "row_wise", "table_wise", "column_wise", "data_parallel")
    parser.add_argument("--plan", choices=plans, help="where tables are, under torchrun; default auto: by their sizes")


def compare_refusal(arguments: argparse.Namespace, trains: str, *names: str) -> str | None:
    """
    Return an error message if flags were given that do not go with --compare, else None.

    Args:
        arguments: with the flags of these names, ``compare`` and ``device``.
        trains: says what --compare does, for which these flags mean nothing.
        names: of the flags.
    """
    if arguments.compare is None:
        return None
    if is_under_torchrun():
        return "--compare runs in one process: it does not go with torchrun"
    if arguments.device.type != "cpu":
        return f"--compare runs on the CPU, got --device {arguments.device}"
    for name in names:
        if getattr(arguments, name):
            return f"--compare {trains}: it does not go with --{name.replace('_', '-')}"
    return None


def compares(arguments: argparse.Namespace) -> bool:
    """Say whether --compare was given. Raise ``ImportError`` if it was and TensorFlow is not installed."""
    if arguments.compare is not None:
        extra_module("tensorflow", "tensorflow", "--compare tensorflow")
    return arguments.compare is not None


def begin(arguments: argparse.Namespace) -> Job:
    """
    Return the job that this process is a part of, and let its ranks meet.

    Args:
        arguments: with the flags of :func:`add_flag` and ``device``.

    Raises:
        ValueError: there is one process, and a flag of several.
    """
    if is_under_torchrun():
        from ._ranks import begin as begin_ranks

        return begin_ranks(arguments.device, arguments.plan or "auto")
    if arguments.plan is not None:
        raise ValueError("--plan is of tables over ranks: start the command under torchrun")
    return Job(arguments.device)


def run(main: Callable[[], int]) -> NoReturn:
    """
    Run a command, and end the process with its exit code, or as :func:`~torchsparse_rec._interrupt.run_command` does.

    A rank ends within its handlers, see :func:`~torchsparse_rec.examples._job.leave`.
    """
    run_command(partial(_run_rank, main) if is_under_torchrun() else main)


def _run_rank(main: Callable[[], int]) -> NoReturn:
    try:
        leave(main())
    except KeyboardInterrupt:
        raise
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            leave(end.code or 0)
        print(end.code, file=sys.stderr)
    except BaseException:  # Python would print it likewise, were it to end the process
        traceback.print_exc()
    leave(1)


def check_writable(folder: Path) -> None:
    """Make a folder. Raise an ``OSError`` that names it if it cannot be made or files cannot be made in it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OSError(f"the output folder {folder} cannot be written to: {error.strerror or error}") from None


def check_unfinished(trainer: Trainer, path: Path, epochs: int, steps: int | None = None) -> None:
    """Raise ``ValueError`` if a trainer that goes on from a checkpoint has as many epochs or steps already."""
    if trainer.train_on.job.is_restart:  # of ranks that were killed after their last step
        return
    for name, done, wanted in (("epochs", trainer.epoch, epochs), ("steps", trainer.step, steps)):
        if wanted is not None and done >= wanted:
            raise ValueError(f"{path} has {done} {name} already: --{name} must be larger, got {wanted}")


@contextmanager
def ending(parser: argparse.ArgumentParser, *unusable: type[Exception]) -> Iterator[None]:
    """End the process with a line of text if the block raises: code 1 for a loss that is not finite, else 2."""
    try:
        yield
    except FloatingPointError as error:
        parser.exit(1, f"{parser.prog}: error: {error}\n")
    except unusable as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")


def train(trainer: Trainer, epochs: int, steps: int | None = None, every: int | None = None) -> None:
    """Train as :meth:`Trainer.run` does, and print each record."""
    for record in trainer.run(epochs, steps, every):
        trainer.train_on.job.print(record.line(epochs))


def finish(trainer: Trainer, title: str, folder: Path | None) -> None:
    """Draw the curves into ``folder``, say where they and the checkpoint are, and print the run's last line, once."""
    if not trainer.train_on.job.is_first:
        return
    if folder is not None:
        picture, written = folder / "curves.png", "none" if trainer.checkpoint is None else trainer.checkpoint.path
        try:
            plot_curves(trainer.history, title, picture)
            print(f"checkpoint: {written}, curves: {picture}")
        except ImportError as error:
            print(f"checkpoint: {written}; no curves: they need matplotlib ({error})")
    print(summary(trainer.history))
