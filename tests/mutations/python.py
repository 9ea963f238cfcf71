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

MUTATIONS = [
    Mutation(
        "torchsparse_rec/ops/_sparse_tensor_kernels.py",
        "sign",
        "torch.where(owners == 0, flat, 0).sum()",
        "torch.where(owners != 0, flat, 0).sum()",
        "sparse_tensor",
    ),
    Mutation(
        "torchsparse_rec/ops/embedding.py",
        "sign",
        "(indices == padding_idx).unsqueeze(1)",
        "(indices != padding_idx).unsqueeze(1)",
        "embedding",
    ),
    Mutation(
        "torchsparse_rec/optim/_dense.py",
        "sign",
        '-parameter.grad if group["maximize"] else parameter.grad',
        "parameter.grad",
        "optim",
    ),
    Mutation(
        "compat/tensorflow/optimizers/_keras_rules.py",
        "sign",
        "m * momentum - change",
        "m * momentum + change",
        "compat",
    ),
    Mutation(
        "torchsparse_rec/features/statistics.py",
        "sign",
        "squares + distance**2 * self.counts * share",
        "squares - distance**2 * self.counts * share",
        "features",
    ),
    Mutation(
        "torchsparse_rec/ops/jagged.py",
        "bound",
        "places < offsets[1:].unsqueeze",
        "places <= offsets[1:].unsqueeze",
        "jagged",
    ),
    Mutation("torchsparse_rec/nn/embedding_bag.py", "bound", "if length == 0:", "if length < 0:", "nn"),
    Mutation(
        "torchsparse_rec/data/_epoch.py",
        "bound",
        "-(-total // self.batch_size)",
        "total // self.batch_size + 1",
        "prebatched",
    ),
    Mutation(
        "torchsparse_rec/variable/rows.py",
        "bound",
        "lambda rows, versions: versions < before",
        "lambda rows, versions: versions <= before",
        "variable",
    ),
    Mutation(
        "torchsparse_rec/features/_evaluate.py",
        "bound",
        "(ids >= column.number_buckets)",
        "(ids > column.number_buckets)",
        "features",
    ),
    Mutation("torchsparse_rec/ops/jagged.py", "dtype", "offsets.long().diff()", "offsets.diff()", "jagged"),
    Mutation(
        "torchsparse_rec/tables/gradients.py",
        "dtype",
        "grad.to(dtype).coalesce() if grad.dtype != dtype else grad.coalesce()",
        "grad.coalesce()",
        "optim",
    ),
    Mutation(
        "torchsparse_rec/ops/bucketize.py",
        "dtype",
        "torch.float64 if x.dtype == torch.float64 else torch.float32",
        "torch.float32",
        "bucketize",
    ),
    Mutation(
        "torchsparse_rec/jagged/collate.py",
        "dtype",
        "np.ones(len(values), np.float32)",
        "np.ones(len(values))",
        "jagged",
    ),
    Mutation(
        "compat/_keras_bins.py",
        "dtype",
        "mapped_values(bins, lambda values: values.to(torch.int32))",
        "bins",
        "compat",
    ),
    Mutation(
        "torchsparse_rec/nn/auto.py",
        "bound",
        "    if rows <= max(ids, SMALL_TABLE) or",
        "    if rows < max(ids, SMALL_TABLE) or",
        "nn",
    ),
    Mutation(
        "torchsparse_rec/nn/_fused.py",
        "stale",
        "known is not None and (weights is None or are_same(known.weights, weights)):",
        "known is not None:",
        "nn",
    ),
    Mutation(
        "torchsparse_rec/optim/row_optimizer.py",
        "stale",
        "            and self._places == ([p.dtype for p in parameters], [p.device for p in parameters])\n",
        "",
        "optim",
    ),
    Mutation(
        "torchsparse_rec/variable/cold.py",
        "stale",
        "        self._note_changed(keys)\n        self._tiers[0].put(keys, records)\n",
        "        self._tiers[0].put(keys, records)\n",
        "variable",
    ),
    Mutation(
        "torchsparse_rec/data/prebatched.py",
        "stale",
        "self._plan is None or self._plan.epoch != epoch:",
        "self._plan is None:",
        "prebatched",
    ),
    # A crash in between leaves a delta without the version on which it builds.
    Mutation(
        "torchsparse_rec/variable/_versions.py",
        "order",
        "sorted(versions, reverse=True):\n            if kept",
        "sorted(versions):\n            if kept",
        "variable",
    ),
    Mutation(
        "torchsparse_rec/jagged/keyed_jagged_tensor.py",
        "order",
        "            weights = None if self._weights is None else _reordered(self._weights, known, indices)\n"
        "            known = [known[i] for i in indices]\n",
        "            known = [known[i] for i in indices]\n"
        "            weights = None if self._weights is None else _reordered(self._weights, known, indices)\n",
        "jagged",
    ),
    # Rows that could not be saved are taken for saved.
    Mutation(
        "torchsparse_rec/variable/saving.py",
        "order",
        "    # Only now: a checkpoint that failed has saved nothing.\n    rows.note_saved(",
        "        rows.note_saved(",
        "variable",
    ),
    Mutation(
        "torchsparse_rec/data/prebatched.py",
        "order",
        "            self._position = i + numbers.step\n            yield self._tensors(batch)\n",
        "            yield self._tensors(batch)\n            self._position = i + numbers.step\n",
        "prebatched",
    ),
    Mutation(
        "compat/tensorflow/optimizers/_keras_rules.py",
        "order",
        "        parameter.sub_((m * beta_1 + dense(changed(gradient, lambda g: g * rest_1))).sign_().mul_(lr))\n"
        "        m.mul_(beta_2).add_(dense(changed(gradient, lambda g: g * rest_2)))\n",
        "        m.mul_(beta_2).add_(dense(changed(gradient, lambda g: g * rest_2)))\n"
        "        parameter.sub_((m * beta_1 + dense(changed(gradient, lambda g: g * rest_1))).sign_().mul_(lr))\n",
        "compat",
    ),
    Mutation(
        "torchsparse_rec/nn/_fused.py",
        "lock",
        "        with _lock, as_stored():\n            wanted",
        "        with as_stored():\n            wanted",
        "nn",
    ),
    Mutation(
        "torchsparse_rec/tables/stale.py",
        "stale",
        "                _flush_among([args, kwargs])\n            elif",
        "                pass\n            elif",
        "nn",
    ),
    Mutation(
        "torchsparse_rec/nn/_read.py",
        "lock",
        "        with groups[0].lock():\n",
        "        if True:\n",
        "nn",
    ),
    Mutation(
        "torchsparse_rec/variable/_tier.py",
        "lock",
        "        with self._lock:\n            if not self._is_open:",
        "        if True:\n            if not self._is_open:",
        "variable",
    ),
    Mutation(
        "torchsparse_rec/nn/embedding_variable.py",
        "lock",
        "            with self._lock.writing():\n                rows = self.rows_of(ids, occurrences)",
        "            if True:\n                rows = self.rows_of(ids, occurrences)",
        "variable",
    ),
    Mutation(
        "torchsparse_rec/variable/_lock.py",
        "lock",
        "            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)\n",
        "",
        "variable",
    ),
    Mutation(
        "torchsparse_rec/distributed/shards.py",
        "sign",
        "(1.0, 1 / ranks.count) if exact",
        "(1.0, 1.0) if exact",
        "distributed",
    ),
    Mutation(
        "torchsparse_rec/distributed/blocks.py",
        "bound",
        "rank * -(-count // ranks)",
        "rank * (count // ranks)",
        "distributed",
    ),
    Mutation(
        "torchsparse_rec/distributed/exchange.py",
        "dtype",
        "{k: x.to(parts[k].dtype) for",
        "{k: x for",
        "distributed",
    ),
    Mutation(
        "torchsparse_rec/distributed/ahead.py",
        "stale",
        "        self._turns.looked_up += 1\n",
        "",
        "distributed",
    ),
    Mutation(
        "torchsparse_rec/distributed/_rows.py",
        "order",
        "[(rank, segment) for segment in segments for rank in ranks]",
        "[(rank, segment) for rank in ranks for segment in segments]",
        "distributed",
    ),
    Mutation(
        "torchsparse_rec/distributed/_keys.py",
        "bound",
        "int(counts[: rank + 1].sum())",
        "int(counts[:rank].sum())",
        "distributed",
    ),
    Mutation(
        "torchsparse_rec/distributed/_keys.py",
        "sign",
        "Asked([keys, occurrences] if self._merge else [keys]",
        "Asked([keys]",
        "distributed",
    ),
    Mutation(
        "torchsparse_rec/distributed/_contents.py",
        "stale",
        "its.numbers if its.has_rows else {},",
        "its.numbers,",
        "distributed",
    ),
    Mutation(
        "torchsparse_rec/distributed/_restored.py",
        "sign",
        "first < end and begin < last",
        "first >= end and begin < last",
        "distributed",
    ),
    Mutation(
        "torchsparse_rec/variable/rows.py",
        "bound",
        "if len(new) <= room:",
        "if len(new) >= 0:",
        "distributed",
    ),
    Mutation(
        "torchsparse_rec/distributed/_restored.py",
        "bound",
        "            if there != prod(kept.box.shape):\n",
        "            if there > prod(kept.box.shape):\n",
        "distributed",
    ),
    Mutation(
        "torchsparse_rec/distributed/_restored.py",
        "order",
        "tensors = {name: x[mine] for name, x in tensors.items()}",
        "pass",
        "distributed",
    ),
    Mutation(
        "torchsparse_rec/distributed/_restored.py",
        "sign",
        ".amax(0)",
        ".sum(0, dtype=sketches[0].dtype)",
        "distributed",
    ),
    Mutation(
        "torchsparse_rec/distributed/agreed.py",
        "lock",
        "        steps.close()",
        "        pass",
        "distributed",
    ),
    Mutation(
        "torchsparse_rec/variable/saving.py",
        "stale",
        'max(each["optimizer_steps"] for each in metadata)',
        'metadata[0]["optimizer_steps"]',
        "distributed",
    ),
    Mutation(
        "torchsparse_rec/distributed/checkpoint.py",
        "bound",
        "for shards in said:",
        "for shards in said[:-1]:",
        "distributed",
    ),
    Mutation(
        "torchsparse_rec/distributed/ddp.py",
        "stale",
        "            shared += [f",
        "            _ = [f",
        "distributed",
    ),
    Mutation(
        "torchsparse_rec/distributed/shards.py",
        "sign",
        "call.signature if failed is None else 0",
        "call.signature",
        "distributed",
    ),
    Mutation(
        "torchsparse_rec/distributed/together.py",
        "order",
        "            first.ranks.headers(call, torch.zeros(first.ranks.count, 0, dtype=torch.int64))\n",
        "",
        "distributed",
    ),
    Mutation(
        "torchsparse_rec/variable/share.py",
        "stale",
        "        entries = entries[has(entries[:, 0].contiguous())]\n",
        "",
        "distributed",
    ),
    Mutation(
        "torchsparse_rec/nn/_growing.py",
        "bound",
        "found.indices[behind - occurrences]",
        "found.indices[behind - behind[0]]",
        "distributed",
    ),
    Mutation(
        "torchsparse_rec/nn/_keyed_table.py",
        "sign",
        "            keys, values = keys[here], values[here]\n",
        "            pass\n",
        "distributed",
    ),
]
TABLE = Table(name="python", folder=".", kinds=KINDS, mutations=MUTATIONS)
