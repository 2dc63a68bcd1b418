"""Compiling what an entry launches, specialised as on a GPU, without one; and what the serving entry of gdn launches.

The entry itself runs on CPU tensors up to its launch. There the kernel is bound, specialised and compiled for each
architecture as Triton does before a first launch, and not run. Tests call `compile_all`, whose process of its own
(`python -m ops.specialise`, cases in, figures out, as JSON) does not have Triton's interpreter.
"""

import json
import sys
from collections.abc import Sequence
from typing import Any

import torch

from ops.compiling import group_waits, run_apart, usage


def compile_all(cases: Sequence[dict]) -> list[dict]:
    """Compile what each case launches for its `archs`, in a fresh process; return the figures, case by case.

    Raises:
        AssertionError: one does not compile; the message ends with what the compiler said.
    """
    return run_apart("ops.specialise", list(cases))


def launch_of(case: dict) -> tuple[Any, tuple, dict]:
    """Return (kernel, arguments, options) of an entry on a batch of one sequence: the serving entry, or another by name.

    `case` may have, beside `archs`: entry, rows, dims (K, V), dtype, state, exact, and the rows of history and path, 0 for none.
    """
    from treewy.ops import gdn
    from treewy.ops.gdn import kernels, layers_kernels
    from treewy.packed import PathTables, pack, pack_paths
    from treewy.tree import DraftTree

    rows, (key_dim, value_dim) = case.get("rows", 4), case.get("dims", (128, 128))
    dtype, state = (getattr(torch, case.get(name, "bfloat16")) for name in ("dtype", "state"))
    exact = case.get("exact", False)
    u = torch.bfloat16 if state == torch.bfloat16 and not exact else torch.float32
    heads, value_heads = 2, 4

    def kept(*size: int) -> list[torch.Tensor]:
        parts = torch.zeros(*size, value_heads, value_dim, dtype=u), torch.zeros(*size, heads, key_dim, dtype=dtype)
        return [*parts, *(torch.zeros(*size, value_heads) for _ in range(2))]

    q, k = (torch.zeros(rows, heads, key_dim, dtype=dtype) for _ in range(2))
    v = torch.zeros(rows, value_heads, value_dim, dtype=dtype)
    a, b = (torch.zeros(rows, value_heads, dtype=dtype) for _ in range(2))
    x = gdn.Projections(q, k, v, a, b, torch.zeros(value_heads), torch.zeros(value_heads))
    places, pending = case.get("history", 16), case.get("path", 4)
    zeros = torch.zeros(1, dtype=torch.int32)
    prior = gdn.Prior(
        gdn.History(*kept(4, places), torch.zeros(4, dtype=torch.int32)) if places else None,
        gdn.Record(*kept(rows)) if pending else None,
        PathTables(torch.zeros(1, pending, dtype=torch.int32), zeros) if pending else None,
        zeros,
    )
    pool = torch.zeros(4, value_heads, value_dim, key_dim, dtype=state)
    out = gdn.Verified(torch.zeros_like(v), gdn.Record(*kept(rows)))
    tree = pack([DraftTree.chain(rows - 1)])
    calls = {
        "commit_verify": lambda: gdn.commit_verify(
            x, pool, zeros, tree.tables, prior=prior, exact=exact, out=out, backend="triton"
        ),
        "verify": lambda: gdn.verify(
            q, k, v, *torch.zeros(2, rows, value_heads), pool, zeros, tree, history=prior.history, backend="triton"
        ),
        "commit": lambda: gdn.commit(pool, zeros, out.record, pack_paths(tree, [[0]]), backend="triton"),
        "append": lambda: gdn.append(prior.history, zeros, out.record, pack_paths(tree, [[0]]), backend="triton"),
        "fold": lambda: gdn.fold(pool, zeros, prior.history, backend="triton"),
        "append_layers": lambda: gdn.append_layers(
            gdn.StackedHistory(*kept(3, 4, places), prior.history.lengths),
            zeros,
            gdn.StackedRecord(*kept(3, rows)),
            prior.path,
            backend="triton",
        ),
    }
    launches: list = []
    kernels.launch = lambda kernel, grid, *args, **options: launches.append((kernel, args, options))
    layers_kernels.launch = kernels.launch
    calls[case.get("entry", "commit_verify")]()
    return launches[0]


def compile_launch(kernel: Any, args: tuple, options: dict, arch: int) -> dict:
    """Specialise and compile one launch in this process, which must not have Triton in its interpreter."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend
    from triton.runtime.jit import create_function_from_signature

    target = GPUTarget("cuda", arch, 32)
    backend = make_backend(target)
    bound, specialization, rest = create_function_from_signature(kernel.signature, kernel.params, backend)(
        *args, **options
    )
    parsed, signature, constexprs, attributes = kernel._pack_args(backend, rest, bound, specialization, rest)
    source = ASTSource(kernel, signature, constexprs, attributes)
    result = triton.compile(source, target=target, options=parsed.__dict__)
    registers, stack = usage(result.asm["cubin"])
    figures = {"shared": result.metadata.shared, "registers": registers, "stack": stack}
    return {
        "kernel": kernel.fn.__name__,
        "arch": arch,
        **figures,
        "wide_loads": result.asm["ptx"].count("ld.global.v4.b32"),
        "wide_stores": result.asm["ptx"].count("st.global.v4.b32"),
        "group_products": result.asm["ptx"].count("wgmma.mma_async"),
        "group_waits": group_waits(result.asm["cubin"]) if "wgmma" in result.asm["ptx"] else 0,
    }


if __name__ == "__main__":
    everything = [compile_launch(*launch_of(case), arch) for case in json.load(sys.stdin) for arch in case["archs"]]
    sys.stdout.write("\n" + json.dumps(everything) + "\n")
