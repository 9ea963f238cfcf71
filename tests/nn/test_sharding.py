"""fully_shard: two processes train tables as one does with torch's own, or refuse; see also tests/clients."""

from __future__ import annotations

import pytest
from processes import run_two

# It prints a line for each case: "right", or the error. The results should be those of one process on both batches,
# with dense gradients and the optimizer of the same name.
PROGRAM = """
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from kinds import WithHead
from torchsparse_rec import nn, optim

mesh = init_device_mesh("cpu", (2,))


def step(call, optimizer, number, ranks):
    optimizer.zero_grad()
    losses = []
    for each in ranks:
        ids = torch.randint(0, 20, (8,), generator=torch.Generator().manual_seed(10 * number + each))
        losses.append(call(ids).square().mean())
    (sum(losses) / len(losses)).backward()
    optimizer.step()


def whole(module):
    state = module.state_dict().values()
    return [x.full_tensor() if hasattr(x, "full_tensor") else x for x in state if isinstance(x, torch.Tensor)]


def alone(kind, optimizer, steps):
    model = WithHead(kind, "dense")
    made = optimizer(model.parameters(), lr=0.1)
    for number in range(steps):
        step(model, made, number, [0, 1])
    return model


def compare(got, want):
    torch.testing.assert_close(whole(got), whole(want), rtol=1e-4, atol=1e-5)


def train(how, kind, mode, optimizer):
    model = WithHead(kind, mode)
    ignored = set(model.tables.parameters()) if how == "ignored" else set()
    fully_shard(model, mesh=mesh, ignored_params=ignored)
    made = optimizer(model.parameters(), lr=0.1, **({"in_backward": True} if mode == "fused" else {}))
    ranks = [0, 1] if how == "ignored" else [rank]  # nobody adds up the gradients of these
    for number in range(4):
        step(model, made, number, ranks)
    compare(model, alone(kind, optimizer, 4))
    if how == "plain" and mode == "dense":
        reshard(model, made, kind, optimizer)


def reshard(sharded, optimizer, kind, cls):
    # What a sharded run has saved, a run of one process takes up by rows.
    model, state = get_state_dict(sharded, optimizer)
    dcp.save({"model": model, "optimizer": state}, checkpoint_id=f"{folder}/{kind}{cls.__name__}")
    one = WithHead(kind, "dense" if cls is torch.optim.Adam else "sparse")
    made = cls(one.parameters(), lr=0.1)
    model, state = get_state_dict(one, made)
    loaded = {"model": model, "optimizer": state}
    dcp.load(loaded, checkpoint_id=f"{folder}/{kind}{cls.__name__}")
    set_state_dict(one, made, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    for number in range(4, 6):
        step(one, made, number, [0, 1])
    compare(one, alone(kind, cls, 6))


def attempt(*case):
    try:
        train(*case)
        said = "right"
    except Exception as error:
        said = f"{type(error).__name__}: {error}".replace(chr(10), " ")
    print(*case[:3], f"{case[3].__module__.partition('.')[0]}.{case[3].__name__}", said, sep="|")


MODES = ("dense", "sparse", "fused", "auto")
for kind in ("table", "collection"):
    for mode in MODES:
        attempt("plain", kind, mode, optim.Adam)
        attempt("ignored", kind, mode, optim.Adam)
    attempt("plain", kind, "dense", torch.optim.Adam)
attempt("plain", "variable", None, optim.Adam)
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, ...], str]:
    outputs = run_two(PROGRAM, tmp_path_factory.mktemp("sharding"))
    cases = [[line.split("|") for line in output.splitlines()] for output in outputs]
    for one, other in zip(*cases, strict=True):  # a refusal in one process alone would leave the other one waiting
        assert one[:4] == other[:4] and (one[4] == "right") == (other[4] == "right")
    return {tuple(line[:4]): line[4] for line in cases[0]}


KINDS = ("table", "collection")


@pytest.mark.parametrize("kind", KINDS)
def test_fully_shard_of_strided_gradients_is_right(said: dict, kind: str) -> None:
    for mode in ("dense", "auto"):
        assert said["plain", kind, mode, "torchsparse_rec.Adam"] == "right"
    assert said["plain", kind, "dense", "torch.Adam"] == "right"


@pytest.mark.parametrize("kind", KINDS)
def test_fully_shard_refuses_other_gradients(said: dict, kind: str) -> None:
    for mode in ("sparse", "fused"):
        refusal = said["plain", kind, mode, "torchsparse_rec.Adam"]
        assert f"grad_mode='{mode}': the table is in fully_shard" in refusal
        assert "choose grad_mode='dense' or 'auto'" in refusal


@pytest.mark.parametrize("kind", KINDS)
def test_what_fully_shard_leaves_out(said: dict, kind: str) -> None:
    for mode in ("dense", "sparse", "fused", "auto"):
        assert said["ignored", kind, mode, "torchsparse_rec.Adam"] == "right"


def test_a_table_that_grows_refuses_fully_shard(said: dict) -> None:
    refusal = said["plain", "variable", "None", "torchsparse_rec.Adam"]
    assert "a table that grows cannot be in fully_shard" in refusal and "leave it out" in refusal
