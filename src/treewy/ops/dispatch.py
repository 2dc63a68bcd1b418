"""The only place that chooses a backend."""

import importlib
from types import ModuleType
from typing import NamedTuple

import torch

from treewy.errors import BackendError

BACKENDS = ("eager", "reference", "triton", "cuda")


class Implementations(NamedTuple):
    """The sibling implementations of one op.

    Attributes:
        eager: PyTorch, on every device.
        reference: NumPy, the definition.
        kernels: Name of the module with the Triton kernels, which is imported when asked for; None where there is none.
        cuda: The same of the CUDA C++ kernels.
    """

    eager: ModuleType
    reference: ModuleType
    kernels: str | None = None
    cuda: str | None = None


def select(op: str, implementations: Implementations, backend: str | None) -> ModuleType:
    """Return the implementation of `op` that `backend` names; None means eager, which runs everywhere.

    Raises:
        BackendError: no backend of that name, or it cannot run here. There is no silent fallback.
    """
    name = "eager" if backend is None else backend
    if name not in BACKENDS:
        raise BackendError(
            f"A backend must be one of {', '.join(BACKENDS)}; {op} was asked for {backend!r}. "
            "Leave backend out to get the default."
        )
    if name == "triton":
        return _load(op, name, implementations.kernels)
    if name == "cuda":
        return _load(op, name, implementations.cuda)
    return getattr(implementations, name)


def _load(op: str, backend: str, module: str | None) -> ModuleType:
    if module is None:
        raise BackendError(f"A backend must have the op; {op} has no {backend} kernel. Use backend='eager'.")
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "triton":
            raise
        raise BackendError(
            f"Triton kernels must have Triton; {op} was asked for backend 'triton' and it is not installed.",
            install="pip install triton",
        ) from error


def compute_dtype(*operands: torch.Tensor) -> torch.dtype:
    """Return the dtype an op computes in: float64 if any operand is, else float32."""
    return torch.float64 if any(x.dtype == torch.float64 for x in operands) else torch.float32
