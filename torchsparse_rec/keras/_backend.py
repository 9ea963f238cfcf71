"""The check that Keras runs on torch, before anything of Keras is used."""

from __future__ import annotations

import os
import sys

from .._extras import extra_module

__all__ = ["check_backend"]

_ERROR = (
    "torchsparse_rec.keras needs Keras's torch backend, got {}: set os.environ['KERAS_BACKEND'] = 'torch' before keras "
    "is first imported"
)


def check_backend() -> None:
    """
    Import Keras, which must run on torch.

    Raises:
        ImportError: Keras is not installed, or runs on another backend, or would: the error names the setting.
    """
    chosen = os.environ.get("KERAS_BACKEND")
    if "keras" not in sys.modules and chosen != "torch":  # importing Keras could import another framework, and fix it
        raise ImportError(_ERROR.format(f"KERAS_BACKEND={chosen!r}"))
    keras = extra_module("keras", "keras", "torchsparse_rec.keras")
    backend = keras.config.backend()
    if backend != "torch":
        raise ImportError(_ERROR.format(repr(backend)))
