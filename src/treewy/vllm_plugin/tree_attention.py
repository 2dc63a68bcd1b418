"""Attention over draft trees, as a backend of vLLM: the platform's own for prompts and chains, ours for rows of trees.

On a GPU it is FlashAttention's, on a CPU vLLM's. There keys and values lie in pages of an order of their own, so with
trees everything runs on ours, prompts as chains.
"""

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch

from treewy.ops import attention
from treewy.ops import tree as trees
from treewy.ops.attention import Paged
from treewy.packed import TreeTables
from treewy.shapes import Tensor
from treewy.vllm_plugin.trees import Attended

# Where vLLM finds the class: it takes a path, not a class.
PATH = f"{__name__}.Backend"
BACKEND = "Backend"
_made: dict[str, type] = {}


@dataclass
class LevelRows:
    """Stands in for vLLM's metadata where the drafter runs rows of a tree whose keys are nowhere else.

    Attributes:
        attended: The rows.
    """

    attended: Attended


def __getattr__(name: str) -> type:
    """Make the backend of the installed vLLM when it is first asked for."""
    if name != BACKEND:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name not in _made:
        from treewy.vllm_plugin import compat

        make = on_gpu if compat.platform() == "cuda" else on_cpu
        _made[name] = make(compat.names())
    return _made[name]


def register(vllm: ModuleType, *, on_cpu: bool) -> None:
    """Have vLLM take the backend for layers that are made from now on.

    On a GPU it is the one that configurations call CUSTOM. A CPU knows one only, which this one stands in for.

    Args:
        vllm: The compat module of the installed vLLM.
        on_cpu: Whether vLLM runs on a CPU.
    """
    kinds = vllm.AttentionBackendEnum
    vllm.register_backend(kinds.CPU_ATTN if on_cpu else kinds.CUSTOM, PATH)
    if on_cpu:
        vllm.forget_backends()


def on_gpu(vllm: ModuleType) -> type:
    """Return the backend of a GPU.

    Args:
        vllm: The compat module of the installed vLLM.
    """
    base = vllm.flash_attention()

    class Builder(base.get_builder_cls()):
        """Says beside FlashAttention's metadata where the step's trees lie."""

        supports_update_block_table = False  # another group's metadata would bring its pages along

        def build(self, *args: Any, **kwargs: Any) -> Any:
            metadata = super().build(*args, **kwargs)
            metadata.treewy = _attended(self, metadata)
            return metadata

    class Implementation(base.get_impl_cls()):
        """Runs rows of trees through our kernel, and all others through FlashAttention's."""

        treewy_drafts = False

        def forward(
            self,
            layer: Any,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            kv_cache: Tensor,
            attn_metadata: Any,
            output: Tensor,
            *args: Any,
            **kwargs: Any,
        ) -> Tensor:
            attended = _asked(self, attn_metadata)
            if attended is None or attended.rows is not None:
                super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs)
            if attended is not None:
                pages = vllm.pages_of(kv_cache, self.head_size)
                _attend(query, key, value, pages, attended, self.scale, output, "triton")
            return output

    return _named(base, Builder, Implementation)


def on_cpu(vllm: ModuleType) -> type:
    """Return the backend of a CPU; for engines without trees it does what its base does.

    Args:
        vllm: The compat module of the installed vLLM.
    """
    base = vllm.cpu_attention()

    class Builder(base.get_builder_cls()):
        """Makes every row of the batch one of a tree: those of prompts are chains."""

        supports_update_block_table = False

        def build(self, *args: Any, **kwargs: Any) -> Any:
            metadata = super().build(*args, **kwargs)
            shared = shared_of(self.vllm_config)
            metadata.treewy = _attended(self, metadata)
            metadata.chains = None if shared is None or shared.trees is None else _chains(metadata)
            return metadata

    class Implementation(base.get_impl_cls()):
        """Keeps keys and values in pages of a plain order, and attends to them in PyTorch."""

        treewy_drafts = False
        treewy_plain: bool | None = None

        def do_kv_cache_update(
            self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
        ) -> None:
            if not self._is_plain(layer):
                return super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
            keys, values = vllm.pages_of(kv_cache, self.head_size)
            live = (slot_mapping >= 0).nonzero()[:, 0]
            page, place = slot_mapping[live] // keys.shape[1], slot_mapping[live] % keys.shape[1]
            keys[page, place], values[page, place] = key[live], value[live]
            return None

        def forward(
            self,
            layer: Any,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            kv_cache: Tensor,
            attn_metadata: Any,
            output: Tensor,
            *args: Any,
            **kwargs: Any,
        ) -> Tensor:
            if attn_metadata is None or not self._is_plain(layer):
                return super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs)
            pages, attended = vllm.pages_of(kv_cache, self.head_size), _asked(self, attn_metadata)
            if attended is None or attended.rows is not None:
                _attend(query, key, value, pages, attn_metadata.chains, self.scale, output, "eager")
            if attended is not None:
                _attend(query, key, value, pages, attended, self.scale, output, "eager")
            return output

        def _is_plain(self, layer: Any) -> bool:
            if self.treewy_plain is None:
                shared = shared_of(vllm.get_forward_context().no_compile_layers)
                self.treewy_plain = shared is not None and shared.trees is not None
            return self.treewy_plain

    return _named(base, Builder, Implementation)


def _named(base: type, builder: type, implementation: type) -> type:
    class Backend(base):
        """Names the two above to vLLM."""

        @staticmethod
        def get_name() -> str:
            return base.get_name() if base.get_name() == "CPU_ATTN" else "CUSTOM"

        @staticmethod
        def get_builder_cls() -> type:
            return builder

        @staticmethod
        def get_impl_cls() -> type:
            return implementation

    Backend.__module__, Backend.__qualname__ = __name__, BACKEND
    return Backend


def shared_of(config_or_layers: Any) -> Any:
    """Return what the plugin's layers share, None in an engine without any.

    Args:
        config_or_layers: vLLM's configuration of the engine, or its layers by name.
    """
    compilation = getattr(config_or_layers, "compilation_config", None)
    layers = config_or_layers if compilation is None else compilation.static_forward_context
    return next((layer.treewy for layer in layers.values() if getattr(layer, "treewy", None) is not None), None)


def _attended(builder: Any, metadata: Any) -> Attended | None:
    shared = shared_of(builder.vllm_config)
    if shared is None or shared.trees is None:
        return None
    return shared.trees.attended(metadata.block_table, builder.layer_names)


def _asked(implementation: Any, metadata: Any) -> Attended | None:
    """Return the rows of trees of a call, None if it has none: the drafter runs what was accepted as a chain."""
    if isinstance(metadata, LevelRows):
        return metadata.attended
    return None if implementation.treewy_drafts else getattr(metadata, "treewy", None)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pages: tuple[Tensor, Tensor],
    attended: Attended,
    scale: float,
    output: Tensor,
    backend: str,
) -> None:
    tree, lengths, table, rows = attended
    q, k, v = (x[: tree.num_rows] if rows is None else x[rows] for x in (query, key, value))
    out = output.view(output.shape[0], *query.shape[1:])
    committed = Paged(*pages, table, lengths)
    if rows is None:
        attention.verify_paged(q, k, v, committed, tree, scale=scale, out=out[: tree.num_rows], backend=backend)
    else:
        out[rows] = attention.verify_paged(q, k, v, committed, tree, scale=scale, backend=backend)


def _chains(metadata: Any) -> Attended:
    """Return every request of a batch as a chain."""
    bounds = metadata.query_start_loc.tolist()
    sizes = np.diff(bounds)
    parents = np.concatenate([np.arange(size, dtype=np.int32) - 1 for size in sizes] or [np.zeros(0, np.int32)])
    tree = _tables(parents, np.asarray(bounds, np.int32), int(sizes.max(initial=0)))
    lengths = metadata.seq_lens[: len(sizes)] - torch.from_numpy(sizes).to(metadata.seq_lens.dtype)
    return Attended(tree, lengths.clamp(min=0).to(torch.int32), metadata.block_table[: len(sizes)], None)


def _tables(parents: np.ndarray, bounds: np.ndarray, max_rows: int) -> TreeTables:
    return trees.tables(torch.from_numpy(parents), torch.from_numpy(bounds), max_rows=max_rows, backend="eager")
