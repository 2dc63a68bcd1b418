"""Launching kernels: what every launch checks, and how many there were."""

import os
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from treewy.errors import BackendError, UnsupportedError

# Launches by kernel name, so that a test can tell that the kernel ran and not something else.
LAUNCHES: Counter[str] = Counter()


def interpreted() -> bool:
    """Return whether Triton kernels run in its interpreter, on the CPU; decided when triton is first imported."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Run a kernel on a grid; an empty grid runs nothing.

    Raises:
        BackendError: the operands are not where kernels run.
    """
    if 0 in grid:
        return
    first = next(x for x in args if isinstance(x, torch.Tensor))
    if not (first.is_cuda or interpreted()):
        raise BackendError(
            f"Triton kernels must run on a GPU, or in Triton's interpreter; got operands on {first.device} and "
            "TRITON_INTERPRET is not 1. Use backend='eager' on this device."
        )
    LAUNCHES[name_of(kernel)] += 1
    if first.is_cuda:
        with torch.cuda.device(first.device):
            kernel[grid](*args, **options)
    else:
        _allow_loaded_loop_bounds()
        kernel[grid](*args, **options)


@cache
def _allow_loaded_loop_bounds() -> None:
    """Let interpreted kernels loop to a bound that they loaded: the interpreter holds scalars in arrays of one element.

    It makes an integer of one with `int(array)`, which NumPy 2.4 refuses for arrays that are not 0-dimensional.
    """
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor: type, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda scalar: scalar.handle.data.item())

    interpreter._patch_lang_tensor = patched


def name_of(kernel: Any) -> str:
    """Return the name of a kernel's function."""
    inner: Callable = getattr(kernel, "fn", kernel)
    return inner.__name__


def refuse_interpreted_bfloat16(*operands: torch.Tensor) -> None:
    """Refuse bfloat16 matrix products in the interpreter: it computes them wrongly, and says nothing.

    Raises:
        UnsupportedError: an operand is bfloat16 and kernels are interpreted.
    """
    if interpreted() and any(x.dtype == torch.bfloat16 for x in operands):
        raise UnsupportedError(
            "Triton's interpreter must not be given bfloat16 matrix products, which it computes wrongly; got bfloat16 "
            "operands. Use float16 or float32 there."
        )
