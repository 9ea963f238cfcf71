"""The command line, the files it writes, and the arguments it refuses."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from pathlib import Path

import pytest
import torch

from torchsparse_rec.nn import Embedding
from torchsparse_rec.optim import Adam
from torchsparse_rec.profiling import diagnose
from torchsparse_rec.profiling.__main__ import main
from torchsparse_rec.profiling._batches import Batches, Exhausted, copied, examples_in, fresh, moved, parts_of, versions
from torchsparse_rec.profiling._trace import Profile
from torchsparse_rec.profiling.demo import build
from torchsparse_rec.profiling.timeline import draw_timeline

pytestmark = pytest.mark.usefixtures("one_thread")

SCRIPT = """
import time
import torch
from torch import nn

model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def step(model, optimizer, batch):
    optimizer.zero_grad()
    model(batch).sum().backward()
    optimizer.step()

def batches():
    while True:
        time.sleep(0.01)
        yield torch.ones(8, 4)

def loop():
    return step, batches(), model, optimizer

def no_model():
    return step, batches()

def nothing():
    return step
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "a_training_script.py"
    path.write_text(SCRIPT)
    yield path
    sys.modules.pop("a_training_script", None)


def test_a_function_of_a_script(script, capsys):
    assert main([f"{script}:loop", "--steps", "4"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("verdict: slow_loader")
    assert "waiting in the loader" in printed and "without the dense layers" in printed


def test_a_function_of_a_module_and_files(script, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(script.parent)
    assert main(["a_training_script:loop", "--steps", "4", "--json", "--out", str(tmp_path / "new/out")]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["verdict"] == "slow_loader"
    out = tmp_path / "new/out"
    assert sorted(path.name for path in out.iterdir()) == ["diagnosis.json", "report.txt", "timeline.png", "trace.json"]
    assert json.loads((out / "diagnosis.json").read_text()) == printed
    assert (out / "report.txt").read_text().startswith("verdict: slow_loader")
    assert (out / "timeline.png").read_bytes().startswith(b"\x89PNG")


def test_demo(capsys):
    assert main(["demo", "slow_loader", "--strength", "5", "--seed", "1", "--steps", "5", "--threads", "1"]) == 0
    assert capsys.readouterr().out.startswith("verdict: slow_loader")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo"], "demo needs one of slow_loader, per_row_records"),
        (["demo", "rain"], "demo needs one of slow_loader, .* got rain"),
        (["demo", "slow_loader", "--strength", "0"], "argument --strength: must be positive and finite, got 0"),
        (["demo", "slow_loader", "--strength", "inf"], "argument --strength: must be positive and finite, got inf"),
        (["demo", "slow_loader", "--strength", "nan"], "argument --strength: must be positive and finite, got nan"),
        (["demo", "slow_loader", "--threads", "0"], "argument --threads: must be at least 1"),
        (["demo", "slow_loader", "--seed", str(2**64)], "argument --seed: must be at least 0 and below"),
        (["demo", "slow_loader", "--steps", "1"], "argument --steps: must be at least 2"),
        (["demo", "slow_loader", "--warmup", "0"], "argument --warmup: must be at least 1"),
        (["demo", "slow_loader", "--device", "foo"], "argument --device: device must be cpu or cuda, got 'foo'"),
        (["demo", "slow_loader", "--device", "meta"], "argument --device: device must be cpu or cuda, got 'meta'"),
        (["demo", "slow_loader", "--device", "cuda:99"], "argument --device: device must be one of this machine's"),
        (["demo", "slow_loader", "--out", __file__], "argument --out: must be a folder that can be written"),
        (["demo", "slow_loader", "--out", f"{__file__}/x"], "argument --out: must be a folder that can be written"),
        (["no_function"], "must be module:function or script.py:function, got 'no_function'"),
        (["no_such_module_at_all:f"], "there is no module 'no_such_module_at_all'"),
        (["no/such/file.py:f"], "there is no file no/such/file.py"),
        (["json:nothing"], "json has no function 'nothing'"),
        (["json:loads", "more"], "only demo takes a cause, got json:loads more"),
    ],
)
def test_what_is_no_target(arguments, message, capsys):
    with pytest.raises(SystemExit) as raised:
        main(arguments)
    assert raised.value.code == 2
    assert re.search(message, capsys.readouterr().err)


def test_what_a_function_or_a_module_raises_keeps_its_traceback(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a_module_of_mine.py").write_text("import a_module\n")
    (tmp_path / "a_bad_script.py").write_text("def loop():\n    raise ValueError('no data here')\n")
    try:
        # The missing module's name is a prefix of the given one, but another module.
        with pytest.raises(ModuleNotFoundError, match="No module named 'a_module'"):
            main(["a_module_of_mine:loop"])
        with pytest.raises(ValueError, match="no data here"):
            main(["a_bad_script.py:loop"])
    finally:
        for name in ("a_module_of_mine", "a_bad_script"):
            sys.modules.pop(name, None)


@pytest.mark.parametrize(("function", "got"), [("nothing", "function"), ("no_model", "tuple of 2")])
def test_a_function_that_returns_no_loop(script, capsys, function, got):
    with pytest.raises(SystemExit):
        main([f"{script}:{function}"])
    printed = capsys.readouterr().err
    assert "must return (step, loader, model, optimizer), with a function step(model, optimizer, batch)" in printed
    assert f"got {got}" in printed


# ---- Loaders that are short, and arguments that are wrong -----------------------------------------------------------


# The model and the optimizers of a step that has none.
NONE = (torch.nn.Identity(), [])


def step(model: torch.nn.Module, optimizer: object, batch: torch.Tensor) -> None:
    batch.sum()


@pytest.mark.parametrize(
    ("loader", "count"), [([], "none"), ([torch.ones(2)], "1"), (iter([]), "none"), (iter([torch.ones(2)]), "1")]
)
def test_too_few_batches(loader, count):
    with pytest.raises(ValueError, match=f"diagnose: loader must give at least 2 batches, got {count}$"):
        diagnose(step, loader, *NONE)


def test_a_step_that_does_nothing_waits_for_nothing():
    assert diagnose(lambda *_: None, [torch.ones(2)] * 10, *NONE, steps=10).findings == []


@pytest.mark.parametrize("count", [2, 3, 9])
def test_what_there_is_is_used(count):
    once = diagnose(step, iter([torch.ones(2)] * count), *NONE, steps=10)
    assert 1 <= once.steps < count
    again = diagnose(step, [torch.ones(2)] * count, *NONE, steps=10)
    assert again.steps >= 10


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({"step": 3}, TypeError, "diagnose: step must be a function of model, optimizer and batch, got int"),
        ({"loader": 3}, TypeError, "diagnose: loader must be an iterable of batches, got int"),
        ({"model": 3}, TypeError, "diagnose: model must be a torch.nn.Module, got int"),
        ({"optimizer": NONE[0]}, TypeError, "diagnose: optimizer must be a torch.optim.Optimizer or .*, got Identity"),
        ({"optimizer": [step]}, TypeError, "diagnose: optimizer must be a torch.optim.Optimizer or .*, got function"),
        ({"step_without_dense": 3}, TypeError, "diagnose: step_without_dense must be a function of model, .*, got int"),
        ({"warmup": 1.5}, TypeError, "diagnose: warmup must be an integer, got 1.5"),
        ({"steps": 1}, ValueError, "diagnose: steps must be at least 2, got 1"),
        ({"warmup": 0}, ValueError, "diagnose: warmup must be at least 1, got 0"),
        ({"out": __file__}, ValueError, "diagnose: out must be a folder, got the file"),
        ({"device": "foo"}, ValueError, "device must be cpu or cuda, got 'foo'"),
    ],
)
def test_wrong_arguments(given, error, text):
    with pytest.raises(error, match=text):
        diagnose(**{"step": step, "loader": [], "model": NONE[0], "optimizer": NONE[1], **given})


@pytest.mark.parametrize("strength", [-1, float("inf")])
def test_wrong_strengths(strength):
    with pytest.raises(ValueError, match=f"strength must be positive and finite, got {strength}"):
        build("slow_loader", strength=strength)


@pytest.mark.parametrize(
    ("step", "arguments"),
    [
        (lambda batch: None, {}),
        (lambda batch: None, {"model": NONE[0], "optimizer": NONE[1]}),
        (step, {"model": NONE[0]}),
        (step, {"model": NONE[0], "optimizer": NONE[1], "step_without_dense": lambda batch: None}),
    ],
)
def test_a_call_without_a_model_or_with_a_function_of_the_batch_alone_is_told_the_ways_out(step, arguments):
    for way in ("diagnose(step, loader, model, optimizer)", "step(model, optimizer, batch)", "in_place=True"):
        with pytest.raises(TypeError, match=re.escape(way)):
            diagnose(step, [torch.ones(2)] * 4, **arguments)


def test_what_a_loader_raises_passes_through():
    def loader():
        yield torch.ones(2)
        yield torch.ones(2)
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        diagnose(step, loader(), *NONE)


def test_a_step_may_take_its_batch_apart():
    def step(model: torch.nn.Module, optimizer: object, batch: dict) -> None:
        batch.pop("labels").sum()

    found = diagnose(step, [{"x": torch.ones(2), "labels": torch.ones(2)} for _ in range(5)], *NONE, steps=4)
    assert found.findings == []


@dataclasses.dataclass
class Columns:
    """A batch with fields."""

    ids: torch.Tensor
    more: dict[str, torch.Tensor]


def test_a_step_may_change_its_batch_in_place():
    table = torch.nn.Embedding(12, 2, padding_idx=0)

    def step(table: torch.nn.Module, optimizer: object, batch: Columns) -> None:
        batch.more["ids"].add_(1)  # if repeated on one batch, there is soon no such row
        table(batch.more["ids"]).sum().backward()

    loader = [Columns(torch.arange(8), {"ids": torch.arange(8) + k}) for k in range(4)]
    diagnose(step, loader, table, [], step_without_dense=lambda table, optimizer, batch: batch.ids.mul_(0), steps=8)
    for k, batch in enumerate(loader):
        assert torch.equal(batch.ids, torch.arange(8)) and torch.equal(batch.more["ids"], torch.arange(8) + k)


def test_a_step_that_leaves_its_batch_alone_gets_the_very_tensors():
    seen = set()
    loader = [torch.ones(4) for _ in range(4)]
    diagnose(lambda model, optimizer, batch: seen.add(batch.data_ptr()), loader, *NONE, steps=4)
    assert len(seen) <= len(loader) + 1  # and a copy, at first


def test_copies_of_a_batch_share_nothing():
    import numpy

    from torchsparse_rec import KeyedJaggedTensor

    keyed = KeyedJaggedTensor(["a"], torch.arange(4), lengths=torch.tensor([2, 2]))
    batch = (keyed, Columns(torch.ones(2), {"x": torch.ones(2)}), numpy.ones(2), "text")
    own = copied(batch)
    assert len(versions(own)) == len(versions(batch)) >= 4
    own[0].values().zero_(), own[1].ids.zero_(), own[1].more["x"].zero_(), own[2].fill(0)
    assert keyed.values().tolist() == [0, 1, 2, 3] and own[3] == "text"
    assert batch[1].ids.tolist() == batch[1].more["x"].tolist() == batch[2].tolist() == [1, 1]


def test_a_compiled_model_is_left_alone():
    model = torch.compile(torch.nn.Sequential(torch.nn.Linear(2, 1)), backend="eager")

    def step(model: torch.nn.Module, optimizer: object, batch: torch.Tensor) -> None:
        model(batch).sum().backward()

    found = diagnose(step, [torch.ones(4, 2)] * 4, model, [], steps=2)
    assert any("compiled" in note for note in found.notes)
    assert found.times_ms["without_dense"] is None


def test_a_stand_in_that_a_step_cannot_take_is_a_note():
    model = torch.nn.Sequential(Embedding(9, 2, grad_mode="fused"), torch.nn.Linear(2, 1))

    def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
        model(batch).sum().backward()
        assert model[1].weight.grad is not None, "no gradient"  # the table is updated already
        optimizer.step()
        model[1].weight.grad = None

    found = diagnose(step, [torch.arange(4)] * 4, model, Adam(model.parameters(), in_backward=True), steps=2)
    assert found.times_ms["without_dense"] is None
    assert any("without_dense could not be measured: AssertionError: no gradient" in note for note in found.notes)


# ---- Parts -----------------------------------------------------------------------------------------------------------


def test_batches_start_again_where_they_can():
    batches = Batches([1, 2])
    got = [batches.next() for _ in range(5)]
    assert [value for value, _ in got] == [1, 2, 1, 2, 1]
    assert [seconds is None for _, seconds in got] == [False, False, True, False, True]
    once = Batches(iter([1]))
    once.next()
    for _ in range(2):
        with pytest.raises(Exhausted):
            once.next()


def test_examples_and_columns_of_any_batch():
    import pyarrow

    from torchsparse_rec import JaggedTensor, KeyedJaggedTensor

    keyed = KeyedJaggedTensor(["a", "b"], torch.arange(4), lengths=torch.tensor([2, 0, 1, 0, 1, 0]))
    jagged = JaggedTensor(torch.arange(4), lengths=torch.tensor([1, 1, 2]))
    record = pyarrow.record_batch({"x": [1, 2, 3], "y": ["a", "b", "c"]})
    for batch, examples, columns in (
        (torch.ones(7, 2), 7, 1),
        ((keyed, torch.ones(3)), 3, 3),
        ({"ids": jagged, "words": pyarrow.array(["a", "b", "c"]), "n": 4}, 3, 2),
        (record, 3, 2),
        ([{"id": k} for k in range(5)], None, 0),
        ([4, 5, 6], 3, 1),
        (torch.tensor(3), None, 0),
        (None, None, 0),
    ):
        assert (examples_in(batch), parts_of(batch)) == (examples, columns)
        again = fresh(batch)
        assert type(again) is type(batch)
        assert examples_in(moved(batch, torch.device("cpu"))) == examples


def test_the_folder_is_made_before_anything_runs(tmp_path):
    def untouched(model: torch.nn.Module, optimizer: object, batch: torch.Tensor) -> None:
        raise AssertionError("the step must not run")

    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match="file/out"):
        diagnose(untouched, [torch.ones(2)] * 4, *NONE, out=tmp_path / "file/out")
    diagnose(step, [torch.ones(2)] * 4, *NONE, steps=2, out=tmp_path / "new/out")
    assert {"trace.json", "report.txt", "diagnosis.json"} <= {path.name for path in (tmp_path / "new/out").iterdir()}


def test_without_matplotlib_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"the timeline needs matplotlib: pip install 'torchsparse-rec\[examples\]'"):
        draw_timeline(Profile(), tmp_path / "timeline.png")
    found = diagnose(step, [torch.ones(2)] * 4, *NONE, steps=2, out=tmp_path)
    assert found.timeline is None and any("torchsparse-rec[examples]" in note for note in found.notes)
    assert (tmp_path / "trace.json").exists() and not (tmp_path / "timeline.png").exists()
