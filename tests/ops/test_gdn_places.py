"""Histories at places of their own: the serving entry finds each where it is said to lie, and touches no other."""

import jaxtyping
import pytest
import torch

from ops.serving import Spec, cast, paths_of, projections
from treewy.errors import CapacityError, ShapeError
from treewy.ops import gdn
from treewy.ops.launch import LAUNCHES
from treewy.packed import pack
from treewy.tree import DraftTree

SPEC = Spec(heads=1, group=2)
TREES = [DraftTree([-1, 0, 0, 0, 3]), DraftTree.chain(1), DraftTree([-1]), DraftTree.chain(2)]
PATHS, CAPACITY, NUM_SLOTS = [[0, 3], [0, 1], [], [0, 2]], 4, 9
SLOTS = [7, 0, 8, 3]
every_backend = pytest.mark.parametrize("backend", ["eager", "reference", "triton"])


def raw(tensors):
    return [part.contiguous().view(torch.uint8).clone() for part in tensors]


def same(ours, theirs):
    return all(map(torch.equal, raw(ours), raw(theirs)))


def rows(*leading, seed):
    """Return random committed rows: u, k and two parts of falling decays."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (SPEC.value_heads, SPEC.value_dim), (SPEC.heads, SPEC.key_dim), (SPEC.value_heads,), (SPEC.value_heads,)
    u, k, high, low = (torch.randn(*leading, *shape, generator=generator) for shape in shapes)
    return u, k, -high.abs().cumsum(-2), 1e-8 * low


def operands(places, num_places, held, fold, *, gathered=False, index=torch.int32):
    """Return (projections, state, slots, tree tables, prior): sequence i holds `held[i]` rows at `places[i]`.

    Whatever no history owns is NaN, and so are states of free slots. A place outside the histories holds nothing.
    """
    generator = torch.Generator().manual_seed(1)
    state = torch.full((NUM_SLOTS, SPEC.value_heads, SPEC.value_dim, SPEC.key_dim), torch.nan)
    state[SLOTS] = torch.randn(len(SLOTS), *state.shape[1:], generator=generator)
    blank = [torch.full_like(part, torch.nan) for part in rows(num_places, CAPACITY, seed=0)]
    history = gdn.History(*blank, torch.zeros(num_places, dtype=index))
    for seq, (place, count) in enumerate(zip(places, held, strict=True)):
        if 0 <= place < num_places:
            history.lengths[place] = count
            for part, mine in zip(history[:4], rows(CAPACITY, seed=10 + seq), strict=True):
                part[place, :count] = mine[:count]
    x = cast(projections(SPEC, TREES, seed=2), torch.float32)
    record, path = gdn.Record(*rows(8, seed=3)), paths_of([0, 2, 0, 5], PATHS, 3)
    now = torch.tensor(held, dtype=index) if gathered else None
    at = None if places == SLOTS else torch.tensor(places, dtype=index)
    prior = gdn.Prior(history, record, path, torch.tensor(fold, dtype=torch.int32), now, at)
    return x, state, torch.tensor(SLOTS, dtype=index), pack(TREES).tables, prior


def step(given, backend):
    """Run the step, and see that the kernel ran."""
    x, state, slots, tree, prior = given
    before = LAUNCHES["gdn_step"]
    verified = gdn.commit_verify(x, state, slots, tree, prior=prior, exact=True, backend=backend)
    assert LAUNCHES["gdn_step"] - before == (backend == "triton")
    assert verified.o.isfinite().all()
    return [verified.o, *verified.record, state], prior.history


@every_backend
@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize(("places", "num_places"), [([2, 3, 0, 1], 4), ([0, 11, 8, 2], 12)], ids=["fewer", "more"])
@pytest.mark.parametrize("fold", [[0, 1, 0, 0], [1, 0, 1, 1]])
def test_a_history_elsewhere_gives_the_same_bits(places, num_places, fold, gathered, backend):
    """Read, appended to and folded at other places than the slots, with fewer histories than states, and more."""
    held = [2, 1, 3, 0]
    want, kept = step(operands(SLOTS, NUM_SLOTS, held, fold), backend)
    got, ours = step(operands(places, num_places, held, fold, gathered=gathered, index=torch.int64), backend)
    assert same(got, want)
    for mine, theirs in zip(ours[:4], kept[:4], strict=True):
        assert same([mine[places]], [theirs[SLOTS]])
        free = [place for place in range(num_places) if place not in places]
        assert mine[free].isnan().all()
    assert ours.lengths[places].tolist() == held
    if not fold[0]:  # rows joined it
        assert ours.u[places[0], :4].isfinite().all()


@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize(
    ("beyond", "backend"),
    [(-1, "eager"), (-1, "reference"), *((beyond, "triton") for beyond in (-1, 6, 2**33))],
)
def test_a_sequence_without_a_place_folds_its_path(beyond, gathered, backend):
    """As where there are no histories at all, whatever `fold` and `held` say; the histories keep every bit."""
    given = operands([beyond, 5, beyond, beyond], 6, [0, 2, 0, 0], [0, 0, 0, 0], index=torch.int64)
    x, state, slots, tree, prior = given
    if gathered:
        prior = prior._replace(held=torch.tensor([4, 2, 1, 3]))
    alone, before = state.clone(), raw([part[:5] for part in prior.history])
    got, history = step((x, state, slots, tree, prior), backend)
    assert same([part[:5] for part in history], before)
    assert history.u[5, :4].isfinite().all()
    bare = gdn.Prior(None, prior.record, prior.path, prior.fold)
    want, _ = step((x, alone, slots, tree, bare), backend)
    others = [0, 2, 3]
    rows_of_others = [*range(5), *range(7, 11)]
    assert same([part[rows_of_others] for part in got[:5]], [part[rows_of_others] for part in want[:5]])
    assert same([state[slots[others]]], [alone[slots[others]]])


@every_backend
def test_an_inert_sequence_leaves_its_history_alone(backend):
    """Its slot decides: at its place nothing is read or written, and nobody asks where it lies."""
    x, state, slots, tree, prior = operands([1, 2, 0, 3], 4, [2, 1, 3, 0], [0, 1, 0, 0])
    slots[0] = -1
    prior.history.u[1], prior.record.u[:2] = torch.nan, torch.nan
    before = raw([part[1:2] for part in prior.history])
    got, history = step((x, state, slots, tree, prior), backend)
    assert not got[0][:5].count_nonzero()
    assert same([part[1:2] for part in history], before)
    prior.places[0] = 99
    step((x, state, slots, tree, prior), backend)


@pytest.mark.parametrize("backend", ["eager", "reference"])
@pytest.mark.parametrize(
    ("places", "said"),
    [([1, 2, 0, 4], r"A place must be -1 or lie in 0\.\.3; got 4"), ([1, 2, 2, 0], "must not share a place")],
)
def test_places_that_cannot_be_are_refused(places, said, backend):
    """Of sequences that are not inert; nothing is written then."""
    x, state, slots, tree, prior = operands([1, 2, 0, 3], 4, [2, 1, 3, 0], [0, 1, 0, 0])
    before = raw([state, *prior.history])
    prior = prior._replace(places=torch.tensor(places))
    with pytest.raises(CapacityError, match=said):
        gdn.commit_verify(x, state, slots, tree, prior=prior, backend=backend)
    assert same([state, *prior.history], before)


def test_shapes_that_do_not_fit_are_refused(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # annotations would refuse first
    x, state, slots, tree, prior = operands([1, 2, 0, 3], 4, [2, 1, 3, 0], [0, 1, 0, 0])
    for wrong, said in (
        (prior._replace(places=prior.places[1:]), "places must have one entry per sequence, 4; got"),
        (prior._replace(places=None), "A history must have a row at least and fit the state"),
        (prior._replace(history=prior.history._replace(lengths=prior.history.lengths[1:])), "A history must"),
    ):
        with pytest.raises(ShapeError, match=said):
            gdn.commit_verify(x, state, slots, tree, prior=wrong)


@pytest.mark.parametrize("name", ["places", "held", "fold"])
def test_tables_with_gaps_are_refused_by_the_kernel(name):
    """It reads them side by side."""
    given = operands([1, 2, 0, 3], 4, [2, 1, 3, 0], [0, 1, 0, 0], gathered=True)
    x, state, slots, tree, prior = given
    prior = prior._replace(**{name: getattr(prior, name).repeat_interleave(2)[::2]})
    with pytest.raises(ShapeError, match=rf"axes of prior\.{name} "):
        gdn.commit_verify(x, state, slots, tree, prior=prior, backend="triton")


def test_a_history_without_room_is_named_by_its_place():
    x, state, slots, tree, prior = operands([1, 2, 0, 3], 4, [3, 1, 3, 0], [0, 1, 0, 0])
    with pytest.raises(CapacityError, match="the one at 1 holds 3 of 4 rows and the path has 2"):
        gdn.commit_verify(x, state, slots, tree, prior=prior)
