"""pyarrow, which belongs to the extra ``arrow``: imported when a function first needs it."""

from __future__ import annotations

from typing import Any


def arrow(user: str) -> Any:
    """
    The module ``pyarrow``.

    Args:
        user: the function that needs it, for the error.

    Raises:
        ImportError: if it is not installed, with the name of the extra.
    """
    try:
        import pyarrow
        import pyarrow.compute
    except ImportError:
        raise ImportError(f"{user} needs pyarrow: pip install 'torchsparse_rec[arrow]'") from None
    return pyarrow
