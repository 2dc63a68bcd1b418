"""How far states are from the float64 walk: after one deep chain, and after thousands of short steps.

Errors are relative Frobenius errors of one head's state; heads are draws, and what is reported is their geometric mean.
Everything is held against other ways to compute the same on the same quantised operands.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from treewy.bench.ops.correctness import walked
from treewy.bench.ops.floors import QWEN_35B, Heads
from treewy.bench.ops.variants import Entry
from treewy.ops import gdn
from treewy.ops.gdn import Prior, Projections
from treewy.packed import pack, pack_paths
from treewy.shapes import Float, Tensor
from treewy.tree import DraftTree

# 64 rows with the root: as many as the kernels of every backend take.
DEPTH = 63
CORRELATION = 0.98
# What makes a gate 1 and a write strength 2, also in bfloat16.
SHUT, OPEN = -100.0, 20.0
KEYS = ("ordinary", "hard")


@dataclass(frozen=True)
class Chain:
    """A chain that is verified and committed whole.

    Attributes:
        x: Its rows, in bfloat16.
        state: The committed state before it, in bfloat16 numbers held in float32.
        exact: The state behind it by the float64 walk.
    """

    x: Projections
    state: Float[Tensor, "HV V K"]
    exact: Float[Tensor, "HV V K"]


class Operands(NamedTuple):
    """Finished operands of a chain, heads first, value heads only."""

    k: Float[Tensor, "HV T K"]
    v: Float[Tensor, "HV T V"]
    log_decay: Float[Tensor, "HV T"]
    beta: Float[Tensor, "HV T 1"]
    state: Float[Tensor, "HV V K"]


def make_chain(
    keys: str, device: torch.device | str, *, depth: int = DEPTH, heads: Heads = QWEN_35B, seed: int = 0
) -> Chain:
    """Return a chain of `depth` rows below its root: ordinary, or with nearly equal keys, gates of 1 and beta 2."""
    draw = torch.Generator(device).manual_seed(seed)
    x = random_rows(heads, depth + 1, draw)
    if keys == "hard":
        common = torch.randn(1, heads.num_heads, heads.key_dim, generator=draw, device=device)
        k = CORRELATION**0.5 * common + (1 - CORRELATION) ** 0.5 * x.k
        strong = {"a": torch.full_like(x.a, SHUT), "b": torch.full_like(x.b, OPEN), "beta_scale": 2.0}
        x = x._replace(k=k.to(x.k.dtype), **strong)
    shape = (heads.num_value_heads, heads.value_dim, heads.key_dim)
    state = (0.1 * torch.randn(shape, generator=draw, device=device)).bfloat16().float()
    return Chain(x, state, walked(x, state, range(-1, depth))[1][-1])


def random_rows(heads: Heads, num_rows: int, draw: torch.Generator) -> Projections:
    """Return bfloat16 rows with ordinary gates: decays of some percent a row."""
    num = heads.num_value_heads

    def normal(*shape: int) -> Tensor:
        return torch.randn(num_rows, *shape, generator=draw, device=draw.device).bfloat16()

    q, k = (normal(heads.num_heads, heads.key_dim) for _ in range(2))
    zero = torch.zeros(num, device=draw.device)
    return Projections(q, k, normal(num, heads.value_dim), normal(num), normal(num), zero, zero - 2.5)


def committed(entry: Entry, backend: str, chain: Chain, state: torch.dtype, *, exact: bool) -> Float[Tensor, "HV V K"]:
    """Return the state that the kernels commit for a chain: verified by one call, committed by the next."""
    device, num_rows = chain.state.device, len(chain.x.v)
    pool, slots = chain.state[None].to(state, copy=True), torch.zeros(1, dtype=torch.int32, device=device)
    tree = pack([DraftTree.chain(num_rows - 1)], device=device)
    first = entry(chain.x, pool, slots, tree.tables, exact=exact, backend=backend)
    assert isinstance(first.record, gdn.Record)
    path = pack_paths(tree, [range(num_rows)])
    prior = Prior(None, first.record, path.tables, torch.ones(1, dtype=torch.int32, device=device))
    next_row = chain.x._replace(**{name: getattr(chain.x, name)[:1] for name in ("q", "k", "v", "a", "b")})
    root = pack([DraftTree.chain(0)], device=device)
    entry(next_row, pool, slots, root.tables, prior=prior, exact=exact, backend=backend)
    return pool[0]


def yardsticks(chain: Chain) -> dict[str, Float[Tensor, "HV V K"]]:
    """Return the state by other ways, in float32 unless said."""
    x = _operands(chain)
    couplings, residual = _system(x)
    return {
        "fp32 substitution": _behind(x, _substitute(couplings, residual)),
        "fp32 inverse applied in bf16": _behind(x, _inverse_in_bfloat16(couplings, residual)),
        "sequential fp32": _walk(chain, torch.float32),
        "sequential bf16 state": _walk(chain, torch.bfloat16).float(),
    }


def head_errors(got: Tensor, exact: Tensor) -> Tensor:
    """Return each head's relative Frobenius error."""
    return (got.double() - exact).flatten(1).norm(dim=1) / exact.flatten(1).norm(dim=1)


def mean_error(got: Tensor, exact: Tensor) -> float:
    """Return the geometric mean over the heads."""
    return float(head_errors(got, exact).clamp(min=1e-30).log().mean().exp())


def _operands(chain: Chain) -> Operands:
    """Return what the closed form takes, rounded to float32 once."""
    x = chain.x
    g, beta = gdn.finish_gates(x.a, x.b, x.a_log, x.dt_bias, beta_scale=x.beta_scale)
    k = gdn.l2_normalise(x.k).repeat_interleave(x.v.shape[1] // x.k.shape[1], dim=1)
    log_decay = g.double().cumsum(dim=0).float()
    return Operands(k.transpose(0, 1), x.v.float().transpose(0, 1), log_decay.T, beta.T[..., None], chain.state)


def _system(x: Operands) -> tuple[Float[Tensor, "HV T T"], Float[Tensor, "HV T V"]]:
    """Return couplings and right-hand sides.

    Source: eqs. 5 and 7 of docs/theory.md.
    """
    ratios = (x.log_decay[:, :, None] - x.log_decay[:, None, :]).tril(-1).exp()
    couplings = (x.beta * ratios * (x.k @ x.k.transpose(1, 2))).tril(-1)
    read = x.k @ x.state.transpose(1, 2)
    return couplings, x.beta * (x.v - x.log_decay.exp()[..., None] * read)


def _substitute(couplings: Tensor, residual: Tensor) -> Tensor:
    u = residual.clone()
    for row in range(1, residual.shape[1]):
        u[:, row] -= (couplings[:, row : row + 1, :row] @ u[:, :row])[:, 0]
    return u


def _inverse_in_bfloat16(couplings: Tensor, residual: Tensor) -> Tensor:
    """Return the inverse by substitution in float32, times the right-hand sides, both rounded, sums in float32."""
    size = couplings.shape[1]
    inverse = _substitute(couplings, torch.eye(size, device=couplings.device).expand_as(couplings))
    return inverse.bfloat16().float() @ residual.bfloat16().float()


def _behind(x: Operands, u: Tensor) -> Float[Tensor, "HV V K"]:
    """Return the state behind the chain.

    Source: eq. 6 of docs/theory.md.
    """
    weights = (x.log_decay[:, -1:] - x.log_decay).exp()[..., None]
    return x.log_decay[:, -1].exp()[:, None, None] * x.state + (weights * u).transpose(1, 2) @ x.k


def _walk(chain: Chain, state: torch.dtype) -> Float[Tensor, "HV V K"]:
    """Return the state of a float32 walk that keeps it in `state` between tokens."""
    held = chain.state.to(state)
    for row in range(len(chain.x.v)):
        held = walk_token(chain.x, row, held)
    return held


def walk_token(x: Projections, row: int, state: Float[Tensor, "HV V K"]) -> Float[Tensor, "HV V K"]:
    """Return the state after one more row, walked in float32 (float64 for a float64 state) and kept in its dtype."""
    wide = torch.float64 if state.dtype == torch.float64 else torch.float32
    parts = {name: getattr(x, name)[row : row + 1].to(wide) for name in ("q", "k", "v", "a", "b")}
    one = x._replace(**parts)
    g, beta = gdn.finish_gates(one.a, one.b, x.a_log.to(wide), x.dt_bias.to(wide), beta_scale=x.beta_scale)
    k = gdn.l2_normalise(one.k)[0].repeat_interleave(x.v.shape[1] // x.k.shape[1], dim=0)
    decayed = g[0].exp()[:, None, None] * state.to(wide)
    error = one.v[0] - (decayed * k[:, None, :]).sum(-1)
    return (decayed + (beta[0][:, None] * error)[..., None] * k[:, None, :]).to(state.dtype)
