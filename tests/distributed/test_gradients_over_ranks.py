"""Gradients of parts of tables: torch's functions that know one rank raise, and ours see all."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch
from distributed.cases_of_gradients import CASES, DIM, ROWS, drawn, part_of, run_case
from torch import Tensor
from torch.nn import Parameter

from torchsparse_rec import nn, optim
from torchsparse_rec.distributed.ddp import leave_out_of_ddp
from torchsparse_rec.distributed.losses import global_mean
from torchsparse_rec.tables.part import Part, PartGradient
from torchsparse_rec.tables.stale import set_part
from torchsparse_rec.tables.table import table_of


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("device", ["cpu"], indirect=True)
def test_two_ranks(two, name: str) -> None:
    two.run(run_case, name)


# ---- What raises, on every rank alike --------------------------------------------------------------------------------


def parameter_with(layout: str) -> Parameter:
    """Return a part with a gradient that two backwards have added up, or with none."""
    table = nn.Embedding(ROWS, DIM, grad_mode="sparse" if layout == "coo" else "dense")
    weight = table._parameters["weight"]
    set_part(weight, Part(None, False, "items"))
    for _ in range(2 if layout != "none" else 0):
        table(torch.tensor([1, 2])).sum().backward()
    return weight


def scaled(call: str, optimizer: Callable) -> Callable[[Parameter], None]:
    """Return a function that calls a method of torch's GradScaler for an optimizer of a parameter."""

    def run(parameter: Parameter) -> None:
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(torch.ones(()))
        getattr(scaler, call)(optimizer([parameter]))

    return run


def adam_fused(parameters: list[Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, fused=True)


OURS = "torchsparse_rec.optim.clip_grad_norm_"
SHARDED = "torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler"
REFUSED: dict[str, tuple[str, Callable[[Parameter], object]]] = {
    "clip": (OURS, lambda p: torch.nn.utils.clip_grad_norm_([p], 1.0)),
    "clip one by inf": (OURS, lambda p: torch.nn.utils.clip_grad_norm_(p, float("inf"))),
    "clip without foreach": (OURS, lambda p: torch.nn.utils.clip_grad_norm_([p], 1.0, foreach=False)),
    "clip a module": (OURS, lambda p: torch.nn.utils.clip_grad_norm_(torch.nn.ParameterList([p]).parameters(), 1.0)),
    "unscale ours": (SHARDED, scaled("unscale_", optim.Adam)),
    "unscale torch's": (SHARDED, scaled("unscale_", torch.optim.SGD)),
    "step ours": (SHARDED, scaled("step", optim.SGD)),
    "step torch's": (SHARDED, scaled("step", torch.optim.Adagrad)),
    "step torch's fused": (SHARDED, scaled("step", adam_fused)),
    "LBFGS": ("torch.optim.LBFGS", lambda p: torch.optim.LBFGS([p]).step(lambda: p.sum())),
    "Adafactor": ("torch.optim.Adafactor", lambda p: torch.optim.Adafactor([p]).step()),
    "Muon": ("torch.optim.Muon", lambda p: torch.optim.Muon([p]).step()),
}


@pytest.mark.parametrize("layout", ["strided", "coo", "none"])
@pytest.mark.parametrize("how", REFUSED)
def test_what_knows_one_rank_raises(how: str, layout: str) -> None:
    text, run = REFUSED[how]
    parameter = parameter_with(layout)
    with pytest.raises(RuntimeError, match=f"table 'items' is split over ranks.*{text}"):
        run(parameter)


@pytest.mark.parametrize("how", REFUSED)
def test_it_does_not_where_every_rank_has_the_whole_table(how: str) -> None:
    parameter = parameter_with("strided")
    replicated = Parameter(parameter.detach())
    set_part(replicated, Part(None, True, "items"))
    replicated.grad = parameter.grad.clone()
    REFUSED[how][1](replicated)


NORMS: dict[str, Callable[[Tensor], object]] = {
    "list": lambda grad: torch.nn.utils.get_total_norm([grad]),
    "alone": lambda grad: torch.nn.utils.get_total_norm(grad),
    "foreach": lambda grad: torch.nn.utils.get_total_norm([grad], foreach=True),
    "single": lambda grad: torch.nn.utils.get_total_norm([grad], foreach=False),
    "beside another": lambda grad: torch.nn.utils.get_total_norm([torch.ones(2), grad]),
}
BEFORE: dict[str, Callable[[Parameter], object]] = {
    "nothing": lambda p: None,
    "a backward": lambda p: (p * 2).sum().backward(),
    "another read": lambda p: p.grad + 1,
    "writing in place": lambda p: p.grad.mul_(2),
    "writing": lambda p: setattr(p, "grad", p.grad * 2),
    "zeros": lambda p: optim.SGD([p], lr=0.1).zero_grad(set_to_none=False),
    "a step": lambda p: optim.Adam([p]).step(),
    "a step of torch's": lambda p: torch.optim.Adam([p], foreach=True).step(),
    "our clipping by value": lambda p: optim.clip_grad_value_([p], 1.0),
    "detach_": lambda p: p.grad.detach_(),
}


@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("how", NORMS)
def test_the_norm_of_one_ranks_gradient_raises(how: str, before: str) -> None:
    parameter = parameter_with("strided")
    BEFORE[before](parameter)
    with pytest.raises(RuntimeError, match=f"a gradient is of a table that is split over ranks.*{OURS}"):
        NORMS[how](parameter.grad)


@pytest.mark.parametrize("how", NORMS)
def test_the_norm_of_one_ranks_coo_gradient_raises(how: str) -> None:
    parameter = parameter_with("coo")
    with pytest.raises(RuntimeError, match=f"a gradient is of a table that is split over ranks.*{OURS}"):
        NORMS[how](parameter.grad)


def test_scaling_by_a_given_norm_does_not_raise() -> None:
    parameter = parameter_with("strided")
    torch.nn.utils.clip_grads_with_norm_([parameter], 1.0, torch.tensor(4.0))
    assert parameter.grad.max().item() == pytest.approx(0.5)


# ---- Everything else finds gradients as ever -------------------------------------------------------------------------


class Another(Tensor):
    """A subclass of Tensor that leaves everything to torch."""


def test_a_gradient_is_a_tensor_like_others() -> None:
    parameter = parameter_with("strided")
    grad = parameter.grad
    assert type(grad) is PartGradient and grad is parameter.grad
    (parameter * 2).sum().backward()
    assert parameter.grad is grad and grad[0, 0] == 2  # added up in place
    results = [
        grad + 1,
        1 - grad,
        grad[0],
        grad.clone(),
        grad.to_sparse(),
        torch.stack([grad]),
        grad.detach(),
        grad.data,
    ]
    assert {type(result) for result in results} == {Tensor}
    other = torch.ones(ROWS, DIM).as_subclass(Another)
    assert type(grad + other) is type(other + grad) is Another
    assert torch.equal(parameter.detach() + grad, torch.add(parameter, grad)) and torch.equal(
        grad + parameter, grad + parameter
    )
    assert torch.equal(torch.from_numpy(grad.numpy()), grad)


def test_copies_and_files_of_a_gradient_are_plain() -> None:
    grad = parameter_with("strided").grad
    file = io.BytesIO()
    torch.save({"grad": grad}, file)
    file.seek(0)
    both = copy.deepcopy([grad, grad])
    assert both[0] is both[1] and both[0].data_ptr() != grad.data_ptr()
    for other in (both[0], copy.copy(grad), pickle.loads(pickle.dumps(grad)), torch.load(file)["grad"]):
        assert type(other) is Tensor and torch.equal(other, grad)


def test_stale_rows_are_brought_up_to_date_beside_a_gradient() -> None:
    table = nn.Embedding(ROWS, DIM, grad_mode="sparse")
    parameter = table._parameters["weight"]
    set_part(parameter, Part(None, False, "items"))
    plain = torch.nn.Embedding(ROWS, DIM)
    plain.weight.data.copy_(parameter)
    sides = [(table, optim.Adam(table.parameters(), lr=0.1)), (plain, torch.optim.Adam(plain.parameters(), lr=0.1))]
    for ids in ([1, 2], [3], [4]):
        for side, optimizer in sides:
            optimizer.zero_grad()
            side(torch.tensor(ids)).square().sum().backward()
            optimizer.step()
    parameter.grad = torch.zeros(ROWS, DIM)
    torch.testing.assert_close(torch.add(parameter.grad, parameter), plain.weight)
    optim.Adam([parameter]).step()  # takes the table over, flushed: its class is still that of a part
    with pytest.raises(RuntimeError, match="split over ranks"):
        torch.nn.utils.clip_grad_norm_([parameter], 1.0)


@pytest.mark.parametrize("name", ["SGD", "Adagrad", "Adam", "AdamW"])
@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}, {}], ids=str)
def test_optimizers_of_torch_step_parts(name: str, options: dict) -> None:
    part, plain = part_of(drawn(0, ROWS, DIM), 0), Parameter(drawn(0, ROWS, DIM)[::2].clone())
    for parameter in (part, plain):
        optimizer = getattr(torch.optim, name)([parameter], lr=0.1, **options)
        for step in range(3):
            optimizer.zero_grad(set_to_none=step == 1)
            (parameter * drawn(step, *parameter.shape)).sum().backward()
            parameter.grad += 1
            optimizer.step()
    assert torch.equal(part, plain)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo's
def test_dense_layers_are_compiled_beside_a_part() -> None:
    layer = torch.compile(torch.nn.Linear(DIM, 1), backend="aot_eager", fullgraph=True)
    table = nn.Embedding(ROWS, DIM, grad_mode="dense")
    set_part(table._parameters["weight"], Part(None, False, "items"))
    for _ in range(2):
        layer(table(torch.tensor([1]))).sum().backward()
        assert table.weight.grad[1].any()


# ---- Errors ----------------------------------------------------------------------------------------------------------


def test_a_parameter_of_another_class_cannot_be_split() -> None:
    class Mine(Parameter):
        pass

    with pytest.raises(TypeError, match="table 'items'.* must be a torch.nn.Parameter, got Mine"):
        set_part(Mine(torch.zeros(2, 2)), Part(None, False, "items"))


def test_a_part_is_not_swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    table = nn.Embedding(ROWS, DIM)
    set_part(table._parameters["weight"], Part(None, False, "items"))
    table.double()
    assert table_of(table._parameters["weight"]).part is not None
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        with pytest.raises(RuntimeError, match="Couldn't swap") as error:
            table.float()
        cause = str(error.value.__cause__)
        assert "table 'items' " in cause and "set_swap_module_params_on_conversion(False)" in cause
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def test_a_mean_is_no_loss_of_examples() -> None:
    with pytest.raises(ValueError, match="global_mean: losses must have one element for each example, got a scalar"):
        global_mean(torch.tensor(1.0))


def test_a_module_without_parts_leaves_nothing_out() -> None:
    model = torch.nn.Linear(2, 2)
    leave_out_of_ddp(model)
    assert list(model._ddp_params_and_buffers_to_ignore) == []
