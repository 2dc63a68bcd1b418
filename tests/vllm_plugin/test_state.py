"""The hooks around a step: what comes before vLLM's own part of each and what after, for requests and for dummies."""

import logging
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from treewy.errors import UnsupportedError
from treewy.vllm_plugin import state
from treewy.vllm_plugin.check import materialised
from treewy.vllm_plugin.state import layers_of, model_state_class
from vllm_plugin.fakes import WIDTH, ModelState, compat, layers_on
from vllm_plugin.rows import LAYERS, Engine

FULL, NONE = 2, 0
CHANNELS, COLUMNS = 2, WIDTH - 1 + 3
NAMES = [f"layer{number}" for number in range(LAYERS)]
# Two groups of recurrent layers and one of attention between them.
GROUPS = [NAMES[:1], ["attention"], NAMES[1:]]
SPEC = SimpleNamespace(page_size_bytes=1)
CACHE = SimpleNamespace(kv_cache_groups=[SimpleNamespace(layer_names=names, kv_cache_spec=SPEC) for names in GROUPS])


class Worker:
    """A model state over an engine's layers, and what vLLM's runner calls of it."""

    def __init__(self, kept_rows: int = 16, *, align: bool = False) -> None:
        self.engine = Engine(kept_rows)
        self.windows = self.engine.normal(LAYERS, 9, CHANNELS, COLUMNS)
        self.layers = layers_on(self.engine, self.windows)
        context = dict(zip(NAMES, self.layers, strict=True))
        config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=context))
        self.state = model_state_class(compat())(config, align)

    @property
    def step(self) -> Any:
        """The plugin's step."""
        return self.engine.step

    def batch(self, requests: list[int], rows: list[int], drafts: list[bool], *, padding: int = 0) -> Any:
        """Return vLLM's batch: of all these requests, some of which verify."""
        return SimpleNamespace(
            num_reqs=len(requests),
            num_reqs_after_padding=len(requests) + padding,
            num_tokens_after_padding=sum(rows) + padding,
            num_scheduled_tokens=np.array(rows, np.int32),
            idx_mapping_np=np.array(requests),
            idx_mapping=torch.tensor(requests),
            num_computed_tokens_np=np.zeros(len(requests), np.int32),
            is_prefilling_np=np.zeros(len(requests), bool),
            drafts=np.array(drafts),
        )

    def preprocess(self, batch: Any, tables: list[torch.Tensor]) -> None:
        """Run the first hook, with a table for each group."""
        self.state.preprocess_state(batch, tuple(tables), CACHE, None)

    def prepare(self, batch: Any, mode: int = NONE) -> Any:
        """Run the second hook; return the tables that vLLM's part of it found."""
        self.state.prepare_attn(batch, mode, (), None, [], CACHE)
        return self.state.seen[-1][1]

    def verify(
        self, requests: list[int], rows: list[int], drafts: list[bool], *, mode: int = NONE, padding: int = 0
    ) -> Any:
        """Run both hooks before a step of requests whose pages' numbers are theirs plus one."""
        batch = self.batch(requests, rows, drafts, padding=padding)
        self.preprocess(batch, [(torch.tensor(requests)[:, None] + 1).expand(-1, 4)] * 3)
        return self.prepare(batch, mode)


def test_a_step_of_requests() -> None:
    """Fault D07: tables are there before vLLM builds its metadata, of each request's own.

    Rows are kept before it copies pages, which needs their count.
    """
    worker = Worker()
    tables = worker.verify([3, 5, 0], [4, 7, 2], [True, False, True])
    assert tables.places.tolist() == [3, 0]
    assert tables.tree.cu_rows.tolist() == [0, 4, 6]
    assert tables.tree.num_rows == 6
    worker.state.postprocess_state(torch.tensor([3, 5, 0]), torch.tensor([3, 0, 2]))
    assert worker.state.seen[-1] == ("postprocess", [2, 0, 0, 3, 0, 0, 0, 0])
    assert [name for name, _ in worker.state.seen] == ["preprocess", "prepare", "postprocess"]


@pytest.mark.parametrize(("mode", "seqs", "rows"), [(NONE, 2, 8), (FULL, 4, 10)])
def test_only_whole_graphs_have_padding(mode: int, seqs: int, rows: int) -> None:
    """Faults C03, C04, C08 and C10: sequences for as many requests, rows for as many tokens, and nobody's."""
    worker = Worker()
    tables = worker.verify([3, 0], [4, 4], [True, True], mode=mode, padding=2)
    assert tables.places.tolist() == [3, 0, -1, -1][:seqs]
    assert tables.tree.num_rows == rows
    worker.state.postprocess_state(torch.tensor([3, 0]), torch.tensor([3, 2]))
    assert worker.step.counts.read()[:2] == (1, int(mode == FULL))


def test_a_graph_is_never_replayed_for_a_prompt() -> None:
    """It would read the tables of an earlier step, and nobody would know."""
    with pytest.raises(UnsupportedError, match="1 of 2 do not"):
        Worker().verify([3, 0], [4, 4], [True, False], mode=FULL)


@pytest.mark.parametrize(
    ("rows", "seqs"),
    [
        ([4, 4], 2),
        ([1, 1, 1], 3),
        ([32] * 8, 0),  # prompts: more rows than a step of drafts can have
        ([4, 5], 0),
    ],
)
def test_dummies_keep_nothing(rows: list[int], seqs: int) -> None:
    """Faults C03 and C05: they come between two steps of requests, and their indices are nobody's."""
    worker = Worker()
    worker.verify([0, 1], [4, 4], [True, True])
    worker.state.postprocess_state(torch.tensor([0, 1]), torch.tensor([2, 2]))
    dummy = worker.batch(list(range(len(rows))), rows, [True] * len(rows))
    tables = worker.prepare(dummy)
    assert tables.places.tolist() == [-1] * seqs
    assert tables.fold.tolist() == [0] * seqs
    assert worker.engine.memory.lengths.tolist() == [2, 2, 0, 0, 0, 0, 0, 0]
    assert worker.verify([1], [4], [True]).places.tolist() == [1]


@pytest.mark.parametrize("align", [False, True])
def test_what_takes_vllms_path_is_flushed_first(align: bool) -> None:
    """Fault L02: a request that kept a prompt's token goes on with its prompt.

    Before pages move, from the page where it is.
    """
    worker = Worker(align=align)
    for requests, rows, sampled in (([3, 1], [4, 1], [2, 1]), ([1, 3], [1, 4], [1, 3])):
        batch = worker.batch(requests, rows, [True, True])
        worker.preprocess(batch, [torch.tensor(requests)[:, None] + 1] * 3)
        worker.engine.run(requests, [request + 1 for request in requests], rows, sampled)
        worker.state.postprocess_state(batch.idx_mapping, torch.tensor(sampled))
        worker.state._runs_requests = False
    worker.state.num_accepted_tokens_gpu[1] = 3
    worker.state._mamba_state_idx_gpu[:] = torch.tensor([0, 1, 0, 0, 0, 0, 0, 0])
    before, lengths = worker.engine.states.clone(), worker.engine.memory.lengths.tolist()
    windows = worker.windows.clone()
    assert lengths[1] == 2
    page = [2, 7, 4]  # of request 1, in each group of layers: in its own block
    own = [[[8, page[group]] if align else [page[group], 8], [4, 4]] for group in (0, 1, 2)]
    worker.preprocess(worker.batch([1, 3], [6, 4], [False, True]), [torch.tensor(table) for table in own])
    for layer, at in enumerate((page[0], page[2], page[2])):
        kept = worker.engine.memory.kept.layer(layer)._replace(lengths=torch.tensor(lengths))
        want = materialised(before[layer, at].double(), kept, 1)
        assert torch.allclose(worker.engine.states[layer, at].double(), want, atol=1e-6)
        assert torch.equal(worker.windows[layer, at, :, : WIDTH - 1], windows[layer, at, :, 2 : 2 + WIDTH - 1])
        others = [slot for slot in range(9) if slot != at]
        assert torch.equal(worker.engine.states[layer, others], before[layer, others])
        assert torch.equal(worker.windows[layer, others], windows[layer, others])
    assert worker.state.seen[-1] == ("preprocess", [1, 1, 1, 3, 1, 1, 1, 1])  # it is told that nothing is left behind
    assert worker.engine.memory.lengths.tolist() == [0, 0, 0, *lengths[3:]]
    assert np.flatnonzero(worker.step.keeps).tolist() == [3]


@pytest.mark.parametrize("align", [False, True])
def test_a_token_of_a_prompt_is_in_its_page_after_its_step(align: bool) -> None:
    """Where prefixes are cached vLLM copies the page before the next step: it must have all of the prompt so far."""
    worker = Worker(align=align)
    worker.state._mamba_state_idx_gpu[:] = 1
    batch = worker.batch([1, 3], [1, 4], [True, True])
    batch.is_prefilling_np[0] = True
    tables = [torch.tensor([[8, 2], [8, 4]] if align else [[2, 8], [4, 8]])] * 3
    worker.preprocess(batch, tables)
    worker.engine.run([1, 3], [2, 4], [1, 4], [1, 3])
    before, windows = worker.engine.states.clone(), worker.windows.clone()
    kept = [worker.engine.memory.kept.layer(layer) for layer in range(LAYERS)]
    want = [materialised(before[layer, 2].double(), kept[layer], 1) for layer in range(LAYERS)]
    worker.state.postprocess_state(batch.idx_mapping, torch.tensor([0, 3]))
    if not align:
        assert torch.equal(worker.engine.states, before)
        assert worker.step.keeps[1]
        return
    for layer in range(LAYERS):
        assert not torch.equal(worker.engine.states[layer, 2], before[layer, 2])
        assert torch.allclose(worker.engine.states[layer, 2].double(), want[layer], atol=1e-6)
        others = [slot for slot in range(9) if slot != 2]
        assert torch.equal(worker.engine.states[layer, others], before[layer, others])
    assert torch.equal(worker.windows, windows)
    assert worker.engine.memory.lengths.tolist() == [0, 0, 0, 3, 0, 0, 0, 0]
    assert np.flatnonzero(worker.step.keeps).tolist() == [3]


def test_prompts_cost_no_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    """They keep nothing, and a new one has no page yet."""
    worker = Worker()
    monkeypatch.setattr(state, "flush", lambda *_: pytest.fail("nothing is kept"))
    worker.verify([3, 5], [4, 7], [True, False])


def test_another_request_gets_an_index() -> None:
    """Fault C06: it finds nothing of the one before."""
    worker = Worker()
    worker.verify([0, 1], [4, 4], [True, True])
    worker.state.postprocess_state(torch.tensor([0, 1]), torch.tensor([2, 4]))
    worker.state.add_request(1, SimpleNamespace(req_id="another"))
    assert worker.engine.memory.lengths[:2].tolist() == [2, 0]
    assert worker.state.seen[-1] == ("add", 1)


@pytest.mark.parametrize("align", [False, True])
def test_a_session_goes_on(align: bool) -> None:
    """A request that is there is added again when more of its input comes; its pages stay, so what it keeps does too."""
    worker = Worker(align=align)
    name = SimpleNamespace(req_id="session")
    worker.state.remove_request("session")
    worker.state.add_request(1, name)
    worker.state._mamba_state_idx_gpu[1] = 3
    worker.verify([1], [4], [True])
    worker.state.postprocess_state(torch.tensor([1]), torch.tensor([3]))
    worker.state.remove_request("session")
    worker.state.add_request(1, name)
    assert worker.engine.memory.lengths[1] == 3
    assert worker.state.num_accepted_tokens_gpu[1] == 3
    assert worker.state._mamba_state_idx_gpu[1] == (3 if align else 7)


@pytest.mark.parametrize("name", ["session", "another"])
def test_whoever_left_begins_again(name: str) -> None:
    """Fault D04: a request that was preempted has lost its pages, and gets others."""
    worker = Worker()
    worker.state.add_request(1, SimpleNamespace(req_id="session"))
    worker.verify([1], [4], [True])
    worker.state.postprocess_state(torch.tensor([1]), torch.tensor([3]))
    worker.state.remove_request("session")  # finished or preempted
    worker.state.remove_request(name)  # as before each is added
    worker.state.add_request(1, SimpleNamespace(req_id=name))
    assert worker.engine.memory.lengths[1] == 0
    assert worker.state.num_accepted_tokens_gpu[1] == 1


def test_models_without_our_layers_are_left_alone() -> None:
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context={"a": SimpleNamespace(treewy=None)})
    )
    assert layers_of(config) == []
    made = model_state_class(compat())(config)
    assert isinstance(made, ModelState)
    made.add_request(0, SimpleNamespace(req_id="a"))
    made.preprocess_state(None, (), None, None)
    made.prepare_attn(None, NONE, (), None, [], None)
    made.postprocess_state(torch.tensor([0]), torch.tensor([1]))
    assert made.seen == [("add", 0), ("preprocess", [1] * 8), ("prepare", None), ("postprocess", None)]


def test_what_fits_is_said_once_of_the_blocks_of_requests(caplog: pytest.LogCaptureFixture) -> None:
    """Graphs may be measured on a few blocks before there are any; those are not what fits."""

    def cache(num_blocks: int) -> Any:
        shape = {"page_size_bytes": 4096, "block_size": 16}
        states = SimpleNamespace(
            num_speculative_blocks=0, shapes=((4, 6), (4, 4)), dtypes=(torch.float32,) * 2, **shape
        )
        attention = SimpleNamespace(head_size=4, **shape)
        groups = [(states, NAMES), (attention, ["attention"])]
        of_layers = [SimpleNamespace(kv_cache_spec=spec, layer_names=names) for spec, names in groups]
        return SimpleNamespace(num_blocks=num_blocks, kv_cache_groups=of_layers)

    worker = Worker()
    caplog.set_level(logging.INFO, "vllm.treewy")
    dummy = worker.batch([0], [4], [True])
    worker.state.prepare_attn(dummy, NONE, (), None, [], cache(3))
    assert not caplog.messages
    for _ in range(2):
        worker.preprocess(dummy, [torch.tensor([[1]])] * 3)
        worker.state.prepare_attn(dummy, NONE, (), None, [], kv_cache_config=cache(50))
    assert [line for line in caplog.messages if " blocks of 16 tokens" in line] == [
        "treewy: 50 blocks of 16 tokens and 12,288 bytes: 3 pages of 4,096 bytes, 160 of them used by a state"
    ]
