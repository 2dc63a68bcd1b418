"""Verify never writes; a commit is all layers or none; what is pending is committed once, to the memory it read."""

from collections.abc import Callable

import pytest
import torch

from tolerances import TOY_LOGITS, TOY_MEMORY
from toy_oracle import Transcript
from toy_steps import feed, make_pool, memory, memory_error, raising_at, start, storages, verify
from treewy.cache import POLICIES, Batch, CachePool, Pending, get_policy
from treewy.errors import CapacityError, TreeError
from treewy.model import ToyConfig, ToyTarget
from treewy.ops import attention, conv
from treewy.packed import pack
from treewy.tree import DraftTree

TARGET = ToyTarget(seed=3)
PROMPT = [5, 9, 1, 30, 7]
SCATTERED = DraftTree([-1, 0, 0, 0, 3], [11, 1, 2, 3, 4])


@pytest.mark.parametrize("commit", POLICIES)
@pytest.mark.parametrize("poison", [False, True])
def test_verify_never_writes(commit: str, poison: bool) -> None:
    """Rollback is dropping what is pending: no byte of the pool changes, whatever the trees."""
    pool = make_pool(TARGET, commit, poison=poison)
    slots = [start(TARGET, pool, PROMPT), start(TARGET, pool, PROMPT[:1])]
    wide = DraftTree.from_widths([3, 3, 3])
    before, versions = storages(pool), [pool.version(slot) for slot in slots]
    verified = verify(TARGET, pool, [SCATTERED, wide.with_tokens(range(wide.num_rows))], slots)
    assert torch.isfinite(verified.logits).all()
    assert storages(pool) == before
    assert [pool.version(slot) for slot in slots] == versions
    again = verify(TARGET, pool, [SCATTERED, wide.with_tokens(range(wide.num_rows))], slots)
    assert torch.equal(again.logits, verified.logits)


@pytest.mark.parametrize("commit", POLICIES)
def test_a_verify_that_dies_writes_nothing(commit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward that raises between layers leaves the pool as it was, and the next step runs."""
    pool = make_pool(TARGET, commit)
    slot = start(TARGET, pool, PROMPT)
    before = storages(pool)
    with monkeypatch.context() as patch:
        patch.setattr(attention, "verify", raising_at(2, attention.verify))
        with pytest.raises(RuntimeError, match="planted"):
            verify(TARGET, pool, [SCATTERED], [slot])
    assert storages(pool) == before
    verify(TARGET, pool, [SCATTERED], [slot])


@pytest.mark.parametrize("commit", POLICIES)
def test_commit_moves_to_the_accepted_node(commit: str) -> None:
    """Fault G05: path 0-3-4 commits node 4's memory, not that of row 2, its last index."""
    pool = make_pool(TARGET, commit)
    slot = start(TARGET, pool, PROMPT)
    verified = verify(TARGET, pool, [SCATTERED], [slot])
    pool.commit(verified.pending, [[0, 3, 4]])
    oracle = Transcript(TARGET)
    oracle.run([*PROMPT, 11, 3, 4])
    assert pool.length(slot) == 8
    assert memory_error(pool, slot, oracle) < TOY_MEMORY


@pytest.mark.parametrize("commit", POLICIES)
@pytest.mark.parametrize("layers", ["da", "dada", "addd"])
def test_memory_after_every_node(commit: str, layers: str) -> None:
    """Faults A04 and B01: states after an attention layer, and windows, are those of the accepted path, for every path."""
    target = ToyTarget(ToyConfig(layers=layers, beta_scale=2.0), seed=4)
    tree = DraftTree([-1, 0, 0, 1, 1, 3, 5, 6, 2], [11, 1, 2, 3, 4, 5, 6, 7, 8])
    for node in range(tree.num_rows):
        pool = make_pool(target, commit)
        slot = start(target, pool, PROMPT)
        pool.commit(verify(target, pool, [tree], [slot]).pending, [tree.path(node)])
        oracle = Transcript(target)
        oracle.run([*PROMPT, *(tree.tokens[row] for row in tree.path(node))])
        assert memory_error(pool, slot, oracle) < TOY_MEMORY


@pytest.mark.parametrize("commit", POLICIES)
def test_nothing_accepted_beside_three_accepted(commit: str) -> None:
    """Fault A02: an accepted count of 0 leaves its sequence as it was, bit for bit, and its neighbour exact."""
    pool = make_pool(TARGET, commit)
    refused, advanced = start(TARGET, pool, PROMPT), start(TARGET, pool, PROMPT[::-1])
    chain = DraftTree.chain(3).with_tokens([11, 12, 13, 14])
    pending = verify(TARGET, pool, [chain, chain], [refused, advanced]).pending
    before, version = memory(pool, refused), pool.version(refused)
    pool.commit(pending, [[], [0, 1, 2]])
    assert memory(pool, refused) == before
    assert (pool.length(refused), pool.version(refused)) == (5, version)
    oracle = Transcript(TARGET)
    oracle.run([*PROMPT[::-1], 11, 12, 13])
    assert memory_error(pool, advanced, oracle) < TOY_MEMORY
    logits = verify(TARGET, pool, [chain], [refused]).logits
    fresh = Transcript(TARGET)
    fresh.run(PROMPT)
    assert abs(logits.numpy() - fresh.run(chain.tokens)).max() < TOY_LOGITS


@pytest.mark.parametrize("commit", POLICIES)
@pytest.mark.parametrize("dies_at", ["first conv", "second conv", "second attention"])
def test_commit_is_all_layers_or_none(commit: str, dies_at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault C11: a commit that dies half way tears its slots: nothing reads them until they are freed; others never notice."""
    pool = make_pool(TARGET, commit)
    torn, empty, bystander = (start(TARGET, pool, prompt) for prompt in (PROMPT, PROMPT[:2], PROMPT[:3]))
    chain = DraftTree.chain(2).with_tokens([11, 12, 13])
    pending = verify(TARGET, pool, [chain, chain], [torn, empty]).pending
    untouched = memory(pool, empty), memory(pool, bystander)
    with monkeypatch.context() as patch:
        op = conv if "conv" in dies_at else attention
        patch.setattr(op, "commit", raising_at(2 if "second" in dies_at else 1, op.commit))
        with pytest.raises(RuntimeError, match="planted"):
            pool.commit(pending, [[0, 1, 2], []])

    assert (memory(pool, empty), memory(pool, bystander)) == untouched
    with pytest.raises(CapacityError, match=f"slot {torn} died"):
        pool.begin(pack([chain]), [torn])
    with pytest.raises(CapacityError, match="torn"):
        pool.check_integrity()
    verify(TARGET, pool, [chain, chain], [empty, bystander])  # the rest of the batch goes on

    pool.free(torn)
    pool.check_integrity()
    assert pool.allocate() == torn
    oracle = Transcript(TARGET)
    assert abs(feed(TARGET, pool, torn, PROMPT).numpy() - oracle.run(PROMPT)).max() < TOY_LOGITS


@pytest.mark.parametrize("commit", POLICIES)
def test_a_commit_that_died_cannot_be_tried_again(commit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layers already written would move twice, and the slot would be taken for whole."""
    pool = make_pool(TARGET, commit)
    slot = start(TARGET, pool, PROMPT)
    pending = verify(TARGET, pool, [SCATTERED], [slot]).pending
    with monkeypatch.context() as patch:
        patch.setattr(conv, "commit", raising_at(2, conv.commit))
        with pytest.raises(RuntimeError, match="planted"):
            pool.commit(pending, [[0, 3]])
    with pytest.raises(CapacityError, match=f"slot {slot} died"):
        pool.commit(pending, [[0, 3]])
    with pytest.raises(CapacityError, match="torn"):
        pool.check_integrity()


def test_a_commit_refused_up_front_tears_nothing() -> None:
    """A path off the tree is refused before the first layer is touched."""
    pool = make_pool(TARGET)
    slot = start(TARGET, pool, PROMPT)
    pending = verify(TARGET, pool, [SCATTERED], [slot]).pending
    before = storages(pool)
    for paths in ([[0, 4]], [[3]], [[0, 1, 2]], [[0], [0]]):
        with pytest.raises(TreeError):
            pool.commit(pending, paths)
    assert storages(pool) == before
    pool.check_integrity()
    pool.commit(pending, [[0, 3]])


def committed_twice(pool: CachePool, slot: int, pending: Pending) -> None:
    pool.commit(pending, [[0]])


def overtaken(pool: CachePool, slot: int, pending: Pending) -> None:
    feed(TARGET, pool, slot, [1])


def freed_and_taken_again(pool: CachePool, slot: int, pending: Pending) -> None:
    pool.free(slot)
    assert pool.allocate() == slot


def freed(pool: CachePool, slot: int, pending: Pending) -> None:
    pool.free(slot)


@pytest.mark.parametrize("what", [committed_twice, overtaken, freed_and_taken_again, freed])
def test_stale_commits_are_refused(what: Callable[[CachePool, int, Pending], None]) -> None:
    """Fault D04: a late result whose slot has moved on is dropped whole."""
    pool = make_pool(TARGET)
    slot = start(TARGET, pool, PROMPT)
    pending = verify(TARGET, pool, [SCATTERED], [slot]).pending
    what(pool, slot, pending)
    before = storages(pool)
    with pytest.raises(CapacityError, match=r"committed once, to the memory it read|must be taken"):
        pool.commit(pending, [[0, 3]])
    assert storages(pool) == before
    pool.check_integrity()


def test_an_empty_commit_leaves_the_step_open() -> None:
    """Nothing was written, so what is pending still fits what it read."""
    pool = make_pool(TARGET)
    slot = start(TARGET, pool, PROMPT)
    pending = verify(TARGET, pool, [SCATTERED], [slot]).pending
    pool.commit(pending, [[]])
    pool.commit(pending, [[0, 3]])
    assert pool.length(slot) == 7


def test_a_step_that_left_out_a_layer_is_refused() -> None:
    pool = make_pool(TARGET)
    slot = start(TARGET, pool, PROMPT)
    whole = verify(TARGET, pool, [SCATTERED], [slot]).pending
    before = storages(pool)
    for layer in range(4):
        rows = {index: rows for index, rows in whole.layers.items() if index != layer}
        partial = Pending(whole.policy, whole.tree, whole.slots, whole.versions, rows)
        with pytest.raises(CapacityError, match=rf"left nothing for layers \[{layer}\]"):
            pool.commit(partial, [[0]])
    assert storages(pool) == before


def test_a_layer_is_called_by_its_kind() -> None:
    pool = make_pool(TARGET)
    step = pool.begin(pack([DraftTree([-1])]), [pool.allocate()])
    x = torch.zeros(1, 2, 8, dtype=torch.float64)
    with pytest.raises(TypeError, match="Layer 0 must be a AttentionLayer"):
        step.attend(0, x, x, x, scale=1.0)


@pytest.mark.parametrize(("commit", "other"), [(a, b) for a in POLICIES for b in POLICIES if a != b and b != "ring"])
def test_the_policy_of_a_step_commits_it(commit: str, other: str) -> None:
    """Prefill runs under a policy of its own: what a step left is committed by the policy that left it."""
    pool = make_pool(TARGET, commit)
    slot = start(TARGET, pool, PROMPT)
    batch = Batch(pack([SCATTERED]), torch.tensor(SCATTERED.tokens), (slot,), policy=get_policy(other))
    pool.commit(TARGET.verify(batch, pool).pending, [[0, 3, 4]])
    oracle = Transcript(TARGET)
    oracle.run([*PROMPT, 11, 3, 4])
    assert memory_error(pool, slot, oracle) < TOY_MEMORY
