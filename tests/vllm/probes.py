"""What tests look at inside a worker: functions that `engine.Run.probe` names."""

import sys
import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Any


def surroundings(worker: Any) -> Callable[[], dict[str, Any]]:
    """Return what a worker runs in.

    plugin: whether treewy's plugin was loaded. kernels: what runs a Triton kernel that the model runner for GPUs launches.
    annotated, warned: whether a call that breaks an annotation of treewy fails, and a warning of treewy.
    """
    from vllm.v1.worker.gpu.input_batch import _prepare_pos_seq_lens_kernel

    kernel = type(_prepare_pos_seq_lens_kernel)
    return lambda: {
        "plugin": "treewy.vllm_plugin" in sys.modules,
        "kernels": f"{kernel.__module__}.{kernel.__qualname__}",
        "annotated": fails(lambda: import_module("treewy.tree").DraftTree.chain("three")),
        "warned": fails(lambda: warnings.warn_explicit("a warning", UserWarning, "tree.py", 1, module="treewy.tree")),
    }


def fails(call: Callable[[], object]) -> str | None:
    """Return what a call raises, if anything."""
    try:
        call()
    except Exception as error:
        return type(error).__name__
    return None


def hide_the_plugin() -> None:
    """Make the plugin fail to import; not a probe, but something to `prepare`."""
    sys.modules["treewy.vllm_plugin"] = None  # pyright: ignore[reportArgumentType]


def checked(worker: Any) -> Callable[[], dict[str, Any]]:
    """Return what the plugin's checker found so far, and the rows that requests keep."""
    layers = worker.vllm_config.compilation_config.static_forward_context.values()
    shared = next(layer.treewy for layer in layers if getattr(layer, "treewy", None) is not None)
    return lambda: shared.checker.report() | {"kept": shared.memory.lengths.tolist()}
