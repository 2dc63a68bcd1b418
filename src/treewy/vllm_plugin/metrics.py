"""What workers counted and what they hold, read from outside: by a function that vLLM's `collective_rpc` takes, or by name."""

from typing import Any

from treewy.shapes import Tensor
from treewy.vllm_plugin.state import layers_of


def read(worker: Any) -> dict[str, Any]:
    """Return what a worker counted and holds; nothing where the plugin is not at work. It waits for the device.

    Counts are those of `counts.Numbers`, and `num_drafts` and `num_accepted_tokens` as vLLM calls them. Bytes:
    `state_bytes` of the states and convolution windows of one request, over all layers; `rows_bytes` of all rows that the
    plugin keeps; `pages_bytes` of the memory where states lie, which keys and values share.

    Args:
        worker: vLLM's, which `collective_rpc` passes.
    """
    layers = layers_of(worker.vllm_config)
    if not layers:
        return {}
    shared = layers[0].treewy
    numbers = shared.step.counts.read()
    pages = [part for layer in layers for part in layer.kv_cache]
    counted = numbers._asdict() | {"accept_lengths": list(numbers.accept_lengths)}
    return counted | {
        "num_drafts": numbers.num_drafts,
        "num_accepted_tokens": numbers.num_accepted_tokens,
        "state_bytes": sum(part[0].nbytes for part in pages),
        "rows_bytes": shared.memory.num_bytes,
        "pages_bytes": _storages(pages),
    }


class WorkerExtension:
    """For vLLM's `--worker-extension-cls`: `read` as a method of the worker, which can be called by its name."""

    def treewy_metrics(self) -> dict[str, Any]:
        """See `read`."""
        return read(self)


def _storages(tensors: list[Tensor]) -> int:
    """Return the bytes of what lies behind tensors, shared memory once."""
    return sum({part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in tensors}.values())
