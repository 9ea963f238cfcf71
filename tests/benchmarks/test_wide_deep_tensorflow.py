"""Wide & Deep in TensorFlow and here: the same losses and weights."""

import numpy as np
import pytest

from torchsparse_rec.examples import wide_deep

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.tensorflow,
    pytest.mark.filterwarnings("ignore:.*numpy.*:DeprecationWarning"),
]


@pytest.fixture
def beside(benchmarks):
    pytest.importorskip("tensorflow")
    return benchmarks("wide_deep_tensorflow")


# The other forms with hashed columns differ by what is tested here already, and take seconds to trace.
@pytest.mark.parametrize(
    ("kind", "form"),
    [
        *(("identity", form) for form in range(4)),
        ("hashed", 3),
        *(pytest.param("hashed", form, marks=pytest.mark.full) for form in range(3)),
    ],
)
def test_every_form_trains_the_same_weights(kind, form, beside):
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


def test_first_50_losses_agree(beside, monkeypatch):
    # Only the forms of TensorFlow's model that are traced in a second.
    monkeypatch.setattr(beside, "FORMS", [form for form in beside.FORMS if form.lookup == "gather"])
    sizes = {"rows": 2000, "samples": 8192, "held_out": 256, "batch_size": 256}
    settings = wide_deep.make_parser().settings({**sizes, "columns": "hashed", "distribution": "zipf", "lr": 0.3})
    found = beside.compare(settings, wide_deep.generated_source(settings), 50, lambda line: None)
    assert len(found.losses["ours"]) == len(found.losses["tensorflow"]) == 50
    assert found.agrees() and found.tolerance == 1e-4
    assert len(found.seconds["ours"]) == len(found.seconds["tensorflow"]) == 5 * 7
    assert found.speed_ratio() > 0
    assert found.losses["ours"][-1] < found.losses["ours"][0]


@pytest.mark.full
@pytest.mark.parametrize("kind", ["identity", "hashed"])
def test_first_50_losses_of_the_blogs_model_agree(kind, beside):
    """Train batches of 16,384 on 40 tables of 400k rows: 1.1 GB on each side."""
    sizes = {"rows": 400_000, "samples": 16 * 16_384, "held_out": 1, "batch_size": 16_384}
    settings = wide_deep.make_parser().settings({**sizes, "columns": kind})
    assert beside.compare(settings, wide_deep.generated_source(settings), 50).agrees()
