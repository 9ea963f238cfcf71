"""
Record the dumps of dynamicemb and SOK in tests/goldens/dumps by their own Python, on CPUs.

    python tests/compat/dump_goldens.py dynamicemb CLONE/corelib/dynamicemb DIR
    python tests/compat/dump_goldens.py sok CLONE/sparse_operation_kit DIR      # needs tensorflow and tf_keras

CLONE is one of NVIDIA/recsys-examples, or of NVIDIA-Merlin/HugeCTR. What is compiled for GPUs is stood in for: the
tables of keys and rows, and SOK's messages between ranks. All that names, orders and writes the files is theirs, and so
are the optimizers that SOK wraps. dynamicemb's steps are compiled: its states are numbers, not those of a training.
"""

from __future__ import annotations

import enum
import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing

DIM, RANKS = 4, 2
#: Of dynamicemb's tables; the row of the k-th key is ``rows_of(its states)[k]``, its frequency k + 4.
KEYS = [7, 2**40, -3, 11, 12, 5]
#: Of SOK's: what each step looks up, and the gradients of the rows.
STEPS = [[7, 2**40, -3], [7, 11, 5], [2**40, 5, 99]]
GRADIENTS = [np.arange(12, dtype=np.float32).reshape(3, DIM) / 8 - step / 4 for step in range(3)]
INITIAL, LR = 0.5, 0.1


def rows_of(states: int) -> torch.Tensor:
    """Return rows of dynamicemb's tables: ``DIM`` values, then as many numbers of the optimizer as are given."""
    return torch.arange(float(len(KEYS) * (DIM + states))).view(len(KEYS), -1) / 8


# ---- dynamicemb -----------------------------------------------------------------------------------------------------

_EvictStrategy = enum.Enum("EvictStrategy", "KLru KLfu KEpochLru KEpochLfu KCustomized")
_EmbOptimType = enum.Enum(
    "EmbOptimType",
    {
        "SGD": "sgd",
        "EXACT_SGD": "exact_sgd",
        "ADAM": "adam",
        "EXACT_ADAGRAD": "exact_adagrad",
        "EXACT_ROWWISE_ADAGRAD": "exact_row_wise_adagrad",
    },
)


class _Names(type):
    """A class that has every name: itself."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("_"):
            raise AttributeError(name)
        return name


class _StandIn(types.ModuleType):
    """A module that has every name: a class, or a function that does nothing."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        known = {"EvictStrategy": _EvictStrategy, "EmbOptimType": _EmbOptimType, "get_unwrapped_module": lambda x: x}
        if name.startswith("Sharded"):
            made: Any = type(name, (torch.nn.Module,), {})
        else:
            made = known.get(name) or ((lambda *args: 0) if name.islower() else _Names(name, (), {}))
        setattr(self, name, made)
        return made


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name.split(".")[0] in ("dynamicemb_extensions", "fbgemm_gpu", "torchrec"):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


class _OnCpu:
    """torch, whose only device is the CPU."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def device(self, name: str) -> torch.device:
        return torch.device("cpu")


def _made(kind: type, **attributes: Any) -> Any:
    """Return an object of one of their classes, whose constructor would ask for a GPU."""
    result = kind.__new__(kind)
    result.__dict__.update(attributes)
    return result


def _exported(storage: Any, bucket: int, batch: int, begin: int, *args: Any, **options: Any) -> Any:
    keys, scores = (x[begin : begin + batch] for x in storage)
    return torch.tensor(len(keys)), keys, scores, torch.arange(begin, begin + len(keys))


def _collection(optimizer: Any, is_lfu: bool, rank: int) -> torch.nn.Module:
    """Return a sharded collection with one table, of which a rank has the keys that are its own."""
    at = {x: importlib.import_module(f"dynamicemb.{x}") for x in ("key_value_table", "scored_hashtable")}
    own = torch.tensor([k for k, key in enumerate(KEYS) if key % RANKS == rank])
    table = _made(
        at["scored_hashtable"].LinearBucketTable,
        table_storage_=(torch.tensor(KEYS)[own], own + 4),
        table_bucket_offsets_cpu_=torch.tensor([0, 1]),
        bucket_capacity_=len(own),
        key_type_=torch.int64,
        score_names_=["score"],
        score_types_=[torch.int64],
        enable_overflow_=False,
    )
    width = DIM + optimizer.get_state_dim(DIM)
    state = _made(
        at["key_value_table"].DynamicEmbTableState,
        options_list=[types.SimpleNamespace(dist_type="roundrobin", score_strategy=None)],
        device=torch.device("cpu"),
        score_policy=types.SimpleNamespace(name="score"),
        evict_strategy=_EvictStrategy["KLfu" if is_lfu else "KLru"],
        key_index_map=table,
        table_ptrs_dev=rows_of(width - DIM)[own],
        table_emb_dims_cpu=[DIM],
        table_value_dims_cpu=[width],
        table_emb_dims=None,
        table_value_dims=None,
        emb_dim=DIM,
        emb_dtype=torch.float32,
        all_dims_vec4=True,
        optimizer=optimizer,
        no_eviction_next_index=None,
    )
    batched = importlib.import_module("dynamicemb.batched_dynamicemb_tables").BatchedDynamicEmbeddingTablesV2
    tables = batched.__new__(batched)
    torch.nn.Module.__init__(tables)
    tables.__dict__.update(
        _table_names=["goods"],
        _storage=_made(at["key_value_table"].DynamicEmbStorage, _state=state),
        _scores={"goods": 1},
        _admission_counter=None,
        _caching=False,
    )
    collection = importlib.import_module("torchrec.distributed.embeddingbag").ShardedEmbeddingBagCollection()
    collection.add_module("tables", tables)
    return collection


def _dump_dynamicemb(rank: int, source: str, folder: str, port: int) -> None:
    sys.meta_path.insert(0, _Finder())
    sys.path.insert(0, source)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS, init_method=f"tcp://127.0.0.1:{port}")
    barrier = dist.barrier
    dist.barrier = lambda group=None, device_ids=None: barrier(group=group)
    torch.cuda.current_device = lambda: 0
    dynamicemb, optimizers, tables, hashed = (
        importlib.import_module(f"dynamicemb{x}") for x in ("", ".optimizer", ".key_value_table", ".scored_hashtable")
    )
    tables.torch, hashed.table_export_batch = _OnCpu(), _exported
    tables._load_contiguous = lambda rows, indices, table, output, *rest: output.copy_(rows[indices])
    args = optimizers.OptimizerArgs(learning_rate=LR)
    adam = optimizers.AdamDynamicEmbeddingOptimizer(args)
    adam._iterations = 3
    model = torch.nn.Module()
    model.add_module("adam", _collection(adam, True, rank))
    row_wise = optimizers.RowWiseAdaGradDynamicEmbeddingOptimizer(args, torch.float32)
    model.add_module("row_wise_adagrad", _collection(row_wise, True, rank))
    model.add_module("sgd", _collection(optimizers.SGDDynamicEmbeddingOptimizer(args), False, rank))
    dynamicemb.DynamicEmbDump(folder, model, optim=True)
    dist.destroy_process_group()


# ---- SOK ------------------------------------------------------------------------------------------------------------


class _Operators:
    """SOK's compiled operators: each variable is a dictionary, by the identity of its handle."""

    def __init__(self, tf: Any) -> None:
        self._tf, self._of = tf, dict[int, Any]()

    def dummy_var_handle(self, container: str, shared_name: str, key_type: Any, dtype: Any, shape: Any) -> Any:
        handle = self._tf.raw_ops.VarHandleOp(dtype=dtype, shape=self._tf.TensorShape(shape), shared_name=shared_name)
        self._of[id(handle)] = {"handle": handle, "rows": {}}
        return handle

    def dummy_var_initialize(self, handle: Any, initializer: Any, **options: Any) -> None:
        first = initializer if isinstance(initializer, str) else np.asarray(initializer).reshape(-1)[0]
        self._of[id(handle)]["row"] = np.full(DIM, float(first), np.float32)

    def dummy_var_sparse_read(self, handle: Any, indices: Any, dtype: Any) -> Any:
        its = self._of[id(handle)]
        return self._tf.constant(np.stack([its["rows"].setdefault(int(k), its["row"]) for k in indices]))

    def dummy_var_scatter_update(self, handle: Any, indices: Any, values: Any) -> None:
        self._of[id(handle)]["rows"].update(zip(indices.numpy().tolist(), values.numpy(), strict=True))

    def dummy_var_export(self, handle: Any, key_type: Any, dtype: Any) -> tuple[Any, Any]:
        rows = self._of[id(handle)]["rows"]
        keys = [*reversed(rows)]  # a hash table has them in no order
        return self._tf.constant(keys, dtype=key_type), self._tf.constant(np.stack([rows[k] for k in keys]))


def _dump_sok(source: str, folder: str) -> None:
    import tensorflow as tf
    from tf_keras.optimizers import legacy

    horovod: Any = types.ModuleType("horovod.tensorflow")
    horovod.rank = horovod.local_rank = lambda: 0
    horovod.size, horovod.Sum = lambda: 1, "sum"
    horovod.allgather, horovod.allreduce = lambda x: x, lambda x, op: x
    parent: Any = types.ModuleType("horovod")
    parent.tensorflow = horovod
    sok: Any = types.ModuleType("sparse_operation_kit")
    sok.__path__, sok.raw_ops = [f"{source}/sparse_operation_kit"], _Operators(tf)
    sok.tf_version = [int(x) for x in tf.__version__.split(".")]
    sys.modules |= {"horovod": parent, "horovod.tensorflow": horovod, "sparse_operation_kit": sok}
    names = ("communication", "dynamic_variable", "distributed_variable", "optimizer", "dump_load")
    at = {name: importlib.import_module(f"sparse_operation_kit.{name}") for name in names}
    at["communication"].set_comm_tool("horovod")
    for kind in (legacy.Adam, legacy.Adagrad, legacy.Ftrl):
        optimizer = at["optimizer"].OptimizerWrapper(kind(LR))
        name = kind.__name__.lower()
        variable = at["dynamic_variable"].DynamicVariable(DIM, initializer=str(INITIAL), var_type="hbm", name=name)
        for keys, gradient in zip(STEPS, GRADIENTS, strict=True):
            shape = tf.constant([-1, DIM], dtype=tf.int64)
            slices = tf.IndexedSlices(tf.constant(gradient), tf.constant(keys, dtype=tf.int64), shape)
            optimizer.apply_gradients([(slices, variable)])
        at["dump_load"].dump(folder, [variable], optimizer)
    fixed = np.arange(5 * DIM, dtype=np.float32).reshape(5, DIM)
    at["dump_load"].dump(folder, [at["distributed_variable"].Variable(fixed, dtype=tf.float32, name="users/fixed")])


if __name__ == "__main__":
    program, source, folder = sys.argv[1:]
    Path(folder).mkdir(parents=True)
    if program == "sok":
        _dump_sok(source, folder)
    else:
        torch.multiprocessing.spawn(_dump_dynamicemb, (source, folder, 29517), RANKS)
