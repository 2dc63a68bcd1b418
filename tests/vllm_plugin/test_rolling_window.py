"""The rolling window of chains: the newest accepted input is found, and rejected ones are overwritten."""

from itertools import product

import pytest
import torch
from torch.nn import functional

from treewy.vllm_plugin.conv import chain_conv
from treewy.vllm_plugin.flush import flush_window

CHANNELS, WIDTH, DRAFTS = 6, 4, 3


def convolved(inputs, weight, bias):
    """Return the convolution over a whole sequence, zeros before it."""
    padded = torch.cat([torch.zeros(CHANNELS, WIDTH - 1), inputs.T], dim=1)
    return functional.silu(functional.conv1d(padded[None], weight[:, None], bias, groups=CHANNELS)[0].T)


def test_accepted_rows_convolve_as_one_sequence():
    """Fault B01: whatever was rejected between them."""
    random = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(CHANNELS, WIDTH, generator=random), torch.randn(CHANNELS, generator=random)
    window = torch.full((5, CHANNELS, WIDTH - 1 + DRAFTS), torch.nan)
    slots = torch.tensor([3, 1])
    window[slots, :, : WIDTH - 1] = 0.0  # nothing came before
    known, accepted = [torch.zeros(0, CHANNELS) for _ in slots], torch.tensor([1, 1])
    for rows, sampled in (([4, 4], [2, 4]), ([1, 4], [1, 1]), ([4, 2], [4, 2]), ([3, 4], [1, 3]), ([4, 4], [1, 1])):
        x = torch.randn(sum(rows), CHANNELS, generator=random)
        cu_rows = torch.tensor([0, rows[0], sum(rows)])
        y = chain_conv(x, window, weight, bias, slots, accepted, cu_rows)
        for seq, (mine, out) in enumerate(zip(x.split(rows), y.split(rows), strict=True)):
            whole = torch.cat([known[seq], mine])
            assert torch.allclose(out, convolved(whole, weight, bias)[len(known[seq]) :], atol=1e-5)
            known[seq] = whole[: len(known[seq]) + sampled[seq]]
        accepted = torch.tensor(sampled)
    before = window.clone()
    flush_window(window, slots, accepted, WIDTH)
    for seq, slot in enumerate(slots):
        assert torch.equal(window[slot, :, : WIDTH - 1], known[seq][-(WIDTH - 1) :].T)
    untouched = [0, 2, 4]
    assert torch.equal(window[untouched].nan_to_num(), before[untouched].nan_to_num())


@pytest.mark.parametrize(("dtype", "num_steps"), [(torch.float32, 3), (torch.bfloat16, 2)])
def test_every_run_of_short_steps(dtype, num_steps):
    """Fault B01: however many rows a step has and accepts, the next finds what came before; columns beyond it are never read."""
    random = torch.Generator().manual_seed(1)
    weight = torch.randn(CHANNELS, WIDTH, generator=random)
    chains = [(rows, accepted) for rows in range(1, DRAFTS + 2) for accepted in range(1, rows + 1)]
    for steps in product(chains, repeat=num_steps):
        window = torch.full((2, CHANNELS, WIDTH - 1 + DRAFTS), torch.nan, dtype=dtype)
        window[1, :, : WIDTH - 1] = 0.0
        known, accepted = torch.zeros(0, CHANNELS), 1
        for rows, sampled in steps:
            x = torch.randn(rows, CHANNELS, generator=random).to(dtype).float()
            cu_rows, slots = torch.tensor([0, rows]), torch.tensor([1])
            y = chain_conv(x.to(dtype), window, weight.to(dtype), None, slots, torch.tensor([accepted]), cu_rows)
            known = torch.cat([known, x])
            want = convolved(known[-WIDTH - rows :], weight.to(dtype).float(), None)[-rows:]
            assert torch.allclose(y.float(), want, atol=1e-5 if dtype == torch.float32 else 0.1)
            known, accepted = known[: len(known) - rows + sampled], sampled
        flush_window(window, torch.tensor([1]), torch.tensor([accepted]), WIDTH)
        tail = torch.cat([torch.zeros(WIDTH - 1, CHANNELS), known])[1 - WIDTH :]
        assert torch.equal(window[1, :, : WIDTH - 1].float(), tail.T)
        assert window[0].isnan().all()
