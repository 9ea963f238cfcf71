"""The packages' imports: no circle of files, and no package that reaches for what is private to another."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]


def modules() -> dict[str, Path]:
    """Return the library's files by the names of their modules; compat/ is the package torchsparse_rec.compat."""
    found = {}
    for path in [*(ROOT / "torchsparse_rec").rglob("*.py"), *(ROOT / "compat").rglob("*.py")]:
        parts = path.relative_to(ROOT).with_suffix("").parts
        if parts[:2] != ("torchsparse_rec", "compat"):
            name = ".".join(("torchsparse_rec", *parts) if parts[0] == "compat" else parts)
            found[name.removesuffix(".__init__")] = path
    return found


MODULES = modules()


def imports(module: str) -> Iterator[tuple[str, str]]:
    """Yield what a module imports from this library, for types too: the other module, and the name taken from it."""
    path = MODULES[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                name = f"{base}.{alias.name}"
                if name in MODULES:
                    yield name, ""
                elif base in MODULES:
                    yield base, alias.name


def circles() -> list[list[str]]:
    """Return the circles of files: each is left when all that it imports is known."""
    left = {module: {other for other, _ in imports(module)} - {module} for module in MODULES}
    # A package imports its modules to show their names; that a module needs its package first makes no circle.
    left = {m: {o for o in found if not m.startswith(f"{o}.")} for m, found in left.items()}
    while done := [module for module, needed in left.items() if not needed & left.keys()]:
        for module in done:
            del left[module]
    return [sorted(left)] if left else []


def room(module: str) -> tuple[str, ...]:
    """Return the room that a module is in: a package of the library, or a package of compat."""
    parts = module.split(".")
    is_package = parts[:2] == ["torchsparse_rec", "compat"] and len(parts) > 2 and is_room(".".join(parts[:3]))
    return tuple(parts[1 : 3 if is_package else 2])


def is_room(module: str) -> bool:
    """Return whether a module is a package: a folder with an ``__init__.py``."""
    return MODULES[module].name == "__init__.py"


def test_no_circle_of_files() -> None:
    assert circles() == []


def test_no_package_imports_what_is_private_to_another() -> None:
    private = []
    for module in MODULES:
        for other, name in imports(module):
            its = room(other)
            below = [*other.split(".")[1 + len(its) :], name]
            if room(module) != its and any(part.startswith("_") and not part.startswith("__") for part in below):
                private.append((module, other, name))
    assert private == []


# Attributes of others: torch's, Keras's, TensorFlow's, and those of named tuples.
OTHERS = {*dir(torch.nn.Module()), *dir(torch.Tensor), "_embeddings", "_fields", "_name", "_replace", "_schema"}


def test_no_package_uses_attributes_private_to_another() -> None:
    given, asked = defaultdict[str, set[tuple[str, ...]]](set), list[tuple[str, tuple[str, ...], str]]()
    for module, path in MODULES.items():
        package = path.parent.relative_to(ROOT).parts[:2]
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                if isinstance(node.ctx, ast.Store):
                    given[node.attr].add(package)
                elif node.attr.startswith("_") and not node.attr.startswith("__"):
                    asked.append((module, package, node.attr))
            for part in node.body if isinstance(node, ast.ClassDef) else []:
                defined = [part] if isinstance(part, ast.FunctionDef) else ast.walk(part)
                for each in defined:
                    if isinstance(each, ast.FunctionDef):
                        given[each.name].add(package)
                    elif isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store):
                        given[each.id].add(package)
    ours = given.keys() - OTHERS
    assert [(module, name) for module, package, name in asked if name in ours and package not in given[name]] == []
