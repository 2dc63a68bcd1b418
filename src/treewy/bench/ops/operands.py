"""Random tensors of a layer: projections, states, histories and records."""

import math

import torch

from treewy.bench.ops.floors import Heads
from treewy.ops.gdn import History, Projections, Record, Verified
from treewy.shapes import Float, Int, Tensor


def make_state(heads: Heads, num_slots: int, dtype: torch.dtype, draw: torch.Generator) -> Float[Tensor, "S HV V K"]:
    """Return a pool, filled slot by slot: beside a whole one in float32 it might not fit."""
    shape = (heads.num_value_heads, heads.value_dim, heads.key_dim)
    state = torch.empty(num_slots, *shape, dtype=dtype, device=draw.device)
    for slot in state:
        slot.copy_(0.1 * _normal(shape, draw))
    return state


def make_rows(heads: Heads, num_rows: int, dtype: torch.dtype, draw: torch.Generator) -> Projections:
    """Return random operands as a convolution would leave them."""
    num = heads.num_value_heads
    keys, values = (num_rows, heads.num_heads, heads.key_dim), (num_rows, num, heads.value_dim)
    return Projections(
        *(_normal(shape, draw).to(dtype) for shape in (keys, keys, values, (num_rows, num), (num_rows, num))),
        a_log=torch.rand(num, generator=draw, device=draw.device).clamp(min=1e-3).log(),
        dt_bias=_normal((num,), draw),
    )


def make_record(heads: Heads, num_rows: int, state: torch.dtype, io: torch.dtype, draw: torch.Generator) -> Record:
    """Return random records: raw keys, whose norms u carries, and log decays that belong to no path yet."""
    u = _normal((num_rows, heads.num_value_heads, heads.value_dim), draw) / math.sqrt(heads.key_dim)
    k = _normal((num_rows, heads.num_heads, heads.key_dim), draw)
    decay = -torch.rand((num_rows, heads.num_value_heads), generator=draw, device=draw.device) / 4
    return Record(u.to(state), k.to(io), decay, torch.zeros_like(decay))


def make_history(
    heads: Heads,
    num_slots: int,
    capacity: int,
    lengths: Int[Tensor, "S"],
    state: torch.dtype,
    io: torch.dtype,
    draw: torch.Generator,
) -> History:
    """Return histories whose log decays fall row by row; places past the lengths hold rows too."""
    record = make_record(heads, num_slots * capacity, state, io, draw)
    u, k, high, low = (part.unflatten(0, (num_slots, capacity)) for part in record)
    # A head's rows side by side: a program reads those of one head.
    u, k = (part.transpose(1, 2).contiguous().transpose(1, 2) for part in (u, k))
    return History(u, k, high.cumsum(dim=1), low, lengths)


def empty_out(heads: Heads, num_rows: int, state: torch.dtype, io: torch.dtype, device: torch.device | str) -> Verified:
    """Return buffers for what a call gives."""

    def empty(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty(num_rows, *shape, dtype=dtype, device=device)

    num, values = heads.num_value_heads, (heads.num_value_heads, heads.value_dim)
    keys = (heads.num_heads, heads.key_dim)
    record = Record(empty(state, *values), empty(io, *keys), empty(torch.float32, num), empty(torch.float32, num))
    return Verified(empty(io, *values), record)


def _normal(shape: tuple[int, ...], draw: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=draw, device=draw.device)
