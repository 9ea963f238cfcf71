"""The comparisons of Wide & Deep and DLRM with TensorFlow: what is printed, and how the commands end."""

import re

import pytest

from torchsparse_rec.examples._comparison import Comparison
from torchsparse_rec.examples.dlrm import __main__ as dlrm
from torchsparse_rec.examples.wide_deep import __main__ as wide_deep

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.tensorflow,
    pytest.mark.filterwarnings("ignore:.*numpy.*:DeprecationWarning"),
]

SIZES = "--batch-size 128 --samples 2048 --embedding-dim 4 --compare tensorflow "
COMMANDS = {
    "wide_deep": (wide_deep, SIZES + "--rows 200 --mlp 16,8 --lr 0.5"),
    "dlrm": (dlrm, SIZES + "--tables hashed --buckets 200 --max-cardinality 100 --bottom 8 --top 16"),
}


@pytest.fixture(params=COMMANDS)
def compared(request, monkeypatch):
    """Return an example's module of the comparison and a call of its command. Of TensorFlow's forms there are two."""
    command, flags = COMMANDS[request.param]
    module = pytest.importorskip(f"torchsparse_rec.examples.{request.param}.compare_tensorflow")
    monkeypatch.setattr(module, "FORMS", [form for form in module.FORMS if "safe" not in str(form)])
    return module, lambda *more: command.main([*flags.split(), *more])


def test_compare_prints_both_and_ends_with_the_speed(compared, capfd):
    module, run = compared
    assert run("--steps", "24") == 0
    lines = capfd.readouterr().out.splitlines()
    for line, form in zip(lines[:2], module.FORMS, strict=True):
        assert re.fullmatch(rf"TensorFlow with {form}: [\d,]+ samples/s", line)
    side = r"loss \d\.\d{6} +[\d,]+ samples/s"
    for line, block in zip(lines[2:5], ("1-10", "11-20", "21-24"), strict=True):
        assert re.fullmatch(rf"steps +{block} +torchsparse_rec {side}   TensorFlow {side}", line)
    for line, name in zip(lines[5:7], ("torchsparse_rec", "TensorFlow"), strict=True):
        assert re.fullmatch(rf"{name}: [\d.]+ ms a step, [\d,]+ samples/s \(medians\)", line)
    within = rf"\(within {module.TOLERANCE:g}\)"
    assert re.fullmatch(rf"first 24 losses: largest difference \d\.\d\de-\d\d {within}", lines[7])
    assert lines[8] in [f"TensorFlow's fastest form: {form}" for form in module.FORMS]
    assert re.fullmatch(r"speed: \d+\.\d\dx TensorFlow", lines[9]) and len(lines) == 10


def test_losses_that_differ_are_said_and_counted(compared, monkeypatch):
    module, run = compared
    found = Comparison(8, {"ours": [0.5, 0.4], "tensorflow": [0.5, 0.41]}, {"ours": [0.1], "tensorflow": [0.29]})
    assert found.largest_difference() == pytest.approx(0.01)
    printed = found.summary("form", 1e-4)
    assert "NOT within 0.0001" in printed[2] and printed[-1] == "speed: 2.90x TensorFlow"
    later = Comparison(8, {"ours": [0.0] * 60, "tensorflow": [0.0] * 50 + [1.0] * 10}, {})
    assert later.largest_difference() == 0.0
    monkeypatch.setattr(module, "compare", lambda *_: found)
    assert run() == 1
