"""``KeyedTensor``: dense tensors side by side, by key."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ._node import Node, register
from .checks import check_keys, check_tensor


@register
class KeyedTensor(Node):
    """
    Dense tensors side by side in one, each known by its key: the pooled embeddings of several features.

    Names and argument order are TorchRec's. A pytree node: it can be an argument and a result of compiled and exported
    functions. Under ``torch.compile`` and ``torch.export`` nothing is checked. ``str()`` is TorchRec's; where there are
    many values, or they are not on the CPU, it shows shapes, as ``repr()``.

    Args:
        keys: K distinct strings.
        length_per_key: each key's size in the dimension ``key_dim``; the sizes add up to the size of ``values``.
        values: any dtype and rank above ``key_dim``; without keys and elements any rank.
        key_dim: the dimension in which the tensors lie side by side. Default 1, after the batch.
        offset_per_key, index_per_key: TorchRec's caches, for its argument order; not used.

    Raises:
        TypeError: keys that are no strings, values that are no tensor.
        ValueError: keys that are not distinct; lengths of another number or sum; no dimension ``key_dim``.

    Source: ``torchrec.sparse.jagged_tensor.KeyedTensor``.

    Example:
        >>> x = KeyedTensor(["user", "item"], [2, 1], torch.tensor([[3, 1, 4], [1, 5, 9]]))
        >>> x["user"]
        tensor([[3, 1],
                [1, 5]])
        >>> KeyedTensor.regroup([x], [["item", "user"], ["item"]])
        [tensor([[4, 3, 1],
                [9, 1, 5]]), tensor([[4],
                [9]])]
    """

    def __init__(
        self,
        keys: Sequence[str],
        length_per_key: Sequence[int],
        values: Tensor,
        key_dim: int = 1,
        offset_per_key: list[int] | None = None,
        index_per_key: dict[str, int] | None = None,
    ) -> None:
        if not torch.compiler.is_compiling():
            check_keys("KeyedTensor", keys)
            check_tensor("KeyedTensor", "values", values)
            nothing = len(keys) == 0 and values.numel() == 0
            if not nothing and not 0 <= key_dim < values.dim():
                raise ValueError(
                    f"KeyedTensor: key_dim must be a dimension of values, 0 to {values.dim() - 1}, got {key_dim}"
                )
            if len(length_per_key) != len(keys):
                raise ValueError(
                    f"KeyedTensor: length_per_key must have one length for each of the {len(keys)} keys, got "
                    f"{list(length_per_key)}"
                )
            if not nothing and (min(length_per_key, default=0) < 0 or sum(length_per_key) != values.shape[key_dim]):
                raise ValueError(
                    f"KeyedTensor: length_per_key must add up to the size of values in dimension {key_dim}, "
                    f"{values.shape[key_dim]}, got {list(length_per_key)}"
                )
        self._values, self._key_dim = values, key_dim
        self._keys, self._length_per_key = tuple(keys), tuple(length_per_key)

    @staticmethod
    def from_tensor_list(
        keys: Sequence[str], tensors: Sequence[Tensor], key_dim: int = 1, cat_dim: int = 1
    ) -> KeyedTensor:
        """
        Make a ``KeyedTensor`` of one tensor for each key, laid side by side.

        Args:
            keys: K distinct strings.
            tensors: K tensors of the same sizes except in dimension ``cat_dim``.
            key_dim: the dimension of :class:`KeyedTensor`. Default 1.
            cat_dim: the dimension to concatenate in: for several tensors ``key_dim``, which may be counted from the
                end. It is there for TorchRec's argument order; TorchRec takes any dimension, but no key can be read
                from the result then. Default 1.

        Raises:
            ValueError: no tensors, not as many as keys, or another ``cat_dim``.

        Example:
            >>> KeyedTensor.from_tensor_list(["a", "b"], [torch.zeros(2, 1), torch.ones(2, 2)]).values()
            tensor([[0., 1., 1.],
                    [0., 1., 1.]])
        """
        if len(tensors) != len(keys) or len(keys) == 0:
            raise ValueError(
                f"KeyedTensor.from_tensor_list: tensors must be as many as keys and at least one, got {len(tensors)} "
                f"for {len(keys)} keys"
            )
        if len(tensors) > 1 and cat_dim not in (key_dim, key_dim - tensors[0].dim()):
            raise ValueError(f"KeyedTensor.from_tensor_list: cat_dim must be key_dim, {key_dim}, got {cat_dim}")
        return KeyedTensor(keys, [x.shape[key_dim] for x in tensors], torch.cat(list(tensors), key_dim), key_dim)

    def keys(self) -> list[str]:
        """Return the keys, in order."""
        return list(self._keys)

    def values(self) -> Tensor:
        """Return the one tensor that holds all keys' tensors side by side."""
        return self._values

    def key_dim(self) -> int:
        """Return the dimension in which the tensors lie side by side."""
        return self._key_dim

    def length_per_key(self) -> list[int]:
        """Return the size of each key's tensor in dimension ``key_dim``."""
        return list(self._length_per_key)

    def offset_per_key(self) -> list[int]:
        """Return where each key's tensor begins in dimension ``key_dim``, and the end."""
        return [0, *accumulate(self._length_per_key)]

    def __getitem__(self, key: str) -> Tensor:
        """Return the tensor of a key, a view; raise ``KeyError`` if there is none."""
        if key not in self._keys:
            raise KeyError(f"KeyedTensor: no key {key!r}, only {list(self._keys)}")
        index = self._keys.index(key)
        return self._values.narrow(self._key_dim, self.offset_per_key()[index], self._length_per_key[index])

    def to_dict(self) -> dict[str, Tensor]:
        """Return the tensor of every key, as views."""
        if not self._keys:
            return {}
        return dict(zip(self._keys, self._values.split(self._length_per_key, self._key_dim), strict=True))

    @staticmethod
    def regroup(keyed_tensors: Sequence[KeyedTensor], groups: Sequence[Sequence[str]]) -> list[Tensor]:
        """
        Concatenate the tensors of several ``KeyedTensor`` by groups of keys.

        Args:
            keyed_tensors: objects with the same ``key_dim`` and, except in that dimension, the same sizes.
            groups: the keys of each result, in order, at least one. A key may be in several groups or in none.

        Returns:
            One tensor for each group. Differentiable; one pass over memory for each group.

        Raises:
            ValueError: a key that none of the objects has, or several have; an empty group; another ``key_dim``.
        """
        owner = "KeyedTensor.regroup"
        dims = [x._key_dim for x in keyed_tensors]
        if len(set(dims)) > 1:
            raise ValueError(f"{owner}: keyed_tensors must have the same key_dim, got {dims}")
        found: dict[str, Tensor] = {}
        several = set()
        for keyed in keyed_tensors:
            for key, x in keyed.to_dict().items():
                if key in found:
                    several.add(key)
                found[key] = x
        for i, group in enumerate(groups):
            if len(group) == 0:
                raise ValueError(f"{owner}: groups must have at least one key each, got none at {i}")
            for j, key in enumerate(group):
                if key not in found or key in several:
                    how = "several" if key in several else "none"
                    raise ValueError(
                        f"{owner}: groups must name keys that one of keyed_tensors has, got {key!r} at [{i}][{j}], "
                        f"which {how} of them has"
                    )
        return [torch.cat([found[key] for key in group], dims[0]) for group in groups]

    @staticmethod
    def regroup_as_dict(
        keyed_tensors: Sequence[KeyedTensor], groups: Sequence[Sequence[str]], keys: Sequence[str]
    ) -> dict[str, Tensor]:
        """
        Concatenate tensors by groups of keys, as :meth:`regroup`, and name each group.

        Args:
            keyed_tensors: the argument of :meth:`regroup`.
            groups: the argument of :meth:`regroup`.
            keys: the name of each group.

        Raises:
            ValueError: not as many keys as groups, or what :meth:`regroup` raises.
        """
        if len(keys) != len(groups):
            raise ValueError(
                f"KeyedTensor.regroup_as_dict: keys must be as many as groups, {len(groups)}, got {len(keys)}"
            )
        return dict(zip(keys, KeyedTensor.regroup(keyed_tensors, groups), strict=True))

    def _tensors(self) -> dict[str, Tensor]:
        return {"values": self._values}

    def _context(self) -> tuple:
        return self._keys, self._length_per_key, self._key_dim

    @classmethod
    def _build(cls, tensors: dict[str, Any], context: tuple) -> KeyedTensor:
        made = object.__new__(cls)
        made._values = tensors["values"]
        made._keys, made._length_per_key, made._key_dim = context
        return made

    def __repr__(self) -> str:
        sizes = dict(zip(self._keys, self._length_per_key, strict=True))
        return f"KeyedTensor({sizes}, {self._summary()}, key_dim={self._key_dim})"

    def __str__(self) -> str:
        if not self._is_shown():
            return repr(self)
        return self._in_lines([f'"{key}": {x.tolist()}' for key, x in self.to_dict().items()])


def unchecked(values: Tensor, form: tuple[tuple[str, ...], tuple[int, ...], int]) -> KeyedTensor:
    """Return the ``KeyedTensor`` of values whose keys, lengths and ``key_dim`` are known to fit."""
    return KeyedTensor._build({"values": values}, form)
