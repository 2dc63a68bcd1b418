"""The Triton kernels of the gated delta rule in Triton's interpreter: every entry, every branch, and what must not matter."""

import numpy as np
import pytest
import torch

from ops.checks import assert_close, relative, walked
from ops.problems import make
from ops.rings import empty_history
from ops.serving import HARD, Spec, Stream, cast, paths_of, projections
from tolerances import EXACT, FLOAT32_FLOOR, KERNEL_FLOAT32, KERNEL_HARD_FLOAT32, KERNEL_TWIN
from treewy.errors import BackendError, ShapeError, UnsupportedError
from treewy.ops import gdn
from treewy.ops.launch import LAUNCHES
from treewy.ops.tree import tables as make_tables
from treewy.packed import PathTables, pack, pack_paths
from treewy.tree import DraftTree

SCATTERED = DraftTree([-1, 0, 0, 0, 3])
TWO_ARMS = DraftTree([-1, 0, 0, *range(1, 38)])  # 40 rows, 20 deep, rows of one path in several blocks of 16
SMALL = Spec(heads=1, group=2)


@pytest.fixture(autouse=True)
def kernels_ran(request):
    """Every test here launches a kernel, or says that it does not."""
    before = sum(LAUNCHES.values())
    yield
    if "refused" not in request.node.name:
        assert sum(LAUNCHES.values()) > before


def close(got, want, tolerance):
    """Assert that the largest error of each head is within `tolerance` of its largest value."""
    want = np.where(np.isfinite(want), want, np.nan)
    assert np.isfinite(got.double().numpy()).all()
    live = np.abs(want).max(axis=(0, 2)) > 0
    assert relative(got.double().numpy()[:, live], want[:, live], 1).max() <= tolerance


def run(stream, trees, steps, tolerance, **options):
    """Step through `steps`, pairs of (paths, fold), and check each against the walk."""
    for seed, (paths, fold) in enumerate(steps):
        verified, want = stream.step([3, -1, 0], trees, paths=paths, fold=fold, seed=seed, **options)
        close(verified.o, want, tolerance)


NONE = ([[], [], []], [0, 0, 0])
STEPS = [NONE, ([[0, 3, 4], [0], [0, 1]], [0, 0, 0]), ([[0], [0], []], [0, 0, 0]), ([[0, 3], [0], [0, 1]], [0, 1, 1])]


@pytest.mark.parametrize("history", [8, 0])
@pytest.mark.parametrize("gate", [0.0, -20.0, -100.0, -200.0])
def test_steps_are_the_walk(history, gate):
    """Paths read beside the state, appended, folded with their history or without; an inert sequence; padding rows."""
    spec = SMALL._replace(strong_gate=gate)
    steps = STEPS if gate in (0.0, -20.0) else STEPS[:2]
    stream = Stream(spec, 5, history, dtype=torch.float32, backend="triton")
    run(stream, [SCATTERED, DraftTree.chain(1), DraftTree.chain(3)], steps, KERNEL_FLOAT32, num_rows=14)


@pytest.mark.parametrize("tree", [TWO_ARMS, DraftTree.chain(31)], ids=["two arms", "chain"])
def test_hard_keys(tree):
    """Fault F06: nearly equal keys, gates of 1, beta 2: an unstable solve has no digit left. Blocks of 16 rows meet."""
    stream = Stream(HARD._replace(heads=1, group=1), 4, 0, dtype=torch.float32, backend="triton")
    leaf = tree.path(tree.num_rows - 1)
    run(stream, [tree, SCATTERED, SCATTERED], [NONE, ([leaf, [], [0]], [0, 0, 0])], KERNEL_HARD_FLOAT32)


def test_seventy_rows():
    """The largest blocks: products in halves."""
    stream = Stream(Spec(heads=1, group=1), 4, 0, dtype=torch.float32, backend="triton")
    tree = DraftTree([-1, 0, *range(68)])
    run(stream, [tree, SCATTERED, SCATTERED], [NONE], KERNEL_FLOAT32)


@pytest.mark.parametrize(("key_dim", "value_dim", "group"), [(48, 24, 3), (96, 16, 1), (64, 96, 1), (16, 16, 8)])
def test_dims(key_dim, value_dim, group):
    """K in blocks that divide it, V padded, any number of value heads per key head; float16 rows, float32 state."""
    spec = Spec(heads=1, group=group, key_dim=key_dim, value_dim=value_dim)
    dtypes = {"dtype": torch.float16, "state": torch.float32, "u": torch.float32}
    stream = Stream(spec, 4, 4, backend="triton", **dtypes)
    run(
        stream, [SCATTERED, SCATTERED, DraftTree.chain(1)], [NONE, STEPS[1], ([[0], [], []], [1, 0, 0])], KERNEL_FLOAT32
    )


def twins(spec, history, dtype=torch.float32, **options):
    return [Stream(spec, 5, history, dtype=dtype, backend=backend, **options) for backend in ("eager", "triton")]


@pytest.mark.parametrize("history", [8, 0])
def test_what_is_kept_is_what_eager_keeps(history):
    """States, records, histories in value; what neither owns in bits."""
    eager, triton = twins(SMALL._replace(strong_gate=-200.0), history)
    for seed, (paths, fold) in enumerate(STEPS):
        results = []
        for stream in (eager, triton):
            trees = [SCATTERED, DraftTree.chain(1), DraftTree.chain(3)]
            verified, _ = stream.step([3, -1, 0], trees, paths=paths, fold=fold, seed=seed, num_rows=14)
            record = [part[[*range(5), *range(7, 11)]] for part in verified.record]
            results.append([verified.o, *record, stream.state, *(stream.history or ())])
        for one, other in zip(*results, strict=True):
            assert one.dtype == other.dtype
            assert torch.equal(one.isnan(), other.isnan())
            assert_close(other.nan_to_num(), one.nan_to_num().double().numpy(), KERNEL_TWIN)
    if history:
        # The second float holds what the gates behind a strong one add to the first: counted from there, nothing is lost.
        kept = [
            given.history.decay_high[3, 1:4].double() + given.history.decay_low[3, 1:4] for given in (eager, triton)
        ]
        assert (kept[0] < -190).all()
        behind = [total[1:] - total[0] for total in kept]
        assert (behind[0] - behind[1]).abs().max() < FLOAT32_FLOOR


def raw(tensors):
    return [x.contiguous().view(torch.uint8).clone() for x in tensors]


def step_on(state, slots, trees, x, prior=None, **options):
    """Run one step on given operands; outputs start as NaN."""
    rows = sum(tree.num_rows for tree in trees)
    packed = pack(trees, num_rows=x.v.shape[0])
    assert rows <= x.v.shape[0]
    spec = Spec(x.k.shape[1], x.v.shape[1] // x.k.shape[1], x.k.shape[2], x.v.shape[2])
    out = Stream(spec, 1, dtype=torch.float32).buffers(x.v.shape[0])
    slots = torch.tensor(slots, dtype=torch.int32)
    return gdn.commit_verify(x, state, slots, packed.tables, prior=prior, out=out, backend="triton", **options)


def problem(trees, num_rows=None, spec=SMALL, num_slots=3, seed=0):
    """Return (float32 projections, state)."""
    x = cast(projections(spec, trees, seed=seed, num_rows=num_rows), torch.float32)
    rng = np.random.default_rng(seed)
    shape = (num_slots, spec.value_heads, spec.value_dim, spec.key_dim)
    return x, torch.from_numpy(rng.normal(size=shape)).float()


class TestWhatMustNotMatter:
    def test_unowned_memory(self):
        """Fault C10: NaN in free slots, behind histories and paths, in lost and padding rows moves no bit."""
        trees = [SCATTERED, DraftTree.chain(2)]
        results = []
        for poison in (0.0, torch.nan, 1e4):
            x, state = problem(trees, num_rows=11)
            for part in x[:5]:
                part[8:] = poison
            old = Stream(SMALL, 1, dtype=torch.float32).buffers(9).record
            old = gdn.Record(*(torch.full_like(part, poison) for part in old))
            for row in (2, 5, 7):
                for part in old:
                    part[row] = -0.25 if part.ndim == 2 else 0.1 * row
            path = paths_of([0, 0], [[2, 5], [7]], 4)
            history = empty_history(state, 1, 4, fill=poison)
            history.lengths[:] = torch.tensor([1, 4, 1])
            for part in history[:4]:
                part[[0, 2], 0] = -0.5
            state[1] = poison
            prior = gdn.Prior(history, old, path, torch.tensor([0, 1], dtype=torch.int32))
            verified = step_on(state, [2, 0], trees, x, prior)
            kept = [part[2, :3] for part in history[:4]]
            results.append(raw([verified.o, *(part[:8] for part in verified.record), state[[0, 2]], *kept]))
            assert state[1].isnan().all() if poison != poison else (state[1] == poison).all()
            assert history.lengths.tolist() == [1, 4, 1]
            assert (verified.o[8:] == 0).all()
            untouched = history.u[[0, 1]][:, 1:]
            assert untouched.isnan().all() if poison != poison else (untouched == poison).all()
        for other in results[1:]:
            assert all(map(torch.equal, results[0], other))

    @pytest.mark.parametrize("slot", [-1, 3, 70])
    def test_inert_slots(self, slot):
        """Faults A03, C01 and C03: -1, and to kernels any slot outside the pool: zeros out, nothing read, written or appended."""
        trees = [SCATTERED, DraftTree.chain(1)]
        x, state = problem(trees)
        state[[0, 2]] = torch.nan
        history = empty_history(state, 1, 4)
        old = gdn.Record(*(torch.ones_like(part) for part in Stream(SMALL, 1, dtype=torch.float32).buffers(2).record))
        prior = gdn.Prior(history, old, paths_of([0, 0], [[0], []], 2), torch.tensor([1, 0], dtype=torch.int32))
        before = raw([state, *history])
        verified = step_on(state, [slot, 1], trees, x, prior)
        assert (verified.o[:5] == 0).all()
        assert (verified.o[5:] != 0).all()
        assert all(map(torch.equal, before, raw([state, *history])))

    def test_what_is_no_tree_is_inert(self):
        """A row whose parent comes after it, and what hangs below: zeros, whatever they hold, and no influence on the tree."""
        x, state = problem([DraftTree.chain(5)])
        want = step_on(state.clone(), [1], [DraftTree.chain(5)], x)
        tables = pack([DraftTree.chain(5)]).tables
        parents = tables.parents.clone()
        parents[3] = 5
        broken = make_tables(parents, tables.cu_rows, max_rows=6)
        x.v[4] = x.k[3] = torch.nan
        slots = torch.tensor([1], dtype=torch.int32)
        got = gdn.commit_verify(x, state.clone(), slots, broken, backend="triton")
        assert (got.o[3:] == 0).all()
        assert torch.equal(got.o[:3], want.o[:3])

    def test_paths_and_histories_longer_than_their_tables(self):
        """They end where their tables end; nothing of a neighbour is read."""
        x, state = problem([DraftTree.chain(1)] * 2)
        history = empty_history(state, 1, 4)
        history = gdn.History(
            *(torch.ones_like(part) for part in history[:4]),
            torch.tensor([4, 900, 4, 4], dtype=torch.int32)[: len(state)],
        )
        fold, slots = torch.zeros(2, dtype=torch.int32), torch.tensor([1, 2], dtype=torch.int32)
        tables = pack([DraftTree.chain(1)] * 2).tables
        far = gdn.commit_verify(
            x, state.clone(), slots, tables, prior=gdn.Prior(history, None, None, fold), backend="triton"
        )
        history.lengths[1] = 4
        near = gdn.commit_verify(
            x, state.clone(), slots, tables, prior=gdn.Prior(history, None, None, fold), backend="triton"
        )
        assert far.o.isfinite().all()
        assert torch.equal(far.o, near.o)

    def test_neighbours_and_padding(self):
        """A sequence alone, and beside others in a larger bucket whose trees are larger: the same values."""
        x, state = problem([SCATTERED])
        alone = step_on(state.clone(), [1], [SCATTERED], x)
        trees = [DraftTree.chain(20), SCATTERED, DraftTree.chain(1)]
        wide, _ = problem(trees, num_rows=40)
        for part, mine in zip(wide[:5], x[:5], strict=True):
            part[21:26] = mine
        beside = step_on(state.clone(), [0, 1, -1], trees, wide)
        assert_close(beside.o[21:26], alone.o.double().numpy(), KERNEL_TWIN)
        assert torch.equal(beside.record.decay_high[21:26], alone.record.decay_high)
        assert torch.equal(beside.record.decay_low[21:26], alone.record.decay_low)

    def test_strides(self):
        """Faults K09 and K12: rows of one fused tensor, a state with swapped axes, a pool of every second slot."""
        trees = [SCATTERED, DraftTree.chain(1)]
        x, state = problem(trees)
        plain = step_on(state.clone(), [2, 0], trees, x)
        fused = torch.cat([part.flatten(1) for part in x[:3]] + [x.a, x.b], dim=1)
        q, k, v, a, b = fused.split([16, 16, 32, 2, 2], dim=1)
        views = gdn.Projections(q.view(7, 1, 16), k.view(7, 1, 16), v.view(7, 2, 16), a, b, *x[5:])
        pool = torch.full((6, 2, 16, 16), torch.nan)
        swapped = pool[::2].transpose(2, 3)
        swapped.copy_(state)
        other = step_on(swapped, [2, 0], trees, views)
        assert all(map(torch.equal, raw([plain.o, *plain.record]), raw([other.o, *other.record])))
        assert pool[1::2].isnan().all()

    def test_histories_with_heads_first(self):
        """A head's rows side by side, as a kernel that reads one head wants them: read, appended, folded, bit for bit."""
        trees = [SCATTERED, DraftTree.chain(1), DraftTree.chain(3)]
        plain, turned = (Stream(SMALL._replace(heads=2), 5, 8, dtype=torch.float32, backend="triton") for _ in range(2))
        kept = turned.history
        u, k = (part.transpose(1, 2).contiguous().transpose(1, 2) for part in (kept.u, kept.k))
        turned.history = kept._replace(u=u, k=k)
        for seed, (paths, fold) in enumerate(STEPS):
            done = [one.step([3, -1, 0], trees, paths=paths, fold=fold, seed=seed)[0] for one in (plain, turned)]
            assert all(map(torch.equal, raw([done[0].o, *done[0].record]), raw([done[1].o, *done[1].record])))
            pairs = zip([plain.state, *plain.history], [turned.state, *turned.history], strict=True)
            assert all(torch.equal(ours.nan_to_num(), theirs.nan_to_num()) for ours, theirs in pairs)
        assert turned.history.u.stride(1) < turned.history.u.stride(2)

    def test_folds_into_a_swapped_state(self):
        state, record, slots, path = committed()
        plain, swapped = state.clone(), state.transpose(2, 3).clone().transpose(2, 3)
        for pool in (plain, swapped):
            gdn.commit(pool, slots, record, path, backend="triton")
        assert torch.equal(plain, swapped)
        assert not torch.equal(plain, state)


class TestNotFinite:
    @pytest.mark.parametrize("part", ["q", "k", "v", "a", "b"])
    @pytest.mark.parametrize("value", [torch.nan, torch.inf])
    @pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # NumPy's, in the interpreter
    def test_stays_on_its_branch(self, part, value):
        """Fault F10: row 3 and its child 4 are lost, or row 3 alone where its query is; nothing else changes a bit."""
        x, state = problem([SCATTERED, DraftTree.chain(1)])
        clean = step_on(state.clone(), [2, 0], [SCATTERED, DraftTree.chain(1)], x)
        getattr(x, part)[3].view(-1)[0] = value
        if part in ("a", "b") and value == torch.inf:
            getattr(x, part)[3].view(-1)[0] = torch.nan  # gates saturate: only NaN is not finite
        dirty = step_on(state.clone(), [2, 0], [SCATTERED, DraftTree.chain(1)], x)
        head = 0
        lost = [3] if part == "q" else [3, 4]
        assert not dirty.o[lost, head].isfinite().any(-1).any()
        kept = [row for row in range(7) if row not in lost]
        assert torch.equal(dirty.o[kept], clean.o[kept])
        assert torch.equal(dirty.record.u[kept], clean.record.u[kept])

    def test_a_state_keeps_to_its_sequence_and_head(self):
        trees = [SCATTERED, DraftTree.chain(1)]
        x, state = problem(trees)
        clean = step_on(state.clone(), [2, 0], trees, x)
        state[2, 1, 3, 5] = torch.nan
        dirty = step_on(state, [2, 0], trees, x)
        assert dirty.o[:5, 1].isnan().all()
        assert torch.equal(dirty.o[:5, 0], clean.o[:5, 0])
        assert torch.equal(dirty.o[5:], clean.o[5:])

    def test_strong_gates_do_not_overflow(self):
        """Faults F01 and F02: differences of logs are masked before exp, and a lone strong gate leaves its sibling exact."""
        tree = DraftTree([-1, 0, 0, 1, 2])
        x, state = problem([tree])
        x.a[1], x.a[2] = 3e4, -30.0
        verified = step_on(state, [0], [tree], x)
        assert verified.o.isfinite().all()
        total = verified.record.decay_high + verified.record.decay_low
        g, _ = gdn.finish_gates(x.a.double(), x.b.double(), x.a_log.double(), x.dt_bias.double())
        assert_close(total[[2, 4]], torch.stack([g[0] + g[2], g[0] + g[2] + g[4]]).numpy(), KERNEL_TWIN)
        assert (total[1] < -1000).all()

    def test_a_gate_far_below_any_float(self):
        """Its descendants decay among themselves as if it were not there."""
        tree = DraftTree.chain(3)
        x, state = problem([tree])
        x.a[1] = 1e7
        x.a[2:] = 0.3
        verified = step_on(state, [0], [tree], x)
        want = gdn.commit_verify(x, state, torch.tensor([0]), pack([tree]).tables)
        assert_close(verified.o, want.o.double().numpy(), KERNEL_TWIN)

    def test_gates_near_one_keep_their_digits(self):
        """log(1 + x) of a small x in float32 has none of them."""
        tree = DraftTree.chain(1)
        x, state = problem([tree])
        x.a.fill_(-15.0)
        x.a_log.fill_(5.0)
        verified = step_on(state, [0], [tree], x)
        g, _ = gdn.finish_gates(x.a.double(), x.b.double(), x.a_log.double(), x.dt_bias.double())
        assert (verified.record.decay_high - g.cumsum(0)).abs().max() < FLOAT32_FLOOR

    def test_large_keys_do_not_overflow_the_solve(self):
        """Finished keys may have any length: what is not solved yet must not be multiplied."""
        given = make([DraftTree.chain(15)], beta=(1.0, 1.0), gate_one=True)
        given = given._replace(k=given.k * 7).to(torch.float32)
        assert given.verify(backend="triton").o.isfinite().all()


def committed():
    """Return (state, record, slots, path) of a float32 problem whose paths differ in length."""
    given = make([SCATTERED, DraftTree.chain(2), DraftTree.chain(1)], slots=[2, 0, -1], num_slots=4)
    given = given.to(torch.float32)
    record = given.verify().record
    return given.state, record, given.slots, pack_paths(given.tree, [[0, 3, 4], [], [0]])


class TestFinishedOperands:
    def test_verify(self):
        given = make([SCATTERED, DraftTree.chain(20), DraftTree.chain(1)], slots=[2, 0, -1], num_slots=4, num_rows=30)
        given = given.to(torch.float32)
        verified = given.verify(backend="triton")
        assert_close(verified.o, walked(given).o, KERNEL_FLOAT32)
        eager = given.verify()
        for one, other in zip(verified.record, eager.record, strict=True):
            assert_close(one[:26], other[:26].double().numpy(), KERNEL_TWIN)

    def test_a_history(self):
        """Verify beside it, append to it, fold it: as eager does, in value; lengths too."""
        given = make([SCATTERED, DraftTree.chain(2), DraftTree.chain(1)], slots=[2, 0, -1], num_slots=4)
        given = given.to(torch.float32)
        paths = [pack_paths(given.tree, paths) for paths in ([[0, 3, 4], [], [0]], [[0], [0, 1], [0]])]
        results = []
        for backend in ("eager", "triton"):
            state, history = given.state.clone(), empty_history(given.state, 2, 6)
            outputs = []
            for path in paths:
                verified = given._replace(state=state).verify(history=history, backend=backend)
                gdn.append(history, given.slots, verified.record, path, backend=backend)
                outputs.append(verified.o)
            assert history.lengths.tolist() == [2, 0, 4, 0]
            kept = [part.nan_to_num().clone() for part in history[:4]]
            gdn.fold(state, torch.tensor([2, -1, 3]), history, backend=backend)
            assert history.lengths.tolist() == [2, 0, 0, 0]
            results.append([*outputs, *kept, state])
        for one, other in zip(*results, strict=True):
            assert_close(other, one.double().numpy(), KERNEL_TWIN)

    def test_commit(self):
        state, record, slots, path = committed()
        want, got = state.clone(), state.clone()
        gdn.commit(want, slots, record, path)
        gdn.commit(got, slots, record, path, backend="triton")
        assert_close(got, want.double().numpy(), KERNEL_TWIN)
        assert torch.equal(got[[0, 1, 3]], state[[0, 1, 3]])
        assert not torch.equal(got[2], state[2])


class TestEdges:
    def test_sequences_without_rows(self):
        """Fault K10: they commit, and that is all; a batch without any sequence zeroes its rows."""
        x, state = problem([DraftTree.chain(1)])
        tables = pack([DraftTree.chain(1)]).tables
        tables = tables._replace(cu_rows=torch.tensor([0, 0, 2], dtype=torch.int32))
        old = Stream(SMALL, 1, dtype=torch.float32).buffers(2).record
        for part in old:
            part[:] = -0.5
        prior = gdn.Prior(None, old, paths_of([0, 0], [[0, 1], []], 2), torch.zeros(2, dtype=torch.int32))
        want, got = state.clone(), state.clone()
        outputs = []
        for backend, pool in (("eager", want), ("triton", got)):
            slots = torch.tensor([1, 0], dtype=torch.int32)
            outputs.append(gdn.commit_verify(x, pool, slots, tables, prior=prior, backend=backend).o)
        assert_close(got, want.double().numpy(), KERNEL_TWIN)
        assert_close(outputs[1], outputs[0].double().numpy(), KERNEL_TWIN)
        assert not torch.equal(got[1], state[1])
        assert torch.equal(got[[0, 2]], state[[0, 2]])

    def test_no_sequences(self):
        """Fault K10: every row is still zeroed."""
        x, state = problem([], num_rows=20)
        assert (step_on(state, [], [], x).o == 0).all()

    def test_a_path_without_room_is_not_appended(self):
        """The host cannot see it; no place outside the history may be written."""
        x, state = problem([SCATTERED])
        old = Stream(SMALL, 1, dtype=torch.float32).buffers(3).record
        for part in old:
            part[:] = -0.5
        history = empty_history(state, 1, 4)
        history.lengths[1] = 2
        for part in history[:4]:
            part[1, :2] = -0.25
        before = raw(history)
        prior = gdn.Prior(history, old, paths_of([0], [[0, 1, 2]], 3), torch.zeros(1, dtype=torch.int32))
        assert step_on(state, [1], [SCATTERED], x, prior).o.isfinite().all()
        assert all(map(torch.equal, before, raw(history)))

    @pytest.mark.parametrize("fold", [0, 1])
    def test_lengths_gathered_before(self, fold):
        """`held` stands for the lengths, which are then not read."""
        results = []
        for held in (None, torch.tensor([2], dtype=torch.int32)):
            x, state = problem([SCATTERED])
            history = empty_history(state, 1, 4)
            history.lengths[1] = 2 if held is None else 4
            for part in history[:4]:
                part[1, :2] = -0.25
            prior = gdn.Prior(history, None, None, torch.tensor([fold], dtype=torch.int32), held)
            results.append(raw([step_on(state, [1], [SCATTERED], x, prior).o, state]))
        assert all(map(torch.equal, *results))

    def test_nothing_prior_keeps_the_state(self):
        """Fold flags over empty histories and empty paths change no bit of the state."""
        x, state = problem([SCATTERED])
        old = Stream(SMALL, 1, dtype=torch.float32).buffers(3).record
        prior = gdn.Prior(empty_history(state, 1, 4), old, paths_of([0], [[]], 3), torch.ones(1, dtype=torch.int32))
        kept = state.clone()
        step_on(state, [1], [SCATTERED], x, prior)
        assert torch.equal(state, kept)


class TestRefusals:
    def test_refused_bfloat16_in_the_interpreter(self):
        x, state = problem([SCATTERED])
        with pytest.raises(UnsupportedError, match="bfloat16"):
            step_on(state.bfloat16(), [0], [SCATTERED], x)

    @pytest.mark.parametrize(
        ("change", "error", "message"),
        [
            ({"q": lambda q: q.double()}, UnsupportedError, "16 or 32 bits"),
            ({"q": lambda q: q.half()}, UnsupportedError, "one dtype"),
            ({"v": lambda v: v.transpose(1, 2).contiguous().transpose(1, 2)}, ShapeError, "contiguous"),
        ],
    )
    def test_refused_operands(self, change, error, message):
        x, state = problem([SCATTERED])
        x = x._replace(**{name: edit(getattr(x, name)) for name, edit in change.items()})
        with pytest.raises(error, match=message):
            step_on(state, [0], [SCATTERED], x)

    def test_refused_sizes(self):
        tree = DraftTree.chain(128)
        x, state = problem([tree])
        with pytest.raises(ShapeError, match="max_rows=129"):
            step_on(state, [0], [tree], x)

    def test_refused_snapshots(self):
        given = make([SCATTERED]).to(torch.float32)
        with pytest.raises(BackendError, match="verify_snapshots"):
            given.verify_snapshots(backend="triton")


def test_the_interpreter_is_not_eager():
    """The tolerance of these tests tells float32 kernels from the float64 work of eager."""
    given = make([SCATTERED]).to(torch.float32)
    kernel, eager = given.verify(backend="triton"), given.verify()
    assert not torch.equal(kernel.o, eager.o)
    assert_close(
        kernel.record.decay_high + kernel.record.decay_low, (eager.record[2] + eager.record[3]).numpy(), EXACT**0.5
    )


def test_paths_may_be_of_no_width():
    """A bucket without pending rows: P is 0."""
    x, state = problem([SCATTERED])
    old = Stream(SMALL, 1, dtype=torch.float32).buffers(3).record
    path = PathTables(torch.zeros(1, 0, dtype=torch.int32), torch.zeros(1, dtype=torch.int32))
    kept = state.clone()
    step_on(state, [1], [SCATTERED], x, gdn.Prior(None, old, path, torch.ones(1, dtype=torch.int32)))
    assert torch.equal(state, kept)
