"""torch.compile(fullgraph=True) trains in the modes dense and fused, with eager's results."""

from __future__ import annotations

import pytest
import torch

from torchsparse_rec import KeyedJaggedTensor, nn, optim


def batch(seed: int, size: int) -> KeyedJaggedTensor:
    """Two features."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (2 * size,), generator=generator)
    values = torch.randint(0, 20, (int(lengths.sum()),), generator=generator)
    return KeyedJaggedTensor(["f", "g"], values, lengths=lengths)


class Model(torch.nn.Module):
    """A collection, a single bag, a single table, and a dense layer."""

    def __init__(self, grad_mode: str, apply: str) -> None:
        super().__init__()
        tables = [
            nn.EmbeddingBagConfig(name="a", num_embeddings=20, embedding_dim=4, feature_names=["f"], pooling="mean"),
            nn.EmbeddingBagConfig(name="b", num_embeddings=30, embedding_dim=2, feature_names=["g", "f"]),
        ]
        self.bags = nn.EmbeddingBagCollection(tables, grad_mode=grad_mode, apply=apply)
        self.bag = nn.EmbeddingBag(20, 3, mode="sum", grad_mode=grad_mode, apply=apply)
        self.table = nn.Embedding(20, 3, grad_mode=grad_mode, apply=apply)
        self.head = torch.nn.Linear(14, 1)

    def forward(self, x: KeyedJaggedTensor, ids: torch.Tensor) -> torch.Tensor:
        """A score for every example."""
        rows = [self.bags(x).values(), self.bag(ids), self.table(ids[:, 0])]
        return self.head(torch.cat(rows, 1)).squeeze(1)


def train(model: torch.nn.Module, forward, steps: int = 4) -> list[float]:
    """The losses."""
    optimizer = optim.Adam(model.parameters(), lr=0.05)
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


@pytest.mark.parametrize("apply", ["step", "backward"])
@pytest.mark.parametrize("grad_mode", ["dense", "fused"])
def test_a_compiled_model_trains_as_eager(grad_mode: str, apply: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    eager, compiled = Model(grad_mode, apply), Model(grad_mode, apply)
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
    eager, compiled = Model("fused", "backward"), Model("fused", "backward")
    compiled.load_state_dict(eager.state_dict())
    want = train(eager, eager, 2)
    got = train(compiled, torch.compile(compiled, fullgraph=True, dynamic=True), 2)
    assert got == pytest.approx(want, rel=1e-5)
