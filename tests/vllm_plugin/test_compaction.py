"""After acceptance all caches are as if a chain of the accepted path had run."""

from types import SimpleNamespace

import pytest
import torch

from treewy.vllm_plugin.compaction import Compaction
from treewy.vllm_plugin.state import model_state_class
from treewy.vllm_plugin.trees import Attended
from vllm_plugin import fakes
from vllm_plugin.rows import padded
from vllm_plugin.test_tree_attention import PAGE, pages_of
from vllm_plugin.test_trees import TREE, Base, Running

HEADS, DIM, CHANNELS, COLUMNS = 2, 3, 2, 9
WINDOW = fakes.WIDTH - 2 + TREE.num_rows
GDN = ("gdn.0", "gdn.1", "gdn.2")
# Two groups of recurrent layers, with pages of their own.
GROUPS = (0, 1, 0)
ATTENTION = ("model.3", "model.7")

STEPS = [
    ([6, 6, 6], (), [[0, 2, 4, 5], [0], [0, 1]]),
    ([6, 3, 1], (), [[0, 2, 3], [0, 2], [0]]),
    ([6, 5, 6], (1,), [[0, 2, 4], [0], [0, 2, 4, 5]]),
    ([9, 6, 1, 4], (0,), [[0], [0, 2, 3], [0], [0, 1]]),
]


class Caches:
    """The caches of an engine after the forward of a step: every row's key, value and input is the row's own number."""

    def __init__(self, rows: list[int], prompts: tuple[int, ...], paths: list[list[int]]) -> None:
        self.running, self.paths = Running(rows, prompts), paths
        count, trees = len(rows), self.running.trees
        self.tables = {name: torch.randperm(60)[: count * COLUMNS].view(count, -1) for name in (*ATTENTION, "mtp.0")}
        self.caches = {name: torch.randn(60, HEADS, PAGE, 2 * DIM) for name in self.tables}
        for name, table in self.tables.items():
            trees.attended(table, [name])
            for place, size in enumerate(rows):
                for row in range(size):
                    self.at(self.caches[name], table, place, self.running.before[place] + row)[...] = 100 * place + row
        self.windows = [torch.randn(20, CHANNELS, WINDOW) for _ in GDN]
        self.pages = [torch.randperm(20)[:count] for _ in GROUPS]
        for window, group in zip(self.windows, GROUPS, strict=True):
            for place in self.running.at:
                for row in range(rows[place]):
                    window[self.pages[group][place], :, fakes.WIDTH - 2 + row] = 100 * place + row
        drafts = {name: SimpleNamespace(impl=SimpleNamespace(head_size=DIM, treewy_drafts=False)) for name in ATTENTION}
        drafts["mtp.0"] = SimpleNamespace(impl=SimpleNamespace(head_size=DIM, treewy_drafts=True))
        for name, layer in drafts.items():
            layer.kv_cache = self.caches[name]
        self.shared = SimpleNamespace(step=self.running.step, trees=trees)
        self.layers = [
            SimpleNamespace(treewy=self.shared, prefix=name, window=window, conv_kernel_size=fakes.WIDTH)
            for name, window in zip(GDN, self.windows, strict=True)
        ]
        everything = {**dict(zip(GDN, self.layers, strict=True)), **drafts}
        self.config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=everything))
        self.names = fakes.compat(pages_of=pages_of)
        trees.path = padded(paths, TREE.max_depth + 1)
        counts = torch.tensor([len(path) for path in paths])
        self.path = self.running.step.finish(counts, trees.path)
        trees.finish(self.path)
        self.before = [part.clone() for part in (*self.caches.values(), *self.windows)]

    def at(self, cache: torch.Tensor, table: torch.Tensor, request: int, place: int) -> torch.Tensor:
        """Return what lies at a place of a request, of all heads."""
        return cache[table[request, place // PAGE], :, place % PAGE]

    def check(self) -> None:
        """Compare with a chain's caches; whatever belongs to no accepted row may not have moved."""
        then = iter(self.before)
        for name, table in self.tables.items():
            want = next(then).clone()
            for request in self.running.at if name in ATTENTION else ():
                for along, row in enumerate(self.paths[request]):
                    at = self.running.before[request] + along
                    self.at(want, table, request, at)[...] = 100 * request + row
            assert torch.equal(self.caches[name], want), name
        for window, group in zip(self.windows, GROUPS, strict=True):
            want = next(then).clone()
            for request in self.running.at:
                for along, row in enumerate(self.paths[request]):
                    want[self.pages[group][request], :, fakes.WIDTH - 2 + along] = 100 * request + row
            assert torch.equal(window, want)


@pytest.mark.parametrize(("rows", "prompts", "paths"), STEPS)
def test_caches_are_a_chains(rows: list[int], prompts: tuple[int, ...], paths: list[list[int]]) -> None:
    """Faults B01 and G05: keys, values and inputs of the accepted rows are consecutive, in every layer but the drafter's.

    The drafter's first pass writes a chain's rows itself. Prompts in the batch stay as they are.
    """
    caches = Caches(rows, prompts, paths)
    compaction = Compaction(caches.names, caches.config, caches.layers)
    assert caches.path is not None
    at = torch.tensor(caches.running.at)
    pages = torch.stack([caches.pages[group][at] for group in GROUPS])
    compaction.run(caches.running.trees, caches.path, pages)
    caches.check()


@pytest.mark.parametrize(("rows", "prompts", "paths"), STEPS)
@pytest.mark.parametrize("align", [False, True])
def test_after_sampling_caches_are_a_chains(
    rows: list[int], prompts: tuple[int, ...], paths: list[list[int]], align: bool
) -> None:
    """Faults B01 and G05: the model state knows each tree's page in each layer: the first, or that of its block."""
    caches = Caches(rows, prompts, paths)
    vars(caches.names)["MambaHybridModelState"] = Base
    state = model_state_class(caches.names)(caches.config, align)
    block = [int(place) % 3 if align else 0 for place in range(8)]
    state._mamba_state_idx_gpu = torch.tensor(block, dtype=torch.int32)
    state.treewy = SimpleNamespace(
        finish=lambda num_sampled: caches.path,
        trees=caches.running.trees,
        step=caches.running.step,
        memory=caches.running.step.memory,
    )
    requests = [place + 1 for place in range(len(rows))]
    tables = []
    for pages in caches.pages[:2]:
        table = torch.full((len(rows), 4), 19)
        for place, request in enumerate(requests):
            table[place, block[request]] = pages[place]
        tables.append(table)
    state._tables = [tables[group] for group in GROUPS]
    state.postprocess_state(torch.tensor(requests), torch.tensor([len(path) for path in paths]))
    caches.check()


def test_a_step_without_trees_moves_nothing() -> None:
    caches = Caches([6, 6], (), [[0, 2], [0]])
    state = model_state_class(caches.names)(caches.config)
    state.treewy = SimpleNamespace(
        finish=lambda num_sampled: None, trees=caches.running.trees, memory=caches.running.step.memory
    )
    state.postprocess_state(torch.tensor([1, 2]), torch.tensor([2, 1]))
    now = (*caches.caches.values(), *caches.windows)
    assert all(torch.equal(*pair) for pair in zip(now, caches.before, strict=True))


def test_padding_of_a_graph_moves_nothing() -> None:
    """Fault C07: the step's tables have sequences more than there are requests."""
    caches = Caches([6, 6], (), [[0, 2, 4], [0, 1]])
    trees = caches.running.trees
    for name, told in list(trees.of_layer.items()):
        tree = told.tree._replace(cu_rows=torch.tensor([0, 6, 12, 12], dtype=torch.int32))
        lengths = torch.tensor([*told.lengths.tolist(), 0], dtype=torch.int32)
        trees.of_layer[name] = Attended(tree, lengths, torch.cat([told.table, told.table[:1]]), None)
    assert caches.path is not None
    pages = torch.stack([caches.pages[group][:2] for group in GROUPS])
    Compaction(caches.names, caches.config, caches.layers).run(trees, caches.path, pages)
    caches.check()
