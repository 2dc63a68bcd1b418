"""Metadata of the plugin's layers: who takes the drafted path, and what the others' path is told."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from treewy.vllm_plugin.memory import Memory
from treewy.vllm_plugin.metadata import backend_class
from treewy.vllm_plugin.step import Drafted, Step
from vllm_plugin.fakes import compat
from vllm_plugin.rows import sizes


@dataclass
class Metadata:
    """vLLM's, as far as the plugin reads it or changes it."""

    num_prefills: int
    num_prefill_tokens: int
    num_decodes: int
    num_decode_tokens: int
    num_spec_decodes: int
    num_spec_decode_tokens: int
    num_actual_tokens: int
    spec_sequence_masks: Any = None
    spec_query_start_loc: Any = None
    spec_state_indices_tensor: Any = None
    spec_token_indx: Any = None
    non_spec_token_indx: Any = None
    num_accepted_tokens: Any = None
    non_spec_query_start_loc: Any = None
    chunk_indices: Any = None


class Builder:
    """vLLM's, which asks of each request's drafts only whether they are negative, and older ones whether any drafted."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        self.supports_update_block_table = True
        self.vllm_config, self.kv_cache_spec, self.given = vllm_config, kv_cache_spec, None
        graphs = vllm_config.graphs
        # As large as the largest captured graph, which in an eager engine is of nothing.
        self.spec_state_indices_tensor = torch.full((graphs, 4), 9, dtype=torch.int32, device=device)

    def build(
        self, common_prefix_len: int, common: Any, num_accepted: Any = None, drafts: Any = None, **options: Any
    ) -> Any:
        """Sort the requests into those that verify and those that do not."""
        self.given, self.options = drafts, options
        if drafts is None or int(drafts[drafts >= 0].sum()) == 0:
            count = common.num_actual_tokens
            return Metadata(0, 0, count, count, 0, 0, count)
        masks = drafts >= 0
        lens = torch.tensor(common.lens)
        others = lens[~masks & (lens > 0)]
        counts = (len(others), int(others.sum()), 0, 0, int(masks.sum()), int(lens[masks].sum()), int(lens.sum()))
        names = ("start", "indices", "rows", "other rows")
        return Metadata(*counts, masks, *names, num_accepted, "starts of others", "chunks")

    def build_for_cudagraph_capture(self, common: Any) -> Any:
        """Build for requests that all draft as much as they can."""
        count = len(common.lens)
        return self.build(0, common, torch.full((count,), 4), torch.full((count,), 3))


def backend() -> Any:
    """Return the plugin's backend over these."""
    base = type("Backend", (), {})
    return backend_class(
        compat(
            GDNAttentionMetadata=Metadata,
            GDNAttentionMetadataBuilder=Builder,
            GDNAttentionBackend=base,
            NULL_BLOCK_ID=0,
            mamba_get_block_table_tensor=lambda table, seq_lens, spec, mode: table,
        )
    )


def builder(step: Step, *, graphs: int = 8) -> Any:
    """Return a builder for layers of a step, in an engine with graphs of so many tokens."""
    layer = SimpleNamespace(treewy=SimpleNamespace(step=step))
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context={"a": layer}),
        cache_config=SimpleNamespace(mamba_cache_mode="none"),
        graphs=graphs,
    )
    return backend().get_builder_cls()(None, ["a"], config, torch.device("cpu"))


def common(lens: list[int]) -> SimpleNamespace:
    """Return what vLLM knows of a batch, one of whose requests have pages of the numbers 11, 12, ..."""
    count, starts = len(lens), np.concatenate([[0], np.cumsum(lens)])
    return SimpleNamespace(
        lens=lens,
        num_actual_tokens=int(starts[-1]),
        num_reqs=count,
        query_start_loc_cpu=torch.from_numpy(starts),
        block_table_tensor=torch.arange(11, 11 + count)[:, None].repeat(1, 2),
        seq_lens=torch.tensor(lens) + 5,
    )


def step(batch: list[int], rows: list[int], *, padding: int = 0) -> Step:
    """Return a step in which these places of the batch verify."""
    made = Step(Memory(sizes(4), "cpu"), "eager")
    drafted = Drafted(np.array(batch, np.int64), np.arange(len(batch), dtype=np.int32), np.array(rows, np.int32))
    made.begin(drafted, len(batch) + padding, sum(rows) + padding)
    return made


@pytest.mark.parametrize("given", [[3, -1, 3, -1], [0, -1, 0, -1], [-1, -1, -1, -1], [3, 3, -1, 3]])
def test_the_step_says_who_verifies(given: list[int]) -> None:
    """Fault A01: not vLLM's counts of drafts: with none drafted, an older one leaves the path that knows of kept rows."""
    running = step([0, 2], [4, 1])
    made = builder(running)
    accepted = torch.tensor([2, 1, 3, 1])
    drafts = torch.tensor(given, dtype=torch.int32)
    built = made.build(0, common([4, 5, 1, 0]), accepted, drafts, fast_build=True)
    assert made.given.tolist() == [1, -1, 1, -1]
    assert drafts.tolist() == given  # it is vLLM's
    assert made.options == {"fast_build": True}
    assert built.treewy is running.tables
    assert built.num_accepted_tokens is accepted


@pytest.mark.parametrize("padding", [0, 1])
def test_a_batch_that_verifies_is_all_tables(padding: int) -> None:
    """Padding of a captured graph is no prompt, and has the page that is nobody's."""
    running = step([0, 1], [4, 4], padding=padding)
    made = builder(running)
    accepted = torch.tensor([2, 3, 7][: 2 + padding], dtype=torch.int32)
    built = made.build(0, common([4, 4, *[0] * padding]), accepted, torch.tensor([3, 3, -1][: 2 + padding]))
    assert made.given is None  # vLLM's own tables, of which layers read nothing, are not made
    assert built.treewy is running.tables
    assert built.rest is None
    assert built.spec_sequence_masks is not None
    assert built.spec_state_indices_tensor.tolist() == [[11], [12], [0]][: 2 + padding]
    assert built.num_accepted_tokens.tolist() == [2, 3, 1][: 2 + padding]
    assert built.spec_query_start_loc.tolist() == [0, 4, 8, 8][: 3 + padding]
    assert (built.num_spec_decodes, built.num_prefills, built.num_decodes) == (2 + padding, 0, 0)


def test_eager_steps_are_as_large_as_they_like() -> None:
    made = builder(step([0, 1], [4, 4]), graphs=0)
    built = made.build(0, common([4, 4]), torch.ones(2, dtype=torch.int32), torch.tensor([3, 3]))
    assert built.spec_state_indices_tensor.tolist() == [[11], [12]]


def test_groups_of_layers_share_what_graphs_read() -> None:
    """The same buffers in every step, written once in each."""
    running = step([0, 1], [4, 4])
    one, other = builder(running), builder(running)
    accepted = torch.tensor([2, 3], dtype=torch.int32)
    first = one.build(0, common([4, 4]), accepted, torch.tensor([3, 3]))
    second = other.build(0, common([4, 4]), accepted + 5, torch.tensor([3, 3]))
    assert second.num_accepted_tokens.tolist() == [2, 3]
    where = [first.num_accepted_tokens.data_ptr(), first.spec_state_indices_tensor.data_ptr()]
    running.begin(running.drafted, 2, 8)
    again = one.build(0, common([4, 4]), accepted + 1, torch.tensor([3, 3]))
    assert again.num_accepted_tokens.tolist() == [3, 4]
    assert [again.num_accepted_tokens.data_ptr(), again.spec_state_indices_tensor.data_ptr()] == where


def test_the_first_runners_own_counts_are_not_used() -> None:
    running = step([0, 1], [4, 4])
    running.num_accepted = torch.tensor([4, 1], dtype=torch.int32)
    built = builder(running).build(0, common([4, 4]), None, None)
    assert built.num_accepted_tokens.tolist() == [4, 1]


def test_the_rest_is_a_batch_of_its_own() -> None:
    """Prompts beside requests that verify: their own counts and tables, and nothing of the others."""
    built = builder(step([0, 2], [4, 1])).build(
        0, common([4, 5, 1, 7]), torch.ones(4, dtype=torch.int32), torch.tensor([3, -1, 0, -1])
    )
    rest = built.rest
    assert (rest.num_prefills, rest.num_prefill_tokens, rest.num_decodes, rest.num_decode_tokens) == (2, 12, 0, 0)
    assert rest.num_actual_tokens == 12
    assert built.leading_rows is None  # a prompt comes between
    assert (rest.num_spec_decodes, rest.num_spec_decode_tokens) == (0, 0)
    assert (rest.non_spec_query_start_loc, rest.chunk_indices) == ("starts of others", "chunks")
    spec = ("sequence_masks", "query_start_loc", "state_indices_tensor", "token_indx")
    assert [getattr(rest, f"spec_{name}") for name in spec] == [None] * 4
    assert (rest.non_spec_token_indx, rest.num_accepted_tokens) == (None, None)
    assert (built.num_spec_decodes, built.spec_token_indx, built.non_spec_token_indx) == (2, "rows", "other rows")


def test_rows_that_verify_may_lead() -> None:
    built = builder(step([0, 1], [4, 1])).build(
        0, common([4, 1, 5]), torch.ones(3, dtype=torch.int32), torch.tensor([3, 0, -1])
    )
    assert (built.leading_rows, built.rest.num_actual_tokens) == (5, 5)


def test_nobody_verifies() -> None:
    made = builder(step([], []))
    built = made.build(0, common([5]), torch.ones(1), torch.tensor([-1]))
    assert (built.treewy, built.rest, built.num_decodes) == (None, None, 5)
    assert made.build(0, common([5])).treewy is None  # nor does anything draft


def test_graphs_are_captured_of_dummies() -> None:
    """Fault L12: what is captured reads the tables that every later step is written to."""
    running = step([0, 1], [4, 4])
    made = builder(running)
    built = made.build_for_cudagraph_capture(common([4, 4]))
    assert built.treewy is running.tables
    assert built.num_accepted_tokens.tolist() == [4, 4]


def test_buffers_of_graphs_have_one_state() -> None:
    """Fault A03: a table of one column, copied into a wider one, would fill it: its rows would no longer be apart."""
    made = builder(step([0], [4]))
    assert tuple(made.spec_state_indices_tensor.shape) == (8, 1)
    assert made.spec_state_indices_tensor.is_contiguous()
    assert not made.supports_update_block_table
