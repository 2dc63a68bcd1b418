"""The convolution's kernels, in Triton's interpreter where there is no GPU, and trees and paths as tables on every backend."""

import jaxtyping
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ops.buckets import Bucket
from ops.problems import SHAPES, trees
from ops.test_conv import close, problem
from tolerances import SHORT_SUM_FLOAT16, SHORT_SUM_FLOAT32
from treewy.errors import BackendError, CapacityError, ShapeError, UnsupportedError
from treewy.ops import conv
from treewy.ops.conv import kernels
from treewy.ops.launch import LAUNCHES
from treewy.packed import PathTables, pack, pack_paths
from treewy.tree import DraftTree

BATCH = [SHAPES[name] for name in ("scattered", "root", "chain 3")]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
every_backend = pytest.mark.parametrize("backend", ["eager", "reference", "triton"])


def launched(kernel, call):
    """Run `call` and assert that it launched `kernel` once."""
    before = LAUNCHES[kernel]
    result = call()
    assert LAUNCHES[kernel] == before + 1
    return result


def verify(*operands, **options):
    return launched("convolve_paths", lambda: conv.verify(*operands, backend="triton", **options))


def commit(*operands):
    launched("shift_windows", lambda: conv.commit(*operands, backend="triton"))


def definition(x, weight, bias, window, slots, tree, activation="silu"):
    """What the reference says of the same numbers, in float64."""
    wide = [None if operand is None else operand.double() for operand in (x, weight, bias, window)]
    return conv.verify(*wide, slots, tree, activation=activation, backend="reference")


@pytest.fixture
def unchecked(monkeypatch):
    """Shapes that annotations would refuse reach the checks that stand without them."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


def bits(x):
    return x.contiguous().view(torch.uint8)


def narrow(shapes, **options):
    """A problem in float32, unless it is given another dtype, where kernels run."""
    *operands, tree = problem(shapes, **{"dtype": torch.float32, **options})
    return *(operand.to(DEVICE) for operand in operands), pack(shapes, num_rows=tree.num_rows, device=DEVICE)


class TestVerify:
    @pytest.mark.parametrize("width", range(2, 9))
    def test_every_width(self, width):
        x, weight, bias, window, slots, tree = narrow(BATCH, width=width, slots=[3, -1, 1], num_rows=12)
        for activation, given_bias in ((None, bias), ("silu", None)):
            got = verify(x, weight, given_bias, window, slots, tree, activation=activation)
            close(got, definition(x, weight, given_bias, window, slots, tree, activation), SHORT_SUM_FLOAT32)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_low_precision(self, dtype):
        """Sums are float32 whatever the operands; the interpreter truncates to bfloat16, so that only float16 is cast."""
        x, weight, bias, window, slots, tree = narrow([SHAPES["widths 3 3 3"]], channels=20, dtype=dtype)
        want = definition(x, weight, bias, window, slots, tree)
        out = torch.empty(x.shape, device=DEVICE)
        close(verify(x, weight, bias, window, slots, tree, out=out), want, SHORT_SUM_FLOAT32)
        got = verify(x, weight, bias, window, slots, tree)
        assert got.dtype == dtype
        if dtype == torch.float16:
            close(got, want, SHORT_SUM_FLOAT16)

    def test_dtypes_that_differ(self):
        x, weight, bias, window, slots, tree = narrow(BATCH)
        x, weight = x.half(), weight.bfloat16()
        got = verify(x, weight, bias, window, slots, tree, out=torch.empty(tree.num_rows, 6, device=DEVICE))
        assert got.dtype == torch.float32
        close(got, definition(x, weight, bias, window, slots, tree), SHORT_SUM_FLOAT32)

    @settings(max_examples=12)
    @given(data=st.data())
    def test_trees_of_any_form(self, data):
        shapes = data.draw(st.lists(trees(12), max_size=3))
        slots = data.draw(st.permutations(range(5)))[: len(shapes)]
        slots = [slot if data.draw(st.booleans()) else -1 for slot in slots]
        rows = sum(tree.num_rows for tree in shapes) + data.draw(st.integers(0, 4))
        width = data.draw(st.integers(2, 5))
        operands = narrow(shapes, width=width, slots=slots, num_slots=5, num_rows=rows)
        close(conv.verify(*operands, backend="triton"), definition(*operands), SHORT_SUM_FLOAT32)

    @pytest.mark.parametrize("size", kernels.BLOCKS)
    def test_bits_depend_on_nothing_but_the_row(self, size):
        """Alone, beside neighbours, behind padding, and in tiles of every size: the same bits."""
        alone = narrow([SHAPES["scattered"]], channels=3)
        want = verify(*alone)
        x, weight, bias, window = alone[:4]
        tree = pack([SHAPES["chain 3"], SHAPES["scattered"]], num_rows=max(12, size), device=DEVICE)
        many = torch.full((tree.num_rows, 3), 7.0, device=DEVICE)
        many[4:9] = x
        pool = torch.cat([torch.full_like(window, 3.0), window])
        got = verify(many, weight, bias, pool, torch.tensor([0, 1], device=DEVICE), tree)
        assert torch.equal(bits(got[4:9]), bits(want))
        assert not got[9:].any()

    def test_channels_past_one_program(self, monkeypatch):
        """Several programs per row, the last with a tail."""
        monkeypatch.setitem(kernels.BLOCKS, 0, kernels.Blocks(2, 8, 1))
        operands = narrow(BATCH, channels=21)
        close(verify(*operands), definition(*operands), SHORT_SUM_FLOAT32)

    @pytest.mark.parametrize("poison", [torch.nan, 1e4])
    def test_poisoned_memory_is_not_read(self, poison, monkeypatch):
        """Fault C10: nor is what lies around the output written, by tiles that reach past it."""
        monkeypatch.setitem(kernels.BLOCKS, 0, kernels.Blocks(4, 8, 1))
        x, weight, bias, window, slots, tree = narrow(BATCH, slots=[3, -1, 1], num_slots=5, num_rows=13)
        want = verify(x, weight, bias, window, slots, tree)
        window[[0, 2, 4]], x[5], x[10:] = poison, poison, poison
        around = torch.full((16, 8), 7.0, device=DEVICE)
        out = around[:13, :6]
        got = verify(x, weight, bias, window, slots, tree, out=out)
        assert got is out
        assert torch.equal(bits(got), bits(want))
        assert not got[[5, 10, 11, 12]].any()
        assert (around[13:] == 7).all()
        assert (around[:, 6:] == 7).all()

    def test_a_nan_stays_in_its_path(self):
        operands = narrow([SHAPES["chain 3"], SHAPES["scattered"]])
        want = verify(*operands)
        operands[0][2] = torch.nan
        got = verify(*operands)
        assert torch.equal(got[[0, 1, 4, 5, 6, 7, 8]], want[[0, 1, 4, 5, 6, 7, 8]])
        assert got[2:4].isnan().all()

    @pytest.mark.filterwarnings("ignore:overflow encountered in exp2")  # NumPy's, where silu's limit is 0
    def test_large_inputs_do_not_overflow(self):
        x, weight, bias, window, slots, tree = narrow([SHAPES["chain 3"]])
        assert verify(x * 1e4, weight, bias, window, slots, tree).isfinite().all()

    def test_verify_never_writes(self):
        operands = narrow(BATCH)
        before = [operand.clone() for operand in operands[:5]]
        verify(*operands)
        assert all(map(torch.equal, operands[:5], before))

    @pytest.mark.parametrize("window_layout", ["rows", "channels", "spread"])
    def test_operands_that_are_views(self, window_layout):
        """Fault K09: slices of wider tensors, windows in either order, a column of slots."""
        x, weight, bias, window, slots, tree = narrow(BATCH, slots=[2, 0, 1])
        want = verify(x, weight, bias, window, slots, tree)
        nan = torch.full((tree.num_rows, 20), torch.nan, device=DEVICE)
        fused, buffer, spread = nan.clone(), nan.clone(), torch.full((12,), torch.nan, device=DEVICE)
        fused[:, 5:11], spread[::2] = x, bias
        layouts = {"rows": window, "channels": window.transpose(1, 2).contiguous().transpose(1, 2)}
        layouts["spread"] = torch.full((3, 3, 12), torch.nan, device=DEVICE)[..., ::2].copy_(window)
        table = torch.stack([slots, torch.full_like(slots, 9)], dim=1)
        operands = (fused[:, 5:11], weight.T.contiguous().T, spread[::2], layouts[window_layout], table[:, 0], tree)
        got = verify(*operands, out=buffer[:, 1::3][:, :6])
        assert torch.equal(got, want)
        assert buffer.isnan().sum() == buffer.numel() - got.numel()

    @every_backend
    def test_out_over_what_is_read_is_refused(self, backend):
        """In place, a row further, a column further, or in the pool; beside x in one table is fine."""
        x, weight, bias, window, slots, tree = narrow([SHAPES["chain 11"]])
        rows, channels = x.shape
        flat = torch.zeros(2 * x.numel() + 3 * window.numel(), device=DEVICE)
        x = flat[: x.numel()].view(x.shape).copy_(x)
        pool = flat[2 * x.numel() :][: window.numel()].view(window.shape).copy_(window)
        want, before = conv.verify(x, weight, bias, pool, slots, tree, backend=backend), flat.clone()
        for start in (0, 1, channels, (rows - 1) * channels, x.numel() + 1):
            out = flat[start : start + x.numel()].view(x.shape)
            with pytest.raises(ShapeError, match="must not overlap"):
                conv.verify(x, weight, bias, pool, slots, tree, out=out, backend=backend)
        assert torch.equal(flat, before)
        behind = flat[x.numel() : 2 * x.numel()].view(x.shape)
        assert torch.equal(conv.verify(x, weight, bias, pool, slots, tree, out=behind, backend=backend), want)
        table = torch.cat([x, x], dim=1)
        beside = table[:, channels:]
        conv.verify(table[:, :channels], weight, bias, pool, slots, tree, out=beside, backend=backend)
        assert torch.equal(beside, want)
        assert torch.equal(table[:, :channels], x)

    def test_columns_that_lie_apart(self):
        x, *others = narrow(BATCH)
        assert torch.equal(verify(x.T.contiguous().T, *others), verify(x, *others))

    @pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
    def test_a_pool_past_two_to_the_31(self, dtype):
        """Faults C13 and K02: slot times stride does not fit 32 bits. Only the pages that are touched exist."""
        stride, slot = 2**20, 2**11 + 1
        memory = torch.empty((slot + 1) * stride, dtype=torch.float16, device=DEVICE)
        pool = memory.as_strided((slot + 1, 3, 6), (stride, 6, 1))
        x, weight, bias, window, _, tree = narrow([SHAPES["chain 3"]], dtype=torch.float16)
        pool[slot] = window[0]
        want = verify(x, weight, bias, window, torch.tensor([0], device=DEVICE), tree)
        slots = torch.tensor([slot], dtype=dtype, device=DEVICE)
        assert torch.equal(verify(x, weight, bias, pool, slots, tree.tables), want)
        commit(pool, slots, x, pack_paths(tree, [[0]]).tables)
        assert torch.equal(pool[slot], torch.cat([window[0, 1:], x[:1]]))


class TestTables:
    @every_backend
    def test_tables_are_as_good_as_the_trees(self, backend):
        x, weight, bias, window, slots, tree = narrow([*BATCH, SHAPES["two arms"]], slots=[3, -1, 1, 0], num_rows=38)
        path = pack_paths(tree, [[0, 3, 4], [0], [], [0, 1, 3, 5, 7]])
        want = conv.verify(x, weight, bias, window, slots, tree, backend=backend)
        assert torch.equal(conv.verify(x, weight, bias, window, slots, tree.tables, backend=backend), want)
        pools = window.clone(), window.clone()
        conv.commit(pools[0], slots, x, path, backend=backend)
        conv.commit(pools[1], slots, x, path.tables, backend=backend)
        assert torch.equal(*pools)
        assert not torch.equal(pools[0], window)

    @every_backend
    def test_sequences_without_rows(self, backend):
        """Fault K10: on good slots, before and after one with rows."""
        x, weight, bias, window, slots, tree = narrow([SHAPES["chain 3"]], slots=[1], num_slots=3, num_rows=6)
        tables = tree.tables
        cu_rows = torch.tensor([0, 0, 4, 4], dtype=torch.int32, device=DEVICE)
        seq_of_row = torch.where(tables.seq_of_row < 0, -1, 1).int()
        tables = tables._replace(cu_rows=cu_rows, seq_of_row=seq_of_row)
        got = conv.verify(x, weight, bias, window, torch.tensor([0, 1, 2], device=DEVICE), tables, backend=backend)
        assert torch.equal(got, conv.verify(x, weight, bias, window, slots, tree, backend=backend))

    @every_backend
    def test_no_sequences_at_all(self, backend):
        """Fault K10: rows are zeroed, and a commit does nothing."""
        x, weight, bias, window, slots, tree = narrow([], num_slots=2, num_rows=3)
        assert not conv.verify(x, weight, bias, window, slots, tree.tables, backend=backend).any()
        conv.commit(window, slots, x, pack_paths(tree, []).tables, backend=backend)

    def test_no_rows_at_all(self):
        x, weight, bias, window, slots, tree = narrow([], num_slots=2)
        assert conv.verify(x, weight, bias, window, slots, tree, backend="triton").shape == (0, 6)

    def test_the_same_buffers_with_other_trees(self):
        """Faults C04, C05, C07, C08 and C09: 4 sequences, then 2, 4 and 1, in buffers of 4, as a graph replays."""
        bucket, weight = Bucket(4, 20, max_rows=8, device=DEVICE), narrow([SHAPES["root"]])[1]
        window = narrow([SHAPES["root"]] * 5)[3]
        x, out = torch.full((2, 20, 6), torch.nan, device=DEVICE)
        for seed, count in enumerate((4, 2, 4, 1)):
            shapes = [[*BATCH, SHAPES["chain 3"]][(seq + seed) % 4] for seq in range(count)]
            slots = torch.randperm(5, generator=torch.Generator().manual_seed(seed))[:count].tolist()
            tree = bucket.fill(shapes, slots, [[0]] * count)
            x.copy_(narrow(shapes, seed=seed, num_rows=20)[0])
            want = window.clone()
            verify(x, weight, None, window, bucket.slots, bucket.tables, out=out)
            close(out, definition(x, weight, None, window, bucket.slots[:count], tree), SHORT_SUM_FLOAT32)
            commit(window, bucket.slots, x, bucket.paths)
            conv.commit(want, bucket.slots[:count], x, pack_paths(tree, [[0]] * count))
            assert torch.equal(window, want)

    def test_slots_outside_the_pool_are_inert(self):
        """Faults A03 and C03: no neighbour and no slot 0 is read or written."""
        x, weight, bias, window, slots, tree = narrow(BATCH, slots=[3, -1, 1], num_slots=4)
        old = window.clone()
        path = pack_paths(tree, [[0], [0], [0]]).tables
        for bad in (4, -2, 2**31 - 1, 2**40):
            odd = torch.where(slots < 0, bad, slots)
            got = verify(x, weight, bias, window, odd, tree.tables)
            assert torch.equal(got, verify(x, weight, bias, window, slots, tree))
            commit(window, odd, x, path)
            assert torch.equal(window[[0, 2]], old[[0, 2]])

    @every_backend
    @pytest.mark.parametrize("bad", [[0, 3], [-2, 0], [1, 1]])
    def test_slots_are_checked_where_the_host_knows_them(self, bad, backend):
        x, weight, bias, window, _, tree = narrow([SHAPES["chain 3"]] * 2, num_slots=3)
        slots = torch.tensor(bad, device=DEVICE)
        with pytest.raises(CapacityError, match="slot"):
            conv.verify(x, weight, bias, window, slots, tree, backend=backend)
        with pytest.raises(CapacityError, match="slot"):
            conv.commit(window, slots, x, pack_paths(tree, [[0], [0]]), backend=backend)


class TestSplit:
    @every_backend
    def test_the_parts_are_views_of_one_buffer(self, backend):
        x, weight, bias, window, slots, tree = narrow(BATCH, channels=10)
        out = torch.empty_like(x)
        parts = conv.verify_split(x, weight, bias, window, slots, tree.tables, (3, 3, 4), out=out, backend=backend)
        assert torch.equal(torch.cat(parts, dim=1), conv.verify(x, weight, bias, window, slots, tree, backend=backend))
        assert [part.data_ptr() - out.data_ptr() for part in parts] == [0, 12, 24]
        assert {part.stride() for part in parts} == {(10, 1)}

    def test_refusals(self, unchecked):
        x, weight, bias, window, slots, tree = narrow(BATCH)
        with pytest.raises(ShapeError, match="all 6 channels"):
            conv.verify_split(x, weight, bias, window, slots, tree, (2, 2, 3))
        with pytest.raises(ShapeError, match="out must be"):
            conv.verify(x, weight, bias, window, slots, tree, out=x[1:])


class TestCommit:
    @pytest.mark.parametrize("width", range(2, 9))
    def test_the_window_moves_over_the_accepted_path(self, width):
        """Fault B01: old inputs fill it where the path is shorter."""
        x, _, _, window, slots, tree = narrow([DraftTree.chain(8)], width=width, slots=[2], num_slots=4)
        for accepted in range(1, 10):
            pool = window.clone()
            commit(pool, slots, x, pack_paths(tree, [list(range(accepted))]))
            assert torch.equal(pool[2], torch.cat([window[2], x[:accepted]])[-(width - 1) :])
            assert torch.equal(pool[[0, 1, 3]], window[[0, 1, 3]])

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_empty_paths_and_inert_slots_keep_every_bit(self, dtype):
        """Fault A02: a path of no rows beside one of one row."""
        x, _, _, window, slots, tree = narrow([SHAPES["chain 3"]] * 3, slots=[1, -1, 0], num_slots=3, dtype=dtype)
        window[1, 0, 0] = torch.nan
        old = window.clone()
        commit(window, slots, x, pack_paths(tree, [[], [0, 1], [0]]))
        assert torch.equal(bits(window[1:]), bits(old[1:]))
        assert torch.equal(window[0], torch.cat([old[0, 1:], x[8:9]]))

    def test_what_stays_keeps_its_bits(self):
        """Also a NaN and its payload, and float32 under bfloat16 rows."""
        x, _, _, window, slots, tree = narrow([SHAPES["chain 3"]])
        window.view(torch.int32)[0, 2, 1] = 0x7FC12345
        old = window.clone()
        commit(window, slots, x.bfloat16(), pack_paths(tree, [[0]]))
        assert torch.equal(bits(window[0, :2]), bits(old[0, 1:]))
        assert torch.equal(window[0, 2], x[0].bfloat16().float())

    def test_rows_are_rounded_to_the_window(self):
        x, _, _, window, slots, tree = narrow([SHAPES["chain 3"]])
        window = window.half()
        commit(window, slots, x, pack_paths(tree, [[0, 1, 2]]))
        assert torch.equal(window[0], x[:3].half())

    def test_what_lies_past_a_path_is_not_read(self):
        x, _, _, window, slots, tree = narrow([SHAPES["scattered"], SHAPES["chain 3"]])
        path = pack_paths(tree, [[0, 3, 4], [0]]).tables
        path.rows[1, 1:] = 2**30
        want = window.clone()
        conv.commit(want, slots, x, pack_paths(tree, [[0, 3, 4], [0]]))
        x[[1, 2, 6, 7, 8]] = torch.nan
        commit(window, slots, x, path)
        assert torch.equal(window, want)

    @pytest.mark.parametrize("bad", [-1, 9, 2**30])
    def test_rows_that_there_are_not_are_not_read(self, bad):
        """Tables cannot be checked: where a row would lie outside x, the window keeps what it has."""
        x, _, _, window, slots, tree = narrow([SHAPES["scattered"], SHAPES["chain 3"]])
        path, old = pack_paths(tree, [[0, 3, 4], [0]]).tables, window.clone()
        path.rows[0, 1] = bad
        commit(window, slots, x, path)
        assert torch.equal(window[0], torch.stack([x[0], old[0, 1], x[4]]))

    @pytest.mark.parametrize("backend", ["eager", "reference"])
    @pytest.mark.parametrize("layers", [False, True])
    @pytest.mark.parametrize(
        ("row", "length", "said"),
        [
            (-1, 3, "has -1"),
            (9, 3, r"must lie in 0\.\.8"),
            (2**30, 2, "has 1073741824"),
            (0, 4, "of 4"),
            (0, -1, "of -1"),
        ],
    )
    def test_rows_that_there_are_not_are_refused_where_the_host_can_tell(self, row, length, said, layers, backend):
        """Nothing is written then; and of a sequence on no slot, or past a path, nothing is looked at."""
        x, _, _, window, _, tree = narrow([SHAPES["scattered"], SHAPES["chain 3"]])
        if layers:
            x, window = x.expand(2, -1, -1), window.expand(2, -1, -1, -1).clone()
        path, old = pack_paths(tree, [[0, 3, 4], [0]]).tables, window.clone()
        path.rows[0, 1], path.lengths[0], path.rows[1, 1:] = row, length, 2**30
        slots = torch.tensor([0, 1], device=DEVICE)
        with pytest.raises(ShapeError, match=said):
            conv.commit(window, slots, x, path, backend=backend)
        assert torch.equal(window, old)
        conv.commit(window, torch.tensor([-1, 1], device=DEVICE), x, path, backend=backend)
        assert torch.equal(window[..., 0, :, :], old[..., 0, :, :])
        assert torch.equal(window[..., 1, -1, :], x[..., 5, :])

    @every_backend
    def test_all_layers_at_once(self, backend):
        x, _, _, window, slots, tree = narrow(BATCH, slots=[3, -1, 1], num_slots=5)
        layers = torch.stack([window, window + 1, window * 2]), torch.stack([x, x - 1, x * 3])
        path = pack_paths(tree, [[0, 3], [0], [0, 1, 2, 3]])
        want = [one.clone() for one in layers[0]]
        for one, rows in zip(want, layers[1], strict=True):
            conv.commit(one, slots, rows, path)
        before = LAUNCHES["shift_windows"]
        conv.commit(layers[0], slots, layers[1], path.tables, backend=backend)
        assert LAUNCHES["shift_windows"] - before == (backend == "triton")
        assert torch.equal(layers[0], torch.stack(want))

    def test_operands_that_are_views(self, monkeypatch):
        """Fault K09: a window within a wider one, every second column of rows, tables with gaps."""
        monkeypatch.setattr(kernels, "COMMIT_CHANNELS", 4)  # several programs per sequence, the last with a tail
        x, _, _, window, slots, tree = narrow(BATCH, slots=[2, 0, 1])
        path = pack_paths(tree, [[0, 3, 4], [], [0]])
        want = window.clone()
        commit(want, slots, x, path)
        around = torch.full((3, 8, 4), 7.0, device=DEVICE).transpose(1, 2)
        across = around[:, :3, :6].copy_(window)
        fused = torch.full((tree.num_rows, 20), torch.nan, device=DEVICE)
        fused[:, 4:16:2] = x
        table = path.tables
        spread = PathTables(torch.stack([table.rows, table.rows], 1)[:, 0], torch.stack([table.lengths] * 2, 1)[:, 1])
        commit(across, torch.stack([slots, slots], 1)[:, 0], fused[:, 4:16:2], spread)
        assert torch.equal(across, want)
        assert (around[:, 3] == 7).all()
        assert (around[..., 6:] == 7).all()

    @every_backend
    def test_refusals(self, backend, unchecked):
        x, _, _, window, slots, tree = narrow(BATCH)
        path = pack_paths(tree, [[0], [0], [0]]).tables
        layers = window[None].expand(2, -1, -1, -1)
        cases = [
            (window, slots[:1], x),
            (window, slots, x[:, 1:]),
            (layers, slots, x),
            (layers[None], slots, x.expand(1, 2, -1, -1)),
        ]
        for pool, at, rows in cases:
            with pytest.raises(ShapeError, match="got"):
                conv.commit(pool, at, rows, path, backend=backend)
        with pytest.raises(ShapeError, match="A path must be"):
            conv.commit(window, slots, x, path._replace(rows=path.rows[:2]), backend=backend)


def test_what_the_kernels_lack_is_refused():
    x, weight, bias, window, slots, tree = narrow([SHAPES["chain 3"]], dtype=torch.float64)
    path = pack_paths(tree, [[0]])
    with pytest.raises(UnsupportedError, match="float64"):
        conv.verify(x, weight, bias, window, slots, tree, backend="triton")
    with pytest.raises(UnsupportedError, match="float64"):
        conv.commit(window, slots, x, path, backend="triton")
    x, weight, bias, window, slots, tree = narrow([SHAPES["chain 3"]], width=9)
    with pytest.raises(UnsupportedError, match="got 9"):
        conv.verify(x, weight, bias, window, slots, tree, backend="triton")
    with pytest.raises(UnsupportedError, match="got 9"):
        conv.commit(window, slots, x, path, backend="triton")


def test_tables_whose_entries_lie_apart_are_refused():
    x, weight, bias, window, slots, tree = narrow([SHAPES["chain 3"]])
    for name in ("parents", "seq_of_row", "cu_rows"):
        apart = torch.stack([getattr(tree.tables, name)] * 2, 1)[:, 0]
        with pytest.raises(UnsupportedError, match=name):
            conv.verify(x, weight, bias, window, slots, tree.tables._replace(**{name: apart}), backend="triton")
    path = pack_paths(tree, [[0, 1]]).tables
    with pytest.raises(UnsupportedError, match="rows"):
        conv.commit(window, slots, x, path._replace(rows=torch.stack([path.rows] * 2, 2)[..., 0]), backend="triton")


def test_a_device_without_kernels_is_refused(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(BackendError, match="cpu"):
        conv.verify(*problem([SHAPES["root"]], dtype=torch.float32), backend="triton")
