"""Tables that grow behind columns: the options that make them, their first rows, and options as plain data."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from .. import variable
from ._functions import as_initializer

# The rows that a table has before its first ids come: ``num_embeddings`` of its config.
_FIRST_ROWS = 1024
_OPTIONS = {name: x for name, x in vars(variable).items() if isinstance(x, type) and is_dataclass(x)}


def growing_option(column: Any) -> variable.EmbeddingVariableOption | None:
    """Return the options of the table that a column of ids or an embedding column has; None: its size is fixed."""
    option, ids = getattr(column, "ev_option", None), getattr(column, "categorical_column", None)
    return growing_option(ids) if option is None and ids is not None else option


def first_rows(column: Any, option: variable.EmbeddingVariableOption | None) -> int:
    """Return the rows that the table of a column of ids starts with."""
    if option is None:
        return int(column.num_buckets)
    return _FIRST_ROWS if growing_option(column) is not None else min(column.num_buckets, _FIRST_ROWS)


def checked_option(value: Any, name: str) -> variable.EmbeddingVariableOption | None:
    """Return the options of a column, made from plain data if they are; raise ``ValueError`` for anything else."""
    option = _made(value)
    if option is None or isinstance(option, variable.EmbeddingVariableOption):
        return option
    raise ValueError(f"column {name!r}: ev_option must be None or an EmbeddingVariableOption, got {value!r}")


def _made(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_made(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    kind = _OPTIONS.get(str(value.get("class_name")))
    if kind is None:
        return as_initializer(value, 1)
    given = {field: _made(x) for field, x in value["config"].items()}
    if "counter_type" in given:
        given["counter_type"] = getattr(torch, given["counter_type"])
    return kind(**given)


def plain_option(value: Any) -> Any:
    """Return options as plain data for JSON; raise ``ValueError`` for a function that has no configuration."""
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, (list, tuple)):
        return [plain_option(item) for item in value]
    if hasattr(value, "to_config"):
        return value.to_config()
    if is_dataclass(value):
        config = {field.name: plain_option(getattr(value, field.name)) for field in fields(value)}
        return {"class_name": type(value).__name__, "config": config}
    if value is None or isinstance(value, (str, int, float)):
        return value
    raise ValueError(f"ev_option: options must be numbers or have a to_config() to be written, got {value!r}")
