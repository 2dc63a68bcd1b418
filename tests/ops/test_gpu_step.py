"""Whole steps on a GPU: one captured graph for every tree, bit for bit the uncaptured step."""

import pytest
import torch

from ops.whole_step import Sizes, WholeStep
from treewy.tree import DraftTree

pytestmark = pytest.mark.gpu

STEPS = [
    [DraftTree.chain(3), DraftTree.from_widths([2, 2, 2]), DraftTree([-1]), DraftTree([-1, 0, 0, 1, 1, 2])],
    [DraftTree([-1])] * 4,
    [DraftTree.from_widths([2, 2, 2])] * 4,
    [DraftTree.chain(15), DraftTree.chain(3), DraftTree.from_widths([4, 2]), DraftTree.chain(7)],
    [DraftTree.chain(3)] * 4,
    [DraftTree.from_widths([3, 3]), DraftTree.chain(1), DraftTree.chain(2), DraftTree.from_widths([15])],
    [DraftTree.chain(3)] * 4,
    [DraftTree.chain(5)] * 4,
]


@pytest.mark.parametrize("delta", ["cuda", "triton"])
@pytest.mark.parametrize("state", [torch.bfloat16, torch.float32])
def test_one_graph_of_a_whole_model_serves_every_tree(delta, state):
    """30 + 10 layers: every replay leaves what the same kernels leave uncaptured; nothing is captured anew."""
    sizes = Sizes(state_dtype=state)
    if delta == "triton":
        sizes = sizes._replace(num_linear=3, num_softmax=1)
    plain, captured = (WholeStep(sizes, "triton", delta, "cuda") for _ in range(2))
    captured.load([DraftTree([-1])] * sizes.num_seqs, seed=0)
    blank = [x.clone() for x in captured.memory()]
    captured.run()  # compiles
    torch.cuda.synchronize()
    for x, kept in zip(captured.memory(), blank, strict=True):
        x.copy_(kept)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured.run()
    moved = 0
    for number, drafts in enumerate(STEPS):
        for step in (plain, captured):
            step.load(drafts, seed=number)
        plain.run()
        graph.replay()
        torch.cuda.synchronize()
        moved += int(plain.pending.lengths.sum())
        for index, (ours, theirs) in enumerate(zip(captured.memory(), plain.memory(), strict=True)):
            assert ours.isfinite().all()
            assert torch.equal(ours, theirs), f"step {number}, part {index}"
    assert moved >= len(STEPS) * sizes.num_seqs
