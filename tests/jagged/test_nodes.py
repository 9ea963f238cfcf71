"""The jagged types in PyTorch's other parts: pytrees, compilation, export, pickle, DataLoader, devices."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from cuda_cases import sync_debug_mode
from kinds import saved
from torch.utils import _pytree

from torchsparse_rec import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from torchsparse_rec.jagged._node import Node

LENGTHS = [2, 0, 1, 1, 1, 3, 0, 2, 2, 1]


def jt(form: str = "lengths") -> JaggedTensor:
    given = {"lengths": torch.tensor([2, 0, 1])} if form == "lengths" else {"offsets": torch.tensor([0, 2, 2, 3])}
    return JaggedTensor(torch.tensor([3, 1, 4]), torch.tensor([0.5, 1.0, 2.0]), **given)


def kjt(batch: int = 3, **others: Any) -> KeyedJaggedTensor:
    lengths = torch.tensor(LENGTHS[: 2 * batch])
    values = torch.arange(int(lengths.sum()))
    return KeyedJaggedTensor(["user", "item"], values, values / 10, lengths=lengths, **others)


NODES: dict[str, Node] = {
    "jt": jt(),
    "jt_offsets": jt("offsets"),
    "kjt": kjt(),
    "kjt_strides": kjt(stride_per_key_per_rank=[[1, 1], [4]]),
    "kjt_inverse": kjt(inverse_indices=(["user", "item"], torch.zeros(2, 5, dtype=torch.int64))),
    "kjt_empty": KeyedJaggedTensor.empty_like(kjt()),
    "kt": KeyedTensor(["a", "b"], [2, 1], torch.arange(6.0).reshape(2, 3)),
    "kt_first": KeyedTensor(["a", "b"], [2, 1], torch.arange(6.0).reshape(3, 2), key_dim=0),
}
every_node = pytest.mark.parametrize("node", NODES.values(), ids=NODES)


def assert_same(a: Any, b: Any) -> None:
    assert type(a) is type(b) and a._context() == b._context()
    first, second = a._tensors(), b._tensors()
    assert list(first) == list(second)
    assert all(torch.equal(first[name], second[name]) and first[name].dtype == second[name].dtype for name in first)


# ---- pytree ---------------------------------------------------------------------------------------------------------


@every_node
def test_pytree_there_and_back(node: Node) -> None:
    leaves, spec = _pytree.tree_flatten({"x": [node]})
    assert leaves and all(isinstance(leaf, torch.Tensor) for leaf in leaves)
    assert_same(_pytree.tree_unflatten(leaves, spec)["x"][0], node)
    again = _pytree.treespec_loads(_pytree.treespec_dumps(spec))
    assert again == spec
    assert_same(_pytree.tree_unflatten(leaves, again)["x"][0], node)
    hash(node._context())
    # The leaves of a mapped tree may be anything, so its constructor may check nothing.
    names = _pytree.tree_map(lambda x: str(x.dtype), node)
    assert _pytree.tree_leaves(names)[0] == str(leaves[0].dtype)
    path, leaf = _pytree.tree_flatten_with_path(node)[0][0]
    assert _pytree.keystr(path) == ".values" and leaf is leaves[0]


def test_what_is_computed_leaves_the_structure_as_it_was() -> None:
    for x in (jt(), jt("offsets"), kjt()):
        before = _pytree.tree_structure(x)
        x.lengths(), x.offsets()
        assert _pytree.tree_structure(x) == before
        if isinstance(x, KeyedJaggedTensor):
            x.sync()
        assert _pytree.tree_structure(x) == before


# ---- Compilation and export -----------------------------------------------------------------------------------------


def no_sizes(x: KeyedJaggedTensor) -> tuple:
    """Return results that need no number from the device."""
    y = x.permute([1, 0])
    rows = JaggedTensor(x.values() * 2, offsets=x.offsets())
    pooled = torch.segment_reduce(x.weights(), "sum", offsets=x.offsets()).reshape(2, -1).T
    return y, rows, KeyedTensor(x.keys(), [1, 1], pooled), rows.to_padded_dense(2), x.split([0, 2])[1]


def sizes(x: KeyedJaggedTensor) -> tuple:
    """Return results that need to know where each feature begins."""
    whole = KeyedJaggedTensor.from_jt_dict(x.to_dict())
    return x["item"].values() * 2, x.split([1, 1]), whole, x.permute([1])


class Module(torch.nn.Module):
    """A module that calls a function."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: KeyedJaggedTensor) -> Any:
        return self.function(x)


def assert_same_trees(a: Any, b: Any) -> None:
    first, spec = _pytree.tree_flatten(a)
    second, other = _pytree.tree_flatten(b)
    assert spec == other and all(map(torch.equal, first, second))


def equal_sizes(batch: int) -> KeyedJaggedTensor:
    return kjt(batch)


def known_sizes(batch: int) -> KeyedJaggedTensor:
    return kjt(batch).sync()


def other_sizes(batch: int) -> KeyedJaggedTensor:
    return kjt(batch, stride_per_key=[batch - 1, batch + 1])


def order_of_features(x: KeyedJaggedTensor) -> tuple:
    return x.permute([1, 0]), x.offsets()


@pytest.mark.parametrize("make", [equal_sizes, known_sizes, other_sizes])
@pytest.mark.parametrize("function", [order_of_features, sizes])
def test_compiled_in_one_graph(function: Any, make: Any) -> None:
    """Compile at most twice: the second graph, with symbols for sizes, serves all sizes after the first."""
    counter = torch._dynamo.testing.CompileCounter()
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = torch.compile(function, fullgraph=True, backend=counter)
        for batch in (3, 4, 5, 2, 3):
            assert_same_trees(compiled(make(batch)), function(make(batch)))
    assert counter.frame_count == 2


def test_batch_sizes_that_vary_are_compiled_once() -> None:
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(no_sizes, fullgraph=True, backend=counter, dynamic=True)
    for batch in (3, 4, 5, 2):
        assert_same_trees(compiled(kjt(batch)), no_sizes(kjt(batch)))
    assert counter.frame_count == 1


@pytest.mark.parametrize("function", [no_sizes, sizes])
@pytest.mark.parametrize("strict", [False, True])
def test_exported_with_any_batch_size(function: Any, strict: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of export's own
        dynamic = ([{0: torch.export.Dim.AUTO}] * 3,)
        program = torch.export.export(Module(function), (kjt(4),), strict=strict, dynamic_shapes=dynamic)
        file = io.BytesIO()
        torch.export.save(program, file)
        file.seek(0)
        loaded = torch.export.load(file)
    for batch in (3, 4, 5):
        for again in (program, loaded):
            x = kjt(batch)
            x.offsets()
            assert_same_trees(again.module()(x), function(kjt(batch)))


# ---- Copies ---------------------------------------------------------------------------------------------------------


@every_node
def test_pickle_deepcopy_and_save(node: Node) -> None:
    assert_same(pickle.loads(pickle.dumps(node)), node)
    copied = copy.deepcopy(node)
    assert_same(copied, node)
    assert copied._tensors()["values"] is not node._tensors()["values"]
    assert_same(saved(node, weights_only=True), node)


@every_node
def test_to_and_pin_memory_take_every_tensor(node: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    moved = node.to("meta", non_blocking=True)
    assert moved.device().type == "meta" and type(moved) is type(node) and moved._context() == node._context()
    assert {name: x.device.type for name, x in moved._tensors().items()} == dict.fromkeys(node._tensors(), "meta")
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: x + 1)  # the machine may have no device to pin memory for
    pinned = node.pin_memory()
    assert all(torch.equal(pinned._tensors()[name], x + 1) for name, x in node._tensors().items())
    # DataLoader pins nodes inside the containers that it knows.
    from torch.utils.data._utils.pin_memory import pin_memory

    found = pin_memory({"x": (node, 1)})["x"][0]
    assert torch.equal(found._tensors()["values"], pinned._tensors()["values"])
    streams: list[Any] = []
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda x, stream: streams.append(stream))
    node.record_stream("a stream")
    assert streams == ["a stream"] * len(node._tensors())


def test_to_keeps_what_is_known_and_converts_weights() -> None:
    x = kjt().sync().to("cpu", dtype=torch.float64)
    assert x.length_per_key_or_none() == [3, 5] and x.weights().dtype == torch.float64
    assert x.values().dtype == torch.int64
    assert kjt().sync().to("meta").offset_per_key() == [0, 3, 8]


# ---- repr -----------------------------------------------------------------------------------------------------------


def test_repr() -> None:
    assert repr(jt()) == "JaggedTensor([[3, 1], [], [4]], weights=[[0.5, 1.0], [], [2.0]])"
    assert repr(kjt().permute([1])).startswith("KeyedJaggedTensor({'item': [[3], [4], [5, 6, 7]]}, weights={'item': [[")
    assert repr(NODES["kjt_empty"]) == "KeyedJaggedTensor({}, weights={})"
    assert repr(NODES["kt"]) == "KeyedTensor({'a': 2, 'b': 1}, values=float32[2, 3], device='cpu', key_dim=1)"
    long = JaggedTensor(torch.arange(1000), offsets=torch.tensor([0, 1000]))
    assert repr(long) == "JaggedTensor(values=int64[1000], offsets=int64[2], device='cpu')"
    there = KeyedJaggedTensor(["a"], torch.arange(3), lengths=torch.tensor([3])).to("meta")
    assert repr(there) == "KeyedJaggedTensor(['a'], values=int64[3], lengths=int64[1], device='meta', stride=1)"


# ---- CUDA -----------------------------------------------------------------------------------------------------------


@pytest.mark.cuda
def test_what_waits_for_the_device() -> None:
    x = kjt()
    there = x.pin_memory().to("cuda", non_blocking=True)
    torch.cuda.synchronize()
    with sync_debug_mode("error"):
        built = KeyedJaggedTensor(there.keys(), there.values(), there.weights(), there.lengths())
        permuted = built.permute([1, 0])
        built.split([0, 2])
        KeyedJaggedTensor.concat([built, KeyedJaggedTensor(["c"], there.values(), there.weights(), there.lengths())])
        with pytest.raises(RuntimeError, match="synchroni"):
            built.offset_per_key()
    assert_same(permuted.to("cpu"), x.permute([1, 0]))
    assert built.offset_per_key() == x.offset_per_key()
