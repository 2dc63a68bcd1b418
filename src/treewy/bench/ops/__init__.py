"""Times of the kernels beside their floors and their peers: correctness first, then captured graphs with cold L2."""

from treewy.bench.ops.floors import Heads, Work, floor_bytes
from treewy.bench.ops.problems import Case, Problem, make_problem
from treewy.bench.ops.timing import Prepared, copy_bandwidth, graph_times, require_gpu
from treewy.bench.ops.variants import Variant, variant

__all__ = [
    "Case",
    "Heads",
    "Prepared",
    "Problem",
    "Variant",
    "Work",
    "copy_bandwidth",
    "floor_bytes",
    "graph_times",
    "make_problem",
    "require_gpu",
    "variant",
]
