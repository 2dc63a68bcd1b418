"""The emulator notices what a GPU leaves undefined."""

import ctypes
from pathlib import Path

import pytest
import torch

from ops import cuda_on_cpu

FAULTS = Path(cuda_on_cpu.__file__).parent / "faults.cu"
MACROS = (("NW", 2), ("SHARED_BYTES", 1024))


class Params(ctypes.Structure):
    """`Params` of faults.cu."""

    _fields_ = (("input", ctypes.c_void_p), ("output", ctypes.c_void_p), ("fault", ctypes.c_int))


def run(fault, *, backwards=False):
    given, got = torch.arange(256.0), torch.zeros(64)
    params = Params(given.data_ptr(), got.data_ptr(), fault)
    library = cuda_on_cpu.build(FAULTS.read_text(), MACROS)
    cuda_on_cpu.launch(library, (1, 1), params, backwards=backwards)
    return got


@pytest.mark.parametrize("backwards", [False, True])
def test_threads_wait_for_each_other(backwards):
    assert torch.equal(run(0, backwards=backwards), 4 * torch.arange(63.0, -1, -1))
    assert torch.equal(run(12, backwards=backwards)[32:], torch.arange(32.0, 64) + torch.tensor([1.0, -1]).repeat(16))


@pytest.mark.parametrize("backwards", [False, True])
def test_a_missing_barrier_shows(backwards):
    """Half of the threads read what nobody has written yet, in either order the other half."""
    seen = run(1, backwards=backwards).isnan()
    assert seen.sum() == 32
    assert seen[:32].all() == (not backwards)


@pytest.mark.parametrize("backwards", [False, True])
def test_a_missing_barrier_after_jobs_shows(backwards):
    """Jobs go to all warps, and one of them is late."""
    assert run(13, backwards=backwards).isnan().sum() == 32


def test_a_missing_wait_shows():
    assert run(2).isnan().all()


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (3, "ended before its copies were done"),
        (4, "misaligned address in shared memory"),
        (5, "misaligned source of a copy"),
        (6, "not an address in shared memory"),
        (7, "wrote past shared memory"),
        (8, "lanes of one warp meet in different instructions"),
        (9, "threads wait for ones that never come"),
        (10, "misaligned access"),
        (11, "index past an array"),
    ],
)
def test_what_is_undefined_is_refused(fault, message):
    with pytest.raises(AssertionError, match=message):
        run(fault)
    assert run(0).isfinite().all()


def test_a_machine_without_a_compiler_says_what_to_install(monkeypatch):
    monkeypatch.setattr(cuda_on_cpu.shutil, "which", lambda _: None)
    with pytest.raises(AssertionError, match=r"found no g\+\+ on the path. Install it"):
        cuda_on_cpu.build("", MACROS)


def test_a_kernel_that_does_not_compile_says_why():
    with pytest.raises(AssertionError, match="gdn_step"):
        cuda_on_cpu.build("struct Params;", MACROS)
