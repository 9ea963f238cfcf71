"""
Keras's optimizers, with Keras's arguments, results, slots and files, which step tables by rows.

Those of Keras's optimizers that are not here leave a table's gradient dense.
"""

from __future__ import annotations

from typing import Any, ClassVar

import keras
import torch
from torch import Tensor

from .. import optim
from ..tables.table import Gradient, table_if_any, table_of
from ._by_rows import ByRows, TableStep, torch_class
from ._lazy_slots import OnRows

__all__ = ["Adadelta", "Adagrad", "Adam", "AdamW", "LossScaleOptimizer", "RMSprop", "SGD"]

_register = keras.saving.register_keras_serializable(package="torchsparse_rec")
_SGD, _Adagrad, _RMSprop = map(torch_class, (keras.optimizers.SGD, keras.optimizers.Adagrad, keras.optimizers.RMSprop))
_Adadelta, _Adam, _AdamW = map(torch_class, (keras.optimizers.Adadelta, keras.optimizers.Adam, keras.optimizers.AdamW))


@_register
class SGD(OnRows, _SGD):  # type: ignore[valid-type,misc]
    """
    :class:`keras.optimizers.SGD`, which steps tables by rows without ``momentum``.

    Args:
        args, kwargs: as Keras's. With ``momentum``, ``weight_decay`` or ``gradient_accumulation_steps`` a table's
            gradient is dense; with ``use_ema`` each step reads all rows for their average.

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

    def _has_rule(self) -> bool:
        return self.momentum == 0


@_register
class Adagrad(OnRows, _Adagrad):  # type: ignore[valid-type,misc]
    """
    :class:`keras.optimizers.Adagrad`, which steps tables by rows.

    Args:
        args, kwargs: as Keras's. With ``weight_decay`` or ``gradient_accumulation_steps`` a table's gradient is dense.

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
    _fading = {"_accumulators": None}


@_register
class RMSprop(OnRows, _RMSprop):  # type: ignore[valid-type,misc]
    """
    :class:`keras.optimizers.RMSprop`, which steps tables by rows without ``momentum``.

    The averages of rows without a gradient fade too, when they are next read or stepped.

    Args:
        args, kwargs: as Keras's. With ``momentum``, ``weight_decay`` or ``gradient_accumulation_steps`` a table's
            gradient is dense.

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
    _fading = {"_velocities": "rho", "_average_gradients": "rho"}

    def _has_rule(self) -> bool:
        return self.momentum == 0


@_register
class Adadelta(OnRows, _Adadelta):  # type: ignore[valid-type,misc]
    """
    :class:`keras.optimizers.Adadelta`, which steps tables by rows.

    The averages of rows without a gradient fade too, when they are next read or stepped.

    Args:
        args, kwargs: as Keras's. With ``weight_decay`` or ``gradient_accumulation_steps`` a table's gradient is dense.

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
    _fading = {"_accumulated_grads": "rho", "_accumulated_delta_vars": "rho"}


class _Adams(ByRows):
    """
    The base of Adam and AdamW: tables are stepped by :class:`torchsparse_rec.optim.Adam`, whose states are the slots.

    Rows without a gradient move too. They are brought up to date when they are next read or stepped.
    """

    _decays_rows = True
    _states: ClassVar[dict[str, str]] = {"exp_avg": "_momentums", "exp_avg_sq": "_velocities"}
    _rows_optimizer: optim.Adam | None = None

    def _step_tables(self, steps: list[TableStep], learning_rate: Any) -> None:
        keras_optimizer: Any = self
        done = int(keras_optimizer.iterations)
        held = self._optimizer_of([step.variable for step in steps], done)
        lr, betas = float(learning_rate), (keras_optimizer.beta_1, keras_optimizer.beta_2)
        rate = _with_rounded_biases(lr, betas, done + 1, steps[0].values.dtype)
        for group in held.param_groups:
            decay = keras_optimizer.weight_decay if group["decays"] else 0.0
            group.update(lr=rate, betas=betas, eps=keras_optimizer.epsilon, weight_decay=decay * lr / rate if lr else 0)
        held.step_tables([(step.variable._value, Gradient(step.rows, step.values)) for step in steps])

    def _optimizer_of(self, variables: list[Any], done: int) -> optim.Adam:
        """Return the optimizer of rows; it holds these tables and knows how many steps have been done."""
        parameters = [variable._value for variable in variables]
        held = self._rows_optimizer
        known = {id(p) for group in held.param_groups for p in group["params"]} if held is not None else set()
        for decays in (False, True):
            new = [v for v in variables if id(v._value) not in known and self._decays(v) is decays]
            if not new:
                continue
            group = {"params": [v._value for v in new], "decays": decays}
            if held is None:
                amsgrad = self.amsgrad  # type: ignore[attr-defined]
                held = optim.Adam([group], amsgrad=amsgrad, decoupled_weight_decay=True, tensorflow_eps=True)
                self.__dict__["_rows_optimizer"] = held
            else:
                held.add_param_group(group)
            for variable in new:
                held.state[variable._value].update(self._slots_of(variable))
        assert held is not None
        for parameter in parameters:
            table = table_of(parameter)
            if table.rows is not None and (table.rows.optimizer() is not held or table.rows.clock.step != done):
                table.release()  # another optimizer's; or there were steps without this table, or it was loaded
            if table.rows is None:
                held.state[parameter]["step"] = torch.tensor(float(done))
        return held

    def _decays(self, variable: Any) -> bool:
        keras_optimizer: Any = self
        return keras_optimizer.weight_decay is not None and keras_optimizer._use_weight_decay(variable)

    def _slots_of(self, variable: Any) -> dict[str, Tensor]:
        names = {**self._states, **({"max_exp_avg_sq": "_velocity_hats"} if self.amsgrad else {})}  # type: ignore[attr-defined]
        return {state: self._slot_storage(slot, variable) for state, slot in names.items()}

    def _bring_up_to_date(self) -> None:
        if self._rows_optimizer is not None:
            self._rows_optimizer.flush()

    def _forget_rows(self) -> None:
        held = self.__dict__.pop("_rows_optimizer", None)
        for group in held.param_groups if held is not None else ():
            for parameter in group["params"]:
                table = table_if_any(parameter)
                if table is not None:
                    table.release()


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
        args, kwargs: as Keras's. With ``gradient_accumulation_steps`` a table's gradient is dense; with ``use_ema``
            each step reads all rows for their average.

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
        args, kwargs: as Keras's. With ``gradient_accumulation_steps`` a table's gradient is dense; with ``use_ema``
            each step reads all rows for their average.

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
class LossScaleOptimizer(keras.optimizers.LossScaleOptimizer):  # type: ignore[misc]
    """
    :class:`keras.optimizers.LossScaleOptimizer` around an optimizer of this module, for ``mixed_float16``.

    Give it to ``compile``: the one that Keras itself puts around an optimizer makes tables' gradients dense.

    Args:
        inner_optimizer: the optimizer that steps.
        args, kwargs: as Keras's.

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
