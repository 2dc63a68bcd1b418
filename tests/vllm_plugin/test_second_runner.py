"""Prompts that look like drafts: their steps run without a graph, and no others."""

from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from treewy.vllm_plugin.second_runner import run_prompts_eagerly

ROWS = 4


class Runner:
    """A runner with the fault."""

    def __init__(self) -> None:
        self.req_states = SimpleNamespace(
            prefill_len=SimpleNamespace(np=np.array([9, 5, 30])), req_id_to_index={"a": 1, "b": 0, "c": 2}
        )
        self.eager = []

    def execute_model(
        self,
        scheduler_output,
        intermediate_tensors=None,
        dummy_run=False,
        skip_attn_for_dummy_run=False,
        is_profile=False,
    ):
        assert intermediate_tensors is None
        self.eager.append(is_profile)


def names(runner):
    vllm = ModuleType("names")
    vars(vllm)["second_runner_with_the_fault"] = lambda: runner
    return vllm


@pytest.fixture
def runner():
    made = type("Runner", (Runner,), {})
    run_prompts_eagerly(names(made), ROWS)
    return made()


def scheduled(new=(), resumed=(), computed=None, **counts):
    cached = SimpleNamespace(
        req_ids=list(computed or {}), num_computed_tokens=list((computed or {}).values()), resumed_req_ids=set(resumed)
    )
    return SimpleNamespace(num_scheduled_tokens=counts, scheduled_new_reqs=list(new), scheduled_cached_reqs=cached)


@pytest.mark.parametrize(
    ("step", "eager"),
    [
        (scheduled(computed={"a": 7, "b": 9}, a=4, b=4), False),  # all decode
        (scheduled(computed={"a": 7}, new=["d"], a=4, d=4), True),  # a prompt of four tokens
        (scheduled(computed={"a": 7}, new=["d"], a=4, d=5), False),  # not as many as a draft: no graph is replayed
        (scheduled(computed={"a": 7, "c": 26}, a=4, c=4), True),  # the last four of a longer one
        (scheduled(computed={"a": 7, "c": 30}, a=4, c=4), False),
        (scheduled(computed={"b": 9}, resumed=["b"], b=4), True),
    ],
)
def test_steps(runner, step, eager):
    """Faults D01 and L12: a prompt is no draft, however many tokens it has.

    vLLM's worker gives the tensors of an earlier pipeline stage by place, None where there is none.
    """
    runner.execute_model(step, None)
    runner.execute_model(step)
    assert runner.eager == [eager, eager]


def test_dummies_are_not_looked_at(runner):
    runner.execute_model(None, intermediate_tensors=None, dummy_run=True, skip_attn_for_dummy_run=True)
    runner.execute_model(None, dummy_run=True, is_profile=True)
    runner.execute_model(None, None, True)
    assert runner.eager == [False, True, False]


def test_another_engine_in_the_process_takes_over(runner):
    run_prompts_eagerly(names(type(runner)), 2)
    runner.execute_model(scheduled(new=["d"], d=4))
    runner.execute_model(scheduled(new=["d"], d=2))
    assert runner.eager == [False, True]


def test_versions_without_the_fault_are_left_alone():
    run_prompts_eagerly(names(None), ROWS)
