"""The settings of a run of NCF, each with its flag."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from ...typing import GradMode
from .. import _settings
from .._settings import GRAD_MODES, default_rates, positive_float, positive_int, seed, setting, widths

OPTIMIZERS = ("adam", "sgd", "adagrad")
LEARNING_RATES = {"adam": 1e-3, "sgd": 0.5, "adagrad": 0.02}


def layer_widths(text: str) -> tuple[int, ...]:
    """Parse comma-separated widths: two or more, the first one even."""
    found = widths(text)
    if len(found) < 2 or found[0] % 2:
        raise argparse.ArgumentTypeError(f"must be two or more widths, the first one even, got {text}")
    return found


_EXCLUDE = "never draw the held-out item as a negative, as many published programs do: flatters the metrics"


@dataclass(frozen=True)
class Settings(_settings.Settings):
    """Settings that determine a run's bits, beside its data."""

    grad_mode: GradMode = setting("auto", "gradient mode of the tables, default {}", choices=GRAD_MODES)
    optimizer: str = setting("adam", "optimizer, default {}", choices=OPTIMIZERS)
    lr: float | None = setting(None, default_rates(LEARNING_RATES), type=positive_float)
    factors: int = setting(8, "width of the GMF vectors, default {}", type=positive_int)
    layers: tuple[int, ...] = setting((32, 16, 8), "widths of the MLP from its input on, default {}", type=layer_widths)
    negatives: int = setting(4, "negatives per positive and epoch, default {}", type=positive_int)
    exclude_held_out: bool = setting(False, _EXCLUDE, action="store_true")
    batch_size: int = setting(1024, "examples of a step, default {}", type=positive_int)
    seed: int = setting(0, "seed of weights, batches and candidates, default {}", type=seed)
    rates = LEARNING_RATES
