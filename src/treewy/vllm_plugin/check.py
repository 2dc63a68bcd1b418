"""Debugging inside the engine: states that were rebuilt from rows, compared with the recurrence walked row by row."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from treewy.ops import gdn
from treewy.shapes import Float, Int, Tensor


class Seen(NamedTuple):
    """What is known of one request in one layer.

    Attributes:
        state: Where the walk stands, in float64.
        k: Keys of the last step's rows, unit.
        v: Values.
        decay: Decays, as factors.
        beta: Strengths of the writes.
    """

    state: Float[Tensor, "HV V K"]
    k: Float[Tensor, "T HV K"]
    v: Float[Tensor, "T HV V"]
    decay: Float[Tensor, "T HV"]
    beta: Float[Tensor, "T HV"]


class Checker:
    """Walks every request's accepted rows beside the engine and keeps the largest difference of the states.

    It copies to the host and so runs in eager steps only.

    Attributes:
        num_checks: States compared.
        largest: The largest relative difference, in the Frobenius norm over one layer's heads.
    """

    def __init__(self, every: int) -> None:
        """Compare at every `every`-th step of a layer."""
        self.every, self.num_checks, self.largest = every, 0, 0.0
        self._seen: dict[tuple[int, int], Seen] = {}
        self._steps: dict[int, int] = {}
        self._accepted: dict[int, list[int]] = {}

    def forget(self, request: int) -> None:
        """Drop what is known of a request."""
        self._seen = {key: seen for key, seen in self._seen.items() if key[1] != request}

    def accept(self, requests: Iterable[int], paths: Sequence[Sequence[int]], lengths: Sequence[int]) -> None:
        """Take the path that the step accepted for each request, local to its tree; see `Step.finish`."""
        accepted = zip(requests, paths, lengths, strict=True)
        self._accepted |= {int(request): list(path[:length]) for request, path, length in accepted}

    def observe(
        self,
        layer: int,
        x: gdn.Projections,
        state: Float[Tensor, "S HV V K"],
        slots: Int[Tensor, "B"],
        kept: gdn.History,
        places: Int[Tensor, "B"],
        cu_rows: Int[Tensor, "B1"],
    ) -> None:
        """Take a step of a layer, before it commits and verifies: advance the walks, compare, and note the step's rows.

        Args:
            layer: Number of the layer.
            x: Its rows.
            state: Its pages' states.
            slots: State of each sequence.
            kept: Its kept rows.
            places: Request of each sequence.
            cu_rows: Row boundaries of the sequences.
        """
        self._steps[layer] = self._steps.get(layer, -1) + 1
        compares = self._steps[layer] % self.every == 0
        group = x.v.shape[1] // x.k.shape[1]
        g, beta = gdn.finish_gates(x.a, x.b, x.a_log, x.dt_bias, beta_scale=x.beta_scale)
        k = gdn.l2_normalise(x.k).double().repeat_interleave(group, dim=1)
        bounds = cu_rows.tolist()
        for seq, (slot, request) in enumerate(zip(slots.tolist(), places.tolist(), strict=False)):
            rows = slice(bounds[seq], bounds[seq + 1])
            if request < 0 or rows.start == rows.stop:
                continue
            seen, now = self._seen.get((layer, request)), state[slot].double()
            if seen is not None:
                walked = walk(seen, self._accepted[request])
                if compares:
                    self._compare(walked, materialised(now, kept, request))
                now = walked
            self._seen[layer, request] = Seen(
                now, k[rows], x.v[rows].double(), g[rows].double().exp(), beta[rows].double()
            )

    def _compare(self, walked: Tensor, rebuilt: Tensor) -> None:
        self.num_checks += 1
        self.largest = max(self.largest, float((rebuilt - walked).norm() / walked.norm().clamp(min=1e-30)))

    def report(self) -> dict[str, Any]:
        """Return what was found."""
        return {"num_checks": self.num_checks, "largest": self.largest}


def walk(seen: Seen, path: Sequence[int]) -> Float[Tensor, "HV V K"]:
    """Return the state after the rows of a path: eq. 3 of docs/theory.md, row by row."""
    state, rows = seen.state, torch.as_tensor(path, dtype=torch.int64, device=seen.state.device)
    for k, v, decay, beta in zip(*(part[rows] for part in seen[1:]), strict=True):
        state = decay[:, None, None] * state
        written = beta[:, None] * (v - torch.einsum("hvk,hk->hv", state, k))
        state = state + written[:, :, None] * k[:, None, :]
    return state


def materialised(state: Float[Tensor, "HV V K"], kept: gdn.History, place: int) -> Float[Tensor, "HV V K"]:
    """Return the state with a request's kept rows in it: eq. 13 of docs/theory.md."""
    count = int(kept.lengths[place])
    if not count:
        return state
    u, k, high, low = (part[place, :count].double() for part in kept[:4])
    decay = high + low
    k = k.repeat_interleave(u.shape[1] // k.shape[1], dim=1)
    weights = (decay[-1] - decay).exp()
    return decay[-1].exp()[:, None, None] * state + torch.einsum("th,thv,thk->hvk", weights, u, k)
