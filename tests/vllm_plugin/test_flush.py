"""Flushes on every backend: kept rows go into the states of chosen pages, by a step that has no rows of its own."""

import pytest
import torch

from ops import cuda_on_cpu
from treewy.ops import gdn
from treewy.ops.gdn.cuda.variant import Variant
from treewy.vllm_plugin import flush
from treewy.vllm_plugin.check import materialised

# One that tests of the kernel build as well: states and pseudo-values in bfloat16.
VARIANT = Variant(4, 4, 2, 0, 0, 2, 0, 16, 1)
HEADS, VALUE_HEADS = 1, 2


class Layer:
    """What a flush reads of a layer."""

    A_log, dt_bias = torch.zeros(VALUE_HEADS), torch.ones(VALUE_HEADS)


def run_cuda(x, state, slots, tree, *, prior, out, backend):
    """Stand in for the serving entry, with the CUDA kernel on the CPU."""
    assert backend == "cuda"
    cuda_on_cpu.commit_verify(x, state, slots, tree, prior, out, VARIANT)


@pytest.mark.parametrize("backend", ["eager", "triton", "cuda"])
def test_kept_rows_go_into_the_state(backend, monkeypatch):
    """Of a request with rows, one without, and one that is not to be touched; pages of nobody are NaN."""
    random = torch.Generator().manual_seed(0)
    dim, dtype, error = (128, torch.bfloat16, 3e-3) if backend == "cuda" else (16, torch.float32, 1e-5)

    def normal(*shape):
        return torch.randn(*shape, generator=random).to(dtype)

    state = normal(5, VALUE_HEADS, dim, dim)
    state[3:] = torch.nan
    u, k = normal(4, 4, VALUE_HEADS, dim), normal(4, 4, HEADS, dim)
    decay = -normal(4, 4, VALUE_HEADS).float().abs().cumsum(1)
    kept = gdn.History(u, k, decay, torch.zeros_like(decay), torch.tensor([2, 0, 4, 3], dtype=torch.int32))
    for request, count in enumerate(kept.lengths.tolist()):
        for part in kept[:4]:
            part[request, count:] = torch.nan
    slots, places = torch.tensor([2, -1, 0, 1]).int(), torch.tensor([0, -1, 2, 1]).int()
    before = state.clone()
    if backend == "cuda":
        monkeypatch.setattr(flush.gdn, "commit_verify", run_cuda)
    flush.flush_state(state, slots, kept, places, Layer, backend)
    for slot, place in ((2, 0), (0, 2)):
        want = materialised(before[slot].double(), kept, place)
        assert (state[slot].double() - want).norm() / want.norm() < error
    assert torch.equal(state[1], before[1])
    assert state[3:].isnan().all()
    assert kept.lengths.tolist() == [2, 0, 4, 3]
