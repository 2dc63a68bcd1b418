"""What tests look at inside a worker: functions that `engine.Run.probe` names."""

import sys
from collections.abc import Callable
from typing import Any


def surroundings(worker: Any) -> Callable[[], dict[str, Any]]:
    """Return whether the plugin is there, and what runs a Triton kernel that the model runner for GPUs launches."""
    from vllm.v1.worker.gpu.input_batch import _prepare_pos_seq_lens_kernel

    kernel = type(_prepare_pos_seq_lens_kernel)
    return lambda: {
        "plugin": "treewy.vllm_plugin" in sys.modules,
        "kernels": f"{kernel.__module__}.{kernel.__qualname__}",
    }


def hide_the_plugin() -> None:
    """Make the plugin fail to import; not a probe, but something to `prepare`."""
    sys.modules["treewy.vllm_plugin"] = None  # pyright: ignore[reportArgumentType]
