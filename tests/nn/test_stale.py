"""A table's parameter while some of its rows are stale: readers and writers of every way find the rows up to date."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from devices import KERNELS
from kinds import saved
from nn.cases import train_squares, trained
from pairs import in_pairs
from torch import Tensor
from torch.nn import Parameter

from torchsparse_rec import nn, optim
from torchsparse_rec._torch import as_stored
from torchsparse_rec.tables.stale import StaleParameter

MODES = ["sparse", "fused"]


def stale_table(grad_mode: str = "sparse"):
    """Train a table until rows are stale; return its parameter, what that should be, its model and optimizer."""
    model, optimizer, want = trained(grad_mode)
    parameter = next(model.table.parameters())
    assert type(parameter) is StaleParameter
    with as_stored():
        assert not torch.allclose(parameter, want, rtol=2e-5, atol=1e-6), "no row is stale: the test shows nothing"
    return parameter, want, model, optimizer


def close(actual: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(actual.detach(), want, rtol=2e-5, atol=2e-6)


READS = {
    "add": lambda p: p + 0,
    "data": lambda p: p.data,
    "detach": lambda p: p.detach(),
    "index": lambda p: p[:],
    "iterate": lambda p: torch.stack(list(p)),
    "numpy": lambda p: torch.from_numpy(p.detach().numpy()),
    "array": lambda p: torch.from_numpy(np.asarray(p.detach())),
    "dlpack": lambda p: torch.from_dlpack(p.detach()),
    "tolist": lambda p: torch.tensor(p.tolist()),
    "data_ptr": lambda p: p.data_ptr() and stored(p),
    "storage": lambda p: torch.tensor(p.untyped_storage().tolist(), dtype=torch.uint8).view(p.dtype).view(p.shape),
    "copy": lambda p: copy.copy(p),
    "deepcopy": lambda p: copy.deepcopy(p),
    "pickle": lambda p: pickle.loads(pickle.dumps(p)),
    "save": lambda p: saved({"p": p})["p"],
    "foreach": lambda p: torch._foreach_add([p, p], 0.0)[1],
    "stack": lambda p: torch.stack([p])[0],
    "list argument by name": lambda p: torch.cat(tensors=[p]),
    "out": lambda p: torch.add(p.detach(), 0, out=torch.empty(p.shape)),
    "to": lambda p: p.to(torch.float64).float(),
    "half": lambda p: p.double().float(),
    "share_memory": lambda p: p.share_memory_(),
    "vector": lambda p: torch.nn.utils.parameters_to_vector([p]).view(p.shape),
    "lookup of torch's": lambda p: torch.nn.functional.embedding(torch.arange(len(p)), p),
    "lookup of ours": lambda p: nn.lookup_sparse(p, lists_of_one(len(p)), "sum"),
    "made a parameter": lambda p: Parameter(p),
    "made a module": lambda p: torch.nn.Embedding.from_pretrained(p).weight,
    "lerp": lambda p: torch.zeros(p.shape).lerp(p.detach(), 1.0),
    "einsum": lambda p: torch.einsum("vd,de->ve", p, torch.eye(p.shape[1])),
    "linear": lambda p: torch.nn.functional.linear(torch.eye(p.shape[1]), p).t(),
    "view": lambda p: p.view(-1).view(p.shape),
    "swapped into a module": lambda p: swapped_in(p),
    "another class": lambda p: (p + torch.zeros(p.shape).as_subclass(Another)).as_subclass(Tensor),
    "another class first": lambda p: (torch.zeros(p.shape).as_subclass(Another) + p).as_subclass(Tensor),
    "a class that sees all": lambda p: Watching.of(torch.zeros(p.shape)) + p,
}


class Another(Tensor):
    """A subclass of Tensor that leaves everything to torch."""


class Watching(Tensor):
    """A subclass of Tensor with a ``__torch_function__`` of its own."""

    seen: list = []

    @staticmethod
    def of(x: Tensor) -> Tensor:
        return x.as_subclass(Watching)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.seen.append((func, types))
        plain = [x.as_subclass(Tensor) if type(x) is Watching else x for x in args]
        return func(*plain, **(kwargs or {}))


def lists_of_one(count: int):
    return torch.nested.nested_tensor_from_jagged(torch.arange(count), torch.arange(count + 1))


def stored(p: Tensor) -> Tensor:
    with as_stored():
        return p.detach().clone()


def swapped_in(p: Tensor) -> Tensor:
    module = torch.nn.Embedding(*p.shape)
    return torch.func.functional_call(module, {"weight": p}, (torch.arange(len(p)),))


@pytest.mark.parametrize("grad_mode", MODES)
@pytest.mark.parametrize("read", READS)
def test_every_reader_sees_current_rows(read: str, grad_mode: str) -> None:
    parameter, want, _, _ = stale_table(grad_mode)
    result = READS[read](parameter)
    close(result, want)
    close(stored(parameter), want)
    assert result is parameter or type(result) in (Tensor, Parameter)


def rows_of(model: torch.nn.Module) -> Tensor:
    """Look up every row."""
    return model.table(torch.arange(model.table.num_embeddings).unsqueeze(1))


OTHER_READS = {
    "state_dict": lambda model, _: model.state_dict()["table.weight"],
    "saved model": lambda model, _: saved(model, weights_only=False).table.weight,
    "to": lambda model, _: model.to(torch.float64).table.weight.float(),
    "eval": lambda model, _: stored(next(model.eval().table.parameters())),
    "flush": lambda model, optimizer: optimizer.flush() or stored(next(model.table.parameters())),
    "optimizer's state_dict": lambda model, optimizer: (
        optimizer.state_dict() and stored(next(model.table.parameters()))
    ),
    "lookup": lambda model, _: rows_of(model),
    "lookup without gradient": lambda model, _: without_gradient(lambda: rows_of(model)),
}


@pytest.mark.usefixtures("kernels")
@in_pairs(read=OTHER_READS, grad_mode=MODES, kernels=KERNELS)
def test_readers_of_model_and_optimizer_see_current_rows(read: str, grad_mode: str) -> None:
    _, want, model, optimizer = stale_table(grad_mode)
    close(OTHER_READS[read](model, optimizer), want)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("grad_mode", MODES)
def test_lookups_write_nothing(grad_mode: str) -> None:
    parameter, _, model, optimizer = stale_table(grad_mode)
    with as_stored():
        before, version = parameter.detach().clone(), parameter._version
    rows_of(model), without_gradient(lambda: rows_of(model))
    with as_stored():
        assert torch.equal(parameter, before) and parameter._version == version
    assert optimizer.holds(parameter)


def test_other_classes_have_their_say() -> None:
    parameter, _, _, _ = stale_table()
    assert type(parameter + torch.zeros(parameter.shape).as_subclass(Another)) is Another
    Watching.seen.clear()
    _ = parameter + Watching.of(torch.zeros(parameter.shape))
    assert Watching.seen[0] == (Tensor.add, (Watching,)) or Watching.seen[0][1] == (Watching,)


def test_prints_current_rows() -> None:
    parameter, want, _, _ = stale_table()
    shown = repr(parameter)
    assert shown == repr(Parameter(stored(parameter)))
    close(stored(parameter), want)


WRITES = {
    "data": lambda p: p.data.mul_(2),
    "no_grad": lambda p: without_gradient(lambda: p.mul_(2)),
    "set data": lambda p: setattr(p, "data", p.data * 2),
    "foreach": lambda p: without_gradient(lambda: torch._foreach_mul_([p], 2.0)),
    "rows": lambda p: without_gradient(lambda: p[:].mul_(2)),
    "out": lambda p: torch.mul(p.data, 2, out=p.data),
    "vector": lambda p: torch.nn.utils.vector_to_parameters(torch.nn.utils.parameters_to_vector([p]) * 2, [p]),
    "initialise": lambda p: torch.nn.init.constant_(p, 0.25),
}


@torch.no_grad()
def without_gradient(write):
    return write()


@pytest.mark.parametrize("grad_mode", MODES)
@pytest.mark.parametrize("write", WRITES)
def test_writers_write_on_current_rows(write: str, grad_mode: str) -> None:
    parameter, want, model, optimizer = stale_table(grad_mode)
    WRITES[write](parameter)
    want = torch.full_like(want, 0.25) if write == "initialise" else 2 * want
    close(stored(parameter), want)
    optimizer.flush()  # the steps before are not added to what was written
    close(stored(parameter), want)
    close(rows_of(model), want)


@pytest.mark.parametrize("grad_mode", MODES)
def test_what_reads_no_element_writes_none(grad_mode: str) -> None:
    parameter, _, model, optimizer = stale_table(grad_mode)
    before = stored(parameter)
    assert (parameter.shape, parameter.dtype, parameter.device.type) == (before.shape, torch.float32, "cpu")
    assert parameter.numel() == before.numel() and parameter.size(0) == len(parameter) and parameter.dim() == 2
    assert parameter.is_leaf and parameter.requires_grad and parameter.grad_fn is None
    parameter.grad = torch.zeros(before.shape)
    assert parameter.grad.shape == before.shape
    parameter.grad = None
    model.zero_grad()
    optimizer.zero_grad()
    list(model.parameters()), optimizer.param_groups
    parameter.requires_grad_(False).requires_grad_(True)
    assert {parameter: 1}[parameter] == 1 and isinstance(parameter, Parameter)
    sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert torch.equal(stored(parameter), before)


@pytest.mark.parametrize("grad_mode", MODES)
def test_copies_are_plain(grad_mode: str) -> None:
    parameter, want, model, _ = stale_table(grad_mode)
    copies = [copy.deepcopy(parameter), pickle.loads(pickle.dumps(parameter)), saved(parameter)]
    copies += [next(x.table.parameters()) for x in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)))]
    copies += [next(torch.optim.swa_utils.AveragedModel(model).module.table.parameters())]
    for copied in copies:
        assert type(copied) is Parameter and copied.requires_grad and not copied.__dict__
        close(copied, want)
    both = copy.deepcopy([parameter, parameter])
    assert both[0] is both[1]


@pytest.mark.parametrize("grad_mode", MODES)
def test_states_of_the_optimizer_are_current(grad_mode: str) -> None:
    parameter, _, _, optimizer = stale_table(grad_mode)
    model, theirs = (x for x in trained(grad_mode)[:2])
    wanted = theirs.state_dict()["state"]
    place = next(k for k, p in enumerate(p for g in optimizer.param_groups for p in g["params"]) if p is parameter)
    for name in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(optimizer.state[parameter][name], wanted[place][name])


def test_an_optimizer_that_lets_go_gives_the_class_back() -> None:
    parameter, want, model, optimizer = stale_table()
    del optimizer
    close(parameter, want)
    assert type(parameter) is Parameter
    parameter, want, model, optimizer = stale_table()
    optimizer.load_state_dict(optimizer.state_dict())
    assert type(parameter) is Parameter
    close(stored(parameter), want)


def test_the_class_comes_with_the_first_row_that_lags() -> None:
    table = nn.Embedding(20, 3, grad_mode="sparse")
    dense = nn.Embedding(20, 3, grad_mode="dense")
    lazy = nn.Embedding(20, 3, grad_mode="sparse")
    optimizers = [optim.Adam([*table.parameters(), *dense.parameters()]), optim.Adam(lazy.parameters(), lazy=True)]
    for _ in range(3):
        for module in (table, dense, lazy):
            assert type(next(module.parameters())) is Parameter or module is table
            module(torch.tensor([1, 2])).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
    assert [type(next(x.parameters())) for x in (table, dense, lazy)] == [StaleParameter, Parameter, Parameter]


def test_a_parameter_of_a_class_of_its_own_never_lags() -> None:
    class Own(Parameter):
        pass

    torch.manual_seed(0)
    table, reference = nn.Embedding(20, 3, grad_mode="sparse"), torch.nn.Embedding(20, 3)
    table.weight = Own(reference.weight.detach().clone())
    batches = [torch.tensor([1, k]) for k in range(4)]
    with pytest.warns(UserWarning, match="its parameter has a class of its own"):
        train_squares(table, optim.Adam(table.parameters(), lr=0.1), batches)
    train_squares(reference, torch.optim.Adam(reference.parameters(), lr=0.1), batches)
    assert type(table._parameters["weight"]) is Own
    torch.testing.assert_close(table._parameters["weight"].detach(), reference.weight.detach(), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("grad_mode", MODES)
def test_swapped_at_conversion(grad_mode: str) -> None:
    """Convert under ``torch.__future__.set_swap_module_params_on_conversion``."""
    parameter, want, model, optimizer = stale_table(grad_mode)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.to(torch.float64)
        assert model.table._parameters["weight"] is parameter and parameter.dtype == torch.float64
        close(parameter.float(), want)
        model.load_state_dict({name: x + 1 for name, x in model.state_dict().items()})
        close(parameter.float(), want + 1)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


@pytest.mark.parametrize("gone", [False, True])
@pytest.mark.parametrize("grad_mode", MODES)
def test_swapped_by_hand(grad_mode: str, gone: bool) -> None:
    parameter, want, model, optimizer = stale_table(grad_mode)
    if gone:
        del optimizer
    other = torch.nn.Parameter(torch.zeros_like(parameter))
    torch.utils.swap_tensors(parameter, other)
    close(other, want)
    assert model.table.weight is parameter and not parameter.any()
    if not gone:
        train_squares(model.table, optimizer, [torch.tensor([[1, 2]])])
        assert parameter[[1, 2]].any()


def test_a_table_that_grows_is_not_swapped() -> None:
    table = nn.EmbeddingVariable(3)
    table(torch.tensor([1]))
    with pytest.raises(RuntimeError, match=r"cannot swap a table that grows, of shape \[1024, 3\].*load_state_dict"):
        torch.utils.swap_tensors(table.weight, torch.nn.Parameter(torch.zeros(1024, 3)))


@pytest.mark.parametrize("read", ["none", "state", "flush", "gone"])
@pytest.mark.parametrize("to", ["double", "half"])
@pytest.mark.parametrize("grad_mode", MODES)
@pytest.mark.parametrize("name", ["SGD", "Adagrad", "RMSprop", "Adadelta"])
def test_converted_while_states_are_behind(name: str, grad_mode: str, to: str, read: str) -> None:
    results = []
    for of, optimizers in ((torch.nn, torch.optim), (nn, optim)):
        torch.manual_seed(0)
        mode = {} if of is torch.nn else {"grad_mode": grad_mode}
        pair = torch.nn.ModuleList(of.Embedding(12, 3, **mode) for _ in range(2))
        options = {"lr": 0.1, **({"momentum": 0.9} if name == "SGD" else {})}
        if of is nn:
            options["in_backward"] = grad_mode == "fused"
        optimizer = getattr(optimizers, name)(pair.parameters(), **options)
        for step in range(6):
            if step == 3:
                getattr(pair[0], to)()
                if of is nn and read == "state":
                    optimizer.state_dict()
                elif of is nn and read == "flush":
                    optimizer.flush()
                elif read == "gone":
                    del optimizer
                    gc.collect()
                    break
            optimizer.zero_grad()
            sum(table(torch.tensor([1, step])).square().sum() for table in pair).backward()
            optimizer.step()
        results.append([table.weight.detach().double() for table in pair])
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(
            mine, theirs, rtol=2e-3 if to == "half" else 1e-5, atol=2e-3 if to == "half" else 1e-6
        )


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("gone", [False, True])
@pytest.mark.parametrize("grad_mode", MODES)
def test_a_parameter_of_a_parameter(grad_mode: str, gone: bool, times: int) -> None:
    parameter, want, model, optimizer = stale_table(grad_mode)
    if gone:
        del optimizer
        gc.collect()
    for _ in range(times):
        parameter = torch.nn.Parameter(parameter)
    close(parameter, want)


@pytest.mark.parametrize("grad_mode", MODES)
def test_many_threads_read(grad_mode: str) -> None:
    """Read in eight threads at once: rows are flushed once."""
    for _ in range(5):
        parameter, want, _, _ = stale_table(grad_mode)
        start = threading.Barrier(8)

        def read(_, parameter=parameter, start=start) -> Tensor:
            start.wait()
            return parameter.detach().clone()

        with ThreadPoolExecutor(8) as pool:
            for result in pool.map(read, range(8)):
                close(result, want)


def test_readers_beside_a_thread_that_trains() -> None:
    """Compare the end of a training, while another thread reads, with dense torch's."""
    torch.manual_seed(0)
    reference = torch.nn.Embedding(2000, 8)
    table = nn.Embedding(2000, 8, _weight=reference.weight.detach().clone(), grad_mode="sparse")
    batches = [torch.randint(2000, (64,), generator=torch.Generator().manual_seed(k)) for k in range(100)]
    train_squares(reference, torch.optim.Adam(reference.parameters(), lr=0.1), batches)
    optimizer, done = optim.Adam(table.parameters(), lr=0.1), threading.Event()

    def read() -> None:
        while not done.is_set():
            next(table.parameters()).detach().sum().item()  # two threads' graphs of one leaf may deadlock in torch

    thread = threading.Thread(target=read)
    thread.start()
    try:
        train_squares(table, optimizer, batches)
    finally:
        done.set()
        thread.join()
    close(next(table.parameters()), reference.weight.detach())


def test_compiled_readers_see_current_rows() -> None:
    parameter, want, model, _ = stale_table()
    torch._dynamo.reset()
    compiled = torch.compile(lambda p: p * 2, backend="aot_eager")
    close(compiled(parameter), 2 * want)
    parameter, want, model, _ = stale_table()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="grad_mode='dense'"):
        torch.compile(lambda p: p * 2, backend="aot_eager", fullgraph=True)(parameter)


def test_compiled_loops_ask_for_gradients() -> None:
    _, _, model, optimizer = stale_table()
    optimizer.zero_grad()
    torch._dynamo.reset()
    missing = torch.compile(lambda: [p.grad is None for p in model.table.parameters()], backend="eager")
    assert missing() == [True]


@torch.inference_mode()
def test_readers_in_inference_mode() -> None:
    with torch.inference_mode(False):
        parameter, want, _, _ = stale_table()
    assert torch.allclose(parameter, want, rtol=2e-5, atol=2e-6)


def test_aliases_taken_earlier_lag() -> None:
    """Show the limit that the docs name: an alias that was taken before a step has stale rows."""
    parameter, _, model, optimizer = stale_table()
    alias = parameter.detach()
    for _ in range(3):
        optimizer.zero_grad()
        model.table(torch.tensor([[1]])).sum().backward()
        optimizer.step()
    lagging = alias.clone()
    close(alias, stored(parameter))
    assert not torch.allclose(lagging, parameter, rtol=2e-5, atol=1e-6)
    close(alias, parameter.detach())  # the line above has read the parameter, which flushes


def test_a_parameter_dies_as_others_do() -> None:
    parameter, _, model, optimizer = stale_table()
    gone = weakref.ref(parameter)
    del parameter, model, optimizer
    assert gone() is None
