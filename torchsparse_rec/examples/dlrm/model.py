"""DLRM: a perceptron over the numbers, pairwise products of its output and the embeddings, a perceptron over those."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import torchsparse_rec

from ...typing import GradMode
from .._layers import linear


class Perceptron(nn.Module):
    """
    Fully connected layers, each followed by a ReLU; the last one only if ``linear_end`` is False.

    Args:
        sizes: of the input, then of each layer.
        linear_end: whether the last layer has no ReLU. Default False.

    Example:
        >>> Perceptron([3, 8, 2])(torch.rand(5, 3)).shape
        torch.Size([5, 2])
    """

    def __init__(self, sizes: Sequence[int], linear_end: bool = False) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.empty(m, n) for n, m in pairwise(sizes))
        self.biases = nn.ParameterList(torch.empty(m) for m in sizes[1:])
        self.linear_end = linear_end
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw normal weights as the paper's program: variance ``2 / (n + m)`` for matrices, ``1 / m`` for biases."""
        for weight, bias in zip(self.weights, self.biases, strict=True):
            nn.init.xavier_normal_(weight)
            nn.init.normal_(bias, std=bias.shape[0] ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x`` ``[B, sizes[0]]`` to ``[B, sizes[-1]]``."""
        for layer, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True), 1):
            x = linear(x, weight, bias)
            if not self.linear_end or layer < len(self.weights):
                x = x.relu()
        return x


class DenseLayers(nn.Module):
    """
    All of DLRM but its tables.

    Args:
        numbers: how many numbers an example has.
        features: how many embeddings an example has.
        embedding_dim: the width of an embedding.
        bottom: widths of the hidden layers over the numbers; a layer as wide as an embedding follows.
        top: widths of the hidden layers over the products; the logit follows.

    Example:
        >>> layers = DenseLayers(numbers=2, features=3, embedding_dim=4, bottom=(8,), top=(8,))
        >>> layers(torch.rand(5, 2), torch.rand(5, 12)).shape
        torch.Size([5])
    """

    places: Tensor

    def __init__(
        self, numbers: int, features: int, embedding_dim: int, bottom: Sequence[int], top: Sequence[int]
    ) -> None:
        super().__init__()
        for name, widths in (("bottom", bottom), ("top", top)):
            if not widths or min(widths) < 1:
                raise ValueError(f"{name} must have at least one width, and none below 1, got {list(widths)}")
        self.vectors, self.embedding_dim = features + 1, embedding_dim
        self.bottom = Perceptron([numbers, *bottom, embedding_dim])
        self.top = Perceptron([embedding_dim + features * (features + 1) // 2, *top, 1], linear_end=True)
        row, column = torch.tril_indices(self.vectors, self.vectors, -1)
        self.register_buffer("places", row * self.vectors + column, persistent=False)

    def forward(self, numbers: Tensor, pooled: Tensor) -> Tensor:
        """Return logits ``[B]`` of ``numbers`` ``[B, n]`` and joined embeddings ``[B, features * embedding_dim]``."""
        dense = self.bottom(numbers)
        vectors = torch.cat([dense, pooled], 1).view(-1, self.vectors, self.embedding_dim)
        products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1).index_select(1, self.places)
        return self.top(torch.cat([dense, products], 1)).squeeze(1)


class DLRM(nn.Module):
    """
    The deep learning recommendation model.

    Args:
        tables: a config for each feature, all of one dim.
        numbers: how many numbers an example has. Default 13, as in Criteo's data.
        bottom, top: as for :class:`DenseLayers`. Default: the paper's program's for the Display Advertising Challenge.
        grad_mode: of the tables: ``fused`` (default), ``sparse``, ``dense`` or ``auto``.

    Source:
        Naumov et al., Deep Learning Recommendation Model for Personalization and Recommendation Systems, 2019.

    Example:
        >>> names = ["user", "item"]
        >>> tables = [torchsparse_rec.nn.EmbeddingBagConfig(10, 4, name, feature_names=[name]) for name in names]
        >>> model = DLRM(tables, numbers=2, bottom=(8,), top=(8,)).eval()
        >>> model(torch.rand(3, 2), {"user": torch.tensor([1, 9, 1]), "item": torch.tensor([0, 0, 7])}).shape
        torch.Size([3])
    """

    def __init__(
        self,
        tables: Sequence[Any],
        numbers: int = 13,
        bottom: Sequence[int] = (512, 256, 64),
        top: Sequence[int] = (512, 256),
        grad_mode: GradMode = "fused",
    ) -> None:
        super().__init__()
        dims = {table.embedding_dim for table in tables}
        if len(dims) != 1:
            raise ValueError(f"tables must have one embedding_dim, got {sorted(dims)}")
        features = sum(len(table.feature_names) for table in tables)
        self.layers = DenseLayers(numbers, features, dims.pop(), bottom, top)
        self.bags = torchsparse_rec.nn.EmbeddingBagCollection(list(tables), grad_mode=grad_mode)

    def forward(self, numbers: Tensor, ids: Any) -> Tensor:
        """Return the logits ``[B]`` of numbers ``[B, n]`` and all features' ids, a ``KeyedJaggedTensor`` or mapping."""
        return self.layers(numbers, self.bags(ids).values())

    if TYPE_CHECKING:  # a call of torch's modules gives Any

        def __call__(self, numbers: Tensor, ids: Any) -> Tensor: ...
