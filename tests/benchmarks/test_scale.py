"""Tables over many ranks, on paper: what must hold of the model whatever its constants are."""

import json

import pytest

from torchsparse_rec.distributed.plan import RowWise, TableWise

RANKS = [1, 2, 8, 16, 64, 512]


@pytest.fixture
def scale(benchmarks):
    return benchmarks("scale")


@pytest.fixture
def model(scale):
    return scale.Model(bytes_a_rank=2e5, tables=7, batch=16)


@pytest.mark.parametrize("ranks", RANKS)
def test_tables_have_as_many_bytes_as_are_asked_for(scale, model, ranks):
    uses = model.uses(ranks)
    assert sum(use.bytes() for use in uses) == pytest.approx(2e5 * ranks, rel=0.01)
    sizes = [use.bytes() for use in uses]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] == pytest.approx(7 * sizes[6], rel=0.01 * 7)
    assert [(use.dim, use.ids) for use in uses[:4]] == [(128, 16), (64, 80), (128, 320), (64, 16)]


def test_the_tables_of_the_page(scale):
    uses = scale.Model().uses(1024)
    assert sum(use.bytes() for use in uses) == pytest.approx(1e13, rel=1e-6)
    assert len(uses) == 100 and max(use.rows for use in uses) < 2**31
    planned = scale.plan(scale.Model(), 1024)
    assert max(planned.bytes) <= scale.MEMORY and sum(planned.bytes) >= 1e13


def test_a_plan_fits_memory(scale, model, monkeypatch):
    monkeypatch.setattr(scale, "MEMORY", 400_000)
    kinds = {type(each.plan) for ranks in RANKS for each in scale.plan(model, ranks).tables.values()}
    assert kinds == {RowWise, TableWise}
    assert all(max(scale.plan(model, ranks).bytes) <= 400_000 for ranks in RANKS)
    monkeypatch.setattr(scale, "MEMORY", 100_000)
    with pytest.raises(ValueError, match="memory must hold the tables"):
        scale.plan(model, 8)


@pytest.mark.parametrize("ranks", RANKS)
def test_on_one_level_is_sent_what_the_planner_says(scale, model, ranks):
    planned = scale.plan(model, ranks)
    header, *others = scale.messages(planned, False)
    sent = sum(each.inside + each.across for each in others)
    assert sent == pytest.approx(sum(each.sent for each in planned.tables.values()), abs=1e-6)
    assert header.inside + header.across == pytest.approx(8 * (3 + 7) * (ranks - 1))
    # A step is the planner's, with headers, whose bytes it leaves out.
    machine, step = scale.machine_of(ranks), scale.step(model, ranks)
    more = step.seconds - max(planned.seconds)
    assert -1e-12 <= more <= (header.inside + header.across) / machine.bytes_per_second + 1e-12
    assert step.samples_per_second == 16 * ranks / step.seconds
    assert sum(step.plans.values()) == 7


@pytest.mark.parametrize("ranks", RANKS)
def test_two_levels_send_less_to_other_nodes(scale, model, ranks):
    planned = scale.plan(model, ranks)
    one, two = (scale.messages(planned, levels) for levels in (False, True))
    if ranks <= 8:
        assert one == two and all(each.across == 0 for each in one)
        return
    assert all(b.across < a.across and b.inside > a.inside for a, b in zip(one, two, strict=True))
    assert two[0].across == pytest.approx(one[0].across / 8)


def test_two_levels_send_each_row_once_if_a_node_asks_for_the_same(scale):
    # Of a table of two rows all ranks want both: a node asks once in place of eight times.
    model = scale.Model(bytes_a_rank=2 * 1024 / 16, tables=1, batch=1000, dims=(128,))
    planned = scale.choose(model.uses(16), 16, None, scale.machine_of(16), {"t0": "row_wise"})
    for one, two in zip(scale.messages(planned, False), scale.messages(planned, True), strict=True):
        assert two.across == pytest.approx(one.across / 8)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("two_level", [False, True])
def test_what_makes_a_step_no_longer(scale, model, ranks, two_level):
    plain = scale.step(model, ranks, two_level)
    narrow, ahead = (scale.step(model, ranks, two_level, **{name: True}) for name in ("bfloat16", "ahead"))
    assert narrow.seconds <= plain.seconds and narrow.across <= plain.across
    assert 0 < ahead.seconds < plain.seconds and ahead.across == plain.across
    dearer = scale.step(model, ranks, two_level, peer=4 * scale.PEER)
    assert dearer.seconds > plain.seconds if ranks > 1 else dearer.seconds == plain.seconds


def test_messages_to_a_thousand_ranks_cost_more_than_on_two_levels(scale, model):
    one, two = (scale.step(model, 1024, levels).seconds for levels in (False, True))
    # Four messages to 1,023 ranks, or to 7 and to 127, each of which starts twice.
    start = scale.MACHINES["nccl"].message_seconds
    assert one - two == pytest.approx(4 * ((1023 - 7 - 127) * scale.PEER - start), rel=0.1)


def test_ranks_that_fill_no_node_are_refused(scale, model):
    with pytest.raises(ValueError, match="^scale: ranks must be at most 8 or a multiple of it, got 12$"):
        scale.step(model, 12)


def test_the_table_and_its_json(scale, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(scale, "modelled", lambda *given: scale.Modelled(2.0, 4.0, 5.0))
    target = tmp_path / "scale.json"
    assert scale.main(["--ranks", "8", "16", "--measure", "--json", str(target)]) == 0
    text, found = capsys.readouterr().out, json.loads(target.read_text())
    assert text.startswith("A model, not a measurement.") and "| 2.0 ms | 4.0 ms | 5.0 ms | -50% |" in text
    assert [ways["as built"]["ranks"] for ways in found["steps"]] == [8, 16]
    built = found["steps"][1]["as built"]
    assert f"{built['seconds'] * 1e3:.2f} ms" in text and f"{built['across'] / 1e6:.1f} MB" in text
    assert len(found["measured"]) == len(scale.SHAPES) and found["measured"][0]["error"] == -0.5
    assert found["peers"]["1e-06"] == found["steps"][1]


def test_a_step_of_ranks_beside_the_model(benchmarks):
    distributed = benchmarks("distributed")
    options = benchmarks("rows").Options(quick=True)
    assert all(ms > 0 for ms in distributed.modelled(distributed.TEN_IDS, 2, "table_wise", options))
