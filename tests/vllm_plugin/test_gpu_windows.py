"""Rolling windows on a GPU: real sizes and dtypes, and one captured graph for every tree."""

import pytest
import torch

from ops.buckets import Bucket
from ops.checks import assert_close
from tolerances import SHORT_SUM_BFLOAT16
from treewy.tree import DraftTree
from treewy.vllm_plugin.conv import tree_conv
from treewy.vllm_plugin.windows import WindowTable, compact_windows
from vllm_plugin.window_steps import LAYOUTS, Requests, paths_of, tables_of, windows_of

pytestmark = pytest.mark.gpu

DEVICE, CHANNELS, WIDTH, SLOTS, LAYERS, ROWS = "cuda", 8192, 4, 40, 3, 64
TREES = [DraftTree.from_widths([3, 3, 3]), DraftTree([-1]), DraftTree([-1, 0, 0, *range(1, 24)]), DraftTree.chain(3)]


def normal(*shape, seed=0):
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(*shape, generator=generator, device=DEVICE).to(torch.bfloat16)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("channels", [1000, 8192])
def test_steps_against_float64(layout, channels):
    kind = {"channels": channels, "max_rows": ROWS, "layout": layout, "dtype": torch.bfloat16, "device": DEVICE}
    requests = Requests("triton", [[7, 0, 2], [1, 5, 3]], **kind)
    for step in range(3):
        trees = [TREES[(step + seq) % 4] for seq in range(3)]
        paths = [tree.path((tree.num_rows - 1) // (1 + step)) for tree in trees]
        for y, want in requests.step([2, 0, 1], trees, paths, padding=step):
            assert_close(y.cpu(), want, SHORT_SUM_BFLOAT16)


@pytest.mark.parametrize("num_seqs", [1, 4, 33])
def test_kernels_are_as_pytorch(num_seqs):
    """The same windows bit for bit, inert slots among them."""
    trees = [TREES[seq % 4] for seq in range(num_seqs)]
    tree = tables_of(trees, padding=5, max_rows=ROWS, device=DEVICE)
    slots = torch.randperm(SLOTS, device=DEVICE)[:num_seqs].int()
    slots[2::5] = -1
    x, weight = normal(tree.num_rows, CHANNELS), normal(CHANNELS, WIDTH, seed=1)
    pools = [windows_of("columns apart", SLOTS, CHANNELS, WIDTH - 2 + ROWS, torch.bfloat16, DEVICE) for _ in range(2)]
    pools[0].copy_(normal(*pools[0].shape, seed=2))
    pools[1].copy_(pools[0])
    accepted = torch.arange(num_seqs, device=DEVICE) % 5 + 1
    path = paths_of([one.path(one.num_rows - 1) for one in trees], 30, DEVICE)
    outputs = []
    for backend, pool in zip(("eager", "triton"), pools, strict=True):
        outputs.append(tree_conv(x, pool, weight, None, slots, accepted, tree, backend=backend))
        compact_windows(WindowTable([pool]), slots[None], path, WIDTH, backend=backend)
    assert_close(outputs[1].cpu(), outputs[0].double().cpu().numpy(), SHORT_SUM_BFLOAT16)
    assert torch.equal(*(pool.contiguous().view(torch.uint8) for pool in pools))


class Step:
    """What the layers and the end of a step do, over buffers that stay."""

    def __init__(self):
        self.bucket = Bucket(4, 160, max_rows=ROWS, device=DEVICE)
        self.x, self.weight = normal(LAYERS, 160, CHANNELS), normal(CHANNELS, WIDTH, seed=1)
        shape = (SLOTS, CHANNELS, WIDTH - 2 + ROWS, torch.bfloat16, DEVICE)
        self.windows = [windows_of("columns apart", *shape) for _ in range(LAYERS)]
        for seed, window in enumerate(self.windows):
            window.copy_(normal(*window.shape, seed=seed))
        self.table, self.out = WindowTable(self.windows), torch.zeros_like(self.x)
        self.accepted = torch.ones(6, dtype=torch.int32, device=DEVICE)

    def run(self):
        for layer, window in enumerate(self.windows):
            operands = (self.x[layer], window, self.weight, None, self.bucket.slots, self.accepted, self.bucket.tables)
            self.out[layer].copy_(tree_conv(*operands))
        slots = self.bucket.slots.expand(LAYERS, -1)
        compact_windows(self.table, slots, self.bucket.paths, WIDTH)

    def fill(self, seed):
        """Bring in a batch of another make-up."""
        random = torch.Generator().manual_seed(seed)
        count = [4, 2, 4, 1, 0, 3][seed % 6]
        trees = [TREES[int(one)] for one in torch.randint(4, (count,), generator=random)]
        slots = torch.randperm(SLOTS, generator=random)[:count].tolist()
        self.bucket.fill(trees, slots)  # its paths are of packed rows, those of windows local
        path = paths_of([one.path(one.num_rows - 1) for one in trees], ROWS, DEVICE)
        self.bucket.paths.rows[:count], self.bucket.paths.lengths[:count] = path
        self.accepted[:4] = torch.randint(1, 30, (4,), generator=random)
        self.x.copy_(normal(*self.x.shape, seed=seed))


def test_one_graph_serves_every_tree():
    """Captured once, replayed over other trees, paths, slots and counts: the bits of the same kernels uncaptured."""
    captured, plain = Step(), Step()
    for step in (captured, plain):
        step.run()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured.run()
    for seed in range(12):
        for step in (captured, plain):
            step.fill(seed)
        graph.replay()
        plain.run()
        for got, want in zip((captured.out, *captured.windows), (plain.out, *plain.windows), strict=True):
            assert torch.equal(got.contiguous().view(torch.uint8), want.contiguous().view(torch.uint8))
    assert plain.out.any()
