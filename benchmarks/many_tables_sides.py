"""The training step of many tables in this library, in torch, in TensorFlow and in FBGEMM."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import torchsparse_rec

from .many_tables import EPS, INITIAL_SUM, LEARNING_RATE, Problem, Side
from .rows import Options, fbgemm, tensorflow

# How TensorFlow looks up: by its own functions for any number of ids, or by a gather, which needs equal numbers.
TENSORFLOW_FORMS = ("safe_embedding_lookup_sparse", "embedding_lookup_sparse", "gather")


def our_side(rule: str, problem: Problem, split: Callable[[Any], None] = lambda collection: None) -> Side:
    """
    Make a step of our collection, which is updated within backward.

    Args:
        rule: the optimizer's rule.
        problem: the problem to train.
        split: a function that is given the collection before its optimizer is made, and may split its tables over
            ranks.
    """
    shape, keys = problem.shape, [f"f{n}" for n in range(len(problem.shape.hots))]
    names = [f"{key}_{part}" for part in range(len(shape.parts)) for key in keys]
    option = torchsparse_rec.variable.EmbeddingVariableOption() if shape.grows else None
    tables = [
        torchsparse_rec.nn.EmbeddingBagConfig(
            shape.rows, dim, f"{key}_{part}", feature_names=[key], pooling=mode, ev_option=option
        )
        for part, (dim, mode) in enumerate(shape.parts)
        for key in keys
    ]
    collection = torchsparse_rec.nn.EmbeddingBagCollection(
        tables, grad_mode="fused", device=torch.device(problem.device)
    )
    modules: Any = collection.embedding_bags
    every_row = torch.arange(shape.rows, device=problem.device)
    if shape.grows:
        for name, table in zip(names, problem.tables, strict=True):
            modules[name].insert(every_row, table)
    else:
        collection.load_state_dict(
            {f"embedding_bags.{name}.weight": table for name, table in zip(names, problem.tables, strict=True)}
        )
    split(collection)
    makers: dict[str, Callable[[], torch.optim.Optimizer]] = {
        "sgd": lambda: torchsparse_rec.optim.SGD(collection.parameters(), lr=LEARNING_RATE, in_backward=True),
        "adagrad": lambda: torchsparse_rec.optim.Adagrad(
            collection.parameters(), lr=LEARNING_RATE, eps=EPS, initial_accumulator_value=INITIAL_SUM, in_backward=True
        ),
        "rowwise_adagrad": lambda: torchsparse_rec.optim.RowWiseAdagrad(
            collection.parameters(), lr=LEARNING_RATE, eps=EPS, initial_accumulator_value=INITIAL_SUM, in_backward=True
        ),
    }
    optimizer = makers[rule]()
    gradient = torch.cat(problem.gradients, 1)
    inputs = itertools.cycle(
        [torchsparse_rec.KeyedJaggedTensor(keys, ids, offsets=problem.offsets).sync() for ids in problem.batches]
    )

    def step() -> None:
        collection(next(inputs)).values().backward(gradient)
        optimizer.step()
        optimizer.zero_grad()

    def trained() -> list[Tensor]:
        if shape.grows:
            return [modules[name].lookup(every_row) for name in names]
        state = collection.state_dict()
        return [state[f"embedding_bags.{name}.weight"] for name in names]

    return Side(step, trained)


def torch_side(rule: str, problem: Problem) -> Side:
    """Make a step that loops over torch.nn.EmbeddingBag with sparse gradients, on the problem's own tables."""
    shape, copies = problem.shape, len(problem.shape.parts)
    modes = [mode for _, mode in shape.parts for _ in shape.hots]
    bags = [
        torch.nn.EmbeddingBag(
            shape.rows, table.shape[1], mode=mode, sparse=True, include_last_offset=True, _weight=table
        )
        for mode, table in zip(modes, problem.tables, strict=True)
    ]
    weights = [bag.weight for bag in bags]
    gradients = [
        part.contiguous()
        for (dim, _), gradient in zip(shape.parts, problem.gradients, strict=True)
        for part in gradient.split(dim, 1)
    ]
    offsets = [torch.arange(shape.batch + 1, device=problem.device) * hot for hot in shape.hots] * copies
    inputs = itertools.cycle([list(problem.by_feature(ids)) * copies for ids in problem.batches])
    update = torch_update(weights, rule)

    def step() -> None:
        outputs = [bag(ids, starts) for bag, ids, starts in zip(bags, next(inputs), offsets, strict=True)]
        torch.autograd.backward(outputs, gradients)
        update()

    return Side(step, lambda: [weight.detach() for weight in weights])


def torch_update(weights: list[Tensor], rule: str) -> Callable[[], None]:
    """Return the update: torch's optimizer and zero_grad; for row-wise Adagrad, which torch lacks, its operations."""
    # This is the default, but unless it is called, torch warns of its own optimizer's gradients.
    torch.sparse.check_sparse_tensor_invariants.disable()
    if rule == "rowwise_adagrad":
        sums = [torch.full(weight.shape[:1], INITIAL_SUM, device=weight.device) for weight in weights]
        return lambda: rowwise_adagrad(weights, sums)
    optimizer = (
        torch.optim.SGD(weights, lr=LEARNING_RATE)
        if rule == "sgd"
        else torch.optim.Adagrad(weights, lr=LEARNING_RATE, eps=EPS, initial_accumulator_value=INITIAL_SUM)
    )

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return update


@torch.no_grad()
def rowwise_adagrad(weights: list[Tensor], sums: list[Tensor]) -> None:
    """Update weights by row-wise Adagrad on their sparse gradients, and drop the gradients."""
    for weight, total in zip(weights, sums, strict=True):
        assert weight.grad is not None
        grad = weight.grad.coalesce()
        rows, values = grad.indices()[0], grad.values()
        total.index_add_(0, rows, values.square().mean(1))
        values.div_((total.index_select(0, rows).sqrt_().add_(EPS)).unsqueeze(1))
        weight.index_add_(0, rows, values, alpha=-LEARNING_RATE)
        weight.grad = None


def tensorflow_side(options: Options, rule: str, form: str, problem: Problem) -> Side:
    """
    Make a step in a tf.function that loops over the tables and calls the operators of TensorFlow's optimizers.

    The sparse lookups look up distinct ids, so that their gradients have distinct ids too. After a gather equal ids are
    merged first, as in every optimizer of TensorFlow but gradient descent.
    """
    tf = tensorflow(options)
    shape = problem.shape
    tables = [tf.Variable(table.numpy()) for table in problem.tables]
    sums = [tf.Variable(tf.fill(table.shape, INITIAL_SUM)) for table in tables] if rule == "adagrad" else []
    lookups = [(hot, mode) for _, mode in shape.parts for hot in shape.hots]
    places = {hot: tf.constant(_places(shape.batch, hot).numpy()) for hot in shape.hots}
    gradients = [
        tf.constant(part.numpy())
        for (dim, _), gradient in zip(shape.parts, problem.gradients, strict=True)
        for part in gradient.split(dim, 1)
    ]
    rate, eps = tf.constant(LEARNING_RATE), tf.constant(EPS)

    def look_up(table: Any, ids: Any, hot: int, mode: str) -> Any:
        if form != "gather":
            sparse = tf.SparseTensor(places[hot], ids, [shape.batch, hot])
            return getattr(tf.nn, form)(table, sparse, None, combiner=mode)
        rows = tf.nn.embedding_lookup(table, ids)
        if hot == 1:
            return rows
        pooled = tf.reduce_mean if mode == "mean" else tf.reduce_sum
        return pooled(tf.reshape(rows, [shape.batch, hot, -1]), 1)

    def apply(n: int, slices: Any) -> None:
        values, indices = slices.values, slices.indices
        if rule == "sgd":
            tf.raw_ops.ResourceScatterSub(resource=tables[n].handle, indices=indices, updates=rate * values)
            return
        if form == "gather":
            indices, positions = tf.unique(indices)
            values = tf.math.unsorted_segment_sum(values, positions, tf.shape(indices)[0])
        tf.raw_ops.ResourceSparseApplyAdagradV2(
            var=tables[n].handle, accum=sums[n].handle, lr=rate, epsilon=eps, grad=values, indices=indices
        )

    @tf.function
    def step(batch: list[Any]) -> Any:
        with tf.GradientTape() as tape:
            given = zip(tables, batch * len(shape.parts), lookups, strict=True)
            outputs = [look_up(table, ids, hot, mode) for table, ids, (hot, mode) in given]
        for n, slices in enumerate(tape.gradient(outputs, tables, output_gradients=gradients)):
            apply(n, slices)
        return outputs[0]

    batches = [[tf.constant(ids.numpy()) for ids in problem.by_feature(batch)] for batch in problem.batches]
    inputs = itertools.cycle(batches)
    return Side(lambda: step(next(inputs)), lambda: [torch.from_numpy(table.numpy()) for table in tables])


def _places(batch: int, hot: int) -> Tensor:
    """Return the row and column of each id in a batch, ``[batch * hot, 2]``."""
    places = torch.arange(batch * hot)
    return torch.stack([places // hot, places % hot], 1)


def fbgemm_side(options: Options, rule: str, problem: Problem) -> Side:
    """
    Make a step of FBGEMM's batched tables, with a module for each part, because a module has one pooling.

    FBGEMM's rows have at least four columns. A table of one column gets four equal ones with equal gradients: the mean
    over a row's squares stays the same.
    """
    training = fbgemm(options)
    kinds = {
        "sgd": training.OptimType.EXACT_SGD,
        "adagrad": training.OptimType.EXACT_ADAGRAD,
        "rowwise_adagrad": training.OptimType.EXACT_ROWWISE_ADAGRAD,
    }
    poolings = {"mean": training.PoolingMode.MEAN, "sum": training.PoolingMode.SUM}
    shape, count = problem.shape, len(problem.shape.hots)
    modules, gradients, trained = [], [], []
    for part, ((dim, mode), gradient) in enumerate(zip(shape.parts, problem.gradients, strict=True)):
        copies = 4 if dim == 1 else 1
        place = (shape.rows, dim * copies, training.EmbeddingLocation.HOST, training.ComputeDevice.CPU)
        module = training.SplitTableBatchedEmbeddingBagsCodegen(
            [place] * count,
            optimizer=kinds[rule],
            learning_rate=LEARNING_RATE,
            eps=EPS,
            pooling_mode=poolings[mode],
            bounds_check_mode=training.BoundsCheckMode.NONE,
            device=torch.device("cpu"),
        )
        weights = module.split_embedding_weights()
        for weight, table in zip(weights, problem.tables[part * count : (part + 1) * count], strict=True):
            weight.copy_(table.expand_as(weight))
        if rule != "sgd":
            for (state,) in module.split_optimizer_states():
                state.fill_(INITIAL_SUM)
        modules.append(module)
        gradients.append(gradient.repeat_interleave(copies, 1))
        trained += [weight[:, :dim] for weight in weights]
    inputs = itertools.cycle(problem.batches)

    def step() -> None:
        ids = next(inputs)
        torch.autograd.backward([module(ids, problem.offsets) for module in modules], gradients)

    return Side(step, lambda: trained)
