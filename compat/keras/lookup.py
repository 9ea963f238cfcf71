"""The layers of Keras that look tokens up in a vocabulary."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...features.words import decoded, encoded, integer_of
from ...typing import OovMethod, OutputMode
from .encode import as_inputs, mapped_values
from .index_lookup import IndexLookup


class StringLookup(IndexLookup):
    """
    Map strings to their places in a vocabulary, or places to strings.

    The ids, in order: the mask's, if there is one and ``output_mode`` is ``"int"``; the unknown strings'; the
    vocabulary's.

    Args:
        max_tokens: the largest number of ids. Default: no limit.
        num_oov_indices: the number of ids for unknown strings: with more than one, by their hash; 0: an unknown string
            is an error. Default 1.
        mask_token: a string with the id 0; in other modes than ``"int"`` it has no id and counts nowhere.
        oov_token: the string that ids without a string become with ``invert``. Default ``"[UNK]"``.
        vocabulary: the argument of :meth:`set_vocabulary`. Default: ``adapt`` finds it.
        idf_weights: the weight of each word of the vocabulary, for ``output_mode="tf_idf"``.
        invert: whether ids become strings: a numpy array of ``bytes``. Default False.
        output_mode: ``"int"``: ids; ``"one_hot"``: a vector for each input; ``"multi_hot"``, ``"count"``,
            ``"tf_idf"``: a vector for each row of inputs, with ones, numbers of inputs, or these times ``idf_weights``.
        pad_to_max_tokens: whether vectors have ``max_tokens`` elements, however large the vocabulary. Default False.
        sparse: whether vectors are given as a ``SparseTensor``.
        encoding: the encoding by which ``get_vocabulary`` decodes words. Default UTF-8.
        name: the layer's name.
        salt: the key of a SipHash for unknown strings: an integer, or two. Default: FarmHash.
        **kwargs: ``oov_method``, ``vocabulary_size``, ``trainable`` and ``dtype`` of configurations, without effect.

    Shapes:
        As for :class:`Hashing`. Ids and vectors are int64, vectors of ``"tf_idf"`` float32.

    Raises:
        ValueError: for arguments, vocabularies or inputs that Keras refuses too.

    Source: ``keras.layers.StringLookup``.

    Example:
        >>> layer = StringLookup(vocabulary=["a", "b", "c"])
        >>> layer([["a", "c", "d"], ["d", "z", "b"]])
        tensor([[1, 3, 0],
                [0, 0, 2]])
        >>> layer.get_vocabulary()
        ['[UNK]', 'a', 'b', 'c']
    """

    _default_name = "string_lookup"

    def __init__(
        self,
        max_tokens: int | None = None,
        num_oov_indices: int = 1,
        mask_token: str | None = None,
        oov_token: str | None = "[UNK]",
        vocabulary: Any = None,
        idf_weights: Any = None,
        invert: bool = False,
        output_mode: OutputMode = "int",
        pad_to_max_tokens: bool = False,
        sparse: bool = False,
        encoding: str = "utf-8",
        name: str | None = None,
        salt: Any = None,
        **kwargs: Any,
    ) -> None:
        self.encoding = encoding
        method = kwargs.pop("oov_method", "floormod")
        kwargs.pop("vocabulary_dtype", None)
        tokens = (max_tokens, num_oov_indices, mask_token, oov_token, vocabulary, idf_weights, invert)
        super().__init__(*tokens, output_mode, sparse, pad_to_max_tokens, method, salt, name, kwargs)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments that make an equal layer."""
        config = super().get_config()
        if config["vocabulary"] is not None:
            config["vocabulary"] = [str(x) if isinstance(x, str) else decoded(x) for x in config["vocabulary"]]
        return {**config, "encoding": self.encoding}

    def _token(self, value: Any, argument: str) -> bytes:
        if isinstance(value, bytes):
            return bytes(value)
        if not isinstance(value, str):
            raise ValueError(f"{argument} must be a string, got {value!r}")
        return encoded(value)

    def _shown(self, token: bytes) -> str:
        try:
            return token.decode(self.encoding)
        except UnicodeDecodeError:
            return decoded(token)

    def _from_file(self, lines: list[bytes]) -> list[bytes]:
        return lines

    def _inputs(self, inputs: Any) -> Any:
        return mapped_values(as_inputs(inputs), _strings)

    def _as_output(self, tokens: list[bytes], shape: tuple[int, ...]) -> np.ndarray:
        result = np.empty(len(tokens), dtype=object)
        result[:] = tokens
        return result.reshape(shape)


def _strings(values: Any) -> np.ndarray:
    if isinstance(values, Tensor):
        raise ValueError(f"inputs must be strings, got {values.dtype}")
    return values


class IntegerLookup(IndexLookup):
    """
    Map integers to their places in a vocabulary, or places to integers.

    Args:
        max_tokens: the argument of :class:`StringLookup`.
        num_oov_indices: the argument of :class:`StringLookup`; with more than one, ``oov_method`` distributes unknown
            integers.
        mask_token: an integer with the id 0; in other modes than ``"int"`` it has no id and counts nowhere.
        oov_token: the integer that ids without an integer become with ``invert``. Default -1.
        vocabulary: the argument of :class:`StringLookup`; a file has one integer in each line.
        vocabulary_dtype: ``"int64"``.
        idf_weights: the argument of :class:`StringLookup`.
        invert: whether ids become integers, int64. Default False.
        output_mode: the argument of :class:`StringLookup`.
        sparse: the argument of :class:`StringLookup`.
        pad_to_max_tokens: the argument of :class:`StringLookup`.
        oov_method: ``"floormod"`` (default): the remainder; ``"farmhash"``: the hash of the decimal text.
        salt: the argument of :class:`StringLookup`, only with ``oov_method="farmhash"``.
        name: the layer's name.
        **kwargs: ``vocabulary_size``, ``trainable`` and ``dtype`` of configurations, without effect.

    Shapes:
        As for :class:`StringLookup`. Floats of tensors and arrays are truncated.

    Raises:
        ValueError, TypeError: for arguments, vocabularies or inputs that Keras refuses too.

    Source: ``keras.layers.IntegerLookup``.

    Example:
        >>> layer = IntegerLookup(vocabulary=[12, 36, 1138, 42])
        >>> layer([[12, 1138, 42], [42, 1000, 36]])
        tensor([[1, 3, 4],
                [4, 0, 2]])
    """

    _default_name = "integer_lookup"

    def __init__(
        self,
        max_tokens: int | None = None,
        num_oov_indices: int = 1,
        mask_token: int | None = None,
        oov_token: int | None = -1,
        vocabulary: Any = None,
        vocabulary_dtype: str = "int64",
        idf_weights: Any = None,
        invert: bool = False,
        output_mode: OutputMode = "int",
        sparse: bool = False,
        pad_to_max_tokens: bool = False,
        oov_method: OovMethod = "floormod",
        salt: Any = None,
        name: str | None = None,
        **kwargs: Any,
    ) -> None:
        if vocabulary_dtype != "int64":
            raise ValueError(f"vocabulary_dtype must be 'int64', got {vocabulary_dtype!r}")
        if salt is not None and oov_method != "farmhash":
            raise ValueError(f"salt must be None unless oov_method is 'farmhash', got {salt!r} and {oov_method!r}")
        for argument, token in (("mask_token", mask_token), ("oov_token", oov_token)):
            if token is not None and not isinstance(token, (int, np.integer)):
                raise TypeError(f"{argument} must be an integer, got {token!r}")
        tokens = (max_tokens, num_oov_indices, mask_token, oov_token, vocabulary, idf_weights, invert)
        super().__init__(*tokens, output_mode, sparse, pad_to_max_tokens, oov_method, salt, name, kwargs)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments that make an equal layer."""
        config = super().get_config()
        if config["vocabulary"] is not None:
            config["vocabulary"] = [self._token(x, "vocabulary") for x in config["vocabulary"]]
        return {**config, "vocabulary_dtype": "int64"}

    def _token(self, value: Any, argument: str) -> int:
        try:
            number = int(value)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{argument} must be an integer, got {value!r}") from error
        if not -(2**63) <= number < 2**63:
            raise ValueError(f"{argument} must be an integer of 64 bits, got {number}")
        return number

    def _shown(self, token: int) -> int:
        return token

    def _from_file(self, lines: list[bytes]) -> list[int]:
        tokens = []
        for k, line in enumerate(lines):
            try:
                tokens.append(integer_of(line))
            except ValueError:
                raise ValueError(f"vocabulary must hold integers of 64 bits, got {line!r} in line {k + 1}") from None
        return tokens

    def _inputs(self, inputs: Any) -> Any:
        x = as_inputs(inputs)
        if isinstance(inputs, (float, list, tuple)) and isinstance(x, Tensor) and x.is_floating_point() and x.numel():
            raise TypeError(f"inputs must be integers, got {inputs!r:.100}")
        return mapped_values(x, _integers)

    def _as_output(self, tokens: list[int], shape: tuple[int, ...]) -> Tensor:
        return torch.tensor(tokens, dtype=torch.int64).reshape(shape)


def _integers(values: Any) -> Tensor:
    if not isinstance(values, Tensor):
        raise TypeError("inputs must be integers, got strings")
    return values.to(torch.int64)
