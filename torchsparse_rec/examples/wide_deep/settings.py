"""The settings of a run of Wide & Deep, each with its flag."""

from __future__ import annotations

from dataclasses import dataclass

from ...typing import GradMode
from .. import _settings
from .._optimizers import LEARNING_RATES, OPTIMIZERS
from .._settings import GRAD_MODES, default_rates, positive_float, positive_int, seed, setting, widths
from .columns import KINDS
from .data import DISTRIBUTIONS


@dataclass(frozen=True)
class Settings(_settings.Settings):
    """
    Settings that determine a run's bits, beside Criteo's file.

    Sparse and fused steps of Adam, AdamW, RMSprop and Adadelta leave rows stale and flush them later. With these
    optimizers the steps at which checkpoints are written count as well: each checkpoint flushes all rows.
    """

    columns: str = setting("identity", "columns of generated ids, default {}", choices=KINDS)
    rows: int = setting(20_000, "rows of each table, default {}", type=positive_int)
    samples: int = setting(262_144, "examples generated for an epoch, default {}", type=positive_int)
    held_out: int = setting(32_768, "examples for the metrics, default {}", type=positive_int)
    batch_size: int = setting(4096, "examples of a step, default {}", type=positive_int)
    distribution: str = setting("uniform", "distribution of generated ids, default {}", choices=DISTRIBUTIONS)
    embedding_dim: int = setting(16, "width of each feature's rows, default {}", type=positive_int)
    mlp: tuple[int, ...] = setting((256, 128), "widths of the hidden layers, default {}", type=widths)
    grad_mode: GradMode = setting("fused", "gradient mode of the tables, default {}", choices=GRAD_MODES)
    optimizer: str = setting("sgd", "optimizer, default {}", choices=OPTIMIZERS)
    lr: float | None = setting(None, default_rates(LEARNING_RATES), type=positive_float)
    seed: int = setting(0, "seed of weights and examples, default {}", type=seed)
    rates = LEARNING_RATES
