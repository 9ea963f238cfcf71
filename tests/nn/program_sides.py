"""The two sides of a random training program: our modules and optimizer, and dense torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from nn.programs import Feature, Program, Spec
from optim.cases import REFERENCES
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from torchsparse_rec import KeyedJaggedTensor, nn, optim
from torchsparse_rec.variable import EmbeddingVariableOption

HEAD = -1  # the head's number, where tables have theirs


class Model(torch.nn.Module, ABC):
    """A side's tables, and a dense layer after the first one if the program has it."""

    def __init__(self, program: Program, head: Tensor) -> None:
        super().__init__()
        self.program = program
        self.leaves: dict[int, Tensor] = {}  # of the last lookup with gradients, the weights of ids for each feature
        if program.head:
            self.head = torch.nn.Parameter(head.clone())

    @abstractmethod
    def table(self, number: int) -> Tensor:
        """Return one whole table with all rows flushed."""

    def parameter(self, number: int) -> Tensor:
        """Return what an optimizer has of a table, or of the head."""
        return self.head if number == HEAD else self.table(number)

    @abstractmethod
    def look_up(self, features: list[Feature], without: int | None) -> list[Tensor]:
        """Return the result for each feature of the tables that take part."""

    def weights_of(self, features: list[Feature], place: int, dtype: torch.dtype) -> Tensor | None:
        """Return a feature's weights of ids, as a leaf where they are trained."""
        weights = features[place].weights
        if weights is None:
            return None
        weights = weights.to(dtype, copy=True)
        if self.program.trains_weights and torch.is_grad_enabled():
            self.leaves[place] = weights.requires_grad_()
        return weights

    def order(self, without: int | None) -> Iterator[tuple[int, int, Spec, int]]:
        """Yield each feature's number, its table's number, its table, and its number among the table's features."""
        place = 0
        for number, spec in enumerate(self.program.tables):
            for which in range(spec.features):
                if number != without:
                    yield place, number, spec, which
                place += 1

    def loss(
        self, features: list[Feature], without: int | None, checkpointed: bool = False
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the loss (half the squared distance to the targets, and the head's part) and the lookups' results."""
        if checkpointed:
            results = checkpoint(self.look_up, features, without, use_reentrant=False)
        else:
            results = self.look_up(features, without)
        total = torch.zeros((), dtype=self.program.dtype)
        for (place, *_), result in zip(self.order(without), results, strict=True):
            feature = features[place]
            mask = feature.mask.to(result.dtype)[:, None]
            total = total + ((result - feature.target.to(result.dtype)).square() * mask).sum() / 2
            if self.program.head and place == 0:
                total = total + ((result * (mask > 0)) @ self.head.to(result.dtype)).square().sum() / 20
        return total, results


class Ours(Model):
    """The side of our modules."""

    def __init__(self, program: Program, start: list[Tensor], head: Tensor) -> None:
        super().__init__(program, head.to(program.dtype))
        specs, dtype = program.tables, program.dtype
        start = [weight.to(dtype) for weight in start]
        if "collection" in program.kind:
            configs = [
                _config(k, spec, weight, program.growing)
                for k, (spec, weight) in enumerate(zip(specs, start, strict=True))
            ]
            if program.kind == "row collection":
                self.collection = nn.EmbeddingCollection(configs, grad_mode=program.grad_mode)
            else:
                self.collection = nn.EmbeddingBagCollection(configs, program.weighted, grad_mode=program.grad_mode)
            if program.growing:
                self._fill()
                return
            self.collection.load_state_dict(
                {name: weight for name, weight in zip(self.collection.state_dict(), start, strict=True)}
            )
            return
        self.modules_of = torch.nn.ModuleList()
        for spec, weight in zip(specs, start, strict=True):
            modules = torch.nn.ModuleList([_module(program, spec, weight.clone())])
            if spec.shared and spec.features == 2:
                modules.append(_module(program, spec, weight.clone()))
                modules[1].weight = modules[0].weight
            self.modules_of.append(modules)
        if program.growing:
            self._fill()

    @torch.no_grad()
    def _fill(self) -> None:
        """Look up every key of the tables that grow, in order, which makes their rows."""
        for number, spec in enumerate(self.program.tables):
            self._module_of(number, 0)(torch.arange(spec.rows))

    def _module_of(self, number: int, which: int) -> torch.nn.Module:
        if "collection" in self.program.kind:
            return self.collection.get_submodule(f"{self.collection._children}.t{number}")
        modules = self.modules_of[number]
        return modules[which if len(modules) > 1 else 0]  # type: ignore[index]

    def table(self, number: int) -> Tensor:
        module = self._module_of(number, 0)
        if self.program.growing:
            return module.lookup(torch.arange(self.program.tables[number].rows))
        return module.weight

    def parameter(self, number: int) -> Tensor:
        return super().parameter(number) if number == HEAD else self._module_of(number, 0).weight

    def look_up(self, features: list[Feature], without: int | None) -> list[Tensor]:
        if "collection" not in self.program.kind:
            return [
                self._call(
                    self._module_of(number, which),
                    features[place],
                    spec,
                    self.weights_of(features, place, self.program.dtype),
                )
                for place, number, spec, which in self.order(without)
            ]
        names = [f"f{number}{which}" for _, number, _, which in self.order(None)]
        weights = None
        if self.program.weighted:
            weights = torch.cat([self.weights_of(features, k, self.program.dtype) for k in range(len(features))])
        ids, lengths = torch.cat([x.ids for x in features]), torch.cat([x.lengths for x in features])
        results = self.collection(KeyedJaggedTensor(names, ids, weights, lengths))
        if self.program.kind == "row collection":
            return [results[name].values() for name in names]
        return [results[name] for name in names]

    def _call(self, module: torch.nn.Module, feature: Feature, spec: Spec, weights: Tensor | None) -> Tensor:
        ids = feature.ids.int() if self.program.seed % 3 == 0 else feature.ids
        if spec.pooling == "rows":
            return module(ids)
        lengths = feature.lengths.tolist()
        if lengths and len(set(lengths)) == 1:
            shape = (len(lengths), lengths[0])
            return module(ids.view(shape), None, None if weights is None else weights.view(shape))
        offsets = feature.offsets.to(ids.dtype)
        return module(ids, offsets if module.include_last_offset else offsets[:-1], weights)


def _config(number: int, spec: Spec, weight: Tensor, growing: bool) -> Any:
    names = [f"f{number}{which}" for which in range(spec.features)]
    fields = {"data_type": weight.dtype, "feature_names": names, "padding_idx": spec.padding}
    if growing:
        fields.update(ev_option=EmbeddingVariableOption(), initializer=weight)
    if spec.pooling == "rows":
        return nn.EmbeddingConfig(spec.rows, spec.dim, f"t{number}", **fields)
    return nn.EmbeddingBagConfig(spec.rows, spec.dim, f"t{number}", pooling=spec.pooling, **fields)


def _module(program: Program, spec: Spec, weight: Tensor) -> torch.nn.Module:
    if program.growing:
        return nn.EmbeddingVariable(
            spec.dim, initializer=weight, capacity=spec.rows, dtype=program.dtype, grad_mode=program.grad_mode
        )
    options = {"max_norm": spec.max_norm, "padding_idx": spec.padding, "grad_mode": program.grad_mode}
    if spec.pooling == "rows":
        frequency = spec.by_frequency
        return nn.Embedding(spec.rows, spec.dim, _weight=weight, scale_grad_by_freq=frequency, **options)
    last = program.seed % 2 == 1
    return nn.EmbeddingBag(spec.rows, spec.dim, mode=spec.pooling, _weight=weight, include_last_offset=last, **options)


class Theirs(Model):
    """The side of torch's lookups of plain parameters, with dense gradients, in a dtype of its own."""

    def __init__(self, program: Program, start: list[Tensor], head: Tensor, dtype: torch.dtype) -> None:
        super().__init__(program, head.to(dtype))
        self.tables = torch.nn.ParameterList([torch.nn.Parameter(weight.to(dtype)) for weight in start])

    def table(self, number: int) -> Tensor:
        return self.tables[number]

    def look_up(self, features: list[Feature], without: int | None) -> list[Tensor]:
        return [
            _pooled(features[place], self.tables[number], spec, self.weights_of(features, place, self.tables[0].dtype))
            for place, number, spec, _ in self.order(without)
        ]


def _pooled(feature: Feature, weight: Tensor, spec: Spec, weights: Tensor | None) -> Tensor:
    options = {"padding_idx": spec.padding, "max_norm": spec.max_norm}
    if spec.pooling == "rows":
        return F.embedding(feature.ids, weight, scale_grad_by_freq=spec.by_frequency, **options)
    options.update(include_last_offset=True)
    if weights is None:
        return F.embedding_bag(feature.ids, weight, feature.offsets, mode=spec.pooling, **options)
    total = F.embedding_bag(feature.ids, weight, feature.offsets, mode="sum", per_sample_weights=weights, **options)
    if spec.pooling == "sum":
        return total
    counted = weights if spec.padding is None else weights * (feature.ids != spec.padding)
    bags = torch.arange(len(feature.lengths)).repeat_interleave(feature.lengths)
    sums = torch.zeros(len(feature.lengths), dtype=weight.dtype).index_add(0, bags, counted)
    return total / torch.where(sums == 0, 1.0, sums)[:, None]


# ---- Optimizers ------------------------------------------------------------------------------------------------------


def make_ours(program: Program, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Make our optimizer."""
    return getattr(optim, program.optimizer)(groups, in_backward=program.in_backward, **program.arguments)


def make_theirs(program: Program, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Make torch's optimizer, or the reference where torch has none."""
    arguments = {name: value for name, value in program.arguments.items() if name != "lazy"}
    if program.optimizer in REFERENCES:
        return REFERENCES[program.optimizer](groups, **arguments)
    return getattr(torch.optim, program.optimizer)(groups, foreach=False, **arguments)


def step_densely(program: Program, model: Model, optimizer: torch.optim.Optimizer) -> None:
    """Step the dense optimizer. With ``lazy`` put rows whose gradient is zero back afterwards, with their states."""
    tables = [table for number in range(len(program.tables)) if (table := model.table(number)).grad is not None]
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.touched = (parameter.grad != 0).any(1)  # type: ignore[attr-defined]
    if not program.arguments.get("lazy") or program.optimizer in ("Ftrl", "LAMB"):
        optimizer.step()
        return
    before = [(table.detach().clone(), _states(optimizer, table, Tensor.clone)) for table in tables]
    optimizer.step()
    with torch.no_grad():
        for table, (weight, states) in zip(tables, before, strict=True):
            idle = ~table.touched  # type: ignore[attr-defined]
            table[idle] = weight[idle]
            for name, value in _states(optimizer, table, lambda state: state).items():
                first = program.arguments.get("initial_accumulator_value", 0.0)
                value[idle] = states[name][idle] if name in states else first


def _states(optimizer: torch.optim.Optimizer, table: Tensor, of: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """Return the states of a table that have something for each row."""
    items = optimizer.state.get(table, {}).items()
    return {name: of(value) for name, value in items if isinstance(value, Tensor) and value.dim() > 0}
