"""The optimizers that the examples of many tables offer. They treat the elements of a row one by one."""

from __future__ import annotations

from ..optim import SGD, Adadelta, Adagrad, Adam, AdamW, Ftrl, RMSprop

# By name the class, its default learning rate, and how many numbers it keeps of each weight.
_ALL = {
    "sgd": (SGD, 0.1, 0),
    "adagrad": (Adagrad, 0.05, 1),
    "adam": (Adam, 1e-3, 2),
    "adamw": (AdamW, 1e-3, 2),
    "rmsprop": (RMSprop, 1e-3, 1),
    "adadelta": (Adadelta, 1.0, 2),
    "ftrl": (Ftrl, 0.05, 2),
}
OPTIMIZERS = {name: kind for name, (kind, _, _) in _ALL.items()}
LEARNING_RATES = {name: rate for name, (_, rate, _) in _ALL.items()}
STATES = {name: states for name, (_, _, states) in _ALL.items()}
