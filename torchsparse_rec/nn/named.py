"""EmbeddingVariables by name."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from ..variable.options import EmbeddingVariableOption
from .embedding_variable import EmbeddingVariable

__all__ = ["get_embedding_variable"]

_by_name: weakref.WeakValueDictionary[str, EmbeddingVariable] = weakref.WeakValueDictionary()


def get_embedding_variable(
    name: str,
    embedding_dim: int,
    key_dtype: torch.dtype = torch.int64,
    initializer: Any = None,
    ev_option: EmbeddingVariableOption | None = None,
    **options: Any,
) -> EmbeddingVariable:
    """
    Return the variable of a name: the first call makes it, later calls return it as long as it is referenced.

    Args:
        name: the name of the variable.
        embedding_dim: the argument of :class:`EmbeddingVariable`, as are all further arguments.
        key_dtype: the argument of :class:`EmbeddingVariable`.
        initializer: the argument of :class:`EmbeddingVariable`.
        ev_option: the argument of :class:`EmbeddingVariable`.
        options: further arguments of :class:`EmbeddingVariable`.

    Returns:
        The variable.

    Raises:
        ValueError: a variable of this name exists with another embedding_dim or key_dtype.

    Source: DeepRec's ``tf.get_embedding_variable``.

    Example:
        >>> table = get_embedding_variable("users", 4)
        >>> get_embedding_variable("users", 4) is table
        True
    """
    found = _by_name.get(name)
    if found is None:
        made = EmbeddingVariable(
            embedding_dim, name=name, key_dtype=key_dtype, initializer=initializer, ev_option=ev_option, **options
        )
        return _by_name.setdefault(name, made)
    for argument, given, has in (
        ("embedding_dim", embedding_dim, found.embedding_dim),
        ("key_dtype", key_dtype, found.key_dtype),
    ):
        if given != has:
            raise ValueError(f"get_embedding_variable: {argument} of {name!r} must be {has}, as before, got {given}")
    return found
