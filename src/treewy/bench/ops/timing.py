"""Times of GPU calls by replaying captured graphs on rotated operands, so that no launch finds its state in L2."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from treewy.bench.timing import Spread, interleave
from treewy.errors import BackendError

Call = Callable[[], object]

# The largest L2 of the GPUs of interest, and how many times its size must pass by before an operand comes again.
L2_BYTES = 60_000_000
ROTATION = 4
NUM_WARM_REPLAYS = 5
NUM_REPLAYS = 40


class Prepared(NamedTuple):
    """What is timed: calls on operands of their own, each once per replay.

    Attributes:
        calls: One per rotated set of operands, or one per set and step.
        bytes_per_seq: What one sequence keeps between steps: state, history and records, or snapshots.
    """

    calls: Sequence[Call]
    bytes_per_seq: int = 0


class Replay:
    """A captured graph of all calls; calling it replays the graph once.

    Every call runs once before the capture, on the capture's kind of stream: compiling and loading are done then.

    Args:
        prepared: The calls.
        device: A CUDA device.
    """

    def __init__(self, prepared: Prepared, device: torch.device | str) -> None:
        self._prepared, self._device = prepared, torch.device(device)
        with torch.cuda.device(self._device):
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for call in prepared.calls:
                    call()
            torch.cuda.current_stream().wait_stream(side)
            torch.cuda.synchronize()
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, stream=side):
                for call in prepared.calls:
                    call()
            torch.cuda.synchronize()

    def __call__(self) -> float:
        """Replay once and return the microseconds of one call, on average over the graph."""
        with torch.cuda.device(self._device):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            self._graph.replay()
            end.record()
            end.synchronize()
            return start.elapsed_time(end) * 1e3 / len(self._prepared.calls)


def graph_times(
    prepared: Mapping[str, Prepared], device: torch.device | str, num_replays: int = NUM_REPLAYS
) -> dict[str, Spread]:
    """Return microseconds per call of each entry, replays interleaved: a machine that slows down slows all of them."""
    return replay_times({name: Replay(entry, device) for name, entry in prepared.items()}, num_replays)


def replay_times(replays: Mapping[str, Callable[[], float]], num_replays: int = NUM_REPLAYS) -> dict[str, Spread]:
    """Return the figures of interleaved replays, after some that do not count; raw samples are kept in the spread."""
    for replay in replays.values():
        for _ in range(NUM_WARM_REPLAYS):
            replay()
    return {name: Spread.of(samples) for name, samples in interleave(replays, num_replays).items()}


def num_sets(bytes_per_call: float) -> int:
    """Return how many sets of operands calls must rotate over to find each of them cold, at least 2."""
    return max(2, math.ceil(ROTATION * L2_BYTES / bytes_per_call))


def copy_bandwidth(device: torch.device | str, num_replays: int = NUM_REPLAYS) -> float:
    """Return bytes per second, read and written, of a large copy: what floors are counted with.

    The faster of the driver's copy and of an elementwise kernel counts: in a captured graph the first may run on a copy
    engine, which does not reach the memory's speed.
    """
    with torch.cuda.device(torch.device(device)):
        size = min(1 << 32, torch.cuda.mem_get_info()[0] // 4) // 8
        source = torch.ones(size, dtype=torch.int64, device=device)
        target = torch.empty_like(source)
        ways = {"copy": lambda: target.copy_(source), "kernel": lambda: torch.bitwise_not(source, out=target)}
        for _ in range(100):  # clocks rise under load
            target.copy_(source)
        times = graph_times({name: Prepared([way]) for name, way in ways.items()}, device, num_replays)
    return 2 * 8 * size / (min(x.median for x in times.values()) * 1e-6)


def require_gpu(device: str = "cuda") -> torch.device:
    """Return the device that ops are timed on.

    Raises:
        BackendError: there is none: a time from elsewhere would say nothing of the kernels.
    """
    if not torch.cuda.is_available():
        raise BackendError(
            f"Ops must be timed on a CUDA device, in captured graphs; torch {torch.__version__} sees none here. Run it on "
            "a machine with an NVIDIA GPU and a CUDA build of torch."
        )
    return torch.device(device)
