"""pyarrow, which belongs to the extra ``arrow``: imported when a function first needs it."""

from __future__ import annotations

from typing import Any

from .._extras import extra_module


def arrow(user: str) -> Any:
    """
    The module ``pyarrow``.

    Args:
        user: the function that needs it, for the error.

    Raises:
        ImportError: if it is not installed, with the name of the extra.
    """
    extra_module("pyarrow.compute", "arrow", user)
    return extra_module("pyarrow", "arrow", user)
