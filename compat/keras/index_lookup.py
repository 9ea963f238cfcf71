"""A lookup layer for tokens of any kind: a vocabulary behind special tokens, and the forms of output."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ... import ops
from ...features.inputs import strings_of_list
from ...features.raw import Strings
from ...features.vocabulary import Vocabulary
from ...features.words import decoded, encoded
from ..tensorflow import SparseTensor
from .arguments import check_arguments, checked_salt, integers, is_stream, listed, read_lines
from .documents import Documents
from .encode import encode, mapped_values
from .layer import Layer

_OLD_MODES = {"binary": "multi_hot", "tf-idf": "tf_idf"}


class IndexLookup(Layer):
    """A lookup layer without the methods that depend on the kind of its tokens, ``bytes`` or integers."""

    _hidden = ("vocabulary", "idf_weights")

    def __init__(
        self,
        max_tokens: int | None,
        num_oov_indices: int,
        mask_token: Any,
        oov_token: Any,
        vocabulary: Any,
        idf_weights: Any,
        invert: bool,
        output_mode: str,
        sparse: bool,
        pad_to_max_tokens: bool,
        oov_method: str,
        salt: Any,
        name: str | None,
        further: dict[str, Any],
    ) -> None:
        super().__init__()
        output_mode = _OLD_MODES.get(output_mode, output_mode)
        check_arguments(
            max_tokens, num_oov_indices, invert, output_mode, sparse, pad_to_max_tokens, oov_method, idf_weights
        )
        self.max_tokens, self.num_oov_indices = max_tokens, num_oov_indices
        self.mask_token, self.oov_token = mask_token, oov_token
        self.invert, self.output_mode, self.sparse = invert, output_mode, sparse
        self.pad_to_max_tokens, self.oov_method = pad_to_max_tokens, oov_method
        self.salt = checked_salt(salt)
        self.name = name or self._default_name
        self._frozen_size: int | None = further.pop("vocabulary_size", None)
        self._is_static = further.pop("has_input_vocabulary", vocabulary is not None)
        for ignored in ("trainable", "dtype"):
            further.pop(ignored, None)
        if further:
            raise ValueError(f"{type(self).__name__}: got arguments that it does not have: {sorted(further)}")
        # As in Keras, the words of a file are not part of the configuration.
        self._given = None if vocabulary is None or isinstance(vocabulary, (str, Path)) else vocabulary
        self._given_weights = idf_weights
        self._tokens: list[Any] = []
        self._lookup: Vocabulary | None = None
        self.idf_weights: Tensor | None = None
        self._documents = Documents(output_mode == "tf_idf")
        if vocabulary is not None:
            if output_mode == "tf_idf" and idf_weights is None:
                raise ValueError("idf_weights must be given with vocabulary for output_mode 'tf_idf'")
            self.set_vocabulary(vocabulary, idf_weights)

    _default_name = "index_lookup"

    # ---- For the layer of each kind of tokens ------------------------------------------------------------------------

    def _token(self, value: Any, argument: str) -> Any:
        """Return a token as the vocabulary holds it: ``bytes`` or an integer."""
        raise TypeError("a layer of one kind of tokens must define it")

    def _shown(self, token: Any) -> Any:
        """Return a token as users see it."""
        raise TypeError("a layer of one kind of tokens must define it")

    def _inputs(self, inputs: Any) -> Any:
        """Return the inputs with values that are integers, or strings in a numpy array."""
        raise TypeError("a layer of one kind of tokens must define it")

    def _from_file(self, lines: list[bytes]) -> list[Any]:
        """Return the tokens in the lines of a file."""
        raise TypeError("a layer of one kind of tokens must define it")

    # ---- The vocabulary ---------------------------------------------------------------------------------------------

    def _oov_start(self) -> int:
        return 1 if self.mask_token is not None and self.output_mode == "int" else 0

    def _token_start(self) -> int:
        return self._oov_start() + self.num_oov_indices

    def vocabulary_size(self) -> int:
        """Return the number of ids: the special tokens' and the vocabulary's."""
        return len(self._tokens) + self._token_start()

    def get_vocabulary(self, include_special_tokens: bool = True) -> list[Any]:
        """
        Return the vocabulary, ordered by id.

        Args:
            include_special_tokens: whether the ids of the mask and of unknown tokens are shown too. Default True.
        """
        tokens = [self._shown(token) for token in self._tokens]
        if not include_special_tokens:
            return tokens
        return [self.mask_token] * self._oov_start() + [self.oov_token] * self.num_oov_indices + tokens

    def set_vocabulary(self, vocabulary: Any, idf_weights: Any = None) -> None:
        """
        Replace the vocabulary.

        Args:
            vocabulary: distinct tokens, with or without the special ones before them. They are a list, tuple, numpy or
                pyarrow array or tensor, or the name of a text file with one token in each line.
            idf_weights: a weight for each token, for ``output_mode="tf_idf"`` and no other.

        Raises:
            ValueError: for arguments that Keras refuses too.
        """
        if (idf_weights is None) == (self.output_mode == "tf_idf"):
            raise ValueError(f"idf_weights must be given for output_mode 'tf_idf' alone, got {idf_weights!r}")
        if isinstance(vocabulary, (str, Path)):
            if self.output_mode == "tf_idf":
                raise ValueError("vocabulary must not be a file for output_mode 'tf_idf'")
            self._set_tokens(self._from_file(read_lines(Path(vocabulary))))
            return
        given = vocabulary.tolist() if hasattr(vocabulary, "tolist") else list(vocabulary)
        if not given:
            raise ValueError("vocabulary must not be empty")
        words = [self._token(word, f"vocabulary[{k}]") for k, word in enumerate(given)]
        special = [self.mask_token] * self._oov_start() + [self.oov_token] * self.num_oov_indices
        head = [None if token is None else self._token(token, "mask_token and oov_token") for token in special]
        has_special = head == words[: len(head)]
        tokens = words[len(head) :] if has_special else words
        if not tokens:
            raise ValueError(f"vocabulary must hold a token that is not special, got {given!r}")
        self._check_tokens(tokens)
        self._set_tokens(tokens)
        if idf_weights is not None:
            self._set_weights(idf_weights, len(words), 0 if has_special else self._token_start())

    def _check_tokens(self, tokens: list[Any]) -> None:
        if self.mask_token is not None and self._token(self.mask_token, "mask_token") in tokens:
            raise ValueError(
                f"vocabulary must have mask_token, {self.mask_token!r}, only before all others, or not at all"
            )
        if self.invert and self.oov_token is not None and self._token(self.oov_token, "oov_token") in tokens:
            raise ValueError(
                f"vocabulary must have oov_token, {self.oov_token!r}, only before all others, or not at all"
            )

    def _set_tokens(self, tokens: list[Any]) -> None:
        if len(set(tokens)) != len(tokens):
            seen: set[Any] = set()
            twice = next(token for token in tokens if token in seen or seen.add(token))  # type: ignore[func-returns-value]
            raise ValueError(f"vocabulary must not hold a token twice, got {self._shown(twice)!r}")
        size = len(tokens) + self._token_start()
        if self.max_tokens is not None and size > self.max_tokens:
            raise ValueError(
                f"vocabulary must have at most max_tokens={self.max_tokens} ids with the special ones, got {size}"
            )
        if self.output_mode != "int" and not self.pad_to_max_tokens:
            if self._frozen_size is not None and self._frozen_size != size:
                raise ValueError(
                    f"vocabulary must keep its size for output_mode {self.output_mode!r} without pad_to_max_tokens, "
                    f"{self._frozen_size}, got {size}"
                )
        self._tokens, self._frozen_size = tokens, size
        device = self._lookup.keys.device if self._lookup is not None else torch.device("cpu")
        self._lookup = Vocabulary(tokens).to(device)

    def _set_weights(self, idf_weights: Any, words: int, in_front: int) -> None:
        weights = np.asarray(idf_weights.tolist() if hasattr(idf_weights, "tolist") else list(idf_weights), np.float64)
        if weights.ndim != 1 or len(weights) != words:
            raise ValueError(
                f"idf_weights must have one number for each of the {words} tokens, got shape {weights.shape}"
            )
        self._fill_weights(weights, weights.mean(), in_front)

    def _fill_weights(self, weights: np.ndarray, mean: Any, in_front: int) -> None:
        """Set the weights of all ids: the mean for ids in front of the given ones, and 0 for ids behind."""
        front = np.full(in_front, mean)
        behind = np.zeros(max(self._depth() - in_front - len(weights), 0))
        self.idf_weights = torch.from_numpy(np.concatenate([front, weights, behind]).astype(np.float32))

    def _depth(self) -> int:
        return self.max_tokens if self.pad_to_max_tokens and self.max_tokens is not None else self.vocabulary_size()

    # ---- Learning ---------------------------------------------------------------------------------------------------

    def adapt(self, data: Any, steps: int | None = None) -> None:
        """
        Find the vocabulary: tokens by frequency, of equally frequent ones the greater first, ``max_tokens`` of them.

        Args:
            data: one array or list of tokens, or an iterator, generator or data set of such batches.
            steps: the most batches to take. Default: all.

        Raises:
            ValueError: for a layer that was given a vocabulary.
        """
        self.reset_state()
        if is_stream(data):
            for batch in islice(data, steps):
                self.update_state(batch)
        else:
            values = self._inputs(data)
            if isinstance(values, (Tensor, np.ndarray)) and values.ndim < 2:
                values = values.reshape(-1, 1)
            self._count(values)
        self.finalize_state()

    def update_state(self, data: Any) -> None:
        """Count the tokens of a batch. A vector is one document."""
        values = self._inputs(data)
        if isinstance(values, (Tensor, np.ndarray)) and values.ndim < 2:
            values = values.reshape(1, -1)
        self._count(values)

    def _count(self, values: Any) -> None:
        if self._is_static:
            raise ValueError(f"adapt must not be called for layer {self.name!r}: its vocabulary was given")
        self._documents.add(values)

    def finalize_state(self) -> None:
        """Make the vocabulary from the counted tokens."""
        if self._is_static or not len(self._documents):
            return
        for special in (self.mask_token, self.oov_token):
            if special is not None:
                self._documents.remove(self._token(special, "mask_token and oov_token"))
        most = None if self.max_tokens is None else max(self.max_tokens - self._token_start(), 0)
        tokens = self._documents.tokens(most)
        self._set_tokens(tokens)
        if self.output_mode == "tf_idf":
            weights = self._documents.idf_weights(tokens)
            # As in Keras the mean is NaN where no token is left; numpy would warn.
            mean = weights.mean(dtype=np.float32) if len(weights) else np.float32("nan")
            self._fill_weights(weights, mean, self._token_start())
        self.reset_state()

    def reset_state(self) -> None:
        """Forget the counted tokens."""
        self._documents = Documents(self.output_mode == "tf_idf")

    # ---- A batch ----------------------------------------------------------------------------------------------------

    def forward(self, inputs: Any) -> Any:
        """Return the ids of the inputs, their encoding, or with ``invert`` the tokens of the ids."""
        if self._lookup is None:
            raise ValueError(
                f"{type(self).__name__}: vocabulary must be given, or found by adapt(), before it is called"
            )
        if self.invert:
            return mapped_values(integers(inputs), self._inverted)
        ids = mapped_values(self._inputs(inputs), self._ids)
        if self.output_mode == "int":
            return ids
        counts = self.output_mode == "tf_idf"
        result = encode(ids, "count" if counts else self.output_mode, self._depth(), torch.int64, self.sparse)
        return self._weighted(result) if counts else result

    def _weighted(self, counts: Any) -> Any:
        if self.idf_weights is None:
            raise ValueError("idf_weights must be given, or found by adapt(), for output_mode 'tf_idf'")
        if isinstance(counts, SparseTensor):
            weights = self.idf_weights[counts.indices[:, -1].cpu()]
            return SparseTensor(counts.indices, counts.values.to(torch.float32) * weights, counts.dense_shape)
        return counts.to(torch.float32) * self.idf_weights.to(counts.device)

    def _ids(self, values: Tensor | np.ndarray) -> Tensor:
        """Return the ids of tokens of any shape; a mask without an id of its own gets an id beyond all others."""
        shape = tuple(values.shape)
        flat: Any = values.reshape(-1)
        keys: Tensor | Strings = flat if isinstance(flat, Tensor) else strings_of_list(flat.tolist(), "inputs")
        assert self._lookup is not None
        places = self._lookup(keys)
        unknown = places < 0
        ids = torch.where(unknown, self._unknown(keys) + self._oov_start(), places + self._token_start())
        masked = self._masked(flat)
        if masked is not None:
            ids = torch.where(masked, 0 if self.output_mode == "int" else self._depth(), ids)
            unknown = unknown & ~masked
        if self.num_oov_indices == 0 and bool(unknown.any()):
            first = int(unknown.nonzero()[0])
            raise ValueError(
                f"inputs must be in the vocabulary with num_oov_indices=0, got {flat[first]!r} at position {first}"
            )
        return ids.reshape(shape)

    def _masked(self, flat: Any) -> Tensor | None:
        if self.mask_token is None:
            return None
        token = self._token(self.mask_token, "mask_token")
        if isinstance(flat, Tensor):
            return flat == token
        return torch.from_numpy(flat == token)

    def _unknown(self, keys: Tensor | Strings) -> Tensor:
        """Return which of the ids for unknown tokens each value would have, counted from 0."""
        count = self.num_oov_indices
        if count <= 1:
            return torch.zeros((), dtype=torch.int64)
        if isinstance(keys, Strings):
            if self.salt is None:
                return ops.string_to_hash_bucket_fast(*keys, count)
            return ops.string_to_hash_bucket_strong(*keys, count, self.salt)
        if self.oov_method == "floormod":
            return keys % count
        if self.salt is None:
            return ops.to_hash_bucket_fast(keys, count)
        return ops.to_hash_bucket_strong(keys, count, self.salt)

    def _inverted(self, ids: Tensor) -> Any:
        """Return the tokens of ids."""
        places = ids - self._token_start()
        inside = (places >= 0) & (places < len(self._tokens))
        oov = self._token(self.oov_token, "oov_token")
        tokens = [self._tokens[k] if there else oov for k, there in zip(_flat(places), _flat(inside), strict=True)]
        if self.mask_token is not None:
            mask = self._token(self.mask_token, "mask_token")
            tokens = [mask if k == 0 else token for k, token in zip(_flat(ids), tokens, strict=True)]
        return self._as_output(tokens, tuple(ids.shape))

    def _as_output(self, tokens: list[Any], shape: tuple[int, ...]) -> Any:
        raise TypeError("a layer of one kind of tokens must define it")

    # ---- State ------------------------------------------------------------------------------------------------------

    def get_config(self) -> dict[str, Any]:
        """Return the arguments that make an equal layer; as in Keras, without words of ``adapt`` or a file."""
        return {
            "name": self.name,
            "trainable": True,
            "dtype": "float32",
            "invert": self.invert,
            "max_tokens": self.max_tokens,
            "num_oov_indices": self.num_oov_indices,
            "oov_token": self.oov_token,
            "mask_token": self.mask_token,
            "output_mode": self.output_mode,
            "sparse": self.sparse,
            "pad_to_max_tokens": self.pad_to_max_tokens,
            "idf_weights": listed(self._given_weights),
            "vocabulary": listed(self._given),
            "vocabulary_size": self._frozen_size,
            "oov_method": self.oov_method,
            "salt": self.salt,
        }

    def get_extra_state(self) -> dict[str, Any]:
        """Return the vocabulary, for ``state_dict``."""
        tokens = [decoded(x) if isinstance(x, bytes) else x for x in self._tokens]
        return {"tokens": tokens, "idf_weights": self.idf_weights}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Restore the vocabulary from what ``get_extra_state`` returned."""
        if state["tokens"]:
            tokens = state["tokens"]
            self._set_tokens([encoded(x) if isinstance(x, str) else x for x in tokens])
        else:
            self._tokens, self._lookup = [], None
        self.idf_weights = state["idf_weights"]


def _flat(x: Tensor) -> list[Any]:
    return x.reshape(-1).tolist()
