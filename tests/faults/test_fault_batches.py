"""Reported faults of commits, slots, padding and batches of mixed rows, each tried as its report has it."""

from collections.abc import Sequence

import jaxtyping
import numpy as np
import pytest
import torch

from drafters import ScriptedDrafter
from tolerances import FORCED_REJECT_FLOAT32, TOY_LOGITS, TOY_MEMORY, TOY_NEIGHBOURS
from toy_oracle import Transcript, continuation
from toy_steps import feed, make_pool, memory, memory_error, start, storages, verify
from treewy.cache import Batch
from treewy.draft import Draft, ModelDrafter, Root
from treewy.engine import Engine, SamplingParams
from treewy.errors import ShapeError
from treewy.model import ToyConfig, ToyTarget
from treewy.packed import pack
from treewy.tree import DraftTree

TARGET = ToyTarget(seed=1)
PROMPTS = [[17], [40, 2], [8, 8, 8], list(range(5, 15)), [63, 1]]
SCRIPTS = [continuation(TARGET, prompt, 40) for prompt in PROMPTS]
POLICIES = ["reconstruct", "store_all"]
ROOT = DraftTree([-1], [1])


class Scheduled(ScriptedDrafter):
    """Drafts, per step, chains of given lengths of which given numbers are right.

    Args:
        scripts: As in `ScriptedDrafter`.
        plan: Per step, (drafts, right ones) of each sequence, by its slot; later steps draft nothing.
    """

    def __init__(self, scripts: Sequence[Sequence[int]], plan: Sequence[Sequence[tuple[int, int]]]) -> None:
        super().__init__(scripts)
        self.plan, self.step = list(plan), 0

    def propose(self, roots: Sequence[Root]) -> list[Draft]:
        now = self.plan[self.step] if self.step < len(self.plan) else []
        self.step += 1
        return [Draft(self._chain(root, *(now[root.slot] if root.slot < len(now) else (0, 0)))) for root in roots]

    def _chain(self, root: Root, num_drafts: int, num_right: int) -> DraftTree:
        known = self.known[root.slot]
        _, script = self._script(known)
        tokens = script[1 + len(known) :][:num_drafts]
        wrong = [token if place < num_right else (token + 1) % 64 for place, token in enumerate(tokens)]
        return DraftTree.chain(len(tokens)).with_tokens([root.token, *wrong])


def check_memory(engine: Engine, slot: int) -> None:
    """What a slot remembers is what decoding its script without drafts leaves."""
    oracle = Transcript(TARGET)
    oracle.run(SCRIPTS[slot][: engine.cache.length(slot)])
    assert memory_error(engine.cache, slot, oracle) < TOY_MEMORY


@pytest.mark.parametrize("commit", POLICIES)
def test_three_right_then_none_drafted_then_two(commit: str) -> None:
    """Fault A01: after each step all memory is that of decoding without drafts; a step without drafts reads it like any."""
    engine = Engine(TARGET, Scheduled(SCRIPTS, [[(3, 3)], [(0, 0)], [(2, 1)]]), shape=ROOT, commit=commit)
    with engine.open() as session:
        number = session.add(PROMPTS[0], SamplingParams(max_new_tokens=12))
        lengths = []
        while not session.is_idle:
            session.step()
            if not session.is_idle:
                check_memory(engine, 0)
                lengths.append(engine.cache.length(0))
        assert session.result(number).token_ids == SCRIPTS[0][1:13]
    # The first step prefills one row and decodes at once.
    assert lengths[:4] == [5, 6, 8, 9]


@pytest.mark.parametrize("commit", POLICIES)
def test_counts_follow_their_requests(commit: str) -> None:
    """Faults A10 and D03: three at once accept 4, 1 and 3; the middle one ends; the rows behind it close up."""
    plan = [[(4, 3), (4, 0), (4, 2)], [(4, 1), (0, 0), (4, 4)]]
    engine = Engine(TARGET, Scheduled(SCRIPTS, plan), shape=DraftTree.chain(4), commit=commit, max_num_seqs=3)
    with engine.open() as session:
        # Of the middle one: a token from prefill, and one from its first step.
        limits = [12, 2, 12]
        numbers = session.add_all(PROMPTS[:3], [SamplingParams(max_new_tokens=n) for n in limits])
        session.step()
        assert [engine.cache.length(slot) for slot in (0, 2)] == [1 + 4, 3 + 3]
        check_memory(engine, 0)
        check_memory(engine, 2)
        session.step()
        assert [engine.cache.length(slot) for slot in (0, 2)] == [1 + 4 + 2, 3 + 3 + 5]
        check_memory(engine, 0)
        check_memory(engine, 2)
        while not session.is_idle:
            session.step()
        for place, number in enumerate(numbers):
            script = SCRIPTS[place][len(PROMPTS[place]) :]
            assert session.result(number).token_ids == script[: limits[place]]


def test_forced_rejects_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault A12: every draft of 256 steps dropped, of two rows and of eight; states stay as close to plain decoding's.

    One rule for one row and for several: a beta rounded in one of them only would cost three digits.
    """
    # Checking annotations is most of the time here, and the tests around check the same calls.
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    target = ToyTarget(ToyConfig(layers="dad"), seed=1, dtype=torch.float32)
    pool, trees = make_pool(target, num_slots=3), [DraftTree.chain(1), DraftTree.chain(7)]
    plain, *drafted = (pool.allocate() for _ in range(3))
    for step, token in enumerate(np.random.default_rng(12).integers(0, 64, 256).tolist()):
        pool.commit(verify(target, pool, [ROOT.with_tokens([token])], [plain]).pending, [[0]])
        filled = [tree.with_tokens([(token + row) % 64 for row in range(tree.num_rows)]) for tree in trees]
        pool.commit(verify(target, pool, filled, drafted).pending, [[0], [0]])
        for layer in pool.layers[::2]:
            difference = (layer.state[drafted] - layer.state[plain]).abs().max() / layer.state[plain].abs().max()
            assert difference < FORCED_REJECT_FLOAT32, f"step {step}"


@pytest.mark.parametrize("commit", POLICIES)
def test_five_of_eight(commit: str) -> None:
    """Fault C04: five live sequences padded to eight; each, the last one too, is what it is alone."""
    pool, alone = make_pool(TARGET, commit, num_slots=8), make_pool(TARGET, commit, num_slots=8)
    chain = DraftTree.chain(2).with_tokens([11, 12, 13])
    slots = [start(TARGET, pool, prompt) for prompt in PROMPTS]
    assert slots == [start(TARGET, alone, prompt) for prompt in PROMPTS]
    padded = verify(TARGET, pool, [chain] * 8, [*slots, -1, -1, -1])
    pool.commit(padded.pending, [[0, 1]] * 8)
    for place, slot in enumerate(slots):
        one = verify(TARGET, alone, [chain], [slot])
        torch.testing.assert_close(padded.logits[3 * place :][:3], one.logits, rtol=0, atol=TOY_NEIGHBOURS)
        alone.commit(one.pending, [[0, 1]])
        oracle = Transcript(TARGET)
        oracle.run([*PROMPTS[place], 11, 12])
        assert memory_error(pool, slot, oracle) < TOY_MEMORY
    pool.check_integrity()


def test_a_dummy_step_after_a_request_has_ended() -> None:
    """Fault C05: a step of inert rows alone changes no live slot and none that is given out after it."""
    pool = make_pool(TARGET, num_slots=3)
    slots = [start(TARGET, pool, prompt) for prompt in PROMPTS[:3]]
    pool.free(slots[2])
    before = storages(pool)
    chain = DraftTree.chain(1).with_tokens([5, 6])
    dummy = verify(TARGET, pool, [chain] * 4, [-1] * 4)
    pool.commit(dummy.pending, [[0, 1]] * 4)
    assert storages(pool) == before
    assert pool.allocate() == slots[2]
    oracle = Transcript(TARGET)
    assert np.abs(feed(TARGET, pool, slots[2], [4, 8]).numpy() - oracle.run([4, 8])).max() < TOY_LOGITS


def test_tables_of_a_padded_batch_have_a_row_per_sequence() -> None:
    """Fault C08: three sequences of four rows, padded to sixteen: nothing per sequence is as long as the rows."""
    pool, chain = make_pool(TARGET), DraftTree.chain(3).with_tokens([11, 12, 13, 14])
    slots = [start(TARGET, pool, prompt) for prompt in PROMPTS[:3]]
    tree = pack([chain] * 3, num_rows=16)
    assert (len(tree.cu_rows), tree.rows.shape, tree.ancestors.shape) == (4, (3, 4), (3, 4, 4))
    tokens = torch.tensor(chain.tokens * 4)
    padded = TARGET.verify(Batch(tree, tokens, tuple(slots)), pool)
    want = verify(TARGET, pool, [chain] * 3, slots).logits
    torch.testing.assert_close(padded.logits[:12], want, rtol=0, atol=TOY_NEIGHBOURS)
    pool.commit(padded.pending, [[0, 1], [0], [0, 1, 2]])
    assert [pool.length(slot) for slot in slots] == [3, 3, 6]


@pytest.mark.parametrize("op", ["verify", "verify_snapshots"])
def test_slots_by_row_are_refused(op: str) -> None:
    """Fault C08: a slot per row instead of one per sequence."""
    from ops.problems import SHAPES, make
    from treewy.ops import gdn

    problem = make([SHAPES["chain 3"]] * 3)
    by_row = problem.slots.repeat_interleave(4)
    with pytest.raises(ShapeError, match=r"slots must have shape \(3,\)"):
        getattr(gdn, op)(*problem._replace(slots=by_row))


def test_a_batch_that_shrinks_and_grows_again() -> None:
    """Fault C09: 4, 2, 4 and 1 sequences on sixteen rows: unused rows stand at position 0 and leave no trace."""
    pool, chain = make_pool(TARGET), DraftTree.chain(3).with_tokens([11, 12, 13, 14])
    slots = [start(TARGET, pool, prompt) for prompt in PROMPTS[:4]]
    alone = [verify(TARGET, pool, [chain], [slot]).logits for slot in slots]
    for num in (4, 2, 4, 1):
        tree = pack([chain] * num, num_rows=16)
        step = pool.begin(tree, slots[:num])
        assert not step.positions[4 * num :].any()
        padded = TARGET.verify(Batch(tree, torch.tensor(chain.tokens * 4), tuple(slots[:num])), pool)
        for place in range(num):
            torch.testing.assert_close(padded.logits[4 * place :][:4], alone[place], rtol=0, atol=TOY_NEIGHBOURS)


@pytest.mark.parametrize("num_tails", [1, 2, 4])
@pytest.mark.parametrize("commit", POLICIES)
def test_a_prompt_tail_padded_with_placeholders(commit: str, num_tails: int) -> None:
    """Faults D05 and D06: one prompt token left and three placeholders below it, beside a sequence that drafts.

    Placeholders never enter a state or a window, and a tail's memory does not depend on how many there are.
    """
    pool = make_pool(TARGET, commit, num_slots=5)
    prompts = [list(range(3 + n, 9 + 2 * n)) for n in range(num_tails)]
    tails = [start(TARGET, pool, prompt[:-1]) for prompt in prompts]
    drafting = start(TARGET, pool, PROMPTS[3])
    chain = DraftTree.chain(3)
    trees = [chain.with_tokens([prompt[-1], 0, 0, 0]) for prompt in prompts]
    batch = verify(TARGET, pool, [*trees, chain.with_tokens([11, 12, 13, 14])], [*tails, drafting])
    pool.commit(batch.pending, [*[[0]] * num_tails, [0, 1, 2]])
    for slot, tokens in zip([*tails, drafting], [*prompts, [*PROMPTS[3], 11, 12, 13]], strict=True):
        oracle = Transcript(TARGET)
        oracle.run(tokens)
        assert pool.length(slot) == len(tokens)
        assert memory_error(pool, slot, oracle) < TOY_MEMORY


@pytest.mark.parametrize("commit", POLICIES)
def test_a_ragged_batch(commit: str) -> None:
    """Fault D07: prefill of 33 rows, a draft of 3 and a plain row in one step; each reads and writes its own slot."""
    pool = make_pool(TARGET, commit)
    bystander = start(TARGET, pool, PROMPTS[3])
    assert bystander == 0
    slots = [pool.allocate(), start(TARGET, pool, PROMPTS[1]), start(TARGET, pool, PROMPTS[2])]
    before, prompt = memory(pool, bystander), np.random.default_rng(7).integers(0, 64, 33).tolist()
    trees = [DraftTree.chain(n - 1) for n in (33, 4, 1)]
    rows = [prompt, [11, 12, 13, 14], [5]]
    batch = verify(TARGET, pool, [tree.with_tokens(ids) for tree, ids in zip(trees, rows, strict=True)], slots)
    pool.commit(batch.pending, [range(33), [0, 1], [0]])
    texts = [prompt, [*PROMPTS[1], 11, 12], [*PROMPTS[2], 5]]
    for slot, text in zip(slots, texts, strict=True):
        oracle = Transcript(TARGET)
        oracle.run(text)
        assert memory_error(pool, slot, oracle) < TOY_MEMORY
    assert memory(pool, bystander) == before


def test_drafts_after_steps_without_any() -> None:
    """Fault D09: drafts of 3, 0, 0 and 3 tokens: what the drafter was not asked for it is shown all the same."""
    schedule = [[(3, 3)], [(0, 0)], [(0, 0)], [(3, 3)], [(3, 3)]]
    engine = Engine(TARGET, Scheduled(SCRIPTS, schedule), shape=ROOT)
    # The drafter itself refuses a root that is not the newest token it was shown.
    result = engine.generate(PROMPTS[:1], SamplingParams(max_new_tokens=15))[0]
    assert result.token_ids == SCRIPTS[0][1:16]
    assert result.accept_hist == {1: 2, 4: 3}


def test_a_model_that_drafts_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault L07: the target as its own draft model, chains of 4: all 500 tokens are drafted and all stand."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    target = ToyTarget(ToyConfig(layers="da"), seed=1)
    drafter = ModelDrafter(target, 1, vocab_size=target.vocab_size, poison=True)
    engine = Engine(target, drafter, shape=DraftTree.chain(4), max_num_seqs=1)
    result = engine.generate([PROMPTS[1]], SamplingParams(max_new_tokens=501))[0]
    assert result.token_ids[:40] == continuation(target, PROMPTS[1], 40)[2:]
    assert result.accept_hist == {5: 100}


@pytest.mark.parametrize("num_seqs", [1, 4, 5])
def test_one_pass_per_step(num_seqs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault D10: a step verifies the whole batch in one forward, however many sequences draft."""
    engine, sizes = Engine(TARGET, ScriptedDrafter(SCRIPTS), shape=DraftTree.from_widths([2, 2])), []
    forward = engine.target.verify
    monkeypatch.setattr(
        engine.target, "verify", lambda batch, cache: sizes.append(len(batch.slots)) or forward(batch, cache)
    )
    with engine.open() as session:
        session.add_all(PROMPTS[:num_seqs], SamplingParams(max_new_tokens=30))
        session.step()
        for _ in range(3):
            sizes.clear()
            session.step()
            assert sizes == [num_seqs]
