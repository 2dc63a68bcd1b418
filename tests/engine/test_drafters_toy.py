"""Every drafter on the float64 toy: tokens are those of decoding without drafts, whatever it drafts and for whom."""

from collections.abc import Callable, Sequence
from functools import lru_cache

import pytest
import torch

from toy_head import HIDDEN, ToyHead
from toy_oracle import continuation
from treewy.draft import Budget, Committed, Drafter, ModelDrafter, MTPDrafter, NgramDrafter, NoDrafter, Shape
from treewy.engine import Engine, Generation, SamplingParams, TokenKind
from treewy.model import ToyConfig, ToyTarget
from treewy.tree import DraftTree

VOCAB, NUM_TOKENS = 8, 40
# Few tokens, so that every drafter is right now and then.
CONFIG = ToyConfig(vocab_size=VOCAB, hidden=HIDDEN)
TARGET = ToyTarget(CONFIG, seed=5)
PROMPTS = [[1], [4, 2], [3, 3, 3], [n % 5 for n in range(20)], [n * n % 7 for n in range(90)]]
SHAPES: list[Shape] = [
    DraftTree.chain(3),
    Budget(12, 4, 3),
    DraftTree.from_widths([3, 3]),
    Budget(3, 2, 1),
    DraftTree([-1, 0, 0, 1, 1, 2, 4, 4, 6]),
]


def relative(config: ToyConfig = CONFIG) -> ToyTarget:
    """Return a draft model that is right more often than chance: the target with noise on its weights."""
    model = ToyTarget(config, seed=5)
    model.head = model.head + 0.2 * torch.randn(model.head.shape, generator=torch.Generator().manual_seed(1)).double()
    return model


DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "ngram": lambda: NgramDrafter(max_n=4, min_n=1),
    "model": lambda: ModelDrafter(relative(), 8, vocab_size=VOCAB, poison=True),
    "short model": lambda: ModelDrafter(relative(CONFIG._replace(max_len=100)), 8, vocab_size=VOCAB, poison=True),
    "mtp": lambda: MTPDrafter(ToyHead(vocab_size=VOCAB, seed=2), 8, poison=True),
}


@lru_cache
def scripts() -> list[list[int]]:
    return [continuation(TARGET, prompt, NUM_TOKENS) for prompt in PROMPTS]


def make_engine(drafter: Drafter, **options) -> Engine:
    return Engine(TARGET, drafter, shape=DraftTree.chain(3), poison=True, **options)


def params(shapes: Sequence[Shape] = SHAPES, num_tokens: int = NUM_TOKENS) -> list[SamplingParams]:
    return [SamplingParams(max_new_tokens=num_tokens, shape=shape) for shape in shapes]


def assert_lossless(results: Sequence[Generation]) -> None:
    for result, script in zip(results, scripts(), strict=True):
        assert result.prompt_ids + result.token_ids == script
        assert result.finish_reason == "length"


@pytest.mark.parametrize("name", DRAFTERS)
def test_drafted_tokens_are_the_undrafted_ones(name: str) -> None:
    """Fixed shapes and budgets in one batch, slots changing hands, prompts in chunks; some drafts stand, some fall."""
    engine = make_engine(DRAFTERS[name](), max_num_seqs=3, prefill_chunk=7)
    results = engine.generate(PROMPTS, params())
    assert_lossless(results)
    kinds = [kind for result in results for kind in result.kinds]
    assert {TokenKind.ACCEPTED, TokenKind.RECOVERED} <= set(kinds)
    engine.cache.check_integrity()


@pytest.mark.parametrize("name", ["ngram", "model", "mtp"])
def test_batch_equals_solo(name: str) -> None:
    """Alone, a request takes the same steps as beside four others of other shapes."""
    together = make_engine(DRAFTERS[name]()).generate(PROMPTS, params(num_tokens=16))
    for place, (prompt, one) in enumerate(zip(PROMPTS, params(num_tokens=16), strict=True)):
        solo = make_engine(DRAFTERS[name]()).generate([prompt], one)[0]
        assert (solo.token_ids, solo.accept_hist) == (together[place].token_ids, together[place].accept_hist)
        assert solo.num_drafted == together[place].num_drafted


@pytest.mark.parametrize("chunk", [7, 64])
def test_the_target_drafting_for_itself_is_always_right(chunk: int) -> None:
    """Every draft of a chain is accepted, all along: the draft model has seen the whole text, its first token included."""
    drafter = ModelDrafter(TARGET, 8, vocab_size=VOCAB, poison=True)
    shapes: list[Shape] = [
        DraftTree.chain(3),
        Budget(40, 3, 1),
        DraftTree.chain(3),
        DraftTree.from_widths([2, 2, 2]),
        Budget(4, 3, 1),
    ]
    results = make_engine(drafter, prefill_chunk=chunk).generate(PROMPTS, params(shapes, 1 + 4 * 8))
    for result, script, prompt in zip(results, scripts(), PROMPTS, strict=True):
        assert result.token_ids == script[len(prompt) : len(prompt) + 33]
        assert result.accept_hist == {4: 8}
        assert set(result.accept_rate_by_depth.values()) == {1.0}
        assert result.not_first_sibling_share == 0.0


@pytest.mark.parametrize("name", ["ngram", "model", "mtp"])
def test_chosen_drafts_at_a_temperature_leave_a_seeds_tokens_alone(name: str) -> None:
    """Budgets and n-grams are chosen whatever the request's drafts are: one draw per token, as without a drafter."""
    shapes = [Budget(12, 4, 3)] * 3 if name != "ngram" else [DraftTree.chain(3), Budget(12, 4, 3), SHAPES[2]]
    wishes = [
        SamplingParams(max_new_tokens=30, shape=shape, temperature=0.9, top_k=6, seed=seed)
        for seed, shape in enumerate(shapes)
    ]
    plain = make_engine(NoDrafter()).generate(PROMPTS[2:], wishes)
    drafted = make_engine(DRAFTERS[name]()).generate(PROMPTS[2:], wishes)
    assert [result.token_ids for result in drafted] == [result.token_ids for result in plain]
    assert sum(result.num_verify_steps for result in drafted) < sum(result.num_verify_steps for result in plain)


def test_drawn_drafts_of_the_target_itself_all_stand() -> None:
    """Drawn from the very law they are held against, at any temperature, each first child is accepted."""
    drafter = ModelDrafter(TARGET, 8, vocab_size=VOCAB, poison=True)
    params = SamplingParams(max_new_tokens=1 + 4 * 8, temperature=1.3, seed=4, shape=DraftTree.from_widths([2, 1, 2]))
    results = make_engine(drafter).generate(PROMPTS, params)
    assert [result.accept_hist for result in results] == [{4: 8}] * len(PROMPTS)


class Misled(NgramDrafter):
    """Sees other tokens than those that were committed."""

    def observe(self, committed: Sequence[Committed]) -> None:
        super().observe(
            [rows._replace(tokens=[(token * 3 + 1) % VOCAB for token in rows.tokens]) for rows in committed]
        )


class Forgetful(ModelDrafter):
    """Sees every other step only, and half of its tokens wrong."""

    count = 0

    def observe(self, committed: Sequence[Committed]) -> None:
        self.count += 1
        if self.count % 2:
            super().observe([rows._replace(tokens=[token // 2 for token in rows.tokens]) for rows in committed])


@pytest.mark.parametrize(
    "drafter", [lambda: Misled(min_n=1), lambda: Forgetful(TARGET, 8, vocab_size=VOCAB, poison=True)]
)
def test_a_drafter_that_sees_wrong_tokens_costs_steps_and_nothing_else(drafter: Callable[[], Drafter]) -> None:
    results = make_engine(drafter()).generate(PROMPTS, params())
    assert_lossless(results)
    assert sum(result.num_drafted for result in results) > 100


def test_budgets_reach_no_further_than_the_request() -> None:
    """With few tokens to go the trees get shallower: no row is drafted that could not be delivered."""
    engine = make_engine(ModelDrafter(TARGET, 8, vocab_size=VOCAB, poison=True))
    result = engine.generate(PROMPTS[1:2], SamplingParams(max_new_tokens=4, shape=Budget(200, 9, 1)))[0]
    assert result.token_ids == scripts()[1][2:6]
    assert (result.num_drafted, result.accept_hist) == (2, {3: 1})
