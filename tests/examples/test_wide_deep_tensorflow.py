"""Wide & Deep in TensorFlow and here: the same losses and weights."""

import numpy as np
import pytest

from torchsparse_rec.examples.wide_deep import data, sources, steps
from torchsparse_rec.examples.wide_deep.columns import generated_columns
from torchsparse_rec.examples.wide_deep.settings import Settings

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.tensorflow,
    pytest.mark.filterwarnings("ignore:.*numpy.*:DeprecationWarning"),
]


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
        assert float(theirs(theirs.prepare(batch))) == pytest.approx(float(ours(batch)), abs=1e-6)
    state = ours.model.state_dict()
    for table, rows in zip(columns.transform.embedding_bag_configs(), theirs.tables.rows(), strict=True):
        np.testing.assert_allclose(rows, state[f"bags.embedding_bags.{table.name}.weight"].numpy(), rtol=0, atol=1e-6)
    for name, value in theirs.weights().items():
        np.testing.assert_allclose(value, state[name].numpy(), rtol=0, atol=2e-6, err_msg=name)


@pytest.fixture
def gather_alone(monkeypatch):
    """Offer only the forms of TensorFlow's model that are traced in a second."""
    from torchsparse_rec.examples.wide_deep import compare_tensorflow

    monkeypatch.setattr(compare_tensorflow, "FORMS", [form for form in forms() if form.lookup == "gather"])


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


@pytest.mark.full
@pytest.mark.parametrize("kind", ["identity", "hashed"])
def test_first_50_losses_of_the_blogs_model_agree(kind):
    """Train batches of 16,384 on 40 tables of 400k rows: 1.1 GB on each side."""
    from torchsparse_rec.examples.wide_deep.compare_tensorflow import compare

    settings = Settings(rows=400_000, samples=16 * 16_384, batch_size=16_384, columns=kind)
    columns = generated_columns(kind, settings.rows, settings.embedding_dim)
    found = compare(settings, sources.make_source(settings), columns, 50)
    assert found.largest_difference() <= 1e-4
