"""What a step keeps for the next one: a module or table that changes between two steps has its effect."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from nn.changing import DTYPES, KINDS, MODES, OPTIMIZERS, Change, Side, Steps, check
from pairs import in_pairs

from torchsparse_rec import nn, optim

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*every step updates all rows"),  # optimizers warn of that
]


# ---- The module ------------------------------------------------------------------------------------------------------


def attribute(name: str, value: Any) -> Change:
    def change(side: Side) -> Steps:
        yield
        before = getattr(side.table, name)
        setattr(side.table, name, value)
        yield
        setattr(side.table, name, before)

    return change


def frozen(side: Side) -> Steps:
    yield
    side.optimizer.zero_grad()
    side.stored.requires_grad_(False)
    if side.kind != "collection":
        side.backward = lambda loss: None
    yield
    side.stored.requires_grad = True
    side.backward = lambda loss: loss.backward()


def evaluated(side: Side) -> Steps:
    """Look up in eval(), with gradients, and step."""
    yield
    side.module.eval()
    yield
    side.module.train()


def evaluated_alone(side: Side) -> Steps:
    """Look up in eval() between steps."""
    yield
    side.module.eval()
    with torch.no_grad():
        side.see(side.look_up(side.ids(50)))
    side.see(side.look_up(side.ids(51)))
    side.module.train()
    yield


def forward_hook(side: Side) -> Steps:
    yield
    handle = side.table.register_forward_hook(lambda module, args, result: result * 2)
    if side.kind == "collection" and side.is_ours:  # whose tables are not called
        handle.remove()
        side.score = lambda result: torch.cat([result[:, : side.dim] * 2, result[:, side.dim :]], 1)
    yield
    handle.remove()
    side.score = lambda result: result


def forward_pre_hook(side: Side) -> Steps:
    yield

    def shift(module: Any, args: tuple) -> Any:
        return {x: (ids + 7) % 40 for x, ids in args[0].items()} if isinstance(args[0], dict) else (args[0] + 7) % 40

    handle = side.module.register_forward_pre_hook(shift)
    yield
    handle.remove()


def full_backward_hook(side: Side) -> Steps:
    yield
    handle = side.module.register_full_backward_pre_hook(
        lambda module, grads: tuple(None if x is None else 2 * x for x in grads)
    )
    yield
    handle.remove()


def hook_of_all_modules(side: Side) -> Steps:
    yield
    hook = torch.nn.modules.module.register_module_forward_hook(
        lambda module, args, result: result * 3 if module is side.module and isinstance(result, torch.Tensor) else None
    )
    yield
    hook.remove()


def called_by_forward(side: Side) -> Steps:
    yield
    side.module.forward = lambda *args: type(side.module).forward(side.module, *args)
    yield
    del side.module.forward


def other_mode(to: str | None) -> Change:
    def change(side: Side) -> Steps:
        yield
        if side.is_ours:
            before, side.module.grad_mode = side.module.grad_mode, to
            if to == "fused" and not side.optimizer.in_backward:
                side.module.grad_mode = before
        yield
        if side.is_ours:
            side.module.grad_mode = before

    return change


MODULE: dict[str, Change] = {
    "max_norm": attribute("max_norm", 0.5),
    "padding_idx": attribute("padding_idx", 5),
    "mode=mean": attribute("mode", "mean"),
    "mode=max": attribute("mode", "max"),
    "scale_grad_by_freq": attribute("scale_grad_by_freq", True),
    **{f"grad_mode={x}": other_mode(x) for x in (None, *MODES)},
    **{x.__name__: x for x in (frozen, evaluated, evaluated_alone, forward_hook, forward_pre_hook)},
    **{x.__name__: x for x in (full_backward_hook, hook_of_all_modules, called_by_forward)},
}


OF_ONE = ("max_norm", "padding_idx", "scale_grad_by_freq", "full_backward_hook", "hook_of_all_modules")


def _has_attribute(change: str, mode: str, kind: str, of: str, dtype: torch.dtype) -> bool:
    if change.startswith("mode="):
        return kind == "bags"
    return kind != "collection" or change not in OF_ONE


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@in_pairs(_has_attribute, change=MODULE, mode=MODES, kind=KINDS, of=OPTIMIZERS, dtype=DTYPES)
def test_a_module_changes(change: str, mode: str, kind: str, of: str, dtype: torch.dtype) -> None:
    check(MODULE[change], kind, mode, of, dtype)


# ---- The table's memory ----------------------------------------------------------------------------------------------


def other_values(side: Side) -> torch.Tensor:
    """Return values for the first table."""
    return torch.linspace(-1, 1, side.rows * side.dim, dtype=side.dtype).view(side.rows, side.dim)


def data_set(side: Side) -> Steps:
    yield
    side.stored.data = other_values(side)
    yield
    side.table.weight.data = side.table.weight.data.clone()


def written(side: Side) -> Steps:
    yield
    with torch.no_grad():
        side.table.weight[3:9] = 0.25
    yield
    with torch.no_grad():
        side.stored.copy_(other_values(side))


def written_by_data(side: Side) -> Steps:
    yield
    side.table.weight.data[3:9] = 0.25
    yield
    side.table.weight.data.mul_(0.5)


def strided(side: Side) -> Steps:
    """Lay rows out with a stride, as a column slice of a wider table."""
    yield
    wide = torch.zeros(side.rows, 2 * side.dim, dtype=side.dtype)
    wide[:, : side.dim] = side.table.weight.detach()
    side.table.weight.data = wide[:, : side.dim]
    yield


def renew(side: Side, parameter: torch.nn.Parameter) -> None:
    """Put a parameter into the group in place of the table's, with its state."""
    old = next(x for x in side.group["params"] if x.shape == parameter.shape)
    side.group["params"] = [parameter if x is old else x for x in side.group["params"]]
    if old in side.optimizer.state:
        side.optimizer.state[parameter] = side.optimizer.state.pop(old)


def parameter_set(side: Side) -> Steps:
    yield
    side.table.weight = torch.nn.Parameter(other_values(side))
    renew(side, side.stored)
    yield


def parameter_in_dict(side: Side) -> Steps:
    yield
    side.table._parameters["weight"] = torch.nn.Parameter(other_values(side))
    renew(side, side.stored)
    yield


def optimizer_anew(side: Side) -> Steps:
    """Set a parameter and make an optimizer of it."""
    yield
    side.table.weight = torch.nn.Parameter(other_values(side))
    side.optimizer = side.make_optimizer()
    yield
    side.table._parameters["weight"] = torch.nn.Parameter(other_values(side) / 2)
    side.optimizer = side.make_optimizer()


def swapped(side: Side) -> Steps:
    yield
    torch.utils.swap_tensors(side.table.weight, torch.nn.Parameter(other_values(side)))
    yield


def assigned(side: Side) -> Steps:
    yield
    state = {name: 0.5 * value for name, value in side.module.state_dict().items()}
    side.module.load_state_dict(state, assign=True)
    side.optimizer = side.make_optimizer()
    yield


def loaded(side: Side) -> Steps:
    yield
    side.module.load_state_dict({name: 0.5 * value for name, value in side.module.state_dict().items()})
    yield


def shared(side: Side) -> Steps:
    yield
    side.optimizer.zero_grad()
    side.module.share_memory()
    yield


def other_dtype(side: Side) -> Steps:
    yield
    side.module.to(torch.float64 if side.dtype is torch.float32 else torch.float32)
    if side.of != "SGD":
        side.optimizer = side.make_optimizer()
    yield
    side.module.to(side.dtype)
    if side.of != "SGD":
        side.optimizer = side.make_optimizer()


def taken_over(side: Side) -> Steps:
    """Give the second module the parameter of the first one."""
    yield
    table = side.stored
    side.module = side.make()
    side.table.weight = table
    side.optimizer = side.make_optimizer()
    if side.kind == "collection":
        with torch.no_grad():
            side.module.embedding_bags["b"].weight.fill_(0.5)
    yield


MEMORY: dict[str, Change] = {
    x.__name__: x
    for x in (data_set, written, written_by_data, strided, parameter_set, parameter_in_dict, optimizer_anew, swapped)
    + (assigned, loaded, shared, other_dtype, taken_over)
}


@in_pairs(change=MEMORY, mode=MODES, kind=KINDS, of=OPTIMIZERS, dtype=DTYPES)
def test_a_tables_memory_changes(change: str, mode: str, kind: str, of: str, dtype: torch.dtype) -> None:
    check(MEMORY[change], kind, mode, of, dtype, rounded=change == "other_dtype")


@pytest.mark.parametrize("mode", ["sparse", "fused"])
@pytest.mark.parametrize("of", ["SGD", "Adam"])
def test_lookups_of_a_table_that_is_frozen_later_need_no_gradient(mode: str, of: str) -> None:
    for kind in ("rows", "collection"):
        module = made(kind, mode)
        optimizer = getattr(optim, of)(module.parameters(), lr=0.1, in_backward=mode == "fused")
        for _ in range(3):
            result = looked_up(module)
            assert result.requires_grad
            result.sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        module.requires_grad_(False)
        assert not looked_up(module).requires_grad


def made(kind: str, mode: str) -> torch.nn.Module:
    """Make a table of ten rows, by itself or in a collection."""
    if kind == "rows":
        return nn.Embedding(10, 4, grad_mode=mode)
    config = nn.EmbeddingBagConfig(name="t", num_embeddings=10, embedding_dim=4, feature_names=["f"])
    return nn.EmbeddingBagCollection(tables=[config], grad_mode=mode)


def looked_up(module: torch.nn.Module) -> torch.Tensor:
    """Look up two rows."""
    ids = torch.tensor([1, 2])
    return module(ids) if isinstance(module, nn.Embedding) else module({"f": (ids, torch.tensor([0, 1, 2]))}).values()
