"""The content of a checkpoint of TorchRec, or a dump of dynamicemb or SOK, whatever its form."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from ..checkpoints.format import reading
from ..checkpoints.names import Target, chosen
from ..checkpoints.sources import Found, listed, named_after
from ._dumps import Dump, dynamicemb_dumps, sok_dumps
from ._states import bare, states_by_variable
from ._torch_files import METADATA, add_all, folder_tensors, state_tensors, tensors_of_file

__all__ = ["Opened", "open_content"]


class Opened(NamedTuple):
    """The content of a checkpoint or a dump."""

    path: str
    variables: dict[str, Found]
    """By name: all tensors but states."""
    states: dict[str, dict[str, Found]]
    """The states of each variable by its name: see :func:`states_by_variable`."""
    dumps: dict[str, Dump]
    """Tables that grow by name."""

    def find(self, target: Target, text: str | None) -> str:
        """
        Return the name of the tensor that a text names for a table.

        Args:
            target: the table.
            text: the argument of ``load_tables``. None: the parameter's name, or else the table's.

        Raises:
            ValueError: it names none, or several.
        """
        rank = len(target.parameter.shape)
        names = [(name, [name, bare(name)]) for name in self.dumps if target.growing is not None]
        names += [(name, [name, bare(name)]) for name in self.variables]
        for each in (target.parameter_name, target.name) if text is None else (text,):
            # The state of a variable that the checkpoint does not have is no variable, unless it is named in full.
            found = chosen(each, [x for x in names if each in x[1] or ".state." not in f".{x[0]}"], ".")
            if len(found) > 1:
                found = [x for x in found if x in self.dumps or len(self.variables[x].shape) == rank] or found
            if len(found) == 1:
                return found[0]
            if found:
                raise ValueError(
                    f"{self.path}: {each!r}, for {target.parameter_name!r}, must name one tensor, got {listed(found)}"
                )
        if self.dumps and target.growing is None:
            raise ValueError(
                f"{self.path} has tables that grow, {listed(self.dumps)}, which {target.parameter_name!r} is not: make "
                "it an EmbeddingVariable"
            )
        wanted = target.name if text is None else text
        raise ValueError(
            f"{self.path} has no {wanted!r}, for {target.parameter_name!r}; it has {listed(x for x, _ in names)}"
        )


def open_content(given: str | os.PathLike[str] | Mapping[str, Any]) -> Opened:
    """
    Return the content of a checkpoint or a dump.

    Args:
        given: a state, or the path of a file of ``torch.save``, of a dump, or of a folder. The folder is one of
            ``torch.distributed.checkpoint``, or has such folders in it; their tensors' names then begin with the
            folders' names.

    Raises:
        FileNotFoundError: there is nothing.
        ValueError: it is something else.
    """
    if isinstance(given, Mapping):
        return _of_tensors("the state", state_tensors("the state", given))
    path = os.fspath(given)
    if not os.path.exists(path):
        raise FileNotFoundError(f"{path} is missing")
    with reading(path):
        opened = _at(path)
    return opened._replace(
        variables=_named_after(path, opened.variables),
        states={name: _named_after(path, its) for name, its in opened.states.items()},
    )


def _named_after(path: str, tensors: Mapping[str, Found]) -> dict[str, Found]:
    return {name: named_after(path, found) for name, found in tensors.items()}


def _at(path: str) -> Opened:
    """Return the content of the file or folder at a path."""
    if not os.path.isdir(path):
        return _of_tensors(path, tensors_of_file(path))
    if os.path.exists(os.path.join(path, METADATA)):
        return _of_tensors(path, folder_tensors(path))
    inside = sorted(x for x in os.listdir(path) if os.path.exists(os.path.join(path, x, METADATA)))
    if inside:
        tensors: dict[str, Found] = {}
        for folder in inside:
            add_all(path, tensors, folder_tensors(os.path.join(path, folder), f"{folder}."))
        return _of_tensors(path, tensors)
    dumps = dynamicemb_dumps(path) or sok_dumps(path)
    if not dumps:
        raise ValueError(
            f"{path} must be a folder of torch.distributed.checkpoint, with {METADATA}, or a dump of dynamicemb or "
            f"SOK; it has {listed(os.listdir(path)) or 'nothing'}"
        )
    return Opened(path, {}, {}, {dump.name: dump for dump in dumps})


def _of_tensors(path: str, tensors: dict[str, Found]) -> Opened:
    states = states_by_variable(tensors)
    taken = {found.name for its in states.values() for found in its.values()}
    return Opened(path, {name: found for name, found in tensors.items() if name not in taken}, states, {})
