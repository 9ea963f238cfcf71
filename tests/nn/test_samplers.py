"""Candidate samplers as modules: their place in state_dict, seeds, devices, compilation, and what they refuse."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from torchsparse_rec import nn, ops

RANGE, SAMPLED = 50, 8
WEIGHTS = torch.arange(1.0, RANGE + 1)
SAMPLERS: dict[str, Callable[..., Any]] = {
    "log_uniform": lambda **options: nn.LogUniformSampler(RANGE, SAMPLED, **options),
    "uniform": lambda **options: nn.UniformSampler(RANGE, SAMPLED, **options),
    "fixed": lambda **options: nn.FixedUnigramSampler(WEIGHTS, SAMPLED, **options),
    "learned": lambda **options: nn.LearnedUnigramSampler(RANGE, SAMPLED, **options),
}
each = pytest.mark.parametrize("name", SAMPLERS)


def targets(*shape: int) -> Tensor:
    return torch.randint(RANGE, shape, generator=torch.Generator().manual_seed(0))


def assert_same(one: ops.Candidates, other: ops.Candidates) -> None:
    for x, y in zip(one, other, strict=True):
        assert torch.equal(x, y)


@each
@pytest.mark.parametrize("shape", [(6,), (6, 3), (0, 2), ()])
def test_shapes_and_dtypes(name: str, shape: tuple[int, ...]) -> None:
    ids, target_count, count = SAMPLERS[name](seed=1)(targets(*shape))
    assert ids.shape == count.shape == (SAMPLED,) and target_count.shape == shape
    assert ids.dtype == torch.int64 and target_count.dtype == count.dtype == torch.float32
    assert len(set(ids.tolist())) == SAMPLED and 0 <= ids.min() and ids.max() < RANGE


def test_a_sampler_calls_the_operator_with_its_seed() -> None:
    generator, target = ops.new_candidate_generator(9), targets(4)
    sampler = nn.LogUniformSampler(RANGE, SAMPLED, seed=9)
    for _ in range(2):
        assert_same(sampler(target), ops.log_uniform_candidates_(generator, target, SAMPLED, range_max=RANGE))


@each
def test_training_resumes_with_the_same_draws(name: str) -> None:
    model = torch.nn.ModuleDict({"sampler": SAMPLERS[name]()})
    for _ in range(3):
        model["sampler"](targets(6))
    state = copy.deepcopy(model.state_dict())
    assert list(state) == ["sampler._extra_state"]
    wanted = [model["sampler"](targets(6)) for _ in range(2)]
    again = torch.nn.ModuleDict({"sampler": SAMPLERS[name]()})
    again.load_state_dict(state)
    for drawn in wanted:
        assert_same(again["sampler"](targets(6)), drawn)


@each
def test_state_dict_is_of_its_moment(name: str) -> None:
    sampler = SAMPLERS[name](seed=1)
    before = sampler.state_dict()["_extra_state"]
    kept = before.clone()
    sampler(targets(6))
    assert torch.equal(before, kept) and not torch.equal(sampler.state_dict()["_extra_state"], kept)


@each
def test_without_a_seed_torchs_generator_gives_one(name: str) -> None:
    drawn = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        drawn.append(SAMPLERS[name]()(targets(6)).ids.tolist())
    assert drawn[0] == drawn[1] != drawn[2]


@each
def test_a_copy_goes_its_own_way(name: str) -> None:
    sampler = SAMPLERS[name](seed=1)
    other = copy.deepcopy(sampler)
    first = sampler(targets(6))
    assert_same(other(targets(6)), first)


@each
def test_no_move_changes_the_state(name: str) -> None:
    sampler = SAMPLERS[name](seed=2**62 + 1)
    wanted = sampler.state_dict()["_extra_state"]
    moved = sampler.half().to("meta").double()
    assert torch.equal(moved.state_dict()["_extra_state"], wanted)
    with torch.device("meta"):
        made = SAMPLERS[name](seed=1)
    assert made.generator.device.type == "cpu"


@each
def test_compiled_draws_are_the_same_and_compile_once(name: str) -> None:
    sampler, other = SAMPLERS[name](seed=1), SAMPLERS[name](seed=1)
    backend = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda target: tuple(sampler(target)), fullgraph=True, backend=backend)
    for _ in range(3):
        assert_same(ops.Candidates(*compiled(targets(6))), other(targets(6)))
    assert backend.frame_count == 1


def test_all_ids() -> None:
    sampler = nn.AllSampler(4)
    ids, target_count, count = sampler(torch.tensor([[3], [0]]))
    assert ids.tolist() == [0, 1, 2, 3] and count.tolist() == [1] * 4 and target_count.tolist() == [[1], [1]]
    with pytest.raises(IndexError, match=r"true_classes\[0\] must be in \[0, 4\), got 4"):
        sampler(torch.tensor([4]))


@each
def test_ids_that_repeat(name: str) -> None:
    sampler = SAMPLERS[name](seed=1, unique=False)
    drawn = torch.cat([sampler(targets(6)).ids.view(1, -1) for _ in range(20)])
    assert any(len(set(row.tolist())) < SAMPLED for row in drawn)


@pytest.mark.cuda
@each
def test_targets_on_cuda(name: str) -> None:
    on_host, on_device = SAMPLERS[name](seed=1), SAMPLERS[name](seed=1).cuda()
    drawn = on_device(targets(6, 2).cuda())
    assert all(x.is_cuda for x in drawn)
    assert_same(ops.Candidates(*(x.cpu() for x in drawn)), on_host(targets(6, 2)))


def test_repr() -> None:
    assert repr(nn.UniformSampler(9, 4)) == "UniformSampler(range_max=9, num_sampled=4, unique=True)"


# ---- What is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: nn.LogUniformSampler(0, 1), "LogUniformSampler: range_max must be at least 1, got 0"),
        (lambda: nn.UniformSampler(5, 0), "UniformSampler: num_sampled must be at least 1, got 0"),
        (lambda: nn.UniformSampler(5, 6), "num_sampled must be at most range_max, 5, where unique=True, got 6"),
        (
            lambda: nn.FixedUnigramSampler([1.0, 0.0, 2.0], 3),
            "FixedUnigramSampler: num_sampled must be at most the number of ids whose weights are not zero, 2, where",
        ),
        (lambda: nn.FixedUnigramSampler([0.0], 1), "unigrams must have a finite sum above 0, got 0"),
        (lambda: nn.UniformSampler(5, 2, seed=2**63), "seed must be an integer of 64 bits"),
        (lambda: nn.AllSampler(0), "AllSampler: range_max must be at least 1, got 0"),
    ],
)
def test_bad_arguments(make: Callable[[], Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        make()


@each
def test_a_bad_target_draws_nothing(name: str) -> None:
    sampler = SAMPLERS[name](seed=1)
    before = sampler.state_dict()["_extra_state"]
    with pytest.raises(IndexError, match=rf"true_classes\[1\] must be in \[0, {RANGE}\), got {RANGE}"):
        sampler(torch.tensor([1, RANGE]))
    with pytest.raises(ValueError, match="true_classes must be int32 or int64, got Float"):
        sampler(torch.ones(2))
    with pytest.raises(TypeError, match="target must be a tensor, got list"):
        sampler([1])
    assert torch.equal(sampler.state_dict()["_extra_state"], before)


def test_the_state_of_another_sampler() -> None:
    sampler = nn.LearnedUnigramSampler(5, 2)
    for state in (torch.zeros(3).long(), torch.zeros(9), {"seed": 1}):
        with pytest.raises(ValueError, match=r"the extra state must be torch.int64 of shape \(9,\), as this sampler's"):
            sampler.set_extra_state(state)
