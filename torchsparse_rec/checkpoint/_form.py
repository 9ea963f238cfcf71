"""The form of a manifest's description of a model: a checksum only proves that the bytes are the written ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["check_form", "is_within"]

# For a mapping each name, where ... stands for all others; for a list each item.
_FORM: dict[Any, Any] = {
    "tables": {...: {"rows": int, "dim": int, "states": {"": list, ...: list}, "numbers": dict}},
    "variables": {...: {"where": str, "of_ranks": [(dict, type(None))]}},
    "rest": dict,
    "versions": {...: (int, type(None))},
    "optimizer": (dict, type(None)),
    "extra": object,
    "ranks": int,
}
_OF_OPTIMIZER: dict[Any, Any] = {"class": str, "groups": [{"names": [str], "options": dict}], "dense": {...: dict}}
_NAMES = {int: "an integer", str: "a string", dict: "a mapping", list: "a list", type(None): "null"}


def check_form(metadata: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` unless ``checkpoint.save`` may have written a version's metadata."""
    if missing := sorted(_FORM.keys() - metadata.keys()):
        raise ValueError(f"is of something else than torchsparse_rec.checkpoint.save: it lacks {', '.join(missing)}")
    _check(metadata, _FORM, "metadata")
    if metadata["optimizer"] is not None:
        _check(metadata["optimizer"], _OF_OPTIMIZER, "metadata.optimizer")


def _check(value: Any, form: Any, where: str) -> None:
    if isinstance(form, dict):
        names = [name for name in form if name is not ...]
        if not isinstance(value, dict) or not value.keys() >= {*names}:
            raise ValueError(f"{where} must be a mapping with the names {names}, got {repr(value):.100}")
        for name, each in value.items():
            _check(each, form.get(name, form.get(..., object)), f"{where}.{name}")
    elif isinstance(form, list):
        _check(value, list, where)
        for k, each in enumerate(value):
            _check(each, form[0], f"{where}[{k}]")
    elif not isinstance(value, form) or (isinstance(value, bool) and form is not object):
        kinds = form if isinstance(form, tuple) else (form,)
        wanted = " or ".join(_NAMES[kind] for kind in kinds)
        raise ValueError(f"{where} must be {wanted}, got {repr(value):.100}")


def is_within(value: Any, least: int, end: int | None = None) -> bool:
    """Say whether a value of JSON is an integer that is not below one, and below the other if there is one."""
    return type(value) is int and least <= value and (end is None or value < end)
