"""Wide & Deep: a linear model of everything, and a perceptron over embeddings, added up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import torchsparse_rec

from ...typing import GradMode
from .._layers import linear
from .._settings import GRAD_MODES


class WideDeep(nn.Module):
    """
    The logit ``wide(numbers, ids) + deep(numbers, embeddings)``.

    A row of a table holds an id's embedding and, as its last column, its weight in the wide part: one lookup and one
    update serve both, which halves the accesses to memory at random. To optimizers that treat the elements of a table
    one by one it makes no difference.

    Args:
        tables: a config for each feature, their rows one column wider than the embeddings; pooled by mean.
        hots: for each feature how many ids an example has. The wide part adds up their weights: this many times the
            mean.
        numbers: how many numbers an example has.
        mlp: widths of the perceptron's hidden layers, default 256 and 128.
        grad_mode: of the tables: ``fused`` (default), ``sparse``, ``dense`` or ``auto``.

    Source:
        Cheng et al., Wide & Deep Learning for Recommender Systems, 2016.

    Example:
        >>> table = torchsparse_rec.nn.EmbeddingBagConfig(10, 5, "user", feature_names=["user"], pooling="mean")
        >>> model = WideDeep([table], {"user": 1}, numbers=2, mlp=(8,), grad_mode="dense")
        >>> model(torch.rand(3, 2), {"user": torch.tensor([1, 9, 1])}).shape
        torch.Size([3])
    """

    def __init__(
        self,
        tables: Sequence[Any],
        hots: Mapping[str, int],
        numbers: int,
        mlp: Sequence[int] = (256, 128),
        grad_mode: GradMode = "fused",
    ) -> None:
        super().__init__()
        widths = {table.embedding_dim for table in tables}
        if len(widths) != 1 or min(widths) < 2:
            raise ValueError(f"tables must have one embedding_dim of at least 2, got {sorted(widths)}")
        if not mlp or min(mlp) < 1:
            raise ValueError(f"mlp must have at least one width, and none below 1, got {list(mlp)}")
        if grad_mode not in GRAD_MODES:
            raise ValueError(f"grad_mode must be one of {', '.join(GRAD_MODES)}, got {grad_mode!r}")
        names = [feature for table in tables for feature in table.feature_names]
        self.names, self.features, self.embedding_dim, self.numbers = names, len(names), widths.pop() - 1, numbers
        self.bags = torchsparse_rec.nn.EmbeddingBagCollection(list(tables), grad_mode=grad_mode)
        self.wide = nn.Linear(numbers, 1)
        sizes = [self.features * self.embedding_dim + numbers, *mlp]
        self.hidden = nn.ModuleList(nn.Linear(n, m) for n, m in zip(sizes[:-1], sizes[1:], strict=True))
        self.output = nn.Linear(mlp[-1], 1)
        # This matrix picks the wide part's weights out of the pooled rows.
        chosen = torch.zeros(self.features, self.embedding_dim + 1)
        chosen[:, -1] = torch.tensor([float(hots[name]) for name in names])
        self.register_buffer("chosen", chosen.view(1, -1), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the perceptron Glorot-uniform; zero the wide part and all biases. Tables start as their configs say."""
        for layer in [*self.linears(), self.output]:
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)
        nn.init.zeros_(self.wide.weight)
        nn.init.zeros_(self.wide.bias)

    def linears(self) -> list[nn.Linear]:
        """Return the perceptron's hidden layers."""
        return [layer for layer in self.hidden if isinstance(layer, nn.Linear)]

    def forward(self, numbers: Tensor, ids: Any) -> Tensor:
        """Return the logits ``[B]`` of numbers ``[B, n]`` and all features' ids, a ``KeyedJaggedTensor`` or mapping."""
        first, *later = self.linears()
        pooled = self.bags(ids).values()  # [B, features * (embedding_dim + 1)]
        of_tables, of_numbers, bias = self._first_layer(first)
        # The wide part is one more output of the first layer: the pooled rows are read once, and never taken apart.
        both = torch.addmm(linear(pooled, of_tables, bias), numbers, of_numbers)
        hidden, wide = both.split([first.out_features, 1], 1)
        hidden = hidden.relu()
        for layer in later:
            hidden = linear(hidden, layer.weight, layer.bias).relu()
        return (self.output(hidden) + wide).squeeze(1)

    if TYPE_CHECKING:  # a call of torch's modules gives Any

        def __call__(self, numbers: Tensor, ids: Any) -> Tensor: ...

    def _first_layer(self, first: nn.Linear) -> tuple[Tensor, Tensor, Tensor]:
        """
        Return the weights for pooled rows and for numbers, and the bias, of the first layer and the wide part together.

        Weights for pooled rows are ``[outputs, inputs]``, as a layer has them; those for numbers ``[inputs, outputs]``,
        because the product that computes their gradient is faster so. The last output is the wide part's.
        """
        embeddings = self.features * self.embedding_dim
        deep, of_numbers = first.weight.split([embeddings, self.numbers], 1)
        deep = deep.reshape(-1, self.features, self.embedding_dim)
        deep = nn.functional.pad(deep, (0, 1)).flatten(1)  # Zeros keep the wide part's weights out of the perceptron.
        return (
            torch.cat([deep, self.get_buffer("chosen")]),
            torch.cat([of_numbers.t(), self.wide.weight.t()], 1),
            torch.cat([first.bias, self.wide.bias]),
        )
