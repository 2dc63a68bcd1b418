"""Pages of block boundaries: each holds state and window of exactly the tokens up to there, whatever else is kept."""

from typing import Any

import numpy as np
import pytest
import torch

from treewy.vllm_plugin.check import walk
from treewy.vllm_plugin.conv import chain_conv
from treewy.vllm_plugin.prefix import MAX_STEPS_AHEAD, Boundaries, SplitCopies
from treewy.vllm_plugin.step import Drafted
from vllm_plugin.fakes import WIDTH, Copies, compat, layers_on
from vllm_plugin.rows import LAYERS, Engine

REQUESTS, BLOCKS, BLOCK, CHANNELS, ROWS = 4, 8, 8, 2, 4
PAGES = 1 + REQUESTS * BLOCKS
RECONSTRUCT, RING = 4, 16

# Of each step: requests, rows, tokens sampled. Requests begin at 5, 8, 0 and 3 tokens of blocks of 8.
STARTS = [5, 8, 0, 3]
STEPS = [
    ([2, 0], [4, 4], [1, 2]),  # 0 to 7
    ([0, 2, 3], [4, 4, 4], [4, 4, 2]),  # 0 to 11, over 8
    ([3, 2], [4, 4], [3, 3]),  # 2 to 8 in the last row that fits, 3 to 8: its page is the block's own
    ([1, 3, 0], [4, 4, 4], [4, 4, 1]),  # 1 within a block, 3 goes on from the page that it left, 0 to 12
    ([0, 1], [4, 4], [3, 4]),  # 0 to 15; 1 to 16: again its own page
    ([2, 0, 1], [4, 1, 4], [4, 1, 1]),  # 0 to 16 without drafts
    ([0, 1, 2, 3], [4, 4, 4, 4], [4, 4, 4, 4]),  # 1 to 21, 2 to 16
    ([0, 1, 2, 3], [4, 4, 4, 4], [4, 4, 4, 2]),  # 0 to 24, 1 over 24, 2 to 20, 3 over 16
    ([3, 2, 0], [2, 3, 4], [2, 3, 4]),
    ([2, 3], [2, 4], [2, 1]),  # 2 over 24
]


class Aligned:
    """An engine whose requests move from page to page, as vLLM's "align" mode has it."""

    def __init__(self, kept_rows: int) -> None:
        self.engine = engine = Engine(kept_rows)
        engine.states = engine.normal(LAYERS, PAGES, *engine.states.shape[2:]) * 0.3
        window = torch.full((1, PAGES, CHANNELS, WIDTH - 1 + ROWS - 1), torch.nan)
        by_request = 1 + torch.arange(REQUESTS * BLOCKS, dtype=torch.int32).view(REQUESTS, BLOCKS)
        # Groups of layers have tables of their own.
        self.tables = [1 + (by_request + 5 * layer) % (PAGES - 1) for layer in range(LAYERS)]
        layers = layers_on(engine, window.expand(LAYERS, -1, -1, -1))
        self.boundaries = Boundaries(compat(), layers, BLOCK)
        self.states = Copies(list(engine.states), self.tables, BLOCK, windows=False)
        self.windows = Copies([window[0]], self.tables[:1], BLOCK, windows=True)
        self.copies: Any = SplitCopies(self.windows, self.windows, self.states, self.boundaries)
        self.window, self.weight = window[0], engine.normal(CHANNELS, WIDTH)
        self.computed = torch.tensor([*STARTS, *[0] * 4], dtype=torch.int32)
        self.accepted = torch.ones(8, dtype=torch.int32)
        self.block = (self.computed - 1).div(BLOCK, rounding_mode="floor").to(torch.int32)
        self.inputs = [engine.normal(start, CHANNELS) for start in STARTS]
        self.filled: dict[tuple[int, int], tuple[torch.Tensor, ...]] = {}
        self.num_checks = 0
        for request, start in enumerate(STARTS):
            if start:
                past = torch.cat([torch.zeros(WIDTH - 1, CHANNELS), self.inputs[request]])
                self.window[self.tables[0][request, self.block[request]], :, : WIDTH - 1] = past[1 - WIDTH :].T
            else:
                self.block[request] = 0  # as after a first chunk of nothing
                self.window[self.tables[0][request, 0], :, : WIDTH - 1] = 0.0

    def run(self, requests: list[int], rows: list[int], sampled: list[int], ahead: int) -> None:
        """Run a step; the host believes that `ahead` more tokens were accepted than were."""
        at, before = torch.tensor(requests), self.computed.clone()
        self._move(at, torch.tensor(rows))
        drafted = Drafted(np.arange(len(at)), at.numpy().astype(np.int32), np.array(rows, np.int32))
        self.boundaries.begin(drafted, before[at].numpy() + ahead, [table[at] for table in self.tables])
        pages = [[int(table[request, self.block[request]]) for request in requests] for table in self.tables]
        self._convolve(torch.tensor(pages[0]), rows, requests, sampled)
        self.engine.run(requests, pages, rows, sampled)
        self.computed[at] += torch.tensor(sampled, dtype=torch.int32)
        self.accepted[at] = torch.tensor(sampled, dtype=torch.int32)
        self.copies.run_fused_postprocess_align(len(at), self.accepted, self.block, self.computed, at)
        for request in requests:
            self._note(request, int(before[request]))

    def _move(self, at: torch.Tensor, rows: torch.Tensor) -> None:
        source, bias = self.block.clone(), self.accepted - 1
        self.block[at] = ((self.computed[at] + rows + BLOCK - 1) // BLOCK - 1).to(torch.int32)
        self.accepted[(source != self.block) & (source >= 0)] = 1
        self.copies.run_fused_precopy(len(at), self.block, source, bias, at)

    def _convolve(self, pages: torch.Tensor, rows: list[int], requests: list[int], sampled: list[int]) -> None:
        x = self.engine.normal(sum(rows), CHANNELS)
        cu_rows = torch.tensor([0, *np.cumsum(rows)])
        y = chain_conv(x, self.window, self.weight, None, pages, self.accepted[requests], cu_rows)
        for request, mine, out, count in zip(requests, x.split(rows), y.split(rows), sampled, strict=True):
            known = torch.cat([torch.zeros(WIDTH - 1, CHANNELS), self.inputs[request], mine])[1 - WIDTH - len(mine) :]
            want = torch.nn.functional.conv1d(known.T[None], self.weight[:, None], groups=CHANNELS)[0].T
            assert torch.allclose(out, torch.nn.functional.silu(want), atol=1e-5)
            self.inputs[request] = torch.cat([self.inputs[request], mine[:count]])

    def _note(self, request: int, before: int) -> None:
        """Compare the page of a boundary that was crossed with the walk up to there."""
        now = int(self.computed[request])
        boundary = now // BLOCK * BLOCK
        if boundary <= before:
            return
        pages = [table[request, boundary // BLOCK - 1] for table in self.tables]
        for layer, page in enumerate(pages):
            want = walk(self.engine.checker._seen[layer, request], range(boundary - before))
            got = self.engine.states[layer, page].double()
            assert (got - want).norm() / want.norm() < 1e-6
        newest = self.inputs[request][boundary - WIDTH + 1 : boundary].T
        assert torch.equal(self.window[pages[0], :, : WIDTH - 1], newest)
        self.filled[request, boundary] = tuple(
            self.engine.states[layer, page].clone() for layer, page in enumerate(pages)
        )
        self.num_checks += 1

    def check_filled(self) -> None:
        """Check that nobody wrote to a page since it was filled."""
        for (request, boundary), states in self.filled.items():
            for layer, state in enumerate(states):
                page = self.tables[layer][request, boundary // BLOCK - 1]
                assert torch.equal(self.engine.states[layer, page], state)


@pytest.mark.parametrize("ahead", [0, 3])
@pytest.mark.parametrize("kept_rows", [RECONSTRUCT, 6, RING])
def test_boundaries_hold_exactly_their_tokens(kept_rows: int, ahead: int) -> None:
    """Faults E07 and E10: in the running page or in the one before, alone or beside others that cross none."""
    aligned = Aligned(kept_rows)
    for step in STEPS:
        aligned.run(*step, ahead)
    assert sorted(aligned.filled) == [
        *((0, 8), (0, 16), (0, 24)),
        *((1, 16), (1, 24)),
        *((2, 8), (2, 16), (2, 24)),
        *((3, 8), (3, 16)),
    ]
    aligned.check_filled()
    assert aligned.engine.checker.largest < 1e-6  # the requests themselves go on as if there were no boundaries
    assert aligned.engine.checker.num_checks == LAYERS * (sum(len(step[0]) for step in STEPS) - REQUESTS)


def test_a_request_that_ends_in_its_page_keeps_nothing() -> None:
    """All of it is in the page: its rows would be counted twice."""
    aligned = Aligned(RING)
    aligned.run([1, 0], [4, 4], [2, 2], 0)
    aligned.run([1], [4], [2], 0)
    aligned.run([1, 0], [4, 4], [4, 3], 0)
    assert aligned.computed[:2].tolist() == [10, 16]
    assert aligned.engine.memory.lengths[:2].tolist() == [5, 0]


def test_states_move_as_they_are() -> None:
    """Fault E01: of windows what was not accepted stays behind; a page has one state, and kept rows belong to the request."""
    aligned = Aligned(RING)
    aligned.run([0], [2], [2], 0)
    pages = [table[0, :2] for table in aligned.tables]
    state = [aligned.engine.states[layer, page[0]].clone() for layer, page in enumerate(pages)]
    aligned.run([0], [4], [1], 0)
    assert aligned.block[0] == 1
    assert all(torch.equal(aligned.engine.states[layer, page[1]], state[layer]) for layer, page in enumerate(pages))


@pytest.mark.parametrize(("behind", "looks"), [(0, True), (MAX_STEPS_AHEAD * ROWS, True), (ROWS * 5, False)])
def test_steps_without_a_boundary_cost_nothing(behind: int, looks: bool) -> None:
    """As far as the host can tell: what steps in flight did not accept may still lie before the boundary."""
    aligned = Aligned(RING)
    aligned.boundaries.block_size = 64
    drafted = Drafted(np.array([1]), np.zeros(1, np.int32), np.array([ROWS], np.int32))
    computed = 64 - ROWS if behind == 0 else 63 + behind
    at = torch.tensor([3, 0])  # beside one that does not verify
    aligned.boundaries.begin(drafted, np.array([0, computed]), [table[at] for table in aligned.tables])
    before = aligned.engine.states.clone()
    aligned.boundaries.fill(aligned.states, 2, aligned.accepted, aligned.block, aligned.computed, at)
    assert aligned.states.calls == looks
    assert torch.equal(aligned.engine.states, before)


def test_a_tree_in_flight_counts_with_all_its_rows() -> None:
    """The host is ahead by 39 rows where a tree of 40 gained one token, although a path is 4 at most."""
    aligned = Aligned(RING)
    memory = aligned.engine.memory
    assert memory.sizes.max_path == 4
    memory.sizes = memory.sizes._replace(step_rows=40)
    aligned.boundaries.block_size = 256
    drafted, at = Drafted(np.array([0]), np.zeros(1, np.int32), np.array([40], np.int32)), torch.tensor([0])
    aligned.boundaries.begin(drafted, np.array([252 + 39]), [table[at] for table in aligned.tables])
    aligned.boundaries.fill(aligned.states, 1, aligned.accepted, aligned.block, aligned.computed, at)
    assert aligned.states.calls


class Racing(Copies):
    """vLLM 0.26's: the first layer's program forgets what was accepted before the others read it."""

    def run_fused_postprocess_align(self, num_reqs, num_accepted, state_idx, num_computed, idx_mapping):
        for pages, table in zip(self.pages, self.tables, strict=True):
            alone = Copies([pages], [table], self.block_size, windows=True)
            alone.run_fused_postprocess_align(num_reqs, num_accepted, state_idx, num_computed, idx_mapping)


@pytest.mark.parametrize("races", [False, True])
def test_windows_of_requests_that_end_with_their_block(races: bool) -> None:
    """All layers' have the newest inputs in front, also where vLLM's kernel would forget how far to move them."""
    aligned = Aligned(RING)
    vars(aligned.boundaries.vllm)["windows_race"] = lambda: races
    layers, tables = aligned.boundaries.layers, aligned.tables
    for layer in layers:
        layer.window = aligned.engine.normal(*aligned.window.shape)
    before = [layer.window.clone() for layer in layers]
    kind = Racing if races else Copies
    windows = kind([layer.window for layer in layers], tables, BLOCK, windows=True)
    copies: Any = SplitCopies(windows, windows, aligned.states, aligned.boundaries)
    drafted = Drafted(np.arange(2), np.array([1, 0], np.int32), np.array([4, 4], np.int32))
    at = torch.tensor([1, 0, 2])  # the first ends with its block, the second within one, the third does not verify
    aligned.computed[:3], aligned.block[:3] = torch.tensor([7, 16, 3]), torch.tensor([0, 1, 0])
    aligned.accepted[:3] = torch.tensor([3, 4, 1])
    aligned.engine.memory.lengths[:2] = torch.tensor([3, 4])
    aligned.boundaries.begin(drafted, np.array([12, 4, 0]), [table[at] for table in tables])
    copies.run_fused_postprocess_align(3, aligned.accepted, aligned.block, aligned.computed, at)
    assert aligned.accepted[:3].tolist() == [3, 1, 1]
    for layer, table, was in zip(layers, tables, before, strict=True):
        own = int(table[1, 1])
        assert torch.equal(layer.window[own, :, : WIDTH - 1], was[own, :, 3 : 3 + WIDTH - 1])
        others = torch.arange(PAGES) != own
        assert torch.equal(layer.window[others], was[others])


def test_prompts_are_not_rebuilt() -> None:
    """Fault E07: a request that does not verify crosses boundaries by vLLM's own means, whoever else crosses one in the step."""
    aligned = Aligned(RING)
    drafted = Drafted(np.array([1]), np.array([0], np.int32), np.array([4], np.int32))
    at = torch.tensor([3, 0])
    aligned.boundaries.begin(drafted, np.array([3, 5]), [table[at] for table in aligned.tables])
    aligned.computed[3] = 8
    aligned.engine.memory.lengths[3] = 2  # nothing that it keeps is read
    before = aligned.engine.states.clone()
    accepted = torch.ones_like(aligned.accepted)
    aligned.boundaries.fill(aligned.states, 2, accepted, aligned.block, aligned.computed, at)
    assert torch.equal(aligned.engine.states, before)
    assert aligned.engine.memory.lengths[3] == 2


def test_everything_else_is_vllms() -> None:
    assert Aligned(RING).copies.other == "vLLM's"
