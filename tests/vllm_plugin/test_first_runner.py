"""The first runner's requests, by name: who decodes, who keeps rows, and whose places are free again."""

from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

from treewy.errors import CapacityError, UnsupportedError
from treewy.vllm_plugin import first_runner
from treewy.vllm_plugin.memory import Memory
from treewy.vllm_plugin.step import Step
from vllm_plugin.rows import sizes


class Shared:
    """What layers share, as far as the hooks care."""

    def __init__(self) -> None:
        self.memory = Memory(sizes(16), "cpu")
        self.step = Step(self.memory, "eager")
        self.forget = self.step.forget

    def finish(self, num_sampled: torch.Tensor) -> None:
        self.step.finish(num_sampled)


class Dispatcher:
    """Chooses graphs, and notes which steps it was told are drafted."""

    def __init__(self) -> None:
        self.drafted = []

    def dispatch(self, num_tokens, uniform_decode=False, has_lora=False, num_active_loras=0, **modes):
        self.drafted.append(uniform_decode)
        return num_tokens, has_lora, num_active_loras, modes


class Runner:
    """A runner of vLLM's first kind: requests (name: prompt, outputs so far, computed) in the order of its batch."""

    def __init__(self) -> None:
        self.cudagraph_dispatcher = Dispatcher()
        self.num_accepted_tokens = SimpleNamespace(gpu=torch.ones(8, dtype=torch.int32))
        self.query_start_loc = SimpleNamespace(np=np.arange(9) * 4)
        self.built = []
        self.kv_cache_config, self.max_model_len = SimpleNamespace(kv_cache_groups=[]), 64  # no blocks to speak of

    def batch(self, drafts: dict[str, int], **requests: tuple[int, int, int]) -> None:
        """Set the batch of the next step."""
        names, count = list(requests), len(requests)
        prompt, outputs, computed = (np.array(part) for part in zip(*requests.values(), strict=True))
        self.input_batch = SimpleNamespace(
            req_ids=[*names, "left over"],
            num_reqs=count,
            num_prompt_tokens=prompt,
            num_computed_tokens_cpu=np.concatenate([computed, [0]]),
        )
        tokens = prompt + outputs
        self.requests = {name: SimpleNamespace(num_tokens=tokens[at]) for at, name in enumerate(names)}
        marks = np.array([drafts.get(name, -1) for name in names])
        self.num_decode_draft_tokens = SimpleNamespace(np=np.concatenate([marks, np.full(8 - count, -1)]))

    def _build_attention_metadata(
        self,
        num_tokens,
        num_reqs,
        max_query_len,
        num_tokens_padded=None,
        num_reqs_padded=None,
        use_spec_decode=False,
        for_cudagraph_capture=False,
        num_scheduled_tokens=None,
    ):
        self.built.append(num_reqs)

    def _update_states_after_model_execute(self, output_token_ids, scheduler_output):
        counts = (output_token_ids != -1).sum(dim=1)
        self.num_accepted_tokens.gpu[: len(counts)] = counts.to(torch.int32)


def names(runner):
    """Return a compat module that knows this runner."""
    vllm = ModuleType("names")
    vars(vllm)["first_runner_class"] = lambda: runner
    return vllm


def engine():
    shared, runner = Shared(), type("Runner", (Runner,), {})
    first_runner.wrap(names(runner), shared)
    return shared, runner()


def step(runner, scheduled, **more):
    more = {"use_spec_decode": True} | more
    runner._build_attention_metadata(
        sum(scheduled.values()), len(scheduled), max_query_len=4, num_scheduled_tokens=scheduled, **more
    )


def sampled(*counts):
    return torch.tensor([[7] * count + [-1] * (4 - count) for count in counts])


def finish(runner, *counts, preempted=(), scheduled=()):
    """End a step of which requests gained so many tokens, and for which others lost their blocks."""
    scheduler_output = SimpleNamespace(
        preempted_req_ids=set(preempted), num_scheduled_tokens=dict.fromkeys(scheduled, 1)
    )
    runner._update_states_after_model_execute(sampled(*counts), scheduler_output)


def test_who_decodes_and_what_is_kept():
    """Fault D03: rows and counts go by name, in whatever order the batch is."""
    shared, runner = engine()
    runner.batch({"a": 3}, a=(5, 1, 5), b=(9, 0, 4), c=(6, 3, 8), d=(4, 4, 3))
    step(runner, {"a": 4, "b": 5, "c": 1, "d": 5})  # b: its prompt's rest; d: computed again after a preemption
    assert runner.built == [4]
    assert shared.step.drafted.batch.tolist() == [0, 2]
    assert shared.step.drafted.sizes.tolist() == [4, 1]
    assert shared.step.num_accepted is not None
    assert shared.step.num_accepted.tolist() == [1, 1, 1, 1]
    finish(runner, 3, 1, 1, 1)
    places = dict(zip(("a", "c"), shared.step.drafted.requests.tolist(), strict=True))
    assert shared.memory.lengths[[places["a"], places["c"]]].tolist() == [3, 1]

    # Another order, a's rows still its own; b decodes now.
    runner.batch({"b": 3, "a": 3}, b=(9, 1, 9), c=(6, 4, 9), a=(5, 4, 8))
    step(runner, {"b": 4, "c": 1, "a": 4})
    assert shared.step.num_accepted.tolist() == [1, 1, 3]
    assert shared.step.drafted.requests.tolist()[1:] == [places["c"], places["a"]]
    finish(runner, 2, 1, 4)
    assert shared.memory.lengths[places["a"]] == 7


def test_places_of_requests_that_ended_or_began_again():
    """Fault B06: nothing of a place is left for who gets it next."""
    shared, runner = engine()
    runner.batch({"a": 3, "b": 3}, a=(5, 1, 5), b=(5, 1, 5))
    step(runner, {"a": 4, "b": 4})
    finish(runner, 4, 4)
    first = shared.step.drafted.requests.tolist()
    # a ended; b was preempted and computes everything again: neither keeps anything.
    runner.batch({}, b=(5, 5, 0))
    step(runner, {"b": 10}, use_spec_decode=False)
    assert shared.memory.lengths.tolist() == [0] * 8
    assert len(shared.step.drafted.requests) == 0
    finish(runner, 1)
    runner.batch({"b": 3, "e": 3}, b=(5, 6, 10), e=(5, 1, 5))
    step(runner, {"b": 4, "e": 4})
    assert shared.step.num_accepted is not None
    assert shared.step.num_accepted.tolist() == [1, 1]
    assert sorted(shared.step.drafted.requests.tolist()) == sorted(first)


def test_places_of_who_lost_its_blocks():
    """It is known to the engine as long as it waits, and another that goes first needs its place."""
    shared, runner = engine()
    running = dict.fromkeys("abcdefgh", (5, 1, 5))
    runner.batch(dict.fromkeys(running, 3), **running)
    step(runner, dict.fromkeys(running, 4))
    finish(runner, *[4] * 8)
    place = shared.step.drafted.requests.tolist()[2]
    left = dict.fromkeys("abdefgh", (5, 5, 9))
    runner.batch(dict.fromkeys(left, 3), **left)
    runner.requests["c"] = SimpleNamespace(num_tokens=10)
    step(runner, dict.fromkeys(left, 4))
    finish(runner, *[1] * 7, preempted="ca", scheduled=left)  # a began again in the same step
    assert shared.memory.lengths.tolist() == [0 if at == place else 5 for at in range(8)]
    runner.batch({"i": 3}, i=(5, 1, 5))
    runner.requests |= {name: SimpleNamespace(num_tokens=11) for name in "abcdefgh"}
    step(runner, {"i": 4})
    assert shared.step.drafted.requests.tolist() == [place]


@pytest.mark.parametrize(("outside", "known"), [("h", True), ("gh", False), ("fg", True)])
def test_who_lost_its_blocks_unsaid(outside, known):
    """In a step that computed nothing: it is found where nobody else is outside, and guessed nowhere."""
    shared, runner = engine()
    running = dict.fromkeys("abcdefgh", (5, 1, 5))
    runner.batch(dict.fromkeys(running, 3), **running)
    step(runner, dict.fromkeys(running, 4))
    places = dict(zip(running, shared.step.drafted.requests.tolist(), strict=True))
    finish(runner, *[4] * 8)
    new = {"i": (5, 1, 5)} | {name: (5, 5, 9) for name in running if name not in outside}
    if "h" in new:
        new["h"] = (5, 5, 0)  # begins again in this very step: its place is free
    runner.batch(dict.fromkeys(new, 3), **new)
    runner.requests |= {name: SimpleNamespace(num_tokens=10) for name in outside}
    if known:
        step(runner, dict.fromkeys(new, 4))
        assert shared.step.drafted.requests.tolist()[0] == places["h"]
        assert shared.step.num_accepted.tolist()[0] == 1
    else:
        with pytest.raises(CapacityError, match=r"all 8 are held, and of the 2 holders .* Use vLLM's Model Runner V2"):
            step(runner, dict.fromkeys(new, 4))


def test_one_token_of_a_prompt_that_more_will_follow():
    """Fault D01: it does not decode, and neither does the last of a chunk that recomputes outputs."""
    shared, runner = engine()
    runner.batch({}, a=(9, 0, 4), b=(3, 6, 5))
    step(runner, {"a": 1, "b": 1}, use_spec_decode=False)
    assert len(shared.step.drafted.requests) == 0


def test_dummies_and_captures_keep_nothing():
    shared, runner = engine()
    runner._build_attention_metadata(8, 2, 4, num_tokens_padded=12, num_reqs_padded=3, for_cudagraph_capture=True)
    tables = shared.step.tables
    assert tables is not None
    assert tables.places.tolist() == [-1, -1, -1]
    assert tables.tree.num_rows == 12
    assert shared.step.num_accepted is None


def test_full_graphs_have_inert_sequences():
    """Fault L12: as many as were captured."""
    shared, runner = engine()
    runner.batch({"a": 3}, a=(5, 1, 5))
    step(runner, {"a": 4}, num_tokens_padded=8, num_reqs_padded=2)
    tables = shared.step.tables
    assert tables is not None
    assert tables.places.tolist() == [*shared.step.drafted.requests.tolist(), -1]
    assert tables.tree.cu_rows.tolist() == [0, 4, 4]
    assert shared.step.num_accepted is not None
    assert shared.step.num_accepted.tolist() == [1, 1]
    finish(runner, 3)
    assert shared.step.counts.read()[:2] == (1, 1)
    runner.batch({"a": 3}, a=(5, 4, 8))
    step(runner, {"a": 4})
    finish(runner, 1)
    assert shared.step.counts.read()[:2] == (2, 1)


@pytest.mark.parametrize(
    ("requests", "drafted"),
    [
        ({"a": (5, 1, 5), "b": (9, 3, 11)}, True),
        ({"a": (5, 1, 5), "b": (4, 0, 0)}, False),  # a prompt of four tokens
        ({"a": (5, 1, 5), "b": (30, 0, 26)}, False),  # the last four of a longer one
        ({"a": (5, 1, 5), "b": (4, 6, 4)}, False),  # computed again after a preemption
        ({"a": (5, 1, 5), "b": (1, 0, 0)}, True),  # its last token
    ],
)
def test_graphs_of_drafted_steps_are_for_those(requests, drafted):
    """Faults D01 and L12: a prompt is no draft, however many tokens it has; without this vLLM replays the graph."""
    _, runner = engine()
    runner._build_attention_metadata(8, 2, 4, num_tokens_padded=8, num_reqs_padded=2, for_cudagraph_capture=True)
    runner.batch({"a": 3}, **requests)
    dispatcher = runner.cudagraph_dispatcher
    assert dispatcher.dispatch(8, True, False, valid_modes=None) == (8, False, 0, {"valid_modes": None})
    dispatcher.dispatch(num_tokens=8, uniform_decode=True, has_lora=False, num_active_loras=0)
    dispatcher.dispatch(num_tokens=9, uniform_decode=False)
    assert dispatcher.drafted == [drafted, drafted, False]


def test_a_graph_over_a_prompt_is_an_error():
    """And not wrong tokens, if vLLM ever asks for it."""
    _, runner = engine()
    runner.batch({"a": 3}, a=(5, 1, 5), b=(4, 0, 0))
    with pytest.raises(UnsupportedError, match="1 of 2 do not"):
        step(runner, {"a": 4, "b": 4}, num_tokens_padded=8, num_reqs_padded=2)
    step(runner, {"a": 4, "b": 4})  # not captured


def test_another_engine_in_the_process_takes_over():
    shared, runner = engine()
    other = Shared()
    first_runner.wrap(names(type(runner)), other)
    runner.batch({"a": 3}, a=(5, 1, 5))
    step(runner, {"a": 4})
    assert other.step.tables is not None
    assert shared.step.tables is None
    assert runner.built == [1]
