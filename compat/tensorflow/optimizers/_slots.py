"""Import the state of a TensorFlow optimizer into one of ours, and export it back."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...checkpoints.names import keras_order
from ...checkpoints.sources import Found, Source, open_source
from ._keras import KerasOptimizer
from ._lazy_adam import LazyAdam
from ._optimizer import Optimizer

#: A source's values, in its order: the name of each, and a function that reads it when it is needed.
_Entries = list[tuple[str, Callable[[], Any]]]
_CHECKPOINTED = "/.ATTRIBUTES/VARIABLE_VALUE"
#: The Keras variables that a checkpoint names by attribute, not by number, and their places among the variables.
_ATTRIBUTES = {"_iterations": 0, "_learning_rate": 1, "_u_product": 10**9}


def import_slots(
    optimizer: Optimizer, source: Any, variables: Sequence[Any] | None = None, transposed: Iterable[Tensor] = ()
) -> None:
    """
    Take over the slots and the count of steps of a TensorFlow optimizer, so that training goes on where it was.

    The hyperparameters must be the same on both sides. From Keras the learning rate is taken over too, if both sides
    have a number. The parameters themselves are not taken over: copy them as for any model.

    Args:
        optimizer: an optimizer of ``v1`` or ``keras``, or a :class:`.LazyAdam`.
        source: the origin of the slots, one of

            - for an optimizer of Keras: the optimizer, a list of its ``variables``, or a mapping of names to arrays in
              that order: their paths, the numbers of ``optimizer/vars`` in a ``.keras`` file, or a checkpoint;
            - for one of ``tf.compat.v1.train``: the optimizer, or a mapping of names to arrays, as
              :func:`export_slots` makes it: the names in a checkpoint. A ``global_step`` in it sets ``iterations``;
            - a reader of checkpoints, ``tf.train.load_checkpoint(...)``, or the path of a checkpoint, for all of them;
              for an optimizer of Keras also the path of a ``.keras`` or ``.weights.h5`` file, which needs h5py.

        variables: TensorFlow's names of the parameters, in the order in which ``optimizer`` has them: names, paths or
            the variables themselves. For a Keras optimizer they may be left out if the parameters have the order in
            which it was built. Where a file or a list numbers the slots, the parameters must have that order.
        transposed: the parameters that are TensorFlow's transposed, as the weights of ``torch.nn.Linear`` are.

    Raises:
        ValueError: for a slot that is missing or has another shape, or a file that is damaged; then nothing has been
            changed.

    Example:
        >>> from torchsparse_rec.compat.tensorflow.optimizers import v1
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = v1.AdagradOptimizer([weight], 0.5)
        >>> import_slots(optimizer, {"bias/Adagrad": np.array([1.0, 4.0], np.float32)}, ["bias"])
        >>> optimizer.state[weight]["accumulator"].tolist()
        [1.0, 4.0]
    """
    pairs = [(parameter, group) for group in optimizer.param_groups for parameter in group["params"]]
    if variables is not None and len(variables) != len(pairs):
        raise ValueError(f"variables must be {len(pairs)}, as the parameters are, got {len(variables)}")
    turned = {id(parameter) for parameter in transposed}
    if isinstance(source, (str, os.PathLike)):
        source = open_source(source, "div")
        if source.is_h5 and variables is not None:
            keras_order(source, [_name(v) for v in variables])
    if isinstance(optimizer, KerasOptimizer):
        found = _keras_values(optimizer, _keras_entries(source), variables)
    elif variables is None:
        raise ValueError("variables must say what TensorFlow calls the parameters, got None")
    elif hasattr(source, "get_slot"):
        found = _slots_of_optimizer(optimizer, source, variables)
    else:
        found = _named_values(optimizer, _entries(source), variables)
    slots, numbers = [], {}
    for (name, position), value in found.items():
        if position is None:
            numbers[name] = value
            continue
        parameter = pairs[position][0]
        slots.append((parameter, name, _as_slot(name, position, value, parameter, id(parameter) in turned)))
    for parameter, name, slot in slots:
        optimizer.state[parameter][name] = slot
    for name, value in numbers.items():
        for group in optimizer.param_groups:
            number = float(np.asarray(value))
            group[name] = int(number) if name == "iterations" else number


def export_slots(
    optimizer: Optimizer, variables: Sequence[Any] | None = None, transposed: Iterable[Tensor] = ()
) -> dict[str, np.ndarray]:
    """
    Return the slots and the count of steps under TensorFlow's names, as :func:`import_slots` takes them.

    For ``keras``, the values are in the order of Keras's ``variables``: ``set_weights(list(result.values()))`` of
    an optimizer that is built takes them. bfloat16 becomes float32, since numpy does not have it.

    Args:
        optimizer: an optimizer of ``v1`` or ``keras``, or a :class:`.LazyAdam`.
        variables: the names of the parameters, in their order: names, paths or TensorFlow's variables; by default
            ``variable_0``, ``variable_1``, ...
        transposed: the argument of :func:`import_slots`.

    Example:
        >>> from torchsparse_rec.compat.tensorflow.optimizers import v1
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> export_slots(v1.AdagradOptimizer([weight], 0.5, 4.0), ["bias"])
        {'bias/Adagrad': array([4., 4.], dtype=float32), 'global_step': array(0)}
    """
    pairs = [(parameter, group) for group in optimizer.param_groups for parameter in group["params"]]
    turned = {id(parameter) for parameter in transposed}
    names = [_name(v) for v in variables] if variables is not None else [f"variable_{i}" for i in range(len(pairs))]
    if len(names) != len(pairs):
        raise ValueError(f"variables must be {len(pairs)}, as the parameters are, got {len(names)}")
    result: dict[str, np.ndarray] = {}
    for name, position, key in _layout(optimizer, names):
        if position is None:
            value = optimizer.param_groups[0][name]
            dtypes: dict[str, Any] = {"iterations": np.int64, "u_product": np.float64}
            result[key] = np.array(value, dtypes.get(name, np.float32))
            continue
        parameter, group = pairs[position]
        optimizer.slots_of(parameter, group)
        slot = optimizer.state[parameter].get(name, torch.zeros_like(parameter)).detach().cpu()
        slot = slot.float() if slot.dtype == torch.bfloat16 else slot
        result[key] = (slot.T if id(parameter) in turned else slot).numpy().copy()
    return result


# ---- Slots and their names in TensorFlow ----------------------------------------------------------------------------


def _layout(optimizer: Optimizer, names: Sequence[str]) -> list[tuple[str, int | None, str]]:
    """Return each slot, its parameter (None: a number of the groups) and TensorFlow's name, in TensorFlow's order."""
    groups = [group for group in optimizer.param_groups for _ in group["params"]]
    slots = [list(optimizer._slots(group)) for group in groups]
    if isinstance(optimizer, KerasOptimizer):
        return _keras_layout(optimizer, names, slots)
    result: list[tuple[str, int | None, str]] = []
    if isinstance(optimizer, LazyAdam):
        result = [(s, i, f"{optimizer.name}/{name}/{s}") for i, name in enumerate(names) for s in slots[i]]
        return [*result, ("iterations", None, f"{optimizer.name}/iter")]
    for position, name in enumerate(names):
        scopes: list[str] = []
        for slot, scope in zip(slots[position], optimizer.slot_scopes, strict=False):
            earlier = scopes.count(scope)
            result.append((slot, position, f"{name}/{scope}" + (f"_{earlier}" if earlier else "")))
            scopes.append(scope)
    powers = [name for name in ("beta1_power", "beta2_power") if name in optimizer.param_groups[0]]
    return [*result, *((name, None, name) for name in powers), ("iterations", None, "global_step")]


def _keras_layout(
    optimizer: KerasOptimizer, names: Sequence[str], slots: list[list[str]]
) -> list[tuple[str, int | None, str]]:
    keys = [name.replace("/", "_") for name in names]
    result: list[tuple[str, int | None, str]] = [("iterations", None, "iteration")]
    result += [] if optimizer._schedule else [("lr", None, "learning_rate")]
    together = [("average",)] if optimizer.use_ema else []
    together += [("gradient_accumulator",)] if optimizer.gradient_accumulation_steps else []
    for group in (*together, *(optimizer.slot_groups or (optimizer.slot_names,))):
        for position, key in enumerate(keys):
            result += [(s, position, f"{key}_{s}") for s in group if s in slots[position] or (s,) in together]
    result += [("u_product", None, "variable")] if "u_product" in optimizer.param_groups[0] else []
    return [(name, position, f"{optimizer.name}/{key}") for name, position, key in result]


# ---- Sources --------------------------------------------------------------------------------------------------------


def _name(variable: Any) -> str:
    """Return the name of a variable: a string, a Keras variable or another of TensorFlow's."""
    if isinstance(variable, str):
        return variable
    return variable.path if hasattr(variable, "path") else variable.name.split(":")[0]


def _entries_of_file(source: Source) -> _Entries:
    """Return the tensors of a checkpoint by name, or an optimizer's of a file of Keras by number."""
    if source.is_h5:
        begin = "optimizer/vars/"
        found = {name.removeprefix(begin): x for name, x in source.tensors.items() if name.startswith(begin)}
        if not found:
            raise ValueError(f"{source.path} must have an optimizer's variables, as of a compiled model: it has none")
    else:
        end = _CHECKPOINTED if source.has_objects else ""
        found = {f"{name}{end}": x for name, x in source.tensors.items()}
    return [(name, partial(_as_array, x)) for name, x in found.items()]


def _as_array(found: Found) -> np.ndarray:
    read = found.read()
    return (read.float() if read.dtype == torch.bfloat16 else read).numpy()


def _entries(source: Any) -> _Entries:
    if isinstance(source, Source):
        return _entries_of_file(source)
    if hasattr(source, "get_variable_to_shape_map"):
        return [(name, partial(source.get_tensor, name)) for name in source.get_variable_to_shape_map()]
    if not hasattr(source, "keys"):
        raise ValueError(f"source must be an optimizer, a mapping, a reader or a path, got {type(source).__name__}")
    return [(name.removesuffix(":0"), partial(source.__getitem__, name)) for name in source.keys()]


def _keras_entries(source: Any) -> _Entries:
    """Return the name of each of Keras's variables and a function that reads it, in Keras's order."""
    variables = getattr(source, "variables", source)
    if isinstance(variables, (list, tuple)) and not isinstance(source, Source):
        return [(getattr(v, "path", ""), partial(np.asarray, v)) for v in variables]
    entries = _entries(source)
    ordered: list[tuple[int, Callable[[], Any]]] = []
    for name, read in entries:
        # A file names all variables by number; a checkpoint names some by attribute, and the others keep their numbers.
        match = re.fullmatch(r"(?:.*/_variables/)?(\d+)" + f"(?:{_CHECKPOINTED})?", name)
        last = name.removesuffix(_CHECKPOINTED).split("/")[-1]
        if match:
            ordered.append((int(match[1]), read))
        elif name.endswith(_CHECKPOINTED) and last in _ATTRIBUTES:
            ordered.append((_ATTRIBUTES[last], read))
    return [("", read) for _, read in sorted(ordered, key=lambda pair: pair[0])] if ordered else entries


def _keras_values(
    optimizer: KerasOptimizer, entries: _Entries, variables: Sequence[Any] | None
) -> dict[tuple[str, int | None], Any]:
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    names = [_name(v) for v in variables] if variables is not None else [""] * count
    layout = _layout(optimizer, names)
    if variables is not None and any(name for name, _ in entries):
        return _by_name(optimizer, layout, {name.split("/")[-1]: read for name, read in entries})
    if len(entries) == len(layout) + 1 and optimizer._schedule:
        del entries[1]
    elif len(entries) == len(layout) - 1 and not optimizer._schedule:
        del layout[1]
    if len(entries) != len(layout):
        expected = ", ".join(key.split("/")[-1].lstrip("_") for _, _, key in layout)
        raise ValueError(f"source must have {len(layout)} values, {expected}; got {len(entries)}")
    return {(slot, i): read() for (slot, i, _), (_, read) in zip(layout, entries, strict=True)}


def _by_name(
    optimizer: Optimizer, layout: list[tuple[str, int | None, str]], named: dict[str, Callable[[], Any]]
) -> dict[tuple[str, int | None], Any]:
    found = {}
    for slot, position, key in layout:
        last = key.split("/")[-1]
        # The product of Nadam is called variable, or variable_1 if there are other variables of that name.
        matches = [name for name in named if name == last or (slot == "u_product" and name.startswith("variable_"))]
        if matches:
            found[slot, position] = named[matches[0]]()
        elif position is not None or slot == "iterations":
            raise ValueError(f"source has no {last!r}; it has {', '.join(sorted(named)[:20])}")
    return found


def _slots_of_optimizer(
    optimizer: Optimizer, source: Any, variables: Sequence[Any]
) -> dict[tuple[str, int | None], Any]:
    """Return the slots of an optimizer of ``tf.compat.v1.train`` that runs eagerly."""
    found: dict[tuple[str, int | None], Any] = {}
    for slot, position, _ in _layout(optimizer, [""] * len(variables)):
        if position is not None:
            found[slot, position] = source.get_slot(variables[position], slot)
            if found[slot, position] is None:
                raise ValueError(f"source has no slot {slot!r} of {_name(variables[position])}")
    for variable in source.variables():
        if _name(variable) in optimizer.param_groups[0]:
            found[_name(variable), None] = variable
    return found


def _named_values(
    optimizer: Optimizer, entries: _Entries, variables: Sequence[Any]
) -> dict[tuple[str, int | None], Any]:
    names, named, found = [_name(v) for v in variables], dict(entries), {}
    layout = _layout(optimizer, names)
    for slot, position, key in layout:
        if position is None:
            # In object-based checkpoints a number of the groups belongs to the optimizer.
            last = key.split("/")[-1]
            matches = [n for n in named if n == key or n.removesuffix(_CHECKPOINTED).endswith(f"/{last}")]
        else:
            start, end = f"{names[position]}/.OPTIMIZER_SLOT/", f"/{slot}{_CHECKPOINTED}"
            matches = [n for n in named if n == key or (n.startswith(start) and n.endswith(end))]
            matches = matches or _renamed(named, key, [k for _, i, k in layout if i == position])
        if matches:
            found[slot, position] = named[matches[0]]()
        elif slot != "iterations":
            raise ValueError(f"source has no {key!r}; it has {', '.join(sorted(named)[:20])}")
    return found


def _renamed(named: Iterable[str], key: str, keys: list[str]) -> list[str]:
    """Return the names found for a slot, one or none: eager TensorFlow may call it Adam_4 if others came before."""
    scope = re.sub(r"_\d+$", "", key)
    found = [re.fullmatch(re.escape(scope) + r"_(\d+)", name) for name in named]
    matches = sorted((int(match[1]), match[0]) for match in found if match)
    expected = [other for other in keys if re.sub(r"_\d+$", "", other) == scope]
    return [matches[expected.index(key)][1]] if len(matches) == len(expected) else []


def _as_slot(name: str, position: int, value: Any, parameter: Tensor, is_transposed: bool) -> Tensor:
    """Return a copy of an array as a tensor with the parameter's dtype and device, in the parameter's shape."""
    array = np.asarray(value)
    # numpy has no bfloat16: TensorFlow's is a dtype of an extension; float32 holds its values.
    tensor = torch.from_numpy(array.astype(np.float32) if array.dtype.name == "bfloat16" else np.array(array))
    tensor = tensor.T if is_transposed else tensor
    if tensor.shape != parameter.shape:
        raise ValueError(
            f"{name} of parameter {position} must have its shape, {list(parameter.shape)}, got {list(tensor.shape)}"
        )
    return tensor.to(parameter.device, parameter.dtype, copy=True, memory_format=torch.contiguous_format)
