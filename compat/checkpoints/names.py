"""Which table of a model is which variable of a file."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import Module, Parameter

from ...nn import EmbeddingVariable
from ...tables.table import split_part
from .sources import Found, Source, listed

__all__ = [
    "Move",
    "Target",
    "check_distinct",
    "chosen",
    "keras_order",
    "names_of",
    "one_variable",
    "pairs_of",
    "targets_of",
]


class Move(NamedTuple):
    """
    A tensor that goes from a file to a model, or from a model to a file.

    Attributes:
        source: where it is: its name in the file; or the parameter of the model, or a state of its optimizer.
        target: where it goes.
        shape: of the whole tensor.
        dtype: in the file; None: one that torch does not have.
        parts: in how many parts the file has it.

    Example:
        >>> from torchsparse_rec.compat.checkpoints.names import Move
        >>> print(Move("items/Adam", "state of items.weight: exp_avg", (10, 4), torch.float32, 8))
        items/Adam -> state of items.weight: exp_avg  [10, 4] float32 in 8 parts
    """

    source: str
    target: str
    shape: tuple[int, ...]
    dtype: torch.dtype | None
    parts: int

    def __str__(self) -> str:
        """Return a line that says so."""
        parts = f" in {self.parts} parts" if self.parts > 1 else ""
        return f"{self.source} -> {self.target}  {list(self.shape)} {str(self.dtype).removeprefix('torch.')}{parts}"


class Target(NamedTuple):
    """A table of a model."""

    name: str
    """The last part of its module's name; of a model that is a table itself, ``weight``."""
    parameter_name: str
    parameter: Parameter
    growing: EmbeddingVariable | None


def targets_of(model: Module, chosen: Mapping[str, str] | None, parts: bool = False) -> list[Target]:
    """
    Return the tables of a model.

    Args:
        model: the model, whose tables are modules of torch or of ours.
        chosen: the wanted tables, by name, by the name of their module or of their parameter; any parameter may be
            among them. None: all tables.
        parts: whether tables of fixed size may be split over ranks.

    Raises:
        ValueError: a name is of none or of several; or a table is split over ranks, or there is none.
    """
    tables: dict[int, Target] = {}
    for path, module in model.named_modules():
        if isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag, EmbeddingVariable)):
            growing = module if isinstance(module, EmbeddingVariable) else None
            parameter: Any = growing.stored_weight() if growing is not None else module.weight
            name = f"{path}.weight" if path else "weight"
            tables.setdefault(id(parameter), Target(name.split(".")[-2 if path else -1], name, parameter, growing))
    result = list(tables.values())
    if chosen is not None:
        others = [
            Target(name, name, parameter, None)
            for name, parameter in model.named_parameters()
            if id(parameter) not in tables and name in chosen
        ]
        result = [_target_named(name, [*result, *others]) for name in chosen]
    if not result:
        raise ValueError(f"model must have tables, such as torch.nn.Embedding; {type(model).__name__} has none")
    for target in result:
        if split_part(target.parameter) is not None and not (parts and target.growing is None):
            raise ValueError(
                f"table {target.parameter_name!r} is split over ranks: load and save tables in a model of one process, "
                "and move it by torchsparse_rec.checkpoint.save and load"
            )
    return result


def _target_named(name: str, targets: list[Target]) -> Target:
    for same in (
        lambda x: name in (x.parameter_name, x.parameter_name.removesuffix(".weight")),
        lambda x: name == x.name,
    ):
        found = [target for target in targets if same(target)]
        if len(found) == 1:
            return found[0]
        if found:
            raise ValueError(
                f"tables: {name!r} must be the name of one table, got that of {listed(x.parameter_name for x in found)}"
            )
    raise ValueError(f"tables: the model has no table {name!r}; it has {listed(x.parameter_name for x in targets)}")


def names_of(targets: list[Target], tables: str | Mapping[str, str] | None) -> list[str]:
    """Return the tables' names in a file, by ``tables``."""
    if isinstance(tables, Mapping):
        return list(tables.values())
    return [("{}" if tables is None else tables).replace("{}", target.name) for target in targets]


def pairs_of(source: Source, model: Module, tables: str | Mapping[str, str] | None) -> list[tuple[Target, Found | str]]:
    """Return each table with its variable; with its name, where that is an EmbeddingVariable of DeepRec."""
    targets = targets_of(model, tables if isinstance(tables, Mapping) else None)
    texts = names_of(targets, tables)
    pairs = [(target, _one(source, target, text)) for target, text in zip(targets, texts, strict=True)]
    named = [(target, found if isinstance(found, str) else found.name) for target, found in pairs]
    check_distinct(source.path, named)
    return pairs


def check_distinct(path: str, pairs: list[tuple[Target, str]]) -> None:
    """Raise ``ValueError`` if two tables are to have the same variable of a file, or one table two."""
    taken: dict[str, Target] = {}
    named: dict[int, str] = {}
    for target, name in pairs:
        if id(target.parameter) in named:
            raise ValueError(
                f"tables must name {target.parameter_name!r} once, got it for {named[id(target.parameter)]!r} and "
                f"{name!r}"
            )
        named[id(target.parameter)] = name
        other = taken.setdefault(name, target)
        if other is not target:
            raise ValueError(
                f"{path}: {name!r} must be the variable of one table, got {other.parameter_name!r} and "
                f"{target.parameter_name!r}: name the variable of each in tables"
            )


def _one(source: Source, target: Target, text: str) -> Found | str:
    """Return the variable that a text names for a table."""
    if target.growing is not None:
        bases = chosen(text, [(base, [base]) for base in growing_bases(source)])
        if len(bases) == 1:
            return bases[0]
        if bases:
            raise ValueError(f"{source.path}: {text!r} must name one EmbeddingVariable, got {listed(bases)}")
    return one_variable(source, text, len(target.parameter.shape), target.parameter_name)


def one_variable(source: Source, text: str, rank: int | None = None, wanted_for: str = "variables") -> Found:
    """Return the variable, which is no slot, that a text names; of several the one of a rank."""
    found = source.named(text) or _matches(source, text)
    if len(found) > 1 and rank is not None:
        found = [x for x in found if len(x.shape) == rank] or found
    if found and all(_are_copies(source, found[0], other) for other in found[1:]):
        return found[0]
    every = [source.names(x.name)[-1] for x in _variables(source)]
    if not found:
        raise ValueError(f"{source.path} has no variable {text!r}, for {wanted_for}; it has {listed(every)}")
    raise ValueError(
        f"{source.path}: {text!r}, for {wanted_for}, must name one variable, got "
        f"{listed(' = '.join(source.names(x.name)) for x in found)}"
    )


def keras_order(source: Source, variables: Sequence[str]) -> list[Found | None]:
    """
    Return the trainable variables of a Keras model, in its order.

    Args:
        source: a file.
        variables: all of them, by names of the file, or by Keras's paths such as ``"users/embeddings"``: a file of
            weights has the layers of these.

    Returns:
        The variables; None for one whose layer is not the only one of its name.

    Raises:
        ValueError: a name is of none, or they have another order than layers of one class have in the file.
    """
    result: list[Found | None] = []
    taken: dict[str, int] = {}
    last: dict[str, tuple[int, str]] = {}
    for text in variables:
        layer, _, variable = text.rpartition("/")
        found = source.named(text) or _matches(source, text)
        if not found and source.is_h5 and layer:
            number = taken[layer] = taken.get(layer, -1) + 1
            found = source.named(f"{layer.rpartition('/')[2]}/{number}")
            if len(found) > 1:
                result.append(None)
                continue
        its = found[0] if len(found) == 1 else one_variable(source, text)
        result.append(its)
        # Keras numbers layers of one class, as embedding and embedding_1, in the order of the model.
        match = re.fullmatch(r"(layers/[^/]+?)(?:_(\d+))?/vars/\d+", its.name) if source.is_h5 else None
        if match:
            place, before = int(match[2] or 0), last.get(match[1], (0, text))
            if place < before[0]:
                raise ValueError(
                    f"{source.path}: variables must be in the order of model.trainable_variables, where {text!r} is "
                    f"before {before[1]!r}"
                )
            last[match[1]] = place, text
    return result


def _matches(source: Source, text: str) -> list[Found]:
    """Return the variables that a text names, by some parts of a name or by a pattern with ``*``."""
    names = [(x.name, source.names(x.name)) for x in _variables(source)]
    # The file may have the slots of a variable that it does not have.
    names = [(name, others) for name, others in names if not any(map(_SLOT.search, others))]
    return [source.tensors[name] for name in chosen(text, names)]


_SLOT = re.compile(r"/(Adam|AdamW|AdamAsync|Adagrad|AdagradDecay|Ftrl|Momentum|RMSProp)(_\d+)?$")


def _are_copies(source: Source, a: Found, b: Found) -> bool:
    """Say whether two tensors are one variable, which SavedModels may hold twice: of one name, with the same bytes."""
    if a.shape != b.shape or a.dtype is None or source.names(a.name)[-1] != source.names(b.name)[-1]:
        return False
    crcs = [[piece.crc for piece in x.pieces()] for x in (a, b)]
    return crcs[0] == crcs[1] and None not in crcs[0]


def chosen(text: str, names: list[tuple[str, list[str]]], between: str = "/") -> list[str]:
    """
    Return the names that a text matches, or whose other names it matches.

    Args:
        text: a name; or some parts of one; or a pattern with ``*`` for anything.
        names: the names, each with all other names of the same variable.
        between: the separator of the parts of a name.
    """
    exact = [name for name, others in names if text in others]
    if exact:
        return exact
    if "*" in text:
        pattern = re.compile(".*".join(re.escape(part) for part in text.split("*")))
        return [name for name, others in names if any(pattern.fullmatch(other) for other in others)]
    inside = f"{between}{text}{between}"
    return [name for name, others in names if any(inside in f"{between}{other}{between}" for other in others)]


def _variables(source: Source) -> list[Found]:
    """Return the tensors that are neither slots nor parts of others."""
    flat = {full.replace("/", "_") for full in source.full_names.values()}
    result = []
    for name, found in source.tensors.items():
        full = source.full_names.get(name, name)
        parts, last = name.split("/"), full.rsplit("/", 1)[-1]
        is_slot = (
            ".OPTIMIZER_SLOT" in parts
            or (source.is_h5 and parts[0] == "optimizer")
            or any("/".join(parts[:k]) in source.tensors for k in range(1, len(parts)))
            or any(last[: m.start()] in flat for m in re.finditer("_", last) if "/" in full)
        )
        if not is_slot:
            result.append(found)
    return result


# ---- DeepRec --------------------------------------------------------------------------------------------------------


def growing_bases(source: Source) -> list[str]:
    """Return the names of DeepRec's EmbeddingVariables, without their parts and slots."""
    prefixes = {name.removesuffix("-keys") for name in source.tensors if name.endswith("-keys")}
    bases = {re.sub(r"/part_\d+(?=/|$)", "", x) for x in prefixes if f"{x}-values" in source.tensors}
    return [x for x in sorted(bases) if not any(x.startswith(f"{other}/") for other in bases)]
