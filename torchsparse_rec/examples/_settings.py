"""Settings of a run: one declaration makes the field, the flag on the command line, and the flag's help."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from dataclasses import field, fields
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch

S = TypeVar("S", bound="Settings")

GRAD_MODES = ("fused", "sparse", "dense", "auto")

# ---- Types of flags --------------------------------------------------------------------------------------------------


def positive_int(text: str) -> int:
    """Parse an integer of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def widths(text: str) -> tuple[int, ...]:
    """Parse comma-separated widths, at least one."""
    return tuple(positive_int(width) for width in text.split(","))


def seed(text: str) -> int:
    """Parse an integer in ``[0, 2^63)``, which torch's generators take as a seed."""
    value = int(text)
    if not 0 <= value < 1 << 63:
        raise argparse.ArgumentTypeError(f"must be at least 0 and below 2^63, got {value}")
    return value


def positive_float(text: str) -> float:
    """Parse a finite number above 0."""
    value = float(text)
    if not 0.0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a finite number above 0, got {text}")
    return value


def device(text: str) -> torch.device:
    """Parse the name of a device: ``cpu`` or ``cuda``, and one that this machine has; under torchrun, this rank's."""
    if text == "cuda" and "LOCAL_RANK" in os.environ:
        text = f"cuda:{os.environ['LOCAL_RANK']}"
    try:
        chosen = torch.device(text)
        torch.empty(0, device=chosen)
    except (RuntimeError, AssertionError) as error:
        raise argparse.ArgumentTypeError(f"{text} cannot be used: {str(error).splitlines()[0]}") from None
    if chosen.type not in ("cpu", "cuda"):
        raise argparse.ArgumentTypeError(f"must be cpu or cuda, got {text}")
    return chosen


# ---- Settings --------------------------------------------------------------------------------------------------------


def setting(default: Any, help: str, **argument: Any) -> Any:
    """
    Declare a field of :class:`Settings`, and with it a flag.

    Args:
        default: the field's. The flag has none, so that it is known which flags were given.
        help: the flag's, with ``{}`` for the default.
        argument: what else :meth:`argparse.ArgumentParser.add_argument` takes.
    """
    if isinstance(default, tuple):
        shown = ",".join(map(str, default))
    else:
        shown = f"{default:,}" if isinstance(default, int) else str(default)
    return field(default=default, metadata={"help": help.format(shown), **argument})


def default_rates(rates: Mapping[str, float]) -> str:
    """Return the help of a flag for the learning rate whose default depends on the optimizer."""
    return f"learning rate, default {', '.join(f'{rate:g} for {name}' for name, rate in rates.items())}"


class Settings:
    """Settings that determine a run's bits, beside its data: the base of frozen dataclasses of :func:`setting`."""

    lr: float | None
    optimizer: str
    #: The learning rate of each optimizer where ``lr`` is None.
    rates: ClassVar[Mapping[str, float]] = {}

    def learning_rate(self) -> float:
        """Return ``lr``, or the optimizer's default."""
        return self.rates[self.optimizer] if self.lr is None else self.lr

    @classmethod
    def add_flags(cls, parser: argparse.ArgumentParser) -> None:
        """Add a flag for each setting."""
        for each in fields(cls):  # type: ignore[arg-type]
            parser.add_argument(f"--{each.name.replace('_', '-')}", **each.metadata)

    @classmethod
    def given(cls, arguments: argparse.Namespace) -> dict[str, Any]:
        """Return the settings that were named on the command line."""
        values = {each.name: getattr(arguments, each.name) for each in fields(cls)}  # type: ignore[arg-type]
        return {name: value for name, value in values.items() if value is not None}

    @classmethod
    def of(cls: type[S], given: Mapping[str, Any], saved: Mapping[str, Any] | None, path: Path | None) -> S:
        """
        Return the settings of a new run, or of the run that goes on from a checkpoint.

        Args:
            given: the settings named on the command line.
            saved: the checkpoint's content; None for a new run.
            path: the checkpoint's file, for the message.

        Raises:
            ValueError: if a given setting is not the one that the checkpoint was trained with.
        """
        if saved is None:
            return cls(**given)
        settings = cls(**saved["settings"])
        for name, value in given.items():
            trained = settings.learning_rate() if name == "lr" else getattr(settings, name)
            if value != trained:
                raise ValueError(f"--{name.replace('_', '-')} is {value}, but {path} was trained with {trained}")
        return settings
