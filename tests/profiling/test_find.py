"""The models, optimizers and other state that a step refers to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchsparse_rec.profiling._find import find

MODEL = nn.Linear(2, 1)
OPTIMIZER = torch.optim.SGD(MODEL.parameters(), lr=0.1)


def global_step(batch: Tensor) -> None:
    OPTIMIZER.zero_grad()
    MODEL(batch).sum().backward()
    OPTIMIZER.step()


class CallableStep:
    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.parts = {"model": model, "optimizer": [optimizer]}

    def __call__(self, batch: Tensor) -> None:
        self.parts["model"](batch)


def test_models_and_optimizers_are_found():
    import functools

    model, scaler = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)), torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inner, schedule = model[0], torch.optim.lr_scheduler.ConstantLR(optimizer)

    def helper() -> None:
        optimizer.step()
        schedule.step()

    def closure(batch: Tensor) -> None:
        inner(model(batch)), helper(), scaler

    def with_arguments(batch: Tensor, model: nn.Module, opt: Any = optimizer) -> None:
        return None

    for step in (
        closure,
        CallableStep(model, optimizer),
        CallableStep(model, optimizer).__call__,
        functools.partial(with_arguments, model=model),
    ):
        found = find(step, None, None)
        assert found.models == [model]
        assert found.optimizers == [optimizer]
    assert find(closure, None, None).others in ([schedule, scaler], [scaler, schedule])
    assert find(global_step, None, None).models == [MODEL]
    assert find(global_step, None, None).optimizers == [OPTIMIZER]
    found = find(closure, MODEL, OPTIMIZER)
    assert found.analysed == [MODEL] and set(found.models) == {MODEL, model}
    assert set(found.optimizers) == {OPTIMIZER, optimizer}


def step_with_a_closure(batch: Tensor) -> None:
    def closure() -> Tensor:
        OPTIMIZER.zero_grad()
        loss = MODEL(batch).sum()
        loss.backward()
        return loss

    OPTIMIZER.step(closure)


def step_with_a_generator(batch: Tensor) -> None:
    sum(MODEL(part).sum() for part in batch.split(2)).backward()
    OPTIMIZER.step()


def step_with_a_nested_lambda(batch: Tensor) -> None:
    (lambda: [MODEL(part) for part in batch])()


@pytest.mark.parametrize("step", [step_with_a_closure, step_with_a_generator, step_with_a_nested_lambda])
def test_code_within_the_steps_code_is_searched(step):
    found = find(step, None, None)
    assert (found.models, found.optimizers) == ([MODEL], [OPTIMIZER])


def test_an_optimizer_that_no_name_leads_to_is_found():
    model = nn.Linear(2, 1)
    hidden = [torch.optim.Adam(model.parameters())]
    assert find(lambda batch: model(batch), None, None).optimizers == hidden


def test_optimizers_that_were_refused_are_passed_over():
    model = nn.Linear(2, 1)
    with pytest.raises(ValueError, match="learning rate") as refused:  # the traceback holds half of an optimizer
        torch.optim.SGD(model.parameters(), lr=-1.0)
    half = refused.traceback[-1].frame.f_locals["self"]
    assert find(lambda batch: model(batch), None, None).optimizers == []
    assert find(lambda batch: (model(batch), half), None, None).optimizers == []
