"""Small layers, an entry that runs anywhere, and clocks that say what they are told."""

import torch

from treewy.bench.ops import Case, Heads, Setting
from treewy.ops import gdn

SMALL = Heads(2, 4, 8, 8)


def eager(x, state, slots, tree, *, prior=None, exact=False, out=None, backend=None):
    """Run the serving entry without kernels, whatever backend is asked for."""
    del backend
    return gdn.commit_verify(x, state, slots, tree, prior=prior, exact=exact, out=out, backend="eager")


def small(policy: str, shape: str, batch_size: int, dtype=torch.float32) -> Case:
    return Case(policy, shape, batch_size, dtype, dtype, heads=SMALL)


class Clock:
    """Captures calls and gives each the next of the times it was made with, over and over."""

    def __init__(self, *times: float) -> None:
        self.times, self.captured = list(times), []

    def __call__(self, prepared, device):
        number = len(self.captured)
        self.captured.append(prepared)
        return lambda: self.times[number % len(self.times)]


def setting(entry=eager, clock=None, **options) -> Setting:
    return Setting(entry, "triton", torch.device("cpu"), 4.3e12, 3, capture=clock or Clock(1.0), **options)
