"""A run of a random training program, all its sides step by step; ``python tests/nn/program_runs.py SEED`` runs one."""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim.swa_utils import AveragedModel

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kinds import saved
from nn.program_sides import HEAD, REFERENCES, Model, Ours, Theirs, make_ours, make_theirs, step_densely
from nn.programs import Feature, Program, draw, lookups

from torchsparse_rec import optim

_FLOAT64 = 1e-10  # times the largest value, or 1
# The tolerance of float32 is coarse: it is for what float64 does not reach. tests/optim/test_training.py measures the
# error of float32.
_FLOAT32 = 2e-3
_ORDINARY = 1e4


class Mismatch(AssertionError):
    """An error where a side has something that it should not have."""


class Outgrown(Exception):
    """An exception where values are no longer of ordinary size, because the training itself diverges."""


class Run:
    """A run of a program on its sides: ours first, then torch's in float64, and in float32 if ours is in float32."""

    def __init__(self, program: Program) -> None:
        self.program = program
        generator = torch.Generator().manual_seed(program.seed)
        start = [torch.randn(spec.rows, spec.dim, generator=generator) for spec in program.tables]
        head = torch.randn(program.tables[0].dim, 3, generator=generator)
        self.dtypes = [program.dtype]
        if program.dtype == torch.float32:
            self.dtypes.append(torch.float32 if program.extreme else torch.float64)
        theirs: list[Model] = [Theirs(program, start, head, dtype) for dtype in reversed(self.dtypes)]
        if program.extreme:  # what is infinite on one of two sides that differ by rounding may be so on ours
            with torch.no_grad():
                for parameter in theirs[1].parameters():
                    parameter.mul_(1 + 1e-5)
        self.models = [Ours(program, start, head), *theirs]
        self._new_optimizers()
        self.frozen: set[int] = set()
        self.averages: list[list[Tensor]] = []
        self.averaged: list[AveragedModel] = []
        self.at = "start"

    def run(self) -> bool:
        """Do all steps, and compare everything at the end. Return False if the values outgrow before."""
        try:
            for number, (name, arguments) in enumerate(self.program.steps):
                self.at = f"step {number}, {name}"
                getattr(self, "_" + name.replace(" ", "_"))(**arguments)
            self.at = "the end"
            self._weights(0)
            self._read(0)
        except Outgrown:
            return False
        return True

    def _new_optimizers(self) -> None:
        # The tables of each parameter group, by their numbers; the head's is HEAD.
        tables = list(range(len(self.program.tables)))
        head = [HEAD] if self.program.head else []
        self.groups = [[number] for number in (*tables, *head)] if self.program.groups else [tables + head]
        self.optimizers = [make_ours(self.program, self._groups_of(self.models[0], self.groups))]
        self.optimizers += [make_theirs(self.program, self._groups_of(model, self.groups)) for model in self.models[1:]]

    def _groups_of(self, model: Model, groups: list[list[int]]) -> list[dict[str, Any]]:
        """Return the parameter groups of an optimizer, each with a learning rate of its own."""
        lr = self.program.arguments["lr"]
        return [
            {"params": [model.parameter(number) for number in numbers], "lr": lr * (1 + place / 2)}
            for place, numbers in enumerate(groups)
        ]

    # ---- Comparisons -------------------------------------------------------------------------------------------------

    def _same(self, what: str, of: Callable[[int], Tensor]) -> None:
        """Compare the tensor that ``of(side)`` returns on each side."""
        got, *wanted = (of(side).detach() for side in range(len(self.models)))
        if any(got.shape != want.shape for want in wanted):
            raise Mismatch(f"{self.at}: {what} has shape {tuple(got.shape)}, not {tuple(wanted[0].shape)}")
        if got.numel() == 0:
            return
        if self.program.extreme:
            finite = torch.stack([want.isfinite() for want in wanted]).all(0) & ~got.isfinite()
            number = ~torch.stack([want.isnan() for want in wanted]).any(0) & got.isnan()
            if (finite | number).any():
                at = (finite | number).nonzero()[0].tolist()
                values = [of(side).detach()[tuple(at)].item() for side in range(3)]
                raise Mismatch(f"{self.at}: {what}{at}: {values[0]}, where dense torch has {values[1]}, {values[2]}")
            return
        error = (got.double() - wanted[0]).abs()
        scale = max(1.0, wanted[0].abs().max().item())
        if not scale < _ORDINARY:
            raise Outgrown
        allowed = _FLOAT64 * scale
        if len(wanted) > 1:
            allowed = _FLOAT32 * scale + 8 * (wanted[1].double() - wanted[0]).abs().max().item()
        if not error.max() <= allowed:
            at = tuple((error == error.max()).nonzero()[0].tolist())
            values = [of(side).detach()[at].item() for side in range(len(self.models))]
            raise Mismatch(f"{self.at}: {what}{list(at)}: {values[0]}, where dense torch has {values[1:]}")

    def _weights(self, seed: int) -> None:
        for number in range(len(self.program.tables)):
            self._same(f"table {number}", lambda side, number=number: self.models[side].table(number))
        if self.program.head:
            self._same("the head", lambda side: self.models[side].head)
        self._states()

    def _states(self) -> None:
        if self.program.optimizer in REFERENCES or self.program.extreme:
            return
        for number in [*range(len(self.program.tables)), *([HEAD] if self.program.head else [])]:
            states = [o.state.get(m.parameter(number), {}) for o, m in zip(self.optimizers, self.models, strict=True)]
            for name, value in states[1].items():
                if not isinstance(value, Tensor):
                    continue
                if name not in states[0]:
                    # torch's Adagrad makes its state at once, ours the state of a table at its first step.
                    if states[1].get("step", 1) != 0:
                        raise Mismatch(f"{self.at}: no state {name} of parameter {number}")
                    continue
                self._same(f"state {name} of parameter {number}", lambda side, s=states, k=name: s[side][k])

    def _read(self, seed: int) -> None:
        features = lookups(self.program, seed)
        if seed % 3 == 0:
            self.models[0].eval()
        with torch.set_grad_enabled(seed % 3 == 1):
            self._same_results([model.look_up(features, None) for model in self.models])
        self.models[0].train()

    def _same_results(self, results: list[list[Tensor]]) -> None:
        for number in range(len(results[1])):
            self._same(f"result {number}", lambda side, number=number: results[side][number])

    # ---- Steps -------------------------------------------------------------------------------------------------------

    def _train(
        self,
        seed: int,
        backwards: int = 1,
        without: int | None = None,
        zero: str = "none",
        checkpointed: bool = False,
        clip_norm: tuple[float, float] | None = None,
        clip_value: float | None = None,
    ) -> None:
        for optimizer in self.optimizers:
            if zero != "keep":
                optimizer.zero_grad(set_to_none=zero == "none")
        for k in range(backwards):
            self._backward(lookups(self.program, seed + k), without, checkpointed)
        if clip_norm is not None:
            clips = [optim.clip_grad_norm_, *[torch.nn.utils.clip_grad_norm_] * (len(self.models) - 1)]
            totals = [
                clip(model.parameters(), clip_norm[0], norm_type=clip_norm[1])
                for clip, model in zip(clips, self.models, strict=True)
            ]
            self._same("the norm", lambda side: totals[side])
        if clip_value is not None:
            optim.clip_grad_value_(self.models[0].parameters(), clip_value)
            for model in self.models[1:]:
                if any(parameter.grad is not None for parameter in model.parameters()):  # torch does not refuse
                    torch.nn.utils.clip_grad_value_(model.parameters(), clip_value)
        self._step()

    def _backward(self, features: list[Feature], without: int | None, checkpointed: bool) -> None:
        for model in self.models:
            model.leaves.clear()
        ours = self.models[0].loss(features, without, checkpointed)
        losses, results = zip(ours, *(model.loss(features, without) for model in self.models[1:]), strict=True)
        self._same_results(list(results))
        if losses[1].requires_grad:
            for loss in losses:
                loss.backward()
            for place in self.models[1].leaves:
                self._same(f"the gradient of weights {place}", lambda side, k=place: self._weights_gradient(side, k))

    def _weights_gradient(self, side: int, place: int) -> Tensor:
        leaf = self.models[side].leaves[place]
        return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad

    def _step(self) -> None:
        self.optimizers[0].step()
        for model, optimizer in zip(self.models[1:], self.optimizers[1:], strict=True):
            step_densely(self.program, model, optimizer)

    def _no_gradient(self, seed: int) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self._step()

    def _learning_rate(self, seed: int, factor: float) -> None:
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                lr = group["lr"] * factor
                group["lr"] = lr if self.program.extreme else min(lr, 2 * self.program.arguments["lr"])

    def _schedule(self, **changes: Any) -> None:
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group.update(changes)

    def _freeze(self, seed: int, table: int, zero: str) -> None:
        """Freeze a table, or thaw it if it is frozen."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=zero == "none")
        self.frozen ^= {table}
        self._keep_frozen()

    def _keep_frozen(self) -> None:
        for model in self.models:
            for number in range(len(self.program.tables)):
                model.parameter(number).requires_grad_(number not in self.frozen)

    def _move(self, seed: int, table: int, factor: float) -> None:
        """Move a table to a parameter group of its own, or back into the optimizer."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self._take_out(table)
        self.groups.append([table])
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            optimizer.add_param_group({"params": [model.parameter(table)], "lr": self.program.arguments["lr"] * factor})

    def _leave(self, seed: int, table: int) -> None:
        """Take a table out of its optimizer."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self._take_out(table)

    def _take_out(self, table: int) -> None:
        self.groups = [[number for number in group if number != table] for group in self.groups]
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            for group in optimizer.param_groups:
                group["params"] = [x for x in group["params"] if x is not model.parameter(table)]

    def _write(self, seed: int, table: int) -> None:
        row = seed % self.program.tables[table].rows
        for model in self.models:
            with torch.no_grad():
                model.table(table)[row] = 0.5 + seed % 7

    def _flush(self, seed: int) -> None:
        self.optimizers[0].flush()  # type: ignore[attr-defined]

    def _copy(self, seed: int) -> None:
        copied = copy.deepcopy(self.models[0])
        for number in range(len(self.program.tables)):
            sides = [copied, *self.models[1:]]
            self._same(f"a copy's table {number}", lambda side, number=number, sides=sides: sides[side].table(number))

    def _new_optimizer(self, seed: int) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self._new_optimizers()

    # ---- Checkpoints -------------------------------------------------------------------------------------------------

    @property
    def _is_one_left(self) -> bool:
        """Whether a table has left its optimizer: neither torch's optimizers nor ours have a state dict then."""
        return sum(map(len, self.groups)) < len(self.program.tables) + self.program.head

    def _reload(self, seed: int) -> None:
        if self._is_one_left:
            return
        self.models[0].load_state_dict(copy.deepcopy(self.models[0].state_dict()))
        self.optimizers[0].load_state_dict(copy.deepcopy(self.optimizers[0].state_dict()))

    def _resume(self, seed: int) -> None:
        """Go on with another model and optimizer, loaded from a file."""
        if self._is_one_left:
            return
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        states = self.models[0].state_dict(), self.optimizers[0].state_dict()
        model_state, optimizer_state = saved(states, weights_only=True)
        zeros = [torch.zeros(spec.rows, spec.dim) for spec in self.program.tables]
        self.models[0] = Ours(self.program, zeros, torch.zeros(self.program.tables[0].dim, 3))
        self.models[0].load_state_dict(model_state)
        self.optimizers[0] = make_ours(self.program, self._groups_of(self.models[0], self.groups))
        self.optimizers[0].load_state_dict(optimizer_state)
        self._keep_frozen()

    def _from_torch(self, seed: int) -> None:
        """Load the state of torch's optimizer into ours."""
        if self.program.optimizer not in REFERENCES and self.program.dtype == torch.float64 and not self._is_one_left:
            self.optimizers[0].load_state_dict(copy.deepcopy(self.optimizers[1].state_dict()))

    # ---- Averages ----------------------------------------------------------------------------------------------------

    def _average(self, seed: int) -> None:
        if self.program.growing:  # by ids, which torch's AveragedModel alone is told of
            self._average_models()
            return
        sides = [self._parameters(model) for model in self.models]
        if not self.averages:
            self.averages = [[parameter.detach().clone() for parameter in side] for side in sides]
        for side, average in zip(sides, self.averages, strict=True):
            for mean, parameter in zip(average, side, strict=True):
                mean.lerp_(parameter.detach(), 0.3)
        for number in range(len(self.averages[0])):
            self._same(f"average {number}", lambda side, number=number: self.averages[side][number])

    def _average_models(self) -> None:
        if not self.averaged:
            for model in self.models:
                model.leaves.clear()
            self.averaged = [AveragedModel(model, avg_fn=lambda mean, x, _: mean.lerp(x, 0.3)) for model in self.models]
        for averaged, model in zip(self.averaged, self.models, strict=True):
            averaged.update_parameters(model)
        for number in range(len(self.program.tables)):
            self._same(f"average {number}", lambda side, number=number: self.averaged[side].module.table(number))

    def _parameters(self, model: Model) -> Iterable[Tensor]:
        """Return the model's parameters as ``parameters()`` has them, but the head's last."""
        parameters = list(model.parameters())
        if self.program.head:
            heads = [parameter for parameter in parameters if parameter is model.head]
            parameters = [parameter for parameter in parameters if parameter is not model.head] + heads
        return parameters


def run(seed: int, extreme: bool = False, program: Program | None = None) -> bool:
    """Run a seed's program, and say whether it came to its end. A Mismatch names the seed and the program."""
    program = program or draw(seed, extreme)
    with warnings.catch_warnings():
        # Ours warn where they step all rows.
        warnings.filterwarnings("ignore", ".*every step updates all rows", UserWarning)
        try:
            return Run(program).run()
        except Exception as error:
            option = " extreme" if extreme else ""
            text = f"{type(error).__name__}: {error}\npython tests/nn/program_runs.py {seed}{option}\n{program}"
            raise Mismatch(text) from error


if __name__ == "__main__":
    print("no mismatch", run(int(sys.argv[1]), extreme="extreme" in sys.argv))
