"""Rows: who is timed, what the time is held against, and what happens to those that fail."""

import json

import pytest
import torch

from bench.ops_tools import SMALL, Clock, eager, setting, small
from treewy.bench.ops import Measurement, Prepared, make_problem, results, units
from treewy.bench.ops import peers as peers_module
from treewy.bench.ops.peers import PEERS, REPLAY, SGLANG, U_CACHE, U_CACHE_CYCLE, VLLM
from treewy.bench.ops.rows import EXACT, FAST, FLOOR, ROWS, Bar, Row
from treewy.bench.ops.session import NAMES, header
from treewy.bench.ops.stages import STAGE_ROWS, STAGES
from treewy.bench.ops.timing import NUM_WARM_REPLAYS, replay_times
from treewy.errors import BackendError, RequestError

RING = small("ring", "chain4", 2)


@pytest.fixture
def fake_peers(monkeypatch):
    """Peers whose kernels note what they were called with."""
    calls = []
    monkeypatch.setattr(peers_module, "_import", lambda module, name: lambda *a, **k: calls.append((name, a, k)))
    return calls


@pytest.fixture(autouse=True)
def two_sets(monkeypatch):
    """Two sets of operands are enough where nothing is cold or warm."""
    monkeypatch.setattr("treewy.bench.ops.problems.num_sets", lambda _: 2)


def test_replays_interleave_after_warm_ones():
    order = []
    spreads = replay_times({name: (lambda name=name: order.append(name) or float(len(order))) for name in "ab"}, 3)
    assert order == ["a"] * NUM_WARM_REPLAYS + ["b"] * NUM_WARM_REPLAYS + ["a", "b", "b", "a", "a", "b"]
    assert spreads["a"].rounds == [11.0, 14.0, 15.0]
    assert spreads["a"].median == 14.0


def test_a_row_is_timed_and_judged(fake_peers):
    """2.0 us beside a peer's 2.5: 0.8 times that; the floor is bytes over the bandwidth."""
    row = Row(
        "verify", RING, (FAST,), (U_CACHE,), (Bar(FAST, U_CACHE, 1.15), Bar(FAST, U_CACHE, 0.7), Bar(FAST, FLOOR, 0.75))
    )
    clock = Clock(2.0, 2.5)
    ours, theirs = Measurement(setting(clock=clock)).run(row)
    assert [x.name for x in (ours, theirs)] == [FAST, U_CACHE]
    assert (ours.us.median, theirs.us.median, ours.us.rounds) == (2.0, 2.5, [2.0] * 3)
    assert ours.times == {U_CACHE: 0.8}
    floor = make_problem(RING, "cpu", sets=2).floor_bytes / 4.3e12 * 1e6
    assert ours.floor_us == pytest.approx(floor)
    assert ours.share_of_floor == pytest.approx(floor / 2)
    assert theirs.share_of_floor is None
    assert [bar.verdict for bar in ours.bars] == ["pass", "miss", "miss"]
    assert len(clock.captured[0].calls) == 2
    assert ours.bytes_per_seq == make_problem(RING, "cpu", sets=2).bytes_per_seq
    assert json.loads(json.dumps(ours.as_json()))["us"]["rounds"] == [2.0] * 3


def test_the_floor_is_reached():
    row = Row("trees", RING, bars=(Bar(FAST, FLOOR, 0.75),))
    floor = make_problem(RING, "cpu", sets=2).floor_bytes / 4.3e12 * 1e6
    (result,) = Measurement(setting(clock=Clock(floor / 0.76))).run(row)
    assert result.bars[0].verdict == "pass"
    assert result.bars[0].value == pytest.approx(0.76)


def test_a_peer_of_another_shape_and_an_aim(fake_peers):
    rows = [
        Row("single", RING, (FAST,), (SGLANG,), (Bar(FAST, SGLANG, 0.8, shape="chain4", is_aim=True),)),
        Row("single", small("ring", "chain4", 2, torch.bfloat16), bars=(Bar(FAST, SGLANG, 0.8, shape="chain4"),)),
        Row("single", small("ring", "tree15", 2), bars=(Bar(FAST, SGLANG, 1.6, shape="chain4"),)),
    ]
    measurement = Measurement(setting(clock=Clock(9.0, 10.0, 8.0, 15.0)))
    (first, _), (other_state,), (tree,) = map(measurement.run, rows)
    assert first.bars[0].verdict == "aim missed"
    assert (other_state.bars[0].value, other_state.bars[0].verdict) == (None, "open")
    assert (tree.bars[0].value, tree.bars[0].verdict) == (1.5, "pass")


def test_what_is_wrong_gets_no_time():
    def wrong(*args, **options):
        out = eager(*args, **options)
        out.o.add_(1)
        return out

    (result,) = Measurement(setting(wrong)).run(Row("trees", RING, bars=(Bar(FAST, FLOOR, 0.1),)))
    assert result.us is None
    assert result.is_fault
    assert result.note.startswith("wrong: relative errors o")
    assert result.bars[0].verdict == "open"


def test_one_failure_does_not_take_the_others_with_it():
    """Peers are not installed here, so all are left out with the reason; a kernel that raises is a fault."""

    def only_exact(*args, exact, **options):
        if not exact:
            raise RuntimeError("no such\n  kernel")
        return eager(*args, exact=exact, **options)

    got = Measurement(setting(only_exact)).run(
        Row("exact", RING, (FAST, EXACT), tuple(PEERS), (Bar(EXACT, FAST, 1.3),))
    )
    by_name = {result.name: result for result in got}
    assert (by_name[FAST].note, by_name[FAST].is_fault) == ("RuntimeError: no such kernel", True)
    assert by_name[EXACT].us is not None
    assert by_name[EXACT].bars[0].verdict == "open"
    for peer in (VLLM, SGLANG, REPLAY, U_CACHE):
        assert "importable" in by_name[peer].note
        assert not by_name[peer].is_fault
    (alone,) = Measurement(setting(with_peers=False)).run(Row("verify", RING, peers=(U_CACHE,)))
    assert alone.name == FAST


@pytest.mark.parametrize(
    ("name", "policy"), [(VLLM, "reconstruct"), (SGLANG, "ring"), (REPLAY, "ring"), (U_CACHE, "ring")]
)
def test_peers_get_operands_as_they_want_them(fake_peers, name, policy):
    problem = make_problem(small(policy, "chain4", 3, torch.bfloat16), "cpu", sets=2)
    prepared = PEERS[name](problem)
    assert isinstance(prepared, Prepared)
    assert len(prepared.calls) == 2
    for call in prepared.calls:
        call()
    (_, args, first), (_, _, second) = fake_peers
    state = 4 * 8 * 8 * 2
    match name:
        case "vLLM snapshot verify":
            assert first["ssm_state_indices"].shape == (3, 4)
            assert first["q"].shape == (1, 12, 2, 8)
            assert first["cu_seqlens"].tolist() == [0, 4, 8, 12]
            used = torch.cat([first["ssm_state_indices"], second["ssm_state_indices"]]).ravel().tolist()
            assert sorted(used) == list(range(1, 25))
            assert first["initial_state"].shape == (25, 4, 8, 8)
            assert prepared.bytes_per_seq == 4 * state
        case "sglang snapshot verify":
            assert first["intermediate_states_buffer"].shape == (7, 4, 4, 8, 8)
            assert first["initial_state_indices"].min() > 0
            assert first["disable_state_update"]
            assert prepared.bytes_per_seq == 5 * state
        case "sglang ReplaySSM verify":
            assert first["launch_mode"] == "verify"
            assert args[0].shape == (12, 2, 8)
            assert args[8].shape == (7, 4, 16, 8)
            assert args[18].tolist() == [8] * 7
        case "FlashInfer u-cache verify":
            assert first["q"].shape == (3, 4, 2, 8)
            assert first["u_cache"].shape == (7, 4, 16, 8)
            assert first["k_cache"].shape == (7, 2, 16, 8)
            assert first["hist_len"].tolist() == [8, 8, 8]
            assert not set(first["initial_state_indices"].tolist()) & set(second["initial_state_indices"].tolist())


def test_a_peer_that_talks_while_it_is_imported_does_not_talk_into_results(capsys, tmp_path, monkeypatch):
    (tmp_path / "talking_peer.py").write_text("print('hello from a peer')\nkernel = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert peers_module._import("talking_peer", "kernel") == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "hello" in captured.err
    with pytest.raises(BackendError, match=r"talking_peer\.missing is not: AttributeError"):
        peers_module._import("talking_peer", "missing")


def test_flashinfers_cycle_runs_on_our_accepted_lengths(fake_peers):
    problem = make_problem(small("cycle", "chain4", 3, torch.bfloat16), "cpu", sets=2)
    prepared = PEERS[U_CACHE_CYCLE](problem)
    assert len(prepared.calls) == len(problem.steps)
    for call in prepared.calls:
        call()
    steps = [options for _, _, options in fake_peers][::2]
    for before, after, accepted in zip(steps, steps[1:], problem.accepted[-len(steps) + 1 :, :3], strict=False):
        held, base = before["hist_len"], before["cache_base"]
        folds = held >= 13
        assert torch.equal(after["hist_len"], torch.where(folds, 0, held) + torch.from_numpy(accepted).int())
        assert torch.equal(after["cache_base"], torch.where(folds, (base + held) % 32, base))
    assert all(not options["restart_hist_on_flush"] for options in steps)
    assert steps[0]["u_cache"].shape[2] == 32


def test_the_rows_of_the_table():
    for name, make in ROWS.items():
        rows = make((1, 8, 32, 128))
        assert rows, name
        assert all(row.name == name for row in rows)
        for row in rows:
            assert {bar.of for bar in row.bars} <= set(row.variants)
            assert {bar.against for bar in row.bars if bar.shape is None} <= {*row.peers, *row.variants, FLOOR}
    bars = {
        (row.name, row.case.policy, row.case.shape, row.case.batch_size, str(row.case.state)[6:]): bar.limit
        for make in ROWS.values()
        for row in make((1, 8, 32, 128))
        for bar in row.bars
    }
    wanted = {
        ("verify", "ring", "chain4", 8, "bfloat16"): 1.15,
        ("verify", "ring", "chain4", 128, "bfloat16"): 1.15,
        ("cycle", "cycle", "chain4", 32, "bfloat16"): 1.15,
        ("verify-fp32", "ring", "chain4", 32, "float32"): 0.70,
        ("reconstruct", "reconstruct", "chain4", 128, "bfloat16"): 0.33,
        ("reconstruct", "reconstruct", "chain4", 32, "float32"): 0.42,
        ("trees", "ring", "tree15", 128, "bfloat16"): 0.75,
        ("trees", "reconstruct", "tree40", 32, "float32"): 0.70,
        ("trees", "ring", "spine64", 32, "bfloat16"): 0.65,
        ("single", "ring", "chain4", 1, "bfloat16"): 0.8,
        ("single", "reconstruct", "spine64", 1, "float32"): 2.0,
        ("exact", "ring", "chain4", 32, "float32"): 1.3,
        ("exact", "reconstruct", "tree40", 128, "float32"): 2.5,
    }
    assert {key: bars.get(key) for key in wanted} == wanted
    assert ("reconstruct", "reconstruct", "chain4", 8, "bfloat16") not in bars


def test_units_of_a_run():
    assert [unit.name for unit in units(("drift", "verify", "trees"), (32,))] == ["verify"] + ["trees"] * 12 + ["drift"]
    with pytest.raises(RequestError, match="trees has none among"):
        units(("trees",), (1, 8))
    with pytest.raises(RequestError, match="at least one of verify"):
        units((), (1,))
    assert len(NAMES) == 11


def test_stages_are_left_out_or_timed():
    (result,) = results(units(("stages",), (32,)), setting())
    assert "cannot leave stages out" in result.note
    assert not result.is_fault

    asked = []

    def staged(*args, stages=STAGES, **options):
        asked.append(stages)
        return eager(*args, **options)

    from treewy.bench.ops.stages import stage_results

    got = list(stage_results(setting(staged, Clock(1.0, 1.05, 1.5, 1.6)), [1], [torch.float32], SMALL))
    assert len(got) == len(STAGE_ROWS) * len(STAGES)
    assert [result.note for result in got[:4]] == [
        None,
        "gram adds 0.1 us",
        "solve adds 0.4 us, binds",
        "output adds 0.1 us",
    ]
    assert [result.name for result in got[:2]] == ["state", "state+gram"]


def test_a_unit_that_fails_leaves_a_fault():
    def broken(*args, **options):
        raise ValueError("never compiled")

    got = list(results(units(("accuracy", "stages"), (32,)), setting(broken)))
    assert [(result.row, result.is_fault) for result in got] == [("stages", False), ("accuracy", True)]
    assert got[1].note == "ValueError: never compiled"


def test_the_first_line_says_what_ran():
    first = header(setting())
    assert first["copy_gb_per_s"] == 4300
    assert first["num_replays"] == 3
    assert {"torch", "triton"} <= first["environment"]["versions"].keys()
    assert "vllm" not in first["environment"]["versions"]
