"""Packages that belong to an extra: imported when a function first needs them."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["extra_module"]


def extra_module(module: str, extra: str, user: str) -> Any:
    """
    A module of another package.

    Args:
        module: its name.
        extra: of ours that installs it.
        user: what needs it, for the error.

    Raises:
        ImportError: it is not installed, with the name of the extra.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ImportError(f"{user} needs {package}: pip install 'torchsparse_rec[{extra}]'") from error
