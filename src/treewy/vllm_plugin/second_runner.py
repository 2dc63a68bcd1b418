"""A fault of vLLM 0.26's second runner: prompts that look like drafts.

It replays the graph of drafted steps whenever every request has as many tokens as a draft has rows, also where these are
a prompt's. The graph then reads what an earlier step left behind. Such steps are run without a graph here.
"""

from collections.abc import Mapping
from types import ModuleType
from typing import Any


def run_prompts_eagerly(vllm: ModuleType, step_rows: int) -> None:
    """Wrap the runner's method that runs a step, once per process, where the version has the fault.

    Args:
        vllm: The compat module of the installed vLLM.
        step_rows: Rows of a draft, the last token among them.
    """
    runner = vllm.second_runner_with_the_fault()
    if runner is None:
        return
    run = runner.execute_model
    if hasattr(run, "treewy"):
        run.treewy[:] = [step_rows]  # another engine in this process: the one before is gone
        return
    current = [step_rows]

    def execute_model(
        self: Any, scheduler_output: Any, intermediate_tensors: Any = None, dummy_run: bool = False, **kwargs: Any
    ) -> Any:
        if not dummy_run and look_like_drafts(self, scheduler_output, current[0]):
            kwargs["is_profile"] = True  # which there means no more than that no graph is replayed
        return run(self, scheduler_output, intermediate_tensors, dummy_run=dummy_run, **kwargs)

    execute_model.treewy = current
    runner.execute_model = execute_model


def look_like_drafts(runner: Any, scheduled: Any, step_rows: int) -> bool:
    """Return whether every request of a step has as many tokens as a draft has rows, and some of them are prompts.

    Args:
        runner: The runner.
        scheduled: What vLLM's scheduler gave it.
        step_rows: Rows of a draft.
    """
    counts: Mapping[str, int] = scheduled.num_scheduled_tokens
    if any(count != step_rows for count in counts.values()):
        return False
    cached, states = scheduled.scheduled_cached_reqs, runner.req_states
    if scheduled.scheduled_new_reqs or cached.resumed_req_ids:
        return True
    prompts = states.prefill_len.np
    known = zip(cached.req_ids, cached.num_computed_tokens, strict=True)
    return any(computed < prompts[states.req_id_to_index[name]] for name, computed in known)
