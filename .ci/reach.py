"""
What a Python or C++ file of the repository reaches: by imports, includes, operators' names, and names in strings.

A name that is imported from a package leads to the file that defines it, not to all that the package shows. A name that
cannot be followed, as in ``getattr(ops, name)``, leads to the whole package.
"""

from __future__ import annotations

import ast
import fnmatch
import os
import re
import textwrap
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_CPP = (".h", ".cuh", ".cpp", ".cu")
_FOLDERS = ("torchsparse_rec", "compat", "benchmarks", "tests", "docs", ".ci", "csrc")
# What a string that names a module begins with.
_PACKAGES = re.compile(r"\b(?:torchsparse_rec|benchmarks)(?:\.\w+)+")


def schemas(text: str) -> dict[str, str]:
    """Return the schema of each operator that the text of csrc/library.cpp defines, by the operator's name."""
    texts = ["".join(re.findall(r'"([^"]*)"', x)) for x in re.findall(r'm\.def\(\s*((?:"[^"]*"\s*)+)', text)]
    return {x.partition("(")[0]: x for x in texts}


class Reach:
    """The files of the repository, and what each reaches. Files are paths relative to the root."""

    def __init__(self) -> None:
        paths = [x for folder in _FOLDERS for x in (ROOT / folder).rglob("*.*") if "__pycache__" not in x.parts]
        self.texts = {
            str(x.relative_to(ROOT)): x.read_text(errors="replace")
            for x in (*paths, ROOT / "setup.py")
            if x.suffix in (".py", *_CPP) and (ROOT / "torchsparse_rec/compat") not in x.parents
        }
        self.modules = {name: path for path in self.texts if (name := _module(path))}
        self.operators: dict[str, set[str]] = {x: set() for x in schemas(self.texts["csrc/library.cpp"])}
        for path, text in self.texts.items():
            for name in re.findall(r'TSR_IMPL\(m, "(\w+)"', text) if path.endswith((".cpp", ".cu")) else ():
                self.operators[name].add(path)
        self.needs = cache(self._needs)

    def closure(self, path: str) -> set[str]:
        """Return all files that a file reaches, directly or not, and itself."""
        found, pending = {path}, [path]
        while pending:
            more = self.needs(pending.pop()) - found
            found |= more
            # A package's own file shows what others define: where names lead on is known already.
            pending += [x for x in more if not x.endswith("/__init__.py")]
        return found

    def sources_of(self, paths: Iterable[str]) -> list[str]:
        """Return the C++ sources that include one of some files, directly or not, or are one of them."""
        sources = sorted(x for x in self.texts if x.startswith("csrc/") and x.endswith((".cpp", ".cu")))
        return [x for x in sources if not self._included(x).isdisjoint(paths)]

    def _included(self, path: str) -> set[str]:
        found, pending = {path}, [path]
        while pending:
            more = self._headers(pending.pop()) - found
            found |= more
            pending += more
        return found

    def _needs(self, path: str) -> set[str]:
        return self._includes(path) if path.endswith(_CPP) else _Names(self, path).found

    def _includes(self, path: str) -> set[str]:
        """Return the headers that a C++ file includes, and the sources that define what they declare."""
        found = self._headers(path)
        return found | {x for header in found for x in self._defining.get(header, ())}

    def _headers(self, path: str) -> set[str]:
        """Return the headers that a C++ file names, in an ``#include`` or a macro of one."""
        folders = (str(Path(path).parent), "csrc", "csrc/cpu", "csrc/cuda", "tests/emulation")
        names = re.findall(r'"([\w./]+\.c?u?h)"', self.texts[path])
        places = [[os.path.normpath(f"{folder}/{name}") for folder in folders] for name in names]
        return {next((x for x in each if x in self.texts), path) for each in places} - {path}

    @cached_property
    def _defining(self) -> dict[str, set[str]]:
        """
        For each header, the sources that define no operator and belong to it.

        It is the header beside the source that gives the source's name its beginning; else of those that the source
        includes the one that the fewest other files include.
        """
        found = defaultdict(set)
        sources = [x for x in self.texts if x.startswith("csrc/")]
        included = Counter(header for x in sources for header in self._headers(x))
        for path in set(sources) - {x for files in self.operators.values() for x in files}:
            if path.endswith((".cpp", ".cu")):
                beside = [x for x in included if Path(x).parent == Path(path).parent]
                named = [x for x in beside if f"{Path(path).stem}_".startswith(f"{Path(x).stem}_")]
                others = sorted((included[x], x) for x in self._headers(path) if included[x] > 1)
                for header in named or [x for _, x in others[:1]] or included:
                    found[header].add(path)
        return found

    def whole(self, module: str) -> set[str]:
        """Return the files of a module: of a package all."""
        path = self.modules[module]
        folder = path.removesuffix("__init__.py")
        return {x for x in self.modules.values() if x.startswith(folder)} if path != folder else {path}

    def defining(self, module: str, name: str, seen: frozenset[str] = frozenset()) -> set[str]:
        """Return the files that define a name which a module has, and the packages' files that show it, if any do."""
        path = self.modules[module]
        tree = _tree(self.texts[path])
        if name in _defined(tree):
            return {path} if not path.endswith("/__init__.py") else self.whole(module)
        for node in tree.body:
            if isinstance(node, ast.ImportFrom):
                base = _base(node, module, path)
                for alias in node.names:
                    if (alias.asname or alias.name) == name and f"{base}.{alias.name}" in self.modules:
                        return {path, self.modules[f"{base}.{alias.name}"]}
                    if base in self.modules and base not in seen and (alias.asname or alias.name) == name:
                        return {path, *self.defining(base, alias.name, seen | {module})}
                    if alias.name == "*" and base in self.modules and name in _defined(self._tree_of(base)):
                        return {path, self.modules[base]}
        return set()

    def _tree_of(self, module: str) -> ast.Module:
        return _tree(self.texts[self.modules[module]])


class _Names(ast.NodeVisitor):
    """The files that the names in a Python file lead to."""

    def __init__(self, reach: Reach, path: str) -> None:
        self.reach, self.path, self.module = reach, path, _module(path) or ""
        self.found: set[str] = set()
        self.aliases: dict[str, str] = {}  # names that stand for a module
        tree = _tree(reach.texts[path])
        self._enter(tree)
        self.found.discard(path)

    def _enter(self, tree: ast.AST) -> None:
        """Visit a program: its imports first, as a function may stand above them."""
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    self._import(alias.name, alias.asname)
            elif isinstance(node, ast.ImportFrom):
                self._import_from(node)
        self.visit(tree)

    def _import(self, name: str, asname: str | None) -> None:
        if name in self.reach.modules:
            self.found.add(self.reach.modules[name])
        first = name.partition(".")[0]
        if name in self.reach.modules or first in self.reach.modules:
            self.aliases[asname or first] = name if asname else first

    def _import_from(self, node: ast.ImportFrom) -> None:
        base = _base(node, self.module, self.path)
        for alias in node.names:
            if (module := f"{base}.{alias.name}") in self.reach.modules:
                self.aliases[alias.asname or alias.name] = module
                self.found.add(self.reach.modules[module])
            elif base in self.reach.modules and alias.name != "*":
                self.found |= self.reach.defining(base, alias.name) or self.reach.whole(base)

    def _follow(self, module: str, names: list[str]) -> bool:
        """Follow names from a module to the file that defines the first that is no module. Say if there is one."""
        while names and f"{module}.{names[0]}" in self.reach.modules:
            module = f"{module}.{names.pop(0)}"
        found = self.reach.defining(module, names[0]) if names else set()
        self.found |= found | {self.reach.modules[module]}
        return bool(found) or not names or names[0].startswith("__")

    def visit_Attribute(self, node: ast.Attribute) -> None:
        names, below = [node.attr], node.value
        while isinstance(below, ast.Attribute):
            names.insert(0, below.attr)
            below = below.value
        if not isinstance(below, ast.Name):
            self.visit(below)
        elif (module := self.aliases.get(below.id)) in self.reach.modules:
            if not self._follow(module, names):
                self.found |= self.reach.whole(module)
        if "ops.torchsparse_rec" in self.reach.texts[self.path]:
            self.found |= self.reach.operators.get(node.attr, set())

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load) and (module := self.aliases.get(node.id)) in self.reach.modules:
            self.found |= self.reach.whole(module)

    def visit_Call(self, node: ast.Call) -> None:
        # The fixture ``benchmarks`` imports a module of the folder.
        if isinstance(node.func, ast.Name) and node.func.id == "benchmarks":
            names = [f"benchmarks.{x.value}" for x in node.args if isinstance(x, ast.Constant)]
            self.found |= {self.reach.modules[x] for x in names if x in self.reach.modules}
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if not (isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)):  # a docstring
            self.generic_visit(node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        self._string("".join(x.value if isinstance(x, ast.Constant) else "0" for x in node.values))
        for value in node.values:
            if isinstance(value, ast.FormattedValue):
                self.visit(value.value)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str):
            self._string(node.value)

    def _string(self, text: str) -> None:
        if not self.path.startswith(("tests/", "benchmarks/", "torchsparse_rec/ops/")):
            return  # what a message or a comment of the library says, it does not use
        self.found |= self.reach.operators.get(text.removeprefix("torchsparse_rec::"), set())
        for word in _PACKAGES.findall(text):
            self._follow(word.partition(".")[0], word.split(".")[1:])
        for word in text.split():
            self.found |= self.reach.texts.keys() & {word, f"{Path(self.path).parent}/{word}"}
            if word.endswith("*.py"):
                self.found |= {*fnmatch.filter(self.reach.texts, f"{Path(self.path).parent}/{word}")}
        if "import " in text and "\n" in text:
            try:
                program = _tree(textwrap.dedent(text))
            except SyntaxError:
                return
            self._enter(program)


@cache
def _tree(text: str) -> ast.Module:
    return ast.parse(text)


@cache
def _defined(tree: ast.Module) -> set[str]:
    """Return the names that a file defines itself."""
    return set(_names_defined(tree.body))


def _names_defined(body: list[ast.stmt]) -> Iterator[str]:
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (x.id for target in targets for x in ast.walk(target) if isinstance(x, ast.Name))
        elif isinstance(node, (ast.If, ast.Try)):
            yield from _names_defined([*node.body, *node.orelse])


def _module(path: str) -> str | None:
    """Return the name of a Python file's module; tests are imported from their folder."""
    if not path.endswith(".py"):
        return None
    parts = Path(path).with_suffix("").parts
    parts = parts[1:] if parts[0] == "tests" else ("torchsparse_rec", *parts) if parts[0] == "compat" else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _base(node: ast.ImportFrom, module: str, path: str) -> str:
    """Return the module that names are imported from."""
    package = module.split(".") if path.endswith("__init__.py") else module.split(".")[:-1]
    above = package[: len(package) - node.level + 1] if node.level else []
    return ".".join([*above, *([node.module] if node.module else [])])
