"""Import pyarrow, which belongs to the extra ``arrow``, when a function first needs it."""

from __future__ import annotations

from typing import Any

from .._extras import extra_module


def arrow(user: str) -> Any:
    """
    Return the module ``pyarrow``.

    Args:
        user: the name of the function that needs pyarrow, for the error message.

    Raises:
        ImportError: pyarrow is not installed; the message names the extra.
    """
    extra_module("pyarrow.compute", "arrow", user)
    return extra_module("pyarrow", "arrow", user)
