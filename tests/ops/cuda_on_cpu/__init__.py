"""The CUDA kernel compiled for the CPU: the source as it is, with the instructions of `instructions.h`."""

import ctypes
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from treewy.ops.gdn import Prior, Projections, Verified
from treewy.ops.gdn.cuda import entry
from treewy.ops.gdn.cuda.variant import Variant, source
from treewy.packed import TreeTables
from treewy.shapes import Tensor

HERE = Path(__file__).parent
# -ffp-contract: sums are the same on every machine. The kernel reads its shared memory under several types.
OPTIONS = ["-std=c++17", "-O1", "-fPIC", "-fvisibility=hidden", "-fno-strict-aliasing", "-ffp-contract=off"]
# Reported to run.cpp, so that nothing but the compiler is needed.
CHECKS = ["-fsanitize=alignment,bounds", "-Wno-unknown-pragmas"]
BUILDS = tempfile.TemporaryDirectory(prefix="cuda-on-cpu-")


def commit_verify(
    x: Projections,
    state: Tensor,
    slots: Tensor,
    tree: TreeTables,
    prior: Prior | None,
    out: Verified,
    variant: Variant,
    *,
    backwards: bool = False,
) -> None:
    """Run one step as `cuda.entry.commit_verify` does, on tensors of the CPU.

    Args:
        x: Rows in bfloat16, as the kernel takes them.
        state: Pool of states.
        slots: Slot of each sequence.
        tree: The trees.
        prior: Committed rows that the state lacks.
        out: Buffers to write into.
        variant: Which kernel.
        backwards: Run blocks and threads in the opposite order: what is right in one order only is a race.

    Raises:
        AssertionError: the kernel did what a GPU leaves undefined.
    """
    entry.check_operands(x, state, out, prior)
    keep: list[Tensor] = []
    params = entry.make_params(x, state, slots, tree, prior, out, keep)
    grid = (state.shape[1] * variant.value_blocks, tree.num_seqs)
    launch(build(source(), tuple(variant.macros().items())), grid, params, backwards=backwards)


def launch(library: ctypes.CDLL, grid: tuple[int, int], params: ctypes.Structure, *, backwards: bool = False) -> None:
    """Run a kernel over a grid.

    Raises:
        AssertionError: it did what a GPU leaves undefined.
    """
    wrong = library.run(ctypes.byref(params), *grid, int(backwards))
    assert wrong is None, f"The kernel went wrong in {wrong.decode()}"


@cache
def build(source: str, macros: tuple[tuple[str, int], ...]) -> ctypes.CDLL:
    """Return a kernel `gdn_step(Params)` compiled for this machine's CPU; NW and SHARED_BYTES must be among the macros."""
    compiler = shutil.which("g++")
    assert compiler, "These tests compile the CUDA kernel for the CPU; found no g++ on the path. Install it."
    name = Path(BUILDS.name) / f"step{build.cache_info().misses}"
    kernel, built, linked = (name.with_suffix(suffix) for suffix in (".cu", ".o", ".so"))
    kernel.write_text(source)
    defined = [f"-D{macro}={value}" for macro, value in macros]
    # Linked in a second step: with the checks named there, it would ask for a library of theirs.
    for arguments in (
        [*OPTIONS, *CHECKS, *defined, f'-DKERNEL="{kernel}"', "-c", HERE / "run.cpp", "-o", built],
        ["-shared", built, "-o", linked],
    ):
        done = subprocess.run([compiler, *map(str, arguments)], capture_output=True, text=True, check=False)
        assert not done.returncode, f"g++ refuses the kernel with {dict(macros)}:\n{done.stderr}"
    library = ctypes.CDLL(str(linked))
    library.run.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_int]
    library.run.restype = ctypes.c_char_p
    return library
