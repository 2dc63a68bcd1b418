"""CUDA C++ at run time: NVRTC compiles a source for the device at hand, the driver loads and launches it.

No compiler and no headers need to be installed: PyTorch's CUDA builds bring NVRTC along.
"""

import ctypes
import importlib.util
import os
from functools import lru_cache
from pathlib import Path

import torch

from treewy.errors import BackendError
from treewy.ops.launch import LAUNCHES

NVRTC_NAMES = ("libnvrtc.so.13", "libnvrtc.so.12")
# CUfunction_attribute: bytes of shared memory that a launch may ask for.
MAX_DYNAMIC_SHARED = 8


class Kernel:
    """One loaded kernel of a compiled source.

    Args:
        source: CUDA C++ without includes.
        name: An `extern "C"` kernel that takes one struct by value.
        macros: Definitions of the variant.
        capability: Compute capability to compile for, as (9, 0).
        shared_bytes: Dynamic shared memory of a block.

    Raises:
        BackendError: it does not compile or load here.
    """

    def __init__(
        self, source: str, name: str, macros: dict[str, int], capability: tuple[int, int], shared_bytes: int
    ) -> None:
        self.name, self._shared_bytes = name, shared_bytes
        cubin = compile_cubin(source, macros, capability)
        module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        _check(_driver().cuModuleLoadData(ctypes.byref(module), cubin), "load a module")
        _check(_driver().cuModuleGetFunction(ctypes.byref(self._function), module, name.encode()), f"find {name}")
        reserved = _driver().cuFuncSetAttribute(self._function, MAX_DYNAMIC_SHARED, ctypes.c_int(shared_bytes))
        _check(reserved, f"reserve {shared_bytes} bytes of shared memory for {name}")

    def launch(self, grid: tuple[int, int], num_threads: int, params: ctypes.Structure) -> None:
        """Launch on the current stream; an empty grid runs nothing."""
        if 0 in grid:
            return
        LAUNCHES[self.name] += 1
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(params))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        sizes = (ctypes.c_uint(grid[0]), ctypes.c_uint(grid[1]), ctypes.c_uint(1), ctypes.c_uint(num_threads))
        launched = _driver().cuLaunchKernel(
            self._function,
            *sizes,
            ctypes.c_uint(1),
            ctypes.c_uint(1),
            ctypes.c_uint(self._shared_bytes),
            stream,
            pointers,
            None,
        )
        _check(launched, f"launch {self.name}")


@lru_cache(maxsize=64)
def _compile(source: str, macros: tuple[tuple[str, int], ...], architecture: str) -> tuple[bytes, str]:
    nvrtc, program = _nvrtc(), ctypes.c_void_p()
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"treewy.cu", 0, None, None)
    options = [f"--gpu-architecture={architecture}", "--std=c++17", "-default-device", "--ptxas-options=-v"]
    options += [f"-D{name}={value}" for name, value in macros]
    array = (ctypes.c_char_p * len(options))(*[option.encode() for option in options])
    failed = nvrtc.nvrtcCompileProgram(program, len(options), array)
    log = _text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program).decode(errors="replace")
    if failed:
        raise BackendError(
            f"A kernel must compile; NVRTC refused it for {architecture} with {dict(macros)}: {log.strip()} "
            "Use backend='triton'."
        )
    return _text(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program), log


def compile_cubin(source: str, macros: dict[str, int], capability: tuple[int, int]) -> bytes:
    """Compile for one compute capability; needs no GPU. Compiled variants are kept for the life of the process.

    Raises:
        BackendError: NVRTC is not there or refuses the source.
    """
    return _compile(source, tuple(sorted(macros.items())), "sm_{}{}".format(*capability))[0]


def compile_log(source: str, macros: dict[str, int], capability: tuple[int, int]) -> str:
    """Return what the compiler says of registers, spills and shared memory."""
    return _compile(source, tuple(sorted(macros.items())), "sm_{}{}".format(*capability))[1]


def _text(size_of, read, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    size_of(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    read(program, buffer)
    return buffer.raw


@lru_cache(maxsize=1)
def _nvrtc() -> ctypes.CDLL:
    folders = [Path(os.environ[name]) / "lib64" for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ]
    found = importlib.util.find_spec("nvidia")
    for root in (found.submodule_search_locations or []) if found else []:
        folders += [Path(root) / "cu13" / "lib", Path(root) / "cuda_nvrtc" / "lib"]
    for name in NVRTC_NAMES:
        for candidate in (*(folder / name for folder in folders), Path(name)):
            # The library opens its builtins by name: they must be loaded before.
            for builtins in candidate.parent.glob("libnvrtc-builtins.so.*") if candidate.is_absolute() else ():
                ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
            try:
                return ctypes.CDLL(str(candidate))
            except OSError:
                continue
    raise BackendError(
        f"CUDA kernels must have NVRTC; none of {', '.join(NVRTC_NAMES)} was found.",
        install="pip install nvidia-cuda-nvrtc",
    )


@lru_cache(maxsize=1)
def _driver() -> ctypes.CDLL:
    torch.cuda.init()
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise BackendError(f"CUDA kernels must have the driver's libcuda; {error}. Use backend='eager'.") from error


def _check(result: int, action: str) -> None:
    if result:
        name = ctypes.c_char_p()
        _driver().cuGetErrorName(result, ctypes.byref(name))
        raise BackendError(
            f"The CUDA driver must {action}; it answered {(name.value or b'?').decode()} ({result}). "
            "Check the device with `treewy doctor`, or use backend='triton'."
        )
