"""Where the time of a launch goes as chains grow: a kernel that can leave stages out is timed with ever more of them."""

import inspect
from collections.abc import Callable, Iterator, Sequence

import torch

from treewy.bench.ops.floors import QWEN_35B, Heads
from treewy.bench.ops.measure import Result, Setting, describe
from treewy.bench.ops.problems import Case, Problem, make_problem
from treewy.bench.ops.timing import Prepared, replay_times
from treewy.bench.ops.variants import Entry, variant
from treewy.bench.timing import Spread

# What each stage needs comes before it; the last set of them is the whole kernel.
STAGES = ("state", "gram", "solve", "output")
STAGE_ROWS = (4, 8, 16, 32, 64, 128)
# A stage binds where it adds this share to the time of those before it.
BINDS = 0.10


def has_stages(entry: Entry) -> bool:
    """Return whether the entry takes `stages`, the names of those that run."""
    return "stages" in inspect.signature(entry).parameters


def stage_results(
    setting: Setting, batch_sizes: Sequence[int], states: Sequence[torch.dtype], heads: Heads = QWEN_35B
) -> Iterator[Result]:
    """Yield the time of each set of stages, for chains of 4 to 128 rows beside a history."""
    if not has_stages(setting.entry):
        yield Result("stages", {}, setting.backend, note="this backend cannot leave stages out")
        return
    for state in states:
        for size in batch_sizes:
            for num_rows in STAGE_ROWS:
                yield from _of_case(setting, Case("ring", f"chain{num_rows}", size, state, heads=heads))


def _of_case(setting: Setting, case: Case) -> Iterator[Result]:
    problem = make_problem(case, setting.device)
    sets = [STAGES[: count + 1] for count in range(len(STAGES))]
    replays: dict[str, Callable[[], float]] = {}
    for stages in sets:
        replays["+".join(stages)] = setting.capture(_prepared(setting, problem, stages), setting.device)
    spreads = replay_times(replays, setting.num_replays)
    floor = problem.floor_bytes / setting.bandwidth * 1e6
    before: Spread | None = None
    for stages, (name, spread) in zip(sets, spreads.items(), strict=True):
        yield Result("stages", describe(case), name, spread, floor, note=_note(stages[-1], before, spread))
        before = spread


def _prepared(setting: Setting, problem: Problem, stages: tuple[str, ...]) -> Prepared:
    return variant(setting.entry, setting.backend, stages=stages).prepare(problem)


def _note(stage: str, before: Spread | None, now: Spread) -> str | None:
    if before is None:
        return None
    added = now.median - before.median
    return f"{stage} adds {added:.1f} us" + (", binds" if added > BINDS * before.median else "")
