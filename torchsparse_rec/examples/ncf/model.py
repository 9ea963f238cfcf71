"""NeuMF: generalised matrix factorisation and a multilayer perceptron over one pair of tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

import torchsparse_rec

from ...typing import GradMode

# A function of num_embeddings and embedding_dim that returns a module, which maps ids [N] to rows [N, embedding_dim].
TableFactory = Callable[[int, int], nn.Embedding]


def table_factory(grad_mode: GradMode) -> TableFactory:
    """Return a factory of ``torchsparse_rec.nn.Embedding`` tables with this ``grad_mode``, e.g. sparse or fused."""
    return lambda rows, dim: torchsparse_rec.nn.Embedding(rows, dim, grad_mode=grad_mode)


class NeuMF(nn.Module):
    """
    The score of a (user, item) pair: ``h . [p_u * q_i, MLP([r_u, s_i])] + b`` before the sigmoid.

    The GMF vectors p, q and the MLP vectors r, s are separate parameters that share a table's rows, as in TensorFlow's
    official model: columns ``[:factors]`` are GMF's, the rest the MLP's, so that one lookup serves both.

    Args:
        num_users, num_items: rows of the two tables.
        factors: width of the GMF vectors, default 8.
        layers: widths of the MLP from its input on, default the paper's for 8 factors; the input is a user's and an
            item's vector, half each.
        make_table: how a table is made, default :class:`torch.nn.Embedding`.

    Source:
        He et al., Neural Collaborative Filtering, WWW 2017.

    Example:
        >>> model = NeuMF(3, 5, factors=2, layers=(4, 2), make_table=torch.nn.Embedding)
        >>> model(torch.tensor([0, 2]), torch.tensor([4, 4])).shape
        torch.Size([2])
    """

    def __init__(
        self,
        num_users: int,
        num_items: int,
        factors: int = 8,
        layers: Sequence[int] = (32, 16, 8),
        make_table: TableFactory = nn.Embedding,
    ) -> None:
        super().__init__()
        if factors < 1:
            raise ValueError(f"factors must be at least 1, got {factors}")
        if len(layers) < 2 or min(layers) < 1 or layers[0] % 2:
            raise ValueError(f"layers must be two or more positive widths, the first one even, got {list(layers)}")
        self.factors, self.num_items = factors, num_items
        self.mlp_width = layers[0] // 2
        self.user_table = make_table(num_users, factors + self.mlp_width)
        self.item_table = make_table(num_items, factors + self.mlp_width)
        self.mlp = nn.ModuleList(nn.Linear(n, m) for n, m in zip(layers[:-1], layers[1:], strict=True))
        self.output = nn.Linear(factors + layers[-1], 1)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the tables from N(0, 0.01), as in the paper, and the perceptron Glorot-uniform; set biases to zero."""
        for table in self.tables():
            nn.init.normal_(table.weight, std=0.01)
        for layer in [*self.linears(), self.output]:
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)

    def linears(self) -> list[nn.Linear]:
        """Return the perceptron's layers, from its input on."""
        return [layer for layer in self.mlp if isinstance(layer, nn.Linear)]

    def tables(self) -> list[nn.Embedding]:
        """Return the user table and the item table."""
        return [self.user_table, self.item_table]

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        """Return the logits ``[N]`` of the pairs ``users[n], items[n]``, integers ``[N]``."""
        widths = [self.factors, self.mlp_width]
        gmf_user, mlp_user = self.user_table(users).split(widths, dim=1)
        gmf_item, mlp_item = self.item_table(items).split(widths, dim=1)
        hidden = torch.cat([mlp_user, mlp_item], dim=1)
        for layer in self.mlp:
            hidden = layer(hidden).relu_()
        return self.output(torch.cat([gmf_user * gmf_item, hidden], dim=1)).squeeze(1)

    if TYPE_CHECKING:  # a call of torch's modules gives Any

        def __call__(self, users: Tensor, items: Tensor) -> Tensor: ...

    @torch.no_grad()
    def score_all(self, users: Tensor) -> Tensor:
        """
        Return the logits ``[len(users), num_items]`` of every item for each user.

        The first layer is linear in user and item, so each half is computed once per user and once per item.
        """
        gmf_user, mlp_user = self.user_table(users).split([self.factors, self.mlp_width], dim=1)
        items = self.item_table(torch.arange(self.num_items, device=users.device))  # of all ranks, if they share it
        gmf_item, mlp_item = items.split([self.factors, self.mlp_width], dim=1)
        (first, *later), head = self.linears(), self.output.weight[0]
        for_user = mlp_user @ first.weight[:, : self.mlp_width].T + first.bias  # [U, layers[1]]
        for_item = mlp_item @ first.weight[:, self.mlp_width :].T  # [num_items, layers[1]]
        hidden = (for_user.unsqueeze(1) + for_item).relu_()  # [U, num_items, layers[1]]
        for layer in later:
            hidden = layer(hidden).relu_()
        gmf = (gmf_user * head[: self.factors]) @ gmf_item.T
        return gmf + hidden @ head[self.factors :] + self.output.bias
