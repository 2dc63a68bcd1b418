"""`treewy bench`: what is measured is a command of its own."""

from dataclasses import dataclass
from typing import Annotated

from tyro.conf import subcommand

from treewy.cli.bench_engine import BenchEngine
from treewy.cli.bench_ops import BenchOps

BENCHMARKS = ("engine", "ops")


@dataclass(frozen=True)
class Bench:
    """Measure decoding speed, or the kernels."""

    what: Annotated[BenchEngine, subcommand("engine")] | Annotated[BenchOps, subcommand("ops")]

    def run(self) -> None:
        """Run the benchmark that was named."""
        self.what.run()
