"""Every client in every mode is right or refused, as docs/clients.md says. Known exceptions are in known.py."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from clients import of_processes, page
from clients.cases import KINDS, LARGE, LR, MODES, Client, Outcome, Results, Side, learned, outcome, train
from clients.known import KNOWN

from torchsparse_rec import nn, optim

WRITTEN = page.PATH.read_text()


def check(name: str, mode: str, found: Outcome) -> None:
    """Fail unless an outcome is right, refused or a known exception, and the page says the same."""
    if (name, mode) in KNOWN:
        assert not found.is_good, f"{name} is {found.word} in {mode}: take it out of tests/clients/known.py"
    else:
        assert found.is_good, f"{name}, {mode}: {found.word}: {found.message}"
    written, is_now = page.read(WRITTEN)[name, mode], page.cell(name, mode, found)
    assert written == is_now, f"docs/clients.md: {name}, {mode}: {written}, but now {is_now}; `make clients` writes it"


def cases() -> list[Any]:
    """Return the clients of one process in each mode, as parameters of a test."""
    result = []
    for client in page.CLIENTS:
        marks: list[Any] = [pytest.mark.full] if client.full or client.needs else []
        absent = [package for package in client.needs if importlib.util.find_spec(package) is None]
        if absent:
            why = f"without {', '.join(absent)}: `make test-full` installs requirements/clients.txt"
            marks.append(pytest.mark.skip(reason=why))
        if client not in of_processes.CLIENTS:
            name = client.name.replace("`", "")
            for mode in MODES:
                # What fused tables refuse, the third mode shows every day.
                more = [pytest.mark.full] if mode == "growing, fused" and not marks else []
                result.append(pytest.param(client, mode, marks=[*marks, *more], id=f"{name}-{mode}"))
    return result


@pytest.mark.parametrize(("client", "mode"), cases())
def test_a_client_is_right_or_refused(client: Client, mode: str, one_thread: None) -> None:
    check(client.name, mode, outcome(client, mode))


def test_clients_of_two_processes_are_right_or_refused() -> None:
    found = of_processes.outcomes()
    assert found.keys() == {(client.name, mode) for client in of_processes.CLIENTS for mode in MODES}
    for (name, mode), one in found.items():
        check(name, mode, one)


def test_the_page_is_what_the_program_writes() -> None:
    assert page.write(page.read(WRITTEN)) == WRITTEN


def test_what_is_known_is_a_cell() -> None:
    assert KNOWN.keys() <= {(client.name, mode) for client in page.CLIENTS for mode in MODES}


# ---- The verdicts ----------------------------------------------------------------------------------------------------


def trained_with(**arguments: Any) -> Callable[[Side], Results]:
    """Return a client that gives our optimizer other arguments than torch's."""

    def run(side: Side) -> Results:
        model = side.model()
        optimizer = optim.Adam(model.parameters(), **{"lr": LR, **arguments}) if side.ours else None
        optimizer = optimizer or side.optimizer(model.parameters())
        train(model, optimizer, side.schedule(optimizer))
        return learned(model)

    return run


def raising(error: Exception) -> Callable[[Side], Results]:
    """Return a client that raises an error with our EmbeddingBag."""

    def run(side: Side) -> Results:
        if side.ours and side.kind == "EmbeddingBag":
            raise error
        return {"x": torch.zeros(1)}

    return run


def verdict(run: Callable[[Side], Results], kinds: tuple[str, ...] = ("EmbeddingBag",)) -> Outcome:
    """Return the verdict on a client in the sparse mode."""
    return outcome(Client("one", run, kinds=kinds), "sparse")


@pytest.mark.parametrize("arguments", [{"lazy": True}, {"lr": 1.003 * LR}], ids=["idle rows stay", "another lr"])
def test_other_numbers_are_wrong(arguments: dict[str, Any]) -> None:
    assert verdict(trained_with(**arguments), KINDS).word == "wrong"


def test_results_of_other_names_or_shapes_are_wrong() -> None:
    assert verdict(lambda side: {str(side.ours): torch.ones(1)}).word == "wrong"
    assert verdict(lambda side: {"x": torch.ones(1 + side.ours)}).word == "wrong"


def ours_without_words(side: Side) -> Results:
    """Raise an error of Python's: the table has no weight."""
    if side.ours:
        del (table := nn.Embedding(3, 2)).weight
        return {"x": table.weight}
    return {}


@pytest.mark.parametrize(
    "run",
    [
        ours_without_words,
        raising(RuntimeError("expected scalar type Float")),
        raising(KeyError("grad_mode='sparse'")),
        raising(RecursionError("grad_mode='sparse'")),
    ],
)
def test_an_error_that_does_not_say_what_is_not_done_is_no_refusal(run: Callable[[Side], Results]) -> None:
    assert verdict(run).word == "unclear"


def test_a_warning_that_is_not_ours_is_no_refusal() -> None:
    def run(side: Side) -> Results:
        if side.ours:
            warnings.warn("deprecated", stacklevel=1)
        return {"x": torch.ones(1) * side.ours}

    assert verdict(run).word == "wrong"


def test_what_only_some_modules_refuse_is_unclear() -> None:
    assert verdict(raising(RuntimeError("grad_mode='sparse': no")), KINDS).word == "unclear"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("in_backward", "chosen"), [(False, "sparse"), (True, "fused")])
def test_the_large_tables_are_those_for_which_auto_chooses_rows(kind: str, in_backward: bool, chosen: str) -> None:
    side = Side(kind, "auto, in_backward" if in_backward else "auto", LARGE)
    model, optimizer, schedule = side.made()
    train(model, optimizer, schedule, steps=2)
    assert f"grad_mode='auto' -> {chosen}" in model.table.explain()
