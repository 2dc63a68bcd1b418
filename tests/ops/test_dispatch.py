"""Backends are chosen by name, and a name that does not exist is an error."""

import pytest
import torch

from ops.problems import SHAPES, make
from ops.rings import empty_history
from treewy.errors import BackendError
from treewy.ops import attention, conv, gdn
from treewy.ops.dispatch import compute_dtype
from treewy.packed import pack_paths

PROBLEM = make([SHAPES["scattered"]])
PATH = pack_paths(PROBLEM.tree, [[0, 3]])
ROWS, WEIGHT, WINDOW = torch.zeros(5, 3), torch.zeros(3, 4), torch.zeros(1, 3, 3)
HEADS, POOL = torch.zeros(5, 2, 4), torch.zeros(1, 8, 2, 4)
SLOTS = torch.tensor([0])

CALLS = {
    "gdn.verify": lambda backend: gdn.verify(*PROBLEM, backend=backend),
    "gdn.verify_snapshots": lambda backend: gdn.verify_snapshots(*PROBLEM, backend=backend),
    "gdn.commit": lambda backend: gdn.commit(
        PROBLEM.state.clone(), PROBLEM.slots, gdn.verify(*PROBLEM).record, PATH, backend=backend
    ),
    "gdn.commit_snapshots": lambda backend: gdn.commit_snapshots(
        PROBLEM.state.clone(), PROBLEM.slots, gdn.verify_snapshots(*PROBLEM).record, PATH, backend=backend
    ),
    "gdn.append": lambda backend: gdn.append(
        empty_history(PROBLEM.state, 2, 2), PROBLEM.slots, gdn.verify(*PROBLEM).record, PATH, backend=backend
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
}


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
