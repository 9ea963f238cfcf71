"""convert, revert, use_optimizer and explain on whole models."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch.nn.functional import embedding
from torch.nn.utils import parametrizations

from torchsparse_rec import nn, optim

OVERRIDES = pytest.mark.filterwarnings("ignore:convert. left unchanged. special .Special. its class overrides forward")


class Shop(torch.nn.Module):
    """A model with tables that are nested, shared, of both kinds, and one of a subclass."""

    def __init__(self):
        super().__init__()
        self.users = torch.nn.Embedding(7, 3, padding_idx=1)
        self.tower = torch.nn.ModuleDict({"bags": torch.nn.EmbeddingBag(5, 3, mode="sum", sparse=True)})
        self.again = self.users
        self.special = Special(4, 3)
        self.top = torch.nn.Linear(3, 1)


class Special(torch.nn.Embedding):
    """A subclass that overrides forward."""

    def forward(self, input):
        return F.embedding(input, self.weight) * 2


@OVERRIDES
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


def test_converting_again_changes_nothing_and_says_so():
    model = nn.convert(torch.nn.Sequential(torch.nn.Embedding(6, 2)), grad_mode="sparse")
    with pytest.warns(UserWarning, match="convert: nothing was changed: the model has no module of torch.nn's"):
        assert nn.convert(model, grad_mode="dense")[0].grad_mode == "sparse"


@OVERRIDES
def test_copies_of_a_converted_model():
    model = nn.convert(Shop(), grad_mode="auto")
    other = copy.deepcopy(model)
    assert isinstance(other.users, nn.Embedding) and other.again is other.users
    assert other.users.weight is not model.users.weight


@OVERRIDES
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
    for function in (nn.convert, nn.revert, nn.use_optimizer, nn.explain):
        with pytest.raises(TypeError, match="model must be a torch.nn.Module, got list"):
            function([model])


# ---- Subclasses ------------------------------------------------------------------------------------------------------


class Scaled(torch.nn.Embedding):
    """A subclass that initialises its table differently, as spotlight's ScaledEmbedding does."""

    def reset_parameters(self):
        self.weight.data.normal_(0, 1.0 / self.embedding_dim)

    def norm(self):
        return float(self.weight.detach().norm())


def pickled(module):
    return pickle.loads(pickle.dumps(module))


@pytest.mark.parametrize("copied", [lambda module: module, copy.deepcopy, pickled])
def test_a_subclass_that_overrides_no_forward(copied):
    table = Scaled(6, 2)
    want = table(torch.tensor([1, 3]))
    converted = copied(nn.convert(torch.nn.Sequential(table), grad_mode="sparse"))[0]
    assert (
        isinstance(converted, Scaled) and isinstance(converted, nn.Embedding) and type(converted).__name__ == "Scaled"
    )
    assert torch.equal(converted(torch.tensor([1, 3])), want) and converted.norm() == float(
        table.weight.detach().norm()
    )
    converted(torch.tensor([1])).sum().backward()
    assert converted.weight.grad.is_sparse
    assert type(nn.revert(converted)) is Scaled


def test_what_is_left_is_named_with_the_reason():
    model = Shop()
    model.users.forward = model.users.forward  # replaced as a hook of accelerate replaces it
    model.computed = parametrizations.weight_norm(torch.nn.Embedding(4, 3))
    with pytest.warns(UserWarning) as caught:
        nn.convert(model)
    (warning,) = caught
    for part in (
        "users (Embedding: its forward has been replaced)",
        "special (Special: its class overrides forward)",
        "computed (ParametrizedEmbedding: its weight is computed)",
    ):
        assert part in str(warning.message)
    assert isinstance(model.tower["bags"], nn.EmbeddingBag)


# ---- Back ------------------------------------------------------------------------------------------------------------


class QuotientsAndRemainders(torch.nn.Module):
    """The bags of DLRM's QR trick, whose tables are no modules."""

    def __init__(self):
        super().__init__()
        self.weight_q = torch.nn.Parameter(torch.randn(10, 4))
        self.weight_r = torch.nn.Parameter(torch.randn(5, 4))
        self.scale = torch.nn.Parameter(torch.ones(4))

    def forward(self, ids, offsets):
        quotients = F.embedding_bag(ids // 5, self.weight_q, offsets, mode="sum")
        return quotients * F.embedding_bag(ids % 5, self.weight_r, offsets, mode="sum") * self.scale


class ByNameAlone(torch.nn.Module):
    """A module with a matrix, and a child of the name of torch's function."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(5, 4)
        self.projection = torch.nn.Parameter(torch.randn(4, 4))

    def forward(self, ids):
        return self.embedding(ids) @ self.projection


class ByImport(torch.nn.Module):
    """A module that calls torch's function by its own name."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Parameter(torch.randn(4, 4))

    def forward(self, ids):
        return embedding(ids, self.table)


def test_converting_draws_no_random_number():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    nn.convert(torch.nn.Embedding.from_pretrained(torch.zeros(2, 2)), grad_mode="sparse")
    assert torch.equal(torch.get_rng_state(), before)


def test_tables_that_are_no_modules_are_named():
    model = torch.nn.ModuleDict({"qr": QuotientsAndRemainders(), "child": ByNameAlone(), "imported": ByImport()})
    with pytest.warns(UserWarning) as caught:
        nn.convert(model)
    way = "up by a function of torch's: keep each in a torch.nn.Embedding or EmbeddingBag"
    assert [str(x.message) for x in caught] == [
        f"convert: left unchanged: qr (QuotientsAndRemainders: it looks weight_q, weight_r {way}), "
        f"imported (ByImport: it looks table {way})"
    ]
    assert type(model["child"].embedding) is nn.Embedding


@pytest.mark.parametrize("grad_mode", [None, "dense", "sparse", "fused", "auto"])
def test_reverted_tables_are_torchs_with_the_same_bits_and_train_on(grad_mode):
    torch.manual_seed(0)
    model = torch.nn.ModuleList([torch.nn.Embedding(7, 3, padding_idx=1), torch.nn.EmbeddingBag(5, 3, mode="sum")])
    before = [set(module.__dict__) for module in model]
    optimizer = optim.Adam(nn.convert(model, grad_mode=grad_mode).parameters(), lr=0.1, in_backward=True)

    def train(tables, its) -> None:
        for k in range(3):
            its.zero_grad()
            loss = tables[0](torch.tensor([k, 5])).sum() + tables[1](torch.tensor([[k, k + 1]])).square().sum()
            loss.backward()
            its.step()

    train(model, optimizer)
    twin = copy.deepcopy(model)
    want = [parameter.detach().clone() for parameter in twin.parameters()]
    for reverted in (model, twin):
        assert nn.revert(reverted) is reverted
        assert [type(module) for module in reverted] == [torch.nn.Embedding, torch.nn.EmbeddingBag]
        assert [set(module.__dict__) for module in reverted] == before
        assert not any(module._load_state_dict_post_hooks for module in reverted)
        for parameter, its in zip(reverted.parameters(), want, strict=True):
            assert torch.equal(parameter, its)
    reference = torch.optim.Adam(twin.parameters(), lr=0.1)
    reference.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(model, optimizer)
    train(twin, reference)
    for parameter, its in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(parameter, its)
    assert type(pickled(model)[0]) is torch.nn.Embedding


def test_what_torch_has_no_module_for_is_left():
    config = nn.EmbeddingBagConfig(name="t", num_embeddings=4, embedding_dim=2, feature_names=["f"])

    class Own(nn.Embedding):
        """A user's own class."""

    model = torch.nn.ModuleDict(
        {
            "bags": nn.EmbeddingBagCollection([config]),
            "grows": nn.EmbeddingVariable(2),
            "roots": nn.EmbeddingBag(4, 2, mode="sqrtn"),
            "least": nn.EmbeddingBag(4, 2, mode="min"),
            "own": Own(4, 2),
            "plain": nn.Embedding(4, 2),
        }
    )
    with pytest.warns(UserWarning, match="revert: left unchanged") as caught:
        nn.revert(model)
    (warning,) = caught
    for part in (
        "bags (EmbeddingBagCollection: torch has no such module)",
        "grows (EmbeddingVariable: torch has no such module)",
        "roots (EmbeddingBag: torch has no mode 'sqrtn')",
        "least (EmbeddingBag: torch has no mode 'min')",
        "own (Own: a class of its own)",
    ):
        assert part in str(warning.message)
    assert type(model["plain"]) is torch.nn.Embedding
    with pytest.warns(UserWarning, match="revert: nothing was changed"):
        nn.revert(torch.nn.Linear(1, 1))
