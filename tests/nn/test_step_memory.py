"""The memory of a training step: it has room for the distinct rows that occur, never for a row per looked-up id."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

# A process of its own runs this, because its peak is measured, with an allocator that gives memory back at once.
_PROGRAM = """
import json, sys
import torch
from torchsparse_rec import KeyedJaggedTensor, nn, optim

mode, rule, ids, rows, dim = json.loads(sys.argv[1])
torch.manual_seed(0)
configs = [nn.EmbeddingBagConfig(name=n, num_embeddings=rows, embedding_dim=dim, feature_names=[n]) for n in "ab"]
model = nn.EmbeddingBagCollection(configs, grad_mode=mode)
optimizer = getattr(optim, rule)(model.parameters(), lr=0.1, in_backward=True)
bags = ids // 20


def batch():
    values = torch.randint(0, rows, (2 * ids,))
    return KeyedJaggedTensor(["a", "b"], values, offsets=torch.arange(0, 2 * ids + 1, 20))


def step(x):
    optimizer.zero_grad()
    pooled = model(x).values()
    pooled.backward(torch.ones_like(pooled))
    optimizer.step()


def status(name):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(name))


for _ in range(2):
    step(batch())
optimizer.zero_grad()
x = batch()
unique = sum(int(part.unique().numel()) for part in x.values().split(ids))
before = status("VmRSS")
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")
step(x)
print(json.dumps({"extra": status("VmHWM") - before, "unique": unique, "output": 2 * bags * dim * 4}))
"""


@pytest.mark.skipif(
    not os.path.exists("/proc/self/clear_refs"), reason="the peak of a process is read from Linux's /proc"
)
@pytest.mark.parametrize(("mode", "rule"), [("fused", "SGD"), ("fused", "Adam"), ("sparse", "Adam")])
def test_a_step_takes_memory_for_the_rows_that_occur(mode: str, rule: str) -> None:
    ids, rows, dim = 200_000, 150_000, 64
    allocator = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_TOP_PAD_": "0"}
    arguments = json.dumps([mode, rule, ids, rows, dim])
    run = subprocess.run(
        [sys.executable, "-c", _PROGRAM, arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **allocator, "OMP_NUM_THREADS": "2"},
        check=False,
    )
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout.splitlines()[-1])
    allowed = 1.3 * (found["unique"] * dim * 4 + 2 * ids * 24)
    extra = found["extra"] - 2 * found["output"]  # the result and its gradient
    assert extra <= allowed, f"{extra / 1e6:.0f} MB, {allowed / 1e6:.0f} MB allowed"
    assert allowed < 2 * ids * dim * 4, "the bound must be below the rows of all ids"
    if mode == "fused":
        assert extra < found["unique"] * dim * 4 / 2, f"{extra / 1e6:.0f} MB: updated without a gradient of the rows"
