"""Draft trees over vLLM's rolling windows, against float64 row by row and against chains; kernels in Triton's interpreter."""

import jaxtyping
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ops.checks import assert_close
from ops.compiling import ARCHS, SHARED_LIMIT, Case, compile_all
from ops.problems import SHAPES, trees
from tolerances import EXACT, SHORT_SUM_FLOAT16, SHORT_SUM_FLOAT32
from treewy.errors import BackendError, ShapeError, UnsupportedError
from treewy.ops.launch import LAUNCHES
from treewy.tree import DraftTree
from treewy.vllm_plugin.conv import chain_conv, tree_conv
from treewy.vllm_plugin.windows import WindowTable, compact_windows
from vllm_plugin.window_steps import LAYOUTS, Requests, paths_of, tables_of, wide, windows_of

TRITON_DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DEVICES = {"eager": "cpu", "triton": TRITON_DEVICE}
every_backend = pytest.mark.parametrize("backend", DEVICES)
BATCH = [SHAPES[name] for name in ("scattered", "root", "chain 3")]


def check(outputs, tolerance=SHORT_SUM_FLOAT32):
    for y, want in outputs:
        assert_close(y.cpu(), want, tolerance)


@st.composite
def steps(draw, num_requests, max_rows):
    """Draw what each step is given: requests in any order, their trees, an accepted path of each."""
    given = []
    for _ in range(draw(st.integers(1, 4))):
        requests = draw(st.permutations(range(num_requests)))[: draw(st.integers(1, num_requests))]
        shapes = [draw(st.one_of(st.none(), trees(max_rows), trees(max_rows))) for _ in requests]
        nodes = [0 if tree is None else draw(st.integers(0, tree.num_rows - 1)) for tree in shapes]
        paths = [[0] if tree is None else tree.path(node) for tree, node in zip(shapes, nodes, strict=True)]
        given.append((list(requests), shapes, [list(map(int, path)) for path in paths]))
    return given


class TestSteps:
    """Several steps of trees, each behind what the last accepted."""

    @settings(max_examples=25)
    @given(data=st.data())
    def test_any_trees_in_float64(self, data):
        width, layout = data.draw(st.integers(2, 5)), data.draw(st.sampled_from(LAYOUTS))
        requests = Requests("eager", [[3, 0, 5], [1, 2, 0]], width=width, layout=layout, dtype=torch.float64)
        for step in data.draw(steps(3, 12)):
            check(requests.step(*step, padding=data.draw(st.integers(0, 2))), EXACT)

    @pytest.mark.parametrize(
        ("width", "layout"), [(2, "spread"), (3, "channels apart"), (4, "columns apart"), (6, "spread")]
    )
    def test_any_trees_by_the_kernels(self, width, layout):
        """Short trees and paths before long ones and after, in other orders, beside requests without rows or in no step."""
        requests = Requests("triton", [[3, 0, 5], [1, 2, 0]], width=width, layout=layout, device=TRITON_DEVICE)
        scattered, root, chain = BATCH
        check(requests.step([0, 1, 2], [scattered, root, chain], [[0, 3, 4], [0], [0, 1]]))
        check(requests.step([2, 0, 1], [root, None, SHAPES["chain 11"]], [[0], [0], list(range(12))], padding=2))
        check(requests.step([1, 0], [scattered, scattered], [[0, 3], [0, 3, 4]], padding=1))

    @every_backend
    def test_low_precision_and_many_rows(self, backend):
        """More rows and channels than a program takes at a time, paths longer than it moves, and no bias."""
        kind = {"max_rows": 40, "channels": 150, "dtype": torch.float16, "with_bias": False}
        requests = Requests(backend, [[1, 2], [0, 3]], device=DEVICES[backend], **kind)
        big, arms = SHAPES["widths 3 3 3"], SHAPES["two arms"]
        for first, second in ((38, 24), (5, 23), (0, 11)):
            outputs = requests.step([1, 0], [big, arms], [big.path(first), arms.path(second)])
            check(outputs, SHORT_SUM_FLOAT16)

    @every_backend
    def test_an_accepted_path_is_a_chain(self, backend):
        """The window after a tree is that of the path alone, so that whoever copies or reads windows of chains goes on."""
        requests = Requests(backend, [[1]], max_rows=26, device=DEVICES[backend])
        tree, weight, bias = SHAPES["two arms"], requests.weight.cpu(), requests.bias.cpu()
        chain, accepted = requests.windows[0].cpu().clone(), 1
        for node in (25, 9, 2, 0, 24):
            path, before = tree.path(node), len(requests.known[0][0])
            requests.step([0], [tree], [path])
            x = requests.known[0][0][before:].cpu()
            cu_rows = torch.tensor([0, len(path)])
            chain_conv(x, chain, weight, bias, torch.tensor([1]), torch.tensor([accepted]), cu_rows)
            accepted, columns = len(path), 2 + len(path)
            assert torch.equal(requests.windows[0][1, :, :columns].cpu(), chain[1, :, :columns])

    @every_backend
    def test_chains_are_chain_conv(self, backend):
        device = DEVICES[backend]
        requests = Requests(backend, [[2, 0, 1]], device=device)
        window, chains = requests.windows[0], [DraftTree.chain(n) for n in (3, 0, 5)]
        mine, x = window.cpu().clone(), requests.normal(11, 6)
        slots, accepted = torch.tensor([2, 0, 1]), torch.tensor([1, 2, 4])
        window[:, :, 3:7] = mine[:, :, 3:7] = requests.normal(4, 6, 4).cpu().to(window.dtype)
        for _ in range(2):
            tree = tables_of(chains, device=device)
            want = chain_conv(
                x.cpu(), mine, requests.weight.cpu(), requests.bias.cpu(), slots, accepted, tree.cu_rows.cpu()
            )
            operands = (x, window, requests.weight, requests.bias, slots.to(device), accepted.to(device), tree)
            assert_close(tree_conv(*operands, backend=backend).cpu(), wide(want), SHORT_SUM_FLOAT32)
            assert torch.equal(window.cpu().nan_to_num(), mine.nan_to_num())
            accepted = torch.tensor([3, 1, 6])


def operands(backend, shapes, *, layout="columns apart", dtype=torch.float32, slots=4, max_rows=12, **tables):
    """Return random operands of `tree_conv`, windows full of numbers, every sequence with another count of accepted rows."""
    device = DEVICES[backend]
    tree = tables_of(shapes, max_rows=max_rows, device=device, **tables)
    window = windows_of(layout, slots, 6, max_rows + 2, dtype, device)
    random = torch.Generator().manual_seed(0)
    fill, weight, x = (torch.randn(*shape, generator=random) for shape in (window.shape, (6, 4), (tree.num_rows, 6)))
    window.copy_(fill)
    accepted = torch.arange(1, len(shapes) + 2, device=device)
    return x.to(dtype).to(device), window, weight.to(dtype).to(device), None, accepted, tree


def run(backend, operands, slots):
    x, window, weight, bias, accepted, tree = operands
    slots = torch.tensor(slots, dtype=torch.int64, device=DEVICES[backend])
    return tree_conv(x, window, weight, bias, slots, accepted, tree, backend=backend)


def bits(x):
    return x.contiguous().view(torch.uint8)


class TestInert:
    @every_backend
    @pytest.mark.parametrize("bad", [-1, -2, 4, 2**31 - 1, 2**40])
    def test_slots_outside_the_pool(self, backend, bad):
        """Zeros for their rows and those of nobody; no neighbour is read or written, whatever the rows and counts hold."""
        given = operands(backend, BATCH, padding=2)
        x, window, accepted = given[0], given[1], given[4]
        want, old = run(backend, given, [3, 2, 1]), window.clone()
        window.copy_(operands(backend, BATCH)[1])
        x[5], x[10:], accepted[1], window[[0, 2]] = torch.nan, torch.nan, 2**30, torch.nan
        got = run(backend, given, [3, bad, 1])
        assert torch.equal(got[[0, 1, 2, 3, 4, 6, 7, 8, 9]], want[[0, 1, 2, 3, 4, 6, 7, 8, 9]])
        assert not got[[5, 10, 11]].any()
        assert window[[0, 2]].isnan().all()
        assert torch.equal(window[[1, 3]], old[[1, 3]])
        path = paths_of([[0, 2], [0, 4], [0, 2]], 12, DEVICES[backend])
        before = window.clone()
        compact_windows(WindowTable([window]), torch.tensor([[3, bad, 1]], device=x.device), path, 4, backend=backend)
        before[[1, 3], :, 3] = before[[1, 3], :, 4]
        assert torch.equal(bits(window), bits(before))

    @every_backend
    def test_unused_columns_are_not_read(self, backend):
        """Neither those before the newest accepted inputs, nor those behind them."""
        given = operands(backend, BATCH)
        want = run(backend, given, [3, 2, 1])
        given[1].copy_(operands(backend, BATCH)[1])
        for slot, accepted in ((3, 1), (2, 2), (1, 3)):
            given[1][slot, :, : accepted - 1] = given[1][slot, :, accepted + 2 :] = torch.nan
        assert torch.equal(run(backend, given, [3, 2, 1]), want)

    @every_backend
    def test_no_rows_and_no_sequences(self, backend):
        """A sequence that has no rows keeps its window, and rows without a sequence are zero."""
        given = operands(backend, [None, BATCH[0], None], padding=3)
        old = given[1].clone()
        y = run(backend, given, [3, 2, 1])
        assert torch.equal(given[1][[0, 1, 3]], old[[0, 1, 3]])
        assert not torch.equal(given[1][2], old[2])
        assert not y[5:].any()
        none = operands(backend, [], padding=3)
        assert not run(backend, none, []).any()
        nothing = operands(backend, [], max_rows=0)
        assert run(backend, nothing, []).shape == (0, 6)

    def test_tables_of_more_than_there_is(self):
        """Kernels cannot refuse what only the device knows: they neither read past the rows nor write past the window."""
        x, window, weight, bias, accepted, tree = operands("triton", [SHAPES["chain 3"]], layout="spread", max_rows=6)
        rows = torch.cat([x, torch.full_like(x, torch.nan)])[:4]
        cu_rows = torch.tensor([0, 8], dtype=torch.int32, device=x.device)
        old, pages = window.clone(), window._base
        tables = tree._replace(cu_rows=cu_rows, max_rows=2)
        run("triton", (rows, window[:, :, :5], weight, bias, accepted, tables), [1])
        assert torch.equal(window[1, :, :2], old[1, :, 1:3])
        assert torch.equal(window[1, :, 2:5], x[:3].T)
        assert torch.equal(window[1, :, 5:], old[1, :, 5:])
        run("triton", (rows, window, weight, bias, accepted, tables), [1])
        assert torch.equal(window[1, :, 2:6], x.T)
        assert torch.equal(window[1, :, 6:], old[1, :, 6:])
        assert pages[:, 0].isnan().all()
        assert pages[:, -1].isnan().all()

    @every_backend
    @pytest.mark.parametrize(("given", "taken"), [(-5, 1), (0, 1), (13, 12), (2**30, 12)])
    def test_counts_that_no_step_accepts(self, backend, given, taken):
        """The window's ends bound what is read."""
        outputs = []
        for count in (given, taken):
            values = operands(backend, BATCH)
            values[4][1] = count
            outputs.append((run(backend, values, [3, 2, 1]), values[1]))
        assert all(map(torch.equal, *outputs))


class TestCompaction:
    @every_backend
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_columns_move_and_nothing_else_does(self, backend, dtype):
        """Bit for bit, a NaN and its payload as well; rows that have no column, or lie in place or behind a path, do not."""
        device = DEVICES[backend]
        windows = [operands(backend, [], layout="spread", dtype=dtype)[1] for _ in range(3)]
        for number, window in enumerate(windows):
            window.add_(number)[:, :, 9] = torch.nan
        want = [window.clone() for window in windows]
        slots = torch.tensor([[2, 0], [1, 3], [0, 2]], device=device)
        paths = paths_of([[0, 1, 3, 7, 8, 11], [0, 5, 40, 9, -1]], 6, device, fill=10)
        for window, own in zip(want, slots.tolist(), strict=True):
            for slot, moves in zip(own, ([(2, 3), (3, 7), (4, 8), (5, 11)], [(1, 5), (3, 9)]), strict=True):
                for target, source in moves:
                    window[slot, :, 2 + target] = window[slot, :, 2 + source].clone()
        launches = LAUNCHES["gather_columns"]
        compact_windows(WindowTable(windows), slots, paths, 4, backend=backend)
        assert all(torch.equal(bits(got), bits(right)) for got, right in zip(windows, want, strict=True))
        assert LAUNCHES["gather_columns"] == launches + (backend == "triton")

    @every_backend
    def test_layers_that_share_their_slots(self, backend):
        windows = [operands(backend, [])[1] for _ in range(2)]
        slots = torch.tensor([9, 2, 9, 0], dtype=torch.int32, device=DEVICES[backend])[1::2]
        paths = paths_of([[0, 2], [0, 4]], 7, DEVICES[backend], fill=8)
        paths = paths._replace(rows=paths.rows.T.contiguous().T)
        old = windows[0].clone()
        compact_windows(WindowTable(windows), slots.expand(2, 2), paths, 4, backend=backend)
        assert torch.equal(*windows)
        old[2, :, 3], old[0, :, 3] = old[2, :, 4], old[0, :, 6].clone()
        assert torch.equal(windows[0], old)

    @pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
    def test_pools_past_two_to_the_31(self, dtype):
        """Slot times stride does not fit 32 bits. Only the pages that are touched exist."""
        stride, slot = 2**20, 2**11 + 1
        memory = torch.empty((slot + 1) * stride, dtype=torch.float16, device=TRITON_DEVICE)
        pool = memory.as_strided((slot + 1, 6, 14), (stride, 1, 6))
        small = operands("triton", BATCH[:1], dtype=torch.float16)
        big = (small[0], pool, *small[2:])
        pool[slot] = small[1][0]
        where = torch.tensor([[slot]], dtype=dtype, device=TRITON_DEVICE)
        paths = paths_of([[0, 3, 4]], 12, TRITON_DEVICE)
        x, window, weight, bias, accepted, tree = big
        got = tree_conv(x, window, weight, bias, where[0], accepted, tree, backend="triton")
        assert torch.equal(got, run("triton", small, [0]))
        compact_windows(WindowTable([pool]), where, paths, 4, backend="triton")
        compact_windows(WindowTable([small[1]]), where * 0, paths, 4, backend="triton")
        assert torch.equal(pool[slot], small[1][0])


class TestRefusals:
    @pytest.fixture(autouse=True)
    def unchecked(self, monkeypatch):
        """Shapes that annotations would refuse reach the checks that stand without them."""
        monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)

    def test_operands_that_do_not_fit(self):
        """And nothing has been written when they are refused."""
        x, window, weight, bias, accepted, tree = operands("eager", BATCH)
        old, slots = window.clone(), torch.tensor([3, 2, 1])
        for wrong, message in (
            ({"x": x[1:]}, "x must be"),
            ({"window": window[:, :, :13]}, "must have 14 columns"),
            ({"slots": slots[1:]}, "slots must have 3"),
            ({"num_accepted": accepted[:2]}, "slots must have 3"),
        ):
            given = {"x": x, "window": window, "slots": slots, "num_accepted": accepted} | wrong
            with pytest.raises(ShapeError, match=message):
                tree_conv(weight=weight, bias=bias, tree=tree, **given)
        assert torch.equal(window, old)

    def test_tables(self):
        window = torch.zeros(4, 6, 8)
        others = [torch.zeros(3, 6, 8), torch.zeros(4, 8, 6).transpose(1, 2), window.half()]
        for windows in ([], *([window, other] for other in others)):
            with pytest.raises(ShapeError, match="windows of all layers"):
                WindowTable(windows)
        table, path = WindowTable([window, window.clone()]), paths_of([[0], [0]], 3)
        for slots in (torch.zeros(3, 2), torch.zeros(2)):
            with pytest.raises(ShapeError, match="slots must be"):
                compact_windows(table, slots.int(), path, 4)
        with pytest.raises(ShapeError, match="path must be"):
            compact_windows(table, torch.zeros(2, 3).int(), path, 4)

    def test_backends_that_there_are_not(self):
        x, window, weight, bias, accepted, tree = operands("eager", BATCH)
        old, slots = window.clone(), torch.tensor([3, 2, 1])
        for backend in ("cuda", "reference"):
            with pytest.raises(BackendError, match="eager or triton"):
                tree_conv(x, window, weight, bias, slots, accepted, tree, backend=backend)
            with pytest.raises(BackendError, match="eager or triton"):
                compact_windows(WindowTable([window]), slots[None], paths_of([[0, 2]] * 3, 4), 4, backend=backend)
        assert torch.equal(window, old)

    def test_dtypes_that_kernels_do_not_have(self):
        x, window, weight, bias, accepted, tree = operands("triton", BATCH, dtype=torch.float64)
        slots, path = torch.tensor([3, 2, 1], device=x.device), paths_of([[0]] * 3, 12, TRITON_DEVICE)
        with pytest.raises(UnsupportedError, match="float64"):
            tree_conv(x, window, weight, bias, slots, accepted, tree, backend="triton")
        with pytest.raises(UnsupportedError, match="float64"):
            compact_windows(WindowTable([window]), slots[None], path, 4, backend="triton")


def _cases() -> list[Case]:
    """Launches on bfloat16 windows in either of vLLM's layouts."""
    from treewy.vllm_plugin import window_kernels as kernels

    cases = []
    for apart in (False, True):
        unit, other = ("column", "channel") if apart else ("channel", "column")
        strides = {"stride_window_slot": "i32:16", f"stride_window_{other}": "i32" if apart else "i32:16"}
        sizes = {"num_slots": "i32", "num_channels": "i32:16", "num_columns": "i32"}
        roll = dict.fromkeys(["p_newest", "p_window", "p_x"], "*bf16:16") | {"p_places": "*i32", "p_slots": "*i64"}
        roll |= {"p_accepted": "*i32", "p_cu_rows": "*i32", "num_rows": "i32", "stride_x_row": "i32:16"}
        roll |= dict.fromkeys(["stride_slots", "stride_accepted"], "i32") | sizes | strides
        fixed = {f"stride_window_{unit}": 1, "stride_x_channel": 1, "W": 4, "BW": 4, "BT": kernels.ROLL_ROWS}
        place = "treewy.vllm_plugin.window_kernels:"
        options = {"num_warps": kernels.ROLL_WARPS}
        cases.append(Case(f"{place}roll_rows", roll, fixed | {"BC": kernels.ROLL_CHANNELS}, options))
        move = {"p_addresses": "*i64", "p_slots": "*i32", "p_path": "*i32", "p_lengths": "*i32", "num_places": "i32"}
        move |= dict.fromkeys(["stride_slots_layer", "stride_slots", "stride_path_seq", "stride_lengths"], "i32")
        fixed = {f"stride_window_{unit}": 1, "stride_path_place": 1, "OLDER": 2, "DTYPE": "tl.bfloat16"}
        fixed |= {"ALIGNED": True, "BP": kernels.MOVE_COLUMNS, "BC": kernels.MOVE_CHANNELS}
        options = {"num_warps": kernels.MOVE_WARPS}
        cases.append(Case(f"{place}gather_columns", move | sizes | strides, fixed, options))
    return cases


def test_kernels_compile():
    """For every generation of GPUs, within shared memory, nothing spills, and channels side by side go 16 bytes at a time."""
    cases = _cases()
    compiled = compile_all(cases)
    assert len(compiled) == len(cases) * len(ARCHS)
    assert not [one for one in compiled if one.shared > SHARED_LIMIT or one.stack > 0]
    assert min(one.wide_loads for one in compiled[: 2 * len(ARCHS)]) >= 2
