"""What `treewy doctor` tries: one small problem per op, which every backend of that op must solve alike."""

from collections.abc import Callable
from typing import NamedTuple

import torch

from treewy.ops import accept, attention, conv, gdn, tree
from treewy.ops.launch import interpreted
from treewy.packed import PackedTree, pack
from treewy.shapes import Tensor
from treewy.tree import DraftTree

TREES = (DraftTree.from_widths([3, 3, 3]), DraftTree.chain(3))
EVERYWHERE = ("eager", "reference")


class Trial(NamedTuple):
    """One op on one problem.

    Attributes:
        op: Its name.
        run: Solves the problem on a device with a backend.
        kernels: The backends of the op that are kernels.
        bound: Relative error that a backend may have; with bfloat16 operands, as the CUDA kernel takes them, 2e-2.
        define: Says what is right; default: the reference backend.
    """

    op: str
    run: Callable[[str, "Operands"], Tensor]
    kernels: tuple[str, ...] = ("triton",)
    bound: float = 1e-5
    define: Callable[["Operands"], Tensor] | None = None

    @property
    def backends(self) -> tuple[str, ...]:
        """Every backend that the op has."""
        return EVERYWHERE + self.kernels

    def error(self, backend: str, device: str) -> float:
        """Return a backend's relative error against what is right, on the same operands."""
        got, operands = self.run(backend, Operands(device, self.dtype(backend))), Operands(device, self.dtype(backend))
        want = self.run("reference", operands) if self.define is None else self.define(operands)
        return float((got.double() - want.double()).norm() / want.double().norm())

    def bound_of(self, backend: str) -> float:
        """Return the bound on `error`."""
        return 2e-2 if self.dtype(backend) == torch.bfloat16 else self.bound

    @staticmethod
    def dtype(backend: str) -> torch.dtype:
        """Return the dtype of the rows that a backend is tried on."""
        return torch.bfloat16 if backend == "cuda" else torch.float32


class Operands:
    """Random operands, the same on every device and for every backend."""

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self.packed: PackedTree = pack(list(TREES), device=device)
        self.rows = self.packed.num_rows
        self.slots = torch.tensor([1, 0], device=device)
        self._generator = torch.Generator().manual_seed(0)

    def random(self, *shape: int) -> Tensor:
        """Return the next operand, in float32."""
        return torch.randn(*shape, generator=self._generator).to(self.device)


def runs_on(backend: str, device: str) -> bool:
    """Return whether a backend should work on a device: kernels need a GPU, or Triton's interpreter."""
    return backend in EVERYWHERE or device != "cpu" or (backend == "triton" and interpreted())


def _tables(backend: str, on: Operands) -> Tensor:
    known = on.packed.tables
    made = tree.tables(known.parents, known.cu_rows, max_rows=known.max_rows, backend=backend)
    return torch.cat([part.flatten() for part in made[:5]])


def _convolve(backend: str, on: Operands) -> Tensor:
    x, weight, window = on.random(on.rows, 48), on.random(48, 4), on.random(2, 3, 48)
    return conv.verify(x, weight, None, window, on.slots, on.packed, backend=backend)


def _gdn_operands(on: Operands) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    q, k = gdn.scale_queries(on.random(on.rows, 2, 16)), gdn.l2_normalise(on.random(on.rows, 2, 16))
    v, g, beta = on.random(on.rows, 4, 16), -on.random(on.rows, 4).abs(), on.random(on.rows, 4).sigmoid()
    return q, k, v, g, beta, on.random(2, 4, 16, 16)


def _verify(backend: str, on: Operands) -> Tensor:
    return gdn.verify(*_gdn_operands(on), on.slots, on.packed, backend=backend).o


def _walk(on: Operands) -> Tensor:
    return gdn.verify_snapshots(*_gdn_operands(on), on.slots, on.packed, backend="reference").o


def _commit_verify(backend: str, on: Operands) -> Tensor:
    heads, value_heads, gates = (on.rows, 2, 128), (on.rows, 4, 128), (on.rows, 4)
    q, k, v, a, b = (on.random(*shape).to(on.dtype) for shape in (heads, heads, value_heads, gates, gates))
    x = gdn.Projections(q, k, v, a, b, on.random(4), on.random(4))
    state = on.random(2, 4, 128, 128)
    return gdn.commit_verify(x, state, on.slots, on.packed.tables, exact=True, backend=backend).o


def _attend(backend: str, on: Operands) -> Tensor:
    q, k, v = (on.random(on.rows, heads, 16) for heads in (4, 2, 2))
    table = torch.arange(6, dtype=torch.int32, device=on.device).view(2, 3)
    lengths = torch.tensor([9, 4], dtype=torch.int32, device=on.device)
    pages = attention.Paged(on.random(6, 4, 2, 16), on.random(6, 4, 2, 16), table, lengths)
    return attention.verify_paged(q, k, v, pages, on.packed.tables, scale=0.25, backend=backend)


def _accept(backend: str, on: Operands) -> Tensor:
    tokens = torch.arange(on.rows, dtype=torch.int32, device=on.device) % 7
    accepted = accept.greedy(on.packed.tables, tokens, on.random(on.rows, 7), backend=backend)
    return torch.cat([accepted.tokens.flatten(), accepted.path.rows.flatten(), accepted.lengths])


TRIALS = (
    Trial("tree.tables", _tables, bound=0.0),
    Trial("conv.verify", _convolve),
    Trial("gdn.verify", _verify, define=_walk),
    Trial("gdn.commit_verify", _commit_verify, kernels=("triton", "cuda")),
    Trial("attention.verify_paged", _attend),
    Trial("accept.greedy", _accept, bound=0.0),
)
