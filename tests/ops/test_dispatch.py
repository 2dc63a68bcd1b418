"""Backends are chosen by name, and a name that does not exist is an error."""

import re

import pytest
import torch

from ops.problems import SHAPES, make
from ops.rings import empty_history
from treewy.errors import BackendError
from treewy.ops import accept, attention, conv, gdn, tree
from treewy.ops.attention.kernels import geometry
from treewy.ops.dispatch import compute_dtype
from treewy.ops.gdn import ledger
from treewy.ops.launch import LAUNCHES
from treewy.packed import pack_paths

PROBLEM = make([SHAPES["scattered"]]).to(torch.float32)  # kernels take no float64
RECORD = gdn.Record(*(part.contiguous() for part in gdn.verify(*PROBLEM).record))
PATH = pack_paths(PROBLEM.tree, [[0, 3]])
ROWS, WEIGHT, WINDOW = torch.zeros(5, 3), torch.zeros(3, 4), torch.zeros(1, 3, 3)
HEADS, POOL = torch.zeros(5, 2, 4), torch.zeros(1, 8, 2, 4)
SLOTS = torch.tensor([0])
TABLES = PROBLEM.tree.tables
TOKENS, LOGITS, NUMBERS = torch.zeros(5, dtype=torch.int32), torch.zeros(5, 7), torch.zeros(1, 5, dtype=torch.float64)
KEYS = torch.zeros(1, 2, dtype=torch.int64)
PAGES = attention.Paged(POOL, POOL, torch.zeros(1, 1, dtype=torch.int32), torch.tensor([3], dtype=torch.int32))
ROW_HEADS = torch.zeros(5, 2, 16)
PROJECTIONS = gdn.Projections(*[ROW_HEADS] * 3, *[torch.zeros(5, 2)] * 2, *[torch.zeros(2)] * 2)
ONE = torch.ones(1, dtype=torch.int32)

CALLS = {
    "gdn.verify": lambda backend: gdn.verify(*PROBLEM, backend=backend),
    "gdn.verify_snapshots": lambda backend: gdn.verify_snapshots(*PROBLEM, backend=backend),
    "gdn.commit": lambda backend: gdn.commit(PROBLEM.state.clone(), PROBLEM.slots, RECORD, PATH, backend=backend),
    "gdn.commit_snapshots": lambda backend: gdn.commit_snapshots(
        PROBLEM.state.clone(), PROBLEM.slots, gdn.verify_snapshots(*PROBLEM).record, PATH, backend=backend
    ),
    "gdn.append": lambda backend: gdn.append(
        empty_history(PROBLEM.state, 2, 2), PROBLEM.slots, RECORD, PATH, backend=backend
    ),
    "gdn.fold": lambda backend: gdn.fold(
        PROBLEM.state.clone(), PROBLEM.slots, empty_history(PROBLEM.state, 2, 2), backend=backend
    ),
    "conv.verify": lambda backend: conv.verify(ROWS, WEIGHT, None, WINDOW, SLOTS, PROBLEM.tree, backend=backend),
    "conv.commit": lambda backend: conv.commit(WINDOW, SLOTS, ROWS, PATH, backend=backend),
    "attention.verify": lambda backend: attention.verify(
        HEADS, HEADS, HEADS, POOL, POOL, SLOTS, [3], PROBLEM.tree, scale=1.0, backend=backend
    ),
    "attention.commit": lambda backend: attention.commit(POOL, POOL, SLOTS, [3], HEADS, HEADS, PATH, backend=backend),
    "attention.verify_paged": lambda backend: attention.verify_paged(
        HEADS, HEADS, HEADS, PAGES, TABLES, scale=1.0, backend=backend
    ),
    "attention.commit_paged": lambda backend: attention.commit_paged(PAGES, HEADS, HEADS, PATH.tables, backend=backend),
    "attention.compact_paged": lambda backend: attention.compact_paged(PAGES, TABLES, PATH.tables, backend=backend),
    "gdn.commit_verify": lambda backend: gdn.commit_verify(
        PROJECTIONS, torch.zeros(1, 2, 16, 16), SLOTS, TABLES, backend=backend
    ),
    "gdn.choose_folds": lambda backend: ledger.choose_folds(ONE, SLOTS, ONE, 8, backend=backend),
    "gdn.settle": lambda backend: ledger.settle(ONE.clone(), SLOTS, ONE, ONE, backend=backend),
    "tree.tables": lambda backend: tree.tables(TABLES.parents, TABLES.cu_rows, max_rows=5, backend=backend),
    "tree.paths": lambda backend: tree.paths(TABLES, ONE, backend=backend),
    "accept.choices": lambda backend: accept.choices(LOGITS, backend=backend),
    "accept.walk_choices": lambda backend: accept.walk_choices(TABLES, TOKENS, TOKENS, backend=backend),
    "accept.sampled": lambda backend: accept.sampled(
        TABLES, TOKENS, LOGITS, accept.request_laws([None]), NUMBERS, backend=backend
    ),
    "accept.uniforms": lambda backend: accept.uniforms(KEYS, KEYS[:, 0], 3, backend=backend),
}
WITHOUT_KERNELS = {"gdn.verify_snapshots", "gdn.commit_snapshots"}


@pytest.mark.parametrize("op", CALLS)
@pytest.mark.parametrize("backend", ["Triton", "", "EAGER", "auto"])
def test_fault_g06_an_unknown_backend_is_refused(op, backend):
    """Fault G06: a backend that could not do what was asked did something else, silently."""
    with pytest.raises(BackendError, match=f"{op.split('.', maxsplit=1)[0]}.*{backend!r}"):
        CALLS[op](backend)


@pytest.mark.parametrize("op", CALLS)
@pytest.mark.parametrize("backend", [None, "eager", "reference"])
def test_every_backend_runs_every_op(op, backend):
    CALLS[op](backend)


@pytest.mark.parametrize("op", CALLS)
def test_triton_runs_every_op_that_has_a_kernel(op):
    before = LAUNCHES.total()
    if op in WITHOUT_KERNELS:
        with pytest.raises(BackendError, match=f"there is no Triton kernel of {op}"):
            CALLS[op]("triton")
    else:
        CALLS[op]("triton")
        assert LAUNCHES.total() > before


@pytest.mark.parametrize("op", [op for op in CALLS if op not in WITHOUT_KERNELS])
def test_triton_on_a_cpu_is_refused_outside_the_interpreter(op, monkeypatch):
    """Before anything is launched, whatever a step asks of the device first."""
    geometry.gpu_of.cache_clear()
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    before = LAUNCHES.total()
    with pytest.raises(BackendError, match="must run on a GPU, or in Triton's interpreter; got operands on cpu"):
        CALLS[op]("triton")
    assert LAUNCHES.total() == before


@pytest.mark.parametrize("op", CALLS)
def test_cuda_where_there_is_no_such_kernel_is_refused(op):
    """By its name, and not as an unknown backend: `gdn.commit_verify` has one, which needs a GPU."""
    said = f"{op} has no cuda kernel. Use backend='eager'"
    if op == "gdn.commit_verify":
        said = "The CUDA kernel must run on a GPU; got operands on cpu. Use backend='eager'"
    with pytest.raises(BackendError, match=re.escape(said)):
        CALLS[op]("cuda")


@pytest.mark.parametrize("op", [op for op in CALLS if "verify" in op])
def test_the_default_is_eager(op):
    default, eager = CALLS[op](None), CALLS[op]("eager")
    default, eager = (x if isinstance(x, torch.Tensor) else x.o for x in (default, eager))
    assert torch.equal(default, eager)


def test_the_error_holds_the_install_line():
    error = BackendError("No kernels here.", install="pip install triton")
    assert error.install in str(error)
    assert BackendError("No kernels here.").install is None


@pytest.mark.parametrize(
    ("dtypes", "expected"),
    [
        ([torch.bfloat16, torch.float32], torch.float32),
        ([torch.bfloat16], torch.float32),
        ([torch.float16, torch.float64], torch.float64),
    ],
)
def test_the_compute_dtype_is_at_least_float32(dtypes, expected):
    assert compute_dtype(*(torch.zeros(1, dtype=dtype) for dtype in dtypes)) == expected
