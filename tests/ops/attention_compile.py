"""Compiling what attention's entries launch, without a GPU: `python -m ops.attention_compile`, figures out as JSON.

The entries run on CPU tensors up to each launch. There the kernel is specialised as Triton does before a first launch, and
compiled for an architecture instead of run. Needs a process without Triton's interpreter: `compile_all` starts one.
"""

import json
import sys
from typing import NamedTuple

from ops.compiling import run_apart

# Bytes of shared memory that a program may have: RTX 30 to 50 have 99 KB, H100 and H200 227 KB.
SHARED = {80: 99 * 1024, 90: 227 * 1024, 120: 99 * 1024}


class Figures(NamedTuple):
    """What the compiler says of one launch."""

    kernel: str
    case: str
    arch: int
    shared: int
    products: int
    waits: int


def compile_all() -> list[Figures]:
    """Compile every case of `main` in a fresh process."""
    return [Figures(*one) for one in run_apart("ops.attention_compile", None)]


def steps(num_seqs: int, rows: int, max_places: int, head_dim: int, dtype, *, group: int = 8, page: int = 16):
    """Call every entry on pages as a step of this size would."""
    import torch

    from treewy.ops import attention
    from treewy.packed import pack, pack_paths
    from treewy.tree import DraftTree

    tree = pack([DraftTree.chain(rows - 1)] * num_seqs)
    k, v = torch.zeros(2, tree.num_rows, 2, head_dim, dtype=dtype)
    q = torch.zeros(tree.num_rows, 2 * group, head_dim, dtype=dtype)
    pools = torch.zeros(2, 4, page, 2, head_dim, dtype=dtype)
    table = torch.zeros(num_seqs, max_places // page, dtype=torch.int32)
    committed = attention.Paged(*pools, table, torch.zeros(num_seqs, dtype=torch.int32))
    path = pack_paths(tree, [[0]] * num_seqs).tables
    attention.verify_paged(q, k, v, committed, tree.tables, scale=1.0, backend="triton")
    attention.commit_paged(committed, k, v, path, backend="triton")
    attention.compact_paged(committed, tree.tables, path, backend="triton")


def main() -> None:
    """Compile the steps of each case for each architecture, every kernel once per variant."""
    import torch

    from ops.specialise import compile_launch
    from treewy.ops.attention import kernels

    figures, seen = [], set()
    for arch, limit in SHARED.items():
        gpu = kernels.shapes.Gpu(limit, 132)
        kernels.shapes.gpu_of = lambda device, gpu=gpu: gpu
        for case in (
            (1, 4, 4096, 256, torch.bfloat16),
            (32, 16, 4096, 256, torch.bfloat16),
            (32, 4, 4096, 256, torch.bfloat16),
            (32, 64, 4096, 96, torch.bfloat16),
            (2, 4, 1024, 256, torch.float32),
        ):

            def record(kernel, grid, *args, arch=arch, case=case, **options):
                variant = (arch, kernel.fn.__name__, case[3:], *sorted(options.items()))
                if variant not in seen:
                    seen.add(variant)
                    found = compile_launch(kernel, args, options, arch)
                    products, waits = found["group_products"], found["group_waits"]
                    figures.append(Figures(kernel.fn.__name__, str(case), arch, found["shared"], products, waits))

            kernels.launch = record
            steps(*case)
    sys.stdout.write("\n" + json.dumps(figures) + "\n")


if __name__ == "__main__":
    main()
