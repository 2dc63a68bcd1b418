"""Rolling windows of a few layers over steps of draft trees, beside the inputs that each request has accepted."""

from collections.abc import Sequence

import numpy as np
import torch

from treewy.packed import PathTables, TreeTables, pack
from treewy.tree import DraftTree
from treewy.vllm_plugin.conv import tree_conv
from treewy.vllm_plugin.windows import WindowTable, compact_windows

LAYOUTS = ("columns apart", "channels apart", "spread")


def windows_of(layout: str, slots: int, channels: int, columns: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """Return a view [S, C, X] of NaNs: vLLM's two layouts, and pages wider than their windows."""
    if layout == "columns apart":
        return torch.full((slots, columns, channels), torch.nan, dtype=dtype, device=device).transpose(1, 2)
    if layout == "channels apart":
        return torch.full((slots, channels, columns), torch.nan, dtype=dtype, device=device)
    pages = torch.full((slots, columns + 2, 2 * channels + 3), torch.nan, dtype=dtype, device=device)
    return pages[:, 1 : columns + 1, 1 : 2 * channels + 1 : 2].transpose(1, 2)


def tables_of(
    trees: Sequence[DraftTree], *, padding: int = 0, max_rows: int | None = None, device: str = "cpu"
) -> TreeTables:
    """Return tables of trees, of no rows where None, with `padding` inert rows behind them."""
    packed = pack([tree for tree in trees if tree is not None])
    tables = pack([tree for tree in trees if tree is not None], num_rows=packed.num_rows + padding).tables
    sizes = [0 if tree is None else tree.num_rows for tree in trees]
    owners = np.repeat(np.arange(len(trees)), sizes)
    seq_of_row = torch.full((tables.num_rows,), -1, dtype=torch.int32)
    seq_of_row[: len(owners)] = torch.from_numpy(owners)
    cu_rows = torch.tensor([0, *np.cumsum(sizes)], dtype=torch.int32)
    parts = (tables.parents, cu_rows, seq_of_row, tables.depth, tables.ancestors)
    return TreeTables(*(part.to(device) for part in parts), tables.max_rows if max_rows is None else max_rows)


def paths_of(paths: Sequence[Sequence[int]], places: int, device: str = "cpu", *, fill: int = 2**30) -> PathTables:
    """Return local paths as tables; behind each lie rows that nobody accepted."""
    rows = torch.full((len(paths), places), fill, dtype=torch.int32)
    for seq, path in enumerate(paths):
        rows[seq, : len(path)] = torch.tensor(path, dtype=torch.int32)
    lengths = torch.tensor([len(path) for path in paths], dtype=torch.int32)
    return PathTables(rows.to(device), lengths.to(device))


def convolved(history: np.ndarray, weight: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
    """Return the newest output of a causal convolution with SiLU over [.., C] inputs, in float64."""
    y = (history[-weight.shape[1] :] * weight.T).sum(axis=0) + (0 if bias is None else bias)
    return y / (1 + np.exp(-y))


def wide(x: torch.Tensor) -> np.ndarray:
    """Return numbers in float64 on the host."""
    return x.detach().cpu().double().numpy()


class Requests:
    """Requests that each have a window in every layer, and the float64 inputs that they accepted.

    Args:
        backend: Of what is tested.
        slots: Window of each request, for each layer.
    """

    def __init__(
        self,
        backend: str,
        slots: Sequence[Sequence[int]],
        *,
        width: int = 4,
        channels: int = 6,
        max_rows: int = 12,
        layout: str = "columns apart",
        dtype: torch.dtype = torch.float32,
        with_bias: bool = True,
        device: str = "cpu",
        seed: int = 0,
    ) -> None:
        self.random, self.width, self.channels = torch.Generator().manual_seed(seed), width, channels
        self.backend, self.slots, self.device, self.dtype = backend, slots, device, dtype
        self.max_rows = max_rows
        num_slots = max(max(own, default=0) for own in slots) + 2
        shape = num_slots, channels, width - 2 + max_rows
        self.windows = [windows_of(layout, *shape, dtype, device) for _ in slots]
        self.table = WindowTable(self.windows)
        self.weight, self.bias = self.normal(channels, width), self.normal(channels) if with_bias else None
        self.accepted = [1] * len(slots[0])
        # Of each layer and request: what came before, as a prompt leaves it.
        self.known = [[self.normal(width - 1, channels) for _ in own] for own in slots]
        for window, own, known in zip(self.windows, slots, self.known, strict=True):
            for slot, inputs in zip(own, known, strict=True):
                window[slot, :, : width - 1] = inputs.T

    def normal(self, *shape: int) -> torch.Tensor:
        """Return random numbers."""
        return torch.randn(*shape, generator=self.random).to(self.dtype).to(self.device)

    def step(
        self,
        requests: Sequence[int],
        trees: Sequence[DraftTree | None],
        paths: Sequence[Sequence[int]],
        *,
        padding: int = 0,
    ) -> list[tuple[torch.Tensor, np.ndarray]]:
        """Run requests' trees and accept paths; return outputs and float64's, of each layer. Checks what is written.

        `padding` inert sequences and rows come behind.
        """
        shapes = [*trees, *[None] * padding]
        tree = tables_of(shapes, padding=padding, max_rows=self.max_rows, device=self.device)
        accepted = torch.tensor([*[self.accepted[one] for one in requests], *[-(10**6)] * (padding + 1)])
        path = paths_of([*paths, *[[0, 3]] * padding], self.max_rows, self.device)
        outputs, pools = [], []
        for window, own, known in zip(self.windows, self.slots, self.known, strict=True):
            slots = torch.tensor([*[own[one] for one in requests], *[-1] * padding], device=self.device)
            pools.append(slots)
            x = self.normal(tree.num_rows, self.channels)
            x[tree.seq_of_row < 0] = torch.nan
            accepted_here = torch.stack([accepted, accepted + 3], dim=1).to(self.device)[:, 0]  # a column of a table
            y = tree_conv(x, window, self.weight, self.bias, slots, accepted_here, tree, backend=self.backend)
            outputs.append((y, self._defined(x, requests, shapes[: len(requests)], known)))
            starts = tree.cu_rows.tolist()
            for seq, one in enumerate(requests):
                if trees[seq] is not None:
                    rows = [starts[seq] + row for row in paths[seq]]
                    known[one] = torch.cat([known[one], x[rows]])
        compact_windows(self.table, torch.stack(pools), path, self.width, backend=self.backend)
        for seq, one in enumerate(requests):
            if trees[seq] is not None:
                self.accepted[one] = len(paths[seq])
        self._check_windows()
        return outputs

    def _defined(self, x, requests, trees, known) -> np.ndarray:
        y, start = np.zeros(x.shape), 0
        weight, bias = wide(self.weight), None if self.bias is None else wide(self.bias)
        for one, tree in zip(requests, trees, strict=True):
            for row in range(0 if tree is None else tree.num_rows):
                path = [start + node for node in tree.path(row)]
                y[start + row] = convolved(np.concatenate([wide(known[one]), wide(x[path])]), weight, bias)
            start += 0 if tree is None else tree.num_rows
        return y

    def _check_windows(self) -> None:
        """Columns 0 to W - 3 + m are the newest inputs, bit for bit, and nothing lies in a slot that is nobody's."""
        for window, own, known in zip(self.windows, self.slots, self.known, strict=True):
            for slot, inputs, accepted in zip(own, known, self.accepted, strict=True):
                count = self.width - 2 + accepted
                assert torch.equal(window[slot, :, :count], inputs[len(inputs) - count :].T)
            others = [slot for slot in range(len(window)) if slot not in own]
            assert window[others].isnan().all()
