"""Calls that programs written for TorchRec make: None and empty arguments, meta tensors, parts and texts."""

from __future__ import annotations

import pytest
import torch

from torchsparse_rec import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from torchsparse_rec.nn import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig

VALUES, LENGTHS = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6]), torch.tensor([2, 0, 1, 1, 1, 3])
OFFSETS = torch.tensor([0, 2, 2, 3, 4, 5, 8])
KEYS = ["user", "item"]
NONE = torch.tensor([])

# ---- Nothing --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given",
    [
        {"lengths": NONE},
        {"offsets": NONE},
        {"lengths": NONE, "offsets": NONE},
        {"lengths": NONE.long(), "offsets": NONE.int()},
        {"lengths": NONE, "offsets": torch.tensor([0])},
    ],
)
def test_tensors_without_elements_mean_no_rows(given: dict[str, torch.Tensor]) -> None:
    rows = JaggedTensor(NONE, **given)
    none = KeyedJaggedTensor([], NONE, NONE, **given)
    empty = KeyedJaggedTensor(KEYS, NONE.long(), NONE, **given)
    for x in (rows, none, empty):
        assert x.offsets().tolist() == [0] and x.lengths().tolist() == []
        assert x.lengths().dtype in (torch.int32, torch.int64) and not x.offsets().dtype.is_floating_point
    assert none.stride() == empty.stride() == 0 and none.sync().offset_per_key() == [0]
    assert empty.length_per_key() == [0, 0] and list(empty.to_dict()) == KEYS
    assert KeyedJaggedTensor.concat([none, empty]).keys() == KEYS
    assert rows.to_padded_dense(2).shape == (0, 2)


def test_tensors_without_elements_are_no_rows_of_values() -> None:
    with pytest.raises(ValueError, match="offsets must have at least one element"):
        JaggedTensor(VALUES, offsets=NONE.long())
    with pytest.raises(ValueError, match="offsets must have at least one element"):
        JaggedTensor(NONE, lengths=torch.tensor([0, 0]), offsets=NONE.long())
    with pytest.raises(ValueError, match=r"lengths must be a vector of int32 or int64, got torch.float32 of shape \[0"):
        JaggedTensor(VALUES, lengths=NONE)


def test_a_keyed_tensor_of_nothing() -> None:
    for values in (NONE, torch.empty(3, 0), torch.empty(0, 4)):
        x = KeyedTensor([], [], values)
        assert x.keys() == [] and x.to_dict() == {} and x.offset_per_key() == [0] and str(x) == "KeyedTensor()\n"
    with pytest.raises(ValueError, match="key_dim must be a dimension of values, 0 to 0, got 1"):
        KeyedTensor([], [], VALUES)


def test_the_dimension_in_which_tensors_are_laid_side_by_side() -> None:
    one = KeyedTensor.from_tensor_list(["a"], [torch.tensor([[1.0]])], key_dim=0)
    assert one["a"].tolist() == [[1.0]] and str(one) == 'KeyedTensor({\n    "a": [[1.0]]\n})\n'
    parts = [torch.ones(2, 1), torch.zeros(2, 2)]
    two = KeyedTensor.from_tensor_list(["a", "b"], parts, cat_dim=-1)
    assert torch.equal(two.values(), torch.cat(parts, 1)) and torch.equal(two["b"], parts[1])
    # TorchRec makes of this an object that gives everything for one key and raises for the other.
    with pytest.raises(ValueError, match="cat_dim must be key_dim, 0, got 1"):
        KeyedTensor.from_tensor_list(["a", "b"], parts, key_dim=0)


# ---- Meta, parts ----------------------------------------------------------------------------------------------------


def test_lengths_by_key_on_the_meta_device_are_shares() -> None:
    values, lengths, offsets = (x.to("meta") for x in (VALUES, LENGTHS, OFFSETS))
    made = [
        KeyedJaggedTensor.from_lengths_sync(KEYS, values, lengths),
        KeyedJaggedTensor.from_offsets_sync(KEYS, values, offsets),
        KeyedJaggedTensor.from_lengths_sync(KEYS, values, lengths, stride_per_key_per_rank=[[2], [4]]),
    ]
    for x in made:
        assert x.length_per_key_or_none() == [4, 4] and x["item"].values().shape == (4,)
    three = KeyedJaggedTensor(["a", "b", "c"], values, lengths=lengths)
    assert three.length_per_key_or_none() is None and three.sync().length_per_key() == [4, 2, 2]
    # Lengths by key that were computed on another device stay.
    assert KeyedJaggedTensor(KEYS, VALUES, lengths=LENGTHS).sync().to("meta").length_per_key() == [3, 5]
    config = EmbeddingConfig(num_embeddings=10, embedding_dim=2, name="t", feature_names=KEYS)
    rows = EmbeddingCollection([config], device="meta")(made[0])
    assert rows["user"].values().shape == (4, 2) and rows["item"].lengths().shape == (3,)


def test_parts_of_features_with_different_batch_sizes_have_the_batch_size_of_all() -> None:
    x = KeyedJaggedTensor(KEYS, VALUES, lengths=LENGTHS, stride_per_key_per_rank=[[1, 1], [3, 1]])
    parts = x.split([1, 0, 1])
    assert [part.stride() for part in parts] == [4, 4, 4] and x.permute([0]).stride() == 4
    assert [part.stride_per_key() for part in parts] == [[2], [], [4]]
    assert parts[0].to("cpu").stride() == 4 and parts[0].split([1])[0].stride() == 4
    assert KeyedJaggedTensor.concat([parts[0]]).stride() == 2
    inverse = (KEYS, torch.zeros(2, 7, dtype=torch.int64))
    full = KeyedJaggedTensor(KEYS, VALUES, lengths=LENGTHS, stride_per_key=[2, 4], inverse_indices=inverse)
    assert full.stride() == 7 and [part.stride() for part in full.split([1, 1])] == [7, 7]


@pytest.mark.parametrize("grad_mode", ["dense", "fused"])
def test_collections_say_where_they_are(grad_mode: str) -> None:
    kinds = {"num_embeddings": 10, "embedding_dim": 2, "name": "t", "feature_names": ["a"]}
    bags = EmbeddingBagCollection([EmbeddingBagConfig(**kinds)], grad_mode=grad_mode)  # type: ignore[arg-type]
    rows = EmbeddingCollection([EmbeddingConfig(**kinds)], device="meta", grad_mode=grad_mode)  # type: ignore[arg-type]
    assert bags.device == torch.device("cpu") and rows.device == torch.device("meta")
    assert bags.to("meta").device.type == "meta"


# ---- Texts ----------------------------------------------------------------------------------------------------------


def test_texts_are_torchrecs() -> None:
    assert str(JaggedTensor(VALUES, lengths=LENGTHS)) == (
        "JaggedTensor({\n    [[3, 1], [], [4], [1], [5], [9, 2, 6]]\n})\n"
    )
    assert str(JaggedTensor(VALUES[:2], torch.tensor([0.5, 1.0]), offsets=torch.tensor([0, 2]))) == (
        'JaggedTensor({\n    "values": [[3, 1]],\n    "weights": [[0.5, 1.0]]\n})\n'
    )
    x = KeyedJaggedTensor(KEYS, VALUES, lengths=LENGTHS)
    assert str(x) == ('KeyedJaggedTensor({\n    "user": [[3, 1], [], [4]],\n    "item": [[1], [5], [9, 2, 6]]\n})\n')
    weighted = KeyedJaggedTensor(KEYS, VALUES[:3], VALUES[:3] / 2, LENGTHS[:3], stride_per_key=[1, 2])
    assert f"{weighted}" == (
        'KeyedJaggedTensor({\n    "user": {\n        "values": [[3, 1]],\n        "weights": [[1.5, 0.5]]\n    },\n'
        '    "item": {\n        "values": [[], [4]],\n        "weights": [[], [2.0]]\n    }\n})\n'
    )
    assert str(KeyedJaggedTensor([], NONE, lengths=NONE)) == "KeyedJaggedTensor()\n"
    pair = KeyedTensor(["a", "b"], [1, 2], torch.arange(6.0).reshape(2, 3))
    assert str(pair) == 'KeyedTensor({\n    "a": [[0.0], [3.0]],\n    "b": [[1.0, 2.0], [4.0, 5.0]]\n})\n'


def test_texts_of_much_and_of_what_is_elsewhere_are_short() -> None:
    much = torch.arange(1000)
    for x in (
        JaggedTensor(much, offsets=torch.tensor([0, 1000])),
        KeyedJaggedTensor(["a"], much, lengths=torch.tensor([1000])),
        KeyedTensor(["a"], [1000], much, key_dim=0),
        KeyedJaggedTensor(KEYS, VALUES, lengths=LENGTHS).to("meta"),
    ):
        assert str(x) == repr(x) and len(str(x)) < 100
