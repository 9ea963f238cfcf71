"""The settings of a run of DLRM, each with its flag."""

from __future__ import annotations

from dataclasses import dataclass

from ...typing import GradMode
from .. import _optimizers, _settings
from .._optimizers import OPTIMIZERS
from .._settings import GRAD_MODES, default_rates, positive_float, positive_int, seed, setting, widths

KINDS = ("dynamic", "hashed")
LEARNING_RATES = {**_optimizers.LEARNING_RATES, "adagrad": 0.01}
_NUMBERS = "widths of the hidden layers over the numbers, default {}"
_PRODUCTS = "widths of the hidden layers over the products, default {}"


@dataclass(frozen=True)
class Settings(_settings.Settings):
    """
    Settings that determine a run's bits, beside the files of examples.

    As of Wide & Deep's, the steps of checkpoints count as well with Adam, AdamW, RMSprop and Adadelta.
    """

    samples: int = setting(1 << 20, "examples generated for an epoch, default {}", type=positive_int)
    max_cardinality: int | None = setting(
        None, "the most values of a generated category", type=positive_int, metavar="N"
    )
    held_out: int = setting(1 << 16, "examples for the metrics, default {}", type=positive_int)
    batch_size: int = setting(2048, "examples of a step, default {}", type=positive_int)
    tables: str = setting("dynamic", "tables keyed by raw ids, or fixed ones of hashed ids; default {}", choices=KINDS)
    buckets: int = setting(100_000, "rows of each hashed table, default {}", type=positive_int)
    embedding_dim: int = setting(16, "width of each category's rows, default {}", type=positive_int)
    bottom: tuple[int, ...] = setting((512, 256, 64), _NUMBERS, type=widths)
    top: tuple[int, ...] = setting((512, 256), _PRODUCTS, type=widths)
    grad_mode: GradMode = setting("fused", "gradient mode of the tables, default {}", choices=GRAD_MODES)
    optimizer: str = setting("adagrad", "optimizer, default {}", choices=OPTIMIZERS)
    lr: float | None = setting(None, default_rates(LEARNING_RATES), type=positive_float)
    seed: int = setting(0, "seed of dense weights and generated examples, default {}", type=seed)
    filter: int | None = setting(
        None, "give an id a row in the step in which it occurs for the N-th time", type=positive_int, metavar="N"
    )
    evict: int | None = setting(
        None, "evict the rows of ids that have not occurred for this many steps", type=positive_int, metavar="STEPS"
    )
    evict_every: int | None = setting(
        None, "steps between evictions, default the steps of --evict", type=positive_int, metavar="STEPS"
    )
    rates = LEARNING_RATES
