"""The mode that "auto" chooses, when it chooses, and that a mode changes nothing but cost."""

import copy
import functools
import pickle

import pytest
import torch
from kinds import saved

from torchsparse_rec import nn, optim
from torchsparse_rec.nn._route import bare_table
from torchsparse_rec.nn.auto import FREEZE_AFTER

BIG, SMALL = (50_000, 64), (40, 4)


def auto(shape=BIG, optimizer=torch.optim.SGD, lookups=1, ids=100, **kwargs):
    """Make a table in auto whose optimizer is announced, and look up ``lookups`` times."""
    module = nn.Embedding(*shape, _weight=torch.empty(shape), grad_mode="auto")  # untouched memory costs nothing
    optimizer = optimizer(module.parameters(), lr=0.1, **kwargs)
    module.use_optimizer(optimizer)
    for _ in range(lookups):
        module(torch.zeros(ids, dtype=torch.int64))
    return module, optimizer


def layout(module):
    """Return the layout of the gradient that the next lookup has."""
    module.zero_grad()
    module(torch.tensor([1, 2])).sum().backward()
    return "sparse" if module.weight.grad.is_sparse else "dense"


# ---- The modes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("grad_mode", [None, "dense", "sparse"])
def test_fixed_modes(sparse, grad_mode):
    module = nn.Embedding(*SMALL, sparse=sparse, grad_mode=grad_mode)
    want = grad_mode or ("sparse" if sparse else "dense")
    assert layout(module) == want
    assert f"grad_mode={grad_mode!r} -> {want}" in module.explain() and "40 rows x 4" in module.explain()


# ---- What auto chooses -----------------------------------------------------------------------------------------------


def test_auto_is_sparse_for_the_keras_report_under_sgd():
    module, _ = auto((793_471, 512), torch.optim.SGD, ids=128 * 20)
    text = module.explain()
    assert layout(module) == "sparse"
    for part in ("-> sparse", "SGD", "2,560 ids", "dense gradient: 793,471 rows, 1.63 GB", "2,560 rows, 5.24 MB"):
        assert part in text
    assert "why: the table has more rows than a lookup has ids" in text


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")  # torch's Adagrad warns
@pytest.mark.parametrize(
    ("optimizer", "kwargs", "want"),
    [
        (torch.optim.SGD, {}, "sparse"),
        (torch.optim.SGD, {"maximize": True}, "sparse"),
        (torch.optim.SGD, {"momentum": 0.9}, "dense"),
        (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}, "dense"),
        (torch.optim.SGD, {"weight_decay": 0.1}, "dense"),
        (torch.optim.SGD, {"fused": True}, "dense"),
        (torch.optim.Adagrad, {}, "sparse"),
        (torch.optim.Adagrad, {"weight_decay": 0.1}, "dense"),
        (torch.optim.SparseAdam, {}, "sparse"),
        (torch.optim.Adam, {}, "dense"),
        (torch.optim.AdamW, {}, "dense"),
        (torch.optim.RMSprop, {}, "dense"),
        (type("Mine", (torch.optim.SGD,), {}), {}, "dense"),
    ],
)
def test_auto_asks_whether_the_optimizer_takes_sparse_gradients_exactly(optimizer, kwargs, want):
    module, steps = auto(BIG, optimizer, **kwargs)
    assert layout(module) == want and f"-> {want}" in module.explain()
    steps.step()  # the optimizer takes it


def test_sparse_adam_is_sparse_even_for_the_smallest_table_and_before_any_lookup():
    module, _ = auto((3, 1), torch.optim.SparseAdam, lookups=0)
    assert "SparseAdam takes sparse gradients only" in module.explain()
    assert layout(module) == "sparse"


def test_auto_is_dense_for_small_tables_and_without_an_optimizer():
    module, _ = auto(SMALL)
    assert layout(module) == "dense"
    module = nn.Embedding(*BIG, grad_mode="auto")
    assert layout(module) == "dense" and "call use_optimizer(optimizer)" in module.explain()


def test_use_optimizer_wants_one_that_holds_the_table():
    module = nn.Embedding(*SMALL, grad_mode="auto")
    with pytest.raises(ValueError, match="optimizer must hold the module's weight, got a SGD without it"):
        module.use_optimizer(torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1))


def test_auto_follows_changes_of_the_optimizer():
    module, optimizer = auto()
    assert layout(module) == "sparse"
    optimizer.param_groups[0]["momentum"] = 0.5
    assert layout(module) == "dense" and "momentum, 0.5" in module.explain()
    optimizer.param_groups[0]["momentum"] = 0
    optimizer.load_state_dict(optimizer.state_dict())
    assert layout(module) == "sparse"
    module.weight = torch.nn.Parameter(torch.zeros(*BIG))
    assert layout(module) == "dense" and "no longer holds this table" in module.explain()
    module.use_optimizer(torch.optim.SGD(module.parameters(), lr=0.1))
    assert layout(module) == "dense" and "no longer exists" in module.explain()


@pytest.mark.usefixtures("kernels")
def test_a_choice_that_flips_during_accumulation():
    module, optimizer = auto()
    module.zero_grad()
    module(torch.tensor([1, 2, 2])).sum().backward()
    assert module.weight.grad.is_sparse
    optimizer.param_groups[0]["weight_decay"] = 0.1
    module(torch.tensor([2, 3])).sum().backward()
    assert torch.equal(module.weight.grad.sum(1)[:5], torch.tensor([0.0, 64, 192, 64, 0]))
    optimizer.step()


def test_a_small_table_stays_dense_without_questions_until_something_else_decides():
    """Lookups of a small table ask nothing once their ids no longer count; what else decides is seen all the same."""
    module = nn.Embedding(*SMALL, grad_mode="auto")
    optimizer = optim.SGD(module.parameters(), lr=0.1, in_backward=True)
    assert bare_table(module) is None
    for _ in range(FREEZE_AFTER):
        module(torch.zeros(3, dtype=torch.int64))
    assert bare_table(module) is module.weight and layout(module) == "dense"
    assert f"3 ids a lookup (mean of {FREEZE_AFTER}, frozen)" in module.explain()
    module.weight = torch.nn.Parameter(torch.zeros(*BIG))
    optimizer = optim.SGD(module.parameters(), lr=0.1, in_backward=True)
    assert bare_table(module) is None and "-> fused" in module.explain()
    module.weight = torch.nn.Parameter(torch.zeros(*SMALL))
    optimizer = torch.optim.SparseAdam(module.parameters(), lr=0.1)
    module.use_optimizer(optimizer)
    assert bare_table(module) is None and layout(module) == "sparse"


# ---- The estimate ----------------------------------------------------------------------------------------------------


FEW, NO_MORE, MORE = "at most 1,000 rows", "no more rows than", "more rows than"
SMALLEST, SHORT = "or 65,536 elements, trains fastest", "no more than 128 elements for each id"
LONG = "rows of 256 elements or more faster than it writes their gradient"
LAZY_ADAM, MOMENTUM = functools.partial(optim.Adam, lazy=True), functools.partial(optim.SGD, momentum=0.9)
IN_BACKWARD = functools.partial(optim.Adam, in_backward=True)


@pytest.mark.parametrize(
    ("optimizer", "rows", "dim", "ids", "want", "why"),
    [
        # Rows and ids.
        *((torch.optim.SGD, 1000, dim, 1, "dense", FEW) for dim in (256, 512)),
        *((torch.optim.SGD, 1001, dim, 1, "sparse", MORE) for dim in (256, 512)),
        *((torch.optim.SGD, 2000, dim, 2000, "dense", NO_MORE) for dim in (256, 512)),
        *((torch.optim.SGD, 2001, dim, 2000, "sparse", MORE) for dim in (256, 512)),
        # Short rows of optimizers that move them all.
        (optim.Adam, 64_000, 16, 8000, "dense", SHORT),
        (optim.Adam, 64_001, 16, 8000, "sparse", MORE),
        (optim.Adam, 64_000, 17, 8000, "sparse", MORE),
        (optim.Adam, 256_000, 4, 8000, "dense", SHORT),
        (optim.Adam, 1_024_001, 1, 8000, "sparse", MORE),
        (optim.Adagrad, 64_000, 16, 8000, "sparse", MORE),
        (LAZY_ADAM, 64_000, 16, 8000, "sparse", MORE),
        (MOMENTUM, 64_000, 8, 8000, "dense", SHORT),
        # Elements of small tables.
        (optim.Adagrad, 2048, 32, 10, "dense", SMALLEST),
        (optim.Adagrad, 2049, 32, 10, "sparse", MORE),
        (optim.Adam, 2048, 32, 10, "dense", SMALLEST),
        (optim.Adam, 2049, 32, 10, "sparse", MORE),
        # Backward updates long rows however many ids there are.
        (IN_BACKWARD, 500, 256, 500, "fused", LONG),
        (IN_BACKWARD, 500, 256, 499, "dense", FEW),
        (IN_BACKWARD, 256, 256, 500, "dense", SMALLEST),
        (IN_BACKWARD, 2000, 256, 2000, "fused", LONG),
        (optim.Adam, 2000, 256, 2000, "dense", NO_MORE),
        (IN_BACKWARD, 2000, 255, 2000, "dense", NO_MORE),
    ],
)
def test_the_rule(optimizer, rows, dim, ids, want, why):
    module, _ = auto((rows, dim), optimizer, ids=ids)
    text = module.explain()
    assert f"-> {want}" in text and why in text.splitlines()[-1]
    assert (SHORT in text) == (why is SHORT)


def test_the_estimate_freezes():
    module, _ = auto(lookups=FREEZE_AFTER - 1, ids=10)
    assert f"mean of {FREEZE_AFTER - 1}, frozen after {FREEZE_AFTER}" in module.explain()
    module(torch.zeros(110, dtype=torch.int64))
    frozen = module.explain()
    assert f"11 ids a lookup (mean of {FREEZE_AFTER}, frozen)" in frozen
    module(torch.zeros(100_000, dtype=torch.int64))
    assert module.explain() == frozen


def test_only_training_lookups_count():
    module, _ = auto(lookups=0)
    with torch.no_grad():
        module(torch.tensor([1]))
    module.eval()
    module(torch.tensor([1]))
    assert "none before the first training lookup" in module.explain()


def test_the_estimate_is_saved_with_the_state_and_keys_stay_torchs():
    model = torch.nn.Sequential(auto(ids=123)[0])
    other = torch.nn.Sequential(nn.Embedding(*BIG, grad_mode="auto"))
    other.load_state_dict(saved(model.state_dict(), weights_only=True))
    assert "123 ids a lookup (mean of 1" in other[0].explain()
    assert list(model.state_dict()) == ["0.weight"]
    assert list(model[0].state_dict(destination={}, prefix="a.")) == ["a.weight"]


def test_a_loaded_estimate_replaces_a_frozen_one_and_its_choice():
    few, optimizer = auto((4000, 64), lookups=FREEZE_AFTER, ids=2)
    assert layout(few) == "sparse"
    many, its_optimizer = auto((4000, 64), lookups=FREEZE_AFTER, ids=40_000)
    assert layout(many) == "dense"
    few.load_state_dict(many.state_dict())
    assert layout(few) == "dense"


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_copies_keep_the_estimate_and_want_their_own_optimizer(copier):
    module, _ = auto(ids=123)
    other = copier(module)
    assert "123 ids" in other.explain() and "no optimizer was announced" in other.explain()
    assert layout(other) == "dense" and layout(module) == "sparse"


# ---- torch.compile ---------------------------------------------------------------------------------------------------


@pytest.fixture
def compiled():
    """Return torch.compile without code generation, because the tests ask what can be traced."""
    torch._dynamo.reset()
    yield lambda module, fullgraph=True: torch.compile(module, backend="aot_eager", fullgraph=fullgraph)
    torch._dynamo.reset()


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("grad_mode", [None, "dense", "auto"])
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_dense_lookups_compile_into_one_graph(compiled, grad_mode, kind):
    module = kind(20, 3, max_norm=2.0, grad_mode=grad_mode)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module.use_optimizer(optimizer)
    input = torch.tensor([[1, 2], [2, 5]])
    module(input).sum().backward()
    want = module.weight.grad.clone()
    for _ in range(2):
        module.zero_grad()
        compiled(module)(input).sum().backward()
        assert torch.equal(module.weight.grad, want)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_lookups_are_left_out_of_the_graph(compiled, kind):
    module = kind(20, 3, grad_mode="sparse")
    input = torch.tensor([[1, 2], [2, 5]])
    compiled(module, fullgraph=False)(input).sum().backward()
    assert module.weight.grad.is_sparse and module.weight.grad.is_coalesced()
    with torch.no_grad():
        compiled(module)(input)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="cannot trace sparse gradients, .*: use grad_mode='dense'"):
        compiled(module)(input)
