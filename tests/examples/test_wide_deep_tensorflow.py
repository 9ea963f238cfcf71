"""Wide & Deep in TensorFlow and here: the same losses and weights, and the printed comparison."""

import re

import numpy as np
import pytest

from torchsparse_rec.examples.wide_deep import __main__ as command
from torchsparse_rec.examples.wide_deep import data, sources, steps
from torchsparse_rec.examples.wide_deep.columns import generated_columns
from torchsparse_rec.examples.wide_deep.settings import Settings

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.tensorflow,
    pytest.mark.filterwarnings("ignore:.*numpy.*:DeprecationWarning"),
]

FLAGS = "--rows 200 --batch-size 128 --samples 2048 --embedding-dim 4 --mlp 16,8 --lr 0.5".split()


def forms():
    from torchsparse_rec.examples.wide_deep.tensorflow_step import FORMS

    return FORMS


# The other forms with hashed columns differ by what is tested here already, and take seconds to trace.
@pytest.mark.parametrize(
    ("kind", "form"),
    [
        *(("identity", form) for form in range(4)),
        ("hashed", 3),
        *(pytest.param("hashed", form, marks=pytest.mark.full) for form in range(3)),
    ],
)
def test_every_form_trains_the_same_weights(kind, form):
    from torchsparse_rec.examples.wide_deep.tensorflow_step import TensorflowStep

    batches = list(data.Generator(200, 128).batches(0, 6))
    columns = generated_columns(kind, 200, 4)
    model = steps.make_model(columns, (16, 8), "fused", 0)
    theirs = TensorflowStep(columns, model, 0.5, 128, forms()[form])
    ours = steps.TorchStep(columns, model, "sgd", 0.5)
    for batch in batches:
        assert float(theirs(*theirs.prepare(batch))) == pytest.approx(float(ours(batch)), abs=1e-6)
    state = ours.model.state_dict()
    for table, rows in zip(columns.transform.embedding_bag_configs(), theirs.tables.rows(), strict=True):
        np.testing.assert_allclose(rows, state[f"bags.embedding_bags.{table.name}.weight"].numpy(), rtol=0, atol=1e-6)
    for name, value in theirs.weights().items():
        np.testing.assert_allclose(value, state[name].numpy(), rtol=0, atol=2e-6, err_msg=name)


@pytest.fixture
def gather_alone(monkeypatch):
    """Offer only the forms of TensorFlow's model that are traced in a second."""
    from torchsparse_rec.examples.wide_deep import compare_tensorflow

    chosen = [form for form in forms() if form.lookup == "gather"]
    monkeypatch.setattr(compare_tensorflow, "FORMS", chosen)
    return chosen


def test_compare_prints_both_and_ends_with_the_speed(gather_alone, capfd):
    assert command.main([*FLAGS, "--compare", "tensorflow", "--steps", "24"]) == 0
    lines = capfd.readouterr().out.splitlines()
    for line, form in zip(lines[:2], gather_alone, strict=True):
        assert re.fullmatch(rf"TensorFlow with {form}: [\d,]+ samples/s", line)
    side = r"loss \d\.\d{6} +[\d,]+ samples/s"
    for line, block in zip(lines[2:5], ("1-10", "11-20", "21-24"), strict=True):
        assert re.fullmatch(rf"steps +{block} +torchsparse_rec {side}   TensorFlow {side}", line)
    for line, name in zip(lines[5:7], ("torchsparse_rec", "TensorFlow"), strict=True):
        assert re.fullmatch(rf"{name}: [\d.]+ ms a step, [\d,]+ samples/s \(medians\)", line)
    assert re.fullmatch(r"first 24 losses: largest difference \d\.\d\de-\d\d \(within 0\.0001\)", lines[7])
    assert re.fullmatch(r"TensorFlow's fastest form: .*(separate|joined) tables", lines[8])
    assert re.fullmatch(r"speed: \d+\.\d\dx TensorFlow", lines[9]) and len(lines) == 10


def test_first_50_losses_agree(gather_alone):
    from torchsparse_rec.examples.wide_deep.compare_tensorflow import TOLERANCE, compare

    settings = Settings(rows=2000, samples=8192, batch_size=256, distribution="zipf", lr=0.3)
    columns = generated_columns("hashed", settings.rows, settings.embedding_dim)
    found = compare(settings, sources.make_source(settings), columns, 50, lambda line: None)
    assert len(found.losses["ours"]) == len(found.losses["tensorflow"]) == 50
    assert found.largest_difference() <= TOLERANCE == 1e-4
    assert len(found.seconds["ours"]) == len(found.seconds["tensorflow"]) == 5 * 7
    assert found.speed_ratio() > 0
    assert found.losses["ours"][-1] < found.losses["ours"][0]


def test_losses_that_differ_are_said_and_counted(monkeypatch, capfd):
    from torchsparse_rec.examples.wide_deep.compare_tensorflow import Comparison, _print_summary

    found = Comparison(8, {"ours": [0.5, 0.4], "tensorflow": [0.5, 0.41]}, {"ours": [0.1], "tensorflow": [0.29]})
    assert found.largest_difference() == pytest.approx(0.01)
    printed = []
    _print_summary(found, forms()[0], printed.append)
    assert "NOT within 0.0001" in printed[2] and printed[-1] == "speed: 2.90x TensorFlow"
    later = Comparison(8, {"ours": [0.0] * 60, "tensorflow": [0.0] * 50 + [1.0] * 10}, {})
    assert later.largest_difference() == 0.0
    monkeypatch.setattr("torchsparse_rec.examples.wide_deep.compare_tensorflow.compare", lambda *_: found)
    assert command.main([*FLAGS, "--compare", "tensorflow"]) == 1


@pytest.mark.full
@pytest.mark.parametrize("kind", ["identity", "hashed"])
def test_first_50_losses_of_the_blogs_model_agree(kind):
    """Train batches of 16,384 on 40 tables of 400k rows: 1.1 GB on each side."""
    from torchsparse_rec.examples.wide_deep.compare_tensorflow import compare

    settings = Settings(rows=400_000, samples=16 * 16_384, batch_size=16_384, columns=kind)
    columns = generated_columns(kind, settings.rows, settings.embedding_dim)
    found = compare(settings, sources.make_source(settings), columns, 50)
    assert found.largest_difference() <= 1e-4
