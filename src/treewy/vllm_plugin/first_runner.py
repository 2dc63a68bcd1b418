"""The hooks that the first model runner has not: it knows requests by name, and states of the last step by its own counts.

Two of its methods are wrapped. Before metadata is built the step's tables are made, and after sampling accepted rows are
kept, as `state` does it under the second runner. It has the fault that `second_runner` tells of, in all versions: what
chooses an engine's graphs is told what is in its batch.
"""

import inspect
from collections.abc import Collection
from types import ModuleType
from typing import Any

import numpy as np
import torch

from treewy.errors import CapacityError
from treewy.shapes import Int, Tensor
from treewy.vllm_plugin.announcement import announce
from treewy.vllm_plugin.flush import clear
from treewy.vllm_plugin.state import layers_of
from treewy.vllm_plugin.step import Drafted, dummies, sent


class Places:
    """Where requests keep their rows, by name."""

    def __init__(self, shared: Any) -> None:
        """Start without requests."""
        self.shared, self._of, self.announced, self.told = shared, dict[str, int](), False, False

    def drop(self, known: Any) -> None:
        """Free the places of requests that the engine does not know any more."""
        for name in [name for name in self._of if name not in known]:
            self.forget(name)

    def leave(self, scheduled: Any) -> None:
        """Free the places of requests that a step took the blocks from: the engine knows them, and others run meanwhile.

        Who is scheduled all the same has begun again.
        """
        for name in scheduled.preempted_req_ids or ():
            if name not in scheduled.num_scheduled_tokens:
                self.forget(name)

    def forget(self, name: str) -> None:
        """Drop what a request keeps, if it keeps anything: it ended, or begins again from its prompt."""
        if name in self._of:
            self.shared.forget(self._of.pop(name))

    def take(self, name: str, batch: Collection[str]) -> int:
        """Return a request's place, a free one if it had none.

        Args:
            name: The request's.
            batch: Names of the step's requests.

        Raises:
            CapacityError: nobody can tell whose place is free.
        """
        if name not in self._of:
            num_places = self.shared.memory.sizes.num_requests
            if len(self._of) == num_places:
                self.forget(self._preempted(batch))
            taken = set(self._of.values())
            self._of[name] = next(place for place in range(num_places) if place not in taken)
        return self._of[name]

    def _preempted(self, batch: Collection[str]) -> str:
        """Return who lost its blocks in a step that computed nothing, of which vLLM's runner hears nothing.

        No more requests run than there are places, so at least one of those outside the batch does not; who else is outside
        waits for its turn and still needs what it keeps.
        """
        outside = [name for name in self._of if name not in batch]
        if len(outside) != 1:
            raise CapacityError(
                f"A request that decodes must have a place for its rows; all {len(self._of)} are held, and of the "
                f"{len(outside)} holders outside this step any may have been preempted. Use vLLM's Model Runner V2, or raise "
                "max_num_batched_tokens, so that all requests that run fit one step."
            )
        return outside[0]


def wrap(vllm: ModuleType, shared: Any) -> None:
    """Wrap the runner's methods, once per process; `shared` is what the engine's layers share.

    Args:
        vllm: The compat module of the installed vLLM.
        shared: The layers' memory and step.
    """
    runner = vllm.first_runner_class()
    build, update = runner._build_attention_metadata, runner._update_states_after_model_execute
    places = Places(shared)
    if hasattr(build, "treewy"):
        build.treewy[:] = [shared, places]  # another engine in this process: the one before is gone
        return
    signature, updated, current = inspect.signature(build), inspect.signature(update), [shared, places]

    def build_attention_metadata(self: Any, *args: Any, **kwargs: Any) -> Any:
        asked, (now, of_requests) = signature.bind(self, *args, **kwargs), current
        asked.apply_defaults()
        begin(vllm, self, now, of_requests, asked.arguments)
        return build(self, *args, **kwargs)

    def update_states_after_model_execute(self: Any, *args: Any, **kwargs: Any) -> Any:
        asked, (now, of_requests) = updated.bind(self, *args, **kwargs), current
        result = update(self, *args, **kwargs)
        now.finish(self.num_accepted_tokens.gpu)
        of_requests.leave(asked.arguments["scheduler_output"])
        return result

    build_attention_metadata.treewy = current
    runner._build_attention_metadata = build_attention_metadata
    runner._update_states_after_model_execute = update_states_after_model_execute


def begin(vllm: ModuleType, runner: Any, shared: Any, places: Places, asked: dict[str, Any]) -> None:
    """Make the tables of a step of the first runner.

    Args:
        vllm: The compat module of the installed vLLM.
        runner: The runner.
        shared: The layers' memory and step.
        places: Where its requests keep their rows.
        asked: Arguments of the method that builds metadata.
    """
    if not places.told:  # the first steps of an engine are dummies, before any graph is replayed
        places.told = True
        tell_of_prompts(runner)
    count, scheduled, step = asked["num_reqs"], asked["num_scheduled_tokens"], shared.step
    if scheduled is None or asked["for_cudagraph_capture"]:
        sizes = np.diff(runner.query_start_loc.np[: count + 1]).astype(np.int32)
        drafted = dummies(sizes, shared.memory.sizes.step_rows)
        step.num_accepted = None
    else:
        if not places.announced:
            places.announced = True
            announce(shared, runner.kv_cache_config, runner.max_model_len)
        drafted = drafted_requests(runner, places, count, scheduled, asked["use_spec_decode"])
        _clear_unwritten(vllm, runner, drafted)
        step.num_accepted = _accepted(step.accepted, drafted, asked["num_reqs_padded"] or count)
    whole = len(drafted.requests) == count
    num_seqs = (asked["num_reqs_padded"] if whole else None) or len(drafted.requests)
    num_rows = (asked["num_tokens_padded"] if whole else None) or drafted.num_rows
    full_graph = asked["num_reqs_padded"] is not None  # only then does it say how many that graph has
    if full_graph:
        drafted.check_captured(count)
    step.begin(drafted, num_seqs, max(num_rows, drafted.num_rows), full_graph=full_graph)


def tell_of_prompts(runner: Any) -> None:
    """Make what chooses the graphs of one engine see a step as drafted only where no request computes a prompt."""
    dispatcher = runner.cudagraph_dispatcher
    dispatch = dispatcher.dispatch

    def dispatch_drafted(num_tokens: int, uniform_decode: bool = False, *args: Any, **kwargs: Any) -> Any:
        return dispatch(num_tokens, uniform_decode and all_decode(runner), *args, **kwargs)

    dispatcher.dispatch = dispatch_drafted


def all_decode(runner: Any) -> bool:
    """Return whether every request of the batch has all but its last token computed; nobody's dummies have."""
    batch, requests = runner.input_batch, runner.requests
    names = batch.req_ids[: batch.num_reqs]
    return all(batch.num_computed_tokens_cpu[at] + 1 >= requests[name].num_tokens for at, name in enumerate(names))


def drafted_requests(
    runner: Any, places: Places, count: int, scheduled: dict[str, int], use_spec_decode: bool
) -> Drafted:
    """Return the requests of a batch that decode: the last known token, and drafts behind that.

    The last token of a prompt is one too if it comes alone: vLLM may pad it with placeholders for drafts, which only the
    drafted path can leave out of a state. Whoever computes more than that computes a prompt, or again what was lost when it
    was preempted: it keeps nothing.
    """
    batch, requests = runner.input_batch, runner.requests
    places.drop(requests)
    drafts = runner.num_decode_draft_tokens.np[:count] if use_spec_decode else np.full(count, -1)
    chosen, sizes = [], []
    for at, name in enumerate(batch.req_ids[:count]):
        size, computed = scheduled[name], int(batch.num_computed_tokens_cpu[at])
        decodes = computed + 1 >= requests[name].num_tokens and size == 1 + max(int(drafts[at]), 0)
        if not decodes or computed == 0:  # it begins, perhaps by the name of one that has just ended
            places.forget(name)
        if decodes:
            chosen.append(at)
            sizes.append(size)
    taken = [places.take(batch.req_ids[at], scheduled) for at in chosen]  # once all that are free are known
    return Drafted(np.array(chosen, np.int64), np.array(taken, np.int32), np.array(sizes, np.int32))


def _clear_unwritten(vllm: ModuleType, runner: Any, drafted: Drafted) -> None:
    """Empty the pages of prompts that verify from their first token on: no prompt of theirs was ever written."""
    batch = runner.input_batch
    rows = drafted.batch[batch.num_computed_tokens_cpu[drafted.batch] == 0]
    if not len(rows):
        return
    layers, pages = layers_of(runner.vllm_config), {}
    for number, group in enumerate(runner.kv_cache_config.kv_cache_groups):
        table = batch.block_table[number].get_device_tensor(int(rows[-1]) + 1)
        pages |= dict.fromkeys(group.layer_names, table[sent(rows, table.device), 0])
    clear(vllm, layers, [pages[layer.prefix] for layer in layers])


def _accepted(of_place: Int[Tensor, "R"], drafted: Drafted, count: int) -> Int[Tensor, "B"]:
    """Return the rows that each request of a batch accepted in its last step, 1 where it verified none."""
    accepted = torch.ones(count, dtype=torch.int32, device=of_place.device)
    if len(drafted.requests):
        rows, places = (sent(part, of_place.device).long() for part in (drafted.batch, drafted.requests))
        accepted[rows] = of_place[places]
    return accepted
