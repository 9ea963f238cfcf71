"""The slots of TensorFlow's and Keras's optimizers: their names in files, and the states of ``optim`` that they are."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ... import optim
from ...optim.row_optimizer import RowOptimizer
from .sources import Found, Source, listed

__all__ = ["Slots", "beta_powers", "check_rule", "factor_of", "find_slots", "keras_groups", "steps_by_name", "v1_slots"]


class _Slot(NamedTuple):
    state: str
    """In ``optim``."""
    object: tuple[str, ...]
    """In object-based checkpoints: of ``tf.compat.v1.train``, and of Keras 2 if that differs."""
    keras: str
    """In Keras 3."""
    group: int
    """Keras 3 makes the slots of a group variable by variable, one group after the other."""


#: Our optimizers, what tf.compat.v1 calls theirs, and the slots in the order in which that makes them.
_SLOTS: list[tuple[tuple[type, ...], str, tuple[_Slot, ...]]] = [
    (
        (optim.Adam, optim.AdamW),
        "Adam",
        (
            _Slot("exp_avg", ("m",), "momentum", 0),
            _Slot("exp_avg_sq", ("v",), "velocity", 0),
            _Slot("max_exp_avg_sq", ("vhat",), "velocity_hat", 1),
        ),
    ),
    ((optim.Adagrad,), "Adagrad", (_Slot("sum", ("accumulator",), "accumulator", 0),)),
    (
        (optim.Ftrl,),
        "Ftrl",
        (_Slot("accumulator", ("accum", "accumulator"), "accumulator", 0), _Slot("linear", ("linear",), "linear", 0)),
    ),
    (
        (optim.RMSprop,),
        "RMSProp",
        (
            _Slot("square_avg", ("rms",), "velocity", 0),
            _Slot("grad_avg", ("mg",), "average_gradient", 2),
            _Slot("momentum_buffer", ("momentum",), "momentum", 1),
        ),
    ),
    ((optim.SGD,), "Momentum", (_Slot("momentum_buffer", ("momentum",), "momentum", 0),)),
]


# The names that Keras 3 gives its optimizers, without underscores and numbers: slots of some have the same names.
_KERAS_OPTIMIZERS = (
    *("sgd", "rmsprop", "adam", "adamw", "adadelta", "adagrad", "adamax", "adafactor", "nadam", "ftrl", "lion", "lamb"),
    "muon",
)
_KERAS_SLOTS = {slot.keras for _, _, slots in _SLOTS for slot in slots}


class Slots(NamedTuple):
    """A file's content of the optimizer's state of a table."""

    states: dict[str, tuple[Found, float]]
    """By the name of the state: the slot, and by what it is multiplied."""
    steps: int | None
    """How many steps have been taken; None: the file does not say."""
    are_keras: bool = False
    """Whether they are of an optimizer of Keras, some of which have other rules than those of ``tf.compat.v1``."""


def _known(optimizer: RowOptimizer, group: dict[str, Any]) -> tuple[str, tuple[_Slot, ...]]:
    """Return TensorFlow's name of an optimizer, and its slots of a parameter, in the order of their making."""
    for kinds, scope, slots in _SLOTS:
        if isinstance(optimizer, kinds):
            if group.get("dampening"):
                raise ValueError(f"TensorFlow has no dampening: it must be 0, got {group['dampening']}")
            states = optimizer.rule(group).states
            return scope, tuple(slot for slot in slots if slot.state in states)
    raise ValueError(
        f"slots are known of optim.Adam, AdamW, Adagrad, Ftrl, RMSprop and SGD, got {type(optimizer).__name__}"
    )


def v1_slots(optimizer: RowOptimizer, group: dict[str, Any]) -> dict[str, tuple[str, float]]:
    """Return the end of a slot's name in ``tf.compat.v1``, and its factor, by the name of the state."""
    scope, slots = _known(optimizer, group)
    if group.get("amsgrad"):
        raise ValueError("tf.compat.v1's Adam has no amsgrad: amsgrad must be False, or the file one of Keras")
    return {
        slot.state: (scope if k == 0 else f"{scope}_{k}", factor_of(optimizer, group, slot.state, False))
        for k, slot in enumerate(slots)
    }


def keras_groups(optimizer: RowOptimizer, group: dict[str, Any]) -> list[list[str]]:
    """Return the states whose slots Keras makes together for a variable, in Keras's order."""
    slots = _known(optimizer, group)[1]
    numbers = sorted({slot.group for slot in slots})
    return [[slot.state for slot in slots if slot.group == number] for number in numbers]


def factor_of(optimizer: RowOptimizer, group: dict[str, Any], state: str, is_keras: bool) -> float:
    """
    Return the number by which a slot is multiplied to become a state of ``optim``.

    TensorFlow's RMSProp, and Keras's momentum, keep steps in a slot where torch keeps gradients.
    """
    lr = float(group["lr"])
    has_steps = state == "momentum_buffer" and (is_keras or isinstance(optimizer, optim.RMSprop))
    if not has_steps:
        return 1.0
    if not lr > 0:
        raise ValueError(f"lr must be above 0, as TensorFlow's momentum is a multiple of it, got {lr}")
    return -1 / lr if isinstance(optimizer, optim.SGD) else 1 / lr


def _check_kind(source: Source, owner: str, optimizer: RowOptimizer) -> None:
    """Raise ``ValueError`` if the name of an optimizer in a file of Keras belongs to another kind than ours."""
    kind = re.sub(r"[_\d]", "", owner.rpartition("/")[2]).lower()
    ours = [x.__name__.lower() for kinds, _, _ in _SLOTS if isinstance(optimizer, kinds) for x in kinds]
    if kind in _KERAS_OPTIMIZERS and kind not in ours:
        raise ValueError(f"{source.path} has slots of Keras's {owner!r}, not of {type(optimizer).__name__}")


def check_rule(path: str, optimizer: RowOptimizer, group: dict[str, Any], slots: Slots) -> None:
    """Raise ``ValueError`` if no step of an optimizer is the step of the one whose slots a file has."""
    why = ""
    if isinstance(optimizer, optim.RMSprop) and group["eps"] != 0:
        why = f"optim.RMSprop adds eps to the root, and TensorFlow below it: eps must be 0, got {group['eps']}"
    if isinstance(optimizer, optim.Ftrl) and slots.are_keras:
        moves = "Keras's Ftrl moves rows without a gradient, and optim.Ftrl does not,"
        if group["l2_shrinkage"] != 0:
            why = f"{moves} under l2_shrinkage: it must be 0, got {group['l2_shrinkage']}"
        elif slots.steps == 0:
            why = f"{moves} in the first step, which the file is before"
    if why:
        name = "keras" if slots.are_keras else "v1"
        raise ValueError(
            f"{path}: {why}. Load the tables without optimizer, and the slots by import_slots into that of "
            f"compat.tensorflow.optimizers.{name}"
        )


# ---- Finding slots --------------------------------------------------------------------------------------------------


def find_slots(
    source: Source,
    variable: Found,
    optimizer: RowOptimizer,
    group: dict[str, Any],
    variables: Sequence[Found | None] | None,
) -> Slots:
    """
    Return the slots of a variable, under whichever of TensorFlow's names they have.

    Args:
        source: the file.
        variable: the table.
        optimizer: our optimizer, which determines the wanted slots.
        group: the parameter's group.
        variables: all trainable variables of a Keras model in order, which a file of weights does not contain.

    Raises:
        ValueError: slots are missing, or do not belong to one optimizer.
    """
    slots = _known(optimizer, group)[1]
    if source.is_h5:
        return _by_position(source, variable, optimizer, group, variables)
    by_object: dict[str, dict[str, Found]] = {}
    pattern = re.compile(rf"{re.escape(variable.name)}/\.OPTIMIZER_SLOT/(.+)/([^/]+)")
    for name, found in source.tensors.items():
        match = pattern.fullmatch(name)
        if match:
            by_object.setdefault(match[1], {})[match[2]] = found
    full = source.full_names.get(variable.name, variable.name).replace("/", "_")
    by_keras: dict[str, dict[str, Found]] = {}
    for name, other in source.full_names.items():
        owner, _, last = other.rpartition("/")
        slot_name = last.removeprefix(f"{full}_")
        if owner and slot_name != last and slot_name in _KERAS_SLOTS:
            by_keras.setdefault(owner, {}).setdefault(slot_name, source.tensors[name])
    ends = {} if group.get("amsgrad") else v1_slots(optimizer, group)
    named = {state: (f"{variable.name}/{end}", factor) for state, (end, factor) in ends.items()}
    if slots and len(named) == len(slots) and all(name in source.tensors for name, _ in named.values()):
        states = {state: (source.tensors[name], factor) for state, (name, factor) in named.items()}
        return Slots(states, steps_by_name(source, "", group))
    for all_owners, is_keras_3 in ((by_object, False), (by_keras, True)):
        wanted = {slot.state: (slot.keras,) if is_keras_3 else slot.object for slot in slots}
        owners = [owner for owner, has in all_owners.items() if all(set(names) & set(has) for names in wanted.values())]
        if len(owners) > 1:
            raise ValueError(f"{source.path}: {variable.name!r} must have slots of one optimizer, got {listed(owners)}")
        if owners and slots:
            owner, has = owners[0], all_owners[owners[0]]
            if is_keras_3:
                _check_kind(source, owner, optimizer)
            more = set(has) - {name for names in wanted.values() for name in names}
            if more - ({"momentum"} if isinstance(optimizer, optim.RMSprop) and not is_keras_3 else set()):
                raise ValueError(
                    f"{source.path} must have slots of {type(optimizer).__name__} for {variable.name!r}, as its "
                    f"hyperparameters say: {listed(wanted)}; it has {listed(has)}"
                )
            is_keras = is_keras_3 or f"{owner}/iter" in source.tensors
            states = {
                state: (next(has[name] for name in names if name in has), factor_of(optimizer, group, state, is_keras))
                for state, names in wanted.items()
            }
            return Slots(states, steps_by_name(source, owner, group), is_keras)
    if not slots:
        return Slots({}, steps_by_name(source, "", group))
    has_slots = {name for name in source.tensors if name.startswith(f"{variable.name}/")}
    has_slots |= {f"{owner}/{full}_{name}" for owner, has in by_keras.items() for name in has}
    raise ValueError(
        f"{source.path} must have the slots {listed(end for end, _ in ends.values())} of {variable.name!r}, as "
        f"{type(optimizer).__name__} keeps {listed(slot.state for slot in slots)}; it has {listed(has_slots) or 'none'}"
    )


def _by_position(
    source: Source,
    variable: Found,
    optimizer: RowOptimizer,
    group: dict[str, Any],
    variables: Sequence[Found | None] | None,
) -> Slots:
    """Return slots of a file of Keras, which numbers the optimizer's variables and does not name them."""
    found = {int(m[1]): x for name, x in source.tensors.items() if (m := re.fullmatch(r"optimizer/vars/(\d+)", name))}
    if sorted(found) != list(range(len(found))) or not found:
        raise ValueError(f"{source.path} must have an optimizer's variables, numbered from 0, got {sorted(found)}")
    _check_kind(source, source.full_names.get("optimizer/vars/0", "").rpartition("/")[0], optimizer)
    groups = keras_groups(optimizer, group)
    total = sum(map(len, groups))
    begin = 2 if len(found) > 1 and found[1].shape == () else 1
    values = [found[k] for k in range(begin, len(found))]
    if total == 0:
        return Slots({}, found[0].step_count())
    count, rest = divmod(len(values), total)
    if variables is None:
        same = [k for k, value in enumerate(values) if value.shape == variable.shape]
        if rest or len(same) != total:
            raise ValueError(
                f"{source.path} does not say which slots are those of {variable.name!r}: of {len(values)}, "
                f"{len(same)} have its shape {list(variable.shape)}, where {type(optimizer).__name__} has {total}: "
                "give the names of all trainable variables, in the order of model.trainable_variables, as variables"
            )
        position = same[0] // len(groups[0])
    else:
        names = ["" if x is None else x.name for x in variables]
        if variable.name not in names or len(names) * total != len(values):
            raise ValueError(
                f"{source.path}: variables must be all {len(values) / total:g} that the {len(values)} slots are of, "
                f"and {variable.name!r} one of them, got {len(names)}: {listed(names)}"
            )
        position = names.index(variable.name)
    states, before = {}, 0
    for states_of in groups:
        for k, state in enumerate(states_of):
            slot = values[before + position * len(states_of) + k]
            if slot.shape != variable.shape:
                raise ValueError(
                    f"{source.path}: {slot.name!r}, by its place {state} of {variable.name!r}, must have its shape "
                    f"{list(variable.shape)}, got {list(slot.shape)}"
                )
            states[state] = slot, factor_of(optimizer, group, state, True)
        before += count * len(states_of)
    return Slots(states, found[0].step_count(), True)


# ---- Steps ----------------------------------------------------------------------------------------------------------


def steps_by_name(source: Source, owner: str, group: dict[str, Any]) -> int | None:
    """Return how many steps an optimizer has taken, by the count or the powers of betas that a checkpoint has."""
    begin = f"{owner}/" if owner else ""
    for name in (f"{begin}iter", f"{begin}_iterations", f"{begin}iteration"):
        for found in source.named(name) if owner else []:
            return found.step_count()
    counts = [found.step_count() for found in source.named("global_step")]
    if "betas" not in group:
        return counts[0] if counts else None
    for beta, name in zip(group["betas"], ("beta1_power", "beta2_power"), strict=True):
        ending = [x for key, x in source.tensors.items() if key == name or key.endswith(f"/{name}")]
        its = source.named(f"{begin}{name}") or (ending if len(ending) == 1 else [])
        power = its[0].number() if its else 0.0
        if power > 1e-30:  # below, a power in float32 has few bits and then none
            steps, error = _steps_of_power(source.path, its[0].name, power, float(beta))
            near = [count for count in counts if abs(count - steps) <= error]
            return near[0] if near else steps
    return counts[0] if counts else None


def _steps_of_power(path: str, name: str, power: float, beta: float) -> tuple[int, float]:
    """Return t of ``beta ** (t + 1)``, which TensorFlow multiplies step by step in float32, and the largest error."""
    exponent = math.log(power) / math.log(beta) if 0 < beta < 1 and power < 1 else 0.0
    steps = round(exponent)
    error = 0.01 + 1e-7 * steps / -math.log(beta) if 0 < beta < 1 else 0.0
    if steps < 1 or abs(exponent - steps) > error:
        raise ValueError(
            f"{path}: {name!r} must be a power of the optimizer's beta {beta}, got {power}: the hyperparameters must "
            "be those of TensorFlow"
        )
    return steps - 1, error


def beta_powers(betas: Sequence[float], steps: int) -> list[np.float32]:
    """Return ``beta ** (steps + 1)`` of each beta, multiplied step by step in float32, as TensorFlow does."""
    result = []
    for beta in betas:
        factor = power = np.float32(beta)
        with np.errstate(under="ignore"):
            for _ in range(steps):
                power = power * factor
                if power == 0:
                    break
        result.append(np.float32(power))
    return result
