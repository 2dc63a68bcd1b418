"""After acceptance: what the rows of a tree wrote moves to where a chain's rows would have written it.

From there on nobody needs to know of trees: keys and values of accepted rows lie at consecutive places, their inputs at
consecutive columns of the convolution's windows.
"""

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch

from treewy.ops import attention
from treewy.ops.attention import Paged
from treewy.packed import PathTables
from treewy.shapes import Int, Tensor
from treewy.vllm_plugin.trees import Trees
from treewy.vllm_plugin.windows import WindowTable, compact_windows


class Compaction:
    """Moves accepted rows in the caches of one engine.

    Args:
        vllm: The compat module of the installed vLLM.
        vllm_config: The engine's configuration.
        layers: The plugin's layers.
    """

    def __init__(self, vllm: ModuleType, vllm_config: Any, layers: Sequence[Any]) -> None:
        """Know the caches: they stand by now."""
        self.layers = layers
        everything = vllm_config.compilation_config.static_forward_context
        self._pages = {
            name: vllm.pages_of(layer.kv_cache, layer.impl.head_size)
            for name, layer in everything.items()
            if getattr(getattr(layer, "impl", None), "treewy_drafts", None) is False
        }
        self._windows = WindowTable([vllm.window_of(layer) for layer in layers])
        self._width = layers[0].conv_kernel_size

    def run(self, trees: Trees, path: PathTables, pages: Sequence[Int[Tensor, "B"]]) -> None:
        """Move a step's accepted rows.

        Args:
            trees: The step's trees.
            path: Its accepted rows, packed.
            pages: The page of each of the plugin's layers for each tree.
        """
        self._move_keys(trees, path)
        assert trees.accepted is not None
        local = PathTables(trees.accepted.local, trees.accepted.lengths)
        compact_windows(self._windows, torch.stack(list(pages)), local, self._width)

    def _move_keys(self, trees: Trees, path: PathTables) -> None:
        count = len(path.lengths)
        for name, (keys, values) in self._pages.items():
            tree, lengths, table, _ = trees.of_layer[name]
            tree = tree._replace(cu_rows=tree.cu_rows[: count + 1])
            committed = Paged(keys, values, table[:count], lengths[:count])
            attention.compact_paged(committed, tree, path, backend="triton" if keys.is_cuda else "eager")
