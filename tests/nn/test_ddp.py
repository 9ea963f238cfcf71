"""torch's DistributedDataParallel: two processes train tables as one does with torch's own, or refuse."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from processes import run_two

from torchsparse_rec import nn, optim

# Each process runs this program: every case, one after the other. The results are compared with one process's, whose
# gradients are dense and the mean over both batches.
PROGRAM = """
from torch.nn.parallel import DistributedDataParallel as DDP
from kinds import looked_up, table_of
from torchsparse_rec import nn, optim


class Model(torch.nn.Module):
    # With a tensor for its result, in which DistributedDataParallel finds what was used.

    def __init__(self, mode, kind):
        super().__init__()
        torch.manual_seed(0)
        large = kind != "collection" and mode == "auto"
        self.tables = table_of(kind, mode, *((20_000, 64) if large else (50, 3)))

    def forward(self, ids):
        return looked_up(self.tables, ids)


def train(module, call, optimizer, ranks):
    for step in range(4):
        optimizer.zero_grad()
        losses = []
        for each in ranks:
            generator = torch.Generator().manual_seed(10 * step + each)
            ids = torch.randint(0, 50, (8,), generator=generator)
            losses.append(call(ids).square().mean())
        (sum(losses) / len(losses)).backward()
        optimizer.step()
    return next(iter(module.state_dict().values()))


for find in (False, True):
    for kind in ("table", "collection"):
        for mode in ("dense", "sparse", "auto"):
            module, alone = Model(mode, kind), Model(mode, kind)
            optimizer = optim.Adam(module.parameters(), lr=0.1)
            call = DDP(module, find_unused_parameters=find)
            got = train(module, call, optimizer, [rank])
            alone.tables.grad_mode = "dense"
            want = train(alone, alone, optim.Adam(alone.parameters(), lr=0.1), [0, 1])
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)
            others = [torch.empty_like(got) for _ in range(2)]
            dist.all_gather(others, got.contiguous())
            assert torch.equal(*others), (kind, mode, find)
            print(kind, mode, find, module.tables.explain().splitlines()[0])
"""


def test_two_processes_train_as_one(tmp_path: Path) -> None:
    outputs = run_two(PROGRAM, tmp_path)
    assert outputs[0] == outputs[1]
    assert "table auto False Embedding: grad_mode='auto' -> sparse" in outputs[0]
    assert "collection auto False t: grad_mode='auto' -> dense" in outputs[0]


# ---- What DistributedDataParallel asks a module ----------------------------------------------------------------------


@pytest.mark.parametrize(("grad_mode", "sparse"), [(None, False), ("dense", False), ("fused", False), ("sparse", True)])
def test_sparse_is_true_where_gradients_are_coo(grad_mode: str | None, sparse: bool) -> None:
    config = nn.EmbeddingConfig(4, 2, name="t", feature_names=["f"])
    bags = nn.EmbeddingBagConfig(4, 2, name="t", feature_names=["f"])
    rows_of = nn.EmbeddingCollection([config], grad_mode=grad_mode).embeddings["t"]
    bags_of = nn.EmbeddingBagCollection([bags], grad_mode=grad_mode).embedding_bags["t"]
    assert isinstance(rows_of, torch.nn.Embedding) and isinstance(bags_of, torch.nn.EmbeddingBag)
    modules = [nn.Embedding(4, 2, grad_mode=grad_mode), nn.EmbeddingBag(4, 2, grad_mode=grad_mode), rows_of, bags_of]
    assert [module.sparse for module in modules] == [sparse] * 4


def test_sparse_may_be_set() -> None:
    table = nn.Embedding(4, 2)
    table.sparse = True
    table(torch.tensor([1])).sum().backward()
    assert table.sparse and table.weight.grad.is_sparse


@pytest.mark.parametrize(("rows", "sparse"), [(100, False), (1_000_000, True)])
def test_asking_a_table_in_auto_settles_its_choice(rows: int, sparse: bool) -> None:
    table = nn.Embedding(rows, 4, grad_mode="auto")
    optimizer = optim.Adam(table.parameters(), in_backward=True)
    assert "sparse" not in repr(table)  # repr settles nothing
    assert table.sparse == sparse
    for ids in (torch.tensor([1]), torch.arange(100).repeat(50)):  # the choice does not change with the number of ids
        optimizer.zero_grad()
        table(ids).sum().backward()
        assert table.weight.grad.is_sparse == sparse
        optimizer.step()


def test_a_table_without_an_optimizer_settles_for_dense() -> None:
    assert not nn.Embedding(1_000_000, 4, grad_mode="auto").sparse


def test_an_optimizer_that_no_longer_takes_what_was_settled_is_named() -> None:
    table = nn.Embedding(1_000_000, 4, grad_mode="auto")
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
    table.use_optimizer(optimizer)
    assert table.sparse
    optimizer.param_groups[0]["momentum"] = 0.9
    with pytest.raises(RuntimeError, match="were settled on.* torch.SGD does not take them exactly: its momentum, 0.9"):
        table(torch.tensor([1]))


def test_a_table_that_grows_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    table = nn.EmbeddingVariable(2)
    # DistributedDataParallel sets this within its forward.
    monkeypatch.setattr(torch.nn.parallel.DistributedDataParallel, "_active_ddp_module", object())
    with pytest.raises(RuntimeError, match="a table that grows cannot be in a DistributedDataParallel"):
        table(torch.tensor([1]))
    assert table.lookup(torch.tensor([1])).shape == (1, 2)
