"""DLRM in TensorFlow and here: the same losses and weights."""

import numpy as np
import pytest

from torchsparse_rec.examples import dlrm

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.tensorflow,
    pytest.mark.filterwarnings("ignore:.*numpy.*:DeprecationWarning"),
]


SMALL = {"tables": "hashed", "buckets": 60, "embedding_dim": 4, "bottom": [8], "top": [16], "max_cardinality": 100}


@pytest.fixture
def beside(benchmarks):
    pytest.importorskip("tensorflow")
    return benchmarks("dlrm_tensorflow")


@pytest.mark.parametrize("optimizer", ["adagrad", "sgd"])
@pytest.mark.parametrize("form", ["separate tables", "stacked tables"])
def test_every_form_trains_the_same_weights(form, optimizer, beside):
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
def test_first_50_losses_agree(mode, beside):
    given = {"buckets": 2000, "max_cardinality": 5000, "grad_mode": mode, "samples": 1024, "held_out": 128}
    settings = dlrm.make_parser().settings({**SMALL, **given, "batch_size": 128})
    found = beside.compare(settings, dlrm.make_source(settings), 50, lambda line: None)
    assert len(found.losses["ours"]) == len(found.losses["tensorflow"]) == 50
    assert found.agrees() and found.tolerance == 1e-4
    assert found.losses["ours"][-1] < found.losses["ours"][0]
