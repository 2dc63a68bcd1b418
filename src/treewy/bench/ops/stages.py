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
from treewy.ops.gdn import Prior, Projections, Record, Verified
from treewy.ops.gdn.cuda import entry
from treewy.ops.gdn.cuda.variant import ROW_BUCKETS
from treewy.packed import TreeTables
from treewy.shapes import Tensor

# What each stage needs comes before it; the last set of them is the whole kernel.
STAGES = ("state", "gram", "solve", "output")
STAGE_ROWS = (4, 8, 16, 32, 64, 128)
# A stage binds where it adds this share to the time of those before it.
BINDS = 0.10


# Trees this small are done in registers, all stages at once; larger ones than the second no kernel of this backend takes.
IN_REGISTERS, LARGEST = ROW_BUCKETS[0], ROW_BUCKETS[-1]


def staged(given: Entry, backend: str) -> Entry | None:
    """Return an entry that takes `stages`, the names of those that run; None if the backend cannot leave any out."""
    if "stages" in inspect.signature(given).parameters:
        return given
    return _staged_cuda if backend == "cuda" else None


def _staged_cuda(
    rows: Projections,
    state: Tensor,
    slots: Tensor,
    tree: TreeTables,
    *,
    prior: Prior | None,
    exact: bool,
    out: Verified,
    backend: str,
    stages: tuple[str, ...],
) -> Verified:
    """`commit_verify` of the CUDA kernel as far as the last of the stages: what comes out is right with all of them only."""
    assert backend == "cuda"
    assert isinstance(out.record, Record)
    variant = entry.variant_of(state, tree, prior, out.record, exact=exact)._replace(stages=len(stages))
    entry.commit_verify(rows, state, slots, tree, prior, out, exact, variant)
    return out


def stage_results(
    setting: Setting, batch_sizes: Sequence[int], states: Sequence[torch.dtype], heads: Heads = QWEN_35B
) -> Iterator[Result]:
    """Yield the time of each set of stages, for chains of 4 to 128 rows beside a history."""
    if staged(setting.entry, setting.backend) is None:
        yield Result("stages", {}, setting.backend, note="this backend cannot leave stages out")
        return
    for state in states:
        for size in batch_sizes:
            for num_rows in STAGE_ROWS:
                yield from _of_case(setting, Case("ring", f"chain{num_rows}", size, state, heads=heads))


def _of_case(setting: Setting, case: Case) -> Iterator[Result]:
    problem = make_problem(case, setting.device)
    sets = [STAGES[: count + 1] for count in range(len(STAGES))]
    whole = setting.backend == "cuda" and not IN_REGISTERS < problem.tree.tables.max_rows <= LARGEST
    replays: dict[str, Callable[[], float]] = {}
    for stages in sets[-1:] if whole else sets:
        replays["+".join(stages)] = setting.capture(_prepared(setting, problem, stages), setting.device)
    spreads = replay_times(replays, setting.num_replays)
    floor = problem.floor_bytes / setting.bandwidth * 1e6
    before: Spread | None = None
    for name, spread in spreads.items():
        note = _whole_note(problem.tree.tables.max_rows) if whole else _note(name.rpartition("+")[2], before, spread)
        yield Result("stages", describe(case), name, spread, floor, note=note)
        before = spread


def _prepared(setting: Setting, problem: Problem, stages: tuple[str, ...]) -> Prepared:
    if setting.backend == "cuda" and problem.tree.tables.max_rows > LARGEST:
        return variant(setting.entry, "triton").prepare(problem)
    run = staged(setting.entry, setting.backend)
    assert run is not None
    return variant(run, setting.backend, stages=stages).prepare(problem)


def _whole_note(num_rows: int) -> str:
    if num_rows <= IN_REGISTERS:
        return "all stages at once, in registers"
    return "backend triton: the CUDA kernel takes no tree of this size"


def _note(stage: str, before: Spread | None, now: Spread) -> str | None:
    if before is None:
        return None
    added = now.median - before.median
    return f"{stage} adds {added:.1f} us" + (", binds" if added > BINDS * before.median else "")
