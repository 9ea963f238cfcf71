"""
Keras's optimizers, with Keras's arguments, results, slots and files, which step tables by rows.

Those of Keras's optimizers that are not here leave a table's gradient dense.
"""

from __future__ import annotations

from typing import Any

import keras
import torch
from torch import Tensor

from .. import optim
from ._by_rows import TableStep, torch_class
from ._on_rows import OnRows
from ._with_slots import WithSlots

__all__ = ["Adadelta", "Adagrad", "Adam", "AdamW", "Lion", "LossScaleOptimizer", "RMSprop", "SGD"]

_register = keras.saving.register_keras_serializable(package="torchsparse_rec")
_SGD, _Adagrad, _RMSprop = map(torch_class, (keras.optimizers.SGD, keras.optimizers.Adagrad, keras.optimizers.RMSprop))
_Adadelta, _Adam, _AdamW = map(torch_class, (keras.optimizers.Adadelta, keras.optimizers.Adam, keras.optimizers.AdamW))
_Lion = torch_class(keras.optimizers.Lion)


@_register
class SGD(WithSlots, _SGD):  # type: ignore[valid-type,misc]
    """
    :class:`keras.optimizers.SGD`, which steps tables by rows.

    With ``momentum`` rows without a gradient move too. They are brought up to date when they are next read or stepped.

    Args:
        args, kwargs: Keras's arguments. With ``weight_decay`` or ``gradient_accumulation_steps`` a table's gradient is
            dense; with ``use_ema`` each step reads all rows for their average.

    Source: ``keras.optimizers.SGD``.

    Example:
        >>> from torchsparse_rec.keras import Embedding
        >>> layer = Embedding(3, 1, embeddings_initializer="ones")
        >>> layer.build()
        >>> optimizer = SGD(0.25)
        >>> optimizer.build(layer.trainable_variables)
        >>> layer(torch.tensor([1, 1])).sum().backward()
        >>> optimizer.apply([layer.embeddings.value.grad])
        >>> layer.embeddings.value.detach().T
        tensor([[1.0000, 0.5000, 1.0000]])
    """

    keras_class = keras.optimizers.SGD

    counts_steps = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.__dict__["_negated"] = {}  # the tables whose slots have our form, by the variable's id

    def _new_optimizer(self, groups: list[dict[str, Any]]) -> optim.SGD:
        return optim.SGD(groups, momentum=self.momentum, nesterov=self.nesterov)

    def _slots_by_state(self) -> dict[str, str]:
        return {"momentum_buffer": "momentums"} if self.momentums else {}

    def _settings(self, lr: float, step: int, dtype: torch.dtype, decays: bool) -> dict[str, Any]:
        return {"lr": 1.0 if self.momentum else lr, "momentum": self.momentum, "nesterov": self.nesterov}

    def _step_tables(self, steps: list[TableStep], learning_rate: Any) -> None:
        if self.momentum:
            # Keras's slot is minus the sum of lr * gradient, ours the sum of gradients: ours is minus Keras's.
            lr = float(learning_rate)
            steps = [step._replace(values=step.values * lr) for step in steps]
            for step in steps:
                if id(step.variable) not in self._negated:
                    self._negate([step.variable])
        super()._step_tables(steps, learning_rate)

    def _bring_up_to_date(self) -> None:
        super()._bring_up_to_date()
        self._negate(list(self._negated.values()))

    def _negate(self, variables: list[Any]) -> None:
        """Turn the slots of tables from Keras's form into ours, or back."""
        for variable in variables:
            self._slot_storage("momentums", variable).neg_()
            if self._negated.pop(id(variable), None) is None:
                self._negated[id(variable)] = variable


@_register
class Adagrad(OnRows, _Adagrad):  # type: ignore[valid-type,misc]
    """
    :class:`keras.optimizers.Adagrad`, which steps tables by rows.

    Args:
        args, kwargs: Keras's arguments. With ``weight_decay`` or ``gradient_accumulation_steps`` a table's gradient is
            dense.

    Source: ``keras.optimizers.Adagrad``.

    Example:
        >>> from torchsparse_rec.keras import Embedding
        >>> layer = Embedding(3, 1, embeddings_initializer="ones")
        >>> layer.build()
        >>> optimizer = Adagrad(0.5, initial_accumulator_value=0.0)
        >>> optimizer.build(layer.trainable_variables)
        >>> layer(torch.tensor([1, 1])).sum().backward()
        >>> optimizer.apply([layer.embeddings.value.grad])
        >>> layer.embeddings.value.detach().T
        tensor([[1.0000, 0.5000, 1.0000]])
    """

    keras_class = keras.optimizers.Adagrad
    _slots = ("_accumulators",)


@_register
class RMSprop(OnRows, _RMSprop):  # type: ignore[valid-type,misc]
    """
    :class:`keras.optimizers.RMSprop`, which steps tables by rows without ``momentum``.

    The averages of rows without a gradient fade too, when they are next read or stepped.

    Args:
        args, kwargs: Keras's arguments. With ``momentum``, ``weight_decay`` or ``gradient_accumulation_steps`` a
            table's gradient is dense.

    Source: ``keras.optimizers.RMSprop``.

    Example:
        >>> from torchsparse_rec.keras import Embedding
        >>> layer = Embedding(3, 1, embeddings_initializer="ones")
        >>> layer.build()
        >>> optimizer = RMSprop(0.25, rho=0.75)
        >>> optimizer.build(layer.trainable_variables)
        >>> layer(torch.tensor([1, 1])).sum().backward()
        >>> optimizer.apply([layer.embeddings.value.grad])
        >>> layer.embeddings.value.detach().T
        tensor([[1.0000, 0.5000, 1.0000]])
    """

    keras_class = keras.optimizers.RMSprop
    _slots = ("_velocities", "_average_gradients")
    _factor = "rho"

    def _has_rule(self) -> bool:
        return self.momentum == 0

    def _slot_names(self) -> list[str]:
        return [name for name in super()._slot_names() if self.centered or name != "_average_gradients"]


@_register
class Adadelta(OnRows, _Adadelta):  # type: ignore[valid-type,misc]
    """
    :class:`keras.optimizers.Adadelta`, which steps tables by rows.

    The averages of rows without a gradient fade too, when they are next read or stepped.

    Args:
        args, kwargs: Keras's arguments. With ``weight_decay`` or ``gradient_accumulation_steps`` a table's gradient is
            dense.

    Source: ``keras.optimizers.Adadelta``.

    Example:
        >>> from torchsparse_rec.keras import Embedding
        >>> layer = Embedding(3, 1, embeddings_initializer="ones")
        >>> layer.build()
        >>> optimizer = Adadelta(100.0)
        >>> optimizer.build(layer.trainable_variables)
        >>> layer(torch.tensor([1, 1])).sum().backward()
        >>> optimizer.apply([layer.embeddings.value.grad])
        >>> layer.embeddings.value.detach().T
        tensor([[1.0000, 0.8586, 1.0000]])
    """

    keras_class = keras.optimizers.Adadelta
    _slots = ("_accumulated_grads", "_accumulated_delta_vars")
    _factor = "rho"


class _Adams(WithSlots):
    """The base of Adam and AdamW, whose rows without a gradient move too."""

    _decays_rows = True

    def _new_optimizer(self, groups: list[dict[str, Any]]) -> optim.Adam:
        amsgrad = self.amsgrad  # type: ignore[attr-defined]
        return optim.Adam(groups, amsgrad=amsgrad, decoupled_weight_decay=True, tensorflow_eps=True)

    def _slots_by_state(self) -> dict[str, str]:
        slots = {"exp_avg": "_momentums", "exp_avg_sq": "_velocities"}
        return {**slots, "max_exp_avg_sq": "_velocity_hats"} if hasattr(self, "_velocity_hats") else slots

    def _settings(self, lr: float, step: int, dtype: torch.dtype, decays: bool) -> dict[str, Any]:
        optimizer: Any = self
        betas = optimizer.beta_1, optimizer.beta_2
        rate = _with_rounded_biases(lr, betas, step, dtype)
        decay = optimizer.weight_decay * lr / rate if decays and optimizer.weight_decay and rate else 0.0
        if optimizer.amsgrad and not hasattr(self, "_velocity_hats"):
            raise ValueError(
                f"{type(self).__name__}: amsgrad must be set before the optimizer is built, got True after"
            )
        changing = {"amsgrad": optimizer.amsgrad, "betas": betas, "eps": optimizer.epsilon, "weight_decay": decay}
        return {"lr": rate, **changing}


def _with_rounded_biases(lr: float, betas: tuple[float, float], step: int, dtype: torch.dtype) -> float:
    """
    Return the learning rate with which a step is as long as Keras's.

    Keras rounds 1 - beta**step in the table's dtype: in float32 its first steps are off by some 1e-5 of their length.
    """
    rate, beta1, beta2, exponent = torch.tensor((lr, *betas, step), dtype=dtype)
    size = (rate * (1 - beta2**exponent).sqrt() / (1 - beta1**exponent)).item()
    return size * (1 - betas[0] ** step) / (1 - betas[1] ** step) ** 0.5


@_register
class Adam(_Adams, _Adam):  # type: ignore[valid-type,misc]
    """
    :class:`keras.optimizers.Adam`, which steps tables by rows, with the results of a dense step.

    Rows without a gradient move too. They are brought up to date when they are next read or stepped.

    Args:
        args, kwargs: Keras's arguments. With ``gradient_accumulation_steps`` a table's gradient is dense; with
            ``use_ema`` each step reads all rows for their average.

    Source: ``keras.optimizers.Adam``.

    Example:
        >>> from torchsparse_rec.keras import Embedding
        >>> layer = Embedding(3, 1, embeddings_initializer="ones")
        >>> layer.build()
        >>> optimizer = Adam(0.25)
        >>> optimizer.build(layer.trainable_variables)
        >>> layer(torch.tensor([1, 1])).sum().backward()
        >>> optimizer.apply([layer.embeddings.value.grad])
        >>> layer.embeddings.value.detach().T
        tensor([[1.0000, 0.7500, 1.0000]])
    """

    keras_class = keras.optimizers.Adam


@_register
class AdamW(_Adams, _AdamW):  # type: ignore[valid-type,misc]
    """
    :class:`keras.optimizers.AdamW`, which steps tables by rows, with the results of a dense step.

    Rows without a gradient move and decay too. They are brought up to date when they are next read or stepped.

    Args:
        args, kwargs: Keras's arguments. With ``gradient_accumulation_steps`` a table's gradient is dense; with
            ``use_ema`` each step reads all rows for their average.

    Source: ``keras.optimizers.AdamW``.

    Example:
        >>> from torchsparse_rec.keras import Embedding
        >>> layer = Embedding(3, 1, embeddings_initializer="ones")
        >>> layer.build()
        >>> optimizer = AdamW(0.25, weight_decay=0.5)
        >>> optimizer.build(layer.trainable_variables)
        >>> layer(torch.tensor([1, 1])).sum().backward()
        >>> optimizer.apply([layer.embeddings.value.grad])
        >>> layer.embeddings.value.detach().T
        tensor([[0.8750, 0.6250, 0.8750]])
    """

    keras_class = keras.optimizers.AdamW


@_register
class Lion(WithSlots, _Lion):  # type: ignore[valid-type,misc]
    """
    :class:`keras.optimizers.Lion`, which steps tables by rows, with the results of a dense step.

    Rows without a gradient move too. They are brought up to date when they are next read or stepped.

    Args:
        args, kwargs: Keras's arguments. With ``gradient_accumulation_steps`` a table's gradient is dense; with
            ``use_ema`` each step reads all rows for their average.

    Source: ``keras.optimizers.Lion``.

    Example:
        >>> from torchsparse_rec.keras import Embedding
        >>> layer = Embedding(3, 1, embeddings_initializer="ones")
        >>> layer.build()
        >>> optimizer = Lion(0.25)
        >>> optimizer.build(layer.trainable_variables)
        >>> layer(torch.tensor([1, 1])).sum().backward()
        >>> optimizer.apply([layer.embeddings.value.grad])
        >>> layer.embeddings.value.detach().T
        tensor([[1.0000, 0.7500, 1.0000]])
    """

    keras_class = keras.optimizers.Lion
    _decays_rows = True

    def _new_optimizer(self, groups: list[dict[str, Any]]) -> optim.Lion:
        return optim.Lion(groups)

    def _slots_by_state(self) -> dict[str, str]:
        return {"exp_avg": "_momentums"}

    def _settings(self, lr: float, step: int, dtype: torch.dtype, decays: bool) -> dict[str, Any]:
        optimizer: Any = self
        decay = optimizer.weight_decay if decays and optimizer.weight_decay else 0.0
        return {"lr": lr, "betas": (optimizer.beta_1, optimizer.beta_2), "weight_decay": decay}


@_register
class LossScaleOptimizer(keras.optimizers.LossScaleOptimizer):  # type: ignore[misc]
    """
    :class:`keras.optimizers.LossScaleOptimizer` around an optimizer of this module, for ``mixed_float16``.

    Give it to ``compile``: the one that Keras itself puts around an optimizer makes tables' gradients dense.

    Args:
        inner_optimizer: the optimizer that steps.
        args, kwargs: Keras's arguments.

    Source: ``keras.optimizers.LossScaleOptimizer``.

    Example:
        >>> import keras
        >>> weight = keras.Variable(torch.ones(3, 1))
        >>> optimizer = LossScaleOptimizer(SGD(0.25), initial_scale=4.0)
        >>> optimizer.build([weight])
        >>> optimizer.apply([torch.sparse_coo_tensor([[1]], [[8.0]], (3, 1), check_invariants=True)])
        >>> weight.numpy().ravel().tolist()
        [1.0, 0.5, 1.0]
    """

    looks_at_values = True

    def check_finite(self, grads: Any) -> Any:
        """Say whether all elements of all gradients are finite, as a tensor."""
        return super().check_finite(
            [g._values() if isinstance(g, Tensor) and g.layout is torch.sparse_coo else g for g in grads]
        )
