"""Tree tables made from parents on the device: those of `PackedTree`, bit for bit, and harmless for what is no tree."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ops.compiling import Case, compile_all
from ops.problems import SHAPES, trees
from treewy.errors import ShapeError, UnsupportedError
from treewy.ops import tree
from treewy.ops.launch import LAUNCHES
from treewy.packed import PathTables, TreeTables, pack, pack_paths
from treewy.tree import DraftTree

BACKENDS = ["reference", "eager", "triton"]
KERNEL = "tree_tables_kernel"
TABLES = ("parents", "cu_rows")


def assert_equal(got: TreeTables, want: TreeTables) -> None:
    assert got.max_rows == want.max_rows
    for name, one, other in zip(TreeTables._fields[:5], got, want, strict=False):
        assert one.dtype == torch.int32
        assert torch.equal(one, other), f"{name}: {one} is not {other}"


def int32(numbers) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


@st.composite
def batches(draw: st.DrawFn):
    """Draw a ragged batch, on a row axis with or without padding."""
    shapes = draw(st.lists(trees(40), max_size=4))
    return pack(shapes, num_rows=sum(shape.num_rows for shape in shapes) + draw(st.integers(0, 5)))


@pytest.mark.parametrize("backend", BACKENDS)
@given(packed=batches())
@settings(max_examples=30)
def test_they_are_those_of_the_packed_trees(backend, packed):
    want, before = packed.tables, LAUNCHES[KERNEL]
    faults = torch.full((packed.num_seqs,), 9, dtype=torch.int32)
    got = tree.tables(want.parents, want.cu_rows, max_rows=packed.max_size, faults=faults, backend=backend)
    assert_equal(got, want)
    assert not faults.any()
    assert LAUNCHES[KERNEL] == before + (backend == "triton")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_deep_wide_and_root_alone(backend, dtype):
    """Fault G08: a star of 64 siblings, chains over several words, roots alone, more rows than one program fills."""
    shapes = [DraftTree.chain(127), DraftTree.from_widths([64]), DraftTree([-1]), SHAPES["two arms"], DraftTree([-1])]
    packed = pack(shapes, num_rows=600)
    want = packed.tables
    assert_equal(tree.tables(want.parents.to(dtype), want.cu_rows.to(dtype), max_rows=128, backend=backend), want)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_sequence_without_rows(backend):
    """Fault K10: its neighbours are as they are without it."""
    want = tree.tables(int32([-1, 0, -1, 0, 0]), int32([0, 2, 5]), max_rows=3, backend="reference")
    got = tree.tables(int32([-1, 0, -1, 0, 0]), int32([0, 0, 2, 2, 5, 5]), max_rows=3, backend=backend)
    assert got.seq_of_row.tolist() == [1, 1, 3, 3, 3]
    assert_equal(got._replace(cu_rows=want.cu_rows, seq_of_row=want.seq_of_row), want)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("num_rows", "max_rows"), [(0, 0), (3, 0), (0, 4), (300, 4)])
def test_a_batch_of_none(backend, num_rows, max_rows):
    """Fault K10: no rows, no room or no sequence."""
    parents = torch.full((num_rows,), 1, dtype=torch.int32)
    got = tree.tables(parents, int32([0]), max_rows=max_rows, backend=backend)
    assert_equal(got, tree.empty(0, num_rows, max_rows))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("in_place", [False, True])
def test_buffers_are_filled_again_and_again(backend, in_place):
    """Fault C09: nothing of a larger batch before shows; in place, what is read is what is written."""
    buffers = tree.empty(3, 30, 12)
    for shapes in (["chain 11", "widths 3 3 3", "root"], ["scattered"], [], ["root", "chain 3", "chain 11"]):
        fitting = [SHAPES[name].prefix(min(12, SHAPES[name].num_rows)) for name in shapes]
        packed = pack(fitting, num_rows=30).tables
        ends = torch.cat([packed.cu_rows, packed.cu_rows[-1:].repeat(3 - len(shapes))])
        parents, cu_rows = (buffers.parents, buffers.cu_rows) if in_place else (packed.parents, ends)
        parents.copy_(packed.parents)
        cu_rows.copy_(ends)
        got = tree.tables(parents, cu_rows, max_rows=12, out=buffers, backend=backend)
        assert got is buffers
        words = packed.ancestors if shapes else torch.zeros(30, 1, dtype=torch.int32)
        assert_equal(got, packed._replace(cu_rows=ends, ancestors=words, max_rows=12))


@st.composite
def garbage(draw: st.DrawFn):
    """Draw parents and boundaries, some of them no trees: few wrong numbers, or nothing right."""
    parents = draw(st.lists(st.integers(-3, 8), max_size=24))
    cu_rows = [0, *sorted(draw(st.lists(st.integers(0, len(parents)), max_size=4)))]
    for start in cu_rows[:-1] if draw(st.booleans()) else []:
        parents[start : start + 3] = [-1, 0, 0][: len(parents) - start]
    if draw(st.booleans()):
        cu_rows[draw(st.integers(0, len(cu_rows) - 1))] = draw(st.sampled_from([-(2**31), -1, 3, 40, 2**31 - 1]))
    return int32(parents), int32(cu_rows), draw(st.integers(0, 9))


@pytest.mark.parametrize("backend", ["eager", "triton"])
@given(given=garbage())
@settings(max_examples=60)
def test_what_is_no_tree_is_inert(backend, given):
    """As the reference has it, whatever the numbers: nothing is read or written out of bounds, in place or not."""
    parents, cu_rows, max_rows = given
    faults = [torch.full((len(cu_rows) - 1,), 9, dtype=torch.int32) for _ in range(2)]
    want = tree.tables(parents, cu_rows, max_rows=max_rows, faults=faults[0], backend="reference")
    got = tree.tables(parents, cu_rows, max_rows=max_rows, faults=faults[1], backend=backend)
    assert_equal(got, want)
    assert faults[1].tolist() == faults[0].tolist()
    same = tree.empty(len(cu_rows) - 1, len(parents), max_rows)
    same.parents.copy_(parents)
    same.cu_rows.copy_(cu_rows)
    assert_equal(tree.tables(same.parents, same.cu_rows, max_rows=max_rows, out=same, backend=backend), want)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_faults_by_name(backend):
    """One of each: a parent that is its child, a second root, a root with a parent, too many rows, boundaries that fall."""
    parents = int32([-1, 0, 2, 1, 1, *(-1, 0, -1, 2), *(0, 0), *(-1, 0, 0, 0, 0, 0), -1])
    faults = torch.zeros(5, dtype=torch.int32)
    got = tree.tables(parents, int32([0, 5, 9, 11, 17, 12]), max_rows=5, faults=faults, backend=backend)
    lost = [tree.FAULT_PARENT] * 3
    assert faults.tolist() == [*lost, tree.FAULT_SIZE, tree.FAULT_BOUNDS]
    assert got.seq_of_row.tolist() == [0, 0, -1, 0, 0, 1, 1, -1, -1, -1, -1, 3, 3, 3, 3, 3, -1, -1]
    assert got.parents.tolist() == [-1, 0, -1, 1, 1, -1, 0, -1, -1, -1, -1, -1, 0, 0, 0, 0, -1, -1]
    assert got.ancestors[:, 0].tolist() == [1, 3, 0, 11, 19, 1, 3, 0, 0, 0, 0, 1, 3, 5, 9, 17, 0, 0]
    assert got.cu_rows.tolist() == [0, 5, 9, 11, 17, 17]


@pytest.mark.parametrize("backend", BACKENDS)
@given(packed=batches(), picks=st.lists(st.integers(-2, 45), min_size=4, max_size=4), room=st.integers(0, 9))
@settings(max_examples=30)
def test_paths(backend, packed, picks, room):
    """Root paths, cut to the room there is; a row that is none has none."""
    nodes = picks[: packed.num_seqs]
    right = [
        DraftTree(shape).path(node) if 0 <= node < len(shape) else []
        for shape, node in zip(packed.shapes, nodes, strict=True)
    ]
    cut = pack_paths(packed, [path[:room] for path in right]).tables
    want = torch.full((packed.num_seqs, room), packed.num_rows, dtype=torch.int32)
    want[:, : cut.rows.shape[1]] = cut.rows
    before = LAUNCHES["tree_paths_kernel"]
    got = tree.paths(packed.tables, int32(nodes), max_path=room, backend=backend)
    assert torch.equal(got.lengths, cut.lengths)
    assert torch.equal(got.rows, want)
    assert LAUNCHES["tree_paths_kernel"] == before + (backend == "triton" and packed.num_seqs > 0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_inert_row_has_no_path(backend):
    tables = tree.tables(int32([-1, 0, -1, 2, -1, 0]), int32([0, 4, 6]), max_rows=4, backend="reference")
    assert tree.paths(tables, int32([3, 1]), backend=backend).lengths.tolist() == [0, 2]
    out = PathTables(torch.full((2, 3), 7, dtype=torch.int32), int32([5, 5]))
    tree.paths(tables, int32([1, -1]), out=out, backend=backend)
    assert (out.rows.tolist(), out.lengths.tolist()) == ([[0, 1, 6], [6, 6, 6]], [2, 0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_does_not_fit_is_refused(backend):
    parents, cu_rows = int32([-1, 0]), int32([0, 2])
    with pytest.raises(ShapeError, match=r"at least 0.*max_rows=-1"):
        tree.empty(1, 2, -1)
    with pytest.raises(ShapeError, match=r"B \+ 1 boundaries; got none"):
        tree.tables(parents, int32([]), max_rows=2)
    with pytest.raises(ShapeError, match=r"out must hold 1 sequences, 2 rows, max_rows=2"):
        tree.tables(parents, cu_rows, max_rows=2, out=tree.empty(1, 2, 3))
    with pytest.raises(ShapeError, match="faults must be"):
        tree.tables(parents, cu_rows, max_rows=2, faults=int32([0, 0]))
    for faults in (torch.zeros(1, dtype=torch.int64), torch.zeros(4, dtype=torch.int32)[::2]):
        count = faults.shape[0]
        with pytest.raises(ShapeError, match="faults must be contiguous int32"):
            tree.tables(int32([-1] * count), int32(range(count + 1)), max_rows=1, faults=faults, backend=backend)
    strided = tree.empty(1, 2, 2)._replace(depth=torch.zeros(4, dtype=torch.int32)[::2])
    with pytest.raises(ShapeError, match="depth must be contiguous int32"):
        tree.tables(parents, cu_rows, max_rows=2, out=strided)
    with pytest.raises(UnsupportedError, match="at most 256 rows; got max_rows=257"):
        tree.tables(parents, cu_rows, max_rows=257, backend="triton")
    tables = tree.tables(parents, cu_rows, max_rows=2)
    with pytest.raises(ShapeError, match="nodes must be"):
        tree.paths(tables, int32([0, 0]))
    with pytest.raises(ShapeError, match="Paths must have 1 sequences"):
        tree.paths(tables, int32([0]), out=PathTables(torch.zeros(2, 2, dtype=torch.int32), int32([0, 0])))


def test_strided_operands():
    """Fault K09: parents and boundaries as columns of something wider."""
    wide = torch.stack([int32([-1, 0, 0, 5]), int32([0, 2, 3, 9])], dim=1)
    for backend in BACKENDS:
        got = tree.tables(wide[:3, 0], wide[:3, 1], max_rows=2, backend=backend)
        assert got.seq_of_row.tolist() == [0, 0, -1]


def test_they_compile_for_gpus_that_are_not_here():
    pointers = dict.fromkeys([*TABLES, *(f"out_{name}" for name in (*TABLES, "seq_of_row", "depth", "words"))], "*i32")
    numbers = dict.fromkeys(["num_seqs", "num_rows", "max_rows"], "i32")
    sizes = {"HAS_FAULTS": True, "NW": 8, "BT": 256, "BW": 8, "BB": 1024, "FILL": 256}
    kernel = f"treewy.ops.tree.kernels:{KERNEL}"
    case = Case(kernel, {**pointers, **numbers, "faults": "*i32"}, sizes, {"num_warps": 4})
    pointers = dict.fromkeys([*TABLES, "seq_of_row", "depth", "nodes", "rows", "lengths"], "*i32")
    kernel = "treewy.ops.tree.kernels:tree_paths_kernel"
    paths = Case(kernel, {**pointers, "num_rows": "i32", "room": "i32"}, {"BP": 128}, {"num_warps": 1})
    for compiled in compile_all([case, paths]):
        assert compiled.shared <= 16 * 1024, compiled
        assert compiled.stack == 0, compiled
