"""docs/operators.md is what docs/_operators.py writes, and what that reads in docstrings is what they mean."""

from types import ModuleType

import pytest
from project.scripts import loaded


@pytest.fixture(scope="module")
def operators() -> ModuleType:
    return loaded("docs/_operators.py")


def test_the_page_is_what_the_program_writes(operators: ModuleType) -> None:
    assert operators.page() == operators.PAGE.read_text(), "`make docs` writes docs/operators.md"


def test_a_read_back_in_other_words_is_refused(operators: ModuleType) -> None:
    with pytest.raises(ValueError, match='name: its docstring should say "On CUDA <what> is read back"'):
        operators.own_read_back("name", "Keep. Something is read back.")
