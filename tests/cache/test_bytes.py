"""What a step keeps until commit: its bytes from real storages, and that every kept byte matters."""

import pytest
import torch

from toy_steps import current_state, feed, make_pool, start, verify
from treewy.cache.step import LinearPending
from treewy.model import ToyConfig, ToyTarget
from treewy.tree import DraftTree

TARGET = ToyTarget(seed=6)
PROMPT = [5, 9, 1, 30, 7]
STATE = 2 * 4 * 6 * 8 * 8  # two gated-delta layers, HV x V x K float64
TREES = {"root": DraftTree([-1], [1]), "chain": DraftTree.chain(3).with_tokens([1, 2, 3, 4])}
TREES["tree"] = DraftTree.from_widths([3, 3]).with_tokens(range(13))


@pytest.mark.parametrize("name", TREES)
def test_store_all_keeps_a_state_per_row(name: str) -> None:
    """T snapshots beside the committed state, to the byte."""
    pool, tree = make_pool(TARGET, "store_all"), TREES[name]
    slot = start(TARGET, pool, PROMPT)
    held = verify(TARGET, pool, [tree], [slot]).pending.bytes()
    assert pool.slot_bytes(slot)[0] == STATE
    assert held.state == tree.num_rows * STATE
    assert held.conv == tree.num_rows * 2 * 56 * 8
    assert held.kv == tree.num_rows * 2 * 2 * (2 * 8) * 8


@pytest.mark.parametrize("name", TREES)
def test_reconstruct_keeps_records(name: str) -> None:
    """Pseudo-values, keys and both parts of the decays, to the byte: far below a state per row."""
    pool, tree = make_pool(TARGET, "reconstruct"), TREES[name]
    slot = start(TARGET, pool, PROMPT)
    held = verify(TARGET, pool, [tree], [slot]).pending.bytes()
    assert held.state == tree.num_rows * 2 * (4 * 6 + 2 * 8 + 2 * 4) * 8
    assert held.state * 4 == tree.num_rows * STATE


def test_slot_and_pool_bytes() -> None:
    """A slot's keys and values count committed places; the pool's bytes are all there is."""
    pool = make_pool(TARGET, num_slots=3)
    slot = start(TARGET, pool, PROMPT)
    assert pool.slot_bytes(slot) == (STATE, 2 * 3 * 56 * 8, 2 * 2 * len(PROMPT) * (2 * 8) * 8)
    assert pool.pool_bytes() == 3 * (STATE + 2 * 3 * 56 * 8 + 2 * 2 * 256 * (2 * 8) * 8)


def test_snapshots_lie_apart() -> None:
    """Poison in snapshot i shows after committing i and only then: the T states share no memory."""
    target = ToyTarget(ToyConfig(layers="ddad"), seed=7)
    tree = DraftTree([-1, 0, 0, 1, 1, 2], [11, 1, 2, 3, 4, 5])

    def next_logits(poisoned: int | None, accepted: int) -> torch.Tensor:
        pool = make_pool(target, "store_all")
        slot = start(target, pool, PROMPT)
        pending = verify(target, pool, [tree], [slot]).pending
        for rows in pending.layers.values():
            if poisoned is not None and isinstance(rows, LinearPending):
                rows.record.states[poisoned] += 1.0
        pool.commit(pending, [tree.path(accepted)])
        return feed(target, pool, slot, [42])

    for accepted in range(tree.num_rows):
        clean = next_logits(None, accepted)
        for poisoned in range(tree.num_rows):
            same = torch.equal(next_logits(poisoned, accepted), clean)
            assert same == (poisoned != accepted), f"snapshot {poisoned} poisoned, node {accepted} accepted"


@pytest.mark.parametrize(
    ("commit", "part"), [("reconstruct", "u"), ("reconstruct", "k"), ("reconstruct", "decay_high"), ("ring", "u")]
)
def test_records_of_the_accepted_path_and_no_other_are_read(commit: str, part: str) -> None:
    """NaN in a row's record shows after committing a path through the row, and only then."""
    tree = DraftTree([-1, 0, 0, 1, 1, 2], [11, 1, 2, 3, 4, 5])
    for accepted in range(tree.num_rows):
        for poisoned in range(tree.num_rows):
            pool = make_pool(TARGET, commit)
            slot = start(TARGET, pool, PROMPT)
            pending = verify(TARGET, pool, [tree], [slot]).pending
            for rows in pending.layers.values():
                if isinstance(rows, LinearPending):
                    getattr(rows.record, part)[poisoned] = torch.nan
            pool.commit(pending, [tree.path(accepted)])
            broken = bool(current_state(pool.layers[0], slot).isnan().any())
            assert broken == (poisoned in tree.path(accepted))
