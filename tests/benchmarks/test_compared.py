"""The comparisons of the examples with TensorFlow: what is printed, how the commands end, and that losses agree."""

import re

import pytest

from torchsparse_rec.examples import _common, dlrm, ncf, wide_deep

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
def compared(request, monkeypatch, benchmarks):
    """Return an example's module of the comparison and a call of its command. Of TensorFlow's forms there are two."""
    command, flags = COMMANDS[request.param]
    pytest.importorskip("tensorflow")
    module = benchmarks(f"{request.param}_tensorflow")
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
    within = r"\(within 0.0001\)"
    assert re.fullmatch(rf"first 24 losses: largest difference \d\.\d\de-\d\d {within}", lines[7])
    assert lines[8] in [f"TensorFlow's fastest form: {form}" for form in module.FORMS]
    assert re.fullmatch(r"speed: \d+\.\d\dx TensorFlow", lines[9]) and len(lines) == 10


def test_losses_that_differ_are_said_and_counted(compared, monkeypatch, benchmarks):
    module, run = compared
    Comparison = benchmarks("compared").Comparison
    found = Comparison(8, {"ours": [0.5, 0.4], "tensorflow": [0.5, 0.41]}, {"ours": [0.1], "tensorflow": [0.29]})
    assert found.largest_difference() == pytest.approx(0.01) and not found.agrees()
    printed = found.summary("form")
    assert "NOT within 0.0001" in printed[2] and printed[-1] == "speed: 2.90x TensorFlow"
    later = Comparison(8, {"ours": [0.0] * 60, "tensorflow": [0.0] * 50 + [1.0] * 10}, {})
    assert later.largest_difference() == 0.0
    for wrong in (float("nan"), float("inf")):
        assert not Comparison(8, {"ours": [0.5, wrong, 0.4], "tensorflow": [0.5, 0.4, 0.4]}, {}).agrees()
        assert not Comparison(8, {"ours": [0.5, 0.4, 0.4], "tensorflow": [wrong, 0.4, 0.4]}, {}).agrees()
    monkeypatch.setattr(module, "compare", lambda *_: found)
    assert run() == 1


@pytest.mark.parametrize(
    ("grad_mode", "optimizer"),
    [
        *((mode, "adam") for mode in _common.GRAD_MODES),
        *(("sparse", "sgd"), ("fused", "adagrad")),
    ],
)
def test_first_losses_of_ncf_equal_tensorflows(grad_mode, optimizer, benchmarks):
    pytest.importorskip("tensorflow")
    module, lines = benchmarks("compared_ncf"), []
    given = {"factors": 4, "layers": [16, 8], "batch_size": 128, "grad_mode": grad_mode, "optimizer": optimizer}
    settings, small = ncf.make_parser().settings(given), ncf.generated(150, 300, 4500, seed=1)
    found = module.compare(settings, small, epochs=1, print_line=lines.append)
    assert len(found.first_losses["ours"]) == len(found.first_losses["tensorflow"]) == 100
    assert found.agrees() and found.first_losses["ours"][-1] < found.first_losses["ours"][0] - 1e-3
    sides = found.epochs[0]
    assert sides["ours"].metrics["hr"] == pytest.approx(sides["tensorflow"].metrics["hr"], abs=0.05)
    assert any(re.search(r"first 100 losses: largest difference \S+ \(within 1e-05\)", line) for line in lines)
