"""Tree tables and acceptance on a CUDA device, at real shapes: the host's outcome, captured and not."""

import pytest
import torch

from ops import drafted
from treewy.ops import accept, tree
from treewy.ops.launch import LAUNCHES
from treewy.packed import TreeTables, pack
from treewy.sampling import ACCEPT, Stream
from treewy.tree import DraftTree

pytestmark = pytest.mark.gpu

VOCAB = 151_936
SHAPES = [DraftTree.chain(3), DraftTree.from_widths([2, 2, 2]), DraftTree.from_widths([3, 3, 3]), DraftTree.chain(127)]


def assert_same(got: tuple, want: tuple) -> None:
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one.cpu(), other.cpu())


def outcome(accepted: accept.AcceptedTables) -> tuple:
    return (*accepted.path, accepted.tokens, accepted.endings, accepted.num_used)


def refill(buffers: TreeTables, packed) -> None:
    """Write a batch's parents and boundaries into static buffers, as the host does before a replay."""
    buffers.parents.copy_(packed.tables.parents)
    buffers.cu_rows.copy_(packed.tables.cu_rows)


def captured(step) -> torch.cuda.CUDAGraph:
    """Run a step once, so that all is compiled, then capture it."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


@pytest.mark.parametrize("num_seqs", [1, 32, 1024])
def test_tables(num_seqs):
    """Bit for bit, for a thousand sequences as for one; then replayed for batches of other shapes in place."""
    trees = [SHAPES[seq % 4] for seq in range(num_seqs)]
    packed = pack(trees, num_rows=128 * num_seqs, device="cuda")
    buffers = tree.empty(num_seqs, 128 * num_seqs, 128, "cuda")
    faults = torch.ones(num_seqs, dtype=torch.int32, device="cuda")

    def step():
        tree.tables(buffers.parents, buffers.cu_rows, max_rows=128, out=buffers, faults=faults, backend="triton")

    graph = captured(step)
    for order in (trees, trees[::-1], [SHAPES[0]] * num_seqs):
        packed = pack(order, num_rows=128 * num_seqs, device="cuda")
        refill(buffers, packed)
        before = LAUNCHES["tree_tables_kernel"]
        graph.replay()
        assert LAUNCHES["tree_tables_kernel"] == before
        words = packed.tables.ancestors.new_zeros(buffers.ancestors.shape)
        words[:, : packed.tables.ancestors.shape[1]] = packed.tables.ancestors
        assert_same(buffers[:5], packed.tables._replace(ancestors=words)[:5])
        assert not faults.any()


@pytest.mark.parametrize("seed", range(8))
def test_garbage_as_the_reference_has_it(seed):
    """Nothing out of bounds, in place: what is no tree is inert."""
    generator = torch.Generator().manual_seed(seed)
    parents = torch.randint(-2, 40, (600,), generator=generator).int()
    parents[::3] = torch.arange(600)[::3].int() % 7 - 1
    cu_rows = torch.randint(-50, 700, (9,), generator=generator).sort().values.int()
    cu_rows[seed] = 2**31 - 1 if seed % 2 else -(2**31)
    want = tree.tables(parents, cu_rows, max_rows=64, backend="reference")
    buffers = tree.empty(8, 600, 64, "cuda")
    buffers.parents.copy_(parents)
    buffers.cu_rows.copy_(cu_rows)
    got = tree.tables(buffers.parents, buffers.cu_rows, max_rows=64, out=buffers, backend="triton")
    assert_same(got[:5], want[:5])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab", [VOCAB, 248_320, 50_257])
def test_choices(dtype, vocab):
    """Ties everywhere in the short dtypes; a NaN, an infinity; a view into padded logits."""
    generator = torch.Generator("cuda").manual_seed(0)
    wide = torch.randn(256, vocab + 64, generator=generator, device="cuda").to(dtype)
    logits = wide[:, :vocab]
    logits[3, vocab - 1], logits[4, 0], logits[5] = float("nan"), float("inf"), float("-inf")
    assert_same([accept.choices(logits, backend="triton")], [accept.choices(logits, backend="eager")])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy(dtype):
    batch = drafted.make(0, num_seqs=48, vocab=VOCAB, max_rows=40, share_drawn=0.0, num_levels=40, dtype=dtype).on(
        "cuda"
    )
    assert_same(outcome(batch.greedy(backend="triton")), outcome(batch.greedy(backend="eager")))


@pytest.mark.parametrize(("dtype", "drawn"), [(torch.bfloat16, False), (torch.bfloat16, True), (torch.float32, True)])
@pytest.mark.parametrize("seed", range(3))
def test_sampled(dtype, drawn, seed):
    """Every mix of laws, ties in bfloat16, float64 laws of the drafter: with the same numbers, the rule's outcome."""
    batch = drafted.make(seed, num_seqs=16, vocab=VOCAB, max_rows=9, dtype=dtype).on("cuda")
    want = batch.sampled(drawn=drawn, backend="eager")
    assert_same(outcome(batch.sampled(drawn=drawn, backend="triton")), outcome(want))
    light = batch.sampled(drawn=drawn, backend="triton", weights=torch.float32)
    differing = (light.tokens != want.tokens).any(-1).sum()
    assert int(differing) <= 1, "float32 weights may differ where a number lies within 1e-6 of where tokens meet"


@pytest.mark.parametrize("drawn", [False, True])
def test_one_graph_for_every_tree(drawn):
    """Numbers, tables, and a walk in one graph: trees, tokens, logits and laws change, seeds go on; greedy ones mixed in."""
    vocab, num_seqs, num_rows, max_rows = 32_000, 8, 96, 12
    batches = [drafted.make(seed, num_seqs=num_seqs, vocab=vocab, max_rows=max_rows) for seed in range(4)]
    num_laws = max(len(batch.drawn.laws) for batch in batches)
    buffers = tree.empty(num_seqs, num_rows, max_rows, "cuda")
    out = accept.empty(num_seqs, max_rows, max_rows, "cuda")
    tokens = torch.zeros(num_rows, dtype=torch.int32, device="cuda")
    logits = torch.full((num_rows, vocab), float("nan"), device="cuda")
    laws = accept.RequestLaws(*(field.cuda() for field in batches[0].laws))
    drawn_laws = accept.DrawnLaws(
        torch.zeros(num_laws, vocab, dtype=torch.float64, device="cuda"), torch.full_like(tokens, -1)
    )
    slots = torch.zeros(num_seqs, dtype=torch.int64, device="cuda")
    keys = torch.tensor([Stream(seed, ACCEPT).key for seed in range(num_seqs)], device="cuda")
    positions = torch.zeros(num_seqs, dtype=torch.int64, device="cuda")
    numbers = torch.zeros(num_seqs, max_rows, dtype=torch.float64, device="cuda")

    def step():
        tree.tables(buffers.parents, buffers.cu_rows, max_rows=max_rows, out=buffers, backend="triton")
        accept.uniforms(keys, positions, max_rows, out=numbers, backend="triton")
        given = drawn_laws if drawn else None
        accept.sampled(buffers, tokens, logits, laws, numbers, drawn=given, slots=slots, out=out, backend="triton")
        positions.add_(out.num_used)

    graph = captured(step)
    positions.zero_()
    host_positions = torch.zeros(num_seqs, dtype=torch.int64)
    for batch in [*batches, batches[0]]:
        packed = pack(list(map(DraftTree, batch.tree.shapes)), num_rows=num_rows)
        size = batch.tree.num_rows
        refill(buffers, packed)
        tokens[:size].copy_(batch.tokens)
        logits.fill_(float("nan"))
        logits[:size].copy_(batch.logits)
        for static, given in zip(laws, batch.laws, strict=True):
            static.copy_(given)
        drawn_laws.laws[: len(batch.drawn.laws)].copy_(batch.drawn.laws)
        drawn_laws.law_of_row.fill_(-1)
        drawn_laws.law_of_row[:size].copy_(batch.drawn.law_of_row)
        slots.copy_(batch.slots)
        graph.replay()
        uniforms = accept.uniforms(keys.cpu(), host_positions, max_rows, backend="reference")
        want = accept.sampled(
            packed.tables, tokens.cpu(), logits.cpu(), batch.laws, uniforms, slots=batch.slots, max_path=max_rows,
            drawn=accept.DrawnLaws(*(x.cpu() for x in drawn_laws)) if drawn else None, backend="eager",
        )  # fmt: skip
        assert_same(outcome(out), outcome(want))
        host_positions += want.num_used
        assert torch.equal(positions.cpu(), host_positions)


def test_rows_past_the_32nd_bit():
    """Fault K01: a row of logits further than 2^31 elements from the first."""
    num_rows = 2**31 // VOCAB + 3
    logits = torch.zeros(num_rows, VOCAB, dtype=torch.float16, device="cuda")
    logits[-1, 77] = 1
    assert accept.choices(logits, backend="triton").tolist() == [0] * (num_rows - 1) + [77]
    packed = pack([DraftTree([-1])] * num_rows, device="cuda")
    tokens = torch.zeros(num_rows, dtype=torch.int32, device="cuda")
    laws = accept.RequestLaws(*(field.cuda() for field in accept.request_laws([None] * num_rows)))
    numbers = torch.zeros(num_rows, 1, device="cuda")
    got = accept.sampled(packed.tables, tokens, logits, laws, numbers, backend="triton")
    assert got.tokens[-2:, 0].tolist() == [0, 77]


@pytest.mark.parametrize("position", [0, 3, 2**40])
def test_a_stream_is_the_hosts(position):
    """The numbers of a seed from anywhere: the host's generator is told where to start."""
    keys = torch.tensor([Stream(seed, ACCEPT).key for seed in range(64)], device="cuda")
    positions = torch.full((64,), position, device="cuda")
    got = accept.uniforms(keys, positions, 200, backend="triton")
    assert got.shape == (64, 200)
    assert ((got >= 0) & (got < 1)).all()
    if position < 4:
        assert torch.equal(got.cpu(), accept.uniforms(keys.cpu(), positions.cpu(), 200, backend="reference"))
    else:
        later = accept.uniforms(keys, positions + 5, 195, backend="triton")
        assert torch.equal(got[:, 5:], later)
