"""One run of the benchmark: which rows, in which order, and what a reader needs to judge them."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from treewy.bench.environment import environment
from treewy.bench.ops.measure import Measurement, Result, Setting, described
from treewy.bench.ops.precision import accuracy_results, drift_results
from treewy.bench.ops.rows import ROWS, STATES
from treewy.bench.ops.stages import stage_results
from treewy.errors import RequestError

# What the times depend on, where it is installed.
PACKAGES = ("triton", "vllm", "sglang", "flashinfer-python", "nvidia-cutlass-dsl")
STAGE_BATCH = 32
NAMES = (*ROWS, "stages", "accuracy", "drift")


class Unit(NamedTuple):
    """A part of a run that gives its results together."""

    name: str
    run: Callable[[Measurement], Iterable[Result]]


def units(names: Sequence[str], batch_sizes: Sequence[int]) -> list[Unit]:
    """Return what the names ask for, in the order of the table of rows, whatever theirs.

    Raises:
        RequestError: a name has nothing to measure at these batch sizes, or nothing is asked for.
    """
    found: list[Unit] = []
    for name in (name for name in NAMES if name in names):
        of_name = _units(name, batch_sizes)
        if not of_name:
            raise RequestError(
                f"A row must have a batch size to run at; {name} has none among {list(batch_sizes)}. Leave batch-sizes out "
                "for 1, 8, 32 and 128."
            )
        found += of_name
    if not found:
        raise RequestError(
            f"rows must name at least one of {', '.join(NAMES)}; got {list(names)}. Leave it out for all."
        )
    return found


def results(
    chosen: Sequence[Unit], setting: Setting, advance: Callable[[str], None] = lambda _: None
) -> Iterator[Result]:
    """Run units one after the other; yield every result as soon as it is known.

    A unit that fails leaves a fault and the next one runs, unless the device is beyond use: then nothing after it would
    count, and the run ends.

    Args:
        chosen: What `units` returned.
        setting: How to run them.
        advance: Called with the name of each unit when it is done.
    """
    measurement = Measurement(setting)
    for unit in chosen:
        try:
            yield from unit.run(measurement)
        except Exception as error:  # whatever a kernel fails with, what was measured before must not be lost
            yield Result(unit.name, {}, setting.backend, note=described(error), is_fault=True)
            if not _is_usable(setting.device):
                yield Result(unit.name, {}, setting.backend, note="the device is beyond use after this", is_fault=True)
                return
        advance(unit.name)


def header(setting: Setting) -> dict[str, Any]:
    """Return the first line of results: what ran, where, and how fast a copy is there."""
    return {
        "benchmark": "ops",
        "environment": environment(setting.device, seed=0, also=PACKAGES),
        "copy_gb_per_s": setting.bandwidth / 1e9,
        "backend": setting.backend,
        "num_replays": setting.num_replays,
    }


def _is_usable(device: torch.device) -> bool:
    try:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except RuntimeError:
        return False
    return True


def _units(name: str, batch_sizes: Sequence[int]) -> list[Unit]:
    match name:
        case "stages":
            return [Unit(name, lambda m: stage_results(m.setting, [STAGE_BATCH], STATES))]
        case "accuracy":
            return [Unit(name, lambda m: accuracy_results(m.setting))]
        case "drift":
            return [Unit(name, lambda m: drift_results(m.setting))]
    return [Unit(name, partial(Measurement.run, row=row)) for row in ROWS[name](batch_sizes)]
