"""Training under torch.compile(fullgraph=True) with dense and fused gradients, compared with eager training."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo.testing
from kinds import table_of
from nn.cases import train_squares

from torchsparse_rec import KeyedJaggedTensor, nn, optim
from torchsparse_rec.nn._fused_graph import current_lookup
from torchsparse_rec.nn.plan import LookupPlan


def batch(seed: int, size: int) -> KeyedJaggedTensor:
    """Draw a batch of two features."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (2 * size,), generator=generator)
    values = torch.randint(0, 20, (int(lengths.sum()),), generator=generator)
    return KeyedJaggedTensor(["f", "g"], values, lengths=lengths)


class Model(torch.nn.Module):
    """A collection, a single bag, a single table, and a dense layer."""

    def __init__(self, grad_mode: str) -> None:
        super().__init__()
        tables = [
            nn.EmbeddingBagConfig(name="a", num_embeddings=20, embedding_dim=4, feature_names=["f"], pooling="mean"),
            nn.EmbeddingBagConfig(name="b", num_embeddings=30, embedding_dim=2, feature_names=["g", "f"]),
        ]
        self.bags = nn.EmbeddingBagCollection(tables, grad_mode=grad_mode)
        self.bag = nn.EmbeddingBag(20, 3, mode="sum", grad_mode=grad_mode)
        self.table = nn.Embedding(20, 3, grad_mode=grad_mode)
        self.head = torch.nn.Linear(14, 1)

    def forward(self, x: KeyedJaggedTensor, ids: torch.Tensor) -> torch.Tensor:
        """Return a score for every example."""
        rows = [self.bags(x).values(), self.bag(ids), self.table(ids[:, 0])]
        return self.head(torch.cat(rows, 1)).squeeze(1)


def train(model: torch.nn.Module, forward, steps: int = 4) -> list[float]:
    """Train, and return the losses."""
    optimizer = optim.Adam(model.parameters(), lr=0.05, in_backward=True)
    losses = []
    for step in range(steps):
        size = 5 + step % 2
        ids = torch.randint(0, 20, (size, 3), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = forward(batch(step, size), ids).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("grad_mode", ["dense", "fused"])
def test_a_compiled_model_trains_as_eager(grad_mode: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    eager, compiled = Model(grad_mode), Model(grad_mode)
    compiled.load_state_dict(eager.state_dict())
    want = train(eager, eager)
    got = train(compiled, torch.compile(compiled, fullgraph=True, backend="aot_eager", dynamic=True))
    assert got == pytest.approx(want, rel=1e-6)
    for name, value in eager.state_dict().items():
        torch.testing.assert_close(compiled.state_dict()[name], value, rtol=1e-6, atol=1e-7)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_inductor_too() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    eager, compiled = Model("fused"), Model("fused")
    compiled.load_state_dict(eager.state_dict())
    want = train(eager, eager, 2)
    got = train(compiled, torch.compile(compiled, fullgraph=True, dynamic=True), 2)
    assert got == pytest.approx(want, rel=1e-5)


# ---- Stale rows ------------------------------------------------------------------------------------------------------

KINDS = ("table", "bag", "collection")
AS_TORCH = [(kind, {"grad_mode": None, "sparse": True}) for kind in ("table", "bag")]


def one_table(kind: str, grad_mode: str | None, sparse: bool = False) -> tuple[torch.nn.Module, torch.nn.Embedding]:
    """Make a module of 20 rows, and torch's with the same rows."""
    torch.manual_seed(0)
    theirs = torch.nn.Embedding(20, 3)
    module = table_of(kind, grad_mode, 20, 3)
    module.load_state_dict(dict.fromkeys(module.state_dict(), theirs.weight.detach()))
    if sparse:
        module.sparse = True
    return module, theirs


def call(kind: str, module, ids: torch.Tensor) -> torch.Tensor:
    """Look up rows, without pooling."""
    if kind == "table":
        return module(ids)
    return module(ids[:, None]) if kind == "bag" else module({"f": ids[:, None]}).values()


def optimizers_of(module: torch.nn.Module, theirs: torch.nn.Module) -> tuple[torch.optim.Optimizer, ...]:
    """Make Adam for both modules, because it moves rows without gradient."""
    return optim.Adam(module.parameters(), lr=0.1, in_backward=True), torch.optim.Adam(theirs.parameters(), lr=0.1)


def step(ours: torch.Tensor, reference: torch.Tensor, optimizers: tuple[torch.optim.Optimizer, ...]) -> None:
    """Train one step on each side."""
    for rows, optimizer in zip((ours, reference), optimizers, strict=True):
        optimizer.zero_grad()
        rows.square().sum().backward()
        optimizer.step()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo's, at a break
@pytest.mark.parametrize(("kind", "arguments"), [*((kind, {"grad_mode": "sparse"}) for kind in KINDS), *AS_TORCH])
def test_sparse_lookups_outside_of_the_graph_see_current_rows(kind: str, arguments: dict) -> None:
    torch._dynamo.reset()
    module, theirs = one_table(kind, **arguments)
    optimizers, compiled = optimizers_of(module, theirs), torch.compile(module, backend="aot_eager")
    for k in range(6):
        ids = torch.tensor([k * k % 7, (3 * k + 1) % 9])
        step(call(kind, compiled, ids), theirs(ids), optimizers)
    torch.testing.assert_close(next(iter(module.state_dict().values())), theirs.weight.detach())


@pytest.mark.parametrize("how", ["no_grad", "frozen"])
@pytest.mark.parametrize(
    ("kind", "arguments"), [*((kind, {"grad_mode": mode}) for kind in KINDS for mode in ("sparse", "fused")), *AS_TORCH]
)
def test_lookups_without_gradient_see_current_rows(kind: str, arguments: dict, how: str) -> None:
    torch._dynamo.reset()
    module, theirs = one_table(kind, **arguments)
    optimizers = optimizers_of(module, theirs)
    full = how == "no_grad" or arguments["grad_mode"] != "sparse" or kind != "collection"
    compiled = torch.compile(module, backend="aot_eager", fullgraph=full)
    everything = torch.arange(20)
    for k in range(4):
        ids = torch.tensor([1, k])
        step(call(kind, module, ids), theirs(ids), optimizers)
        if how == "frozen" and k < 3:
            continue
        module.requires_grad_(how != "frozen")
        with torch.set_grad_enabled(how == "frozen"):
            found = call(kind, compiled, everything)
        assert not found.requires_grad
        torch.testing.assert_close(found, theirs(everything).detach())


@pytest.mark.parametrize("collected", [False, True])
@pytest.mark.parametrize("grad_mode", ["dense", "fused"])
def test_the_row_of_padding_is_read_and_gets_no_gradient(grad_mode: str, collected: bool) -> None:
    torch._dynamo.reset()
    module = nn.Embedding(10, 3, padding_idx=2, grad_mode=grad_mode)
    if collected:
        config = nn.EmbeddingConfig(10, 3, name="t", feature_names=["f"], padding_idx=2)
        module = nn.EmbeddingCollection([config], grad_mode=grad_mode)
    rows = torch.arange(1.0, 31.0).view(10, 3) / 10  # without zeros
    module.load_state_dict(dict.fromkeys(module.state_dict(), rows))
    optimizer = optim.Adam(module.parameters(), in_backward=True, lr=0.1)
    look_up = (lambda ids: module({"f": ids})["f"].values()) if collected else module
    compiled = torch.compile(look_up, backend="aot_eager", fullgraph=True)
    ids = torch.tensor([1, 2, 7, 2])
    for _ in range(3):
        optimizer.zero_grad()
        output = compiled(ids)
        assert torch.equal(output[[1, 3]], rows[[2, 2]])
        output.square().sum().backward()
        optimizer.step()
    assert not torch.equal(output[0], rows[1])
    with torch.no_grad():
        assert torch.equal(compiled(ids)[[1, 3]], rows[[2, 2]])


def test_weights_have_a_gradient_where_a_table_has_none() -> None:
    torch._dynamo.reset()
    module, theirs = one_table("bag", "fused")
    module.mode = "sum"
    optimizers, ids = optimizers_of(module, theirs), torch.tensor([[1, 2], [1, 9]])
    for k in range(3):
        step(call("bag", module, torch.tensor([k])), theirs(torch.tensor([k])), optimizers)
    module.requires_grad_(False)
    weights = torch.ones(2, 2, requires_grad=True)
    torch.compile(module, backend="aot_eager", fullgraph=True)(ids, per_sample_weights=weights).sum().backward()
    torch.testing.assert_close(weights.grad, theirs(ids).detach().sum(-1))


def test_the_operator_that_reads_current_rows() -> None:
    module, _ = one_table("bag", "sparse")
    optimizer = optim.Adam(module.parameters(), lr=0.1, in_backward=True)
    for k in range(3):
        module(torch.tensor([[k]])).sum().backward()
        optimizer.step()
    plan = LookupPlan((0,), (0,), (0,), (20,), (3,), (-1,)).numbers()
    ids, offsets, weights = torch.tensor([1, 2, 9]), torch.tensor([0, 2, 3]), torch.rand(3, requires_grad=True)
    inputs = (ids, offsets, weights, [2], True, module._number, [0], plan)
    torch.library.opcheck(current_lookup, inputs)


def test_equal_lookups_in_one_graph_are_two() -> None:
    torch._dynamo.reset()
    module, theirs = one_table("table", "fused")
    optimizers = optimizers_of(module, theirs)
    compiled = torch.compile(lambda ids: module(ids).tanh() * module(ids), backend="aot_eager", fullgraph=True)
    for k in range(3):
        ids = torch.tensor([1, k])
        step(compiled(ids), theirs(ids).tanh() * theirs(ids), optimizers)
    assert optimizers[0].state[module._parameters["weight"]]["step"] == 3
    torch.testing.assert_close(module.weight, theirs.weight)


def test_a_second_call_compiles_nothing() -> None:
    torch._dynamo.reset()
    counts = torch._dynamo.testing.CompileCounter()
    module, _ = one_table("table", "fused")
    optimizer = optim.Adam(module.parameters(), lr=0.1, in_backward=True)
    compiled = torch.compile(lambda ids: module(ids) * module(ids), backend=counts, fullgraph=True)
    for _ in range(3):
        compiled(torch.tensor([1, 2])).sum().backward()
        optimizer.step()
    assert counts.frame_count <= 2  # stale rows give the parameter another class


def test_a_choice_of_dense_gradients_makes_rows_current() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    table = nn.Embedding(50_000, 8, grad_mode="auto")
    optimizer = optim.Adam(table.parameters(), lr=0.1, in_backward=True)
    train_squares(table, optimizer, (torch.tensor([1, k]) for k in range(4)))
    assert "-> fused" in table.explain()
    optimizer.param_groups[0]["weight_decay"] = 0.1  # a decay gives every row a gradient
    everything = torch.arange(20)
    want = table(everything)
    assert "-> dense" in table.explain()
    compiled = torch.compile(table, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(everything), want)


# ---- The table itself in a graph -------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo's, at a break
@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize("grad_mode", [None, "dense", "sparse"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_graph_may_use_the_table(kind: str, grad_mode: str | None, before: int) -> None:
    torch._dynamo.reset()
    module, theirs = one_table(kind, grad_mode)
    optimizers = optimizers_of(module, theirs)
    holder = module.embedding_bags["t"] if kind == "collection" else module

    def tied(ids: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(call(kind, module, ids).tanh(), holder.weight)

    compiled = torch.compile(tied, backend="aot_eager", fullgraph=grad_mode in (None, "dense"))
    for k in range(before):
        ids = torch.tensor([1, k])
        step(call(kind, module, ids), theirs(ids), optimizers)
    for k in range(4):
        ids = torch.tensor([1, k])
        want = torch.nn.functional.linear(theirs(ids).tanh(), theirs.weight)
        step(compiled(ids), want, optimizers)
    torch.testing.assert_close(holder.weight, theirs.weight)


def test_max_norm_of_rows_that_are_behind() -> None:
    torch._dynamo.reset()
    made = [nn.Embedding(20, 3, max_norm=0.5, grad_mode=grad_mode) for grad_mode in ("fused", "dense")]
    made[1].load_state_dict(made[0].state_dict())
    optimizers = optimizers_of(*made)
    compiled = torch.compile(made[0], backend="aot_eager")
    for k in range(6):
        ids = torch.tensor([k * k % 7, (3 * k + 1) % 9])
        step(compiled(ids), made[1](ids), optimizers)
    torch.testing.assert_close(made[0].weight, made[1].weight)
