"""The tree convolution against the plain causal convolution of each root path, and its window."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from ops.problems import SHAPES, trees
from tolerances import EXACT, SHORT_SUM_BFLOAT16, SHORT_SUM_FLOAT32
from treewy.errors import CapacityError, ShapeError, UnsupportedError
from treewy.ops import conv
from treewy.packed import pack, pack_paths
from treewy.tree import DraftTree

both_backends = pytest.mark.parametrize("backend", ["eager", "reference"])
BATCH = ["scattered", "root", "chain 3"]


def problem(shapes, *, width=4, channels=6, seed=0, slots=None, num_slots=None, num_rows=None, dtype=torch.float64):
    """Return (x, weight, bias, window, slots, tree)."""
    generator = torch.Generator().manual_seed(seed)
    tree = pack(shapes, num_rows=num_rows)
    slots = list(range(len(shapes))) if slots is None else slots
    num_slots = max(slots, default=0) + 1 if num_slots is None else num_slots

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    x, weight, bias = normal(tree.num_rows, channels), normal(channels, width), normal(channels)
    return x, weight, bias, normal(num_slots, width - 1, channels), torch.tensor(slots, dtype=torch.int64), tree


def plain(x, weight, bias, window, activation):
    """Convolve [T, C] after `window` with PyTorch's own conv1d."""
    history = torch.cat([window, x]).T[None]
    y = functional.conv1d(history, weight[:, None], bias, groups=weight.shape[0])[0].T
    return y if activation is None else functional.silu(y)


def close(got, want, tolerance):
    assert got.shape == want.shape
    assert got.isfinite().all()
    if want.numel():
        assert (got.double() - want).abs().max() <= tolerance * max(1.0, want.abs().max().item())


class TestVerify:
    @both_backends
    @pytest.mark.parametrize("activation", [None, "silu", "swish"])
    @pytest.mark.parametrize("with_bias", [True, False])
    @pytest.mark.parametrize("width", [2, 3, 4, 5])
    def test_every_row_is_the_convolution_of_its_path(self, width, with_bias, activation, backend):
        shapes = [SHAPES[name] for name in (*BATCH, "chain 11", "widths 3 3 3")]
        x, weight, bias, window, slots, tree = problem(shapes, width=width, slots=[4, 0, 2, 1, 5])
        bias = bias if with_bias else None
        y = conv.verify(x, weight, bias, window, slots, tree, activation=activation, backend=backend)
        for seq, shape in enumerate(shapes):
            for node in range(shape.num_rows):
                rows = [tree.starts[seq] + row for row in shape.path(node)]
                close(y[rows[-1]], plain(x[rows], weight, bias, window[slots[seq]], activation)[-1], EXACT)

    @settings(max_examples=50)
    @given(data=st.data())
    def test_eager_equals_reference(self, data):
        shapes = data.draw(st.lists(trees(12), max_size=3))
        slots = data.draw(st.permutations(range(5)))[: len(shapes)]
        slots = [slot if data.draw(st.booleans()) else -1 for slot in slots]
        rows = sum(tree.num_rows for tree in shapes) + data.draw(st.integers(0, 4))
        width = data.draw(st.integers(2, 5))
        operands = problem(shapes, width=width, slots=slots, num_slots=5, num_rows=rows)
        close(conv.verify(*operands), conv.verify(*operands, backend="reference"), EXACT)

    @pytest.mark.parametrize(
        ("dtype", "tolerance"), [(torch.float32, SHORT_SUM_FLOAT32), (torch.bfloat16, SHORT_SUM_BFLOAT16)]
    )
    def test_low_precision(self, dtype, tolerance):
        shapes = [SHAPES["widths 3 3 3"], SHAPES["chain 31"]]
        x, weight, bias, window, slots, tree = problem(shapes, channels=32, dtype=dtype)
        y = conv.verify(x, weight, bias, window, slots, tree)
        assert y.dtype == dtype
        wide = [operand.double() for operand in (x, weight, bias, window)]
        close(y, conv.verify(*wide, slots, tree, backend="reference"), tolerance)

    def test_large_inputs_do_not_overflow(self):
        x, weight, bias, window, slots, tree = problem([SHAPES["chain 3"]])
        for backend in ("eager", "reference"):
            y = conv.verify(x * 1e4, weight, bias, window, slots, tree, backend=backend)
            assert y.isfinite().all()

    @both_backends
    @pytest.mark.parametrize("poison", [torch.nan, 1e4])
    def test_poisoned_memory_is_not_read(self, poison, backend):
        shapes = [SHAPES[name] for name in BATCH]
        x, weight, bias, window, slots, tree = problem(shapes, slots=[3, -1, 1], num_slots=5, num_rows=13)
        want = conv.verify(x, weight, bias, window, slots, tree, backend=backend)
        x, window = x.clone(), window.clone()
        window[[0, 2, 4]], x[5], x[10:] = poison, poison, poison
        got = conv.verify(x, weight, bias, window, slots, tree, backend=backend)
        assert torch.equal(got, want)
        assert not got[[5, 10, 11, 12]].any()

    @both_backends
    def test_a_nan_stays_in_its_request(self, backend):
        operands = problem([SHAPES["chain 3"], SHAPES["scattered"]])
        want = conv.verify(*operands, backend=backend)
        operands[0][2] = torch.nan
        got = conv.verify(*operands, backend=backend)
        assert torch.equal(got[4:], want[4:])
        assert torch.equal(got[:2], want[:2])
        assert got[2:4].isnan().all()

    @both_backends
    def test_verify_never_writes(self, backend):
        operands = problem([SHAPES["chain 3"], SHAPES["scattered"]])
        before = [operand.clone() for operand in operands[:5]]
        conv.verify(*operands, backend=backend)
        assert all(map(torch.equal, operands[:5], before))

    @both_backends
    def test_operands_that_are_views(self, backend):
        x, weight, bias, window, slots, tree = problem([SHAPES["chain 3"], SHAPES["scattered"]])
        want = conv.verify(x, weight, bias, window, slots, tree)
        strided = torch.full((2, 3, 12), torch.nan, dtype=torch.float64)
        strided[..., ::2] = window
        wide = torch.cat([x, torch.full_like(x, torch.nan)], dim=1)
        got = conv.verify(wide[:, :6], weight.T.contiguous().T, bias, strided[..., ::2], slots, tree, backend=backend)
        close(got, want, EXACT)

    @both_backends
    @pytest.mark.parametrize("prompt", [1, 2, 3])
    def test_fault_b06_a_short_prompt_on_a_used_slot(self, prompt, backend):
        """Fault B06: a fresh request read the window its slot's last owner left."""
        x, weight, bias, window, slots, tree = problem([DraftTree.chain(prompt - 1)], slots=[1], num_slots=3)
        window[:] = 1e4
        window[1] = 0  # the reset a fresh request gets
        got = conv.verify(x, weight, bias, window, slots, tree, backend=backend)
        close(got, plain(x, weight, bias, torch.zeros(3, 6, dtype=torch.float64), "silu"), EXACT)
        conv.commit(window, slots, x, pack_paths(tree, [list(range(prompt))]), backend=backend)
        assert torch.equal(window[1], torch.cat([torch.zeros(3 - prompt, 6, dtype=torch.float64), x]))
        assert (window[[0, 2]] == 1e4).all()


class TestCommit:
    @both_backends
    @pytest.mark.parametrize("width", [2, 3, 4, 5])
    @pytest.mark.parametrize("accepted", [1, 2, 3, 4, 5, 6])
    def test_fault_b01_the_window_moves_over_the_accepted_path(self, width, accepted, backend):
        """Fault B01: the window stayed at its pre-verify value; short paths keep the newest old inputs."""
        x, _, _, window, slots, tree = problem([DraftTree.chain(5)], width=width, slots=[2], num_slots=4)
        old = window.clone()
        conv.commit(window, slots, x, pack_paths(tree, [list(range(accepted))]), backend=backend)
        assert torch.equal(window[2], torch.cat([old[2], x[:accepted]])[-(width - 1) :])
        assert torch.equal(window[[0, 1, 3]], old[[0, 1, 3]])

    @both_backends
    def test_a_scattered_path(self, backend):
        x, _, _, window, slots, tree = problem([SHAPES["scattered"]], width=3)
        conv.commit(window, slots, x, pack_paths(tree, [[0, 3, 4]]), backend=backend)
        assert torch.equal(window[0], x[[3, 4]])

    @both_backends
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
    def test_committing_then_verifying_continues_the_sequence(self, dtype, backend):
        """Two steps equal one plain convolution over all accepted inputs."""
        x, weight, bias, window, slots, tree = problem([SHAPES["scattered"], DraftTree.chain(5)], dtype=dtype)
        before = window.clone()
        paths = [[0, 3, 4], [0, 1]]
        conv.commit(window, slots, x, pack_paths(tree, paths), backend=backend)
        after = problem([DraftTree.chain(3), DraftTree.chain(3)], seed=1, dtype=dtype)
        got = conv.verify(after[0], weight, bias, window, slots, after[5], backend=backend)
        for seq, path in enumerate(paths):
            taken = torch.cat([x[[tree.starts[seq] + row for row in path]], after[0][4 * seq : 4 * seq + 4]])
            want = plain(*(operand.double() for operand in (taken, weight, bias, before[seq])), "silu")[-4:]
            tolerance = {torch.float64: EXACT, torch.float32: SHORT_SUM_FLOAT32}.get(dtype, SHORT_SUM_BFLOAT16)
            close(got[4 * seq : 4 * seq + 4], want, tolerance)

    @both_backends
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_empty_paths_and_inert_slots_keep_every_bit(self, dtype, backend):
        shapes = [SHAPES["chain 3"]] * 3
        x, _, _, window, slots, tree = problem(shapes, slots=[1, -1, 0], num_slots=3, dtype=dtype)
        window[1, 0, 0] = torch.nan
        old = window.clone()
        conv.commit(window, slots, x, pack_paths(tree, [[], [0, 1], [0]]), backend=backend)
        assert torch.equal(window[1:].view(torch.uint8), old[1:].view(torch.uint8))
        assert torch.equal(window[0], torch.cat([old[0, 1:], x[8:9]]))

    @both_backends
    def test_a_wider_window_keeps_its_old_inputs_exact(self, backend):
        """A float32 window under bfloat16 inputs: what stays in it is not rounded."""
        x, _, _, window, slots, tree = problem([SHAPES["chain 3"]], dtype=torch.float32)
        old = window.clone()
        conv.commit(window, slots, x.bfloat16(), pack_paths(tree, [[0]]), backend=backend)
        assert torch.equal(window[0], torch.cat([old[0, 1:], x[:1].bfloat16().float()]))

    @both_backends
    @pytest.mark.parametrize("slots", [[0, 3], [-2, 0], [1, 1]])
    def test_bad_slots_are_refused(self, slots, backend):
        x, weight, bias, window, _, tree = problem([SHAPES["chain 3"]] * 2, num_slots=3)
        bad = torch.tensor(slots)
        with pytest.raises(CapacityError, match="slot"):
            conv.verify(x, weight, bias, window, bad, tree, backend=backend)
        with pytest.raises(CapacityError, match="slot"):
            conv.commit(window, bad, x, pack_paths(tree, [[0], [0]]), backend=backend)


def test_refusals():
    x, weight, bias, window, slots, tree = problem([SHAPES["chain 3"], SHAPES["root"]])
    path = pack_paths(tree, [[0], [0]])
    with pytest.raises(UnsupportedError, match="gelu"):
        conv.verify(x, weight, bias, window, slots, tree, activation="gelu")
    for operands in (
        (x[:-1], weight, bias, window, slots, tree),
        (x, weight, bias, window[:, 1:], slots, tree),
        (x, weight, bias, window, slots[:1], tree),
    ):
        with pytest.raises(ShapeError, match="got"):
            conv.verify(*operands)
    for operands in ((window, slots, x[:-1], path), (window, slots[:1], x, path)):
        with pytest.raises(ShapeError, match="got"):
            conv.commit(*operands)


@both_backends
def test_an_empty_batch(backend):
    x, weight, bias, window, slots, tree = problem([], num_slots=2, num_rows=3)
    assert np.array_equal(conv.verify(x, weight, bias, window, slots, tree, backend=backend), np.zeros((3, 6)))
