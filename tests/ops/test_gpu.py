"""The eager ops on a CUDA device: the same checks as on the CPU, the hardest of each rung."""

import numpy as np
import pytest
import torch

from ops.checks import KINDS, arithmetic, assert_close, committed_pool, geometric_mean, relative, walked
from ops.problems import SHAPES, make
from ops.rings import empty_history
from tolerances import DRAWS, EXACT, FLOAT32_FLOOR, SUBSTITUTION_FACTOR
from treewy.ops import attention, conv, gdn
from treewy.packed import pack, pack_paths
from treewy.tree import DraftTree

pytestmark = pytest.mark.gpu


def on_gpu(problem):
    tree = pack(list(map(DraftTree, problem.tree.shapes)), num_rows=problem.tree.num_rows, device="cuda")
    return type(problem)(*(x.cuda() for x in problem[:-1]), tree)


@pytest.mark.parametrize("kind", KINDS)
def test_algebra(kind):
    names = ["scattered", "chain 31", "root", "widths 3 3 3"]
    problem = make([SHAPES[name] for name in names], slots=[5, 0, -1, 2], num_slots=7, num_rows=84, strong_gate=-200.0)
    paths = [DraftTree(shape).path(len(shape) - 1) for shape in problem.tree.shapes]
    device = on_gpu(problem)
    verified, want = KINDS[kind].verify(*device), walked(problem)
    assert_close(verified.o.cpu(), want.o, EXACT)
    KINDS[kind].commit(device.state, device.slots, verified.record, pack_paths(device.tree, paths))
    assert_close(device.state.cpu(), committed_pool(problem, pack_paths(problem.tree, paths), want), EXACT)


def test_a_history():
    """Verify beside a history, append to it and fold it: what the reference does on the host."""
    names = ["scattered", "chain 31", "root"]
    problem = make([SHAPES[name] for name in names], slots=[5, -1, 2], num_slots=7, num_rows=44, strong_gate=-200.0)
    results = []
    for operands, backend in ((problem, "reference"), (on_gpu(problem), "eager")):
        state = operands.state.clone()
        history = empty_history(state.cpu(), 2, 8)
        history = gdn.History(*(part.to(state.device) for part in history))
        outputs = []
        for paths in ([[0, 3, 4], [0], []], [[0], [0], [0]], [[0, 3], [], [0]]):
            verified = gdn.verify(*operands[:5], state, *operands[6:], history=history, backend=backend)
            gdn.append(history, operands.slots, verified.record, pack_paths(operands.tree, paths), backend=backend)
            outputs.append(verified.o.cpu())
        assert history.lengths.tolist() == [0, 0, 2, 0, 0, 6, 0]
        gdn.fold(state, operands.slots, history, backend=backend)
        results.append([*outputs, state.cpu()])
    for host, device in zip(*results, strict=True):
        assert_close(device, host.numpy(), EXACT)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("depth", [4, 64])
def test_hard_keys(kind, depth):
    hard = {"correlation": 0.98, "beta": (2.0, 2.0), "gate_one": True}
    problem = make([DraftTree.chain(depth)], heads=DRAWS, group=1, key_dim=128, value_dim=16, **hard)
    problem = problem.to(torch.bfloat16, gates=torch.float32, state=torch.float32)
    got = KINDS[kind].verify(*on_gpu(problem), out_dtype=torch.float32).o.cpu().double().numpy()
    op = geometric_mean(relative(got, walked(problem).o, 1))
    bound = geometric_mean(arithmetic(problem).substitution.o)
    assert op <= SUBSTITUTION_FACTOR * bound + FLOAT32_FLOOR, f"error {op:.2e}, bound {bound:.2e}"


def test_convolution_and_attention():
    shapes, rng = [SHAPES["scattered"], SHAPES["chain 11"]], np.random.default_rng(0)

    def both(*shape):
        x = torch.from_numpy(rng.normal(size=shape))
        return x, x.cuda()

    trees = pack(shapes), pack(shapes, device="cuda")
    paths = [pack_paths(tree, [[0, 3, 4], [0, 1]]) for tree in trees]
    slots = torch.tensor([1, 0]), torch.tensor([1, 0], device="cuda")
    x, weight, window = both(17, 6), both(6, 4), both(2, 3, 6)
    q, k, v, keys, values = both(17, 4, 8), both(17, 2, 8), both(17, 2, 8), both(2, 16, 2, 8), both(2, 16, 2, 8)
    results = []
    for i in (0, 1):
        y = conv.verify(x[i], weight[i], None, window[i], slots[i], trees[i])
        conv.commit(window[i], slots[i], x[i], paths[i])
        o = attention.verify(q[i], k[i], v[i], keys[i], values[i], slots[i], [3, 0], trees[i], scale=1.0)
        attention.commit(keys[i], values[i], slots[i], [3, 0], k[i], v[i], paths[i])
        results.append([part.cpu() for part in (y, window[i], o, keys[i], values[i])])
    for host, device in zip(*results, strict=True):
        assert_close(device, host.numpy(), EXACT)
