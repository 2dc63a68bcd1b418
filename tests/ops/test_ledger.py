"""The bookkeeping of histories: which fold, what they hold afterwards, on every backend, against plain Python."""

import jaxtyping
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from treewy.errors import BackendError, ShapeError
from treewy.ops.gdn import ledger
from treewy.ops.launch import LAUNCHES

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
every_backend = pytest.mark.parametrize("backend", ["eager", "reference", "triton"])


def ints(values, dtype=torch.int64):
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def choose(lengths, slots, paths, capacity, backend, **options):
    before = LAUNCHES["choose_folds_kernel"]
    fold = ledger.choose_folds(lengths, slots, paths, capacity, backend=backend, **options)
    assert LAUNCHES["choose_folds_kernel"] - before == (backend == "triton")
    return fold


def settle(lengths, slots, paths, fold, backend):
    before = LAUNCHES["settle_kernel"]
    ledger.settle(lengths, slots, paths, fold, backend=backend)
    assert LAUNCHES["settle_kernel"] - before == (backend == "triton")


@every_backend
@pytest.mark.parametrize("capacity", [0, 1, 8])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_path_folds_when_it_does_not_fit(capacity, dtype, backend):
    cases = [(held, path) for held in range(capacity + 1) for path in range(capacity + 3)]
    lengths, paths = ints([held for held, _ in cases], dtype), ints([path for _, path in cases], torch.int32)
    slots = torch.arange(len(cases), dtype=dtype, device=DEVICE)
    fold = choose(lengths, slots, paths, capacity, backend)
    assert fold.dtype == torch.int32
    assert fold.tolist() == [int(held + path > capacity) for held, path in cases]
    settle(lengths, slots, paths, fold, backend)
    assert lengths.tolist() == [0 if held + path > capacity else held + path for held, path in cases]


@every_backend
def test_sequences_on_no_slot_change_none(backend):
    """Faults A03 and C03: not slot 0, not the last one, nor memory beside the pool; and they fold nothing."""
    memory = ints([99, 5, 6, 7, 99])
    lengths, slots = memory[1:4], ints([-1, 3, -2, 2**40, 1])
    paths, out = ints([9, 9, 9, 9, 2], torch.int32), ints([7, 7, 7, 7, 7], torch.int32)
    assert choose(lengths, slots, paths, 8, backend, out=out) is out
    assert out.tolist() == [0, 0, 0, 0, 0]
    settle(lengths, slots, paths, ints([1, 1, 1, 1, 0], torch.int32), backend)
    assert memory.tolist() == [99, 5, 8, 7, 99]


@every_backend
def test_operands_that_are_views(backend):
    memory = ints([3, 99, 1, 99, 8, 99])
    slots, paths = ints([[2, 9], [0, 9]]), ints([[1, 9], [2, 9]], torch.int32)
    fold = choose(memory[::2], slots[:, 0], paths[:, 0], 8, backend, out=ints([5, 5, 5, 5], torch.int32)[::2])
    assert fold.tolist() == [1, 0]
    settle(memory[::2], slots[:, 0], paths[:, 0], fold, backend)
    assert memory.tolist() == [5, 99, 1, 99, 0, 99]


@settings(max_examples=15)
@given(data=st.data())
def test_many_steps_of_both(data):
    """Kernel and twin keep one ledger over steps of any make-up, and no history ever holds more than it has room for."""
    capacity, num_slots = data.draw(st.integers(0, 5)), 4
    ledgers = {backend: torch.zeros(num_slots, dtype=torch.int64, device=DEVICE) for backend in ("eager", "triton")}
    for _ in range(4):
        slots = data.draw(st.permutations(range(num_slots)))[: data.draw(st.integers(0, num_slots))]
        slots = [slot if data.draw(st.booleans()) else -1 for slot in slots]
        paths = [data.draw(st.integers(0, 4)) for _ in slots]
        for backend, lengths in ledgers.items():
            fold = ledger.choose_folds(lengths, ints(slots), ints(paths, torch.int32), capacity, backend=backend)
            ledger.settle(lengths, ints(slots), ints(paths, torch.int32), fold, backend=backend)
        assert torch.equal(*ledgers.values())
        assert max(ledgers["eager"].tolist()) <= capacity


def test_more_sequences_than_a_program_has():
    count = 300
    lengths, slots = torch.arange(count, device=DEVICE) % 9, torch.arange(count, device=DEVICE).flip(0)
    paths = torch.full((count,), 4, dtype=torch.int32, device=DEVICE)
    want = lengths.clone()
    folds = [choose(lengths, slots, paths, 8, backend) for backend in ("eager", "triton")]
    assert torch.equal(*folds)
    assert 0 < folds[0].sum() < count
    settle(lengths, slots, paths, folds[0], "triton")
    settle(want, slots, paths, folds[0], "eager")
    assert torch.equal(lengths, want)


@every_backend
def test_refusals(backend, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # annotations would refuse first
    lengths, slots, paths = ints([0, 0]), ints([0, 1]), ints([1], torch.int32)
    for call in (
        lambda: ledger.choose_folds(lengths, slots, paths, 8, backend=backend),
        lambda: ledger.settle(lengths, slots, slots, paths, backend=backend),
    ):
        with pytest.raises(ShapeError, match="one entry per sequence, 2; got shape"):
            call()
    table, paths = ints([[0, 1], [1, 0]]), ints([[1, 1], [1, 1]], torch.int32)
    for held, at, path in ((lengths, table, paths), (table, slots, paths[0]), (lengths, slots[0], paths[0, 0])):
        for call in (
            lambda: ledger.choose_folds(held, at, path, 8, backend=backend),  # noqa: B023, called at once
            lambda: ledger.settle(held, at, path, path, backend=backend),  # noqa: B023
        ):
            with pytest.raises(ShapeError, match="Pass one axis of each"):
                call()


@pytest.mark.parametrize(
    ("backend", "said"), [("cuda", r"gdn\.(choose_folds|settle) has no cuda kernel"), ("CUDA", "asked for 'CUDA'")]
)
def test_a_backend_that_is_not_there_is_refused(backend, said):
    lengths, slots, paths = ints([0]), ints([0]), ints([1], torch.int32)
    for call in (
        lambda: ledger.choose_folds(lengths, slots, paths, 8, backend=backend),
        lambda: ledger.settle(lengths, slots, paths, paths, backend=backend),
    ):
        with pytest.raises(BackendError, match=said):
            call()
    assert lengths.tolist() == [0]
