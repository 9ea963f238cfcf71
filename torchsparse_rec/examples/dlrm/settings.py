"""The settings of a run of DLRM, each with its flag."""

from __future__ import annotations

from dataclasses import dataclass

from .. import _settings
from .._settings import positive_float, positive_int, seed, setting, widths

KINDS = ("dynamic", "hashed")
_NUMBERS = "widths of the hidden layers over the numbers, default {}"
_PRODUCTS = "widths of the hidden layers over the products, default {}"


@dataclass(frozen=True)
class Settings(_settings.Settings):
    """Settings that determine a run's bits, beside the files of examples."""

    samples: int = setting(1 << 20, "generated for an epoch, default {}", type=positive_int)
    max_cardinality: int | None = setting(
        None, "generated categories have no more values than that", type=positive_int, metavar="N"
    )
    held_out: int = setting(1 << 16, "samples for the metrics, default {}", type=positive_int)
    batch_size: int = setting(2048, "samples, default {}", type=positive_int)
    tables: str = setting("dynamic", "keyed by raw ids, or fixed ones of hashed ids; default {}", choices=KINDS)
    buckets: int = setting(100_000, "rows of each hashed table, default {}", type=positive_int)
    embedding_dim: int = setting(16, "of each category, default {}", type=positive_int)
    bottom: tuple[int, ...] = setting((512, 256, 64), _NUMBERS, type=widths)
    top: tuple[int, ...] = setting((512, 256), _PRODUCTS, type=widths)
    lr: float = setting(0.01, "Adagrad's learning rate, default {}", type=positive_float)
    seed: int = setting(0, "of dense weights and generated examples, default {}", type=seed)
    filter: int | None = setting(
        None, "an id gets a row with the step of its N-th occurrence", type=positive_int, metavar="N"
    )
    evict: int | None = setting(
        None, "drop the rows of ids that did not occur for so long", type=positive_int, metavar="STEPS"
    )
    evict_every: int | None = setting(
        None, "how often, default as long as they live", type=positive_int, metavar="STEPS"
    )
