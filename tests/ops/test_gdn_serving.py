"""The serving entry's definition: over many steps it is the walk, and the finished ops one after the other."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ops.checks import assert_close
from ops.problems import trees
from ops.rings import empty_history
from ops.serving import HARD, Spec, Stream, cast, paths_of, projections
from tolerances import EXACT
from treewy.errors import CapacityError, ShapeError
from treewy.ops import gdn
from treewy.ops.gdn.composed import inverse_norms
from treewy.packed import pack, pack_paths
from treewy.tree import DraftTree

both_backends = pytest.mark.parametrize("backend", ["eager", "reference"])


@both_backends
@settings(max_examples=25)
@given(data=st.data())
def test_random_steps(backend, data):
    """Every mix of paths, folds, histories and idle sequences gives the walk's outputs, step after step."""
    hard = data.draw(st.booleans())
    spec = (HARD if hard else Spec(strong_gate=data.draw(st.sampled_from([0.0, -20.0, -200.0]))))._replace(
        heads=data.draw(st.integers(1, 2)), group=data.draw(st.integers(1, 3)), key_dim=5, value_dim=3
    )
    num_rows = data.draw(st.sampled_from([0, 9]))
    stream = Stream(spec, 4, num_rows, backend=backend)
    last = None
    for seed in range(data.draw(st.integers(1, 5))):
        slots = data.draw(st.permutations([-1, 0, 1, 2, 3]))[: data.draw(st.integers(1, 3))]
        drafts = [data.draw(trees(5)) for _ in slots]
        slots, paths = slots if last is None else last[0], [[] for _ in slots]
        if last is not None:
            drafts = [data.draw(trees(5)) for _ in slots]
            paths = [tree.path(data.draw(st.integers(0, tree.num_rows - 1))) for tree in last[1]]
            paths = [path if data.draw(st.booleans()) else [] for path in paths]
        fold = [int(data.draw(st.booleans())) for _ in slots]
        if num_rows:
            lengths = [int(stream.history.lengths[slot]) for slot in slots]
            fold = [fold[i] or int(lengths[i] + len(paths[i]) > num_rows) for i in range(len(slots))]
        verified, want = stream.step(slots, drafts, paths=paths, fold=fold, seed=seed)
        assert_close(verified.o, want, EXACT)
        last = slots, drafts


SCATTERED, CHAIN = DraftTree([-1, 0, 0, 0, 3]), DraftTree.chain(2)
SMALL = Spec(heads=1, group=2, key_dim=4, value_dim=3)


def operands(drafts=(SCATTERED, CHAIN), num_slots=4, seed=0, dtype=torch.float64):
    """Return (projections, state, tree) of a step."""
    x = cast(projections(SMALL, drafts, seed=seed), dtype)
    shape = (num_slots, SMALL.value_heads, SMALL.value_dim, SMALL.key_dim)
    state = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x, state.to(dtype), pack(list(drafts))


def finished(x):
    """Return the finished operands."""
    return gdn.scale_queries(x.q), gdn.l2_normalise(x.k), x.v, *gdn.finish_gates(*x[3:7], beta_scale=x.beta_scale)


def raw(tensors):
    return [part.contiguous().view(torch.uint8).clone() for part in tensors]


@both_backends
@pytest.mark.parametrize("fold", [0, 1])
def test_it_is_the_finished_ops_one_after_the_other(backend, fold):
    """Two steps against verify, append and fold, or commit; keys stay as they came, and u takes their norms."""
    slots, paths = torch.tensor([3, 1]), [[0, 3, 4], [0]]
    x, state, tree = operands()
    plain, history, other = state.clone(), empty_history(state, 1, 8), empty_history(state, 1, 8)
    first = gdn.commit_verify(x, state, slots, tree.tables, backend=backend)
    want = gdn.verify(*finished(x), plain, slots, tree, backend=backend)
    assert_close(first.o, want.o.numpy(), EXACT)
    assert torch.equal(first.record.k, x.k)
    norms = inverse_norms(x.k).repeat_interleave(2, dim=1)[..., None]
    assert_close(first.record.u / norms, want.record.u.numpy(), EXACT)

    prior = gdn.Prior(history, first.record, pack_paths(tree, paths).tables, torch.full((2,), fold))
    x, _, tree = operands(seed=1)
    second = gdn.commit_verify(x, state, slots, tree.tables, prior=prior, backend=backend)
    assert history.lengths.tolist() == [0, 0, 0, 0]
    gdn.append(other, slots, want.record, pack_paths(pack([SCATTERED, CHAIN]), paths), backend=backend)
    if fold:
        gdn.fold(plain, slots, other, backend=backend)
        assert history.u.isnan().all()
    else:
        assert torch.equal(history.u.isnan(), other.u.isnan())
        total = (history.decay_high + history.decay_low)[3, :3]
        assert_close(total, (other.decay_high + other.decay_low)[3, :3].numpy(), EXACT)
    assert_close(state, plain.numpy(), EXACT)
    want = gdn.verify(*finished(x), plain, slots, tree, history=other, backend=backend)
    assert_close(second.o, want.o.numpy(), EXACT)


@both_backends
def test_what_is_inert(backend):
    """Slot -1 and rows past the trees give zeros; nothing of them is read or written. No sequence at all is fine."""
    x, state, _ = operands()
    tree = pack([SCATTERED], num_rows=8)
    for part in x[:5]:
        part[5:] = torch.nan
    kept = state.clone()
    assert torch.equal(
        gdn.commit_verify(x, state, torch.tensor([-1]), tree.tables, backend=backend).o, torch.zeros(8, 2, 3)
    )
    record = gdn.Record(*(torch.ones(8, *part) for part in ((2, 3), (1, 4), (2,), (2,))))
    prior = gdn.Prior(None, record, paths_of([0], [[0]], 1), torch.ones(1))
    gdn.commit_verify(x, state, torch.tensor([-1]), tree.tables, prior=prior, backend=backend)
    assert torch.equal(state, kept)
    live = gdn.commit_verify(x, state, torch.tensor([2]), tree.tables, backend=backend)
    assert live.o[:5].isfinite().all()
    assert (live.o[5:] == 0).all()
    none = pack([], num_rows=8)
    assert (gdn.commit_verify(x, state, torch.tensor([], dtype=torch.int64), none.tables, backend=backend).o == 0).all()
    assert torch.equal(state, kept)


@both_backends
def test_a_sequence_without_rows_is_committed(backend):
    x, state, tree = operands()
    slots = torch.tensor([3, 1])
    record = gdn.commit_verify(x, state, slots, tree.tables, backend=backend).record
    want = state.clone()
    path = pack_paths(tree, [[0, 3], [0]]).tables
    gdn.commit(want, slots, record, pack_paths(tree, [[0, 3], [0]]), backend=backend)
    x, _, tree = operands([CHAIN], seed=1)
    tables = tree.tables._replace(cu_rows=torch.tensor([0, 0, 3], dtype=torch.int32))
    prior = gdn.Prior(None, record, path, torch.zeros(2, dtype=torch.int32))
    after = gdn.commit_verify(x, state, slots, tables, prior=prior, backend=backend)
    assert_close(state, want.numpy(), EXACT)
    assert_close(after.o, gdn.verify(*finished(x), want, slots[1:], tree).o.numpy(), EXACT)


def prior_and_out(x, state, tree):
    """Return what a step of the operands leaves pending beside an empty history, folded now, and buffers for another."""
    record = gdn.commit_verify(x, state, torch.tensor([0, 1]), tree.tables).record
    prior = gdn.Prior(empty_history(state, 1, 8), record, pack_paths(tree, [[0], [0]]).tables, torch.ones(2))
    empty = gdn.Record(*(torch.zeros_like(part) for part in record))
    return prior, gdn.Verified(torch.zeros_like(x.v), empty)


class TestBuffers:
    def test_out_is_filled(self):
        x, state, tree = operands(dtype=torch.float32)
        fresh = gdn.commit_verify(x, state, torch.tensor([0, 1]), tree.tables)
        out = gdn.Verified(torch.empty_like(fresh.o), gdn.Record(*map(torch.empty_like, fresh.record)))
        assert gdn.commit_verify(x, state, torch.tensor([0, 1]), tree.tables, out=out) is out
        assert all(map(torch.equal, raw([fresh.o, *fresh.record]), raw([out.o, *out.record])))

    @pytest.mark.parametrize(
        ("state", "exact", "u"),
        [
            (torch.float32, False, torch.float32),
            (torch.bfloat16, False, torch.bfloat16),
            (torch.bfloat16, True, torch.float32),
        ],
    )
    def test_dtypes_of_fresh_ones(self, state, exact, u):
        x, pool, tree = operands(dtype=torch.bfloat16)
        verified = gdn.commit_verify(x, pool.to(state), torch.tensor([0, 1]), tree.tables, exact=exact)
        dtypes = [part.dtype for part in (verified.o, *verified.record)]
        assert dtypes == [torch.bfloat16, u, torch.bfloat16, torch.float32, torch.float32]

    def test_the_record_that_is_committed_is_not_overwritten(self):
        x, state, tree = operands()
        out = gdn.commit_verify(x, state, torch.tensor([0, 1]), tree.tables)
        prior = gdn.Prior(None, out.record, pack_paths(tree, [[0], []]).tables, torch.ones(2))
        with pytest.raises(ShapeError, match="alternate two"):
            gdn.commit_verify(x, state, torch.tensor([0, 1]), tree.tables, prior=prior, out=out)

    @pytest.mark.parametrize("name", gdn.Record._fields)
    @pytest.mark.parametrize("other", ["prior.record", "history", "state", "out.o", "x.v"])
    def test_buffers_that_overlap_are_refused(self, name, other):
        """One row further into the memory of what the step reads or writes as well."""
        x, state, tree = operands()
        slots = torch.tensor([0, 1])
        prior, out = prior_and_out(x, state, tree)
        memory = {
            "prior.record": getattr(prior.record, name),
            "history": getattr(prior.history, name),
            "state": state,
            "out.o": out.o,
            "x.v": x.v,
        }[other]
        mine = getattr(out.record, name)
        around = torch.zeros(memory.numel() + mine.numel(), dtype=torch.float64)
        theirs = around[: memory.numel()].view(memory.shape).copy_(memory)
        start = memory.stride(0)
        mine = around[start : start + mine.numel()].view(mine.shape)
        out = out._replace(record=out.record._replace(**{name: mine}))
        if other == "prior.record":
            prior = prior._replace(record=prior.record._replace(**{name: theirs}))
        elif other == "history":
            prior = prior._replace(history=prior.history._replace(**{name: theirs}))
        elif other == "out.o":
            out = out._replace(o=theirs)
        x, state = (x._replace(v=theirs) if other == "x.v" else x), (theirs if other == "state" else state)
        before = raw([around])
        with pytest.raises(ShapeError, match=rf"must not overlap.*out\.record\.{name}"):
            gdn.commit_verify(x, state, slots, tree.tables, prior=prior, out=out)
        assert torch.equal(*before, *raw([around]))

    def test_a_history_that_overlaps_the_record_is_refused(self):
        x, state, tree = operands()
        prior, _ = prior_and_out(x, state, tree)
        around = torch.zeros(prior.history.u.numel() + prior.record.u.numel(), dtype=torch.float64)
        start = prior.history.u.numel() - 1
        u = around[: start + 1].view(prior.history.u.shape), around[start:-1].view(prior.record.u.shape)
        prior = prior._replace(history=prior.history._replace(u=u[0]), record=prior.record._replace(u=u[1]))
        with pytest.raises(ShapeError, match=r"history\.u.*prior\.record\.u"):
            gdn.commit_verify(x, state, torch.tensor([0, 1]), tree.tables, prior=prior)

    def test_buffers_that_were_checked_before_are_not_checked_again(self, monkeypatch):
        x, state, tree = operands()
        slots = torch.tensor([0, 1])
        prior, out = prior_and_out(x, state, tree)
        want = raw([gdn.commit_verify(x, state.clone(), slots, tree.tables, prior=prior).o])
        for check in ("_check", "_check_prior", "_check_out", "_check_apart", "_check_devices"):
            monkeypatch.setattr(f"treewy.ops.gdn.serving.{check}", None)
        with pytest.raises(TypeError, match="not callable"):
            gdn.commit_verify(x, state.clone(), slots, tree.tables, prior=prior, out=out)
        got = gdn.commit_verify(x, state.clone(), slots, tree.tables, prior=prior, out=out, checked=True)
        assert torch.equal(*want, *raw([got.o]))

    def test_buffers_side_by_side_are_not(self):
        """Two records in one allocation, one behind the other or row by row; keys that stay where they are."""
        x, state, tree = operands()
        slots, rows = torch.tensor([0, 1]), tree.num_rows
        prior, out = prior_and_out(x, state, tree)
        want = gdn.commit_verify(x, state.clone(), slots, tree.tables, prior=prior)
        for axis in (0, 1):
            both = [torch.stack([old, torch.full_like(old, torch.nan)], dim=axis) for old in prior.record]
            ours = gdn.Record(*(part.select(axis, 1) for part in both))
            theirs = gdn.Record(*(part.select(axis, 0) for part in both))
            fused = torch.cat([x.q.flatten(1), x.k.flatten(1), x.v.flatten(1)], dim=1)
            q, k, v = (
                part.unflatten(1, whole.shape[1:])
                for part, whole in zip(fused.split([4, 4, 6], dim=1), (x.q, x.k, x.v), strict=True)
            )
            buffers = out._replace(record=ours._replace(k=k))
            here = prior._replace(record=theirs)
            got = gdn.commit_verify(
                x._replace(q=q, k=k, v=v), state.clone(), slots, tree.tables, prior=here, out=buffers
            )
            assert got.record.u.shape[0] == rows
            assert torch.equal(got.o, want.o)
            assert torch.equal(got.record.u, want.record.u)
            assert torch.equal(got.record.k, x.k)


class TestRefusals:
    @pytest.mark.parametrize("name", ["q", "k", "v", "a", "b", "a_log", "dt_bias"])
    def test_projections_that_do_not_fit(self, name):
        x, state, tree = operands()
        x = x._replace(**{name: getattr(x, name)[1:]})
        with pytest.raises(ShapeError, match="Projections must fit"):
            gdn.commit_verify(x, state, torch.tensor([0, 1]), tree.tables)

    def test_slots_that_do_not_fit(self):
        x, state, tree = operands()
        for slots, error in (([0], ShapeError), ([0, 4], CapacityError), ([1, 1], CapacityError)):
            with pytest.raises(error):
                gdn.commit_verify(x, state, torch.tensor(slots), tree.tables)

    @pytest.mark.parametrize(
        "change", [{"record": None}, {"path": None}, {"fold": torch.zeros(3)}, {"history": "of others"}]
    )
    def test_prior_rows_that_do_not_fit(self, change):
        x, state, tree = operands()
        record = gdn.commit_verify(x, state, torch.tensor([0, 1]), tree.tables).record
        prior = gdn.Prior(None, record, pack_paths(tree, [[0], []]).tables, torch.zeros(2))
        if "history" in change:
            change = {"history": empty_history(state[1:], 1, 4)}
        with pytest.raises(ShapeError):
            gdn.commit_verify(x, state, torch.tensor([0, 1]), tree.tables, prior=prior._replace(**change))

    @both_backends
    @pytest.mark.parametrize("with_history", [False, True])
    @pytest.mark.parametrize(
        ("row", "length", "said"),
        [(-1, 2, "has -1"), (8, 2, r"must lie in 0\.\.7"), (0, 4, "length of 4"), (0, -1, "length of -1")],
    )
    def test_rows_that_a_record_lacks(self, row, length, said, with_history, backend):
        """Nothing is written then; the path of a sequence on no slot is not looked at."""
        x, state, tree = operands()
        record = gdn.commit_verify(x, state, torch.tensor([0, 1]), tree.tables).record
        history = empty_history(state, 1, 8) if with_history else None
        path = paths_of(tree.starts, [[0, 3], [0]], 3)
        path.rows[0, 1], path.lengths[0] = row, length
        prior = gdn.Prior(history, record, path, torch.zeros(2))
        before = raw([state, *(history or ())])
        with pytest.raises(ShapeError, match=said):
            gdn.commit_verify(x, state, torch.tensor([0, 1]), tree.tables, prior=prior, backend=backend)
        assert all(map(torch.equal, before, raw([state, *(history or ())])))
        gdn.commit_verify(x, state, torch.tensor([-1, 1]), tree.tables, prior=prior, backend=backend)
        assert torch.equal(state[0].view(torch.uint8), before[0][0])

    def test_a_history_without_room(self):
        """Nothing is written, not even for the sequence that has room."""
        x, state, tree = operands()
        record = gdn.commit_verify(x, state, torch.tensor([0, 1]), tree.tables).record
        history = empty_history(state, 1, 2)
        prior = gdn.Prior(history, record, paths_of(tree.starts, [[0, 3, 4], [0]], 3), torch.zeros(2))
        before = raw([state, *history])
        with pytest.raises(CapacityError, match="Set fold"):
            gdn.commit_verify(x, state, torch.tensor([0, 1]), tree.tables, prior=prior)
        assert all(map(torch.equal, before, raw([state, *history])))
