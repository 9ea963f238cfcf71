"""Steps and lookups that depend on the number of the step refuse a CUDA graph: a replay would take it again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from samples.row_optimizer import states_for
from samples.sample import Random

from torchsparse_rec import nn, optim
from torchsparse_rec.ops.row_optimizer import row_optimizer_update_
from torchsparse_rec.ops.row_optimizer_rules import HYPERPARAMETERS, OPTIMIZER_RULES, counts_steps
from torchsparse_rec.tables.clock import Clock
from torchsparse_rec.tables.table import table_of

IDS = [torch.tensor([1, 2, 2]), torch.tensor([5, 1, 0]), torch.tensor([7, 7, 3])]
REFUSED = "a CUDA graph must not capture a step or a lookup of a table that depends on the number of the step"
# What refuses, and what need not.
OPTIMIZERS: dict[str, tuple[Any, bool]] = {
    "adam": (lambda p, **how: optim.Adam(p, lr=0.1, **how), True),
    "lazy adam": (lambda p, **how: optim.Adam(p, lr=0.1, lazy=True, **how), True),
    "momentum": (lambda p, **how: optim.SGD(p, lr=0.1, momentum=0.9, **how), True),
    "decay": (lambda p, **how: optim.SGD(p, lr=0.1, weight_decay=0.1, **how), True),
    "lr_decay": (lambda p, **how: optim.Adagrad(p, lr=0.1, lr_decay=0.1, **how), True),
    "rounding": (lambda p, **how: optim.SGD(p, lr=0.1, stochastic_rounding=True, **how), True),
    "sgd": (lambda p, **how: optim.SGD(p, lr=0.1, **how), False),
    "adagrad": (lambda p, **how: optim.Adagrad(p, lr=0.1, **how), False),
    "rowwise_adagrad": (lambda p, **how: optim.RowWiseAdagrad(p, lr=0.1, **how), False),
    "lazy rmsprop": (lambda p, **how: optim.RMSprop(p, lr=0.1, lazy=True, **how), False),
}

SPECIAL = {
    "lr_power": -0.5,
    "nesterov": 0.0,
    **dict.fromkeys(("decoupled", "tensorflow_eps", "decay_seen", "centered"), 1.0),
}


@pytest.mark.parametrize("rule", OPTIMIZER_RULES)
def test_which_rules_depend_on_the_number(rule: str) -> None:
    """Compare the first step with the second, and the third with the fourth, of the same rows."""
    number, names = OPTIMIZER_RULES[rule], HYPERPARAMETERS[rule]
    for zero in (None, *(name for name in names if name not in ("lr", "lr_power"))):
        h = [0.0 if name == zero else SPECIAL.get(name, 0.5) for name in names]
        made = [_stepped(number, h, step) for step in range(1, 5)]
        differ = not all(_same(made[k], made[k + 1]) for k in (0, 2))
        # With a hyperparameter of 0 some rules lose the number: they may be refused all the same.
        counts = counts_steps(number, h)
        assert differ == counts if zero in (None, "momentum", "lr_decay") else differ <= counts


def _stepped(rule: int, h: list[float], step: int) -> list[torch.Tensor]:
    weight, states = torch.linspace(-1, 1, 6).view(2, 3), states_for(Random(0), rule, h, 2, 3, torch.float32)
    how: dict[str, Any] = {"rule": rule, "hyperparameters": h, "step": step}
    row_optimizer_update_([weight], states, [], None, None, [torch.full((2, 3), 0.5)], **how)
    return [weight, *states]


def _same(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(some, others, strict=True))


def _trained(name: str, mode: str, steps: int = 2) -> tuple[nn.Embedding, Any]:
    dtype = torch.bfloat16 if name == "rounding" else torch.float32
    table = nn.Embedding(20, 3, grad_mode=mode, _weight=torch.linspace(-1, 1, 60).view(20, 3).to(dtype))
    optimizer = OPTIMIZERS[name][0](table.parameters(), in_backward=mode == "fused")
    for ids in IDS[:steps]:
        _step(table, optimizer, ids)
    return table, optimizer


def _step(table: nn.Embedding, optimizer: Any, ids: torch.Tensor) -> None:
    optimizer.zero_grad()
    table(ids).square().sum().backward()
    optimizer.step()


def _capture(table: nn.Embedding, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = table_of(table.stored_weight()).rows
    assert rows is not None
    monkeypatch.setattr(rows.clock, "on_cuda", True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)


@pytest.mark.parametrize("mode", ["fused", "sparse"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps(name: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    table, optimizer = _trained(name, mode)
    _capture(table, monkeypatch)
    if not OPTIMIZERS[name][1]:
        _step(table, optimizer, IDS[2])
        return
    with pytest.raises(RuntimeError, match=REFUSED):
        _step(table, optimizer, IDS[2])
    monkeypatch.undo()
    _step(table, optimizer, IDS[2])  # a refusal changes nothing
    assert torch.equal(table.weight, _trained(name, mode, steps=3)[0].weight)


@pytest.mark.parametrize("mode", ["fused", "sparse"])
def test_a_first_step_is_refused(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse also where steps are alike: a replay would make the states anew."""
    begin = Clock.__init__
    for name in ("adam", "rowwise_adagrad"):
        table, optimizer = _trained(name, mode, steps=0)
        with monkeypatch.context() as patch:
            patch.setattr(Clock, "__init__", lambda self, *args, on_cuda: begin(self, *args, on_cuda=True))
            monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            with pytest.raises(RuntimeError, match="a CUDA graph must not capture"):
                _step(table, optimizer, IDS[0])
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        for ids in IDS:
            _step(table, optimizer, ids)
        assert torch.equal(table.weight, _trained(name, mode, steps=3)[0].weight)


@pytest.mark.parametrize("name", [name for name, (_, refuses) in OPTIMIZERS.items() if refuses])
def test_steps_after_the_lookup(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    table, optimizer = _trained(name, "sparse")
    optimizer.zero_grad()
    table(IDS[2]).square().sum().backward()
    _capture(table, monkeypatch)
    with pytest.raises(RuntimeError, match=REFUSED):
        optimizer.step()


@pytest.mark.parametrize("mode", ["fused", "sparse"])
def test_reads_of_rows_that_are_behind(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    table, optimizer = _trained("adam", mode)
    _capture(table, monkeypatch)
    reads: list[Any] = [lambda: table(IDS[2]), lambda: table.weight, optimizer.state_dict]
    reads.append(lambda: nn.table_cross_entropy(torch.ones(2, 3), table, torch.tensor([1, 2])))
    for read in reads:
        with pytest.raises(RuntimeError, match=REFUSED):
            read()
    monkeypatch.undo()
    wanted, _ = _trained("adam", mode)
    assert torch.equal(table.weight, wanted.weight)  # a refusal changes nothing


def test_operators_of_compiled_graphs_are_left_out_of_cuda_graphs() -> None:
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("torchsparse_rec_nn::")]
    assert len(names) == 6
    for name in names:
        assert torch.Tag.cudagraph_unsafe in getattr(torch.ops.torchsparse_rec_nn, name.split("::")[1]).default.tags
