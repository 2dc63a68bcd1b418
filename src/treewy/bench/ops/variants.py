"""treewy's kernels as the benchmark calls them: a table of named ways to run a problem."""

from collections.abc import Callable
from typing import Any, NamedTuple

from treewy.bench.ops.problems import Problem, Step
from treewy.bench.ops.timing import Prepared
from treewy.ops.gdn import Verified

# `treewy.ops.gdn.commit_verify`, or what has its signature.
Entry = Callable[..., Verified]


class Variant(NamedTuple):
    """One of treewy's ways to do a step.

    Attributes:
        name: What the results call it.
        run: Does one step of a problem; returns what it verified.
        exact: Whether the exact mode's bounds hold for it.
    """

    name: str
    run: Callable[[Problem, Step], Verified]
    exact: bool = False

    def prepare(self, problem: Problem) -> Prepared:
        """Return the calls of all steps."""
        calls = [(lambda step=step: self.run(problem, step)) for step in problem.steps]
        return Prepared(calls, problem.bytes_per_seq)


def variant(entry: Entry, backend: str, *, exact: bool = False, name: str = "treewy", **options: Any) -> Variant:
    """Return the variant that calls the serving entry.

    Args:
        entry: `treewy.ops.gdn.commit_verify`.
        backend: "triton" or "cuda".
        exact: Exact mode.
        name: What the results call it.
        options: Further keywords of the entry.
    """

    def run(problem: Problem, step: Step) -> Verified:
        return entry(
            step.rows,
            problem.state,
            step.slots,
            problem.tree.tables,
            prior=step.prior,
            exact=exact,
            out=step.out,
            backend=backend,
            **options,
        )

    return Variant(name, run, exact)
