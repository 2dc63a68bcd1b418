"""Running rows: check, capture, replay in turn, and judge."""

import gc
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import torch

from treewy.bench.ops.correctness import Errors, check
from treewy.bench.ops.peers import prepare
from treewy.bench.ops.problems import Case, Problem, make_problem
from treewy.bench.ops.rows import EXACT, FLOOR, Bar, Row
from treewy.bench.ops.timing import NUM_REPLAYS, Prepared, Replay, replay_times
from treewy.bench.ops.variants import Entry, variant
from treewy.bench.timing import Spread, ratio
from treewy.errors import TreeWYError

Key = tuple[str, str, int, str, str]
Replaying = Callable[[], float]


class Verdict(NamedTuple):
    """A bar and how it was met.

    Attributes:
        against: What the figure is held against.
        limit: At most so many times that, or at least that share of the floor.
        value: The figure; None if one side was not measured.
        verdict: "pass", "miss", "aim missed", or "open" without a value.
    """

    against: str
    limit: float
    value: float | None
    verdict: str


@dataclass
class Result:
    """One line of results: one variant or peer on one problem.

    Attributes:
        row: Name of the row.
        case: What was done: policy, shape, batch_size, state.
        name: Who did it.
        us: Microseconds per call, with every sample; None if it was not timed.
        floor_us: Time of the bytes that treewy's policy must move, at the copy bandwidth.
        share_of_floor: How much of that bandwidth was reached.
        bytes_per_seq: What a sequence keeps between steps.
        errors: What the check before found; none for peers.
        error: Of accuracy and drift: what is measured there, a relative error or a ratio of them.
        note: Why there is no time.
        times: The time over that of every other who was timed on the same problem.
        bars: Verdicts.
        is_fault: Whether it should have been timed: a wrong result or a failure of treewy's own.
    """

    row: str
    case: dict[str, Any]
    name: str
    us: Spread | None = None
    floor_us: float | None = None
    share_of_floor: float | None = None
    bytes_per_seq: int | None = None
    errors: Errors | None = None
    error: float | None = None
    note: str | None = None
    times: dict[str, float] = field(default_factory=dict)
    bars: list[Verdict] = field(default_factory=list)
    is_fault: bool = False

    def as_json(self) -> dict[str, Any]:
        """Return it JSON-ready."""
        parts = {"us": self.us, "errors": self.errors}
        named = {name: None if part is None else part._asdict() for name, part in parts.items()}
        return asdict(self) | named | {"bars": [bar._asdict() for bar in self.bars]}


@dataclass(frozen=True)
class Setting:
    """How rows are run.

    Attributes:
        entry: `treewy.ops.gdn.commit_verify`.
        backend: Which of its backends.
        device: Where.
        bandwidth: Bytes per second that a copy moves there.
        num_replays: Replays that count.
        with_peers: Whether peers are timed too.
        capture: Turns calls into something that times one replay of them.
    """

    entry: Entry
    backend: str
    device: torch.device
    bandwidth: float
    num_replays: int = NUM_REPLAYS
    with_peers: bool = True
    capture: Callable[[Prepared, torch.device], Replaying] = Replay


class Measurement:
    """Runs rows one after the other and keeps what later rows are held against."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self._spreads: dict[Key, Spread] = {}

    def run(self, row: Row) -> list[Result]:
        """Return one result per variant and peer of a row."""
        results = {name: Result(row.name, describe(row.case), name) for name in (*row.variants, *self._peers(row))}
        floor = self._time(row, results)
        for name, result in results.items():
            if result.us is not None:
                self._spreads[_key(row.case, name)] = result.us
                result.floor_us = floor
                result.share_of_floor = floor / result.us.median if name in row.variants else None
                result.times = _times(result.us, {key: x.us for key, x in results.items() if key != name})
        for bar in row.bars:
            results[bar.of].bars.append(self._judge(row, bar, results[bar.of]))
        _release(self.setting.device)
        return list(results.values())

    def _time(self, row: Row, results: dict[str, Result]) -> float:
        """Give every result its time or its note; return the floor in microseconds."""
        problem = make_problem(row.case, self.setting.device)
        replays: dict[str, Replaying] = {}
        for name, result in results.items():
            replay = self._guard(result, lambda name=name, result=result: self._replay(row, problem, name, result))
            if replay is not None:
                replays[name] = replay
        for name, spread in replay_times(replays, self.setting.num_replays).items():
            results[name].us = spread
        return problem.floor_bytes / self.setting.bandwidth * 1e6

    def _peers(self, row: Row) -> tuple[str, ...]:
        return row.peers if self.setting.with_peers else ()

    def _replay(self, row: Row, problem: Problem, name: str, result: Result) -> Replaying | None:
        """Return what is timed; None for a variant that computes something else than it should."""
        if name in row.peers:
            prepared = prepare(name, problem)
        else:
            chosen = variant(self.setting.entry, self.setting.backend, name=name, exact=name == EXACT)
            result.errors, fault = check(chosen, problem)
            if fault is not None:
                result.note, result.is_fault = f"wrong: {fault}", True
                return None
            prepared = chosen.prepare(problem)
        result.bytes_per_seq = prepared.bytes_per_seq
        return self.setting.capture(prepared, self.setting.device)

    def _guard(self, result: Result, make: Callable[[], Replaying | None]) -> Replaying | None:
        """Return what `make` does, or None with a note: one that cannot run must not take the others with it."""
        try:
            return make()
        except Exception as error:  # peers are foreign code, and a kernel may fail in any way
            result.note = described(error)
        result.is_fault = result.name.startswith("treewy")
        if self.setting.device.type == "cuda":
            # Raises if the device is beyond use: nothing after it would count.
            torch.cuda.synchronize(self.setting.device)
        return None

    def _judge(self, row: Row, bar: Bar, result: Result) -> Verdict:
        own, value = result.us, None
        if bar.against == FLOOR:
            value = result.share_of_floor
        elif own is not None:
            case = (
                row.case if bar.shape is None else Case(row.case.policy, bar.shape, row.case.batch_size, row.case.state)
            )
            theirs = self._spreads.get(_key(case, bar.against))
            if theirs is not None:
                value = ratio(own, theirs).median if bar.shape in (None, row.case.shape) else own.median / theirs.median
        return judge(bar, value)


def judge(bar: Bar, value: float | None) -> Verdict:
    """Return the verdict on a figure."""
    if value is None:
        return Verdict(bar.against, bar.limit, None, "open")
    met = value >= bar.limit if bar.against == FLOOR else value <= bar.limit
    missed = "aim missed" if bar.is_aim else "miss"
    return Verdict(bar.against, bar.limit, value, "pass" if met else missed)


def describe(case: Case) -> dict[str, Any]:
    """Return what was done, JSON-ready."""
    state = str(case.state).removeprefix("torch.")
    return {"policy": case.policy, "shape": case.shape, "batch_size": case.batch_size, "state": state}


def described(error: Exception) -> str:
    """Return an error in one line; treewy's own are one already."""
    text = " ".join(str(error).split())
    return text if isinstance(error, TreeWYError) else f"{type(error).__name__}: {text[:300]}"


def _times(own: Spread, others: Mapping[str, Spread | None]) -> dict[str, float]:
    """Return the time over each other's, replay by replay."""
    return {name: ratio(own, theirs).median for name, theirs in others.items() if theirs is not None}


def _key(case: Case, name: str) -> Key:
    return case.policy, case.shape, case.batch_size, str(case.state), name


def _release(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
