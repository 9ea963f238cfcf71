"""Averages of models with tables that grow: by ids in torch's AveragedModel, refused where rows would be mixed."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pairs import in_pairs
from torch import Tensor
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn, update_bn
from variable.cases import on_disk

from torchsparse_rec import nn, optim
from torchsparse_rec.nn import EmbeddingVariable
from torchsparse_rec.variable import (
    CBFFilter,
    CounterFilter,
    EmbeddingVariableOption,
    GlobalStepEvict,
    LRUEvict,
)

INITIAL = torch.arange(14.0).reshape(7, 2)
OPTIONS: dict[str, dict[str, Any]] = {
    "all": {},
    "a filter": {"filter_option": CounterFilter(2)},
    "a Bloom filter": {"filter_option": CBFFilter(2, 1000, 0.01)},
    "evictions": {"evict_option": GlobalStepEvict(2, every=3)},
    "a capacity": {"evict_option": LRUEvict(12)},
}
WAYS: dict[str, dict[str, Any]] = {
    "each": {"avg_fn": get_ema_avg_fn(0.75)},
    "all": {"multi_avg_fn": get_ema_multi_avg_fn(0.75)},
    "buffers": {"multi_avg_fn": get_ema_multi_avg_fn(0.75), "use_buffers": True},
    "each and buffers": {"avg_fn": get_ema_avg_fn(0.75), "use_buffers": True},
    "equally": {},
}


class Model(torch.nn.Module):
    """A table that grows, alone or in a collection, and a layer whose statistics ``update_bn`` computes anew."""

    def __init__(self, kind: str = "EmbeddingVariable", grad_mode: Any = "sparse", **option: Any) -> None:
        super().__init__()
        how: dict[str, Any] = {"ev_option": EmbeddingVariableOption(**option), "initializer": INITIAL}
        if kind == "EmbeddingVariable":
            self.table = EmbeddingVariable(2, name="t", capacity=2, grad_mode=grad_mode, **how)
        else:
            config = nn.EmbeddingBagConfig if kind == "EmbeddingBagCollection" else nn.EmbeddingConfig
            self.table = getattr(nn, kind)([config(2, 2, "t", feature_names=["f"], **how)], grad_mode=grad_mode)
        self.norm = torch.nn.BatchNorm1d(2)

    def forward(self, ids: Tensor) -> Tensor:
        """Return a row for each id."""
        if isinstance(self.table, EmbeddingVariable):
            return self.norm(self.table(ids))
        found = self.table({"f": (ids, torch.arange(len(ids) + 1))})
        return self.norm((found if isinstance(self.table, nn.EmbeddingBagCollection) else found["f"]).values())


def train(model: Model, after_step: Callable[[], object], steps: int = 12, in_backward: bool = False) -> None:
    """Train with ids that come, go and come again."""
    optimizer = optim.Adam(model.parameters(), lr=0.1, in_backward=in_backward)
    generator = torch.Generator().manual_seed(3)
    for step in range(steps):
        ids = torch.randint(-3, 4 + 3 * (step % 7), (6,), generator=generator).repeat(2)
        optimizer.zero_grad()
        model(ids).square().sum().backward()
        optimizer.step()
        after_step()


def the_table(model: torch.nn.Module) -> EmbeddingVariable:
    """Return the table that grows."""
    return next(module for module in model.modules() if isinstance(module, EmbeddingVariable))


def rows_of(model: torch.nn.Module) -> dict[int, Tensor]:
    """Return the rows of the table that grows, by id."""
    found = the_table(model).export()
    return dict(zip(found.keys.tolist(), found.values.clone(), strict=True))


@in_pairs(
    way=WAYS,
    option=OPTIONS,
    kind=["EmbeddingVariable", "EmbeddingBagCollection", "EmbeddingCollection"],
    grad_mode=["sparse", "fused", "dense"],
)
def test_an_averaged_model_goes_by_ids(way: str, option: str, kind: str, grad_mode: str) -> None:
    model = Model(kind, grad_mode, **OPTIONS[option])
    average = AveragedModel(model, **WAYS[way])
    want: dict[int, Tensor] = {}
    count = 0

    def update() -> None:
        nonlocal want, count
        average.update_parameters(model)
        weight = 0.25 if way != "equally" else 1 / (count + 1)
        now = rows_of(model)
        want = {key: x if count == 0 else want.get(key, INITIAL[key % 7]).lerp(x, weight) for key, x in now.items()}
        count += 1

    train(model, update, in_backward=grad_mode == "fused")
    assert len(want) > 5
    got = rows_of(average)
    assert got.keys() == want.keys()
    for key, row in want.items():
        torch.testing.assert_close(got[key], row, rtol=1e-5, atol=1e-5)
    before = the_table(average).state_dict()
    update_bn([torch.arange(50, 60)], average)  # in train(), but it inserts nothing and ends no row
    after = the_table(average).state_dict()
    assert all(torch.equal(x, after[name]) for name, x in before.items())
    loaded = AveragedModel(Model(kind, grad_mode, **OPTIONS[option]))
    loaded.load_state_dict(average.state_dict())
    ids = torch.arange(-5, 40)
    assert loaded.eval()(ids).equal(average.eval()(ids))


def test_an_average_that_is_loaded_goes_on() -> None:
    model = Model()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.75))
    train(model, lambda: average.update_parameters(model), 4)
    states = copy.deepcopy((model.state_dict(), average.state_dict()))
    again = Model()
    resumed = AveragedModel(again, multi_avg_fn=get_ema_multi_avg_fn(0.75))
    again.load_state_dict(states[0])
    resumed.load_state_dict(states[1])
    for one, its in ((model, average), (again, resumed)):
        train(one, partial(its.update_parameters, one), 4)
    assert {key: x.tolist() for key, x in rows_of(resumed).items()} == {
        key: x.tolist() for key, x in rows_of(average).items()
    }


def _by_hand(model: Model) -> Callable[[], object]:
    means = [p.detach().clone() for p in model.parameters()]

    def update() -> None:
        for mean, p in zip(means, model.parameters(), strict=True):
            mean.lerp_(p.detach(), 0.25)

    return update


def _out_of_place(model: Model) -> Callable[[], object]:
    means = [p.clone().detach() for p in model.parameters()]

    def update() -> None:
        means[:] = [0.75 * mean + 0.25 * p.data for mean, p in zip(means, model.parameters(), strict=True)]

    return update


def _of_a_deep_copy(model: Model) -> Callable[[], object]:
    mean = copy.deepcopy(model)

    @torch.no_grad()
    def update() -> None:
        for mine, its in zip(mean.parameters(), model.parameters(), strict=True):
            mine.mul_(0.75).add_(its, alpha=0.25)

    return update


def _of_one_vector(model: Model) -> Callable[[], object]:
    mean = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    return lambda: mean.lerp_(torch.nn.utils.parameters_to_vector(model.parameters()).detach(), 0.25)


def _of_kept_states(model: Model) -> Callable[[], object]:
    means = copy.deepcopy(model.state_dict())

    def update() -> None:
        for name, x in model.state_dict().items():
            if x.is_floating_point():
                means[name].sub_((means[name] - x) * 0.25)

    return update


def _timms(foreach: bool) -> Callable[[Model], Callable[[], object]]:
    def average(model: Model) -> Callable[[], object]:
        mean = copy.deepcopy(model)

        @torch.no_grad()
        def update() -> None:
            both = zip(mean.state_dict().values(), model.state_dict().values(), strict=True)
            if not foreach:  # ModelEmaV2
                for mine, its in both:
                    mine.copy_(0.75 * mine + 0.25 * its)
                return
            floats = []
            for mine, its in both:  # ModelEmaV3
                if mine.is_floating_point():
                    floats.append((mine, its))
                else:
                    mine.copy_(its)
            torch._foreach_lerp_([mine for mine, _ in floats], [its for _, its in floats], 0.25)

        return update

    return average


def _of_another_model(model: Model) -> Callable[[], object]:
    mean = Model()
    mean.load_state_dict(model.state_dict())

    @torch.no_grad()
    def update() -> None:
        torch._foreach_mul_([*mean.parameters()], 0.75)
        torch._foreach_add_([*mean.parameters()], [*model.parameters()], alpha=0.25)

    return update


@pytest.mark.parametrize(
    "way",
    [
        _by_hand,
        _out_of_place,
        _of_a_deep_copy,
        _of_one_vector,
        _of_kept_states,
        _timms(foreach=False),
        _timms(foreach=True),
        _of_another_model,
    ],
)
@pytest.mark.parametrize("what", ["an id comes", "a row changes its id"])
def test_rows_of_different_ids_are_not_mixed(way: Callable[[Model], Callable[[], object]], what: str) -> None:
    model = Model()
    model(torch.arange(100))
    update = way(model)
    update()
    optimizer = optim.Adam(model.parameters(), lr=0.1)
    model(torch.arange(20)).sum().backward()
    optimizer.step()
    update()  # the ids of the rows are as before
    if what == "an id comes":
        model(torch.tensor([1000, 1000]))
    else:
        the_table(model).erase([5])
        model(torch.tensor([777, 777]))
    with pytest.raises(RuntimeError, match="'t': rows of a table that grows meet .*AveragedModel"):
        update()


def test_what_is_made_of_whole_tables_is_plain_in_files_and_numbers() -> None:
    model = Model()
    model(torch.arange(9))
    file = io.BytesIO()
    torch.save({"state": model.state_dict(), "mean": the_table(model).weight.detach() * 2}, file)
    file.seek(0)
    found = torch.load(file, weights_only=True)
    assert type(found["mean"]) is Tensor and type(found["state"]["table.weight"]) is Tensor
    assert the_table(model).weight.norm().item() == pytest.approx(found["mean"].norm().item() / 2)
    torch.nn.utils.vector_to_parameters(torch.nn.utils.parameters_to_vector(model.parameters()), model.parameters())
    other = Model()
    other.load_state_dict(model.state_dict())
    assert rows_of(other).keys() == rows_of(model).keys()


def test_a_table_in_tiers_is_not_copied_to_an_average(tmp_path: Any) -> None:
    model = Model(storage_option=on_disk(tmp_path))
    with pytest.raises(TypeError, match=r"'t': a table with rows on disk cannot be copied .* save\(\) it"):
        AveragedModel(model)


def test_a_list_of_free_rows_that_a_file_left_out_is_made_anew() -> None:
    """Of several empty tensors, files of safetensors keep one."""
    model, other = Model(evict_option=LRUEvict(12)), Model(evict_option=LRUEvict(12))
    for first in (0, 7, 14):
        model(torch.arange(first, first + 7))
    state = model.state_dict()
    del state["table.keys.free_rows"]
    other.load_state_dict(state)
    for one in (model, other):
        one(torch.arange(30, 36))
    assert sorted(rows_of(other)) == sorted(rows_of(model))


# ---- What is none of it ---------------------------------------------------------------------------------------------


EVERYDAY: dict[str, Callable[[Any], object]] = {
    "scores in evaluation": lambda w: torch.no_grad()(lambda: (torch.ones(2, 2) @ w.T).topk(3))(),
    "a penalty": lambda w: (w.T @ w).square().sum() + w.square().sum(),
    "a layer on rows": lambda w: torch.nn.Linear(2, 3)(w) if w.requires_grad else F.layer_norm(w, (2,), w[0], w[1]),
    "rows of ids": lambda w: torch.nn.Linear(2, 3)(w[torch.arange(100) % 8]),
    "embedding": lambda w: F.embedding(torch.arange(3), w.detach()),
    "embedding_bag": lambda w: F.embedding_bag(torch.arange(4)[None], w.detach()),
    "cdist": lambda w: torch.cdist(w.detach(), torch.ones(3, 2)),
    "from_pretrained": lambda w: torch.nn.Embedding.from_pretrained(w.detach().clone())(torch.arange(3)),
    "Parameter": lambda w: torch.nn.Parameter(w).sum() + torch.nn.Parameter(w.detach()).sum(),
    "assert_close": lambda w: torch.testing.assert_close(w.detach(), w.detach().clone()),
}


@pytest.mark.parametrize("name", EVERYDAY)
def test_what_mixes_no_rows_is_not_refused(name: str) -> None:
    model = EmbeddingVariable(2, capacity=8)
    model(torch.arange(5))
    EVERYDAY[name](model.weight)
    model(torch.arange(20))
    EVERYDAY[name](next(model.parameters()))


def test_statistics_of_two_moments_may_meet() -> None:
    model, mean, grads = EmbeddingVariable(10, capacity=8), torch.zeros(10), torch.zeros(1)
    for step in range(3):
        model(torch.arange(9 * step, 9 * step + 5))
        mean = 0.5 * mean + model.weight.detach().sum(0)
        grads = grads + sum(x.square().sum() for x in torch.autograd.grad(model.weight.square().sum(), [model.weight]))
    assert mean.isfinite().all() and grads > 0


@pytest.mark.parametrize("grad_mode", ["sparse", "fused"])
def test_a_copy_of_model_and_optimizer_goes_on_as_they_do(grad_mode: str) -> None:
    """Copy both at once, the model first: rows that change their ids begin with states of zeros."""
    option = EmbeddingVariableOption(evict_option=LRUEvict(20))
    model = EmbeddingVariable(1, ev_option=option, initializer=1.0, grad_mode=grad_mode)
    pairs = [(model, optim.Adam(model.parameters(), lr=0.1, in_backward=True))]
    for step in range(12):
        if step == 5:
            pairs.append(copy.deepcopy(pairs[0]))
        for table, optimizer in pairs:
            optimizer.zero_grad()
            table(torch.arange(5 * step, 5 * step + 8)).sum().backward()
            optimizer.step()
    exported = [table.export() for table, _ in pairs]
    assert torch.equal(exported[0].keys, exported[1].keys) and torch.equal(exported[0].values, exported[1].values)
    assert pairs[0][0].global_step == pairs[1][0].global_step == 12


def test_who_reads_a_weight_changes_no_training() -> None:
    """Log a norm after each backward, while keys that a filter has admitted wait for their rows."""
    values = []
    for logs in (False, True):
        model = EmbeddingVariable(2, ev_option=EmbeddingVariableOption(filter_option=CounterFilter(2)), initializer=0.5)
        optimizer = optim.Adam(model.parameters(), lr=0.1)
        for step in range(6):
            optimizer.zero_grad()
            for _ in range(3):
                model(torch.arange(2 * step, 2 * step + 6)).square().sum().backward()
                if logs:
                    model.weight.norm()
            optimizer.step()
        values.append(model.export().values)
    torch.testing.assert_close(*values)
