"""Counts of tokens, and of the documents that hold each token, for the lookup layers' ``adapt``."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ... import ops
from ...features.inputs import strings_of_list
from ...features.raw import Strings
from ...features.statistics import WordCounts
from ..tensorflow import RaggedTensor, SparseTensor


class Documents:
    """Counts of tokens and, for tf-idf, of the documents (rows of inputs) that hold each token."""

    def __init__(self, by_document: bool) -> None:
        self._counts = WordCounts()
        self._in_documents = WordCounts() if by_document else None
        self._documents = 0

    def __len__(self) -> int:
        return len(self._counts)

    def add(self, values: Any) -> None:
        """Count a batch of at least two dimensions: each row is a document."""
        flat, rows, count = _rows_of(values, self._in_documents is not None)
        tokens = strings_of_list(flat.tolist(), "data") if isinstance(flat, np.ndarray) else flat.cpu()
        self._counts.add(tokens)
        if self._in_documents is None:
            return
        self._in_documents.add(tokens, _first_in_row(tokens, rows.cpu()))
        self._documents += count

    def remove(self, token: Any) -> None:
        """Forget a token."""
        self._counts.remove(token)

    def tokens(self, most: int | None) -> list[Any]:
        """Return the ``most`` most frequent tokens, or all, by frequency."""
        return self._counts.by_frequency(most)

    def idf_weights(self, tokens: list[Any]) -> np.ndarray:
        """Return ``log(1 + documents / (1 + documents with the token))`` for each token, float32."""
        assert self._in_documents is not None
        counts = np.array([self._in_documents.count(token) for token in tokens], np.int64)
        return np.log(1 + self._documents / (1 + counts)).astype(np.float32)


def _rows_of(values: Any, needed: bool) -> tuple[Any, Tensor, int]:
    """Return the flat values, the document of each value and the number of documents."""
    if isinstance(values, SparseTensor):
        return values.values, values.indices[:, 0], values.shape[0]
    if isinstance(values, RaggedTensor):
        if isinstance(values.values, RaggedTensor):
            if needed:
                raise ValueError("data must have two dimensions for output_mode 'tf_idf', got ragged ones of three")
            return values.flat_values, torch.zeros(0, dtype=torch.int64), 0
        return values.values, values.value_rowids(), len(values.row_splits) - 1
    if needed and values.ndim != 2:
        raise ValueError(f"data must have two dimensions for output_mode 'tf_idf', got {values.ndim}")
    rows = torch.arange(values.shape[0]).repeat_interleave(int(np.prod(values.shape[1:])))
    return values.reshape(-1), rows, values.shape[0]


def _first_in_row(tokens: Tensor | Strings, rows: Tensor) -> Tensor:
    """Say of each token, bool, whether it stands in its document for the first time."""
    if isinstance(tokens, Strings):
        columns = [rows, ops.string_fingerprint64(*tokens), tokens.lengths()]
    else:
        columns = [rows, tokens.to(torch.int64)]
    _, first = np.unique(torch.stack(columns, 1).numpy(), axis=0, return_index=True)
    present = torch.zeros(len(rows), dtype=torch.bool)
    present[torch.from_numpy(first)] = True
    return present
