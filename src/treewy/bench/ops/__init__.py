"""Times of the kernels beside their floors and their peers: correctness first, then captured graphs with cold L2."""

from treewy.bench.ops.floors import QWEN_35B, Heads, Work, floor_bytes
from treewy.bench.ops.measure import Measurement, Result, Setting
from treewy.bench.ops.problems import Case, Problem, make_problem
from treewy.bench.ops.session import NAMES, header, results, units
from treewy.bench.ops.timing import Prepared, copy_bandwidth, graph_times, require_gpu
from treewy.bench.ops.variants import Variant, variant

__all__ = [
    "NAMES",
    "QWEN_35B",
    "Case",
    "Heads",
    "Measurement",
    "Prepared",
    "Problem",
    "Result",
    "Setting",
    "Variant",
    "Work",
    "copy_bandwidth",
    "floor_bytes",
    "graph_times",
    "header",
    "make_problem",
    "require_gpu",
    "results",
    "units",
    "variant",
]
