"""The ring policy in a pool: histories fill, fold and are made current wherever something else reads the state."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from tolerances import TOY_LOGITS, TOY_MEMORY
from toy_oracle import Transcript
from toy_steps import current_state, feed, make_pool, memory, memory_error, raising_at, start, storages, verify
from treewy.cache import Batch, CachePool, Pending, get_policy
from treewy.cache.policy import Ring
from treewy.errors import CapacityError, UnsupportedError
from treewy.model import ToyConfig, ToyTarget
from treewy.ops import conv, gdn
from treewy.packed import pack
from treewy.tree import DraftTree

TARGET = ToyTarget(ToyConfig(layers="dadd", beta_scale=2.0), seed=8)
PROMPT = [5, 9, 1, 30, 7]
SCATTERED = DraftTree([-1, 0, 0, 0, 3], [11, 1, 2, 3, 4])
OTHERS = ["reconstruct", "store_all"]


def ring_pool(num_rows: int = 16, **options) -> CachePool:
    return make_pool(TARGET, Ring(num_rows), **options)


def lengths(pool: CachePool, slot: int) -> set[int]:
    """Return the number of rows in the histories of a slot, over layers."""
    return {int(layer.history.lengths[slot]) for layer in pool.layers if hasattr(layer, "history")}


def oracle_of(tokens) -> Transcript:
    oracle = Transcript(TARGET)
    oracle.run(tokens)
    return oracle


def verify_under(policy: str, pool: CachePool, slot: int, tree: DraftTree = SCATTERED):
    return TARGET.verify(Batch(pack([tree]), torch.tensor(tree.tokens), (slot,), policy=get_policy(policy)), pool)


@pytest.mark.parametrize("num_rows", [1, 2, 3, 5, 16])
def test_many_steps(num_rows: int) -> None:
    """Histories of any size, folded at every boundary, paths longer than a whole history among them.

    Three sequences whose histories differ in length, under trees of five shapes; one is freed and taken again on the way.
    """
    rng = np.random.default_rng(num_rows)
    pool = ring_pool(num_rows, poison=True)
    shapes = [SCATTERED, DraftTree([-1]), DraftTree.chain(6), DraftTree.from_widths([2, 2, 1]), DraftTree.chain(1)]
    slots = [start(TARGET, pool, PROMPT[: n + 1]) for n in range(3)]
    oracles, seen = [oracle_of(PROMPT[: n + 1]) for n in range(3)], set()
    for step in range(40):
        if step == 20:
            pool.free(slots[1])
            slots[1] = start(TARGET, pool, [8])
            oracles[1] = oracle_of([8])
        trees = [shapes[i].with_tokens(rng.integers(0, 64, shapes[i].num_rows).tolist()) for i in rng.integers(0, 5, 3)]
        paths = [tree.path(int(rng.integers(tree.num_rows))) if rng.random() < 0.8 else [] for tree in trees]
        verified = verify(TARGET, pool, trees, slots)
        for seq, (oracle, tree, path) in enumerate(zip(oracles, trees, paths, strict=True)):
            rows = verified.logits[verified.pending.tree.starts[seq] :][path].numpy()
            assert not path or np.abs(rows - oracle.run([tree.tokens[row] for row in path])).max() < TOY_LOGITS
        pool.commit(verified.pending, paths)
        pool.check_integrity()
        for slot, oracle in zip(slots, oracles, strict=True):
            assert memory_error(pool, slot, oracle) < TOY_MEMORY
            seen |= lengths(pool, slot)
    assert seen == set(range(num_rows + 1)) or num_rows == 16
    assert max(seen) == num_rows


class TestMaterialize:
    def test_states_become_current_and_nothing_else_changes(self) -> None:
        pool = ring_pool()
        slot, other = start(TARGET, pool, PROMPT), start(TARGET, pool, PROMPT[:2])
        before, version = memory(pool, other), pool.version(slot)
        assert lengths(pool, slot) == {5}
        for _ in range(2):
            pool.materialize(slot)
            assert lengths(pool, slot) == {0}
            oracle = oracle_of(PROMPT)
            for index in (0, 2, 3):
                assert np.abs(pool.layers[index].state[slot].numpy() - oracle.states[index]).max() < TOY_MEMORY
        assert (memory(pool, other), pool.version(slot), pool.length(slot)) == (before, version, 5)
        settled = storages(pool)
        pool.materialize(slot)
        assert storages(pool) == settled
        pool.check_integrity()

    @pytest.mark.parametrize("commit", OTHERS)
    def test_without_histories_there_is_nothing_to_do(self, commit: str) -> None:
        pool = make_pool(TARGET, commit)
        slot = start(TARGET, pool, PROMPT)
        before = storages(pool)
        pool.materialize(slot)
        pool.materialize(-1)
        assert storages(pool) == before

    def test_what_is_pending_stays_valid(self) -> None:
        """A step of the same contents: the fold moves rows that it counted from, and moves its count with them."""
        pool = ring_pool()
        slot = start(TARGET, pool, PROMPT)
        pending = verify(TARGET, pool, [SCATTERED], [slot]).pending
        pool.materialize(slot)
        pool.commit(pending, [[0, 3, 4]])
        assert lengths(pool, slot) == {3}
        assert memory_error(pool, slot, oracle_of([*PROMPT, 11, 3, 4])) < TOY_MEMORY

    def test_slots_that_are_not_whole_are_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pool = ring_pool()
        with pytest.raises(CapacityError, match="must be taken"):
            pool.materialize(0)
        slot = start(TARGET, pool, PROMPT)
        pending = verify(TARGET, pool, [SCATTERED], [slot]).pending
        with monkeypatch.context() as patch:
            patch.setattr(conv, "commit", raising_at(2, conv.commit))
            with pytest.raises(RuntimeError, match="planted"):
                pool.commit(pending, [[0]])
        with pytest.raises(CapacityError, match=f"slot {slot} died"):
            pool.materialize(slot)


class TestOtherPolicies:
    @pytest.mark.parametrize("other", OTHERS)
    def test_a_step_that_reads_states_alone(self, other: str) -> None:
        """Prefill under reconstruct goes on where a ring step stopped: it sees the history's rows, once."""
        pool = ring_pool()
        slot = start(TARGET, pool, PROMPT)
        assert lengths(pool, slot) == {5}
        oracle = oracle_of(PROMPT)
        verified = verify_under(other, pool, slot)
        assert np.abs(verified.logits[[0, 3, 4]].numpy() - oracle.run([11, 3, 4])).max() < TOY_LOGITS
        pool.commit(verified.pending, [[0, 3, 4]])
        assert memory_error(pool, slot, oracle) < TOY_MEMORY
        assert np.abs(feed(TARGET, pool, slot, [6, 2]).numpy() - oracle.run([6, 2])).max() < TOY_LOGITS
        assert memory_error(pool, slot, oracle) < TOY_MEMORY
        pool.check_integrity()

    @pytest.mark.parametrize("other", OTHERS)
    def test_pending_steps_of_two_policies(self, other: str) -> None:
        """Either may be committed, and then the other is stale."""
        for first in ("ring", other):
            pool = ring_pool()
            slot = start(TARGET, pool, PROMPT)
            pending = {"ring": verify(TARGET, pool, [SCATTERED], [slot]).pending}
            pending[other] = verify_under(other, pool, slot).pending
            pool.materialize(slot)
            pool.commit(pending.pop(first), [[0, 3]])
            assert memory_error(pool, slot, oracle_of([*PROMPT, 11, 3])) < TOY_MEMORY
            with pytest.raises(CapacityError, match="committed once, to the memory it read"):
                pool.commit(pending.popitem()[1], [[0]])

    @pytest.mark.parametrize("commit", OTHERS)
    def test_a_ring_step_needs_a_ring(self, commit: str) -> None:
        """No silent fallback: nothing of it runs on layers without a history."""
        pool = make_pool(TARGET, commit)
        slot = start(TARGET, pool, PROMPT)
        before = storages(pool)
        with pytest.raises(UnsupportedError, match="Make the pool with ring"):
            verify_under("ring", pool, slot)
        pending = verify(TARGET, pool, [SCATTERED], [slot]).pending
        with pytest.raises(UnsupportedError, match="Make the pool with ring"):
            pool.commit(Pending(Ring(), *list(vars(pending).values())[1:]), [[0]])
        assert storages(pool) == before

    def test_a_refused_begin_folds_nothing(self) -> None:
        pool = ring_pool(max_len=6)
        slot = start(TARGET, pool, PROMPT)
        before = storages(pool)
        with pytest.raises(CapacityError, match="within 6 tokens"):
            verify_under("reconstruct", pool, slot)
        assert storages(pool) == before


@pytest.mark.parametrize("dies_in", ["fold", "append", "materialize"])
def test_dying_between_layers_tears(dies_in: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One layer folded or appended to and the next not: the slot cannot be read until it is freed; others go on."""
    pool = ring_pool(4)
    torn, other = start(TARGET, pool, PROMPT[:4]), start(TARGET, pool, PROMPT[:3])
    before = memory(pool, other)
    pending = verify(TARGET, pool, [SCATTERED, SCATTERED], [torn, other]).pending
    with monkeypatch.context() as patch:
        op = "append" if dies_in == "append" else "fold"
        patch.setattr(gdn, op, raising_at(2, getattr(gdn, op)))
        with pytest.raises(RuntimeError, match="planted"):
            pool.materialize(torn) if dies_in == "materialize" else pool.commit(pending, [[0, 3], []])
    for call in (pool.materialize, lambda slot: verify(TARGET, pool, [SCATTERED], [slot])):
        with pytest.raises(CapacityError, match=f"slot {torn} died"):
            call(torn)
    with pytest.raises(CapacityError, match="torn"):
        pool.check_integrity()
    assert memory(pool, other) == before
    pool.free(torn)
    pool.check_integrity()
    assert start(TARGET, pool, PROMPT) == torn
    assert memory_error(pool, torn, oracle_of(PROMPT)) < TOY_MEMORY


@pytest.mark.parametrize("poison", [False, True])
def test_a_new_tenant_has_no_history(poison: bool) -> None:
    """Freed with a history, taken again: nothing of it is left, and poison lies where nothing is."""
    pool = ring_pool(num_slots=1, poison=poison)
    slot = start(TARGET, pool, PROMPT)
    pool.free(slot)
    if poison:
        assert all(part[slot].isnan().all() for layer in pool.layers[::2] for part in layer.history[:4])
        assert lengths(pool, slot) == {16}
    assert pool.allocate() == slot
    assert lengths(pool, slot) == {0}
    oracle = Transcript(TARGET)
    for tokens in ([4], [8, 15], [16, 23, 42, 1]):
        assert np.abs(feed(TARGET, pool, slot, tokens).numpy() - oracle.run(tokens)).max() < TOY_LOGITS
        assert memory_error(pool, slot, oracle) < TOY_MEMORY


def test_bytes_are_those_of_the_storages() -> None:
    """A slot's state counts its history, used or not, and the parts add up to the pool."""
    pool, plain = ring_pool(7, num_slots=3), make_pool(TARGET, "reconstruct", num_slots=3)
    slot = pool.allocate()
    row = (4 * 6 + 2 * 8 + 2 * 4) * 8
    assert pool.slot_bytes(slot)[0] == plain.slot_bytes(plain.allocate())[0] + 3 * (7 * row + 8)
    storages_of = [x.untyped_storage().nbytes() for layer in pool.layers[::2] for x in layer.tensors()]
    storages_of += [x.untyped_storage().nbytes() for x in pool.layers[3].tensors()]
    assert pool.pool_bytes() == sum(storages_of) == 3 * sum(pool.slot_bytes(slot))
    feed(TARGET, pool, slot, [1])
    assert pool.slot_bytes(slot)[0] == 3 * (4 * 6 * 8 * 8 + 7 * row + 8)
    held = verify(TARGET, pool, [SCATTERED], [slot]).pending.bytes()
    assert held.state == 3 * 5 * row


def test_histories_are_as_wide_as_records() -> None:
    """Float32 beside a bfloat16 model and state; float64 where anything is."""
    for dtype, state, wide in (
        (torch.bfloat16, torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.float32, torch.float32),
        (torch.float64, torch.float32, torch.float64),
    ):
        pool = CachePool(TARGET.layer_specs(), 1, get_policy("ring"), dtype=dtype, state_dtype=state)
        assert {part.dtype for part in pool.layers[0].history[:4]} == {wide}
        assert pool.layers[0].state.dtype == state
        assert pool.layers[0].history.num_rows == 16


@pytest.mark.parametrize(
    ("plant", "held"),
    [
        (lambda pool: pool.layers[2].history.lengths.fill_(4), r"\[4, 5\]"),
        (lambda pool: [layer.history.lengths.fill_(6) for layer in (pool.layers[i] for i in (0, 2, 3))], r"\[6\]"),
        (lambda pool: [layer.history.lengths.fill_(-1) for layer in (pool.layers[i] for i in (0, 2, 3))], r"\[-1\]"),
    ],
)
def test_check_integrity_sees_histories_that_do_not_fit(plant: Callable, held: str) -> None:
    pool = ring_pool()
    start(TARGET, pool, PROMPT)
    pool.check_integrity()
    plant(pool)
    with pytest.raises(CapacityError, match=rf"slot 0 has 5 tokens and histories of {held} rows"):
        pool.check_integrity()


def test_a_history_holds_a_row_at_least() -> None:
    with pytest.raises(CapacityError, match="at least one row; got 0"):
        Ring(0)


def test_current_state_is_what_materialize_leaves() -> None:
    """The tests' own reading of a slot is the pool's."""
    pool = ring_pool()
    slot = start(TARGET, pool, PROMPT)
    want = current_state(pool.layers[0], slot)
    assert lengths(pool, slot) == {5}
    pool.materialize(slot)
    assert torch.equal(pool.layers[0].state[slot], want)
