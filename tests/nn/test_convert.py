"""convert, use_optimizer and explain on whole models."""

import pytest
import torch

from torchsparse_rec import nn


class Shop(torch.nn.Module):
    """Tables nested, shared, of both kinds, and one that is a subclass."""

    def __init__(self):
        super().__init__()
        self.users = torch.nn.Embedding(7, 3, padding_idx=1)
        self.tower = torch.nn.ModuleDict({"bags": torch.nn.EmbeddingBag(5, 3, mode="sum", sparse=True)})
        self.again = self.users
        self.special = Special(4, 3)
        self.top = torch.nn.Linear(3, 1)


class Special(torch.nn.Embedding):
    """A subclass, whose forward is its own."""

    def forward(self, input):
        return super().forward(input) * 2


def test_converts_every_table_and_keeps_everything_else():
    model = Shop()
    model.users.eval()
    model.users.weight.requires_grad_(False)
    model.users.register_buffer("seen", torch.arange(7))
    calls = []
    model.users.register_forward_hook(lambda *_: calls.append("hook"))
    parameters = dict(model.named_parameters())
    want = model.users(torch.tensor([2, 5]))
    assert nn.convert(model, grad_mode="sparse") is model
    assert isinstance(model.users, nn.Embedding) and model.again is model.users
    assert isinstance(model.tower["bags"], nn.EmbeddingBag) and model.tower["bags"].mode == "sum"
    assert type(model.special) is Special and type(model.top) is torch.nn.Linear
    assert {name: id(p) for name, p in model.named_parameters()} == {name: id(p) for name, p in parameters.items()}
    assert not model.users.training and model.tower["bags"].training and not model.users.weight.requires_grad
    assert torch.equal(model.users(torch.tensor([2, 5])), want) and calls == ["hook", "hook"]
    assert "users.seen" in model.state_dict()
    assert model.users.grad_mode == model.tower["bags"].grad_mode == "sparse"


@pytest.mark.usefixtures("kernels")
def test_an_optimizer_made_before_goes_on():
    model = torch.nn.Sequential(torch.nn.Embedding(6, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = model[0].weight.detach().clone()
    nn.convert(model, grad_mode="sparse")
    model(torch.tensor([1, 1])).sum().backward()
    assert model[0].weight.grad.is_sparse
    optimizer.step()
    want = before.clone()
    want[1] -= 2
    torch.testing.assert_close(model[0].weight.detach(), want)


def test_converts_the_root_and_follows_sparse_by_default():
    table = torch.nn.Embedding(6, 2, sparse=True)
    assert nn.convert(table) is table and isinstance(table, nn.Embedding) and table.grad_mode is None
    table(torch.tensor([3])).sum().backward()
    assert table.weight.grad.is_sparse


def test_converting_again_changes_nothing():
    model = nn.convert(torch.nn.Sequential(torch.nn.Embedding(6, 2)), grad_mode="sparse")
    assert nn.convert(model, grad_mode="dense")[0].grad_mode == "sparse"


def test_copies_of_a_converted_model():
    import copy

    model = nn.convert(Shop(), grad_mode="auto")
    other = copy.deepcopy(model)
    assert isinstance(other.users, nn.Embedding) and other.again is other.users
    assert other.users.weight is not model.users.weight


def test_use_optimizer_and_explain_reach_every_table():
    model = nn.convert(Shop(), grad_mode="auto")
    adam = torch.optim.Adam(model.users.parameters())
    sparse_adam = torch.optim.SparseAdam(model.tower.parameters())
    nn.use_optimizer(model, adam, sparse_adam)
    text = nn.explain(model)
    assert "users: Embedding: grad_mode='auto' -> dense" in text and "optimizer: Adam" in text
    assert "tower.bags: EmbeddingBag: grad_mode='auto' -> sparse" in text and "optimizer: SparseAdam" in text
    assert "special" not in text


def test_bad_input():
    model = Shop()
    with pytest.raises(ValueError, match="grad_mode must be one of"):
        nn.convert(model, grad_mode="fast")
    assert type(model.users) is torch.nn.Embedding
    for function in (nn.convert, nn.use_optimizer, nn.explain):
        with pytest.raises(TypeError, match="model must be a torch.nn.Module, got list"):
            function([model])
