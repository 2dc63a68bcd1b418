"""The rows of accuracy and drift, judged."""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from treewy.bench.ops.accuracy import KEYS, Chain, committed, make_chain, mean_error, yardsticks
from treewy.bench.ops.drift import STEPS, Mode, measure_drift
from treewy.bench.ops.floors import QWEN_35B, Heads
from treewy.bench.ops.measure import Result, Setting, Verdict, judge
from treewy.bench.ops.rows import EXACT, FAST, POLICIES, Bar

ABSOLUTE = "1"  # what a bar on an error itself is held against
SUBSTITUTION, INVERSE = "fp32 substitution", "fp32 inverse applied in bf16"
SEQUENTIAL, SEQUENTIAL_BF16 = "sequential fp32", "sequential bf16 state"


def accuracy_results(setting: Setting, heads: Heads = QWEN_35B) -> Iterator[Result]:
    """Yield the error of the committed state for ordinary and hard keys: the kernels', then the yardsticks'."""
    for keys in KEYS:
        chain = make_chain(keys, setting.device, heads=heads)
        others = {name: mean_error(state, chain.exact) for name, state in yardsticks(chain).items()}
        for name, state in ((EXACT, torch.float32), (FAST, torch.float32), (FAST, torch.bfloat16)):
            yield _of_chain(setting, chain, keys, name, state, others)
        for name, error in others.items():
            yield Result("accuracy", {"keys": keys}, name, error=error)


def drift_results(
    setting: Setting, advance: Callable[[], None] = lambda: None, num_steps: int = STEPS
) -> Iterator[Result]:
    """Yield what `num_steps` steps with mixed accepts make of the error, under both policies."""
    modes = [
        Mode(policy, exact, state)
        for policy in POLICIES
        for exact, state in ((True, torch.float32), (False, torch.float32), (False, torch.bfloat16))
    ]
    drift = measure_drift(setting.entry, setting.backend, modes, setting.device, num_steps=num_steps, advance=advance)
    for mode in modes:
        name = f"{mode.policy}: {mode.name}"
        if mode.exact:
            bar, value = Bar(name, f"{SEQUENTIAL}, any step", 2.0), drift.worst_over(name, SEQUENTIAL)
        else:
            bar, value = Bar(name, f"{SEQUENTIAL_BF16}, growth", 2.0), drift.growth_over(name, SEQUENTIAL_BF16)
        yield _drifted(name, mode.policy, drift.errors[name], [judge(bar, value)])
    for name in (SEQUENTIAL, SEQUENTIAL_BF16):
        yield _drifted(name, "", drift.errors[name], [])


def _of_chain(
    setting: Setting, chain: Chain, keys: str, name: str, state: torch.dtype, others: dict[str, float]
) -> Result:
    got = committed(setting.entry, setting.backend, chain, state, exact=name == EXACT)
    error = mean_error(got, chain.exact)
    case = {"keys": keys, "state": str(state).removeprefix("torch.")}
    times = {other: error / theirs for other, theirs in others.items()}
    return Result("accuracy", case, name, error=error, times=times, bars=[_verdict(name, keys, error, times)])


def _verdict(name: str, keys: str, error: float, times: dict[str, float]) -> Verdict:
    if keys == "ordinary":
        return judge(Bar(name, ABSOLUTE, 1e-6 if name == EXACT else 5e-3), error)
    against = SUBSTITUTION if name == EXACT else INVERSE
    return judge(Bar(name, against, 2.0), times[against])


def _drifted(name: str, policy: str, errors: Any, bars: list[Verdict]) -> Result:
    """Return the line of one decoder or walk: its last error, and the first in the note."""
    first, last = (float(x.max()) for x in (errors[0], errors[-1]))
    return Result("drift", {"policy": policy}, name, error=last, note=f"first checkpoint {first:.1e}", bars=bars)
