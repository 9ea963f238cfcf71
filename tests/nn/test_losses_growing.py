"""``nn.table_cross_entropy`` over the keys of a table that grows, beside torch's formula over a dense table of them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from torchsparse_rec import JaggedTensor, KeyedJaggedTensor, nn, optim
from torchsparse_rec.tables.table import table_of
from torchsparse_rec.variable import (
    CounterFilter,
    EmbeddingVariableOption,
    InitializerOption,
    LRUEvict,
    StorageOption,
)

pytestmark = pytest.mark.usefixtures("kernels")

DIM, SAMPLES = 6, 8
# Keys of any range, -1 and that of ignore_index among them.
KEYS = torch.cat([torch.tensor([-1, -100, 2**62, -(2**63)]), torch.arange(3, 99) * 1_000_003])

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda p, **more: optim.SGD(p, lr=0.5, **more),
    "momentum": lambda p, **more: optim.SGD(p, lr=0.1, momentum=0.9, **more),
    "Adagrad": lambda p, **more: optim.Adagrad(p, lr=0.1, **more),
    "Adam": lambda p, **more: optim.Adam(p, lr=0.02, **more),
    "AdamW": lambda p, **more: optim.AdamW(p, lr=0.02, weight_decay=0.1, **more),
    "Adam-decay": lambda p, **more: optim.Adam(p, lr=0.02, weight_decay=0.1, **more),
}
PROGRAMS = ("untied", "tied", "after the loss", "two losses", "lookups alone")


def _variable(grad_mode: str | None = "fused", **options: Any) -> nn.EmbeddingVariable:
    return nn.EmbeddingVariable(DIM, **{"capacity": 4, "seed": 5, "grad_mode": grad_mode, **options})


def _lone() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.randn(SAMPLES, DIM, generator=torch.Generator().manual_seed(3)))


class _Reference:
    """A dense table with a row for each of ``KEYS``, of which those are classes that have been inserted."""

    def __init__(self) -> None:
        self.initial = _variable().lookup(KEYS)  # in no other order than that of keys
        self.rows, self.lone = torch.nn.Parameter(self.initial.clone()), _lone()
        self.there: set[int] = set()
        self.optimizer: Any = None

    def parameters(self) -> list[torch.nn.Parameter]:
        return [self.rows, self.lone]

    @torch.no_grad()
    def insert(self, keys: Tensor) -> Tensor:
        """Return the rows of keys; those that were not there begin anew."""
        rows = (keys.unsqueeze(-1) == KEYS).nonzero()[:, -1].view(keys.shape)
        for row in set(rows.flatten().tolist()) - self.there:
            self.rows.data[row] = self.initial[row]
            for state in self.optimizer.state.get(self.rows, {}).values():
                if state.dim():
                    state[row] = 0
            self.there.add(row)
        return rows

    def look_up(self, keys: Tensor) -> Tensor:
        return F.embedding(self.insert(keys), self.rows)

    def loss(self, input: Tensor, target: Tensor) -> Tensor:
        rows, classes = self.insert(target), torch.tensor(sorted(self.there))
        return F.cross_entropy(input @ self.rows[classes].T, torch.searchsorted(classes, rows))

    def erase(self, keys: Tensor) -> None:
        self.there -= set(self.insert(keys).tolist())


class _Model:
    def __init__(self, grad_mode: str | None) -> None:
        self.table, self.lone = _variable(grad_mode), _lone()

    def parameters(self) -> list[torch.nn.Parameter]:
        return [*self.table.parameters(), self.lone]

    def look_up(self, keys: Tensor) -> Tensor:
        return self.table(keys)

    def loss(self, input: Tensor, target: Tensor) -> Tensor:
        return nn.table_cross_entropy(input, self.table, target, ignore_index=-7, block=16)

    def erase(self, keys: Tensor) -> None:
        self.table.erase(keys)


def _train(side: Any, optimizer: Any, program: str, steps: int = 8) -> list[float]:
    generator, losses = torch.Generator().manual_seed(7), []
    for step in range(steps):
        # The later a step, the more keys it draws from: some come first as targets, some in lookups.
        draw = lambda *shape, most=20 + 10 * step: KEYS[torch.randint(0, most, shape, generator=generator)]  # noqa: E731
        ids, target, others = draw(SAMPLES, 3), draw(SAMPLES), draw(SAMPLES, 2)
        optimizer.zero_grad()
        own = side.lone if program == "untied" else side.lone + side.look_up(ids).mean(1)
        if program == "lookups alone" and step % 3 == 1:
            loss = own.square().mean()
        else:
            loss = side.loss(own, target)
        if program == "after the loss":
            loss = loss + side.look_up(others).square().mean()
        if program == "two losses":
            loss = loss + 0.5 * side.loss(own[:3] * 2, others[:3, 0])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step in (3, 5):
            side.erase(KEYS[step : step + 20 : 2])
    return losses


def _assert_close(actual: Tensor, wanted: Tensor, most: float = 5e-6) -> None:
    assert (actual.detach() - wanted.detach()).abs().max() <= most * max(wanted.detach().abs().max(), 1)


@pytest.mark.parametrize(
    ("name", "grad_mode", "program"),
    [(name, "fused", program) for name in OPTIMIZERS for program in PROGRAMS]
    + [
        (name, mode, program)
        for name in ("Adagrad", "Adam")
        for mode in ("dense", None, "auto")
        for program in PROGRAMS
    ],
)
@pytest.mark.filterwarnings("ignore:.*updates all rows of a table:UserWarning")
def test_like_a_dense_table_of_the_keys(name: str, grad_mode: str | None, program: str) -> None:
    """Keys come and go, and come again: all have the rows, and so the states, of a table in which each key has one."""
    model, reference = _Model(grad_mode), _Reference()
    reference.optimizer = OPTIMIZERS[name](reference.parameters())
    optimizer = OPTIMIZERS[name](model.parameters(), in_backward=grad_mode in ("fused", "auto"))
    losses = _train(model, optimizer, program)
    _assert_close(torch.tensor(losses), torch.tensor(_train(reference, reference.optimizer, program)))
    _assert_close(model.lone, reference.lone)
    keys, values, *_ = model.table.export()
    assert len(keys) == len(reference.there)
    _assert_close(values, reference.rows[reference.insert(keys)])
    if grad_mode == "fused":
        assert model.table.weight.grad is None


def test_the_forward_reads_stale_rows_up_to_date_and_writes_none() -> None:
    table, lone = _variable(), _lone()
    optimizer = optim.Adam([*table.parameters(), lone], lr=0.1, in_backward=True)
    for keys in (KEYS[:10], KEYS[:2]):
        table(keys).square().sum().backward()
        optimizer.step()
    loss = nn.table_cross_entropy(lone, table, KEYS[2:10])
    assert table_of(table.stored_weight()).is_stale()
    order = table.export().keys
    _assert_close(loss, F.cross_entropy(lone @ table.lookup(order).T, (KEYS[2:10, None] == order).nonzero()[:, 1]))


# ---- Options ---------------------------------------------------------------------------------------------------------

OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "temperature": {"temperature": 0.3},
    "normalize": {"normalize": True, "temperature": 0.2},
    "smoothing": {"label_smoothing": 0.2},
    "smoothing and cosines": {"label_smoothing": 0.3, "normalize": True},
    "block": {"block": 7},
    "sum": {"reduction": "sum"},
}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("grad_mode", ["fused", "dense"])
@pytest.mark.parametrize("name", OPTIONS)
def test_options_beside_float64(name: str, grad_mode: str, dtype: torch.dtype) -> None:
    """SGD with a rate of 1 moves every parameter by its gradient, so that a fused table shows it."""
    options = OPTIONS[name]
    table, lone = _variable(grad_mode, dtype=dtype), torch.nn.Parameter(_lone().detach().to(dtype))
    table.insert(KEYS[:30], torch.randn(30, DIM, generator=torch.Generator().manual_seed(1)).to(dtype))
    table.erase(KEYS[10:20])
    order, before, *_ = table.export()
    rows, input = before.double().requires_grad_(), lone.detach().double().clone().requires_grad_()
    optimizer = optim.SGD([*table.parameters(), lone], lr=1.0, in_backward=grad_mode == "fused")
    target = KEYS[[0, 5, 25, 0, 9, 29, 1, 21]]  # the key -100 is ignored
    loss = nn.table_cross_entropy(lone, table, target, **options)
    loss.backward()
    optimizer.step()
    wanted = F.cross_entropy(
        (F.normalize(input) @ F.normalize(rows).T if options.get("normalize") else input @ rows.T)
        / options.get("temperature", 1),
        (target[:, None] == order).int().argmax(1).where(target != -100, -100),
        reduction=options.get("reduction", "mean"),
        label_smoothing=options.get("label_smoothing", 0),
    )
    wanted.backward()
    most = 5e-6 if dtype == torch.float32 else 1e-13
    _assert_close(loss.double(), wanted, most)
    assert rows.grad is not None and input.grad is not None
    _assert_close(before.double() - table.lookup(order).double(), rows.grad, most)
    _assert_close(input - lone.double(), input.grad, most)


@pytest.mark.parametrize("form", ["padded", "jagged"])
def test_excluded_keys_do_not_count_and_unknown_ones_say_nothing(form: str) -> None:
    table, lone = _variable("dense"), _lone()
    table.insert(KEYS[1:30], torch.randn(29, DIM, generator=torch.Generator().manual_seed(1)))
    order, values, *_ = table.export()
    target, generator = KEYS[2:10], torch.Generator().manual_seed(2)
    padded = KEYS[torch.randint(0, 60, (SAMPLES, 5), generator=generator)]
    excluded = padded if form == "padded" else JaggedTensor.from_dense(list(padded))
    loss = nn.table_cross_entropy(lone, table, target, excluded=excluded)
    left_out = (padded[:, :, None] == order).any(1) & (target[:, None] != order)
    assert left_out.any()
    scores = (lone @ values.T).masked_fill(left_out, -torch.inf)
    _assert_close(loss, F.cross_entropy(scores, (target[:, None] == order).nonzero()[:, 1]))
    assert table.total_count() == 29  # those that are excluded are not inserted


def test_the_module_gives_the_functions_loss() -> None:
    table, lone = _variable("dense"), _lone()
    module = nn.TableCrossEntropyLoss(temperature=0.5, label_smoothing=0.1)
    wanted = nn.table_cross_entropy(lone, table, KEYS[2:10], temperature=0.5, label_smoothing=0.1)
    assert torch.equal(module(lone, table, KEYS[2:10]), wanted)
    assert "a loss over all rows: a strided gradient" in table.explain()


def test_keys_of_int32() -> None:
    tables = [_variable("dense", key_dtype=dtype) for dtype in (torch.int32, torch.int64)]
    keys = torch.arange(-3, SAMPLES - 3)
    losses = [nn.table_cross_entropy(_lone(), table, keys.to(table.key_dtype)) for table in tables]
    assert torch.equal(*losses)
    assert torch.equal(nn.table_cross_entropy(_lone(), tables[1], keys.int()), losses[0])
    with pytest.raises(ValueError, match=r"^table_cross_entropy: target must be of the key_dtype of table, int32, got"):
        nn.table_cross_entropy(_lone(), tables[0], keys)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, optim.SGD])
def test_a_frozen_table_and_an_optimizer_of_torch(optimizer: Any) -> None:
    sides = []
    for grad_mode in ("dense", None):
        table, lone = _variable(grad_mode), _lone()
        steps = optimizer([*table.parameters(), lone], lr=0.5)
        for first in (2, 6):
            steps.zero_grad()
            nn.table_cross_entropy(lone, table, KEYS[first : first + SAMPLES]).backward()
            steps.step()
        sides.append(table.lookup(KEYS[:20]))
        table.requires_grad_(False)
        before = table.export().values.clone()
        nn.table_cross_entropy(lone, table, KEYS[2:10]).backward()
        assert torch.equal(table.export().values, before)
    _assert_close(*sides)


@pytest.mark.slow
@pytest.mark.parametrize("grad_mode", ["fused", "dense", "auto"])
def test_a_table_of_a_collection(grad_mode: Any) -> None:
    """The collection looks it up, and so does the table itself."""
    config = nn.EmbeddingConfig(
        name="t", num_embeddings=4, embedding_dim=DIM, feature_names=["f"], ev_option=EmbeddingVariableOption()
    )
    sides = []
    for mode in (grad_mode, "sparse"):
        torch.manual_seed(1)
        collection, lone = nn.EmbeddingCollection([config], grad_mode=mode), _lone()
        table: Any = collection.embeddings["t"]
        parameters = [*collection.parameters(), lone]
        optimizer = optim.Adam(parameters, lr=0.1, in_backward=mode in ("fused", "auto"))
        for first in (2, 5, 30):
            optimizer.zero_grad()
            ids = KEYS[first : first + SAMPLES]
            features = KeyedJaggedTensor.from_lengths_sync(
                keys=["f"], values=ids.flip(0), lengths=torch.ones(SAMPLES, dtype=torch.int64)
            )
            own = lone + collection(features)["f"].values() + table(ids + 1)
            nn.table_cross_entropy(own, table, ids).backward()
            optimizer.step()
        sides.append([lone, *table.export()[:2]])
    for actual, wanted in zip(*sides, strict=True):
        _assert_close(actual.double(), wanted.double())


@pytest.mark.slow
def test_half_types_round_the_same_numbers() -> None:
    sides = []
    for grad_mode in ("fused", "dense"):
        table = _variable(grad_mode, dtype=torch.bfloat16)
        optimizer = optim.Adam(table.parameters(), lr=0.05, in_backward=grad_mode == "fused")
        for first in (2, 6, 9):
            optimizer.zero_grad()
            nn.table_cross_entropy(_lone().detach(), table, KEYS[first : first + SAMPLES]).backward()
            optimizer.step()
        sides.append(table.lookup(KEYS[2:17]).float())
    _assert_close(*sides, most=2 * torch.finfo(torch.bfloat16).eps)


# ---- Which keys are classes ------------------------------------------------------------------------------------------


def test_a_target_is_inserted_in_training_only() -> None:
    table, lone = _variable(), _lone()
    _optimizer = optim.SGD(table.parameters(), lr=0.1, in_backward=True)
    nn.table_cross_entropy(lone, table, KEYS[2:10])
    assert sorted(table.export().keys.tolist()) == sorted(KEYS[2:10].tolist())
    assert table.export().frequencies.tolist() == [1] * SAMPLES
    unknown = KEYS[2:10].clone()
    unknown[5] = KEYS[40]
    message = re.escape(
        f"table_cross_entropy: target[5] must be a key of EmbeddingVariable 'embedding_variable' or ignore_index, "
        f"-100, got {KEYS[40]}: in eval() and without gradients none is inserted"
    )
    with torch.no_grad(), pytest.raises(IndexError, match=message):
        nn.table_cross_entropy(lone, table, unknown)
    table.eval()
    with pytest.raises(IndexError, match=message.replace(r"\[5\]", r"\[2,\ 1\]").replace(r"\ ", " ")):
        nn.table_cross_entropy(lone.view(4, 2, DIM), table, unknown.view(4, 2))
    nn.table_cross_entropy(lone, table, unknown, ignore_index=int(KEYS[40])).backward()
    assert table.total_count() == SAMPLES and table.export().frequencies.tolist() == [1] * SAMPLES


@pytest.mark.parametrize("grad_mode", ["fused", "dense"])
def test_keys_that_a_filter_has_not_admitted_are_no_classes(grad_mode: str) -> None:
    option = EmbeddingVariableOption(
        filter_option=CounterFilter(filter_freq=2), init_option=InitializerOption(default_value_no_permission=9.0)
    )
    table, lone = _variable(grad_mode, ev_option=option), torch.nn.Parameter(torch.ones(2, DIM))
    optimizer = optim.SGD([*table.parameters(), lone], lr=1.0, in_backward=grad_mode == "fused")
    table(KEYS[:1]).sum().backward()
    optimizer.step()
    with pytest.raises(IndexError, match=r"target\[1\] must be a key .* got \d+: its filter has not admitted that yet"):
        nn.table_cross_entropy(lone, table, torch.stack([KEYS[0], KEYS[5]]))
    # The loss itself admits the second one: both are classes by their initial values.
    optimizer.zero_grad()
    target = torch.stack([KEYS[0], KEYS[5]])
    loss = nn.table_cross_entropy(lone, table, target)
    initial = _variable().lookup(target).requires_grad_()
    wanted = F.cross_entropy(torch.ones(2, DIM) @ initial.T, torch.arange(2))
    wanted.backward()
    loss.backward()
    optimizer.step()
    _assert_close(loss, wanted)
    assert initial.grad is not None
    _assert_close(table.lookup(target), initial - initial.grad)
    assert table.lookup(KEYS[30:31]).eq(9.0).all()


@pytest.mark.parametrize("grad_mode", ["fused", "dense"])
def test_what_erased_keys_leave_behind_reaches_nothing(grad_mode: str) -> None:
    table, lone = _variable(grad_mode), _lone()
    optimizer = optim.Adam([*table.parameters(), lone], lr=0.1, in_backward=grad_mode == "fused")
    table.insert(KEYS[:12], torch.full((12, DIM), float("nan")))
    table.erase(KEYS[:12])
    for _ in range(2):
        optimizer.zero_grad()
        nn.table_cross_entropy(lone, table, KEYS[20:28], normalize=True, label_smoothing=0.1).backward()
        optimizer.step()
    assert table.export().values.isfinite().all() and lone.isfinite().all()
    table.eval()
    assert torch.equal(table.train()(KEYS[:12]), _variable().lookup(KEYS[:12]))


@pytest.mark.slow
@pytest.mark.parametrize("grad_mode", ["fused", "dense"])
def test_a_table_without_keys(grad_mode: str) -> None:
    table, lone = _variable(grad_mode), _lone()
    _optimizer = optim.Adam([*table.parameters(), lone], in_backward=grad_mode == "fused")
    ignored = torch.full((SAMPLES,), -100)
    for options in ({}, {"label_smoothing": 0.1}):
        loss = nn.table_cross_entropy(lone, table, ignored, reduction="sum", **options)
        loss.backward()
        assert loss == 0 and lone.grad is not None and lone.grad.eq(0).all()
        _optimizer.step()
        _optimizer.zero_grad()
    assert nn.table_cross_entropy(lone, table, ignored).isnan()
    assert nn.table_cross_entropy(lone[:0], table, ignored[:0], reduction="sum") == 0


def test_keys_are_evicted_before_the_loss_of_a_step() -> None:
    option = EmbeddingVariableOption(evict_option=LRUEvict(capacity=SAMPLES + 2))
    table, lone = _variable(ev_option=option), _lone()
    optimizer = optim.Adam([*table.parameters(), lone], in_backward=True)
    for first in (0, 4, 30):
        target = KEYS[2 + first : 2 + first + SAMPLES]
        nn.table_cross_entropy(lone, table, target).backward()
        optimizer.step()
    assert table.total_count() <= SAMPLES + 2
    assert torch.isin(target, table.export().keys).all()


# ---- Backward --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("grad_mode", ["fused", "dense"])
def test_keys_that_go_between_the_loss_and_its_backward(grad_mode: str) -> None:
    table, lone = _variable(grad_mode), _lone()
    optimizer = optim.SGD([*table.parameters(), lone], lr=1.0, in_backward=grad_mode == "fused")
    loss = nn.table_cross_entropy(lone, table, KEYS[2:10])
    table.erase(KEYS[2:3])
    before = table.export().values.clone()
    with pytest.raises(RuntimeError, match=r"were erased or evicted between the loss and its backward"):
        loss.backward()
    optimizer.step()
    assert torch.equal(table.export().values, before)


def test_a_table_that_is_stepped_between_the_loss_and_its_backward() -> None:
    table, lone = _variable(), _lone()
    optimizer = optim.SGD([*table.parameters(), lone], lr=1.0, in_backward=True)
    loss = nn.table_cross_entropy(lone, table, KEYS[2:10])
    table(KEYS[2:4]).sum().backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="the gradient of a loss over a table"):
        loss.backward()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo's, at a break
def test_compiled_code_leaves_the_loss_out_of_its_graph() -> None:
    torch.compiler.reset()
    table, lone = _variable("dense"), _lone()
    compiled = torch.compile(lambda: nn.table_cross_entropy(lone * 2, table, KEYS[2:10]) * 3, backend="aot_eager")
    loss = compiled()
    loss.backward()
    grad, lone.grad = lone.grad, None
    wanted = nn.table_cross_entropy(lone * 2, table, KEYS[2:10]) * 3
    wanted.backward()
    _assert_close(loss, wanted)
    assert grad is not None and lone.grad is not None
    _assert_close(grad, lone.grad)


# ---- Refusals --------------------------------------------------------------------------------------------------------


def test_refusals_name_what_is_wrong_and_insert_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table, lone, target = _variable("dense"), _lone(), KEYS[2:10]
    start = "^table_cross_entropy: "
    for argument in ("bias", "weight"):
        with pytest.raises(ValueError, match=rf"{start}{argument} must be None for a table that grows"):
            nn.table_cross_entropy(lone, table, target, **{argument: torch.ones(4)})
    for options, message in (
        ({"temperature": 0}, "temperature must be finite and above 0"),
        ({"label_smoothing": 0.1, "excluded": KEYS[:8, None]}, "label_smoothing must be 0 where classes are excluded"),
        ({"excluded": KEYS[:7, None]}, "excluded must have a row of int32 or int64 ids for each of 8 samples"),
    ):
        with pytest.raises(ValueError, match=f"{start}{message}"):
            nn.table_cross_entropy(lone, table, target, **options)
    with pytest.raises(ValueError, match=f"{start}target must be int32 or int64 of shape"):
        nn.table_cross_entropy(lone, table, target[:-1])
    with pytest.raises(ValueError, match=rf"{start}table must be \[V, 5\]"):
        nn.table_cross_entropy(lone[:, :5], table, target)
    assert table.total_count() == 0
    storage = StorageOption("DRAM_SSD", storage_path=str(tmp_path), storage_size=[1 << 16])
    tiers = _variable(name="t", ev_option=EmbeddingVariableOption(storage_option=storage))
    with pytest.raises(ValueError, match=rf"{start}table must have all rows in one tier.*'t'.*nn.sampled_softmax_loss"):
        nn.table_cross_entropy(lone, tiers, target)
    with pytest.raises(RuntimeError, match="made with in_backward=True, by which backward.. updates it, got none"):
        nn.table_cross_entropy(lone, _variable(), target)
    monkeypatch.setattr(table_of(table.stored_weight()), "part", SimpleNamespace(name="t", replicated=False))
    with pytest.raises(ValueError, match=rf"{start}table must be whole in this process"):
        nn.table_cross_entropy(lone, table, target)
