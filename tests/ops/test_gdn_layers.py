"""Appending to the histories of all layers at once: what appending to each does, wherever rows and histories lie."""

import jaxtyping
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ops.serving import paths_of
from tolerances import TWO_FLOAT32
from treewy.errors import BackendError, CapacityError, ShapeError, UnsupportedError
from treewy.ops import gdn
from treewy.ops.gdn import layers_kernels
from treewy.ops.launch import LAUNCHES
from treewy.packed import pack, pack_paths
from treewy.tree import DraftTree

LAYERS, PLACES, CAPACITY, HEADS, GROUP, KEYS, VALUES = 3, 6, 8, 1, 3, 5, 3
F16, F32, BF16 = torch.float16, torch.float32, torch.bfloat16
every_backend = pytest.mark.parametrize("backend", ["eager", "reference", "triton"])
# More pieces than one of u and k, and more than one tile of rows.
TREES = [DraftTree.chain(5), DraftTree([-1, 0, 0, 0, 3]), DraftTree([-1]), DraftTree.chain(3), DraftTree.chain(1)]
PATHS = [[0, 1, 2, 3, 4], [0, 3, 4], [], [0, 1], [0]]
AT, HELD = [4, 0, 2, 5, -1], [3, 0, 2, 6, 0]


@pytest.fixture(autouse=True)
def small_programs(monkeypatch):
    monkeypatch.setattr(layers_kernels, "ELEMENTS", 4)


def raw(tensors):
    return [part.contiguous().view(torch.uint8).clone() for part in tensors]


def same(ours, theirs):
    return all(map(torch.equal, raw(ours), raw(theirs)))


def rows(*leading, seed, u=F32, k=F32, dims=(HEADS, GROUP, KEYS, VALUES)):
    """Return random rows: u, k and two parts of decays that fall along the last leading axis."""
    generator = torch.Generator().manual_seed(seed)
    heads, group, keys, values = dims
    shapes = (heads * group, values), (heads, keys), (heads * group,), (heads * group,)
    u_rows, k_rows, high, low = (torch.randn(*leading, *shape, generator=generator) for shape in shapes)
    return u_rows.to(u), k_rows.to(k), -high.abs().cumsum(-2), 1e-8 * low


def fields(tree=True):
    """Return packed rows of `PATHS`."""
    packed = pack(TREES)
    return packed, paths_of(packed.starts, PATHS, 6)


def operands(*, u=F32, k=F32, index=torch.int64, held=HELD, at=AT, num_places=PLACES, seed=0):
    """Return (history, places, record, path); whatever nobody owns is NaN: other places, and rows on no path."""
    packed, path = fields()
    history = gdn.StackedHistory(
        *(torch.full_like(part, torch.nan) for part in rows(LAYERS, num_places, CAPACITY, seed=0, u=u, k=k)),
        torch.zeros(num_places, dtype=index),
    )
    for seq, (place, count) in enumerate(zip(at, held, strict=True)):
        if 0 <= place < num_places:
            history.lengths[place] = count
            mine = rows(LAYERS, CAPACITY, seed=seed + 20 + seq, u=u, k=k)
            for part, filled in zip(history[:4], mine, strict=True):
                part[:, place, :count] = filled[:, :count]
    record = gdn.StackedRecord(*rows(LAYERS, packed.num_rows, seed=seed + 1, u=u, k=k))
    used = [packed.starts[seq] + row for seq, path_ in enumerate(PATHS) if at[seq] >= 0 for row in path_]
    for part in record:
        part[:, [row for row in range(packed.num_rows) if row not in used]] = torch.nan
    return history, torch.tensor(at, dtype=index), record, path


def copy(history):
    return gdn.StackedHistory(*(part.clone() for part in history))


def append(history, places, record, path, backend):
    """Append, and see that the kernel ran once, or not at all."""
    before, launches = history.lengths.clone(), sum(LAUNCHES.values())
    gdn.append_layers(history, places, record, path, backend=backend)
    assert sum(LAUNCHES.values()) - launches == (backend == "triton")
    assert torch.equal(history.lengths, before)


def one_by_one(history, places, record, backend):
    """Return what appending to each layer leaves, lengths as they were."""
    want = copy(history)
    path = pack_paths(pack(TREES), PATHS)
    for layer in range(LAYERS):
        one = gdn.History(*(part[layer] for part in want[:4]), want.lengths.clone())
        gdn.append(one, places, gdn.Record(*(part[layer] for part in record)), path, backend=backend)
    return want


@every_backend
def test_it_is_append_layer_by_layer(backend):
    """Bit for bit, NaN in all that nobody owns; behind nothing, behind few rows, up to the last place."""
    history, places, record, path = operands()
    like = "eager" if backend == "triton" else backend  # dims that the other kernel does not have
    want = one_by_one(history, places, record, like)
    append(history, places, record, path, backend)
    assert same([history.u, history.k], [want.u, want.k])
    if backend != "triton":
        assert same(history, want)
    for ours, theirs in zip(history[2:4], want[2:4], strict=True):
        assert torch.equal(ours.isnan(), theirs.isnan())
    sums = (part.decay_high.double() + part.decay_low.double() for part in (history, want))
    torch.testing.assert_close(*sums, rtol=TWO_FLOAT32, atol=0, equal_nan=True)
    assert history.u[:, 4, :8].isfinite().all()
    assert history.u[:, [1, 3]].isnan().all()


@pytest.mark.parametrize("elements", [16, 1024])
def test_bits_are_those_of_the_other_kernel(elements, monkeypatch):
    """Of `append` in Triton, which has only larger dims: sums of decays in two floats included."""
    monkeypatch.setattr(layers_kernels, "ELEMENTS", elements)
    dims, packed, path = (2, 2, 16, 32), *fields()
    places, lengths = torch.tensor(AT), torch.tensor([0, 9, 2, 9, 3, 6])
    history = gdn.StackedHistory(*rows(2, PLACES, CAPACITY, seed=1, dims=dims, k=F16), lengths)
    record = gdn.StackedRecord(*rows(2, packed.num_rows, seed=2, dims=dims, k=F16))
    history.decay_high[:, 4, 2] = -200.0
    want = copy(history)
    for layer in range(2):
        one = want.layer(layer)._replace(lengths=lengths.clone())
        gdn.append(one, places, record.layer(layer), pack_paths(packed, PATHS), backend="triton")
    untouched = copy(history)
    append(history, places, record, path, "triton")
    assert same(history, want)
    assert not same(history, untouched)


def interleaved(stacked, gap):
    """Return the rows as views of bytes, a row's u, k and decays in one stretch and `gap` bytes behind it; and the bytes."""
    sizes = [part.element_size() * part[(0,) * (stacked.u.ndim - 2)].numel() for part in stacked[:4]]
    leading = stacked.u.shape[:-2]
    memory = torch.full((*leading, sum(sizes) + gap), 0xAB, dtype=torch.uint8)
    views, first = [], 0
    for part, size in zip(stacked[:4], sizes, strict=True):
        view = memory[..., first : first + size].view(part.dtype).unflatten(-1, part.shape[len(leading) :])
        view.copy_(part)
        views.append(view)
        first += size
    return type(stacked)(*views, *stacked[4:]), memory


@every_backend
@pytest.mark.parametrize("gap", [0, 12])
def test_rows_that_are_stretches_of_bytes(gap, backend):
    """Records and histories of which only the elements of a head lie side by side: the same rows, and no byte beside them."""
    history, places, record, path = operands()
    there, memory = interleaved(history, gap)
    taken, before = interleaved(record, gap)[0], memory.clone()
    append(history, places, record, path, backend)
    append(there, places, taken, path, backend)
    assert same(there, history)
    assert torch.equal(memory[..., -gap:] if gap else memory[:, 1], before[..., -gap:] if gap else before[:, 1])


@every_backend
def test_heads_and_tables_with_gaps(backend):
    """Heads far apart, of rows and of decays; every other entry of every table; int32 as well as int64."""
    history, places, record, path = operands()
    wide, _, _, _ = operands(index=torch.int32)

    def spread(part, axis):
        gaps = part.repeat_interleave(2, dim=axis)
        return gaps[(slice(None),) * axis + (slice(None, None, 2),)]

    parts = [part.transpose(2, 3).contiguous().transpose(2, 3) for part in wide[:4]]
    there = gdn.StackedHistory(*parts, spread(wide.lengths, 0))
    taken = gdn.StackedRecord(*(part.transpose(1, 2).contiguous().transpose(1, 2) for part in record))
    tables = type(path)(spread(path.rows, 1), spread(path.lengths, 0))
    append(history, places, record, path, backend)
    append(there, spread(places.int(), 0), taken, tables, backend)
    assert same(there[:4], history[:4])


@every_backend
@pytest.mark.parametrize(("u", "k", "kept_u", "kept_k"), [(F32, BF16, F16, BF16), (F16, F32, F32, F16)])
def test_dtypes(u, k, kept_u, kept_k, backend):
    """Rows are rounded as they are stored."""
    history, places, _, path = operands(u=kept_u, k=kept_k)
    _, _, record, _ = operands(u=u, k=k)
    want = one_by_one(history, places, record, "eager")
    append(history, places, record, path, backend)
    assert same([history.u, history.k], [want.u, want.k])


@pytest.mark.parametrize(
    ("beyond", "backend"), [(-1, "eager"), (-1, "reference"), *((beyond, "triton") for beyond in (-1, 6, 2**40))]
)
def test_what_lies_nowhere_is_inert(beyond, backend):
    """Nothing of such a sequence is read or written, and its path may be anything; its neighbours are appended to."""
    history, places, record, path = operands()
    want = copy(history)
    append(want, places, record, path, backend)
    given, _, record, _ = operands(at=[4, beyond, 2, beyond, -1])
    path.rows[1], path.lengths[3] = 10**6, 77
    given.lengths[[0, 5]] = -7  # nobody's
    append(given, torch.tensor([4, beyond, 2, beyond, -1]), record, path, backend)
    assert same([part[:, [2, 4]] for part in given[:4]], [part[:, [2, 4]] for part in want[:4]])
    assert all(part[:, [0, 1, 3, 5]].isnan().all() for part in given[:4])


class TestWhatDoesNotFit:
    held = (4, 0, 2, 6, 0)

    def test_the_kernel_appends_nothing_of_it(self):
        """A path of five beside four rows of eight places: its history keeps every bit; the others are appended to."""
        history, places, record, path = operands(held=self.held)
        before, others = copy(history), one_by_one(*operands()[:3], "eager")
        append(history, places, record, path, "triton")
        assert same([part[:, 4] for part in history[:4]], [part[:, 4] for part in before[:4]])
        assert same([part[:, [0, 5]] for part in history[:2]], [part[:, [0, 5]] for part in others[:2]])

    def test_lengths_past_the_places_are_full_ones_to_the_kernel(self):
        history, places, record, path = operands()
        history.lengths[4], before = 2**31 - 1, copy(history)
        append(history, places, record, path, "triton")
        assert same([part[:, 4] for part in history[:4]], [part[:, 4] for part in before[:4]])

    @pytest.mark.parametrize("backend", ["eager", "reference"])
    def test_it_is_refused_on_the_host(self, backend):
        """And nothing is written, of the others either."""
        history, places, record, path = operands(held=self.held)
        before = copy(history)
        with pytest.raises(CapacityError, match="the one at 4 holds 4 of 8 rows and the path has 5"):
            append(history, places, record, path, backend)
        assert same(history, before)


class TestTablesThatAreWrong:
    def test_to_the_kernel_a_path_ends_with_its_table_and_rows_with_the_record(self):
        """Nothing of a neighbour's table is read, nothing outside the record."""
        history, places, record, path = operands()
        want = copy(history)
        append(want, places, record, path, "triton")
        history, _, _, _ = operands()
        near = type(path)(path.rows[:, :5].contiguous(), path.lengths.clone())
        near.lengths[0], near.lengths[2] = 900, -5
        append(history, places, record, near, "triton")
        assert same(history[:4], want[:4])

    def test_rows_past_the_record_stay_within_it(self):
        history, places, record, path = operands()
        clean = gdn.StackedRecord(*rows(LAYERS, record.u.shape[1], seed=5))
        path.rows[0, :5] = torch.tensor([-9, 10**6, 0, -1, 10**8])
        append(history, places, clean, path, "triton")
        last = clean.u.shape[1] - 1
        assert same([history.u[:, 4, 3:8]], [clean.u[:, [0, last, 0, 0, last]]])

    @pytest.mark.parametrize("backend", ["eager", "reference"])
    @pytest.mark.parametrize(
        ("places", "length", "row", "error", "said"),
        [
            ([4, 0, 2, 6, -1], 1, 0, CapacityError, r"A place must be -1 or lie in 0\.\.5; got 6"),
            ([4, 0, 4, 5, -1], 1, 0, CapacityError, "must not share a place"),
            (AT, 7, 0, ShapeError, "sequence 1 has a length of 7"),
            (AT, 3, 99, ShapeError, "sequence 1 has 99 among its 3"),
        ],
    )
    def test_they_are_refused_on_the_host(self, places, length, row, error, said, backend):
        history, _, record, path = operands()
        path.lengths[1], path.rows[1, 0], before = length, row, copy(history)
        with pytest.raises(error, match=said):
            append(history, torch.tensor(places), record, path, backend)
        assert same(history, before)


@every_backend
@pytest.mark.parametrize("what", ["sequences", "places in the table", "rows of the record", "layers", "histories"])
def test_where_there_is_nothing_nothing_happens(what, backend):
    history, places, record, path = operands()
    path.lengths.zero_()
    if what == "sequences":
        places, path = places[:0], type(path)(path.rows[:0], path.lengths[:0])
    elif what == "places in the table":
        path = path._replace(rows=path.rows[:, :0])
    elif what == "rows of the record":
        record = gdn.StackedRecord(*(part[:, :0] for part in record))
    elif what == "histories":
        places = torch.full_like(places, -1)
        history = gdn.StackedHistory(*(part[:, :0] for part in history[:4]), history.lengths[:0])
    else:
        history = gdn.StackedHistory(*(part[:0] for part in history[:4]), history.lengths)
        record = gdn.StackedRecord(*(part[:0] for part in record))
    before = copy(history)
    gdn.append_layers(history, places, record, path, backend=backend)
    assert same(history, before)


@settings(max_examples=10)
@given(data=st.data())
def test_many_steps_behind_a_strong_gate(data):
    """With the ledger, over steps of any make-up: what every history holds sums up as in float64."""
    backend, num_seqs = data.draw(st.sampled_from(["eager", "reference", "triton"])), 3
    history = gdn.StackedHistory(*rows(2, 4, 6, seed=0), torch.zeros(4, dtype=torch.int64))
    exact = [[] for _ in range(4)]
    places = torch.tensor(data.draw(st.permutations([-1, 0, 1, 2, 3]))[:num_seqs])
    for number in range(4):
        record = gdn.StackedRecord(*rows(2, 6, seed=number))
        if data.draw(st.booleans()):
            record.decay_high[:] -= 200.0
        lengths = [data.draw(st.integers(0, 2)) for _ in range(num_seqs)]
        path = paths_of([0, 2, 4], [[0, 1][:length] for length in lengths], 2)
        fold = gdn.choose_folds(history.lengths, places, path.lengths, 6)
        gdn.settle(history.lengths, places, torch.zeros_like(path.lengths), fold)  # as if they had been folded
        gdn.append_layers(history, places, record, path, backend=backend)
        gdn.settle(history.lengths, places, path.lengths, torch.zeros_like(fold), backend=backend)
        for seq, (place, folded) in enumerate(zip(places.tolist(), fold.tolist(), strict=True)):
            if place < 0:
                continue
            exact[place] = [] if folded else exact[place]
            newest = exact[place][-1] if exact[place] else 0.0
            decays = record.decay_high.double() + record.decay_low.double()
            exact[place] += [newest + decays[:, 2 * seq + row] for row in range(lengths[seq])]
    for place, decays in enumerate(exact):
        assert int(history.lengths[place]) == len(decays)
        for row, decay in enumerate(decays):
            total = history.decay_high[:, place, row].double() + history.decay_low[:, place, row].double()
            torch.testing.assert_close(total, decay, rtol=len(decays) * TWO_FLOAT32, atol=0)


def far_apart(part, axis):
    """Return the same, one axis strided so that its last entry lies past 2^31 elements though the stride itself does not."""
    strides = list(part.stride())
    strides[axis] = 3 * 2**30 // max(part.shape[axis] - 1, 1)
    size = 1 + sum((length - 1) * stride for length, stride in zip(part.shape, strides, strict=True))
    return torch.empty(size, dtype=part.dtype).as_strided(part.shape, strides).copy_(part)


@pytest.mark.parametrize("axis", range(4), ids=["layer", "place", "row", "head"])
@pytest.mark.parametrize("owner", ["history", "record"])
def test_elements_past_two_to_the_31(owner, axis):
    """Of all that memory only touched pages are there."""
    history, places, record, path = operands(u=F16, k=F16)
    want = copy(history)
    append(want, places, record, path, "triton")
    if owner == "history":
        history = gdn.StackedHistory(*(far_apart(part, axis) for part in history[:4]), history.lengths)
    else:
        record = gdn.StackedRecord(*(far_apart(part, axis % 3) for part in record))
    append(history, places, record, path, "triton")
    assert same(history, want)


class TestRefusals:
    @pytest.mark.parametrize("owner", ["history", "record"])
    @pytest.mark.parametrize("name", [*gdn.Record._fields, "lengths"])
    def test_shapes(self, owner, name, monkeypatch):
        monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # annotations would refuse first
        history, places, record, path = operands()
        if owner == "record" and name == "lengths":
            record = record._replace(u=record.u[0])
        elif owner == "record":
            record = record._replace(**{name: getattr(record, name)[:, :, :-1]})
        else:
            history = history._replace(**{name: getattr(history, name)[1:]})
        with pytest.raises(ShapeError, match=r"fit the records|a stacked record's u"):
            gdn.append_layers(history, places, record, path)

    def test_tables(self, monkeypatch):
        monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
        history, places, record, path = operands()
        for at, table, said in (
            (places[1:], path, r"A path must be \[B, P\] rows and \[B\] lengths for 4 sequences"),
            (places[None], path, r"places must be \[sequences\]"),
            (places.to("meta"), path, "must lie on one device; places are on meta and others on cpu"),
        ):
            with pytest.raises(ShapeError, match=said):
                gdn.append_layers(history, at, record, table)

    def test_layouts_and_dtypes_that_the_kernel_lacks(self):
        history, places, record, path = operands()
        gaps = record.u.repeat_interleave(2, dim=-1)[..., ::2]
        swapped = history.decay_low.transpose(2, 3).contiguous().transpose(2, 3)
        for kept, new, error, said in (
            (history, record._replace(u=gaps), ShapeError, "axes of record.u behind the first 3"),
            (history._replace(decay_low=swapped), record, ShapeError, "both parts of history's decays laid out alike"),
            (history, record._replace(k=record.k.double()), UnsupportedError, "record.k as torch.float64"),
        ):
            with pytest.raises(error, match=said):
                gdn.append_layers(kept, places, new, path, backend="triton")

    def test_a_backend_that_is_not_there(self):
        with pytest.raises(BackendError, match=r"gdn\.append_layers has no cuda kernel"):
            gdn.append_layers(*operands(), backend="cuda")
