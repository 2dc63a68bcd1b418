"""`treewy bench ops`: how long the kernels take, beside their floors and their peers."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, get_args

from tyro.conf import FlagCreatePairsOff, arg

from treewy.errors import RequestError, TreeWYError

if TYPE_CHECKING:
    from treewy.bench.ops import Result, Setting

RowName = Literal[
    "verify",
    "cycle",
    "verify-fp32",
    "reconstruct",
    "trees",
    "single",
    "exact",
    "ragged",
    "stages",
    "accuracy",
    "drift",
]
# Backends that are no kernels: they wait for the host, so no graph can hold them.
NOT_KERNELS = ("eager", "reference")
QUICK_REPLAYS = 10


@dataclass(frozen=True)
class BenchOps:
    """Measure the kernels on a GPU: correctness first, then captured graphs with cold L2."""

    rows: Annotated[tuple[RowName, ...], arg(metavar="ROW")] = get_args(RowName)
    """What to measure. verify, cycle, verify-fp32: the ring on a chain of 4. reconstruct: commit and verify fused.
    trees: 15, 40 and 64 rows. single: one sequence. exact: what exact mode costs. ragged: different trees side by side.
    stages: where the time goes as chains grow, at 32 sequences. accuracy, drift: errors of the state."""
    batch_sizes: Annotated[tuple[int, ...], arg(metavar="N")] = (1, 8, 32, 128)
    """Sequences at once; each row takes those that it has a use for."""
    backend: str = "cuda"
    """Which kernels: cuda, the faster ones, or triton."""
    quick: Annotated[bool, FlagCreatePairsOff] = False
    """Replay every graph 10 times instead of 40."""
    peers: bool = True
    """Time the kernels of vLLM, sglang and FlashInfer beside, where they can be imported."""
    plot: Annotated[Path | None, arg(metavar="FILE")] = None
    """Draw times over tree sizes into this file; needs matplotlib."""
    json: Annotated[bool, FlagCreatePairsOff] = False
    """Print JSON lines, each as soon as it is known, instead of a table."""

    def run(self) -> None:
        """Run the command; raises TreeWYError after the report if a variant was wrong or did not run."""
        from treewy.bench.ops import header, require_gpu, results, units
        from treewy.bench.ops.plotting import load_pyplot, plot
        from treewy.bench.ops.report import print_table
        from treewy.cli.terminal import progress_bar

        self._refuse_nonsense()
        chosen = units(self.rows, self.batch_sizes)
        require_gpu()
        pyplot = None if self.plot is None else load_pyplot()
        setting = self._setting()
        first = header(setting)
        if self.json:
            print(json.dumps(first), flush=True)
        found: list[Result] = []
        with progress_bar() as progress:
            task = progress.add_task(chosen[0].name, total=len(chosen))
            for result in results(chosen, setting, lambda name: progress.advance(task)):
                progress.update(task, description=result.row)
                found.append(result)
                if self.json:
                    print(json.dumps(result.as_json()), flush=True)
        lines = [result.as_json() for result in found]
        if not self.json:
            print_table(first, lines)
        if pyplot is not None and self.plot is not None:
            plot(pyplot, lines, self.plot)
        _refuse_faults(found)

    def _setting(self) -> "Setting":
        from treewy.bench.ops import Setting, copy_bandwidth, require_gpu
        from treewy.bench.ops.timing import NUM_REPLAYS
        from treewy.ops import gdn

        device = require_gpu()
        replays = QUICK_REPLAYS if self.quick else NUM_REPLAYS
        bandwidth = copy_bandwidth(device, replays)
        return Setting(gdn.commit_verify, self.backend, device, bandwidth, replays, self.peers)

    def _refuse_nonsense(self) -> None:
        """Refuse before anything is measured what cannot be, or would be thrown away."""
        from treewy.bench.ops.plotting import PLOTTED
        from treewy.ops.dispatch import BACKENDS

        kernels = [name for name in BACKENDS if name not in NOT_KERNELS]
        if self.backend not in kernels:
            raise RequestError(
                f"backend must be one of {', '.join(kernels)}; got {self.backend!r}. Only kernels can be captured in a graph."
            )
        if not self.batch_sizes or min(self.batch_sizes) < 1:
            raise RequestError(
                f"batch-sizes must be at least 1; got {list(self.batch_sizes)}. Leave it out for 1, 8, 32 and 128."
            )
        if self.plot is None:
            return
        if not set(PLOTTED) & set(self.rows):
            raise RequestError(
                f"A plot must have times over trees; got rows {', '.join(self.rows)}. Add one of {', '.join(PLOTTED)}."
            )
        if not self.plot.parent.is_dir():
            raise RequestError(f"A plot must go to a folder that exists; {self.plot.parent} does not. Make it first.")


def _refuse_faults(results: "list[Result]") -> None:
    wrong = [f"{result.row}, {result.name}: {result.note}" for result in results if result.is_fault]
    if wrong:
        raise TreeWYError(
            f"Every variant must run and be right to be timed; {len(wrong)} did not or were not, first {wrong[0]}. See the "
            "notes of the report."
        )
