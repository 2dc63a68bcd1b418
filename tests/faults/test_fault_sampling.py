"""Reported faults of temperatures, seeds, streams and ties: drafted steps draw what steps without drafts would."""

from collections.abc import Sequence

import jaxtyping
import numpy as np
import pytest
import torch

from drafters import Recorder
from textkit import ScriptTarget
from toy_head import HIDDEN, ToyHead
from toy_oracle import Transcript
from treewy.accept import greedy, sampled
from treewy.cache import Batch, CachePool
from treewy.draft import Draft, Drafter, MTPDrafter, NoDrafter, Root
from treewy.draft.base import Draws
from treewy.engine import Engine, SamplingParams, TokenKind
from treewy.engine.request import Request
from treewy.engine.stream import Detokenizer
from treewy.model import ToyConfig, ToyTarget, Verified
from treewy.sampling import ACCEPT, DRAFT, Law, Stream
from treewy.tree import DraftTree

SHARES = [0.5, 0.3, 0.2]
SMALL = ToyTarget(ToyConfig(hidden=HIDDEN, vocab_size=10), seed=2)
TREE = DraftTree.from_widths([2, 2])


@pytest.fixture(autouse=True)
def _unchecked_annotations(monkeypatch: pytest.MonkeyPatch) -> None:
    # Checking them is most of the time here, and the engine's own tests check the same calls.
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


class Constant(ScriptTarget):
    """Says the same of every token: fixed logits."""

    def __init__(self, logits: Sequence[float]) -> None:
        super().__init__([], vocab_size=len(logits))
        self.fixed = torch.tensor(logits, dtype=torch.float64)

    def verify(self, batch: Batch, cache: CachePool) -> Verified:
        verified = super().verify(batch, cache)
        return verified._replace(logits=self.fixed.expand(len(verified.logits), -1).clone())


class Always(NoDrafter):
    """Drafts one token over and over: as many rows as a schedule says, the shape's depth by default."""

    def __init__(self, token: int, schedule: Sequence[int] = (9,)) -> None:
        self.token, self.schedule, self.step = token, schedule, 0

    def propose(self, roots: Sequence[Root]) -> list[Draft]:
        num = self.schedule[self.step % len(self.schedule)]
        self.step += 1
        return [
            Draft(DraftTree.chain(size).with_tokens([root.token] + [self.token] * size))
            for root in roots
            for size in [min(num, root.shape.max_depth)]
        ]


def dice(drafter: Drafter, num_seqs: int, num_drafts: int = 2) -> Engine:
    """Return an engine whose tokens are 0, 1 and 2 with the shares .5, .3 and .2."""
    return Engine(Constant(np.log(SHARES)), drafter, shape=DraftTree.chain(num_drafts), max_num_seqs=num_seqs)


def shares(tokens: Sequence[int]) -> np.ndarray:
    return np.bincount(tokens, minlength=3) / len(tokens)


@pytest.mark.parametrize("token", [0, 2])
def test_a_temperature_acts_on_drafted_steps(token: int) -> None:
    """Fault H04: of 300 seeds, whatever is drafted, every token comes up in a drafted step, in its share."""
    each = [SamplingParams(temperature=1.0, seed=seed, max_new_tokens=4) for seed in range(300)]
    results = dice(Always(token), 300).generate([[0]] * 300, each)
    kinds = (TokenKind.ACCEPTED, TokenKind.RECOVERED, TokenKind.BONUS)
    pairs = [(t, kind) for x in results for t, kind in zip(x.token_ids, x.kinds, strict=True) if kind in kinds]
    assert len(pairs) > 600
    # Three standard deviations of six hundred draws; the seeds are fixed.
    assert np.abs(shares([t for t, _ in pairs]) - SHARES).max() < 0.06
    assert {t for t, kind in pairs if kind is TokenKind.ACCEPTED} == {token}


def test_a_seed_is_a_requests_own() -> None:
    """Fault H10: one seed gives one text alone, in a batch and after others; without seeds equal prompts differ."""
    seeded = SamplingParams(temperature=1.0, seed=7, max_new_tokens=40)
    engine = dice(Always(0), 3)
    alone = engine.generate([[0]], seeded)[0].token_ids
    engine.generate([[1]] * 5, SamplingParams(temperature=1.0, max_new_tokens=11))
    others = [SamplingParams(temperature=1.0, seed=8, max_new_tokens=40), seeded, SamplingParams(max_new_tokens=20)]
    together = engine.generate([[0]] * 3, others)
    assert together[1].token_ids == alone
    assert together[0].token_ids != alone
    unseeded = engine.generate([[0]] * 6, SamplingParams(temperature=1.0, max_new_tokens=40))
    assert len({tuple(result.token_ids) for result in unseeded}) == 6


def test_seeded_beside_unseeded() -> None:
    """Fault H11: seed 1, none and seed 2 in one batch, many times: each follows the law, and no id takes over."""
    engine, unseeded = dice(Always(0), 3), []
    params = [SamplingParams(temperature=1.0, seed=seed, max_new_tokens=40) for seed in (1, None, 2)]
    solo = [dice(NoDrafter(), 1).generate([[0]], one)[0].token_ids for one in (params[0], params[2])]
    for _ in range(12):
        first, none, second = engine.generate([[0]] * 3, params)
        assert [first.token_ids, second.token_ids] == solo
        unseeded += none.token_ids
    # Of 480 draws: six standard deviations.
    assert np.abs(shares(unseeded) - SHARES).max() < 0.14


@pytest.mark.parametrize("schedule", [(2, 0, 0, 2), (0, 1), (9,)])
def test_a_stream_moves_with_its_own_tokens(schedule: Sequence[int]) -> None:
    """Fault H12: 2, 0, 0 and 2 drafts: a step that drafts nothing draws nothing but its token."""
    params = SamplingParams(temperature=1.0, seed=3, max_new_tokens=60)
    plain = dice(NoDrafter(), 1).generate([[0]], params)[0].token_ids
    assert dice(Always(0, schedule), 1).generate([[0]], params)[0].token_ids == plain
    neighbours = [params, SamplingParams(temperature=0.7, max_new_tokens=30), SamplingParams(max_new_tokens=9)]
    assert dice(Always(0, schedule), 3).generate([[0]] * 3, neighbours)[0].token_ids == plain


def test_seeded_top_k_with_and_without_drafts() -> None:
    """Fault H15: chosen drafts leave a seed's text alone, and all of it lies in the top-k."""
    params = SamplingParams(temperature=1.0, top_k=4, top_p=0.9, seed=5, max_new_tokens=40, drafts="argmax")
    head = ToyHead(vocab_size=10)
    drafted = Engine(SMALL, MTPDrafter(head, 1), shape=TREE, max_num_seqs=1).generate([[4, 2]], params)[0]
    plain = Engine(SMALL, NoDrafter(), shape=TREE, max_num_seqs=1).generate([[4, 2]], params)[0]
    assert drafted.token_ids == plain.token_ids
    assert drafted.num_verify_steps < plain.num_verify_steps
    logits = Transcript(SMALL).run([4, 2, *drafted.token_ids[:-1]])[1:]
    ranks = [(row > row[token]).sum() for row, token in zip(logits, drafted.token_ids, strict=True)]
    assert max(ranks) < 4
    assert set(ranks) > {0}


class Told:
    """A coin that says no to every flip, or draws what it is told, and notes what it was asked."""

    def __init__(self, token: int = 0) -> None:
        self.token, self.flips, self.weights = token, [], []

    def flip(self, probability: float) -> bool:
        self.flips.append(float(probability))
        return False

    def draw(self, weights: np.ndarray) -> int:
        self.weights.append(weights.tolist())
        return self.token


@pytest.mark.parametrize("token", [0, 1, 2])
def test_fixed_siblings_leave_the_law_alone(token: int) -> None:
    """Fault H09: of p = [.5, .3, .2] and the fixed siblings 0 and 1 nothing is subtracted: one draw from p decides."""
    coin = Told(token)
    accepted = sampled(DraftTree([-1, 0, 0], [9, 0, 1]), [np.array(SHARES)] * 3, {}, coin)
    assert coin.weights == [SHARES] * (2 if token < 2 else 1)
    assert accepted.tokens[0] == token
    assert accepted.path == ([0, 1 + token] if token < 2 else [0])


def test_what_siblings_leave_is_normalised() -> None:
    """Fault H09: after drawn siblings fall, what is left of the law is a law again before the next one is tested."""
    p, q = np.array([0.1, 0.3, 0.4, 0.2]), np.array([0.4, 0.2, 0.2, 0.2])
    coin = Told(2)
    accepted = sampled(DraftTree([-1, 0, 0], [9, 0, 3]), [p] * 3, {0: q}, coin)
    # p - q leaves [0, 1/3, 2/3, 0]; q without 0 is a third each, so 3 cannot stand; and of p - q then 2 alone is left.
    assert coin.flips == pytest.approx([0.25, 0.0])
    assert coin.weights[0] == pytest.approx([0, 0, 1, 0])
    assert accepted.tokens == [2]
    twice = Told(2)
    sampled(DraftTree([-1, 0, 0], [9, 0, 1]), [p] * 3, {0: q}, twice)
    assert twice.flips == pytest.approx([0.25, 1.0])


def test_ties_on_every_path() -> None:
    """Fault F13: logits equal at 5 and 9 give 5 from prefill, from a plain step and from a drafted one, and as a rule."""
    logits = np.full(16, -1.0)
    logits[[5, 9]] = 2.0
    target = Constant(logits)
    for drafter in (NoDrafter(), Always(9), Always(5), Always(9, (3, 0))):
        result = Engine(target, drafter, shape=DraftTree.chain(3)).generate([[0]], SamplingParams(max_new_tokens=12))[0]
        assert result.token_ids == [5] * 12
    tree = DraftTree([-1, 0, 0], [0, 9, 5])
    assert greedy(tree, torch.from_numpy(np.stack([logits] * 3))).tokens == [5, 5]


class Given(Stream):
    """A stream of given numbers."""

    def __init__(self, *numbers: float) -> None:
        super().__init__(0, DRAFT)
        self.numbers = list(numbers)

    def uniform(self, *shape: int) -> np.ndarray:
        size = int(np.prod(shape))
        taken, self.numbers = self.numbers[:size], self.numbers[size:]
        return np.array(taken).reshape(shape)


def propose(draws: Sequence[Draws | None]) -> list[Draft]:
    """Return what the toy head drafts after one and the same text, once per draw."""
    recorder = Recorder(MTPDrafter(ToyHead(vocab_size=10), len(draws)))
    session = Engine(SMALL, recorder, shape=TREE, max_num_seqs=len(draws)).open()
    session.add_all([[4, 2, 7]] * len(draws), SamplingParams(max_new_tokens=9))
    session.step()
    newest = {rows.slot: rows.tokens[-1] for rows in recorder.shown}
    return recorder.propose([Root(slot, newest[slot], DraftTree.chain(1), draw) for slot, draw in enumerate(draws)])


def test_drafts_that_are_chosen_name_no_law() -> None:
    """Fault H02: a most likely token was not drawn from the softmax, so no softmax is given as its law."""
    (draft,) = propose([None])
    assert dict(draft.laws) == {}


@pytest.mark.parametrize("law", [Law(), Law(temperature=0.7, top_k=5)])
def test_a_draft_is_drawn_from_the_law_it_names(law: Law) -> None:
    """Faults H02 and H03: at every edge of the law that is named, to nine digits, the drawn token changes."""
    (draft,) = propose([Draws(law, Given(0.5))])
    named = draft.laws[0].numpy()
    edges = named.cumsum()[:-1]
    near = [(edge - 1e-9, edge + 1e-9) for edge in edges if 1e-6 < edge < 1 - 1e-6]
    numbers = [number for pair in near for number in pair]
    drafts = propose([Draws(law, Given(number)) for number in numbers])
    want = [int((named.cumsum() <= number).sum()) for number in numbers]
    assert [draft.tree.tokens[1] for draft in drafts] == want
    assert len(set(want)) >= 4


def test_a_requests_two_streams_share_no_number() -> None:
    """Fault H05: what drafts are drawn with says nothing of what decides whether they stand."""
    params = SamplingParams(temperature=1.0, seed=11)
    request = Request(0, [1], params, TREE, 9, Detokenizer(None))
    drafts = request.draws.stream.uniform(4000)
    coins = np.array([request.coin.uniform(1)[0] for _ in range(4000)])
    assert not set(drafts.tolist()) & set(coins.tolist())
    assert abs(np.corrcoef(drafts, coins)[0, 1]) < 0.08
    assert drafts[:9].tolist() == Stream(11, DRAFT).uniform(9).tolist()
    assert coins[:9].tolist() == Stream(11, ACCEPT).uniform(9).tolist()
