"""The CUDA kernel on the CPU against the definition: every branch that a machine without a GPU can check."""

import pytest
import torch

from ops import cuda_on_cpu
from ops.cuda_on_cpu.steps import LAYER, Seq, step
from ops.serving import HARD
from tolerances import (
    CUDA_EXACT,
    CUDA_FAST,
    CUDA_FOLD_BFLOAT16,
    CUDA_FOLD_UNLIKE,
    CUDA_HARD_EXACT,
    FLOAT32_PATH_SUM,
    TWO_FLOAT32,
)
from treewy.errors import ShapeError
from treewy.ops import gdn
from treewy.ops.gdn.cuda.variant import Variant
from treewy.ops.tree import tables as make_tables
from treewy.tree import DraftTree

# bt, nw, mt, state_f32, u_f32, parts, exact, pmax, min_blocks
VARIANTS = {
    "4": Variant(4, 4, 2, 0, 0, 2, 0, 16, 1),
    "4 exact": Variant(4, 4, 1, 1, 1, 3, 1, 32, 1),
    "16": Variant(16, 4, 2, 0, 0, 2, 0, 32, 1),
    "16 float32": Variant(16, 8, 1, 1, 1, 2, 0, 16, 1),
    "16 exact": Variant(16, 2, 1, 1, 1, 3, 1, 16, 1),
    "16 lean": Variant(16, 4, 2, 0, 0, 2, 0, 16, 1, 1),
    "32": Variant(32, 8, 1, 0, 0, 2, 0, 16, 1),
    "48": Variant(48, 8, 1, 0, 0, 2, 0, 32, 1),
    "64": Variant(64, 4, 1, 0, 0, 2, 0, 48, 1),
    "64 lean": Variant(64, 8, 1, 0, 0, 2, 0, 32, 1, 1),
    "64 lean, two warps": Variant(64, 2, 1, 0, 0, 2, 0, 32, 1, 1),
    "64 after 64": Variant(64, 4, 1, 0, 0, 2, 0, 80, 1),
    "64 exact": Variant(64, 8, 1, 0, 1, 3, 1, 16, 1),
}
CHAIN_4, WIDTHS_2, WIDTHS_3 = DraftTree.chain(3), DraftTree.from_widths([2, 2, 2]), DraftTree.from_widths([3, 3, 3])
FIVE = DraftTree([-1, 0, 0, 1, 2])
SPINE = DraftTree([-1] + [row - 1 if row % 2 else row - 2 for row in range(1, 64)])
TREES = {
    4: [CHAIN_4, DraftTree.from_widths([2]), DraftTree([-1, 0, 0, 1])],
    16: [WIDTHS_2, DraftTree.chain(10), FIVE],
    32: [WIDTHS_2, DraftTree.chain(31), FIVE],
    48: [WIDTHS_3, DraftTree.chain(47), FIVE],
    64: [DraftTree.chain(63), SPINE, WIDTHS_3],
}
variants = pytest.mark.parametrize("name", VARIANTS)


def distance(ours, theirs):
    return float((ours.double() - theirs).norm() / theirs.norm())


def same_bits(ours, theirs):
    return torch.equal(ours.contiguous().view(torch.uint8), theirs.contiguous().view(torch.uint8))


def check_rows(done, want):
    """Outputs and records of the rows that are somebody's; zeros elsewhere."""
    bound = CUDA_EXACT if done.variant.exact else CUDA_FAST
    for i, seq in enumerate(done.seqs):
        rows = done.rows(i)
        if seq.inert:
            assert not done.out.o[rows].count_nonzero()
        elif seq.tree is not None:
            ours, theirs = done.out.record, want.out.record
            # Outputs are rounded to bfloat16, whatever the arithmetic.
            assert distance(done.out.o[rows], want.out.o[rows]) < CUDA_FAST
            assert distance(ours.u[rows], theirs.u[rows]) < bound
            assert same_bits(ours.k[rows], done.x.k[rows])
            decays = (part.decay_high[rows].double() + part.decay_low[rows].double() for part in (ours, theirs))
            torch.testing.assert_close(*decays, rtol=FLOAT32_PATH_SUM, atol=0)
    assert not done.out.o[done.tree.cu_rows[-1] :].count_nonzero()


def check_memory(before, done, want):
    """States and histories: what folds is right, what is appended is exact, all else is untouched."""
    bound = CUDA_EXACT if done.variant.state_f32 else CUDA_FOLD_BFLOAT16
    history = done.prior and done.prior.history
    untouched = torch.ones(len(done.state), dtype=torch.bool)
    for i, seq in enumerate(done.seqs):
        slot = int(done.slots[i])
        if seq.inert or not (seq.held or seq.path):
            continue
        if seq.fold or history is None:
            assert distance(done.state[slot], want.state[slot]) < bound
            rounded = want.state[slot].to(done.state.dtype)
            if not done.variant.state_f32:
                assert (done.state[slot] != rounded).double().mean() < CUDA_FOLD_UNLIKE
            untouched[slot] = False
        else:
            assert same_bits(done.state[slot], before.state[slot])
    assert same_bits(done.state[untouched], before.state[untouched])
    if history is not None:
        check_history(before.prior.history, done, want.prior.history)


def check_history(before, done, want):
    old, ours, record = before, done.prior.history, done.prior.record
    expected = [part.clone() for part in old[:2]]
    for i, seq in enumerate(done.seqs):
        slot, end = int(done.slots[i]), seq.held + len(seq.path)
        if seq.inert or seq.fold or end > ours.num_rows:
            assert seq.inert or same_bits(ours.decay_high[slot], old.decay_high[slot])
            continue
        rows = done.prior.path.rows[i, : len(seq.path)].long()
        expected[0][slot, seq.held : end] = record.u[rows]
        expected[1][slot, seq.held : end] = record.k[rows]
        sums = ours.decay_high[slot, :end].double() + ours.decay_low[slot, :end].double()
        exact = want.decay_high[slot, :end] + want.decay_low[slot, :end]
        torch.testing.assert_close(sums, exact, rtol=TWO_FLOAT32, atol=0)
        assert ours.decay_high[slot, end:].isnan().all()
    for part, should in zip(ours[:2], expected, strict=True):
        assert same_bits(part, should)
    assert same_bits(ours.decay_high[0], old.decay_high[0])
    assert torch.equal(ours.lengths, old.lengths)


def check(before, **options):
    done = before.run(**options)
    want = before.defined(done.state)
    check_rows(done, want)
    check_memory(before, done, want)


@variants
@pytest.mark.parametrize("backwards", [False, True], ids=["", "backwards"])
def test_histories_are_kept_and_folded(name, backwards):
    """Sequences of every kind side by side: nothing before, a history, a path to append, one too long, folds, inert."""
    variant = VARIANTS[name]
    first, second, third = TREES[variant.bt]
    seqs = [
        Seq(first, held=3, path=(0, 1, 3)),
        Seq(second),
        Seq(third, inert=True, held=2, path=(0, 1)),
        Seq(None, held=1, path=(0, 2), fold=1),
        Seq(second, held=5, path=(0, 1, 2, 4), fold=1),
        Seq(first, held=7, path=(0, 5)),
        Seq(DraftTree([-1]), path=(0,)),
        Seq(None, held=2, path=(0, 2)),
        Seq(third, held=6),
    ]
    check(step(seqs, variant, places=8, padding=3), backwards=backwards)


@variants
def test_paths_go_into_the_state_where_there_is_no_history(name):
    """Three value heads share their keys."""
    variant = VARIANTS[name]
    first, second, third = TREES[variant.bt]
    seqs = [
        Seq(second, path=(0, 1, 3, 4, 6)),
        Seq(None, path=(0, 7)),
        Seq(third),
        Seq(first, path=tuple(range(8))),
        Seq(third, path=(0,), inert=True),
    ]
    check(step(seqs, variant, spec=LAYER._replace(group=3), seed=1, padding=1))


@variants
@pytest.mark.parametrize("gate", [-20.0, -2e4])
def test_strong_gates(name, gate):
    """What comes after a strong gate keeps its small ones: in one float32 sum they are lost."""
    variant = VARIANTS[name]
    seqs = [Seq(tree) for tree in TREES[variant.bt][:2]]
    before = step(seqs, variant, spec=LAYER._replace(strong_gate=gate), seed=2)
    done = before.run()
    check_rows(done, before.defined(done.state))
    assert same_bits(done.state, before.state)


@pytest.mark.parametrize("name", ["64 lean", "64 exact"])
def test_hard_keys(name):
    """A chain of nearly equal keys, gates of 1, beta near 2: an inverse in bfloat16 throughout loses everything."""
    exact, chain = bool(VARIANTS[name].exact), DraftTree.chain(63)
    before = step(
        [Seq(chain)], VARIANTS[name], spec=HARD._replace(heads=1, group=2, key_dim=128, value_dim=128), seed=8
    )
    done = before.run()
    want = before.defined(done.state)
    assert distance(done.out.record.u, want.out.record.u) < (CUDA_HARD_EXACT if exact else CUDA_FAST)


@pytest.mark.parametrize("name", ["4", "16"])
def test_other_operands(name):
    """Gates in bfloat16, keys that stay where they are, lengths gathered before, and a slot past the pool; two key heads."""
    variant = VARIANTS[name]
    first, second, third = TREES[variant.bt]
    seqs = [Seq(first, held=2, path=(0, 4)), Seq(second, held=4, fold=1), Seq(third, inert=True)]
    before = step(seqs, variant, places=8, spec=LAYER._replace(heads=2, group=3), seed=7)
    narrow = {gate: getattr(before.x, gate).bfloat16() for gate in "ab"}
    held = torch.tensor([2, 4, 0], dtype=torch.int32)
    before = before._replace(x=before.x._replace(**narrow), prior=before.prior._replace(held=held))
    check(before)
    far = before._replace(slots=torch.where(before.slots < 0, len(before.state), before.slots))
    done, same = far.run(stay=True), before.run()
    rows = before.tree.cu_rows[2]
    assert not done.out.o[rows:].count_nonzero()
    assert same_bits(done.out.o, same.out.o)
    assert same_bits(done.state, same.state)
    assert done.out.record.k.data_ptr() == before.x.k.data_ptr()


@pytest.mark.parametrize("name", ["64", "64 after 64"])
def test_full_prior_rows(name):
    """As many prior rows as there may be, and half a chunk less, kept and folded."""
    variant, long = VARIANTS[name], tuple(range(8))
    held = variant.pmax - len(long)
    seqs = [
        Seq(FIVE, held=held, path=long),
        Seq(FIVE, held=held, path=long, fold=1),
        Seq(CHAIN_4, held=held - 7, path=long),
    ]
    check(step(seqs, variant, places=variant.pmax, seed=3))


@pytest.mark.parametrize("name", ["4", "16", "16 exact", "64"])
@pytest.mark.parametrize("part", ["q", "k", "v", "a", "b"])
def test_what_is_not_finite_spoils_descendants_only(name, part):
    """A NaN in one row, in one head where it is a head's own."""
    variant = VARIANTS[name]
    tree = TREES[variant.bt][-1 if variant.bt < 64 else 1]
    before = step([Seq(tree, held=2, path=(0, 3))], variant, places=4, seed=4)
    clean = before.run()
    spoiled = before.x._replace(**{part: getattr(before.x, part).clone()})
    getattr(spoiled, part)[1, 0, ...] = torch.nan
    done = before._replace(x=spoiled).run()
    sees = torch.tensor([1 in tree.path(row) for row in range(tree.num_rows)])
    heads = slice(None) if part in "qk" else slice(0, 1)
    if part == "q":
        sees = torch.arange(tree.num_rows) == 1
    hit = sees[:, None] & torch.zeros(2, dtype=torch.bool).index_fill(0, torch.arange(2)[heads], True)
    pairs = [(done.out.o, clean.out.o)] + [(done.out.record.u, clean.out.record.u)] * (part != "q")
    for ours, theirs in pairs:
        assert ours[hit].isnan().all()
        assert same_bits(ours[~hit], theirs[~hit])


@pytest.mark.parametrize(("part", "value"), [("v", torch.nan), ("k", 3e38)])
def test_late_rows_spoil_their_descendants_only(part, value):
    """Row 42 of 64, by a NaN or by a key that float32 cannot multiply."""
    tree = DraftTree([-1, *(max(0, row - 2) for row in range(63))])
    before = step([Seq(tree)], VARIANTS["64 lean"], seed=4)
    clean = before.run()
    getattr(before.x, part)[42, 0] = value
    done = before.run()
    sees = torch.tensor([42 in tree.path(row) for row in range(64)])
    assert 2 < sees.sum() < 20
    for ours, theirs in ((done.out.o, clean.out.o), (done.out.record.u, clean.out.record.u)):
        assert not ours[sees, 0].isfinite().all(1).any()
        assert same_bits(ours[~sees], theirs[~sees])


@pytest.mark.parametrize("name", ["4", "16", "16 exact", "64 lean"])
def test_what_overflows_in_the_solve_spoils_descendants_only(name):
    """A short key below a long one: its pseudo-value is too large for float32, though every residual is not."""
    tree = DraftTree([-1, 0, 0, 1] + [2, 3] * (name != "4"))
    before = step([Seq(tree)], VARIANTS[name], seed=1)
    before.x.a.fill_(-20.0)
    before.x.b[[1, 3]] = 5.0
    before.x.k[3] = 0.001 * before.x.k[1]
    clean = before.run()
    before.x.v[1, 0, 5] = 2e38
    done = before.run()
    sees = [1 in tree.path(row) for row in range(tree.num_rows)]
    kept = [row for row, spoilt in enumerate(sees) if not spoilt]
    assert not done.out.record.u[3, 0].isfinite().all()
    assert done.out.record.u[1].isfinite().all()
    for ours, theirs in ((done.out.o, clean.out.o), (done.out.record.u, clean.out.record.u)):
        assert same_bits(ours[kept], theirs[kept])
        assert same_bits(ours[:, 1], theirs[:, 1])


@pytest.mark.parametrize("fold", [0, 1])
@pytest.mark.parametrize(
    ("tree", "names"),
    [
        (FIVE, ["16", "16 lean", "48", "64"]),
        (CHAIN_4, ["4", "16", "64"]),
        (WIDTHS_3, ["48", "64", "64 lean", "64 lean, two warps"]),
    ],
)
def test_bits_do_not_depend_on_bucket_or_neighbours(tree, names, fold):
    """One sequence in kernels of several sizes, block shapes, layouts and places, alone and beside others."""
    seen = []
    for name in names:
        seq = Seq(tree, held=3, path=(0, 1, 3), fold=fold)
        alone = step([seq], VARIANTS[name], places=8, seed=5)
        beside = step([seq, Seq(CHAIN_4, held=1, path=(0,)), Seq(tree)], VARIANTS[name], places=8, seed=6, padding=2)
        rows, slots = slice(0, tree.num_rows), (int(alone.slots[0]), int(beside.slots[0]))
        for ours, theirs in zip(beside.x[:5], alone.x[:5], strict=True):
            ours[rows] = theirs
        beside.state[slots[1]] = alone.state[slots[0]]
        for ours, theirs in zip(beside.prior.record, alone.prior.record, strict=True):
            ours[: len(theirs)] = theirs
        for ours, theirs in zip(beside.prior.history, alone.prior.history, strict=True):
            ours[slots[1]] = theirs[slots[0]]
        for problem, slot in zip((alone, beside), slots, strict=True):
            done = problem.run()
            seen.append([done.out.o[rows], *(part[rows] for part in done.out.record), done.state[slot]])
    for other in seen[1:]:
        assert all(same_bits(ours, theirs) for ours, theirs in zip(other, seen[0], strict=True))


@pytest.mark.parametrize(("name", "rows", "first"), [("4", 4, 2), ("16", 7, 2), ("64 lean", 64, 34)])
def test_what_is_no_tree_is_inert(name, rows, first):
    """A row whose parent comes after it, and what hangs below: zeros, whatever they hold, and no influence on the tree."""
    clean = step([Seq(DraftTree.chain(rows - 1)), Seq(CHAIN_4)], VARIANTS[name])
    parents = clean.tree.parents.clone()
    parents[first] = first + 1
    tables = make_tables(parents, clean.tree.cu_rows, max_rows=clean.tree.max_rows)
    broken = clean._replace(tree=tables)
    want = clean.run()
    kept = [*range(first), *range(rows, rows + 4)]
    for value in (1.0, torch.nan):
        broken.x.v[first] = broken.x.k[first + 1] = value
        done = broken.run()
        assert not done.out.o[first:rows].count_nonzero()
        assert not done.out.record.u[first:rows].count_nonzero()
        assert same_bits(done.out.o[kept], want.out.o[kept])


@pytest.mark.parametrize(("name", "bound"), [("4", 2), ("16", 2), ("16", 6)])
def test_rows_past_the_bound_of_a_tree_are_inert(name, bound):
    """The bound is the caller's word; rows beyond it get zeros and reach nobody."""
    clean = step([Seq(CHAIN_4 if bound < 4 else DraftTree.chain(9)), Seq(CHAIN_4)], VARIANTS[name])
    want = clean.run()
    rows = clean.rows(0)
    cut = clean._replace(tree=clean.tree._replace(max_rows=bound))
    cut.x.v[rows.start + bound] = torch.nan
    done = cut.run()
    assert not done.out.o[rows.start + bound : rows.stop].count_nonzero()
    assert same_bits(done.out.o[rows.start : rows.start + bound], want.out.o[rows.start : rows.start + bound])


def test_tables_that_name_what_is_not_there():
    """A path longer than its table is its table's; rows past the record stay within it."""
    whole = step([Seq(CHAIN_4, path=(0, 1, 3)), Seq(CHAIN_4, path=(0, 2))], VARIANTS["4"])
    assert whole.prior is not None
    narrow = whole.prior.path._replace(rows=whole.prior.path.rows[:, :2].contiguous())
    shorter = whole.prior.path._replace(rows=narrow.rows, lengths=torch.tensor([2, 2], dtype=torch.int32))
    got, want = (whole._replace(prior=whole.prior._replace(path=path)).run() for path in (narrow, shorter))
    assert same_bits(got.state[1:], want.state[1:])
    assert same_bits(got.out.o, want.out.o)
    far = whole.prior.path._replace(rows=torch.full_like(whole.prior.path.rows, 77))
    done = whole._replace(prior=whole.prior._replace(path=far)).run()
    assert done.out.o.isfinite().all()


def test_layouts_that_would_be_misread_are_refused():
    good = step([Seq(CHAIN_4, held=2, path=(0, 1))], VARIANTS["4"], places=4)
    prior = good.prior
    assert prior is not None
    assert prior.record is not None
    assert prior.history is not None
    wide = prior.record._replace(u=prior.record.u.float())
    decays = prior.record._replace(decay_high=prior.record.decay_high.double())
    strided = good.out.record._replace(u=torch.empty(4, 2, 256, dtype=torch.bfloat16)[..., ::2])
    gates = good.x._replace(a=good.x.a.repeat_interleave(2, dim=1)[:, ::2])
    for wrong, match in (
        (good._replace(prior=prior._replace(record=wide)), r"record\.u in torch\.bfloat16.*got torch\.float32"),
        (good._replace(prior=prior._replace(record=decays)), r"record's decays in float32"),
        (good._replace(out=good.out._replace(record=strided)), r"out\.record\.u .*contiguous"),
        (good._replace(x=gates), "a with heads side by side"),
    ):
        with pytest.raises(ShapeError, match=match):
            cuda_on_cpu.commit_verify(
                wrong.x, wrong.state, wrong.slots, wrong.tree, wrong.prior, wrong.out, wrong.variant
            )


def elsewhere(before, places, count, *, gathered=False):
    """Return the step with its histories among `count`, sequence i's at `places[i]`; those of nobody are NaN."""
    prior, slots = before.prior, before.slots.long()
    parts = [part.new_full((count, *part.shape[1:]), torch.nan) for part in prior.history[:4]]
    history = gdn.History(*parts, torch.full((count,), 3, dtype=torch.int32))
    there = [seq for seq, place in enumerate(places) if 0 <= place < count and slots[seq] >= 0]
    at, own = torch.tensor(places)[there], slots[there]
    for part, old in zip(history, prior.history, strict=True):
        part[at] = old[own]
    held = torch.where(slots >= 0, prior.history.lengths[slots.clamp(min=0)], 9) if gathered else None
    prior = prior._replace(history=history, held=held, places=torch.tensor(places, dtype=torch.int32))
    return before._replace(prior=prior)


@pytest.mark.parametrize("name", ["4", "16 exact", "64 lean"])
@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize(("places", "count"), [([1, 3, 0, 2], 4), ([8, 0, 5, 2], 9)], ids=["fewer", "more"])
def test_histories_at_places_of_their_own(name, gathered, places, count):
    """Read, appended to and folded there, bit for bit as at the slots; where an inert sequence's would lie, nothing is."""
    first, second, third = TREES[VARIANTS[name].bt]
    seqs = [
        Seq(first, held=3, path=(0, 1)),
        Seq(second, held=5, path=(0, 1, 3), fold=1),
        Seq(third, held=2, path=(0,), inert=True),
        Seq(None, path=(0, 2)),
    ]
    before = step(seqs, VARIANTS[name], places=8, seed=9)
    there = elsewhere(before, places, count, gathered=gathered)
    want, done = before.run(), there.run()
    live = [0, 1, 3]
    assert same_bits(done.out.o, want.out.o)
    assert same_bits(done.state, want.state)
    at, slots = torch.tensor(places)[live], before.slots[live].long()
    for ours, theirs in zip(done.prior.history, want.prior.history, strict=True):
        assert same_bits(ours[at], theirs[slots])
    nobody = [place for place in range(count) if place not in at]
    assert all(part[nobody].isnan().all() for part in done.prior.history[:4])
    assert done.prior.history.u[places[0], 3:5].isfinite().all()


@pytest.mark.parametrize("name", ["4", "16 exact"])
@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("beyond", [-1, 5, -(2**31)])
def test_a_sequence_without_a_place_folds_its_path(name, gathered, beyond):
    """As where there are no histories, whatever `fold` and `held` say of it; its neighbour is appended to."""
    first, second, _ = TREES[VARIANTS[name].bt]
    before = step([Seq(first, path=(0, 1)), Seq(second, held=3, path=(0, 2))], VARIANTS[name], places=8, seed=10)
    there = elsewhere(before, [beyond, 4], 5, gathered=gathered)
    if gathered:
        there.prior.held[0] = 6
    bare = before._replace(prior=before.prior._replace(history=None))
    want, beside, done = bare.run(), before.run(), there.run()
    for problem, seq in ((want, 0), (beside, 1)):
        slot = int(before.slots[seq])
        assert same_bits(done.out.o[before.rows(seq)], problem.out.o[before.rows(seq)])
        assert same_bits(done.state[slot], problem.state[slot])
    for ours, theirs in zip(done.prior.history, beside.prior.history, strict=True):
        assert same_bits(ours[4:], theirs[int(before.slots[1])][None])
    assert all(part[:4].isnan().all() for part in done.prior.history[:4])
