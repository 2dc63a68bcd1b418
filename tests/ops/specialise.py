"""Compiling what an entry launches, specialised as on a GPU, without one: `python -m ops.specialise`, cases in, figures out.

The entry itself runs on CPU tensors up to its launch. There the kernel is bound, specialised and compiled for each
architecture as Triton does before a first launch, and not run. Needs a process without Triton's interpreter.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
SOURCE = TESTS.parent / "src"

# Compute capabilities of the generations that kernels must compile for: A100, H100 and H200, RTX 50.
ARCHS = (80, 90, 120)

# Bytes of shared memory that a program may have on the smallest of them.
SHARED_LIMIT = 99 * 1024


def compile_all(cases: list[dict], archs: tuple[int, ...] = ARCHS) -> list[dict]:
    """Compile what each case launches, in a fresh process; return the figures of each kernel on each architecture."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(SOURCE), str(TESTS)])
    request = json.dumps({"archs": archs, "cases": cases})
    command = [sys.executable, "-m", "ops.specialise"]
    result = subprocess.run(command, input=request, capture_output=True, text=True, env=environment, check=False)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-6000:]
    return json.loads(result.stdout.splitlines()[-1])


def compiled(kernel, args, options, arch: int) -> dict:
    """Specialise and compile one launch for one architecture; return shared memory, registers and stack."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend
    from triton.runtime.jit import create_function_from_signature

    from ops.compiling import usage

    target = GPUTarget("cuda", arch, 32)
    backend = make_backend(target)
    binder = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, rest = binder(*args, **options)
    parsed, signature, constexprs, attributes = kernel._pack_args(backend, rest, bound, specialization, rest)
    source = ASTSource(kernel, signature, constexprs, attributes)
    result = triton.compile(source, target=target, options=parsed.__dict__)
    registers, stack = usage(result.asm["cubin"])
    return {
        "kernel": kernel.fn.__name__,
        "arch": arch,
        "shared": result.metadata.shared,
        "registers": registers,
        "stack": stack,
    }
