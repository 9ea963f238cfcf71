"""The places of strings and integers in a vocabulary, by sorted search."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .. import ops
from .inputs import strings_of_list
from .raw import Strings


class Vocabulary(torch.nn.Module):
    """
    Finds the places of words: strings by sorted fingerprints and a comparison of bytes, integers by sorted values.

    The buffers move with the module, and are not in its state, since they are made from the words.

    Args:
        words: distinct words, all ``bytes`` or all integers of 64 bits.
    """

    keys: Tensor
    places: Tensor
    text: Tensor
    bounds: Tensor

    def __init__(self, words: Sequence[bytes] | Sequence[int]) -> None:
        super().__init__()
        self.size = len(words)
        self.of_strings = bool(words) and isinstance(words[0], bytes)
        if self.of_strings:
            strings = strings_of_list(words, "vocabulary")
            keys = ops.string_fingerprint64(*strings)
        else:
            strings = Strings(torch.empty(0, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64))
            keys = torch.tensor(words, dtype=torch.int64)
        keys, places = keys.sort()
        for name, buffer in (("keys", keys), ("places", places), ("text", strings.bytes), ("bounds", strings.offsets)):
            self.register_buffer(name, buffer, persistent=False)
        # Words of one fingerprint are neighbours: the longest run is the number to compare.
        runs = torch.unique_consecutive(keys, return_counts=True)[1]
        self._longest_run = int(runs.max()) if self.of_strings and len(runs) else 1

    def forward(self, values: Tensor | Strings) -> Tensor:
        """Return the place of each value, int64; -1 for values that are not in the vocabulary."""
        if isinstance(values, Strings):
            return self._of_strings(values)
        values = values.to(torch.int64)
        if self.size == 0:
            return torch.full_like(values, -1)
        at = torch.searchsorted(self.keys, values).clamp(max=self.size - 1)
        return torch.where(self.keys[at] == values, self.places[at], -1)

    if TYPE_CHECKING:  # a call of torch's modules gives Any

        def __call__(self, values: Tensor | Strings) -> Tensor: ...

    def _of_strings(self, values: Strings) -> Tensor:
        hashes = ops.string_fingerprint64(*values)
        if self.size == 0:
            return torch.full_like(hashes, -1)
        first = torch.searchsorted(self.keys, hashes)
        found = torch.full_like(hashes, -1)
        for step in range(self._longest_run):
            at = (first + step).clamp(max=self.size - 1)
            place = self.places[at]
            same = (self.keys[at] == hashes) & self._equal(values, place)
            found = torch.where(same, place, found)
        return found

    def _equal(self, values: Strings, places: Tensor) -> Tensor:
        """Return a mask of the values that equal the word at their place, byte by byte."""
        starts, lengths = values.offsets[:-1], values.lengths()
        their_starts = self.bounds[places]
        their_lengths = self.bounds[places + 1] - their_starts
        same = lengths == their_lengths
        compared = torch.where(same, lengths, 0)
        offsets = torch.nn.functional.pad(compared.cumsum(0), (1, 0))
        rows = torch.repeat_interleave(compared)
        within = torch.arange(rows.shape[0], device=rows.device) - offsets[rows]
        differs = values.bytes[starts[rows] + within] != self.text[their_starts[rows] + within]
        wrong = torch.zeros_like(same).index_put((rows[differs],), torch.ones((), dtype=torch.bool, device=same.device))
        return same & ~wrong

    def extra_repr(self) -> str:
        """Return the number of words."""
        return f"{self.size}"


def oov_ids(places: Tensor, values: Tensor | Strings, size: int, num_oov: int, default: int) -> Tensor:
    """Replace places of -1 as TensorFlow does: by a default, or by one of ``num_oov`` further ids by a hash."""
    if num_oov == 0:
        return places if default == -1 else torch.where(places < 0, default, places)
    if num_oov == 1:
        return torch.where(places < 0, size, places)
    return torch.where(places < 0, size + hashed(values, num_oov), places)


def hashed(values: Tensor | Strings, num_buckets: int) -> Tensor:
    """Return TensorFlow's hash buckets: of strings by their bytes, of integers by their decimal text."""
    if isinstance(values, Strings):
        return ops.string_to_hash_bucket_fast(values.bytes, values.offsets, num_buckets)
    return ops.to_hash_bucket_fast(values, num_buckets)
