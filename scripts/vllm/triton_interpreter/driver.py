"""The half of a backend that knows devices; here there is the host."""

from collections.abc import Callable

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase


class InterpreterDriver(DriverBase):
    """Stands for the CPU."""

    @classmethod
    def is_active(cls) -> bool:
        """Say that the device is there."""
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        """Return a type's name as it is: no launcher is compiled."""
        return ty

    def get_current_target(self) -> GPUTarget:
        """Return a target that only the compiler beside accepts."""
        return GPUTarget("cpu", 0, 1)

    def get_active_torch_device(self) -> torch.device:
        """Return where tensors are."""
        return torch.device("cpu")

    def get_benchmarker(self) -> Callable[..., list[float]]:
        """Return a stand-in that finds all candidates of an autotuner equally fast, so that the first is taken."""
        return lambda function, quantiles=(0.5,), **options: [1.0] * len(quantiles)
