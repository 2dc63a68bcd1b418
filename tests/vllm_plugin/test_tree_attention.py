"""Attention of batches with trees: who runs what, on which rows, and that each row sees its prefix and its path."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tolerances import SHORT_SUM_FLOAT32
from treewy.tree import DraftTree
from treewy.vllm_plugin import compat as plugin_compat
from treewy.vllm_plugin import tree_attention
from treewy.vllm_plugin.tree_attention import LevelRows, on_cpu, on_gpu, register, shared_of
from treewy.vllm_plugin.trees import Attended
from vllm_plugin.fakes import compat
from vllm_plugin.test_trees import TREE, Running

HEADS, KEY_HEADS, DIM, PAGE, PAGES, COLUMNS = 4, 2, 8, 4, 40, 9
SCALE = 0.3


def pages_of(cache: torch.Tensor, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values of pages, as both versions keep them: heads first, side by side."""
    keys, values = cache.transpose(1, 2).split(head_dim, dim=-1)
    return keys, values


class Builder:
    """vLLM's."""

    def __init__(self, vllm_config: Any, layer_names: list[str]) -> None:
        self.vllm_config, self.layer_names = vllm_config, layer_names

    def build(self, common_prefix_len: int, common: Any, fast_build: bool = False) -> Any:
        """Return metadata."""
        return SimpleNamespace(
            block_table=common.block_table, query_start_loc=common.query_start_loc, seq_lens=common.seq_lens
        )


class Implementation:
    """vLLM's, which sees a chain in every request; it notes that it ran."""

    def __init__(self) -> None:
        self.head_size, self.scale, self.ran = DIM, SCALE, list[str]()

    def forward(self, layer, query, key, value, kv_cache, attn_metadata, output, *scales):
        """Write what no attention gives."""
        self.ran.append("forward")
        output.fill_(77.0)
        return output

    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping):
        """Write pages of its own order."""
        self.ran.append("update")


class Backend:
    """vLLM's."""

    name = "CPU_ATTN"

    @classmethod
    def get_name(cls) -> str:
        """Return its name."""
        return cls.name

    get_builder_cls = staticmethod(lambda: Builder)
    get_impl_cls = staticmethod(lambda: Implementation)


class Engine:
    """A backend over these, and a batch whose keys and values lie in pages.

    Args:
        rows: Rows of each request of the batch.
        prompts: Places that draft nothing.
        platform: "cpu" or "gpu".
    """

    def __init__(self, rows: list[int], prompts: tuple[int, ...] = (), *, platform: str = "cpu", trees: bool = True):
        self.running, self.rows, self.prompts = Running(rows, prompts), rows, prompts
        self.shared = SimpleNamespace(trees=self.running.trees if trees else None)
        layers = {"a": SimpleNamespace(), "gdn": SimpleNamespace(treewy=self.shared)}
        self.config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers))
        context = SimpleNamespace(no_compile_layers=layers)
        bases = {"cpu_attention": lambda: Backend, "flash_attention": lambda: type("F", (Backend,), {"name": "FLASH"})}
        names = compat(pages_of=pages_of, get_forward_context=lambda: context, **bases)
        self.backend = {"cpu": on_cpu, "gpu": on_gpu}[platform](names)
        self.builder = self.backend.get_builder_cls()(self.config, ["a"])
        self.implementation = self.backend.get_impl_cls()()
        random = torch.Generator().manual_seed(2)
        total = sum(rows)
        self.query = torch.randn(total + 2, HEADS, DIM, generator=random)
        self.key, self.value = (torch.randn(total + 2, KEY_HEADS, DIM, generator=random) for _ in range(2))
        self.cache = torch.randn(PAGES, KEY_HEADS, PAGE, 2 * DIM, generator=random)
        self.table = torch.randperm(PAGES, generator=random)[: COLUMNS * len(rows)].view(len(rows), COLUMNS)
        starts = torch.tensor(self.running.starts, dtype=torch.int32)
        common = SimpleNamespace(
            block_table=self.table, query_start_loc=starts, seq_lens=self.running.batch.seq_lens.clone()
        )
        self.metadata = self.builder.build(0, common)

    def forward(self, metadata: Any = "own") -> torch.Tensor:
        """Return outputs of all rows; what nobody writes stays as it was."""
        output = torch.full((len(self.query), HEADS * DIM), 9.0)
        metadata = self.metadata if metadata == "own" else metadata
        given = (None, self.query, self.key, self.value, self.cache, metadata, output)
        assert self.implementation.forward(*given, None, None) is output
        return output.view(-1, HEADS, DIM)

    def place(self, request: int, place: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the key and the value at a place of a request's pages."""
        return tuple(self.cache[self.table[request, place // PAGE], :, place % PAGE].split(DIM, dim=-1))

    def defined(self, request: int, row: int, *, tree: DraftTree | None) -> torch.Tensor:
        """Return a row's output: of its prefix in the pages and, in the batch, of its path, or of all rows before it."""
        start = int(self.running.starts[request])
        own = [start + node for node in (range(row + 1) if tree is None else tree.path(row))]
        prefix = [self.place(request, place) for place in range(self.running.before[request])]
        keys = torch.stack([key for key, _ in prefix] + [self.key[node] for node in own])
        values = torch.stack([value for _, value in prefix] + [self.value[node] for node in own])
        out = []
        for head in range(HEADS):
            shared = head // (HEADS // KEY_HEADS)
            weights = torch.softmax(SCALE * (keys[:, shared].double() @ self.query[start + row, head].double()), 0)
            out.append(weights @ values[:, shared].double())
        return torch.stack(out)

    def check(self, output: torch.Tensor, *, chains: bool) -> None:
        """Check every row; those of trees along their path, or as chains."""
        for request, count in enumerate(self.rows):
            tree = None if chains or request in self.prompts else TREE
            for row in range(count):
                got = output[int(self.running.starts[request]) + row].double()
                want = self.defined(request, row, tree=tree)
                assert (got - want).abs().max() <= SHORT_SUM_FLOAT32 * want.abs().max()
        assert output[sum(self.rows) :].eq(9.0).all()


BATCHES = [([6, 6], ()), ([6, 3, 1], ()), ([6, 5, 6], (1,)), ([9, 2, 6], (0,)), ([7, 1], (0, 1))]


@pytest.mark.parametrize(("rows", "prompts"), BATCHES)
def test_rows_see_their_prefix_and_their_path(rows: list[int], prompts: tuple[int, ...]) -> None:
    """Faults G03, G04 and I14: on a CPU everything is ours, prompts as chains; whole trees and cut ones."""
    engine = Engine(rows, prompts)
    engine.check(engine.forward(), chains=False)
    assert engine.implementation.ran == []
    expected = None if len(prompts) == len(rows) else engine.running.trees.of_layer["a"]
    assert engine.metadata.treewy is expected


def test_the_drafters_first_pass_is_a_chain() -> None:
    """Fault G07: what was accepted lies in front of its request's rows by then; only passes of levels run rows of a tree."""
    engine = Engine([6, 5, 6], (1,))
    engine.implementation.treewy_drafts = True
    engine.check(engine.forward(), chains=True)
    level = engine.running.trees.of_layer["a"]
    whole = Engine([6, 6])
    whole.implementation.treewy_drafts = True
    level = whole.running.trees.of_layer["a"]
    whole.check(whole.forward(LevelRows(level)), chains=False)
    assert whole.implementation.ran == []


@pytest.mark.parametrize("trees", [True, False])
def test_keys_are_written_in_a_plain_order(trees: bool) -> None:
    """Fault L04: where the slots say, which go by row and not by position; those of nobody are written nowhere."""
    engine = Engine([6, 3], trees=trees)
    before = engine.cache.clone()
    slots = torch.tensor([5, 9, -1, 22, 159, 0, -1, 40, 41, -1, -1])
    engine.implementation.do_kv_cache_update(None, engine.key, engine.value, engine.cache, slots)
    keys, values = pages_of(engine.cache, DIM)
    then = pages_of(before, DIM)
    for pool, old, given in ((keys, then[0], engine.key), (values, then[1], engine.value)):
        want = old.clone()
        for row, slot in enumerate(slots.tolist() if trees else []):
            if slot >= 0:
                want[slot // PAGE, slot % PAGE] = given[row]
        assert torch.equal(pool, want)
    assert engine.implementation.ran == ([] if trees else ["update"])


def test_engines_without_trees_are_left_alone() -> None:
    engine = Engine([6, 6], trees=False)
    assert (engine.metadata.treewy, engine.metadata.chains) == (None, None)
    assert engine.forward().eq(77.0).all()
    assert engine.implementation.ran == ["forward"]
    with_trees = Engine([6, 6])
    assert with_trees.forward(None).eq(77.0).all()  # a profiling run


def test_names_of_the_backends() -> None:
    """vLLM finds them by module and name, and knows a plugin's by the name of its own kind."""
    for platform, name in (("cpu", "CPU_ATTN"), ("gpu", "CUSTOM")):
        backend = Engine([6], platform=platform).backend
        assert backend.get_name() == name
        assert f"{backend.__module__}.{backend.__qualname__}" == tree_attention.PATH
        assert not backend.get_builder_cls().supports_update_block_table


@pytest.fixture
def verified(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Have kernels' calls run in PyTorch; return which backend each asked for."""
    asked: list[str] = []
    real = tree_attention.attention.verify_paged

    def verify_paged(*operands: Any, backend: str, **options: Any) -> Any:
        asked.append(backend)
        return real(*operands, backend="eager", **options)

    monkeypatch.setattr(tree_attention.attention, "verify_paged", verify_paged)
    return asked


def test_on_a_gpu_trees_are_ours_and_the_rest_is_vllms(verified: list[str]) -> None:
    """Fault D07: where a batch has both, vLLM runs first, and rows of trees are written over."""
    whole = Engine([6, 3], platform="gpu")
    whole.check(whole.forward(), chains=False)
    assert whole.implementation.ran == []
    mixed = Engine([6, 5, 6], (1,), platform="gpu")
    out = mixed.forward()
    assert mixed.implementation.ran == ["forward"]
    assert out[6:11].eq(77.0).all()
    assert out[17:].eq(77.0).all()
    out[6:11] = torch.stack([mixed.defined(1, row, tree=None) for row in range(5)])
    out[17:] = 9.0
    mixed.check(out, chains=False)
    assert set(verified) == {"triton"}
    prompts = Engine([6, 3], (0, 1), platform="gpu")
    assert prompts.forward().eq(77.0).all()
    drafter = Engine([6, 6], platform="gpu")
    drafter.implementation.treewy_drafts = True
    assert drafter.forward().eq(77.0).all()
    level = drafter.running.trees.of_layer["a"]
    drafter.implementation.ran.clear()
    drafter.check(drafter.forward(LevelRows(level)), chains=False)
    assert drafter.implementation.ran == []
    assert drafter.forward(None).eq(77.0).all()


def test_a_tree_may_be_told_of_for_other_pages() -> None:
    """Each group of layers has pages of its own; what is kept for compaction is by layer."""
    engine = Engine([6, 6])
    other = engine.backend.get_builder_cls()(engine.config, ["b", "c"])
    common = SimpleNamespace(
        block_table=engine.table.flip(0),
        query_start_loc=torch.tensor([0, 6, 12], dtype=torch.int32),
        seq_lens=engine.running.batch.seq_lens,
    )
    told: Attended = other.build(0, common).treewy
    assert torch.equal(told.table, engine.table.flip(0))
    kept = engine.running.trees.of_layer
    assert kept["b"] is kept["c"] is told is not kept["a"]


def test_shared_of() -> None:
    shared, config = SimpleNamespace(), SimpleNamespace
    layers = {"a": SimpleNamespace(), "b": SimpleNamespace(treewy=None), "c": SimpleNamespace(treewy=shared)}
    assert shared_of(layers) is shared
    assert shared_of(config(compilation_config=config(static_forward_context=layers))) is shared
    assert shared_of({"a": SimpleNamespace(treewy=None)}) is None


@pytest.mark.parametrize("cpu", [True, False])
def test_vllm_is_told_of_the_backend(cpu: bool) -> None:
    seen: list[Any] = []
    names = SimpleNamespace(
        AttentionBackendEnum=SimpleNamespace(CPU_ATTN="cpu", CUSTOM="custom"),
        register_backend=lambda kind, path: seen.append((kind, path)),
        forget_backends=lambda: seen.append("forget"),
    )
    module = type(sys)("names")
    vars(module).update(vars(names))
    register(module, on_cpu=cpu)
    assert seen == ([("cpu", tree_attention.PATH), "forget"] if cpu else [("custom", tree_attention.PATH)])


@pytest.mark.parametrize(("platform", "name"), [("cpu", "CPU_ATTN"), ("cuda", "CUSTOM")])
def test_it_is_made_where_vllm_looks_for_it(platform: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once: layers of one engine have one backend."""
    monkeypatch.setattr(tree_attention, "_made", {})
    monkeypatch.setattr(plugin_compat, "platform", lambda: platform)
    bases = {"cpu_attention": lambda: Backend, "flash_attention": lambda: type("F", (Backend,), {"name": "FLASH"})}
    monkeypatch.setattr(plugin_compat, "names", lambda: compat(pages_of=pages_of, **bases))
    made = tree_attention.Backend
    assert made.get_name() == name
    assert tree_attention.Backend is made
    with pytest.raises(AttributeError, match="no attribute 'Other'"):
        _ = tree_attention.Other
