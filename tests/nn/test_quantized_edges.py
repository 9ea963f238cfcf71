"""Quantised tables stay what they are: under casts, after a state that does not fit, beside attributes and weights."""

import pytest
import torch

from torchsparse_rec import nn
from torchsparse_rec.ops.quantized import ROW_FORMATS

IDS = torch.tensor([3, 9])


def grown(rows=10, dtype=torch.float32, initial=None):
    table = nn.EmbeddingVariable(4, name="t", dtype=dtype, initializer=initial)
    table.insert(torch.arange(rows), torch.randn(rows, 4, generator=torch.Generator().manual_seed(rows)))
    return table.eval()


@pytest.mark.parametrize("rows", ROW_FORMATS)
def test_no_cast_changes_a_table(rows):
    table = nn.quantize(torch.nn.Embedding(10, 8).eval(), rows)
    model = torch.nn.Sequential(table, torch.nn.Linear(8, 2))
    want, before = table(IDS), table.table
    for cast in (torch.float32, torch.float16, torch.int32):
        assert torch.equal(table.type(cast)(IDS), want)
    for cast in (model.half, model.double, lambda: model.to(torch.bfloat16), model.float):
        cast()
        assert torch.equal(table.table, before) and table.table.dtype == before.dtype
    transposed = table.table.T.contiguous().T  # as load_state_dict(assign=True) may leave it
    table.load_state_dict({"table": transposed}, assign=True)
    assert torch.equal(table.half()(IDS), want)
    assert model.to("meta")[0].table.is_meta


def test_no_cast_changes_what_unknown_ids_have():
    table = nn.quantize(grown(initial=torch.tensor([[0.1, 1e5, 0.3, 0.4]])))
    want = table(torch.tensor([3, 99]))
    for moved in (table.half(), table.bfloat16(), table.double()):
        assert torch.equal(moved(torch.tensor([3, 99])), want)


def test_a_state_that_does_not_fit_changes_nothing():
    table = nn.quantize(grown(), "float16")
    want = table(torch.tensor([3, 9999]))
    for other in (nn.quantize(grown(15), "bfloat16"), nn.quantize(grown(15), "int8")):
        with pytest.raises(RuntimeError, match="table must have rows='float16'|size mismatch"):
            table.load_state_dict(other.state_dict())
        assert torch.equal(table(torch.tensor([3, 9999])), want)
    table.load_state_dict(nn.quantize(grown(15), "float16").state_dict())
    assert len(table.table) == 15


def test_a_module_with_an_attribute_of_that_name_stays():
    module = torch.nn.Embedding(4, 4).eval()
    module.table = "mine"
    with pytest.warns(UserWarning, match="it has an attribute called table"):
        nn.quantize(module)
    assert type(module) is torch.nn.Embedding and module.table == "mine" and module(torch.tensor(3)).shape == (4,)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_weights_of_the_dtype_that_the_table_had(dtype):
    module = nn.EmbeddingBag(10, 4, mode="sum", dtype=dtype).eval()
    weights = torch.tensor([[0.5, 0.25]], dtype=dtype)
    want = module(IDS.view(1, 2), per_sample_weights=weights).float()
    found = nn.quantize(module, "float16")(IDS.view(1, 2), per_sample_weights=weights)
    tolerance = 0.02 if dtype == torch.bfloat16 else 1e-3
    torch.testing.assert_close(found, want, rtol=tolerance, atol=tolerance)
