"""The convolution's kernels and the ledger's on a GPU: real shapes and dtypes, captured graphs, and no late compiling."""

import pytest
import torch

from ops.buckets import Bucket
from ops.test_conv import close
from tolerances import SHORT_SUM_BFLOAT16, SHORT_SUM_FLOAT32
from treewy.ops import Facts, conv, warmup
from treewy.ops.gdn import ledger
from treewy.packed import pack, pack_paths
from treewy.tree import DraftTree

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
# Heads of the 35B-A3B model: 16 and 32 of 128.
FACTS = Facts(device=DEVICE, num_heads=16, num_value_heads=32, key_dim=128, value_dim=128)
CHANNELS, SIZES = 8192, (2048, 2048, 4096)
TREES = {
    "root": DraftTree([-1]),
    "chain 4": DraftTree.chain(3),
    "15 rows": DraftTree.from_widths([2, 2, 2]),
    "40 rows": DraftTree.from_widths([3, 3, 3]),
    "two arms": DraftTree([-1, 0, 0, *range(1, 24)]),
}
CAPACITY, LAYERS, SLOTS = 8, 3, 70


def normal(*shape, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(*shape, generator=generator, device=DEVICE).to(dtype)


def operands(num_rows, dtype=torch.bfloat16, channels=CHANNELS, width=4):
    """Return x as a view of a fused projection, weight with its taps apart, and a pool of windows."""
    x = normal(num_rows, channels + 4096, dtype=dtype)[:, :channels]
    return x, normal(width, channels, dtype=dtype, seed=1).T, normal(SLOTS, width - 1, channels, dtype=dtype, seed=2)


def deepest(tree):
    return tree.path(tree.num_rows - 1)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.bfloat16, SHORT_SUM_BFLOAT16), (torch.float32, SHORT_SUM_FLOAT32)]
)
@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("num_seqs", [1, 8, 64])
def test_real_shapes(num_seqs, name, dtype, tolerance):
    shapes = [TREES[name]] * num_seqs
    tree = pack(shapes, num_rows=num_seqs * TREES[name].num_rows + 3, device=DEVICE)
    x, weight, window = operands(tree.num_rows, dtype)
    slots = torch.randperm(SLOTS, device=DEVICE)[:num_seqs]
    if num_seqs > 1:
        slots[num_seqs // 2 :: 7] = -1
    got = conv.verify_split(x, weight, None, window, slots, tree.tables, SIZES, backend="triton")
    want = conv.verify(x.double(), weight.double(), None, window.double(), slots, tree)
    for part, right in zip(got, want.split(SIZES, dim=1), strict=True):
        close(part, right, tolerance)
    path = pack_paths(tree, [deepest(one) if seq % 3 else [] for seq, one in enumerate(shapes)])
    pools = window.clone(), window.clone()
    conv.commit(pools[0], slots, x, path)
    conv.commit(pools[1], slots, x, path.tables, backend="triton")
    assert torch.equal(*(pool.view(torch.uint8) for pool in pools))


@pytest.mark.parametrize("width", range(2, 9))
@pytest.mark.parametrize("channels", [8192, 1000])
def test_every_width_and_odd_channels(width, channels):
    tree = pack([TREES["15 rows"], TREES["two arms"]], device=DEVICE)
    x, weight, window = operands(tree.num_rows, torch.float16, channels, width)
    bias, slots = normal(channels, dtype=torch.float16, seed=3), torch.tensor([3, 0], device=DEVICE)
    out = torch.empty(tree.num_rows, channels, device=DEVICE)
    # A copy in any case: with one place per window, the turned pool counts as contiguous already.
    across = window.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2)
    wide = [one.double() for one in (x, weight, bias, window)]
    want = conv.verify(*wide, slots, tree)
    for pool, taps in ((window, weight), (across, weight.contiguous())):
        got = conv.verify(x, taps, bias, pool, slots, tree.tables, out=out, backend="triton")
        close(got, want, SHORT_SUM_FLOAT32)
        conv.commit(pool, slots, x, pack_paths(tree, [[0, 1, 3], [0]]).tables, backend="triton")
    assert torch.equal(window, across)


def test_bits_depend_on_nothing_but_the_row():
    one = TREES["15 rows"]
    x, weight, window = operands(15)
    slots = torch.tensor([5], device=DEVICE)
    want = conv.verify(x, weight, None, window, slots, pack([one], device=DEVICE), backend="triton")
    for count in (3, 20, 60):
        tree = pack([TREES["chain 4"], *[one] * count], num_rows=15 * count + 19, device=DEVICE)
        many = torch.cat([normal(4, CHANNELS, seed=4), *[x] * count, torch.full_like(x, torch.nan)])[: tree.num_rows]
        pool = torch.cat([window, *[window[5:6]] * count])
        slots = torch.tensor([0, *range(SLOTS, SLOTS + count)], device=DEVICE)
        got = conv.verify(many, weight, None, pool, slots, tree.tables, backend="triton")
        for seq in range(count):
            start = 4 + 15 * seq
            assert torch.equal(got[start : start + 15].view(torch.uint8), want.view(torch.uint8))
        assert not got[tree.starts[-1] :].any()


class Step:
    """What the convolution and the ledger do in one step, over buffers that stay."""

    def __init__(self, num_seqs, num_rows):
        self.bucket = Bucket(num_seqs, num_rows, max_rows=64, device=DEVICE)
        self.x = normal(LAYERS, num_rows, CHANNELS)
        self.out = torch.full_like(self.x, torch.nan)
        self.weight = normal(4, CHANNELS, seed=1).T
        self.window = normal(LAYERS, SLOTS, 3, CHANNELS, seed=2)
        self.lengths = torch.zeros(SLOTS, dtype=torch.int64, device=DEVICE)
        self.fold = torch.zeros(num_seqs, dtype=torch.int32, device=DEVICE)

    def run(self):
        slots, paths = self.bucket.slots, self.bucket.paths
        ledger.choose_folds(self.lengths, slots, paths.lengths, CAPACITY, out=self.fold, backend="triton")
        for layer in range(LAYERS):
            pool, out = self.window[layer], self.out[layer]
            conv.verify(self.x[layer], self.weight, None, pool, slots, self.bucket.tables, out=out, backend="triton")
        conv.commit(self.window, slots, self.x, paths, backend="triton")
        ledger.settle(self.lengths, slots, paths.lengths, self.fold, backend="triton")

    def fill(self, seed):
        """Bring in a batch of another make-up."""
        generator = torch.Generator().manual_seed(seed)
        count = [4, 2, 4, 1, 0, 3][seed % 6]
        names = [list(TREES)[int(i)] for i in torch.randint(len(TREES), (count,), generator=generator)]
        shapes = [TREES[name] for name in names]
        paths = [deepest(tree) if int(torch.randint(4, (1,), generator=generator)) else [] for tree in shapes]
        self.bucket.fill(shapes, torch.randperm(6, generator=generator)[:count].tolist(), paths)
        self.x.copy_(normal(*self.x.shape, seed=seed))

    def results(self):
        return [part.clone() for part in (self.out, self.window, self.lengths, self.fold)]


def test_one_graph_serves_every_tree():
    """Captured once, replayed over batches of other trees, paths and slots: the bits of the same kernels uncaptured."""
    captured, plain = Step(4, 160), Step(4, 160)
    warmup(FACTS)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured.run()
    for seed in range(12):
        for step in (captured, plain):
            step.fill(seed)
        graph.replay()
        plain.run()
        for got, want in zip(captured.results(), plain.results(), strict=True):
            assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))
    assert plain.lengths.any()


def test_nothing_compiles_after_warmup(monkeypatch):
    import triton

    late = []
    warmup(FACTS)
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda **facts: late.append(facts["repr"]))
    for num_seqs, num_rows in ((1, 1), (1, 40), (4, 160), (64, 4096)):
        step = Step(num_seqs, num_rows)
        step.run()
        conv.commit(step.window[0], step.bucket.slots, step.x[0], step.bucket.paths, backend="triton")
    assert not late
    contrary = normal(2, 3, CHANNELS, dtype=torch.float16)
    conv.commit(contrary, step.bucket.slots, step.x[0], step.bucket.paths, backend="triton")
    assert late  # the hook does hear of a kernel that is compiled
