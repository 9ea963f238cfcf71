"""docs/operators.md is what docs/_operators.py writes, and what that reads in docstrings is what they mean."""

from types import ModuleType

import pytest
from project.scripts import loaded


@pytest.fixture(scope="module")
def operators() -> ModuleType:
    return loaded("docs/_operators.py")


def test_the_page_is_what_the_program_writes(operators: ModuleType) -> None:
    assert operators.page() == operators.PAGE.read_text(), "`make docs` writes docs/operators.md"


@pytest.mark.parametrize(
    "doc, said",
    [
        ("Returns:\n    ``[N]``. Differentiable in ``x``, ``y`` and ``z``, twice.", "`x`, `y` and `z`"),
        ("Count. Not differentiable.", ""),
        ("Read rows. It has no gradient.", ""),
        ("Sum the rows.", None),
    ],
)
def test_gradients_in_docstrings(operators: ModuleType, doc: str, said: str | None) -> None:
    assert operators.differentiable_in(doc) == said


@pytest.mark.parametrize(
    "doc, said",
    [
        ("Keep.\n\nOn CUDA the number of kept\nentries is read back, so it waits.", ("the number of kept entries", "")),
        (
            "Args:\n    n: how many; default: the last offset, which on\n        CUDA is read back.",
            ("the last offset", "with `n`"),
        ),
        ("Sum the rows.", None),
    ],
)
def test_read_backs_in_docstrings(operators: ModuleType, doc: str, said: tuple[str, str] | None) -> None:
    assert operators.own_read_back("name", doc) == said


def test_a_read_back_in_other_words_is_refused(operators: ModuleType) -> None:
    with pytest.raises(ValueError, match='name: its docstring should say "On CUDA <what> is read back"'):
        operators.own_read_back("name", "Keep. Something is read back.")


def test_cells_are_one_line_of_markdown(operators: ModuleType) -> None:
    assert (
        operators.summary("Sum ``a | b`` of\n:func:`~.x.unique`. Not this.\n\nNor this.")
        == "Sum `a \\| b` of `x.unique`"
    )
    assert operators.source("Sum.\n\nSource:\n    ``tf.sum``,\n    with one.\n\nMore.") == "`tf.sum`, with one"
