"""Packages that an extra of ours installs: imported when a function first needs them."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["extra_module"]


def extra_module(module: str, extra: str, user: str) -> Any:
    """
    Import a module of a package that an extra of ours installs.

    Args:
        module: its name.
        extra: the name of the extra that installs it.
        user: the feature that needs it, for the error.

    Raises:
        ImportError: the package is not installed; the error names the extra.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ImportError(f"{user} needs {package}: pip install 'torchsparse_rec[{extra}]'") from error
