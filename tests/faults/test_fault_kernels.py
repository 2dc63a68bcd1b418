"""Faults that only kernels have: sizes of launches, offsets, shared memory, compilers and cards; the kernels run in Triton's
interpreter, or are compiled for GPUs that are not here."""

from importlib.metadata import requires, version
from itertools import pairwise

import pytest
import torch
from packaging.requirements import Requirement

from faults.compiled_steps import Step, compile_steps
from ops.checks import assert_close
from ops.compiling import SHARED_LIMIT
from ops.serving import Spec, Stream, cast, projections
from tolerances import KERNEL_FLOAT32, KERNEL_TWIN
from treewy.errors import BackendError
from treewy.ops import gdn
from treewy.ops.gdn.cuda.variant import choose, source
from treewy.ops.launch import LAUNCHES
from treewy.ops.nvrtc import compile_cubin
from treewy.packed import pack
from treewy.tree import DraftTree

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROOT_ALONE = DraftTree([-1])


def step(spec, trees, state, slots, backend, *, dtype=torch.float32, tables=None, exact=False):
    """Run one step; outputs start as NaN."""
    x = cast(projections(spec, trees, seed=0), dtype)
    x = gdn.Projections(*(part.to(DEVICE) for part in x[:7]), x.beta_scale)
    out = Stream(spec, 1, dtype=dtype, state=torch.float32, u=torch.float32).buffers(x.v.shape[0])
    out = gdn.Verified(out.o.to(DEVICE), gdn.Record(*(part.to(DEVICE) for part in out.record)))
    slots = torch.as_tensor(slots, dtype=torch.int32, device=DEVICE)
    before = LAUNCHES["gdn_step"]
    tables = pack(trees, device=DEVICE).tables if tables is None else tables
    verified = gdn.commit_verify(x, state, slots, tables, out=out, exact=exact, backend=backend)
    assert LAUNCHES["gdn_step"] - before == (backend == "triton")
    return verified.o


def gates_and_norms(backend):
    """Return `a` and the record of a row per pair of projected gates, on zero states; keys are small, the first one is 0."""
    a, b = torch.cartesian_prod(
        torch.tensor([-200.0, -0.5, 0.5, 100.0, 200.0]), torch.tensor([-200.0, -0.5, 0.5, 200.0])
    ).T
    spec, trees = Spec(heads=1, group=3), [ROOT_ALONE] * len(a)
    x = cast(projections(spec, trees, seed=0), torch.float16)
    x.k.mul_(1e-3)[0] = 0.0
    wide = {"a_log": torch.full((3,), -5.0), "dt_bias": torch.zeros(3)}
    x = x._replace(a=a[:, None].expand(-1, 3).half(), b=b[:, None].expand(-1, 3).half(), **wide)
    out = Stream(spec, 1, dtype=torch.float16, u=torch.float32).buffers(len(a))
    slots = torch.arange(len(a), dtype=torch.int32)
    before = LAUNCHES["gdn_step"]
    args = x, torch.zeros(len(a), 3, 16, 16), slots, pack(trees).tables
    gdn.commit_verify(*args, out=out, backend=backend)
    assert LAUNCHES["gdn_step"] - before == (backend == "triton")
    return a, out.record


def states(num_slots, *shape, dtype=torch.float32):
    drawn = torch.randn(num_slots, *shape, generator=torch.Generator().manual_seed(0))
    return drawn.to(DEVICE, dtype)


def test_a_launch_of_more_than_1024_programs():
    """Fault F14: of 1025 sequences, those at both ends and around the 1024th have rows; all are too slow for the interpreter."""
    spec, live = Spec(heads=1, group=1), torch.tensor([0, 1, 511, 1022, 1023, 1024])
    trees, state = [ROOT_ALONE] * len(live), states(len(live), 1, 16, 16)
    slots = torch.full((1025,), -1).index_copy_(0, live, torch.arange(len(live)))
    cu_rows = torch.cat([torch.zeros(1), (slots >= 0).cumsum(0)]).int().to(DEVICE)
    tables = pack(trees, device=DEVICE).tables._replace(cu_rows=cu_rows, seq_of_row=live.int().to(DEVICE))
    got = step(spec, trees, state, slots, "triton", tables=tables)
    want = step(spec, trees, state, range(len(live)), "eager")
    assert_close(got.cpu(), want.double().cpu().numpy(), KERNEL_TWIN)


@pytest.mark.gpu
@pytest.mark.parametrize("programs", [1023, 1024, 1025, 4096])
def test_every_size_of_launch(programs):
    """Fault F14: as many programs as blocks were when NaN came, all of them live."""
    spec = Spec(heads=1, group=1, key_dim=128, value_dim=64)  # one program per head
    state = states(programs, 1, 64, 128)
    args = spec, [ROOT_ALONE] * programs, state, torch.arange(programs)
    got, want = (step(*args, backend, exact=True) for backend in ("triton", "eager"))
    assert not got.isnan().any()
    assert_close(got.cpu(), want.double().cpu().numpy(), KERNEL_FLOAT32)


@pytest.mark.parametrize("slot", [4095, 4096, 4999])
def test_slots_past_two_to_the_31(slot):
    """Fault K02: a pool of 5000 slots of 32 heads' distance, of which two heads exist and only touched pages take memory."""
    stride = 32 * 128 * 128
    memory = torch.empty(4999 * stride + 2 * 128 * 128, dtype=torch.float16, device=DEVICE)
    pool = memory.as_strided((5000, 2, 16, 16), (stride, 128 * 128, 128, 1))
    near = states(1, 2, 16, 16, dtype=torch.float16)
    pool[slot] = near[0]
    spec, trees = Spec(heads=1, group=2), [DraftTree.chain(2)]
    want = step(spec, trees, near, [0], "triton", dtype=torch.float16)
    assert want.any()
    assert torch.equal(step(spec, trees, pool, [slot], "triton", dtype=torch.float16), want)


def test_gates_are_summed_over_blocks_of_rows():
    """Fault F15: chains one shorter than a block of 16 rows, as long, one longer, and of two blocks and a row."""
    spec, trees = Spec(heads=1, group=1, strong_gate=-3.0), [DraftTree.chain(rows - 1) for rows in (15, 16, 17, 33)]
    state = 10 * states(4, 1, 16, 16)  # what the first rows' gates leave of it shows in the last row
    got, want = (step(spec, trees, state, range(4), backend) for backend in ("triton", "eager"))
    for start, end in pairwise((0, 15, 31, 48, 81)):
        assert_close(got[start:end], want[start:end].double().cpu().numpy(), KERNEL_FLOAT32)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, in the interpreter, of what a GPU computes as well
def test_gates_and_norms_of_projections():
    """Faults F05, F07, F08, F09 and F10: softplus of a large gate, a sigmoid not rounded, an epsilon in the sum of squares."""
    (a, got), (_, want) = gates_and_norms("triton"), gates_and_norms("eager")
    decays = (got.decay_high + got.decay_low)[:, 0]
    assert decays[a == 100].tolist() == pytest.approx([-0.6737947] * 4, rel=1e-6)
    assert_close(decays, (want.decay_high + want.decay_low)[:, 0].double().numpy(), KERNEL_TWIN)
    assert got.u.isfinite().all()
    for one, other in zip(got.u, want.u, strict=True):  # each row by its own scale
        assert_close(one, other.double().numpy(), KERNEL_TWIN)


def test_shared_memory_of_wide_heads():
    """Fault K06: blocks do not grow with the dims, so that the smallest card has room for trees of 64 rows on the widest."""
    steps = [Step(80, 256, 256, 64, "bfloat16"), Step(120, 192, 256, 16, "float32")]
    assert all(0 < shared <= SHARED_LIMIT for shared in compile_steps(steps))


def test_triton_is_of_a_version_that_compiles_the_kernels():
    """Fault K07: the range of versions is stated, and what is installed lies in it."""
    (triton,) = [one for one in map(Requirement, requires("treewy")) if one.name == "triton"]
    assert triton.specifier
    assert triton.specifier.contains(version("triton"))
    assert not triton.specifier.contains("3.5.1")


@pytest.mark.parametrize("capability", [(7, 0), (7, 5)], ids=str)
def test_cards_before_ampere_are_refused_by_name(capability):
    """Fault K08: no compiler aborts; the message says for what it was compiled and which backend there is."""
    bounds = {"max_rows": 4, "max_prior": 4, "state": torch.bfloat16, "u": torch.float32, "exact": False}
    variant = choose(**bounds, num_heads=64, shared_limit=64 * 1024)
    with pytest.raises(BackendError, match=r"(?s)refused it for sm_7[05] .*Use backend='triton'\."):
        compile_cubin(source(), variant.macros(), capability)


def test_bfloat16_compiles_for_cards_that_have_none():
    """Fault K08: Triton's products of bfloat16 on cards without it, within the shared memory that those have."""
    (shared,) = compile_steps([Step(75, 128, 128, 4, "bfloat16")])
    assert 0 < shared <= 64 * 1024
