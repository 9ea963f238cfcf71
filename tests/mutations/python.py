"""
The faults that ``make mutate`` plants in Python's sources, one at a time; each must turn the family's tests red.

They are mistakes that are common in such code: five or six of each kind.
"""

from __future__ import annotations

from .mutation import Mutation, Table

KINDS = (
    "sign",  # a changed sign or choice
    "bound",
    "dtype",
    "stale",  # a kept value that is out of date
    "order",  # a step that must come first comes later
    "lock",  # a lock that is no longer taken
)

FAULTS = {
    "torchsparse_rec/nn/quantize.py": [
        ("sign", "weight if max_norm is None else clipped_rows(weight, max_norm)", "weight", "quantized")
    ],
    "torchsparse_rec/tables/steps.py": [("stale", "kind != self.kind and torch", "False and torch", "optim")],
    "torchsparse_rec/nn/quantized.py": [
        ("sign", "rows if self._max_norm is None else clipped_rows(rows, self._max_norm)", "rows", "quantized")
    ],
    "torchsparse_rec/ops/_sparse_tensor_kernels.py": [
        ("sign", "torch.where(owners == 0, flat, 0).sum()", "torch.where(owners != 0, flat, 0).sum()", "sparse_tensor")
    ],
    "torchsparse_rec/ops/scores_top_k.py": [
        ("sign", "found = keys[found].where(found >= 0, -1)", "found = keys[found]", "scores"),
        ("bound", "(ordered[places] == ids) & (ids != -1)", "ordered[places] == ids", "scores"),
    ],
    "torchsparse_rec/ops/embedding.py": [
        ("sign", "(indices == padding_idx).unsqueeze(1)", "(indices != padding_idx).unsqueeze(1)", "embedding")
    ],
    "torchsparse_rec/optim/_dense.py": [
        ("sign", '-parameter.grad if group["maximize"] else parameter.grad', "parameter.grad", "optim")
    ],
    "compat/tensorflow/optimizers/_keras_rules.py": [
        ("sign", "m * momentum - change", "m * momentum + change", "compat"),
        (
            "order",
            "        parameter.sub_((m * beta_1 + dense(changed(gradient, lambda g: g * rest_1))).sign_().mul_(lr))\n"
            "        m.mul_(beta_2).add_(dense(changed(gradient, lambda g: g * rest_2)))\n",
            "        m.mul_(beta_2).add_(dense(changed(gradient, lambda g: g * rest_2)))\n"
            "        parameter.sub_((m * beta_1 + dense(changed(gradient, lambda g: g * rest_1))).sign_().mul_(lr))\n",
            "compat",
        ),
    ],
    "torchsparse_rec/features/statistics.py": [
        (
            "sign",
            "squares + distance**2 * self.counts * share",
            "squares - distance**2 * self.counts * share",
            "features",
        )
    ],
    "torchsparse_rec/ops/jagged.py": [
        ("bound", "places < offsets[1:].unsqueeze", "places <= offsets[1:].unsqueeze", "jagged"),
        ("dtype", "offsets.long().diff()", "offsets.diff()", "jagged"),
    ],
    "torchsparse_rec/nn/gradients.py": [
        ("sign", "self.noted == (backward_number(), grad._nnz())", "self.noted[1] == grad._nnz()", "nn")
    ],
    "torchsparse_rec/ops/autograd.py": [("sign", "and not is_wrapped(weight)", "and weight is not None", "nn")],
    "torchsparse_rec/nn/embedding_bag.py": [("bound", "if length == 0:", "if length < 0:", "nn")],
    "torchsparse_rec/data/_epoch.py": [
        ("bound", "-(-total // self.batch_size)", "total // self.batch_size + 1", "prebatched")
    ],
    "torchsparse_rec/variable/rows.py": [
        ("bound", "lambda rows, versions: versions < before", "lambda rows, versions: versions <= before", "variable"),
        ("bound", "if len(new) <= room:", "if len(new) >= 0:", "distributed"),
    ],
    "torchsparse_rec/features/_evaluate.py": [
        ("bound", "(ids >= column.number_buckets)", "(ids > column.number_buckets)", "features")
    ],
    "torchsparse_rec/tables/gradients.py": [
        ("dtype", "grad.to(dtype).coalesce() if grad.dtype != dtype else grad.coalesce()", "grad.coalesce()", "optim")
    ],
    "torchsparse_rec/ops/bucketize.py": [
        ("dtype", "torch.float64 if x.dtype == torch.float64 else torch.float32", "torch.float32", "bucketize")
    ],
    "torchsparse_rec/jagged/collate.py": [
        ("dtype", "np.ones(len(values), np.float32)", "np.ones(len(values))", "jagged")
    ],
    "compat/keras/bins.py": [("dtype", "mapped_values(bins, lambda values: values.to(torch.int32))", "bins", "compat")],
    "torchsparse_rec/nn/auto.py": [
        ("bound", "    if rows <= SMALL_TABLE:", "    if rows < SMALL_TABLE:", "nn"),
        ("bound", "    if rows <= ids:", "    if rows < ids:", "nn"),
    ],
    "torchsparse_rec/nn/_fused.py": [
        (
            "stale",
            "known is not None and (weights is None or all(map(is_, known.weights, weights))):",
            "known is not None:",
            "nn",
        ),
        (
            "lock",
            "        with _lock, as_stored():\n            wanted",
            "        with as_stored():\n            wanted",
            "nn",
        ),
    ],
    "torchsparse_rec/nn/streamed.py": [
        ("sign", "            grad += part[: end - begin]", "            grad -= part[: end - begin]", "nn"),
        ("bound", "bounds[number], bounds[number + 1]", "bounds[number], bounds[number + 1] - 1", "nn"),
        ("stale", "if states is None or not table.is_stale():", "if states is None or True:", "nn"),
    ],
    "torchsparse_rec/optim/_together.py": [
        (
            "stale",
            "            if parameter.dtype is not dtype or parameter.device != device:",
            "            if False:",
            "optim",
        )
    ],
    "torchsparse_rec/variable/cold.py": [
        (
            "stale",
            "        self._note_changed(keys)\n        self._tiers[0].put(keys, records)\n",
            "        self._tiers[0].put(keys, records)\n",
            "variable",
        )
    ],
    "torchsparse_rec/data/prebatched.py": [
        ("stale", "self._plan is None or self._plan.epoch != epoch:", "self._plan is None:", "prebatched"),
        (
            "order",
            "            self._position = i + numbers.step\n            yield self._tensors(batch)\n",
            "            yield self._tensors(batch)\n            self._position = i + numbers.step\n",
            "prebatched",
        ),
    ],
    "torchsparse_rec/checkpoint/_versions.py": [
        # A crash in between leaves a delta without the version on which it builds.
        (
            "order",
            "sorted(versions, reverse=True):\n            if kept",
            "sorted(versions):\n            if kept",
            "variable",
        )
    ],
    "torchsparse_rec/jagged/keyed_jagged_tensor.py": [
        (
            "order",
            "            weights = None if self._weights is None else _reordered(self._weights, known, indices)\n"
            "            known = [known[i] for i in indices]\n",
            "            known = [known[i] for i in indices]\n"
            "            weights = None if self._weights is None else _reordered(self._weights, known, indices)\n",
            "jagged",
        )
    ],
    "torchsparse_rec/checkpoint/growing.py": [
        # Rows that could not be saved are taken for saved.
        (
            "order",
            "        # Only now: a checkpoint that failed has saved nothing.\n        rows.note_saved(",
            "            rows.note_saved(",
            "variable",
        ),
        ("stale", 'max(each["optimizer_steps"] for each in metadata)', 'metadata[0]["optimizer_steps"]', "distributed"),
    ],
    "torchsparse_rec/tables/stale.py": [
        (
            "stale",
            "                _flush_among([args, kwargs])\n                if places",
            "                if places",
            "nn",
        )
    ],
    "torchsparse_rec/nn/_read.py": [
        ("lock", "        with clock.lock:\n", "        if True:\n", "nn"),
        ("stale", "if held is None or last is not plan:", "if held is None:", "nn"),
    ],
    "torchsparse_rec/nn/_route.py": [
        (
            "stale",
            "if weight is not known or not weight.requires_grad or weight.dtype is not dtype:",
            "if weight is not known:",
            "nn",
        ),
        ("stale", "if any(map(is_not, map(module.__dict__.get, _OPTIONS), way.options)):", "if False:", "nn"),
        ("stale", "if not any([is_parameter(weight) for weight in weights]):", "if True:", "nn"),
        ("stale", "if not are_trained(weights):", "if False:", "nn"),
    ],
    "torchsparse_rec/nn/_prepared.py": [
        ("stale", "if not weight.requires_grad or grad_of(weight) is not None:", "if not weight.requires_grad:", "nn")
    ],
    "torchsparse_rec/optim/_groups.py": [
        ("stale", "            if all(map(is_, known[1], group.values())):", "            if True:", "optim")
    ],
    "torchsparse_rec/variable/_tier.py": [
        (
            "lock",
            "        with self._lock:\n            if not self._is_open:",
            "        if True:\n            if not self._is_open:",
            "variable",
        )
    ],
    "torchsparse_rec/nn/embedding_variable.py": [
        (
            "lock",
            "            with self.writing():\n                rows = self.rows_of(ids, occurrences)",
            "            if True:\n                rows = self.rows_of(ids, occurrences)",
            "variable",
        )
    ],
    "torchsparse_rec/_lock.py": [
        (
            "lock",
            "            fcntl.flock(descriptor, fcntl.LOCK_EX | (fcntl.LOCK_NB if busy is not None else 0))\n",
            "",
            "variable",
        )
    ],
    "torchsparse_rec/distributed/shards.py": [
        ("sign", "(1.0, 1 / ranks.count) if exact", "(1.0, 1.0) if exact", "distributed"),
        ("sign", "call.signature if failed is None else 0", "call.signature", "distributed"),
    ],
    "torchsparse_rec/tables/blocks.py": [
        ("bound", "rank * -(-count // ranks)", "rank * (count // ranks)", "distributed")
    ],
    "torchsparse_rec/distributed/exchange.py": [("dtype", "{k: x.to(parts[k].dtype) for", "{k: x for", "distributed")],
    "torchsparse_rec/distributed/ahead.py": [("stale", "        self._turns.looked_up += 1\n", "", "distributed")],
    "torchsparse_rec/distributed/_rows.py": [
        (
            "order",
            "[(rank, segment) for segment in segments for rank in ranks]",
            "[(rank, segment) for rank in ranks for segment in segments]",
            "distributed",
        )
    ],
    "torchsparse_rec/distributed/_keys.py": [
        ("bound", "int(counts[: rank + 1].sum())", "int(counts[:rank].sum())", "distributed"),
        ("sign", "_asked([keys, occurrences] if self._merge else [keys]", "_asked([keys]", "distributed"),
    ],
    "torchsparse_rec/checkpoint/_restored.py": [
        ("sign", "begin < its[1] and its[0] < end", "begin < its[1] and its[0] >= end", "distributed"),
        (
            "bound",
            "            if there != prod(kept.box.shape):\n",
            "            if there > prod(kept.box.shape):\n",
            "distributed",
        ),
        ("order", "tensors = {name: x[mine] for name, x in tensors.items()}", "pass", "distributed"),
        ("sign", ".amax(0)", ".sum(0, dtype=sketches[0].dtype)", "distributed"),
    ],
    "torchsparse_rec/_agreed.py": [("lock", "        steps.close()", "        pass", "distributed")],
    "torchsparse_rec/checkpoint/model.py": [
        ("bound", "for shards in said:", "for shards in said[:-1]:", "distributed")
    ],
    "torchsparse_rec/distributed/ddp.py": [("stale", "            shared += [f", "            _ = [f", "distributed")],
    "torchsparse_rec/distributed/together.py": [
        ("order", '            first.ranks.announce(name, "first lookup", teller.training)\n', "", "distributed")
    ],
    "torchsparse_rec/variable/share.py": [
        ("stale", "        entries = entries[has(entries[:, 0].contiguous())]\n", "", "distributed")
    ],
    "torchsparse_rec/nn/_growing.py": [
        ("bound", "found.indices[behind - occurrences]", "found.indices[behind - behind[0]]", "distributed")
    ],
    "torchsparse_rec/nn/_keyed_table.py": [
        ("sign", "            keys, values = keys[here], values[here]\n", "            pass\n", "distributed")
    ],
    "torchsparse_rec/nn/sampled_losses.py": [
        (
            "bound",
            "last_places(target, candidates.ids) % left_out.shape[1]",
            "last_places(target, candidates.ids).clamp_min(0)",
            "candidates",
        ),
        ("sign", "own.masked_fill(~is_class, _LEFT_OUT)", "own + ~is_class * _LEFT_OUT", "candidates"),
        ("sign", "losses.masked_fill(is_left_out, 0)", "losses * ~is_left_out", "candidates"),
    ],
}
MUTATIONS = [Mutation(file, *fault) for file, faults in FAULTS.items() for fault in faults]
TABLE = Table(name="python", folder=".", kinds=KINDS, mutations=MUTATIONS)
