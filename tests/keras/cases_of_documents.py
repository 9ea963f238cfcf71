"""Examples of the docstrings and of docs/keras.md: they print what they say. Run by test_keras.py."""

import contextlib
import doctest
import importlib
import io
import re
from pathlib import Path

import pytest
import torch

import torchsparse_rec.keras as ours

ROOT = Path(__file__).resolve().parents[2]
MODULES = sorted(path.stem for path in Path(ours.__file__).parent.glob("*.py") if path.stem != "__init__")


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name):
    module, report = importlib.import_module(f"torchsparse_rec.keras.{name}"), io.StringIO()
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    for case in doctest.DocTestFinder(exclude_empty=True).find(module, name, extraglobs={"torch": torch}):
        runner.run(case, out=report.write)
    assert runner.failures == 0, report.getvalue()


@pytest.mark.parametrize("package", [ours, ours.optimizers], ids=lambda module: module.__name__)
def test_every_public_name_has_a_docstring_with_an_example(package):
    public = {name: x for name, x in vars(package).items() if name in getattr(package, "__all__", vars(package))}
    public = {name: x for name, x in public.items() if not name.startswith("_") and callable(x)}
    assert public.keys() - {"check_backend"}
    assert [name for name, x in public.items() if ">>>" not in (x.__doc__ or "") and name != "check_backend"] == []


def test_the_page_prints_what_it_says():
    page = (ROOT / "docs/keras.md").read_text()
    examples = re.findall(r"```python\n(.*?)```\s*```text\n(.*?)```", page, flags=re.DOTALL)
    assert examples
    for program, expected in examples:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(program, "docs/keras.md", "exec"), {"__name__": "__example__"})
        assert printed.getvalue().strip() == expected.strip()
