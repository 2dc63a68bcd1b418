"""Compiling kernels for GPUs that are not here: what each needs, without running it.

Tests import `Case` and `compile_all`. A process of its own does the work (`python -m ops.compiling`, cases in, results
out, as JSON): this one may have put Triton into its interpreter, which it keeps for good.
"""

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

# Compute capabilities of the generations that kernels must compile for: A100, H100 and H200, RTX 50.
ARCHS = (80, 90, 120)

# Bytes of shared memory that a program may have on the smallest of them.
SHARED_LIMIT = 99 * 1024

TESTS = Path(__file__).parents[1]
SOURCE = TESTS.parent / "src"


class Case(NamedTuple):
    """One kernel, specialised as a launch would.

    Attributes:
        kernel: Where it is, as "treewy.ops.conv.kernels:name".
        signature: Type of each argument known at run time, in any order: "*bf16", "*i32", "i32", "i64", "fp32". An
            ending ":16" says that the pointer or integer is divisible by 16, as Triton finds of most at a launch.
        constexprs: Everything else: `tl.constexpr` arguments, pointers that are None, strides that are 1. A string
            "tl.float32" is that dtype.
        options: num_warps, num_stages.
    """

    kernel: str
    signature: dict[str, str]
    constexprs: dict[str, Any]
    options: dict[str, int] = {}  # noqa: RUF012, never written

    @property
    def name(self) -> str:
        """What tells a case from others of its kernel, for test ids."""
        types = {kind.removesuffix(":16") for kind in self.signature.values() if kind.startswith("*")}
        values = [f"{key}={value}" for key, value in self.constexprs.items() if value not in (None, 1)]
        return "-".join([self.kernel.rpartition(":")[2], *sorted(types), *values]).replace("*", "")


class Compiled(NamedTuple):
    """What the compiler says of one kernel on one architecture."""

    case: str
    arch: int
    shared: int
    registers: int
    stack: int
    wide_loads: int


def compile_all(cases: Sequence[Case], archs: Sequence[int] = ARCHS) -> list[Compiled]:
    """Compile every case for every architecture, in a fresh process without the interpreter.

    Raises:
        AssertionError: one does not compile; the message ends with what the compiler said.
    """
    request = {"archs": list(archs), "cases": [case._asdict() for case in cases]}
    return [Compiled(*one) for one in run_apart("ops.compiling", request)]


def run_apart(module: str, request: Any) -> Any:
    """Run a module without the interpreter, in a fresh process: JSON in, JSON out, on the last line that it writes.

    Raises:
        AssertionError: it fails; the message ends with what it said.
    """
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(SOURCE), str(TESTS)])
    command, asked = [sys.executable, "-m", module], json.dumps(request)
    result = subprocess.run(command, input=asked, capture_output=True, text=True, env=environment, check=False)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-6000:]
    return json.loads(result.stdout.splitlines()[-1])


def compile_one(case: Case, arch: int) -> Compiled:
    """Compile in this process, which must not have Triton in its interpreter."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module, _, name = case.kernel.partition(":")
    kernel = getattr(importlib.import_module(module), name)
    missing = set(kernel.arg_names) ^ (set(case.signature) | set(case.constexprs))
    assert not missing, f"{case.kernel} and its case differ in {sorted(missing)}"
    signature = {arg: case.signature.get(arg, "constexpr").removesuffix(":16") for arg in kernel.arg_names}
    divisible = [place for place, arg in enumerate(kernel.arg_names) if case.signature.get(arg, "").endswith(":16")]
    attributes = {(place,): [["tt.divisibility", 16]] for place in divisible}
    constants = {key: _value(value) for key, value in case.constexprs.items()}
    source = ASTSource(kernel, signature, constants, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=case.options)
    wide_loads = compiled.asm["ptx"].count("ld.global.v4.b32")
    return Compiled(case.name, arch, compiled.metadata.shared, *usage(compiled.asm["cubin"]), wide_loads)


def _value(value: Any) -> Any:
    if isinstance(value, str) and value.startswith("tl."):
        import triton.language as tl

        return getattr(tl, value.removeprefix("tl."))
    return value


def usage(cubin: bytes) -> tuple[int, int]:
    """Return (registers per thread, bytes of stack per thread; spilled registers lie there)."""
    text = _dump(cubin, "-res-usage")
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found, text
    return int(found[1]), int(found[2])


def group_waits(cubin: bytes) -> int:
    """Return how often a group of warps waits for its tensor-core products, as the code stands."""
    return _dump(cubin, "-sass").count("WARPGROUP.DEPBAR")


def _dump(cubin: bytes, what: str) -> str:
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        return subprocess.run([tool, what, file.name], capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    asked = json.load(sys.stdin)
    results = [compile_one(Case(**case), arch) for case in asked["cases"] for arch in asked["archs"]]
    sys.stdout.write("\n" + json.dumps(results) + "\n")
