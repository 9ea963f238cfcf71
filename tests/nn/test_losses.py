"""``nn.table_cross_entropy``: fused beside dense, tied and not, and beside torch's formula."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from torchsparse_rec import JaggedTensor, nn, optim
from torchsparse_rec.tables.table import table_of

# The kernels that a loss calls have tests of their own, emulated too: here those that choose what they are given.
KERNELS = pytest.mark.usefixtures("kernels")

ROWS, DIM, SAMPLES = 301, 12, 24

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda p, **more: optim.SGD(p, lr=0.5, **more),
    "momentum": lambda p, **more: optim.SGD(p, lr=0.2, momentum=0.9, nesterov=True, weight_decay=0.01, **more),
    "Adagrad": lambda p, **more: optim.Adagrad(p, lr=0.1, **more),
    "RowWiseAdagrad": lambda p, **more: optim.RowWiseAdagrad(p, lr=0.1, **more),
    "Adam": lambda p, **more: optim.Adam(p, lr=0.01, **more),
    "Adam-decay": lambda p, **more: optim.Adam(p, lr=0.01, weight_decay=0.1, **more),
    "AdamW": lambda p, **more: optim.AdamW(p, lr=0.01, weight_decay=0.1, **more),
    "amsgrad": lambda p, **more: optim.Adam(p, lr=0.01, amsgrad=True, **more),
    "lazy": lambda p, **more: optim.Adam(p, lr=0.01, lazy=True, **more),
    "PartialRowWiseAdam": lambda p, **more: optim.PartialRowWiseAdam(p, lr=0.01, **more),
    "seen": lambda p, **more: optim.Adam(p, lr=0.01, weight_decay=0.1, decay="seen", **more),
    "RMSprop": lambda p, **more: optim.RMSprop(p, lr=0.01, momentum=0.5, **more),
    "Adadelta": lambda p, **more: optim.Adadelta(p, **more),
    "Adamax": lambda p, **more: optim.Adamax(p, **more),
    "Ftrl": lambda p, **more: optim.Ftrl(p, lr=0.1, l1=0.001, **more),
    "LAMB": lambda p, **more: optim.LAMB(p, lr=0.01, **more),
    "Lion": lambda p, **more: optim.Lion(p, lr=0.001, weight_decay=0.1, **more),
}
# What a step reads of the table: ids that are looked up before the loss, how many losses, ids that are after it.
PROGRAMS = ("untied", "tied", "lookups alone", "after the loss", "two losses")


class _Model(torch.nn.Module):
    def __init__(self, grad_mode: str | None, dtype: torch.dtype = torch.float32, **options: Any) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        rows = torch.randn(ROWS, DIM, generator=generator).mul_(0.5)
        self.items = nn.Embedding.from_pretrained(rows.to(dtype), freeze=False, grad_mode=grad_mode, **options)
        self.lone = torch.nn.Parameter(torch.randn(SAMPLES, DIM, generator=generator))
        self.bias = torch.nn.Parameter(torch.randn(ROWS, generator=generator))

    def losses(self, program: str, step: int, ids: Tensor, target: Tensor, **options: Any) -> Tensor:
        if program == "from the loss" and step == 0:
            loss = nn.table_cross_entropy(self.lone, self.items, target, **options)
            return loss + self.items(ids).square().mean()
        own = self.lone if program == "untied" else self.lone + self.items(ids).mean(1).to(self.lone.dtype)
        if program == "lookups alone" and step % 3 == 2:
            return own.square().mean()
        loss = nn.table_cross_entropy(own, self.items, target, bias=self.bias, **options)
        if program == "after the loss":
            loss = loss + self.items(ids.flip(0)).square().mean()
        if program == "two losses":
            loss = loss + 0.5 * nn.table_cross_entropy(own[:5] * 2, self.items, target[:5].flip(0), block=37)
        return loss


def _batches(steps: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(7)
    draw = lambda *shape: torch.randint(0, ROWS, shape, generator=generator)  # noqa: E731
    return [(draw(SAMPLES, 3), draw(SAMPLES)) for _ in range(steps)]


def _train(model: Any, optimizer: torch.optim.Optimizer, program: str, steps: int = 6, **options: Any) -> list[float]:
    losses = []
    for step, (ids, target) in enumerate(_batches(steps)):
        optimizer.zero_grad()
        loss = model.losses(program, step, ids, target, **options)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _assert_close(actual: Tensor, wanted: Tensor, most: float = 3e-6) -> None:
    assert (actual.detach() - wanted.detach()).abs().max() <= most * max(wanted.detach().abs().max(), 1)


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.filterwarnings("ignore:.*updates all rows of a table:UserWarning")
def test_fused_is_dense(name: str, program: str) -> None:
    fused, dense = _Model("fused"), _Model("dense")
    losses = _train(fused, OPTIMIZERS[name](fused.parameters(), in_backward=True), program, block=64)
    wanted = _train(dense, OPTIMIZERS[name](dense.parameters()), program, block=64)
    _assert_close(torch.tensor(losses), torch.tensor(wanted))
    for own, reference in zip(fused.parameters(), dense.parameters(), strict=True):
        _assert_close(own, reference)
    assert fused.items.weight.grad is None


@KERNELS
@pytest.mark.parametrize("name", ["Adam", "RMSprop", "Ftrl"])
@pytest.mark.filterwarnings("ignore:.*updates all rows of a table:UserWarning")
def test_kernels_of_both_devices(name: str) -> None:
    test_fused_is_dense(name, "two losses")


def _float64(input: Tensor, rows: Tensor, target: Tensor, options: dict[str, Any], padding: int = -1) -> Tensor:
    """Return the losses by torch's own formula of all scores, in float64."""
    input, rows = input.double(), rows.double()
    if options.get("normalize"):
        input, rows = F.normalize(input, eps=1e-12), F.normalize(rows, eps=1e-12)
    scores = input @ rows.T / options.get("temperature", 1)
    if (bias := options.get("bias")) is not None:
        scores = scores + bias.double()
    if (excluded := options.get("excluded")) is not None:
        for n, ids in enumerate(excluded.tolist()):
            scores[n, [id for id in ids if id not in (-1, target[n].item())]] = -torch.inf
    weight, keep = options.get("weight"), [row for row in range(len(rows)) if row != padding]
    places = torch.full((len(rows) + 1,), -100)
    places[keep] = torch.arange(len(keep))
    return F.cross_entropy(
        scores[:, keep],
        places[target.where(target >= 0, len(rows))],
        None if weight is None else weight.double()[keep],
        reduction="none",
        label_smoothing=options.get("label_smoothing", 0.0),
    )


OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "temperature": {"temperature": 0.3},
    "normalize": {"normalize": True, "temperature": 0.2},
    "smoothing": {"label_smoothing": 0.2},
    "weight": {"weight": torch.rand(ROWS, generator=torch.Generator().manual_seed(1))},
    "smoothing and weight": {
        "label_smoothing": 0.3,
        "normalize": True,
        "weight": torch.rand(ROWS, generator=torch.Generator().manual_seed(1)),
    },
    "excluded": {"excluded": torch.randint(-1, ROWS, (SAMPLES, 5), generator=torch.Generator().manual_seed(2))},
    "block": {"block": 7},
}


@KERNELS
@pytest.mark.parametrize("padding", [None, 5])
@pytest.mark.parametrize("grad_mode", ["fused", "dense"])
@pytest.mark.parametrize("name", OPTIONS)
def test_options_beside_float64(name: str, grad_mode: str, padding: int | None) -> None:
    """SGD with a rate of 1 moves every parameter by its gradient, so that a fused table shows it."""
    options, (ids, target) = OPTIONS[name], _batches(1)[0]
    target[[1, 4]] = target.new_tensor([-100, -100 if padding is None else padding])
    model = _Model(grad_mode, padding_idx=padding)
    before = copy.deepcopy(model).double()
    optimizer = optim.SGD(model.parameters(), lr=1.0, in_backward=grad_mode == "fused")
    own = model.lone + model.items(ids).mean(1)
    losses = nn.table_cross_entropy(own, model.items, target, bias=model.bias, reduction="none", **options)
    factors = torch.linspace(0.5, 2, SAMPLES)
    (losses * factors).sum().backward()
    optimizer.step()
    looked_up = F.embedding(ids, before.items.weight, padding_idx=padding).mean(1)
    wanted = _float64(
        before.lone + looked_up,
        before.items.weight,
        target,
        options | {"bias": before.bias},
        -1 if padding is None else padding,
    )
    wanted[target == (-1 if padding is None else padding)] = 0
    (wanted * factors.double()).sum().backward()
    _assert_close(losses.double(), wanted)
    for own, reference in zip(model.parameters(), before.parameters(), strict=True):
        _assert_close(reference - own.double(), reference.grad)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_the_module_and_a_tensor_and_torchs_table_give_the_functions_losses(reduction: str) -> None:
    model, (_, target) = _Model("dense"), _batches(1)[0]
    weight = torch.rand(ROWS)
    module = nn.TableCrossEntropyLoss(weight=weight, reduction=reduction, label_smoothing=0.1, temperature=2.0)
    of_torch = torch.nn.Embedding.from_pretrained(model.items.weight.detach())
    tables: list[Any] = [model.items, model.items.weight, of_torch]
    given = [module(model.lone, table, target, bias=model.bias) for table in tables]
    wanted = F.cross_entropy(
        model.lone @ model.items.weight.T / 2 + model.bias, target, weight, reduction=reduction, label_smoothing=0.1
    )
    for loss in given:
        assert torch.equal(loss, given[0])
        torch.testing.assert_close(loss, wanted)
    assert list(module.state_dict()) == ["weight"] and list(nn.TableCrossEntropyLoss().state_dict()) == []
    assert "temperature=2.0" in repr(module)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_dtypes(dtype: torch.dtype) -> None:
    """Fused and dense round the same float32 numbers: a step's result differs by one unit of the half type at most."""
    sides = []
    for grad_mode in ("fused", "dense"):
        model = _Model(grad_mode, dtype)
        if dtype == torch.float64:
            model.double()
        optimizer = optim.Adam(model.parameters(), lr=0.01, in_backward=grad_mode == "fused")
        losses = _train(model, optimizer, "tied", steps=3)
        sides.append((torch.tensor(losses, dtype=torch.float64), model.items.weight.double()))
    (fused, its), (dense, wanted) = sides
    most = 1e-12 if dtype == torch.float64 else 2 * torch.finfo(dtype).eps
    _assert_close(fused, dense, most)
    _assert_close(its, wanted, most)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Adam", "RMSprop"])
@pytest.mark.filterwarnings("ignore:.*updates all rows of a table:UserWarning")
def test_stochastic_rounding_moves_rows_by_their_mean(name: str) -> None:
    """Steps of a hundredth of a unit, each of which rounding to nearest drops, move rows where they are drawn."""
    kind = getattr(optim, name)
    table = nn.Embedding.from_pretrained(torch.ones(2048, 16, dtype=torch.bfloat16), freeze=False, grad_mode="fused")
    rate = {"Adam": 4e-4, "RMSprop": 4e-5}[name]  # a step of either is of about the rate, that of RMSprop ten times it
    optimizer = kind(table.parameters(), lr=rate, stochastic_rounding=True, in_backward=True)
    nn.table_cross_entropy(torch.ones(300, 16), table, torch.zeros(300).long(), block=512).backward()
    optimizer.step()
    moved = (1 - table.weight.float())[1:]
    assert 0.9 * 4e-4 < moved.mean() < 1.1 * 4e-4
    # The blocks draw numbers of their own.
    assert not torch.equal(moved[100:400], moved[612:912])


def test_bits_do_not_depend_on_threads(restore_threads: None) -> None:
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        model = _Model("fused")
        _train(model, optim.Adam(model.parameters(), in_backward=True), "tied", block=32)
        results.append(list(model.parameters()))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.filterwarnings("ignore:.*(every step updates all its rows|each step copies all):UserWarning")
def test_a_transposed_table() -> None:
    sides = []
    for grad_mode in ("fused", "dense"):
        model = _Model(grad_mode)
        model.items.weight = torch.nn.Parameter(model.items.weight.detach().T.contiguous().T)
        _train(model, optim.Adam(model.parameters(), in_backward=grad_mode == "fused"), "tied", steps=3)
        sides.append(model.items.weight)
    _assert_close(*sides)


# ---- Stale rows, versions, backwards ---------------------------------------------------------------------------------


@KERNELS
@pytest.mark.parametrize("grad_mode", ["fused", "sparse", "auto"])
def test_rows_that_are_stale_are_read_up_to_date(grad_mode: str) -> None:
    model, reference = _Model(grad_mode), _Model("dense")
    optimizer = optim.Adam(model.parameters(), lr=0.1, in_backward=grad_mode != "sparse")
    for side, its in ((model, optimizer), (reference, optim.Adam(reference.parameters(), lr=0.1))):
        for step, (ids, target) in enumerate(_batches(5)):
            its.zero_grad()
            if step < 4:
                side.items(ids[: 4 - step]).square().sum().backward()  # others move by what they remember
            else:
                loss = nn.table_cross_entropy(side.lone, side.items, target)
                if grad_mode == "fused" and side is model:
                    assert table_of(model.items.stored_weight()).is_stale()  # the forward writes nothing
                loss.backward()
            its.step()
        if side is model:
            kept = loss.detach()
    _assert_close(kept, loss)
    _assert_close(model.items.weight, reference.items.weight)


def test_a_loss_without_gradient_reads_and_steps_nothing() -> None:
    model, (_, target) = _Model("fused"), _batches(1)[0]
    before = model.items.weight.detach().clone()
    with torch.no_grad():
        loss = nn.table_cross_entropy(model.lone, model.items, target)
    assert not loss.requires_grad
    model.items.requires_grad_(False)
    nn.table_cross_entropy(model.lone, model.items, target).backward()
    _assert_close(model.lone.grad, torch.autograd.grad(F.cross_entropy(model.lone @ before.T, target), model.lone)[0])
    assert torch.equal(model.items.weight, before)


def test_a_table_that_has_left_its_optimizer() -> None:
    model, reference = _Model("fused"), _Model("dense")
    for side in (model, reference):
        optimizer = optim.SGD(side.parameters(), lr=0.1, in_backward=side is model)
        optimizer.param_groups[0]["params"] = [p for p in side.parameters() if p is not side.items.stored_weight()]
        _train(side, optimizer, "untied", steps=2)
        _train(side, optimizer, "tied", steps=2)
    for own, wanted in zip(model.parameters(), reference.parameters(), strict=True):
        _assert_close(own, wanted)
    assert torch.equal(model.items.weight, _Model("dense").items.weight)


@pytest.mark.parametrize("kind", ["inputs", "grad"])
def test_a_backward_that_is_asked_for_other_tensors_leaves_the_table(kind: str) -> None:
    model, (_, target) = _Model("fused"), _batches(1)[0]
    before = model.items.weight.detach().clone()
    optimizer = optim.SGD(model.parameters(), lr=1.0, in_backward=True)
    loss = nn.table_cross_entropy(model.lone, model.items, target)
    if kind == "inputs":
        loss.backward(inputs=[model.lone])
    else:
        (model.lone.grad,) = torch.autograd.grad(loss, model.lone)
    optimizer.step()
    assert torch.equal(model.items.weight, before) and model.lone.grad is not None


@pytest.mark.parametrize("grad_mode", ["fused", "dense"])
@pytest.mark.parametrize("program", ["untied", "tied"])
def test_biases_that_are_stepped_within_the_backward(program: str, grad_mode: str) -> None:
    sides = []
    for hooked in (True, False):
        model = _Model(grad_mode)
        optimizer = optim.SGD([*model.items.parameters(), model.lone], lr=1.0, in_backward=grad_mode == "fused")
        of_bias = torch.optim.SGD([model.bias], lr=50.0)
        if hooked:
            model.bias.register_post_accumulate_grad_hook(lambda _, step=of_bias.step: step())
        model.losses(program, 0, *_batches(1)[0]).backward()
        optimizer.step()
        if not hooked:
            of_bias.step()
        sides.append(model)
    for own, reference in zip(sides[0].parameters(), sides[1].parameters(), strict=True):
        assert torch.equal(own, reference)


@pytest.mark.parametrize("grad_mode", ["fused", "dense"])
@pytest.mark.parametrize("program", ["untied", "tied"])
def test_autocast_around_loss_and_backward_changes_nothing(program: str, grad_mode: str) -> None:
    sides = []
    for enabled in (True, False):
        model = _Model(grad_mode)
        optimizer = optim.SGD(model.parameters(), lr=1.0, in_backward=grad_mode == "fused")
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            model.losses(program, 0, *_batches(1)[0], label_smoothing=0.5, normalize=True).backward()
        optimizer.step()
        sides.append(model)
    for own, reference in zip(sides[0].parameters(), sides[1].parameters(), strict=True):
        assert torch.equal(own, reference)


@pytest.mark.parametrize("how", ["assign", "parameter"])
def test_a_table_that_was_replaced_since_the_loss(how: str) -> None:
    model, (_, target) = _Model("fused"), _batches(1)[0]
    _optimizer = optim.SGD(model.parameters(), lr=1.0, in_backward=True)
    loss = nn.table_cross_entropy(model.lone, model.items, target)
    rows = torch.randn(ROWS, DIM)
    if how == "assign":
        model.items.load_state_dict({"weight": rows}, assign=True)
    else:
        model.items.weight = torch.nn.Parameter(rows)
    with pytest.raises(RuntimeError, match="^the gradient of a loss over a table needs .* updated since, or replaced"):
        torch.autograd.grad(loss, model.lone)


def test_a_table_that_was_updated_since_the_loss() -> None:
    model, (_, target) = _Model("fused"), _batches(1)[0]
    optimizer = optim.SGD(model.parameters(), lr=1.0, in_backward=True)
    losses = [nn.table_cross_entropy(model.lone, model.items, target) for _ in range(2)]
    losses[0].backward()
    with pytest.raises(RuntimeError, match=r"^grad_mode='fused': a second backward\(\) reached a table"):
        losses[1].backward()
    optimizer.step()
    loss = nn.table_cross_entropy(model.lone, model.items, target)
    with torch.no_grad():
        model.items.weight.mul_(2)
    with pytest.raises(RuntimeError, match="^the gradient of a loss over a table needs the tables as they were"):
        loss.backward()


def test_second_derivatives_are_refused() -> None:
    model, (_, target) = _Model("fused"), _batches(1)[0]
    _optimizer = optim.SGD(model.parameters(), lr=1.0, in_backward=True)
    loss = nn.table_cross_entropy(model.lone, model.items, target)
    (gradient,) = torch.autograd.grad(loss, model.lone, create_graph=True)
    with pytest.raises(RuntimeError, match="^table_cross_entropy: its gradients have no second derivatives"):
        gradient.square().sum().backward()


def test_a_backward_that_raises_is_forgotten_by_the_next_step() -> None:
    model, reference = _Model("fused"), _Model("dense")
    optimizer = optim.Adam(model.parameters(), in_backward=True)
    ids, target = _batches(1)[0]

    class Raises(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            raise ValueError("stop")

    own = model.lone + Raises.apply(model.items(ids)).mean(1)
    with pytest.raises(ValueError, match="stop"):
        nn.table_cross_entropy(own, model.items, target).backward()
    optimizer.zero_grad()
    del own
    losses = _train(model, optimizer, "tied")
    assert losses == pytest.approx(_train(reference, optim.Adam(reference.parameters()), "tied"), rel=1e-6)
    _assert_close(model.items.weight, reference.items.weight)


@pytest.mark.parametrize("program", ["untied", "two losses"])
def test_a_checkpoint_resumes_bit_for_bit(program: str) -> None:
    model = _Model("fused")
    optimizer = optim.Adam(model.parameters(), in_backward=True)
    _train(model, optimizer, program, steps=3)
    other = _Model("fused")
    resumed = optim.Adam(other.parameters(), in_backward=True)
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(optimizer.state_dict())
    assert _train(model, optimizer, program) == _train(other, resumed, program)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_two_tables_and_two_optimizers() -> None:
    """Tables of one optimizer's group share a clock until one of them is stepped apart from the others."""
    sides = []
    for grad_mode in ("fused", "dense"):
        models = torch.nn.ModuleList(_Model(grad_mode) for _ in range(3))
        options = {"lr": 0.05, "in_backward": grad_mode == "fused"}
        optimizers = [
            optim.Adam(models[:2].parameters(), **options),
            optim.SGD(models[2].parameters(), momentum=0.9, **options),
        ]
        for step, (ids, target) in enumerate(_batches(4)):
            [optimizer.zero_grad() for optimizer in optimizers]
            first, second, third = (model.losses("tied", step, ids, target) for model in models)
            (first + (second if step != 1 else models[1].items(ids).sum()) + third).backward()
            [optimizer.step() for optimizer in optimizers]
        sides.append(models)
    for own, reference in zip(sides[0].parameters(), sides[1].parameters(), strict=True):
        _assert_close(own, reference)


@KERNELS
@pytest.mark.parametrize("what", ["all ignored", "all excluded", "no samples", "nan"])
def test_samples_that_do_not_count(what: str) -> None:
    sides = []
    for grad_mode in ("fused", "dense"):
        model = _Model(grad_mode)
        optimizer = optim.Adam(model.parameters(), lr=0.1, in_backward=grad_mode == "fused")
        input, target, options = model.lone[:3], torch.tensor([4, 9, 7]), {}
        if what == "all ignored":
            target = target.fill_(-100)
        elif what == "all excluded":
            options = {"excluded": torch.arange(ROWS).repeat(3, 1), "block": 16}
        elif what == "no samples":
            input, target = input[:0], target[:0]
        else:
            input = input * torch.tensor([[1.0], [torch.nan], [1.0]])
        loss = nn.table_cross_entropy(input, model.items, target, **options)
        loss.backward()
        optimizer.step()
        sides.append((loss.detach(), model.items.weight.detach()))
    (loss, rows), (wanted, reference) = sides
    torch.testing.assert_close(loss, wanted, equal_nan=True)
    torch.testing.assert_close(rows, reference, equal_nan=True, rtol=0, atol=3e-6)
    assert loss.isnan() if what != "all excluded" else loss == 0
    assert rows.isnan().all() if what == "nan" else rows.isfinite().all()


# ---- auto, compilers, refusals ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_small", [False, True])
@pytest.mark.parametrize(
    "program", ["untied", "tied", "lookups alone", "after the loss", "two losses", "from the loss"]
)
def test_auto_goes_the_way_of_the_lookups(program: str, is_small: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the loss comes first, it goes the fused way if it may, and lookups follow."""
    if not is_small:
        for name in ("SMALL_TABLE", "SMALL_ELEMENTS", "ELEMENTS_PER_ID"):
            monkeypatch.setattr(f"torchsparse_rec.nn.auto.{name}", 0)
    sides = []
    for grad_mode, in_backward in (("auto", True), ("auto", False), ("dense", False)):
        model = _Model(grad_mode)
        optimizer = optim.Adam(model.parameters(), lr=0.05, in_backward=in_backward)
        losses = _train(model, optimizer, program)
        sides.append((losses, model))
        fuses = in_backward and (not is_small or program in ("untied", "from the loss"))
        assert (model.items.weight.grad is None) == fuses
        if grad_mode == "auto":
            assert ("grad_mode='auto' -> fused" in model.items.explain()) == fuses
    for losses, model in sides[:2]:
        _assert_close(torch.tensor(losses), torch.tensor(sides[2][0]))
        _assert_close(model.items.weight, sides[2][1].items.weight)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # torch's own
def test_a_sparse_table_with_stale_rows_breaks_the_graph() -> None:
    torch.compiler.reset()
    model, (ids, target) = _Model("sparse"), _batches(1)[0]
    optimizer = optim.Adam(model.parameters(), lr=0.1)
    for rows in (ids, ids[:1], ids[1:2]):
        optimizer.zero_grad()
        model.items(rows).sum().backward()
        optimizer.step()
    run = torch.compile(lambda: nn.table_cross_entropy(model.lone, model.items, target), backend="aot_eager")
    assert table_of(model.items.stored_weight()).is_stale()
    loss = run()
    torch.testing.assert_close(loss, F.cross_entropy(model.lone @ model.items.weight.T, target))


def test_explain_says_what_a_loss_gives() -> None:
    lines = {}
    for grad_mode in ("sparse", "fused", None):
        model = _Model(grad_mode)
        optimizer = optim.Adam(model.parameters(), in_backward=grad_mode == "fused")
        assert "a loss over all rows" not in model.items.explain()
        _train(model, optimizer, "tied", steps=1)
        lines[grad_mode] = model.items.explain().splitlines()[-1]
    strided = "  a loss over all rows: a strided gradient"
    assert lines == {
        "sparse": strided,
        None: strided,
        "fused": "  a loss over all rows: a step of each block in backward",
    }


@pytest.mark.slow
@pytest.mark.parametrize("grad_mode", ["fused", "dense", "auto"])
def test_compiles_whole(grad_mode: str) -> None:
    torch.compiler.reset()
    sides = []
    for compiles in (True, False):
        model = _Model(grad_mode)
        optimizer = optim.Adam(model.parameters(), lr=0.05, in_backward=grad_mode == "fused")

        def step(ids: Tensor, target: Tensor, model: Any = model) -> Tensor:
            own = model.lone + model.items(ids).mean(1)
            loss = nn.table_cross_entropy(own, model.items, target, bias=model.bias, label_smoothing=0.1, block=64)
            return loss + nn.table_cross_entropy(own, model.items, target, bias=model.bias, temperature=0.5)

        run = torch.compile(step, fullgraph=True, backend="aot_eager") if compiles else step
        for ids, target in _batches(4):
            optimizer.zero_grad()
            loss = run(ids, target)
            loss.backward()
            optimizer.step()
        ids, target = _batches(5)[4]
        model.items(ids[:1]).sum().backward()  # leaves rows stale
        optimizer.step()
        with torch.no_grad():
            sides.append((loss, run(ids, target), model))
    for actual, wanted in zip(sides[0][:2], sides[1][:2], strict=True):
        _assert_close(actual, wanted)
    for own, reference in zip(sides[0][2].parameters(), sides[1][2].parameters(), strict=True):
        _assert_close(own, reference)


def test_opcheck() -> None:
    model, (_, target) = _Model("fused"), _batches(1)[0]
    _optimizer = optim.SGD(model.parameters(), lr=0.0, in_backward=True)
    operator, leaf = torch.ops.torchsparse_rec_nn.fused_loss.default, model.items._leaf
    given = (model.lone, target, model.bias, None, None, None, 0.1, True, 64, 3)
    for recorded in (True, False):
        torch.library.opcheck(
            operator,
            (leaf, *given, recorded, True, model.items._number, 0),
            test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
        )


def _message(call: Callable[[], Any]) -> str:
    with pytest.raises((IndexError, RuntimeError, TypeError, ValueError)) as error:
        call()
    return f"{type(error.value).__name__}: {error.value}"


def test_refusals_name_what_is_wrong() -> None:
    model, (_, target) = _Model("fused"), _batches(1)[0]
    loss = lambda table=model.items, input=model.lone, target=target, **options: (  # noqa: E731
        lambda: nn.table_cross_entropy(input, table, target, **options)
    )
    optimizer = optim.SGD(model.parameters(), lr=1.0, in_backward=True)
    start = "ValueError: table_cross_entropy: "
    collection = nn.EmbeddingCollection(
        [nn.EmbeddingConfig(name="t", num_embeddings=4, embedding_dim=DIM, feature_names=["f"])]
    )
    for table in (collection, 3):
        assert _message(loss(table)).startswith(
            "TypeError: table_cross_entropy: table must be an Embedding, an EmbeddingBag, an EmbeddingVariable or a "
            "tensor, got "
        )
    assert _message(loss(nn.Embedding(4, DIM + 1))).startswith(f"{start}table must be [V, {DIM}] of")
    assert _message(loss(bias=torch.ones(4))).startswith(f"{start}bias must be [{ROWS}] of")
    assert "a number for each row of table" in _message(loss(bias=torch.ones(4)))
    assert _message(loss(temperature=0)).startswith(f"{start}temperature must be finite and above 0")
    assert _message(loss(label_smoothing=0.1, excluded=JaggedTensor.from_dense([torch.ones(1)]))).startswith(start)
    assert _message(loss(weight=torch.ones(ROWS, requires_grad=True))).startswith("RuntimeError: table_cross_entropy:")
    assert _message(loss(target=target[:-1])).startswith(f"{start}target must be int32 or int64")
    model.items.weight.register_hook(lambda grad: grad)
    assert "hook" in _message(loss())
    model = _Model("fused")
    assert "no optimizer" in _message(loss(model.items)) or "got none" in _message(loss(model.items))
    assert model.items.weight.grad is None and optimizer is not None


@pytest.mark.parametrize("grad_mode", ["sparse", "auto"])
def test_a_gradient_that_ddp_does_not_expect_is_refused(grad_mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, (_, target) = _Model(grad_mode), _batches(1)[0]
    monkeypatch.setattr("torchsparse_rec.nn.losses.is_in_ddp", lambda: True)
    monkeypatch.setattr(model.items._auto, "mode", "sparse")
    monkeypatch.setattr(model.items._auto, "asked", True)
    with pytest.raises(RuntimeError, match=f"^table_cross_entropy: with grad_mode='{grad_mode}' DistributedData"):
        nn.table_cross_entropy(model.lone, model.items, target)


def test_a_table_of_padding_alone() -> None:
    table = nn.Embedding(1, DIM, padding_idx=0)
    losses = nn.table_cross_entropy(
        torch.ones(2, DIM), table, torch.tensor([0, -100]), label_smoothing=0.1, reduction="none"
    )
    assert losses.tolist() == [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("frozen", [False, True])
def test_a_compiled_loss_over_a_sparse_table_without_its_gradient(frozen: bool) -> None:
    torch.compiler.reset()
    model, (_, target) = _Model("sparse"), _batches(1)[0]
    model.items.requires_grad_(not frozen)
    run = torch.compile(lambda: nn.table_cross_entropy(model.lone, model.items, target), backend="aot_eager")
    with torch.set_grad_enabled(frozen):
        torch.testing.assert_close(run(), F.cross_entropy(model.lone @ model.items.weight.T, target))


def test_a_bad_target_raises_before_anything_is_written() -> None:
    model, (ids, target) = _Model("fused"), _batches(1)[0]
    optimizer = optim.SGD(model.parameters(), lr=1.0, in_backward=True)
    before = model.items.weight.detach().clone()
    target[7] = ROWS
    with pytest.raises(IndexError, match=rf"target\[7\] must be in \[0, {ROWS}\) or ignore_index, -100, got {ROWS}"):
        model.losses("tied", 0, ids, target).backward()
    assert torch.equal(model.items.weight, before)
    optimizer.zero_grad()


def test_a_gradient_of_other_code_is_loud() -> None:
    model, (_, target) = _Model("fused"), _batches(1)[0]
    optimizer = optim.SGD(model.parameters(), lr=1.0, in_backward=True)
    loss = nn.table_cross_entropy(model.lone, model.items, target) + model.items.weight.square().sum()
    loss.backward()
    with pytest.raises(RuntimeError, match=r"something other than its lookups and nn\.table_cross_entropy"):
        optimizer.step()
