"""The installed TensorFlow, imported when it is first needed and never before."""

from __future__ import annotations

import importlib
import warnings
from typing import Any


def tensorflow() -> Any:
    """
    Return the ``tensorflow`` module.

    Raises:
        ImportError: naming the extra to install.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # TensorFlow's imports warn of other packages' deprecations
            return importlib.import_module("tensorflow")
    except ImportError as error:
        raise ImportError(
            f"this part of torchsparse_rec.compat needs TensorFlow: pip install 'torchsparse-rec[tensorflow]' ({error})"
        ) from error
