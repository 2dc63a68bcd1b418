"""Compiling the gated delta rule's kernel for GPUs that are not here: `python -m faults.compiled_steps`, figures out as JSON.

The entry runs on CPU tensors up to its launch, where the kernel is specialised and compiled instead of run. Needs a process
without Triton's interpreter: `compile_steps` starts one.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import NamedTuple

from faults.mutations import ROOT, TESTS


class Step(NamedTuple):
    """One step to compile: the GPU's compute capability, the model's dims and dtype, and the rows of the largest tree."""

    arch: int
    key_dim: int
    value_dim: int
    rows: int
    dtype: str


def compile_steps(steps: Sequence[Step]) -> list[int]:
    """Return the bytes of shared memory that each step's kernel takes.

    Raises:
        AssertionError: one does not compile; the message ends with what the compiler said.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(TESTS)])
    command = [sys.executable, "-m", "faults.compiled_steps", json.dumps(steps)]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-6000:]
    return json.loads(result.stdout.splitlines()[-1])


def shared_of(step: Step) -> int:
    """Run one step up to its launch and compile what it launches."""
    import torch

    from ops.serving import Spec, Stream, cast, projections
    from ops.specialise import compile_launch
    from treewy.ops import gdn
    from treewy.ops.gdn import kernels
    from treewy.packed import pack
    from treewy.tree import DraftTree

    found = []
    kernels.launch = lambda kernel, grid, *args, **options: found.append(
        compile_launch(kernel, args, options, step.arch)["shared"]
    )
    spec, trees = Spec(1, 2, step.key_dim, step.value_dim), [DraftTree.chain(step.rows - 1)]
    x = cast(projections(spec, trees, seed=0), getattr(torch, step.dtype))
    out = Stream(spec, 1, dtype=torch.float32).buffers(step.rows)
    state, slots = torch.zeros(1, 2, step.value_dim, step.key_dim), torch.zeros(1, dtype=torch.int32)
    gdn.commit_verify(x, state, slots, pack(trees).tables, out=out, backend="triton")
    (shared,) = found
    return shared


if __name__ == "__main__":
    sys.stdout.write("\n" + json.dumps([shared_of(Step(*step)) for step in json.loads(sys.argv[1])]) + "\n")
