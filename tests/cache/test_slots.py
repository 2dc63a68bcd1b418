"""Slots: none leaks, none is shared, and what a slot held before is never seen."""

import numpy as np
import pytest
import torch

from tolerances import TOY_LOGITS, TOY_NEIGHBOURS
from toy_oracle import Transcript
from toy_steps import feed, make_pool, memory, start, storages, verify
from treewy.cache import POLICIES, AttentionSpec, CachePool, get_policy
from treewy.cache.layer import AttentionLayer
from treewy.errors import CapacityError, UnsupportedError
from treewy.model import ToyTarget
from treewy.packed import pack
from treewy.tree import DraftTree

TARGET = ToyTarget(seed=5)
ROOT, CHAIN = DraftTree([-1], [1]), DraftTree.chain(2).with_tokens([11, 12, 13])


def test_no_slot_leaks() -> None:
    """Fault C12: 1000 random cycles of taking, stepping, dropping and freeing; the free count adds up all along."""
    rng = np.random.default_rng(12)
    pool, taken = make_pool(TARGET, num_slots=5, poison=True), []
    for _ in range(1000):
        action = rng.integers(4)
        if action == 0 and pool.num_free:
            taken.append(pool.allocate())
        elif action == 1 and taken:
            pool.free(taken.pop(int(rng.integers(len(taken)))))
        elif action == 2 and not pool.num_free:
            with pytest.raises(CapacityError, match="all 5 are taken"):
                pool.allocate()
        elif taken:
            chosen = [slot for slot in taken if rng.random() < 0.5]
            pending = verify(TARGET, pool, [CHAIN] * len(chosen), chosen).pending if chosen else None
            if pending is not None and rng.random() < 0.7:
                pool.commit(pending, [list(range(rng.integers(0, 4))) for _ in chosen])
        assert pool.num_free == 5 - len(taken)
        pool.check_integrity()
    for slot in taken:
        pool.free(slot)
    assert sorted(pool.allocate() for _ in range(5)) == list(range(5))


def test_double_free_and_foreign_slots_are_refused() -> None:
    pool = make_pool(TARGET, num_slots=2)
    slot = pool.allocate()
    pool.free(slot)
    for call in (pool.free, pool.length, lambda slot: pool.begin(pack([ROOT]), [slot])):
        with pytest.raises(CapacityError, match=f"slot {slot} is not"):
            call(slot)
    with pytest.raises(CapacityError, match="slot 7 is not"):
        pool.begin(pack([ROOT]), [7])
    pool.check_integrity()


def test_two_sequences_cannot_share_a_slot() -> None:
    """Fault A09: refused where the step begins, before any layer runs."""
    pool = make_pool(TARGET)
    slot = start(TARGET, pool, [1, 2])
    with pytest.raises(CapacityError, match="must not share"):
        pool.begin(pack([ROOT, ROOT]), [slot, slot])


@pytest.mark.parametrize(
    ("plant", "message"),
    [
        (lambda pool: pool._free.append(pool._free[0]), "free once"),
        (lambda pool: pool._free.append(0), "free once"),
        (lambda pool: pool._free.pop(), "leak"),
        (lambda pool: pool._lengths.pop(0), "leak"),
        (lambda pool: pool._torn.add(0), "torn"),
        (lambda pool: pool._lengths.update({0: 10_000}), "places"),
    ],
)
def test_check_integrity_sees_planted_faults(plant, message: str) -> None:
    pool = make_pool(TARGET)
    assert start(TARGET, pool, [1, 2, 3]) == 0
    pool.check_integrity()
    plant(pool)
    with pytest.raises(CapacityError, match=message):
        pool.check_integrity()


def test_a_pool_needs_a_slot_and_a_known_policy() -> None:
    with pytest.raises(CapacityError, match="at least one slot"):
        make_pool(TARGET, num_slots=0)
    with pytest.raises(UnsupportedError, match="store_all, reconstruct, ring"):
        get_policy("replay")


@pytest.mark.parametrize("commit", POLICIES)
@pytest.mark.parametrize("fill", [float("nan"), 1e4])
def test_short_prompts_on_freed_slots(commit: str, fill: float) -> None:
    """Faults B06 and C06: prompts shorter than the conv window, on slots full of another's memory or of poison."""
    pool = make_pool(TARGET, commit, num_slots=1, poison=bool(np.isnan(fill)))
    for prompt in ([4], [4, 8], [4, 8, 15], [4, 8, 15, 16]):
        old = start(TARGET, pool, [60, 3, 22, 41, 9, 9])
        pool.free(old)
        if not np.isnan(fill):
            for layer in pool.layers:
                for tensor in layer.tensors():
                    tensor.fill_(fill)
        slot = pool.allocate()
        oracle = Transcript(TARGET)
        assert np.abs(feed(TARGET, pool, slot, prompt).numpy() - oracle.run(prompt)).max() < TOY_LOGITS
        assert np.abs(feed(TARGET, pool, slot, [5]).numpy() - oracle.run([5])).max() < TOY_LOGITS
        pool.free(slot)


def test_poison_fills_free_slots_and_only_those() -> None:
    pool = make_pool(TARGET, poison=True)
    slot = start(TARGET, pool, [1, 2])
    assert all(layer.state[1:].isnan().all() for layer in pool.layers if hasattr(layer, "state"))
    assert not any(np.isnan(np.frombuffer(part, np.float64)).any() for part in memory(pool, slot))
    pool.free(slot)
    assert all(layer.state.isnan().all() and layer.window.isnan().all() for layer in pool.layers[::2])


@pytest.mark.parametrize("commit", POLICIES)
def test_swapped_slots_give_swapped_results(commit: str) -> None:
    """Fault A09: a pool far larger than the batch, slots far apart and out of order; scratch goes by row, not by slot."""
    pool = make_pool(TARGET, commit, num_slots=64)
    slots = [pool.allocate() for _ in range(64)]
    low, high = slots[7], slots[61]
    feed(TARGET, pool, low, [3, 1, 4])
    feed(TARGET, pool, high, [2, 7])
    others = [memory(pool, slot) for slot in slots if slot not in (low, high)]
    one, two = CHAIN, DraftTree([-1, 0, 0], [11, 5, 6])
    forward = verify(TARGET, pool, [one, two], [high, low]).logits
    swapped = verify(TARGET, pool, [two, one], [low, high])
    torch.testing.assert_close(swapped.logits, torch.cat([forward[3:], forward[:3]]), rtol=0, atol=TOY_NEIGHBOURS)
    pool.commit(swapped.pending, [[0, 2], [0]])
    assert (pool.length(low), pool.length(high)) == (5, 3)
    assert [memory(pool, slot) for slot in slots if slot not in (low, high)] == others


@pytest.mark.parametrize("commit", POLICIES)
def test_an_inert_sequence_in_a_batch(commit: str) -> None:
    """Faults C01 and C03: slot -1 reads nothing and writes nothing, though slot 0 is live and lies where -1 would clamp."""
    pool = make_pool(TARGET, commit)
    slots = [start(TARGET, pool, prompt) for prompt in ([3, 1, 4], [2, 7])]
    assert 0 in slots
    alone = verify(TARGET, pool, [CHAIN, CHAIN], slots).logits
    batch = verify(TARGET, pool, [CHAIN, CHAIN, CHAIN], [slots[0], -1, slots[1]])
    torch.testing.assert_close(batch.logits[[0, 1, 2, 6, 7, 8]], alone, rtol=0, atol=TOY_NEIGHBOURS)
    assert torch.isfinite(batch.logits).all()
    before = storages(pool)
    pool.commit(batch.pending, [[], [0, 1], []])
    assert storages(pool) == before
    pool.check_integrity()


def test_a_result_does_not_depend_on_its_neighbours() -> None:
    """Fault D08: alone, beside one, beside three, longer ones too, in any place of the batch: the same logits."""
    pool = make_pool(TARGET)
    slots = [start(TARGET, pool, [n, n + 1, 2, *[7] * n]) for n in range(4)]
    wide = DraftTree.from_widths([3, 2]).with_tokens(range(20, 30))
    alone = verify(TARGET, pool, [CHAIN], slots[:1]).logits
    for order in ([0, 1], [1, 0], [3, 1, 2, 0]):
        trees = [CHAIN if slot == 0 else wide for slot in order]
        batch = verify(TARGET, pool, trees, [slots[at] for at in order])
        at = batch.pending.tree.starts[order.index(0)]
        torch.testing.assert_close(batch.logits[at : at + 3], alone, rtol=0, atol=TOY_NEIGHBOURS)


def test_growth_keeps_what_was_written() -> None:
    """Attention places grow by blocks; every slot's keys and values move along."""
    layer = AttentionLayer(AttentionSpec(2, 4), 3, dtype=torch.float64, device="cpu")
    assert layer.num_places == 0
    sizes = []
    for need in (1, 256, 257, 600, 5000, 40_000, 10):
        old = layer.keys.clone(), layer.values.clone()
        layer.reserve(need)
        sizes.append(layer.num_places)
        assert layer.num_places >= need
        assert layer.num_places % layer.BLOCK == 0
        for pool, before in zip((layer.keys, layer.values), old, strict=True):
            assert torch.equal(pool[:, : before.shape[1]], before)
            pool[:, before.shape[1] :] = torch.randn_like(pool[:, before.shape[1] :])
    assert sizes == [256, 256, 512, 1024, 5120, 40_192, 40_192]


def test_a_long_sequence_crosses_growth_exactly() -> None:
    """Fault E09: places for a whole path are there before it is written; a neighbour's prefix survives the growth."""
    pool = make_pool(TARGET)
    short = start(TARGET, pool, [1, 2, 3])
    tokens = np.random.default_rng(0).integers(0, 64, 300).tolist()
    long = start(TARGET, pool, tokens[:250])
    assert pool.layers[1].num_places == 256
    oracle, neighbour = Transcript(TARGET), Transcript(TARGET)
    oracle.run(tokens[:250])
    neighbour.run([1, 2, 3])
    for at in range(250, 300, 10):
        logits = feed(TARGET, pool, long, tokens[at : at + 10])
        assert np.abs(logits.numpy() - oracle.run(tokens[at : at + 10])).max() < TOY_LOGITS
    assert pool.layers[1].num_places == 512
    assert np.abs(feed(TARGET, pool, short, [4]).numpy() - neighbour.run([4])).max() < TOY_LOGITS


def test_the_context_ends_at_max_len() -> None:
    """A step whose longest path would pass the limit is refused; the inert slot has no length."""
    pool = make_pool(TARGET, max_len=6)
    slot = start(TARGET, pool, [1, 2, 3])
    pool.begin(pack([CHAIN, DraftTree.chain(40)]), [slot, -1])
    with pytest.raises(CapacityError, match="within 6 tokens; slot 0 holds 3 and the step's longest path has 4"):
        pool.begin(pack([DraftTree.chain(3)]), [slot])
    pool.begin(pack([DraftTree.from_widths([5, 5])]), [slot])  # wide is fine: depth counts


def test_positions_are_length_plus_depth() -> None:
    """Faults C07 and G01: positions come from depth, not from row number; an inert sequence has length 0."""
    pool = make_pool(TARGET)
    slot = start(TARGET, pool, [1, 2, 3])
    scattered = DraftTree([-1, 0, 0, 0, 3])
    step = pool.begin(pack([scattered, scattered], num_rows=12), [slot, -1])
    assert step.positions.tolist() == [3, 4, 4, 4, 5, 0, 1, 1, 1, 2, 0, 0]


def test_an_empty_pool_steps() -> None:
    """A target without memory is no special case."""
    pool = CachePool([], 1, get_policy("reconstruct"), dtype=torch.float32)
    slot = pool.allocate()
    pool.commit(pool.begin(pack([CHAIN]), [slot]).pending(), [[0, 1]])
    assert pool.length(slot) == 2
    assert pool.slot_bytes(slot) == (0, 0, 0)
