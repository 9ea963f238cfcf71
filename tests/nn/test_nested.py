"""torch.nested ids: with holes, ragged in another dimension, and with weights of other bags."""

import pytest
import torch

from torchsparse_rec import nn

TABLE = torch.arange(10.0).view(10, 1)


def nested(*parts):
    return torch.nested.nested_tensor([torch.tensor(part) for part in parts], layout=torch.jagged)


def bag(quantised, mode="sum"):
    module = nn.EmbeddingBag.from_pretrained(TABLE, mode=mode).eval()
    return nn.quantize(module, "float16") if quantised else module


def rows(kind):
    if kind == "variable":
        table = nn.EmbeddingVariable(1, name="t")
        table.insert(torch.arange(10), TABLE)
        return table.eval()
    module = nn.Embedding.from_pretrained(TABLE).eval()
    return nn.quantize(module, "float16") if kind == "quantised" else module


@pytest.mark.parametrize("quantised", [False, True])
def test_holes_are_in_no_bag(quantised):
    begins, lengths = torch.tensor([0, 1]), torch.tensor([1, 2])
    ids = torch.nested.narrow(torch.tensor([[1, 2, 3], [4, 5, 6]]), 1, begins, lengths, layout=torch.jagged)
    assert bag(quantised)(ids).tolist() == [[1], [11]]
    given = torch.tensor([[0.5, 9, 9], [9, 2, 1]])
    weights = torch.nested.narrow(given, 1, begins, lengths, layout=torch.jagged)
    assert bag(quantised)(ids, per_sample_weights=weights).tolist() == [[0.5], [16]]


@pytest.mark.parametrize("quantised", [False, True])
def test_weights_must_have_the_bags_of_the_ids(quantised):
    ids, module = nested([1], [5, 6]), bag(quantised)
    assert module(ids, per_sample_weights=nested([0.5], [1.0, 2.0])).tolist() == [[0.5], [17]]
    with pytest.raises(
        ValueError, match=r"must have the bags of input, whose offsets are \[0, 1, 3\], got \[0, 2, 3\]"
    ):
        module(ids, per_sample_weights=nested([0.5, 0.5], [1.0]))
    holes = torch.nested.narrow(torch.ones(2, 2), 1, torch.tensor([0, 0]), torch.tensor([1, 1]), layout=torch.jagged)
    with pytest.raises(ValueError, match="must have the bags of input"):
        module(ids, per_sample_weights=holes)


@pytest.mark.parametrize("kind", ["plain", "quantised", "variable"])
def test_ids_ragged_in_another_dimension(kind):
    parts = [torch.tensor([[1, 2]]), torch.tensor([[3, 4], [5, 6], [7, 8]])]
    ids = torch.nested.nested_tensor(parts, layout=torch.jagged).transpose(1, 2)
    found = rows(kind)(ids)
    for part, its in zip(parts, found.unbind(), strict=True):
        assert torch.equal(its, part.T.unsqueeze(-1).float())
