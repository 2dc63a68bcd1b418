"""Appending for all layers at once on a GPU: real shapes and dtypes, graphs, and rows that are stretches of bytes."""

import pytest
import torch

from ops.serving import paths_of
from tolerances import TWO_FLOAT32
from treewy.ops import gdn
from treewy.packed import PathTables

pytestmark = pytest.mark.gpu

LAYERS, HEADS, VALUE_HEADS, DIM, CAPACITY = 30, 16, 32, 128, 16
BF16, F32 = torch.bfloat16, torch.float32
INTS = {"dtype": torch.int32, "device": "cuda"}


def rows(*leading, u, seed):
    """Return random rows of every layer; decays fall along the last leading axis."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def draw(*shape, of):
        return torch.randn(*leading, *shape, device="cuda", generator=generator).to(of)

    falls = draw(VALUE_HEADS, of=F32).abs().cumsum(-2)
    return [draw(VALUE_HEADS, DIM, of=u), draw(HEADS, DIM, of=BF16), -falls, 1e-8 * draw(VALUE_HEADS, of=F32)]


def stretches(parts):
    """Return rows as views of bytes: u, k and decays of a row in one stretch, 64 bytes apart from the next."""
    sizes = [part[0, 0].nbytes for part in parts]
    memory = torch.zeros(*parts[0].shape[:2], sum(sizes) + 64, dtype=torch.uint8, device="cuda")
    pieces = memory[..., : sum(sizes)].split(sizes, dim=2)
    views = [piece.view(part.dtype).unflatten(2, part.shape[2:]) for piece, part in zip(pieces, parts, strict=True)]
    for view, part in zip(views, parts, strict=True):
        view.copy_(part)
    return views


class Appending:
    """Buffers of one bucket, as a graph has them; what nobody owns is NaN."""

    def __init__(self, num_seqs, width, *, u, in_bytes=False, num_places=None):
        self.num_places = num_places or num_seqs + 3
        parts = [torch.full_like(part, torch.nan) for part in rows(LAYERS, self.num_places, CAPACITY, u=u, seed=0)]
        self.history = gdn.StackedHistory(*parts, torch.zeros(self.num_places, **INTS))
        taken = rows(LAYERS, num_seqs * width, u=u, seed=1)
        self.record = gdn.StackedRecord(*(stretches(taken) if in_bytes else taken))
        self.places = torch.full((num_seqs,), -1, **INTS)
        self.path = PathTables(torch.zeros(num_seqs, width, **INTS), torch.zeros(num_seqs, **INTS))
        self.width = width

    def load(self, seed):
        """Bring paths and places of one step; every fifth sequence is inert, every seventh has no path."""
        count, draw = len(self.places), torch.Generator().manual_seed(seed)
        lengths = torch.randint(0, min(self.width, CAPACITY) + 1, (count,), generator=draw).tolist()
        paths = [list(range(0 if seq % 7 == 0 else length)) for seq, length in enumerate(lengths)]
        places = torch.randperm(self.num_places, generator=draw)[:count]
        places[::5] = -1
        packed = paths_of([seq * self.width for seq in range(count)], paths, self.width)
        self.places.copy_(places)
        self.path.rows.copy_(packed.rows)
        self.path.lengths.copy_(packed.lengths)
        fold = gdn.choose_folds(self.history.lengths, self.places, self.path.lengths, CAPACITY)
        gdn.settle(self.history.lengths, self.places, torch.zeros_like(fold), fold)

    def run(self, backend):
        gdn.append_layers(self.history, self.places, self.record, self.path, backend=backend)

    def settle(self):
        gdn.settle(self.history.lengths, self.places, self.path.lengths, torch.zeros_like(self.path.lengths))


def check(ours, theirs):
    """Rows bit for bit, NaN where nobody is, sums of decays in two floats."""
    assert torch.equal(ours.lengths, theirs.lengths)
    for mine, other in zip(ours[:4], theirs[:4], strict=True):
        assert torch.equal(mine.isnan(), other.isnan())
    for mine, other in zip(ours[:2], theirs[:2], strict=True):
        assert torch.equal(mine.nan_to_num(), other.nan_to_num())
    sums = (part.decay_high.double() + part.decay_low.double() for part in (ours, theirs))
    torch.testing.assert_close(*sums, rtol=CAPACITY * TWO_FLOAT32, atol=0, equal_nan=True)


@pytest.mark.parametrize(("num_seqs", "width"), [(1, 4), (1, 1), (8, 17), (64, 4)])
@pytest.mark.parametrize("u", [BF16, F32])
@pytest.mark.parametrize("in_bytes", [False, True])
def test_one_graph_serves_every_step(num_seqs, width, u, in_bytes):
    """Paths, places and lengths change at every replay; against eager, step by step."""
    plain = Appending(num_seqs, width, u=u)
    captured = Appending(num_seqs, width, u=u, in_bytes=in_bytes)
    captured.run("triton")  # compiles; no sequence is live
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured.run("triton")
    for seed in range(6):
        for step in (plain, captured):
            step.load(seed)
        plain.run("eager")
        graph.replay()
        torch.cuda.synchronize()
        for step in (plain, captured):
            step.settle()
        check(captured.history, plain.history)
    assert num_seqs == 1 or captured.history.lengths.any()


def test_a_batch_of_256():
    """More programs than fit at once: every row arrives, and nothing else is written."""
    step = Appending(256, 4, u=BF16)
    step.load(3)
    step.run("triton")
    for seq, (place, length) in enumerate(zip(step.places.tolist(), step.path.lengths.tolist(), strict=True)):
        if place >= 0:
            for kept, taken in zip(step.history[:2], step.record[:2], strict=True):
                assert torch.equal(kept[:, place, :length], taken[:, 4 * seq : 4 * seq + length])
                assert kept[:, place, length:].isnan().all()
