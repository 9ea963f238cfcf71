"""The comparisons of the examples with TensorFlow: what is printed, how the commands end, and that losses agree."""

import re

import numpy as np
import pytest

from torchsparse_rec.examples import _common, dlrm, ncf, wide_deep

pytestmark = [
    pytest.mark.usefixtures("one_thread", "tensorflow"),
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
    module, lines = benchmarks("compared_ncf"), []
    given = {"factors": 4, "layers": [16, 8], "batch_size": 128, "grad_mode": grad_mode, "optimizer": optimizer}
    settings, small = ncf.make_parser().settings(given), ncf.generated(150, 300, 4500, seed=1)
    found = module.compare(settings, small, epochs=1, print_line=lines.append)
    assert len(found.first_losses["ours"]) == len(found.first_losses["tensorflow"]) == 100
    assert found.agrees() and found.first_losses["ours"][-1] < found.first_losses["ours"][0] - 1e-3
    sides = found.epochs[0]
    assert sides["ours"].metrics["hr"] == pytest.approx(sides["tensorflow"].metrics["hr"], abs=0.05)
    assert any(re.search(r"first 100 losses: largest difference \S+ \(within 1e-05\)", line) for line in lines)


# ---- DLRM ------------------------------------------------------------------------------------------------------------

SMALL = {"tables": "hashed", "buckets": 60, "embedding_dim": 4, "bottom": [8], "top": [16], "max_cardinality": 100}


@pytest.mark.parametrize("optimizer", ["adagrad", "sgd"])
@pytest.mark.parametrize("form", ["separate tables", "stacked tables"])
def test_every_form_of_dlrm_trains_the_same_weights(form, optimizer, benchmarks):
    beside = benchmarks("dlrm_tensorflow")
    settings = dlrm.make_parser().settings({**SMALL, "optimizer": optimizer, "lr": 0.1})
    model = dlrm.make_model(settings)
    ours, theirs = beside.our_step(settings, model), beside.TensorflowStep(settings, model, form)
    first = {name: value.clone().numpy() for name, value in model.state_dict().items()}
    for batch in map(dlrm.Generator(128, 100).batch, range(6)):
        assert float(theirs(theirs.prepare(batch))) == pytest.approx(float(ours(batch)), abs=2e-6)
    found = theirs.weights()
    assert found.keys() == first.keys()
    for name, value in model.state_dict().items():
        np.testing.assert_allclose(found[name], value.numpy(), rtol=0, atol=2e-5, err_msg=name)
        assert not np.array_equal(found[name], first[name]), name


@pytest.mark.parametrize("mode", ["fused", "sparse", "auto"])
def test_first_50_losses_of_dlrm_agree(mode, benchmarks):
    given = {"buckets": 2000, "max_cardinality": 5000, "grad_mode": mode, "samples": 1024, "held_out": 128}
    settings = dlrm.make_parser().settings({**SMALL, **given, "batch_size": 128})
    found = benchmarks("dlrm_tensorflow").compare(settings, dlrm.make_examples(settings), 50, lambda line: None)
    assert len(found.losses["ours"]) == len(found.losses["tensorflow"]) == 50
    assert found.agrees() and found.tolerance == 1e-4
    assert found.losses["ours"][-1] < found.losses["ours"][0]


# ---- Wide & Deep -----------------------------------------------------------------------------------------------------


# The other forms with hashed columns differ by what is tested here already, and take seconds to trace.
@pytest.mark.parametrize(
    ("kind", "form"),
    [
        *(("identity", form) for form in range(4)),
        ("hashed", 3),
        *(pytest.param("hashed", form, marks=pytest.mark.full) for form in range(3)),
    ],
)
def test_every_form_of_wide_deep_trains_the_same_weights(kind, form, benchmarks):
    beside = benchmarks("wide_deep_tensorflow")
    given = {"columns": kind, "rows": 200, "embedding_dim": 4, "mlp": [16, 8], "lr": 0.5, "batch_size": 128}
    settings = wide_deep.make_parser().settings(given)
    transform = wide_deep.make_transform(settings)
    model = wide_deep.make_model(transform, settings)
    theirs = beside.TensorflowStep(settings, model, beside.FORMS[form])
    ours = beside.our_step(settings, model)
    for batch in map(wide_deep.Generator(200, 128).batch, range(6)):
        assert float(theirs(theirs.prepare(batch))) == pytest.approx(float(ours(batch)), abs=1e-6)
    state = model.state_dict()
    for table, rows in zip(transform.embedding_bag_configs(), theirs.tables.rows(), strict=True):
        np.testing.assert_allclose(rows, state[f"bags.embedding_bags.{table.name}.weight"].numpy(), rtol=0, atol=1e-6)
    for name, value in theirs.weights().items():
        np.testing.assert_allclose(value, state[name].numpy(), rtol=0, atol=2e-6, err_msg=name)


def test_first_50_losses_of_wide_deep_agree(benchmarks, monkeypatch):
    beside = benchmarks("wide_deep_tensorflow")
    # Only the forms of TensorFlow's model that are traced in a second.
    monkeypatch.setattr(beside, "FORMS", [form for form in beside.FORMS if form.lookup == "gather"])
    sizes = {"rows": 2000, "samples": 8192, "held_out": 256, "batch_size": 256}
    settings = wide_deep.make_parser().settings({**sizes, "columns": "hashed", "distribution": "zipf", "lr": 0.3})
    found = beside.compare(settings, wide_deep.generated_examples(settings), 50, lambda line: None)
    assert len(found.losses["ours"]) == len(found.losses["tensorflow"]) == 50
    assert found.agrees() and found.tolerance == 1e-4
    assert len(found.seconds["ours"]) == len(found.seconds["tensorflow"]) == 5 * 7
    assert found.speed_ratio() > 0
    assert found.losses["ours"][-1] < found.losses["ours"][0]


@pytest.mark.full
@pytest.mark.parametrize("kind", ["identity", "hashed"])
def test_first_50_losses_of_the_blogs_model_agree(kind, benchmarks):
    """Train batches of 16,384 on 40 tables of 400k rows: 1.1 GB on each side."""
    sizes = {"rows": 400_000, "samples": 16 * 16_384, "held_out": 1, "batch_size": 16_384}
    settings = wide_deep.make_parser().settings({**sizes, "columns": kind})
    assert benchmarks("wide_deep_tensorflow").compare(settings, wide_deep.generated_examples(settings), 50).agrees()
