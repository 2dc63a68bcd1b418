"""Single steps on the toy target, driven by hand."""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from toy_oracle import Transcript
from treewy.cache import Batch, CachePool, Policy, get_policy
from treewy.cache.layer import AttentionLayer, LinearLayer
from treewy.engine import Engine
from treewy.model import Target, Verified
from treewy.ops import gdn
from treewy.packed import pack
from treewy.tree import DraftTree


def make_pool(target: Target, commit: str | Policy = "reconstruct", num_slots: int = 4, **options) -> CachePool:
    """Return a pool for `target`, as an engine makes it."""
    return CachePool(
        target.layer_specs(),
        num_slots,
        get_policy(commit) if isinstance(commit, str) else commit,
        dtype=target.dtype,
        state_dtype=target.state_dtype,
        device=target.device,
        max_len=options.pop("max_len", target.max_len),
        **options,
    )


def verify(target: Target, pool: CachePool, trees: Sequence[DraftTree], slots: Sequence[int]) -> Verified:
    """Run one step over trees with tokens; nothing is written."""
    tokens = torch.tensor([token for tree in trees for token in tree.tokens], dtype=torch.int64)
    return target.verify(Batch(pack(trees), tokens, tuple(slots)), pool)


def feed(target: Target, pool: CachePool, slot: int, tokens: Sequence[int]) -> torch.Tensor:
    """Commit `tokens` to `slot`; return the logits after each."""
    verified = verify(target, pool, [DraftTree.chain(len(tokens) - 1).with_tokens(tokens)], [slot])
    pool.commit(verified.pending, [range(len(tokens))])
    return verified.logits


def start(target: Target, pool: CachePool, tokens: Sequence[int]) -> int:
    """Take a slot and commit `tokens` to it."""
    slot = pool.allocate()
    feed(target, pool, slot, tokens)
    return slot


def storages(pool: CachePool) -> list[bytes]:
    """Return the raw bytes of every tensor of the pool."""
    return [_raw(x) for layer in pool.layers for x in layer.tensors()]


def current_state(layer: LinearLayer, slot: int) -> torch.Tensor:
    """Return the state that a slot's checkpoint and history stand for; the slot keeps both."""
    state = layer.state[slot : slot + 1].clone()
    if layer.history is not None:
        history = gdn.History(*(part[slot : slot + 1].clone() for part in layer.history))
        gdn.fold(state, torch.tensor([0]), history)
    return state[0]


def memory(pool: CachePool, slot: int) -> list[bytes]:
    """Return the raw bytes of all that `slot` remembers: states, histories, windows, and committed keys and values."""
    parts = []
    for layer in pool.layers:
        if isinstance(layer, LinearLayer):
            parts += [x[slot] for x in layer.tensors()]
        if isinstance(layer, AttentionLayer):
            length = pool.length(slot)
            parts += [layer.keys[slot, :length], layer.values[slot, :length]]
    return [_raw(x) for x in parts]


def memory_error(pool: CachePool, slot: int, transcript: Transcript) -> float:
    """Return the largest difference between what `slot` remembers and what the oracle remembers, in whole layers."""
    worst = 0.0
    for index, layer in enumerate(pool.layers):
        if isinstance(layer, LinearLayer):
            state = current_state(layer, slot)
            pairs = [(state, transcript.states[index]), (layer.window[slot], transcript.window(index))]
        else:
            length = pool.length(slot)
            pairs = [
                (layer.keys[slot, :length], np.stack(transcript.keys[index])),
                (layer.values[slot, :length], np.stack(transcript.values[index])),
            ]
        for got, want in pairs:
            assert tuple(got.shape) == want.shape
            worst = max(worst, float(np.abs(got.numpy() - want).max()))
    return worst


def raising_at(call: int, function: Callable) -> Callable:
    """Return `function`, except that its `call`-th call raises."""
    calls = 0

    def wrapper(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == call:
            raise RuntimeError("planted")
        return function(*args, **kwargs)

    return wrapper


def _raw(x: torch.Tensor) -> bytes:
    return x.contiguous().numpy().tobytes()


def committed_lengths(engine: Engine) -> list[int]:
    """Return a list that will hold slot 0's length after each commit."""
    lengths, commit = [], engine.cache.commit

    def wrapper(pending, paths):
        commit(pending, paths)
        lengths.append(engine.cache.length(0))

    engine.cache.commit = wrapper
    return lengths
