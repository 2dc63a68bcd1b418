"""Drafting of trees: what each pass runs and sees, and that the drafts are those of an expansion row by row."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from treewy.packed import WORD
from treewy.tree import DraftTree
from treewy.vllm_plugin.tree_attention import LevelRows
from treewy.vllm_plugin.tree_drafter import NOWHERE, Levels, drafter_class, level_graphs
from treewy.vllm_plugin.trees import Accepted, Trees
from vllm_plugin.fakes import compat

WIDTHS = [(2, 2, 2), (3, 3, 3), (1, 1), (4,), (3, 1, 2), (1, 4, 1), (6, 6, 1), (2, 1, 2, 2)]
VOCABULARY, HIDDEN, REQUESTS = 23, 5, 4
FULL, NONE, DECODE_ONLY = 2, 0, 3


@pytest.mark.parametrize("widths", [*WIDTHS, (40, 2)])
def test_levels_are_the_trees(widths: tuple[int, ...]) -> None:
    """Faults G03, G04, G07 and G08: rows of the upper levels without the root, as every request has them, and who sees whom."""
    tree = DraftTree.from_widths(widths)
    levels = Levels(tree, REQUESTS, "cpu")
    assert levels.widths == list(widths)
    counts = np.cumsum([1, *np.cumprod(widths)]).tolist()
    assert levels.ends == counts[1:]
    assert levels.parents.tolist() == list(tree.parents[1:])
    assert levels.depth.tolist() == tree.depth[1:].tolist()
    for level in range(2, len(widths) + 1):
        size = levels.rows_above(level)
        assert size == counts[level - 1] - 1
        for num_seqs in (1, REQUESTS):
            tables = levels.tables(level, num_seqs)
            assert (tables.num_seqs, tables.num_rows, tables.max_rows) == (num_seqs, num_seqs * size, size)
            assert tables.cu_rows.tolist() == [size * seq for seq in range(num_seqs + 1)]
            assert tables.seq_of_row.tolist() == [seq for seq in range(num_seqs) for _ in range(size)]
            assert tables.depth.tolist() == (tree.depth[1 : size + 1] - 1).tolist() * num_seqs
            assert tables.parents.tolist() == [parent - 1 for parent in tree.parents[1 : size + 1]] * num_seqs
            for row in range(num_seqs * size):
                own, seen = tree.path(row % size + 1)[1:], tables.ancestors[row].numpy().view(np.uint32)
                bits = [at for at in range(WORD * len(seen)) if seen[at // WORD] >> (at % WORD) & 1]
                assert bits == [node - 1 for node in own]


class Head:
    """A drafting head that is a known function of token, position, hidden state and the tokens that a row attends to."""

    def __init__(self) -> None:
        random = torch.Generator().manual_seed(4)
        draw = {"generator": random, "dtype": torch.float64}
        self.embedding, self.out = (torch.randn(VOCABULARY, HIDDEN, **draw) for _ in range(2))
        self.mix = torch.randn(HIDDEN, HIDDEN, **draw)
        # Of the keys in each request's pages.
        self.prefix = torch.randn(100, HIDDEN, **draw)

    def run(self, tokens: Any, positions: Any, hidden: Any, seen: list[list[int]], pages: Any) -> torch.Tensor:
        """Return hidden states of rows; `seen` are the tokens that each attends to, its own among them."""
        attended = torch.stack([self.embedding[row].sum(0) for row in seen]) + self.prefix[pages]
        angles = positions[:, None] * torch.arange(1, HIDDEN + 1) / 7
        return torch.tanh(hidden @ self.mix + self.embedding[tokens] + 0.3 * attended + torch.sin(angles))

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        return hidden @ self.out.T


def expanded(head: Head, widths: tuple[int, ...], position: int, hidden: torch.Tensor, page: int) -> list[int]:
    """Return the drafts below a root, breadth first, each grown from its parent alone; `hidden` is the root's."""
    drafts, level = [], [([], hidden)]
    for depth, width in enumerate(widths, start=1):
        below = []
        for path, state in level:
            for token in head.compute_logits(state).topk(width).indices.tolist():
                own = [*path, token]
                drafts.append(token)
                if depth < len(widths):
                    place = torch.tensor([position + depth])
                    out = head.run(torch.tensor([token]), place, state[None], [own], torch.tensor([page]))
                    below.append((own, out[0]))
        level = below
    return drafts


class Speculator:
    """vLLM's drafter of chains, as far as ours builds on it: its first pass over a batch is given."""

    def __init__(self, tree: DraftTree | None, head: Head, *, max_model_len: int = 10**6) -> None:
        drafts, rows = 3 if tree is None else tree.num_drafts, 64 * REQUESTS
        trees = None if tree is None else Trees(tree, REQUESTS, "cpu")
        self.shared = SimpleNamespace(trees=trees, memory=SimpleNamespace(sizes=SimpleNamespace(step_rows=drafts + 1)))
        lasting: dict[str, Any] = {}
        self.lasting = lasting
        attention = {
            name: SimpleNamespace(impl=SimpleNamespace(treewy_drafts=False)) for name in ("model.3", "mtp.1", "mtp.0")
        }
        gdn = SimpleNamespace(treewy=self.shared, treewy_lasting=SimpleNamespace(add=lasting.update))
        self.vllm_config = SimpleNamespace(
            compilation_config=SimpleNamespace(static_forward_context={"model.0": gdn, **attention})
        )
        self.layers, self.model = attention, head
        self.draft_attn_layer_names = {"mtp.1", "mtp.0"}
        self.max_num_reqs, self.device, self.dtype = REQUESTS, torch.device("cpu"), torch.float64
        self.hidden_size, self.num_speculative_steps, self.max_model_len = HIDDEN, drafts, max_model_len
        self.input_buffers = SimpleNamespace(
            input_ids=torch.zeros(rows, dtype=torch.int32), positions=torch.zeros(rows, dtype=torch.int64)
        )
        self.hidden_states = torch.full((rows, HIDDEN), torch.nan, dtype=torch.float64)
        self.draft_tokens = torch.full((REQUESTS, drafts), -9, dtype=torch.int64)
        groups = [SimpleNamespace(layer_names=names) for names in (["model.0"], ["mtp.0", "mtp.1", "model.3"])]
        self.kv_cache_config = SimpleNamespace(kv_cache_groups=groups)
        self.block_tables = SimpleNamespace(
            input_block_tables=[torch.zeros(REQUESTS, 9), torch.zeros(REQUESTS, 3, dtype=torch.int32)]
        )
        self.roots: list[tuple[int, torch.Tensor]] = []
        self.seen: list[Any] = []

    def load_model(self, target_model: Any) -> None:
        """Have a model."""
        self.seen.append(target_model)

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """Have graphs of chains."""
        self.seen.append(cudagraph_mode)

    def capture(self) -> None:
        """Capture chains."""
        self.seen.append(("capture", self.num_speculative_steps))

    def sample_draft(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Take the most likely token."""
        return self.model.compute_logits(hidden_states).argmax(-1)

    def propose(
        self,
        input_batch: Any,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: Any,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Run the first pass: `roots` are where it ends."""
        self.seen.append(("propose", self.num_speculative_steps, args, kwargs))
        for request, (position, hidden) in enumerate(self.roots):
            self.input_buffers.positions[request], self.hidden_states[request] = position, hidden
        count = len(self.roots)
        self.draft_tokens[:count, 0] = self.sample_draft(self.hidden_states[:count], "positions", "and more")
        return self.draft_tokens[:count]

    def _prepare_eplb_forward(self, num_tokens: int) -> None:
        self.seen.append(("eplb", num_tokens))

    def _run_model(self, num_tokens: int, metadata: Any, slots: Any, across: Any) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = self.input_buffers.input_ids[:num_tokens].long()
        positions, hidden = self.input_buffers.positions[:num_tokens], self.hidden_states[:num_tokens]
        if metadata is None:
            assert slots is None
            return hidden, hidden
        assert metadata.keys() == slots.keys() == self.draft_attn_layer_names
        assert all((own == NOWHERE).all() and len(own) == num_tokens for own in slots.values())
        level = metadata["mtp.0"]
        assert isinstance(level, LevelRows)
        tree, lengths, table, rows = level.attended
        assert rows is None
        assert tree.num_rows == num_tokens
        bounds, owner = tree.cu_rows.tolist(), tree.seq_of_row.long()
        words = tree.ancestors.numpy().view(np.uint32)
        seen = []
        for row, own in enumerate(owner.tolist()):
            bits = [at for at in range(tree.max_rows) if words[row, at // WORD] >> (at % WORD) & 1]
            seen.append(tokens[[bounds[own] + bit for bit in bits]].tolist())
        self.seen.append(("pass", num_tokens, lengths.tolist()))
        # What lies in the pages decides, and it lies there up to the root.
        out = self.model.run(tokens, positions, hidden, seen, table[owner, 1].long())
        return out, out


class Graphs:
    """vLLM's captured graphs: of whole passes, by requests."""

    def __init__(self, vllm_config: Any, device: Any, mode: Any, rows: int) -> None:
        self.mode, self.rows, self.made, self.replayed = mode, rows, {}, []
        self.compilation_config = vllm_config.compilation_config
        self._init_candidates()

    def _init_candidates(self) -> None:
        self.counts = self.compilation_config.cudagraph_capture_sizes

    def capture(self, create_forward_fn: Any, progress_bar_desc: str = "") -> None:
        """Capture each."""
        for count in self.counts:
            desc = SimpleNamespace(num_reqs=count, cg_mode=FULL)
            run = create_forward_fn(desc, True)
            run(NONE)
            self.made[count] = (desc, run)

    def dispatch(self, num_reqs: int, num_tokens: int, uniform: int, loras: int) -> Any:
        """Return the smallest that fits."""
        fitting = [count for count in self.made if count >= num_reqs]
        return self.made[min(fitting)][0] if fitting else SimpleNamespace(num_reqs=num_reqs, cg_mode=NONE)

    def run_fullgraph(self, desc: Any) -> None:
        """Replay it."""
        self.replayed.append(desc.num_reqs)
        self.made[desc.num_reqs][1](FULL)


def names() -> Any:
    """Return a compat module over these."""
    made = compat(MTPSpeculator=Speculator, CudaGraphManager=Graphs)
    vars(made)["CUDAGraphMode"] = SimpleNamespace(NONE=NONE, FULL=FULL, FULL_DECODE_ONLY=DECODE_ONLY)
    return made


class Scene:
    """A drafter with its model, and requests at positions of their own."""

    def __init__(self, widths: tuple[int, ...], *, roots: tuple[int, ...] = (9, 30, 4), **options: Any) -> None:
        self.widths, self.head = widths, Head()
        self.drafter = drafter_class(names())(DraftTree.from_widths(widths), self.head, **options)
        self.drafter.load_model("target")
        random = torch.Generator().manual_seed(8)
        hidden = torch.randn(len(roots), HIDDEN, generator=random, dtype=torch.float64)
        self.drafter.roots = list(zip(roots, hidden, strict=True))
        self.pages = [11 + 5 * request for request in range(len(roots))]
        table = torch.tensor([[0, page, 0] for page in self.pages], dtype=torch.int32)
        self.metadata = {name: SimpleNamespace(block_table=table) for name in ("mtp.0", "mtp.1", "model.3")}
        count = len(roots)
        self.batch = SimpleNamespace(
            num_reqs=count, positions=torch.arange(count), input_ids=torch.arange(count, dtype=torch.int32)
        )

    def run(self, metadata: Any = "own", **kwargs: Any) -> torch.Tensor:
        """Draft."""
        metadata = self.metadata if metadata == "own" else metadata
        return self.drafter.propose(self.batch, metadata, {}, torch.zeros(len(self.pages), HIDDEN), None, **kwargs)

    def expected(self) -> list[list[int]]:
        """Return what each request drafts."""
        roots = zip(self.drafter.roots, self.pages, strict=True)
        return [expanded(self.head, self.widths, at, hidden, page) for (at, hidden), page in roots]


@pytest.mark.parametrize("widths", WIDTHS)
def test_drafts_are_those_of_an_expansion_row_by_row(widths: tuple[int, ...]) -> None:
    """Faults G03 and G07: parents, positions, hidden states and what is attended to are each row's own."""
    scene = Scene(widths)
    assert scene.run().tolist() == scene.expected()
    assert len({tuple(row) for row in scene.expected()}) == 3
    passes = [what for what in scene.drafter.seen if what[0] == "pass"]
    assert [rows for _, rows, _ in passes] == [
        3 * int(np.cumprod(widths)[:level].sum()) for level in range(1, len(widths))
    ]
    assert all(lengths == [10, 31, 5] for _, _, lengths in passes)
    assert scene.drafter.num_speculative_steps == len(scene.expected()[0])
    assert scene.drafter.layers["mtp.0"].impl.treewy_drafts
    assert scene.drafter.layers["mtp.1"].impl.treewy_drafts
    assert not scene.drafter.layers["model.3"].impl.treewy_drafts


def test_a_second_step_knows_nothing_of_the_first() -> None:
    scene = Scene((3, 1, 2))
    scene.run()
    scene.drafter.roots = [(position + 7, -hidden) for position, hidden in scene.drafter.roots]
    assert scene.run().tolist() == scene.expected()


def test_the_first_pass_ends_where_trees_begin() -> None:
    """vLLM's later passes do not run, and what it is told of their number is one."""
    scene = Scene((2, 2))
    scene.run(num_speculative_tokens=6)
    assert scene.drafter.seen[1] == ("propose", 1, (None,), {"num_speculative_tokens": 1})
    scene.run()
    assert ("propose", 1, (None,), {}) in scene.drafter.seen


def test_a_step_that_fails_leaves_the_number_of_drafts() -> None:
    scene = Scene((2, 2))
    scene.drafter.roots = [(1, torch.zeros(HIDDEN + 1))]
    with pytest.raises(RuntimeError):
        scene.run()
    assert scene.drafter.num_speculative_steps == 6


def test_the_first_pass_sees_a_chain_of_the_path() -> None:
    """Faults G05 and G07: tokens, hidden states and positions of what was accepted, in front of its request's rows."""
    scene = Scene((2, 2), roots=(9,))
    trees = scene.drafter.shared.trees
    trees.accepted = Accepted(torch.tensor([0]), torch.tensor([[0, 2, 6]]), torch.tensor([3]))
    trees._shifts = torch.from_numpy(trees._shift)
    scene.batch.input_ids, scene.batch.positions = (
        torch.arange(7, dtype=torch.int32),
        torch.tensor([9, 10, 10, 11, 11, 11, 11]),
    )
    hidden = torch.arange(7.0)[:, None].expand(-1, HIDDEN).clone()
    scene.drafter.propose(scene.batch, scene.metadata, {}, hidden)
    assert scene.batch.positions.tolist() == list(range(9, 16))
    assert scene.batch.input_ids[:3].tolist() == [0, 2, 6]
    assert hidden[:3, 0].tolist() == [0, 2, 6]


def test_positions_stay_within_the_context() -> None:
    """Fault I14: drafts past the last position are not accepted, but are looked up."""
    scene = Scene((2, 2, 2), roots=(9, 12, 4), max_model_len=13)
    scene.run()
    assert scene.drafter.input_buffers.positions[:18].max() == 12


def test_dummies_run_without_attention() -> None:
    scene = Scene((2, 2, 2))
    scene.run(metadata=None)
    assert not [what for what in scene.drafter.seen if what[0] == "pass"]
    assert scene.drafter.seen.count(("eplb", 3 * 2)) == 1


@pytest.mark.parametrize("widths", [(2, 2, 2), (4,)])
def test_graphs_replay_all_levels(widths: tuple[int, ...]) -> None:
    """Of as many requests or more: what is behind them changes nothing. Without one of the size, the passes run as they are."""
    scene = Scene(widths)
    drafter, rows = scene.drafter, scene.drafter.shared.memory.sizes.step_rows
    config = drafter.vllm_config.compilation_config
    config.cudagraph_capture_sizes, config.max_cudagraph_capture_size = (
        [1, 2, rows, 2 * rows, 4 * rows, 4 * rows + 1],
        99,
    )
    drafter.init_cudagraph_manager(SimpleNamespace(decode_mode=lambda: FULL))
    drafter.capture()
    assert drafter._graphs.mode == DECODE_ONLY
    assert drafter._pages.shape == (REQUESTS, 3)  # those of its own group of layers
    assert drafter._graphs.counts == [1, 2, 4]
    assert config.cudagraph_capture_sizes == [1, 2, rows, 2 * rows, 4 * rows, 4 * rows + 1]
    assert ("capture", 1) in drafter.seen
    assert scene.run().tolist() == scene.expected()
    assert drafter._graphs.replayed == [4]
    scene.drafter.roots = [(position + 3, -hidden) for position, hidden in scene.drafter.roots][:2]
    scene.pages = [40, 50]
    scene.batch.num_reqs = 2
    for metadata in scene.metadata.values():
        metadata.block_table = torch.tensor([[0, 40, 0], [0, 50, 0]], dtype=torch.int32)
    assert scene.run().tolist() == scene.expected()
    assert drafter._graphs.replayed == [4, 2]
    drafter._graphs.made.clear()
    drafter.roots = [(position + 1, hidden / 2) for position, hidden in drafter.roots]
    assert scene.run().tolist() == scene.expected()
    assert drafter._graphs.replayed == [4, 2]


def test_eager_engines_capture_nothing() -> None:
    scene = Scene((2, 2))
    config = scene.drafter.vllm_config.compilation_config
    config.cudagraph_capture_sizes = None
    scene.drafter.init_cudagraph_manager(SimpleNamespace(decode_mode=lambda: NONE))
    assert (scene.drafter._graphs.mode, scene.drafter._graphs.counts) == (NONE, [])


def test_graphs_are_by_requests() -> None:
    """Sizes are rows: those of less than a tree are of nobody."""
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(cudagraph_capture_sizes=[8, 15, 29, 30, 60], max_cudagraph_capture_size=60)
    )
    made = level_graphs(names())(config, "cpu", FULL, 15)
    assert made.counts == [1, 2, 4]
    assert made.compilation_config.max_cudagraph_capture_size == 4
    assert config.compilation_config.max_cudagraph_capture_size == 60


def test_without_trees_it_is_vllms() -> None:
    drafter = drafter_class(names())(None, Head())
    drafter.load_model("target")
    drafter.init_cudagraph_manager("mode")
    drafter.capture()
    drafter.roots = [(3, torch.ones(HIDDEN, dtype=torch.float64))]
    out = drafter.propose(SimpleNamespace(num_reqs=1), {}, {}, torch.zeros(1), "more", num_speculative_tokens=2)
    assert drafter.seen == ["target", "mode", ("capture", 3), ("propose", 3, ("more",), {"num_speculative_tokens": 2})]
    assert out[0, 0] == drafter.model.compute_logits(torch.ones(HIDDEN, dtype=torch.float64)).argmax()
    assert out[0, 1:].tolist() == [-9, -9]
    assert not any(layer.impl.treewy_drafts for layer in drafter.layers.values())
