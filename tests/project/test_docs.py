"""The documents tell the truth: examples print what they say, and what they name exists."""

import ast
import contextlib
import doctest
import importlib
import importlib.util
import inspect
import io
import pkgutil
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

import torchsparse_rec
import torchsparse_rec.data
import torchsparse_rec.distributed

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
# Their examples run in tests/keras, in a process whose Keras is on torch.
OF_KERAS = (ROOT / "docs/keras.md", "torchsparse_rec.keras")
# How an entry of Args: begins that is a clause about the argument and leaves out what the argument is.
NO_NOUN = re.compile(
    r" {4}[\w*][\w, *]*: (of|that|as|by|to|for|whose|which|what|in|from|with|where|when|is|are|likewise|see|at|on|over|"
    r"if|than|given|made|called|after|before|also|let|default)\b",
    re.IGNORECASE,
)


def name_of(document: Path) -> str:
    """Return a document's name, of those in a folder of docs/ with the folder."""
    return f"{document.parent.name}/{document.name}" if document.parent.parent == ROOT / "docs" else document.name


def examples(document: Path) -> list[tuple[str, str]]:
    """Each ```python block that is followed by a ```text block: the program and its output."""
    blocks = re.findall(r"```python\n((?:(?!```).)*)```\s*```text\n(.*?)```", document.read_text(), flags=re.DOTALL)
    return [(program, output) for program, output in blocks]


def modules() -> list[str]:
    """Return the library's modules, but no program's __main__, which would run, and no compiled library."""
    names = [m.name for m in pkgutil.walk_packages(torchsparse_rec.__path__, "torchsparse_rec.")]
    left_out = ("__main__", "._C", "._C_cuda", *OF_KERAS[1:])
    return ["torchsparse_rec", *(n for n in names if not n.endswith(left_out))]


def test_the_readme_has_an_example():
    assert examples(ROOT / "README.md")


def executed() -> list[Any]:
    """Return the documents whose examples run here; of those that import TensorFlow as tests that need it."""
    marks = [pytest.mark.tensorflow, pytest.mark.filterwarnings("ignore:.layer.add_variable. is deprecated")]
    documents = {x: x.read_text() for x in DOCUMENTS if x not in OF_KERAS}
    first = [pytest.mark.always("what a newcomer types first")]
    return [
        pytest.param(x, marks=first if x.name == "README.md" else marks if "\nimport tensorflow as" in text else [])
        for x, text in documents.items()
    ]


@pytest.mark.parametrize("document", executed(), ids=name_of)
def test_examples_print_what_the_document_says(document, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    module = types.ModuleType("__example__")
    monkeypatch.setitem(sys.modules, "__example__", module)  # where pickle looks for an example's classes
    is_one_program = "Each part continues the one before" in document.read_text()
    for program, expected in examples(document):
        # What a diagnosis measures may be off once on a busy machine.
        for _ in range(2 if document.name == "profiling.md" else 1):
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                scope = vars(module) if is_one_program else {"__name__": "__example__"}
                exec(compile(program, str(document), "exec"), scope)
            if printed.getvalue().strip() == expected.strip():
                break
        assert printed.getvalue().strip() == expected.strip()


@pytest.mark.parametrize("name", modules())
def test_docstring_examples(name):
    module = importlib.import_module(name)
    report = io.StringIO()
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    for case in doctest.DocTestFinder(exclude_empty=True).find(module, name, extraglobs={"torch": torch}):
        runner.run(case, out=report.write)
    assert runner.failures == 0, report.getvalue()


@pytest.mark.parametrize(
    "package",
    [
        torchsparse_rec.ops,
        torchsparse_rec.nn,
        torchsparse_rec.variable,
        torchsparse_rec.optim,
        torchsparse_rec.jagged,
        torchsparse_rec.initializers,
        torchsparse_rec.features,
        torchsparse_rec.checkpoint,
        torchsparse_rec.data,
        torchsparse_rec.profiling,
        torchsparse_rec.distributed,
    ],
    ids=lambda m: m.__name__,
)
def test_every_public_name_has_a_docstring_with_an_example(package):
    public = {n: v for n, v in vars(package).items() if n in getattr(package, "__all__", vars(package))}
    public = {n: v for n, v in public.items() if not n.startswith("_") and callable(v)}
    assert public
    missing = [n for n, v in public.items() if not has_example(v, public) and not issubclass_of_exception(v)]
    assert missing == []


def test_arguments_are_described_by_nouns():
    found = []
    paths = [path for name in ("torchsparse_rec", "compat", "benchmarks") for path in (ROOT / name).rglob("*.py")]
    for path in paths:
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        for node in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds)):
            sections = re.split(r"^(?=\S)", ast.get_docstring(node) or "", flags=re.MULTILINE)
            lines = [line for section in sections if section.startswith("Args:") for line in section.splitlines()]
            found += [f"{path}: {line.strip()}" for line in lines if NO_NOUN.match(line)]
    assert found == []


def has_example(value: object, public: dict[str, object]) -> bool:
    """Its own, or that of the function which makes it and which its first line names."""
    text = inspect.getdoc(value) or ""
    maker = re.match(r"[^\n]*: see :func:`(\w+)(\.\w+)?`\.", text)
    return ">>>" in text or (maker is not None and ">>>" in (public[maker[1]].__doc__ or ""))


def issubclass_of_exception(value: object) -> bool:
    """Exceptions and warnings need no example."""
    return isinstance(value, type) and issubclass(value, BaseException)


def test_the_figures_of_choices_are_rows_of_the_results():
    named = set(re.findall(r"\*(\w+/[\w-]+)\*", (ROOT / "docs/choices.md").read_text()))
    results = (ROOT / "benchmarks/results/README.md").read_text()
    assert named and {row for row in named if f"`{row}`: " not in results} == set()


@pytest.mark.parametrize("document", [*DOCUMENTS, ROOT / "CHANGELOG.md"], ids=name_of)
def test_named_files_commands_and_modules_exist(document):
    text = document.read_text()
    links = {link for link in re.findall(r"\]\(([^)#:]+)\)", text)}
    missing = [link for link in links if not (document.parent / link).exists()]

    quoted = set(re.findall(r"`([^`\n]+)`", text))
    paths = {q for q in quoted if re.fullmatch(r"\.?[\w-]+(/[\w.-]+)*/?\.?\w*", q) and ("/" in q or q.endswith(".md"))}
    made = (ROOT / ".gitignore").read_text().split()  # by a build or a test, perhaps not yet
    missing += [path for path in paths if f"/{path}" not in made and not (ROOT / path).exists()]

    makefiles = "".join(path.read_text() for path in (ROOT / "Makefile", *(ROOT / ".ci").glob("*.mk")))
    targets = set(re.findall(r"^([a-z0-9-]+)(?= .*:|:)", makefiles, flags=re.MULTILINE))
    missing += [
        f"make {name}" for name in re.findall(r"(?:^|`)make ([a-z0-9-]+)", text, re.MULTILINE) if name not in targets
    ]

    for name in re.findall(r"python -m ([\w.]+)", text):
        here = ROOT / name.replace(".", "/")
        exists = here.is_dir() or here.with_suffix(".py").exists() or importlib.util.find_spec(name)
        missing += [] if exists else [f"python -m {name}"]
    assert missing == []
