"""Rung 2 and the contracts of the op: eager in float64 equals the walk, and touches nothing that is not its own."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ops.checks import KINDS, assert_close, check_algebra, relative, walked
from ops.problems import SHAPES, make, problems
from tolerances import EXACT, NEIGHBOURS_FLOAT32
from treewy.errors import CapacityError, ShapeError
from treewy.ops import gdn
from treewy.ops.gdn import eager
from treewy.packed import pack, pack_paths
from treewy.tree import DraftTree

both_kinds = pytest.mark.parametrize("kind", KINDS)
both_backends = pytest.mark.parametrize("backend", ["eager", "reference"])
BATCH = ["scattered", "chain 3", "root", "chain 31"]


def batch(names=BATCH, **options):
    return make([SHAPES[name] for name in names], **options)


def leaf_paths(problem):
    """Return the path to each tree's last row."""
    return pack_paths(problem.tree, [DraftTree(shape).path(len(shape) - 1) for shape in problem.tree.shapes])


def bits(x):
    return x.contiguous().view(torch.uint8)


class TestAgainstTheWalk:
    @both_kinds
    @settings(max_examples=60)
    @given(data=st.data())
    def test_random_batches(self, kind, data):
        problem = data.draw(problems(max_rows=16, max_seqs=3))
        shapes = [DraftTree(shape) for shape in problem.tree.shapes]
        paths = [shape.path(data.draw(st.integers(0, shape.num_rows - 1))) for shape in shapes]
        paths = [path if data.draw(st.booleans()) else [] for path in paths]
        check_algebra(problem, pack_paths(problem.tree, paths), kind)

    @both_kinds
    @settings(max_examples=40)
    @given(data=st.data())
    def test_random_slots_and_padding(self, kind, data):
        shapes = data.draw(st.lists(st.sampled_from(["root", "chain 3", "scattered", "chain 11"]), max_size=4))
        order = data.draw(st.permutations(range(6)))
        slots = [slot if data.draw(st.booleans()) else -1 for slot in order[: len(shapes)]]
        rows = sum(SHAPES[name].num_rows for name in shapes) + data.draw(st.integers(0, 5))
        problem = batch(shapes, slots=slots, num_slots=6, num_rows=rows, key_dim=5, value_dim=3)
        check_algebra(problem, leaf_paths(problem), kind)

    @both_kinds
    @pytest.mark.parametrize("shape", SHAPES)
    @pytest.mark.parametrize("hard", [False, True], ids=["ordinary", "hard"])
    def test_shapes(self, kind, shape, hard):
        options = {"correlation": 1.0, "beta": (2.0, 2.0), "gate_one": True, "strong_gate": -100.0} if hard else {}
        problem = batch([shape], **options)
        check_algebra(problem, leaf_paths(problem), kind)

    @both_kinds
    @both_backends
    @pytest.mark.parametrize(
        ("heads", "group", "key_dim", "value_dim"),
        [(1, 1, 1, 1), (1, 3, 7, 5), (2, 1, 5, 9), (2, 3, 16, 3), (3, 2, 3, 17), (2, 4, 9, 8), (4, 4, 2, 2)],
    )
    def test_fault_k03_heads_and_odd_sizes(self, kind, backend, heads, group, key_dim, value_dim):
        """Fault K03: value head j reads key head j // (HV / H); equal head counts cannot show another rule."""
        problem = batch(heads=heads, group=group, key_dim=key_dim, value_dim=value_dim)
        check_algebra(problem, leaf_paths(problem), kind, backend)

    @both_kinds
    def test_fault_k09_operands_that_are_views(self, kind):
        """Fault K09: q, k and v were slices of one tensor, the pool a strided view, and strides were assumed."""
        plain = batch(heads=2, group=2, key_dim=8, value_dim=6)
        fused = torch.cat([x.flatten(1) for x in (plain.q, plain.k, plain.v)], dim=1)
        gates = torch.stack([plain.g, plain.beta], dim=-1)
        wide = torch.full((4, 4, 6, 16), torch.nan, dtype=torch.float64)
        wide[..., ::2] = plain.state
        views = plain._replace(
            q=fused[:, :16].unflatten(1, (2, 8)),
            k=fused[:, 16:32].unflatten(1, (2, 8)),
            v=fused[:, 32:].unflatten(1, (4, 6)),
            g=gates[..., 0],
            beta=gates[..., 1],
            state=wide[..., ::2],
        )
        assert not any(x.is_contiguous() for x in views[:6])
        check_algebra(views, leaf_paths(views), kind)
        transposed = plain._replace(state=plain.state.transpose(-1, -2).contiguous().transpose(-1, -2))
        check_algebra(transposed, leaf_paths(transposed), kind)
        verified = KINDS[kind].verify(*views)
        KINDS[kind].commit(views.state, views.slots, verified.record, leaf_paths(views))
        assert wide[..., 1::2].isnan().all()
        assert wide[..., ::2].isfinite().all()

    def test_record_and_snapshots_agree(self):
        problem = batch(strong_gate=-20.0)
        record, snapshots = problem.verify(), problem.verify_snapshots()
        assert_close(record.o, snapshots.o.numpy(), EXACT)

    @both_backends
    def test_the_record_is_in_the_compute_dtype(self, backend):
        problem = batch(["scattered"]).to(torch.bfloat16, gates=torch.float32, state=torch.bfloat16)
        wide = torch.float32 if backend == "eager" else torch.float64
        verified = problem.verify(backend=backend)
        assert verified.o.dtype == torch.bfloat16
        assert {part.dtype for part in verified.record} == {wide}

    @pytest.mark.parametrize("num_rows", [0, 3])
    @both_kinds
    @both_backends
    def test_fault_k10_an_empty_batch(self, num_rows, kind, backend):
        """Fault K10: batches without work crashed."""
        problem = make([], num_rows=num_rows, num_slots=2)
        check_algebra(problem, pack_paths(problem.tree, []), kind, backend)

    def test_the_deep_and_the_level_solver_agree(self, monkeypatch):
        problem = batch(["widths 3 3 3", "chain 31"], correlation=0.98, beta=(2.0, 2.0), gate_one=True)
        deep = problem.verify().record.u
        monkeypatch.setattr(eager, "SOLVE_TRIANGULAR_DEPTH", 1000)
        assert_close(problem.verify().record.u, deep.numpy(), EXACT)


class TestPathsAreChains:
    """Each node's output equals the last output of its root path run as a chain."""

    @staticmethod
    def chains(problem):
        """Yield, per node, (packed row, the problem of its root path as a chain)."""
        for seq, shape in enumerate(problem.tree.shapes):
            for node in range(len(shape)):
                path = DraftTree(shape).path(node)
                rows = [problem.tree.starts[seq] + row for row in path]
                one = [x[rows] for x in problem[:5]]
                tree = pack([DraftTree.chain(len(path) - 1)])
                yield (
                    rows[-1],
                    problem._replace(
                        **dict(zip(["q", "k", "v", "g", "beta"], one, strict=True)),
                        slots=problem.slots[seq : seq + 1],
                        tree=tree,
                    ),
                )

    @both_kinds
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
    @pytest.mark.parametrize("shape", ["scattered", "widths 3 3 3", "two arms"])
    def test_node_by_node(self, kind, dtype, shape):
        problem = batch([shape], correlation=0.5, beta=(0.0, 2.0), strong_gate=-20.0).to(dtype)
        whole = KINDS[kind].verify(*problem).o.double().numpy()
        tolerance = EXACT if dtype == torch.float64 else NEIGHBOURS_FLOAT32
        for row, chain in self.chains(problem):
            alone = KINDS[kind].verify(*chain).o[-1].double().numpy()
            assert relative(whole[row], alone, 0).max() <= tolerance

    @both_kinds
    def test_later_rows_do_not_matter(self, kind):
        problem = batch(["widths 3 3 3"])
        prefix = problem._replace(
            **{name: getattr(problem, name)[:17] for name in ("q", "k", "v", "g", "beta")},
            tree=pack([SHAPES["widths 3 3 3"].prefix(17)]),
        )
        assert_close(KINDS[kind].verify(*prefix).o, KINDS[kind].verify(*problem).o[:17].numpy(), EXACT)


class TestNothingElseIsTouched:
    @both_kinds
    @both_backends
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_verify_never_writes(self, kind, backend, dtype):
        problem = batch().to(dtype, gates=torch.float32)
        before = [bits(x.clone()) for x in problem[:7]]
        KINDS[kind].verify(*problem, backend=backend)
        for operand, old in zip(problem[:7], before, strict=True):
            assert torch.equal(bits(operand), old)

    @both_kinds
    @both_backends
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_fault_a02_an_empty_path_keeps_every_bit(self, kind, backend, dtype):
        """Fault A02: an accepted count of 0 read history at -1, or committed the rejected tokens."""
        problem = batch(["chain 3", "chain 3", "scattered"]).to(dtype, gates=torch.float32)
        problem.state[0, 0, 0, :3] = torch.tensor([torch.nan, -0.0, torch.inf])
        verified = KINDS[kind].verify(*problem, backend=backend)
        pool = problem.state.clone()
        path = pack_paths(problem.tree, [[], [0, 1, 2], []])
        KINDS[kind].commit(pool, problem.slots, verified.record, path, backend=backend)
        assert torch.equal(bits(pool[[0, 2]]), bits(problem.state[[0, 2]]))
        assert not torch.equal(pool[1], problem.state[1])
        KINDS[kind].commit(pool, problem.slots, verified.record, pack_paths(problem.tree, [[]] * 3), backend=backend)
        assert torch.equal(bits(pool[[0, 2]]), bits(problem.state[[0, 2]]))

    @both_kinds
    @both_backends
    def test_fault_c03_inert_slots_read_and_write_nothing(self, kind, backend):
        """Faults C03, C04, C10: padding was clamped onto slot 0, or left stale outputs."""
        problem = batch(["chain 3", "scattered", "chain 3"], slots=[0, -1, 2], num_slots=3)
        check_algebra(problem, leaf_paths(problem), kind, backend)
        verified = KINDS[kind].verify(*problem, backend=backend)
        assert not verified.o[4:9].any()

    @both_kinds
    @both_backends
    def test_all_slots_inert(self, kind, backend):
        problem = batch(["chain 3", "scattered"], slots=[-1, -1], num_slots=1)
        check_algebra(problem, leaf_paths(problem), kind, backend)

    @both_kinds
    @both_backends
    def test_fault_a09_a_pool_larger_than_the_batch(self, kind, backend):
        """Fault A09: scratch of the batch's size was indexed by pool slot."""
        names = ["scattered", "chain 3"]
        one = batch(names, slots=[61, 7], num_slots=64)
        check_algebra(one, leaf_paths(one), kind, backend)
        state = one.state.clone()
        state[[61, 7]] = one.state[[7, 61]]
        other = one._replace(state=state, slots=torch.tensor([7, 61]))
        results = []
        for problem in (one, other):
            verified, pool = KINDS[kind].verify(*problem, backend=backend), problem.state.clone()
            KINDS[kind].commit(pool, problem.slots, verified.record, leaf_paths(problem), backend=backend)
            results.append((verified.o, pool))
        assert torch.equal(results[0][0], results[1][0])
        assert torch.equal(results[0][1][[61, 7]], results[1][1][[7, 61]])

    @both_kinds
    @both_backends
    @pytest.mark.parametrize("poison", [torch.nan, 1e4])
    @pytest.mark.parametrize("names", [["scattered", "chain 3", "root"], ["chain 3", "chain 3", "chain 3"]])
    def test_poisoned_memory_is_not_read(self, kind, backend, poison, names):
        size = sum(SHAPES[name].num_rows for name in names)
        clean = batch(names, slots=[3, -1, 1], num_slots=6, num_rows=size + 4)
        live = torch.zeros(size + 4, dtype=torch.bool)
        for seq in (0, 2):
            live[clean.tree.starts[seq] : clean.tree.starts[seq + 1]] = True
        dirty = clean._replace(**{name: getattr(clean, name).clone() for name in ("q", "k", "v", "g", "beta", "state")})
        for name in ("q", "k", "v", "g", "beta"):
            getattr(dirty, name)[~live] = poison
        dirty.state[[0, 2, 4, 5]] = poison
        results = []
        for problem in (clean, dirty):
            verified, pool = KINDS[kind].verify(*problem, backend=backend), problem.state.clone()
            KINDS[kind].commit(pool, problem.slots, verified.record, leaf_paths(problem), backend=backend)
            results.append((verified.o, pool[[3, 1]]))
        assert torch.equal(results[0][0], results[1][0])
        assert torch.equal(results[0][1], results[1][1])
        assert not results[1][0][~live].any()

    @both_kinds
    @both_backends
    @pytest.mark.parametrize("names", [["scattered", "chain 3"], ["chain 31", "chain 31"]])
    def test_fault_f10_a_nan_stays_in_its_request(self, kind, backend, names):
        """Fault F10: NaN x 0 is NaN; one bad request must not reach its neighbours, and must be seen."""
        problem = batch(names)
        bad = problem._replace(k=problem.k.clone(), v=problem.v.clone())
        bad.k[1], bad.v[1] = torch.nan, torch.inf
        start = problem.tree.starts[1]
        good, spoilt = (KINDS[kind].verify(*x, backend=backend) for x in (problem, bad))
        assert torch.equal(good.o[start:], spoilt.o[start:])
        assert spoilt.o[1].isnan().all()
        pools = []
        for verified in (good, spoilt):
            pool = problem.state.clone()
            KINDS[kind].commit(pool, problem.slots, verified.record, leaf_paths(problem), backend=backend)
            pools.append(pool)
        assert torch.equal(pools[0][1], pools[1][1])

    @both_kinds
    def test_fault_f10_a_zero_key_only_decays(self, kind):
        """Fault F10: a zero key gave 0 / 0."""
        problem = batch(["chain 3", "chain 3"])
        problem.k[:] = gdn.l2_normalise(torch.zeros_like(problem.k))
        verified, pool = KINDS[kind].verify(*problem), problem.state.clone()
        KINDS[kind].commit(pool, problem.slots, verified.record, leaf_paths(problem))
        total = problem.g.reshape(2, 4, -1).sum(1).exp()
        assert_close(pool, (problem.state * total[..., None, None]).numpy(), EXACT)


class TestSlots:
    @both_kinds
    @both_backends
    @pytest.mark.parametrize("slots", [[5, 0], [0, 6], [-2, 0], [0, -5], [10**9, 1], [3, 3], [0, 0]])
    def test_fault_a03_bad_slots_are_refused(self, kind, backend, slots):
        """Fault A03: no bound on the slot index; a guard that then refused good rows too."""
        problem = batch(["chain 3", "chain 3"], num_slots=5)
        record = KINDS[kind].verify(*problem).record
        bad = torch.tensor(slots)
        with pytest.raises(CapacityError, match=r"slot"):
            KINDS[kind].verify(*problem._replace(slots=bad), backend=backend)
        pool = problem.state.clone()
        with pytest.raises(CapacityError, match=r"slot"):
            KINDS[kind].commit(pool, bad, record, leaf_paths(problem), backend=backend)
        assert torch.equal(pool, problem.state)

    @both_kinds
    @both_backends
    @pytest.mark.parametrize("slots", [[4, 0], [0, 4], [-1, -1], [-1, 4]])
    def test_fault_a03_good_slots_are_not(self, kind, backend, slots):
        """Fault A03, the other side: every slot of the pool works, the last one too; any number may be inert."""
        problem = batch(["chain 3", "chain 3"], slots=slots, num_slots=5)
        check_algebra(problem, leaf_paths(problem), kind, backend)

    @both_kinds
    @both_backends
    def test_fault_a03_strided_slot_tables(self, kind, backend):
        """Fault A03: the guard compared with the stride of the table."""
        problem = batch(["chain 3", "scattered", "root"], slots=[1, 2, 3], num_slots=5)
        table = torch.full((3, 4), 99)
        table[:, 1] = torch.tensor([1, 2, 3])
        check_algebra(problem._replace(slots=table[:, 1]), leaf_paths(problem), kind, backend)

    @both_kinds
    @both_backends
    def test_fault_c13_slot_ids_of_either_width(self, kind, backend):
        """Fault C13: 64-bit slot ids were read as 32-bit."""
        problem = batch(["chain 3", "scattered", "root"], slots=[5, 2, -1], num_slots=6)
        results = []
        for dtype in (torch.int32, torch.int64):
            one = problem._replace(slots=problem.slots.to(dtype))
            check_algebra(one, leaf_paths(one), kind, backend)
            results.append(KINDS[kind].verify(*one, backend=backend).o)
        assert torch.equal(*results)


class TestCommit:
    @both_kinds
    @both_backends
    def test_fault_g05_the_committed_node_is_the_paths_last(self, kind, backend):
        """Fault G05: node 4 of parents [-1, 0, 0, 0, 3], path 0-3-4: not node 2, the length minus one."""
        problem = batch(["scattered"])
        check_algebra(problem, pack_paths(problem.tree, [[0, 3, 4]]), kind, backend)

    @both_kinds
    @pytest.mark.parametrize("length", [1, 2, 3, 4])
    def test_every_accepted_length(self, kind, length):
        problem = batch(["chain 3", "chain 3"])
        check_algebra(problem, pack_paths(problem.tree, [list(range(length)), list(range(5 - length))]), kind)

    @both_kinds
    @both_backends
    def test_what_was_verified_for_another_tree_is_refused(self, kind, backend):
        problem = batch(["scattered", "chain 3"])
        record = KINDS[kind].verify(*problem).record
        other = pack([SHAPES["chain 3"], SHAPES["chain 3"]])
        with pytest.raises(ShapeError, match="got"):
            KINDS[kind].commit(problem.state, problem.slots, record, pack_paths(other, [[0], [0]]), backend=backend)
        with pytest.raises(ShapeError, match="one entry per sequence, 2"):
            KINDS[kind].commit(problem.state, problem.slots[:1], record, leaf_paths(problem), backend=backend)

    @both_kinds
    def test_fault_f11_a_low_precision_state_is_rounded_once(self, kind):
        """Fault F11: the committed bfloat16 state is one rounding of the float32 one, not one per node."""
        problem = batch(["chain 11"]).to(torch.bfloat16, gates=torch.float32)
        narrow = problem.state.clone()
        wide = problem._replace(state=problem.state.float())
        for pool, one in ((narrow, problem), (wide.state, wide)):
            verified = KINDS[kind].verify(*one)
            KINDS[kind].commit(pool, one.slots, verified.record, leaf_paths(one))
        assert torch.equal(narrow, wide.state.bfloat16())

    def test_fault_a08_the_closed_form_commits_what_the_walk_commits(self):
        """Fault A08: the tree commit used a half-precision shortcut, the chain replayed exactly."""
        problem = batch(["chain 11"]).to(torch.float32)
        pools = []
        for kind in KINDS.values():
            pool = problem.state.clone()
            kind.commit(pool, problem.slots, kind.verify(*problem).record, leaf_paths(problem))
            pools.append(pool.numpy())
        assert relative(pools[0][0], pools[1][0], 0).max() <= NEIGHBOURS_FLOAT32


class TestNeighbours:
    @both_kinds
    @pytest.mark.parametrize("names", list(itertools.permutations(["scattered", "chain 3", "chain 31"], 2)))
    def test_a_row_does_not_depend_on_neighbours_or_padding(self, kind, names):
        """Each sequence alone, beside another, and beside padding: float32 states and outputs."""
        problem = batch(names, num_rows=sum(SHAPES[name].num_rows for name in names) + 5).to(torch.float32)
        together = KINDS[kind].verify(*problem)
        pool = problem.state.clone()
        KINDS[kind].commit(pool, problem.slots, together.record, leaf_paths(problem))
        for seq, name in enumerate(names):
            span = slice(problem.tree.starts[seq], problem.tree.starts[seq + 1])
            alone = problem._replace(
                **{field: getattr(problem, field)[span] for field in ("q", "k", "v", "g", "beta")},
                slots=problem.slots[seq : seq + 1],
                tree=pack([SHAPES[name]]),
            )
            verified, own = KINDS[kind].verify(*alone), problem.state.clone()
            KINDS[kind].commit(own, alone.slots, verified.record, leaf_paths(alone))
            assert relative(together.o[span].numpy(), verified.o.numpy(), 1).max() <= NEIGHBOURS_FLOAT32
            assert relative(pool[seq].numpy(), own[seq].numpy(), 0).max() <= NEIGHBOURS_FLOAT32

    @both_kinds
    def test_walked_zero_rows(self, kind):
        """The oracle and the op agree on rows without a sequence: zeros."""
        problem = batch(["root"], num_rows=3)
        assert not walked(problem).o[1:].any()
        assert np.array_equal(KINDS[kind].verify(*problem).o[1:].numpy(), np.zeros((2, 4, 16)))
