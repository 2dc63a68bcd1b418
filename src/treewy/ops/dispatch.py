"""The only place that chooses a backend."""

from types import ModuleType
from typing import NamedTuple

import torch

from treewy.errors import BackendError

BACKENDS = ("eager", "reference")


class Implementations(NamedTuple):
    """The sibling implementations of one op."""

    eager: ModuleType
    reference: ModuleType


def select(op: str, implementations: Implementations, backend: str | None) -> ModuleType:
    """Return the implementation of `op` that `backend` names; None means eager, which runs everywhere.

    Raises:
        BackendError: no backend of that name. There is no silent fallback.
    """
    name = "eager" if backend is None else backend
    if name not in BACKENDS:
        raise BackendError(
            f"A backend must be one of {', '.join(BACKENDS)}; {op} was asked for {backend!r}. "
            "Leave backend out to get the default."
        )
    return getattr(implementations, name)


def compute_dtype(*operands: torch.Tensor) -> torch.dtype:
    """Return the dtype an op computes in: float64 if any operand is, else float32."""
    return torch.float64 if any(x.dtype == torch.float64 for x in operands) else torch.float32
