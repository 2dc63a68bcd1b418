"""Checkpoint and history: rungs 1 to 3 and the contracts of `verify` with a history, `append` and `fold`."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ops.checks import arithmetic, assert_close, check_factor, relative, walked
from ops.problems import SHAPES, make, trees
from ops.rings import Sequences, behind_a_chain, empty_history, errors_through_a_ring, folded
from tolerances import DRAWS, EXACT, NEIGHBOURS_FLOAT32, SUBSTITUTION_FACTOR, TWO_FLOAT32, WALK_FACTOR
from treewy.errors import CapacityError, ShapeError
from treewy.ops import gdn
from treewy.packed import pack, pack_paths
from treewy.tree import DraftTree

both_backends = pytest.mark.parametrize("backend", ["eager", "reference"])
STRONG_GATES = [0.0, -20.0, -100.0, -200.0]
HARD = {"correlation": 1.0, "beta": (0.0, 2.0), "gate_one": True}


def batch(names, **options):
    return make([SHAPES[name] for name in names], **options)


def whole(problem):
    """Return the path to each tree's last row."""
    return [DraftTree(shape).path(len(shape) - 1) for shape in problem.tree.shapes]


def raw(tensors):
    return [x.contiguous().view(torch.uint8).clone() for x in tensors]


def same_bits(one, other):
    return all(map(torch.equal, one, other))


class TestAgainstTheWalk:
    @both_backends
    @settings(max_examples=40)
    @given(data=st.data())
    def test_random_steps(self, backend, data):
        """Trees and paths of any kind, over steps: histories of every length, folded wherever a path no longer fits.

        Sequences skip steps or accept nothing, so their histories differ; unused rows are NaN all along.
        """
        num_rows = data.draw(st.sampled_from([6, 7, 11]))
        heads, group = data.draw(st.sampled_from([(1, 1), (2, 2), (1, 3)]))
        options = {
            "heads": heads,
            "group": group,
            "key_dim": data.draw(st.sampled_from([1, 5, 8])),
            "value_dim": data.draw(st.sampled_from([1, 6])),
            "correlation": data.draw(st.sampled_from([0.0, 0.98, 1.0])),
            "beta": data.draw(st.sampled_from([(0.0, 1.0), (0.0, 2.0), (2.0, 2.0)])),
            "gate_one": data.draw(st.booleans()),
            "strong_gate": data.draw(st.sampled_from(STRONG_GATES)),
            "num_slots": 4,
        }
        sequences = Sequences(make([], **options).state, heads, num_rows, backend)
        for seed in range(data.draw(st.integers(1, 6))):
            slots = data.draw(st.permutations([-1, 0, 1, 2, 3]))[: data.draw(st.integers(0, 3))]
            drafts = [data.draw(trees(6)) for _ in slots]
            problem = make(drafts, seed=seed, slots=slots, **options)
            paths = [tree.path(data.draw(st.integers(0, tree.num_rows - 1))) for tree in drafts]
            sequences.step(problem, [path if data.draw(st.booleans()) else [] for path in paths])

    @both_backends
    @pytest.mark.parametrize("shape", ["root", "scattered", "widths 3 3 3", "chain 11", "chain 31"])
    def test_every_length_of_history(self, backend, shape):
        """0 to C rows, one more at a time, under a shallow and a deep tree; folding only moves rows."""
        num_rows = 9
        sequences = Sequences(make([], num_slots=2).state, 2, num_rows, backend)
        for length in range(num_rows + 2):
            problem = batch([shape, "root"], seed=length, slots=[1, 0], num_slots=2, **HARD)
            sequences.step(problem, [[], [0]])
            sequences.step(problem._replace(slots=torch.tensor([0, 1])), [[0] if length % 2 else [], []])
        assert sequences.history.lengths.tolist() == [7, 0]

    @both_backends
    def test_a_path_is_appended_in_order_and_without_gaps(self, backend):
        problem = batch(["scattered", "chain 3"], slots=[2, 0], num_slots=3)
        history = empty_history(problem.state, 2, 8)
        record = problem.verify(history=history, backend=backend).record
        for first in (0, 3):
            gdn.append(history, problem.slots, record, pack_paths(problem.tree, [[0, 3, 4], [0]]), backend=backend)
            assert torch.equal(history.u[2, first : first + 3], record.u[[0, 3, 4]])
            assert torch.equal(history.k[2, first : first + 3], record.k[[0, 3, 4]])
        assert torch.equal(history.u[0, :2], record.u[[5, 5]])
        assert history.lengths.tolist() == [2, 0, 6]
        steps = problem.g[[0, 3, 4, 0, 3, 4]].cumsum(0)
        assert_close(history.decay_high[2, :6] + history.decay_low[2, :6], steps.numpy(), EXACT)
        assert history.u[1].isnan().all()
        assert history.u[2, 6:].isnan().all()

    @both_backends
    def test_the_record_fits_the_folded_state(self, backend):
        """Decays are counted from the newest row: folding between verify and commit changes nothing."""
        problem = batch(["chain 3"], strong_gate=-20.0)
        sequences = Sequences(problem.state, 2, 8, backend)
        sequences.step(problem, [[0, 1, 2]])
        problem = batch(["scattered"], seed=1)._replace(state=sequences.state)
        record = problem.verify(history=sequences.history, backend=backend).record
        want = walked(problem._replace(state=sequences.exact)).states[4]
        gdn.fold(sequences.state, problem.slots, sequences.history, backend=backend)
        assert sequences.history.lengths.tolist() == [0]
        gdn.commit(sequences.state, problem.slots, record, pack_paths(problem.tree, [[0, 3, 4]]), backend=backend)
        assert_close(sequences.state[0], want, EXACT)

    def test_an_empty_history_is_no_history(self):
        problem = batch(["scattered", "chain 31"], slots=[1, 0])
        plain = problem.verify()
        with_history = problem.verify(history=empty_history(problem.state, 2, 4))
        assert torch.equal(with_history.o, plain.o)
        assert all(map(torch.equal, with_history.record, plain.record))


class TestArithmetic:
    """Rung 3: float32 through a ring, against float64 on the same inputs, held to the float32 walk's error."""

    @staticmethod
    def draws(tree, dtype=torch.float32, **options):
        problem = make([tree], heads=DRAWS, group=1, key_dim=16, value_dim=8, **options)
        return problem.to(dtype, gates=torch.float32, state=torch.float32)

    @pytest.mark.parametrize("strong_gate", STRONG_GATES)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize(("num_committed", "shape"), [(15, "widths 3 3 3"), (30, "scattered"), (40, "two arms")])
    def test_ordinary_keys(self, strong_gate, dtype, num_committed, shape):
        problem = self.draws(behind_a_chain(num_committed, SHAPES[shape]), dtype, strong_gate=strong_gate)
        measured = arithmetic(problem)._replace(op=errors_through_a_ring(problem, num_committed))
        check_factor(measured, measured.walk, WALK_FACTOR)

    @pytest.mark.parametrize("at", [0, 1, 7, 15])
    @pytest.mark.parametrize("strong_gate", STRONG_GATES[1:])
    def test_a_strong_gate_anywhere_in_the_history(self, at, strong_gate):
        """Sixteen rows in the history, one at a time, and small gates around the strong one."""
        problem = self.draws(behind_a_chain(16, SHAPES["widths 3 3 3"]))
        problem.g[at] = strong_gate
        measured = arithmetic(problem)._replace(op=errors_through_a_ring(problem, 16, at_once=1))
        check_factor(measured, measured.walk, WALK_FACTOR)

    @pytest.mark.parametrize("strong_gate", STRONG_GATES)
    @pytest.mark.parametrize(("num_committed", "depth"), [(4, 4), (16, 16), (48, 16), (16, 48)])
    @pytest.mark.parametrize(
        ("correlation", "beta"),
        [(1.0, (1.0, 1.0)), (1.0, (0.0, 2.0)), (1.0, (2.0, 2.0)), (0.98, (0.0, 2.0)), (0.98, (2.0, 2.0))],
    )
    def test_hard_keys(self, strong_gate, num_committed, depth, correlation, beta):
        hard = {"correlation": correlation, "beta": beta, "gate_one": True, "strong_gate": strong_gate}
        problem = self.draws(behind_a_chain(num_committed, DraftTree.chain(depth - 1)), **hard)
        measured = arithmetic(problem)._replace(op=errors_through_a_ring(problem, num_committed))
        check_factor(measured, measured.substitution, SUBSTITUTION_FACTOR)
        check_factor(measured, measured.walk, WALK_FACTOR)

    def test_decays_that_follow_a_strong_one_are_kept(self):
        """One float32 of -200 and less forgets decays of 1e-6; the history's two do not, however many appends."""
        problem = batch(["root"], gate_one=True).to(torch.float32)
        history = empty_history(problem.state, 2, 16)
        gates = torch.tensor([-1e-6, -200.0, *[-1e-6] * 14])
        for gate in gates:
            record = problem._replace(g=torch.full((1, 4), gate)).verify(history=history).record
            gdn.append(history, problem.slots, record, pack_paths(problem.tree, [[0]]))
        total = history.decay_high[0].double() + history.decay_low[0].double()
        want = gates.double().cumsum(0)[:, None]
        assert ((total - want).abs() <= 16 * TWO_FLOAT32 * want.abs()).all()


class TestNothingElseIsTouched:
    @staticmethod
    def filled(names, backend=None, **options):
        """Return a problem on slots of which each but the first holds a history of its own length."""
        problem = batch(names, **options)
        sequences = Sequences(problem.state, 2, 8, backend)
        for seq in range(len(names)):
            paths = [list(range(other)) if other <= seq else [] for other in range(len(names))]
            sequences.step(batch(["chain 3"] * len(names), seed=seq, **options), paths)
        return problem._replace(state=sequences.state), sequences.history

    @both_backends
    def test_verify_never_writes(self, backend):
        problem, history = self.filled(["chain 3", "scattered", "root"])
        before = raw([*problem[:7], *history])
        problem.verify(history=history, backend=backend)
        assert same_bits(raw([*problem[:7], *history]), before)

    @both_backends
    def test_empty_paths_and_inert_slots_change_no_bit(self, backend):
        problem, history = self.filled(["chain 3", "scattered", "root"], slots=[2, 1, 0], num_slots=4)
        assert history.lengths.tolist() == [2, 2, 0, 0]
        problem.state[3, 0, 0, :3] = torch.tensor([torch.nan, -0.0, torch.inf])
        record = problem.verify(history=history, backend=backend).record
        state, before = problem.state.clone(), raw([problem.state, *history])
        gdn.append(history, problem.slots, record, pack_paths(problem.tree, [[], [], []]), backend=backend)
        inert = torch.tensor([-1, -1, -1])
        gdn.append(history, inert, record, pack_paths(problem.tree, [[0, 1], [0, 3], [0]]), backend=backend)
        gdn.fold(state, inert, history, backend=backend)
        gdn.fold(state, torch.tensor([3, 2]), history, backend=backend)
        assert same_bits(raw([state, *history]), before)
        gdn.fold(state, torch.tensor([-1, 1]), history, backend=backend)
        after = raw([state, *history])
        assert history.lengths.tolist() == [2, 0, 0, 0]
        assert not torch.equal(after[0][1], before[0][1])
        assert torch.equal(after[0][[0, 2, 3]], before[0][[0, 2, 3]])
        assert same_bits(after[1:5], before[1:5])

    @both_backends
    @pytest.mark.parametrize("poison", [torch.nan, 1e4])
    def test_unused_rows_and_free_slots_are_not_read(self, backend, poison):
        options = {"slots": [3, -1, 1], "num_slots": 5, "num_rows": 13}
        problem, history = self.filled(["chain 3", "scattered", "root"], backend, slots=[3, -1, 1], num_slots=5)
        problem = batch(["chain 3", "scattered", "root"], seed=9, **options)._replace(state=problem.state)
        results = []
        for fill in (0.0, poison):
            state, parts = problem.state.clone(), gdn.History(*(part.clone() for part in history))
            state[[0, 2, 4]] = fill
            for part in parts[:4]:
                for slot in range(5):
                    part[slot, int(parts.lengths[slot]) if slot in (1, 3) else 0 :] = fill
            parts.lengths[[0, 2, 4]] = 8
            verified = problem._replace(state=state).verify(history=parts, backend=backend)
            paths = pack_paths(problem.tree, [[0, 1], [0, 3], [0]])
            gdn.append(parts, problem.slots, verified.record, paths, backend=backend)
            assert parts.lengths[[0, 2, 4]].tolist() == [8, 8, 8]
            gdn.fold(state, problem.slots, parts, backend=backend)
            assert verified.record.u.isfinite().all()
            results.append((verified.o, state[[1, 3]]))
        assert all(map(torch.equal, *results))
        assert results[0][1].isfinite().all()
        assert not results[1][0][4:9].any()
        assert not results[1][0][10:].any()

    @both_backends
    @pytest.mark.parametrize("where", ["history", "draft"])
    def test_a_nan_stays_where_it_arose(self, backend, where):
        """In a history it spoils its own sequence; in a draft its own branch, whatever the history holds."""
        problem, history = self.filled(["scattered", "scattered"], slots=[1, 0])
        good = problem.verify(history=history, backend=backend).o
        bad = problem._replace(k=problem.k.clone())
        if where == "history":
            history.u[0, 0, :, 0] = torch.nan
        else:
            bad.k[8] = torch.nan
        got = bad.verify(history=history, backend=backend).o
        spoilt = [5, 6, 7, 8, 9] if where == "history" else [8, 9]
        assert torch.equal(got[[row for row in range(10) if row not in spoilt]], good[: 10 - len(spoilt)])
        assert got[spoilt].isnan().any(dim=-1).all()

    def test_a_row_does_not_depend_on_its_neighbours(self):
        """Alone, or beside sequences with longer and shorter histories: float32, outputs and states."""
        problem, history = self.filled(["chain 3", "scattered", "chain 31"], num_rows=None)
        problem = problem.to(torch.float32)
        history = gdn.History(*(part.float() for part in history[:4]), history.lengths)
        together = problem.verify(history=history)
        for seq, name in enumerate(["chain 3", "scattered", "chain 31"]):
            span = slice(problem.tree.starts[seq], problem.tree.starts[seq + 1])
            alone = problem._replace(
                **{field: getattr(problem, field)[span] for field in ("q", "k", "v", "g", "beta")},
                slots=problem.slots[seq : seq + 1],
                tree=pack([SHAPES[name]]),
            ).verify(history=history)
            assert relative(together.o[span].numpy(), alone.o.numpy(), 1).max() <= NEIGHBOURS_FLOAT32
            one = folded(problem.state[seq : seq + 1], gdn.History(*(part[seq : seq + 1] for part in history)))
            assert torch.equal(one[0], folded(problem.state, history)[seq])


class TestRefusals:
    @both_backends
    def test_a_path_without_room(self, backend):
        problem = batch(["chain 3", "chain 3"])
        history = empty_history(problem.state, 2, 5)
        record = problem.verify(history=history, backend=backend).record
        path = pack_paths(problem.tree, [[0], [0, 1, 2]])
        gdn.append(history, problem.slots, record, path, backend=backend)
        before = raw(history)
        assert gdn.fits(history, problem.slots, path).tolist() == [True, False]
        with pytest.raises(CapacityError, match=r"slot 1 holds 3 of 5 rows and the path has 3\. Fold"):
            gdn.append(history, problem.slots, record, path, backend=backend)
        assert same_bits(raw(history), before)
        short = empty_history(problem.state, 2, 2)
        assert gdn.fits(short, torch.tensor([-1, -1]), path).all()
        gdn.append(short, torch.tensor([0, -1]), record, path, backend=backend)
        assert short.lengths.tolist() == [1, 0]

    def test_the_last_row_fits(self):
        problem = batch(["chain 3"])
        history = empty_history(problem.state, 2, 4)
        path = pack_paths(problem.tree, [[0, 1, 2, 3]])
        assert gdn.fits(history, problem.slots, path).all()
        gdn.append(history, problem.slots, problem.verify(history=history).record, path)
        assert history.lengths.tolist() == [4]

    @both_backends
    @pytest.mark.parametrize("slots", [[5, 0], [-2, 0], [3, 3]])
    def test_bad_slots(self, backend, slots):
        problem = batch(["chain 3", "chain 3"], num_slots=5)
        history = empty_history(problem.state, 2, 5)
        record, path = problem.verify(history=history).record, pack_paths(problem.tree, [[0], [0]])
        calls = [
            lambda bad: gdn.append(history, bad, record, path, backend=backend),
            lambda bad: gdn.fold(problem.state, bad, history, backend=backend),
            lambda bad: problem._replace(slots=bad).verify(history=history, backend=backend),
            lambda bad: gdn.fits(history, bad, path),
        ]
        for call in calls:
            with pytest.raises(CapacityError, match="slot"):
                call(torch.tensor(slots))

    def test_shapes(self):
        problem = batch(["chain 3"])
        history = empty_history(problem.state, 2, 5)
        record, path = problem.verify(history=history).record, pack_paths(problem.tree, [[0]])
        for part in gdn.History._fields:
            bad = history._replace(**{part: getattr(history, part)[..., :-1]})
            with pytest.raises(ShapeError, match="history must"):
                problem.verify(history=bad)
            with pytest.raises(ShapeError, match="must"):
                gdn.append(bad, problem.slots, record, path)
            with pytest.raises(ShapeError, match="history must"):
                gdn.fold(problem.state, problem.slots, bad)
        with pytest.raises(ShapeError, match="row at least"):
            problem.verify(history=gdn.History(*(part[:, :0] for part in history[:4]), history.lengths))
        with pytest.raises(ShapeError, match="key heads"):
            problem.verify(history=history._replace(k=history.k[:, :, :1]))
        with pytest.raises(ShapeError, match="record must fit"):
            gdn.append(history, problem.slots, record._replace(k=record.k[:, :1]), path)
        with pytest.raises(ShapeError, match="one entry per sequence"):
            gdn.append(history, torch.tensor([0, -1]), record, path)
