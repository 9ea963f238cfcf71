"""Clients that use models and optimizers by torch itself in a single process."""

from __future__ import annotations

import copy
import io
import tempfile
from typing import Any

import torch
from clients.cases import DECAY, LR, Client, Model, Results, Side, batches, by_id, learned, loss_of, train, trained
from torch import Tensor
from torch.nn.utils import parametrize, prune
from torch.optim import swa_utils

from torchsparse_rec import optim

IDS = torch.tensor([[0, 3], [9, 20], [30, 31]])


def training(side: Side) -> Results:
    """Train in a loop, and nothing else."""
    return learned(trained(side)[0])


# ---- What reads parameters -------------------------------------------------------------------------------------------


def ema(side: Side) -> Results:
    """Average exponentially after each step, by torch's class in its three ways."""
    model, optimizer, schedule = side.made()
    averages = {
        "each": swa_utils.AveragedModel(model, avg_fn=swa_utils.get_ema_avg_fn(0.8)),
        "all": swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.8)),
        "buffers": swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.8), use_buffers=True),
    }

    def update() -> None:
        for average in averages.values():
            average.update_parameters(model)

    train(model, optimizer, schedule, after_step=update)
    swa_utils.update_bn([IDS], averages["all"])
    results = {f"{name} output": average.eval()(IDS) for name, average in averages.items()}
    for name, average in averages.items():
        results |= learned(average, f"{name}.")
    return results


def ema_by_hand(side: Side) -> Results:
    """Average exponentially by hand over ``parameters()``."""
    model, optimizer, schedule = side.made()
    means = [p.detach().clone() for p in model.parameters()]

    def update() -> None:
        for mean, p in zip(means, model.parameters(), strict=True):
            mean.lerp_(p.detach(), 0.2)

    train(model, optimizer, schedule, after_step=update)
    return {f"by hand {k}": mean for k, mean in enumerate(means)}


def ema_of_states(side: Side) -> Results:
    """Average exponentially over the values of ``state_dict()``, as timm's ``ModelEmaV3`` does."""
    model, optimizer, schedule = side.made()
    average = copy.deepcopy(model)

    @torch.no_grad()
    def update() -> None:
        for mean, x in zip(average.state_dict().values(), model.state_dict().values(), strict=True):
            if mean.is_floating_point():
                mean.lerp_(x, 0.2)
            else:
                mean.copy_(x)

    train(model, optimizer, schedule, after_step=update)
    return learned(average)


def swa(side: Side) -> Results:
    """Average the last steps by torch's SWA, with its schedule."""
    model, optimizer, _ = trained(side, 6)
    average = swa_utils.AveragedModel(model)
    schedule = swa_utils.SWALR(optimizer, swa_lr=LR / 2, anneal_epochs=3)
    train(model, optimizer, schedule, 6, 6, after_step=lambda: average.update_parameters(model))
    return learned(average)


def pruned(side: Side) -> Results:
    """Prune in the middle of training, train on with the mask, then make the pruning permanent."""
    model, optimizer, schedule = trained(side, 6)
    for table in model.tables():
        prune.l1_unstructured(table, "weight", amount=0.3)
    masks = {f"mask {k}": table.weight_mask.clone() for k, table in enumerate(model.tables())}
    train(model, optimizer, schedule, 6, 6)
    for table in model.tables():
        prune.remove(table, "weight")
    return {**learned(model), **masks}


class Twice(torch.nn.Module):
    """A parametrization that doubles a table."""

    def forward(self, x: Tensor) -> Tensor:
        """Return twice the table."""
        return x * 2


def parametrized(side: Side) -> Results:
    """Parametrize in the middle of training, train on through it, then make it permanent."""
    model, optimizer, schedule = trained(side, 6)
    for table in model.tables():
        parametrize.register_parametrization(table, "weight", Twice(), unsafe=True)
    seen = {f"weight {k}": table.weight.detach().clone() for k, table in enumerate(model.tables())}
    train(model, optimizer, schedule, 6, 6)
    for table in model.tables():
        parametrize.remove_parametrizations(table, "weight")
    return {**learned(model), **seen}


def functional(side: Side) -> Results:
    """Train by ``functional_call`` over the model's own parameters, and look up by it after each step."""
    model, optimizer, schedule = side.made()
    results = {}
    for step, (ids, target) in enumerate(batches()):
        optimizer.zero_grad()
        loss_of(torch.func.functional_call(model, dict(model.named_parameters()), (ids,)), target).backward()
        optimizer.step()
        schedule.step()
        kept = {name: p.detach() for name, p in model.named_parameters()}
        results[f"output {step}"] = torch.func.functional_call(model, kept, (IDS,))
    return {**results, **learned(model)}


def gradients(side: Side) -> Results:
    """Compute gradients of a function of the parameters, in the middle of training."""
    model, _, _ = trained(side, 6)
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, parameters, (IDS,)).square().mean()

    return by_id(model, torch.func.grad(loss)(parameters), gradients=True)


def per_sample(side: Side) -> Results:
    """Compute a gradient for each example, by ``vmap`` over ``grad``."""
    model, _, _ = trained(side, 6)
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters: dict[str, Tensor], ids: Tensor) -> Tensor:
        return torch.func.functional_call(model, parameters, (ids[None],)).square().mean()

    return torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, IDS)


def ensemble(side: Side) -> Results:
    """Look up in two models at once, by ``stack_module_state`` and ``vmap``."""
    models = [trained(side, steps)[0] for steps in (4, 6)]
    parameters, buffers = torch.func.stack_module_state(models)
    base = copy.deepcopy(models[0]).to("meta")

    def call(parameters: dict[str, Tensor], buffers: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(base, (parameters, buffers), (IDS,))

    return {"output": torch.func.vmap(call)(parameters, buffers)}


def looked_up_in_vmap(side: Side) -> Results:
    """Call a model within ``vmap`` over its ids."""
    model, _, _ = trained(side)
    with torch.no_grad():
        return {"output": torch.func.vmap(model)(IDS[:, None])}


def copied(side: Side) -> Results:
    """Copy a model in the middle of training, and train both on, each by an optimizer of its own."""
    model, optimizer, schedule = trained(side, 6)
    twin = copy.deepcopy(model)
    its = side.optimizer(twin.parameters())
    its.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for one, step, lr in ((model, optimizer, schedule), (twin, its, side.schedule(its))):
        train(one, step, lr, 6, 3)
    return {**learned(model), **learned(twin, "copy.")}


# ---- Checkpoints -----------------------------------------------------------------------------------------------------


def resumed(side: Side, load: Any, model: Model, optimizer: torch.optim.Optimizer) -> Results:
    """Load into a new model and optimizer, and train them on beside the old ones."""
    fresh = side.model()
    with torch.no_grad():
        for p in fresh.parameters():
            p.zero_()
    its = side.optimizer(fresh.parameters())
    load(fresh, its)
    for one, step in ((model, optimizer), (fresh, its)):
        train(one, step, torch.optim.lr_scheduler.ExponentialLR(step, DECAY), 6, 6)
    return {**learned(model), **learned(fresh, "resumed.")}


def saved(side: Side) -> Results:
    """Save and load by ``torch.save`` of the ``state_dict``s."""
    model, optimizer, _ = trained(side, 6)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    state = torch.load(file, weights_only=True)

    def load(fresh: Model, its: torch.optim.Optimizer) -> None:
        fresh.load_state_dict(state["model"])
        its.load_state_dict(state["optimizer"])

    return resumed(side, load, model, optimizer)


def dcp_saved(side: Side) -> Results:
    """Save and load by torch.distributed.checkpoint, with its ``get_state_dict`` and ``set_state_dict``."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model, optimizer, _ = trained(side, 6)
    with tempfile.TemporaryDirectory() as folder:
        states = get_state_dict(model, optimizer)
        dcp.save({"model": states[0], "optimizer": states[1]}, checkpoint_id=folder)

        def load(fresh: Model, its: torch.optim.Optimizer) -> None:
            of_model, of_optimizer = get_state_dict(fresh, its)
            dcp.load({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=folder)
            set_state_dict(fresh, its, model_state_dict=of_model, optim_state_dict=of_optimizer)

        return resumed(side, load, model, optimizer)


# ---- What is between backward and step -------------------------------------------------------------------------------


def clipped(side: Side) -> Results:
    """Clip by torch's ``clip_grad_norm_``."""
    model, optimizer, schedule = side.made()
    clip = lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)  # noqa: E731
    train(model, optimizer, schedule, before_step=clip)
    return learned(model)


def clipped_by_ours(side: Side) -> Results:
    """Clip by ``optim.clip_grad_norm_``."""
    model, optimizer, schedule = side.made()
    clip_grad_norm_ = optim.clip_grad_norm_ if side.ours else torch.nn.utils.clip_grad_norm_
    train(model, optimizer, schedule, before_step=lambda: clip_grad_norm_(model.parameters(), 0.1))
    return learned(model)


def accumulated(side: Side) -> Results:
    """Accumulate the gradients of two backwards for each step."""
    model, optimizer, schedule = side.made()
    for step, (ids, target) in enumerate(batches()):
        loss_of(model(ids), target).backward()
        if step % 2 == 1:
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    return learned(model)


def scaled(side: Side) -> Results:
    """Train with the scale of mixed precision, which divides the gradients by it before the step."""
    model, optimizer, schedule = side.made()
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for ids, target in batches():
        optimizer.zero_grad()
        scaler.scale(loss_of(model(ids), target)).backward()
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
    return learned(model)


def in_hooks(side: Side) -> Results:
    """Step an optimizer for each parameter, in a hook that runs when its gradient is there."""
    model = side.model()
    optimizers = {p: side.optimizer([p]) for p in model.parameters()}
    schedules = [side.schedule(optimizer) for optimizer in optimizers.values()]

    def step(p: torch.nn.Parameter) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in optimizers:
        p.register_post_accumulate_grad_hook(step)
    for ids, target in batches():
        loss_of(model(ids), target).backward()
        for schedule in schedules:
            schedule.step()
    return learned(model)


class Tied(torch.nn.Module):
    """A model of all items' scores, in which the table is the last layer's weight too."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model
        self.out = torch.nn.Linear(1, len(model.tables()[0].weight), bias=False)
        self.out.weight = model.tables()[0].weight

    def forward(self, ids: Tensor) -> Tensor:
        """Return a number for each row of ids."""
        table = self.out.weight
        scores = torch.tanh(self.model(ids))[:, None] @ table.mean(1)[None] + self.model(ids)[:, None]
        return scores[:, :40].mean(1)


def tied(side: Side) -> Results:
    """Train a table that is also the weight of a dense layer."""
    model = Tied(side.model())
    optimizer = side.optimizer(model.parameters())
    train(model, optimizer, side.schedule(optimizer))
    return learned(model)


def stepped_by_torch(side: Side) -> Results:
    """Train by our optimizer, then by one of torch's."""
    model, optimizer, _ = trained(side, 6)
    theirs = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    if side.mode == "fused":
        for module in model.modules():
            if hasattr(module, "grad_mode"):
                module.grad_mode = "dense"
    train(model, theirs, side.schedule(theirs), 6, 6)
    del optimizer
    return learned(model)


_BY_IDS = "torch's `AveragedModel`, in which tables that grow are averaged by ids"
_IN_EVAL = "for tables that grow: `model.eval()` before it, since rows of new ids would be lost"
CLIENTS = [
    Client("a loop of one's own", training),
    Client("EMA (`AveragedModel`)", ema),
    Client("EMA by hand, over `parameters()`", ema_by_hand, way=_BY_IDS),
    Client("EMA over `state_dict()`, as timm's", ema_of_states, way=_BY_IDS),
    Client("SWA (`AveragedModel`, `SWALR`)", swa),
    Client("`prune`", pruned, kinds=("Embedding", "EmbeddingBag"), way=_IN_EVAL),
    Client(
        "`prune`, of a collection",
        pruned,
        kinds=("EmbeddingBagCollection",),
        way="`torch.nn.utils.parametrize`, whose weights need no hook",
    ),
    Client("`parametrize`", parametrized, way=_IN_EVAL),
    Client("`functional_call`", functional, way=_IN_EVAL),
    Client("`torch.func.grad`", gradients, way=_IN_EVAL),
    Client("`vmap` over `grad`", per_sample, way='`grad_mode="dense"`: torch\'s `sparse=True` is refused too'),
    Client("`vmap` over `stack_module_state`", ensemble, way="for tables that grow: each model by itself"),
    Client(
        "`vmap` of a model",
        looked_up_in_vmap,
        way=_IN_EVAL,
    ),
    Client("`copy.deepcopy`", copied),
    Client("`torch.save`", saved),
    Client(
        "DCP (`torch.distributed.checkpoint`)",
        dcp_saved,
        way="for tables that grow: `torch.save`, or `checkpoint.save` and `checkpoint.load`",
    ),
    Client("torch's `clip_grad_norm_`", clipped, way="under `fused` nothing can be clipped: another `grad_mode`"),
    Client("our `optim.clip_grad_norm_`", clipped_by_ours),
    Client("gradient accumulation", accumulated, way="one `backward()` of the sum of the losses, or another mode"),
    Client("`GradScaler`", scaled),
    Client("an optimizer for each parameter, in hooks", in_hooks, way="nothing: `fused` does this by itself"),
    Client("tied weights", tied, way="the rows that a lookup returns: for a table that grows, those of `table(ids)`"),
    Client("an optimizer of torch's afterwards", stepped_by_torch, way="another `grad_mode` before it"),
]
