"""What tree attention on pages passes around."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch

from treewy.errors import CapacityError
from treewy.shapes import Float, Int, Tensor


class Paged(NamedTuple):
    """Committed keys and values in pages: what a serving engine has, all of it on the device.

    Place p of a sequence lies in page `block_tables[b, p // L]` at p % L, L places being one page. Entries past a
    sequence's length are never read.

    Attributes:
        keys: Pool of keys; any strides.
        values: Pool of values; any strides.
        block_tables: Pages of each sequence, in order.
        lengths: Committed places of each sequence; -1 makes the sequence inert.
    """

    keys: Float[Tensor, "X L HK E"]
    values: Float[Tensor, "X L HK E"]
    block_tables: Int[Tensor, "B columns"]
    lengths: Int[Tensor, "B"]

    @property
    def page_len(self) -> int:
        """Places of one page (L)."""
        return self.keys.shape[1]

    @property
    def max_places(self) -> int:
        """Places of the longest sequence that the tables can hold: a bound, known on the host."""
        return self.block_tables.shape[1] * self.page_len


class Workspace(NamedTuple):
    """Scratch of one `verify_paged`: partial results of each row and chunk of its prefix, its tree with the first.

    Layers of a step may share one.

    Attributes:
        sums: Weighted sums of values, not divided.
        tops: Largest raw score.
        totals: Sums of weights.
    """

    sums: Float[Tensor, "parts N HQ E"]
    tops: Float[Tensor, "parts N HQ"]
    totals: Float[Tensor, "parts N HQ"]


def row_spans(committed: Paged, starts: Sequence[int]) -> list[tuple[int, int] | None]:
    """Return where each sequence's tree starts and ends among the rows; None where the sequence is inert."""
    pairs = zip(pairwise(starts), committed.lengths.tolist(), strict=True)
    return [span if length >= 0 else None for span, length in pairs]


def check_places(committed: Paged, seq: int, start: int, stop: int) -> tuple[Int[Tensor, "P"], Int[Tensor, "P"]]:
    """Return page and place in it of a sequence's places from `start` to `stop`, checked on the host.

    Raises:
        CapacityError: a place passes the table's end, or its page is outside the pool.
    """
    if stop > committed.max_places:
        raise CapacityError(
            f"Places must fit the tables' {committed.max_places}; sequence {seq} needs {stop}. Add pages to the table."
        )
    places = torch.arange(start, stop, device=committed.block_tables.device)
    pages = committed.block_tables[seq].long()[places // max(committed.page_len, 1)]
    outside = [page for page in pages.unique().tolist() if not 0 <= page < committed.keys.shape[0]]
    if outside:
        raise CapacityError(
            f"A page must lie in 0..{committed.keys.shape[0] - 1}; sequence {seq} has {outside[0]} within its "
            f"{stop} places. Fill its row of block_tables."
        )
    return pages, places % max(committed.page_len, 1)
