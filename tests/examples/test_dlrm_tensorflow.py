"""DLRM in TensorFlow and here: the same losses and weights."""

import numpy as np
import pytest
from examples.test_dlrm import settings_of

from torchsparse_rec.examples.dlrm import data, sources, steps, tables

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.tensorflow,
    pytest.mark.filterwarnings("ignore:.*numpy.*:DeprecationWarning"),
]


@pytest.mark.parametrize("optimizer", ["adagrad", "sgd"])
@pytest.mark.parametrize("form", ["separate tables", "stacked tables"])
def test_every_form_trains_the_same_weights(form, optimizer):
    from torchsparse_rec.examples.dlrm.tensorflow_step import TensorflowStep

    settings = settings_of(tables="hashed", optimizer=optimizer, lr=0.1)
    ours = steps.TorchStep(settings, tables.Placement(), keras_rule=True)
    theirs = TensorflowStep(settings, ours.model, form)
    first = {name: value.clone().numpy() for name, value in ours.model.state_dict().items()}
    for batch in data.Generator(128, 100).batches(0, 6):
        assert float(theirs(theirs.prepare(batch))) == pytest.approx(float(ours(batch)), abs=2e-6)
    found = theirs.weights()
    assert found.keys() == first.keys()
    for name, value in ours.model.state_dict().items():
        np.testing.assert_allclose(found[name], value.numpy(), rtol=0, atol=2e-5, err_msg=name)
        assert not np.array_equal(found[name], first[name]), name


@pytest.mark.parametrize("mode", ["fused", "sparse", "auto"])
def test_first_50_losses_agree(mode):
    from torchsparse_rec.examples.dlrm.compare_tensorflow import TOLERANCE, compare

    settings = settings_of(tables="hashed", buckets=2000, max_cardinality=5000, grad_mode=mode)
    found = compare(settings, sources.make_source(settings), 50, lambda line: None)
    assert len(found.losses["ours"]) == len(found.losses["tensorflow"]) == 50
    assert found.largest_difference() <= TOLERANCE == 1e-4
    assert found.losses["ours"][-1] < found.losses["ours"][0]
