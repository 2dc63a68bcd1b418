"""Rung 6 in exact arithmetic: drafted tokens are those of decoding without drafts. Float64, equality, no exception."""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import pytest
import torch

from drafters import Recorder, ScriptedDrafter
from tolerances import TOY_LOGITS, TOY_MEMORY
from toy_oracle import Transcript, continuation
from toy_steps import make_pool, memory_error, start, verify
from treewy.cache import POLICIES
from treewy.draft import NoDrafter, parse_shape
from treewy.engine import Engine, Generation, SamplingParams, StreamEvent, TokenKind
from treewy.model import ToyConfig, ToyTarget
from treewy.tree import DraftTree

NUM_TOKENS = 512
TARGET = ToyTarget(seed=1)
HARD = ToyTarget(ToyConfig(layers="ddadad", beta_scale=2.0), seed=2)
PROMPTS = [[17], [40, 2], [8, 8, 8], list(range(5, 15)), list(range(63, 0, -1)) + list(range(30))]
SHAPES = [
    DraftTree.chain(3),
    DraftTree.from_widths([3, 3, 3]),
    DraftTree([-1, 0, 0, 0, 3]),
    DraftTree([-1, 0, 0, 1, 1, 2, 4, 4, 6, 8, 8]),
    DraftTree.from_widths([4]),
]


@lru_cache
def scripts() -> list[list[int]]:
    """Return each prompt with its undrafted continuation, from the oracle."""
    return [continuation(TARGET, prompt, NUM_TOKENS) for prompt in PROMPTS]


def make_engine(commit: str = "reconstruct", target: ToyTarget = TARGET, drafter=None, **options) -> Engine:
    drafter = drafter or ScriptedDrafter(scripts(), skip=0.1, cut=0.2)
    return Engine(target, drafter, shape=DraftTree.chain(3), commit=commit, poison=True, **options)


def params(num_tokens: int = NUM_TOKENS, shapes: Sequence[DraftTree] = SHAPES) -> list[SamplingParams]:
    return [SamplingParams(max_new_tokens=num_tokens, shape=shape) for shape in shapes]


def test_the_oracle_is_worth_its_name() -> None:
    """Its text does not loop, and the target's plain logits are its logits."""
    for script in scripts():
        text = script[-NUM_TOKENS:]
        assert len({tuple(text[i : i + 4]) for i in range(len(text) - 3)}) > 0.6 * NUM_TOKENS
    pool = make_pool(TARGET)
    tokens = scripts()[4][:128]
    logits = verify(TARGET, pool, [DraftTree.chain(127).with_tokens(tokens)], [pool.allocate()]).logits
    assert np.abs(logits.numpy() - Transcript(TARGET).run(tokens)).max() < TOY_LOGITS


@pytest.mark.parametrize("commit", POLICIES)
def test_tokens_and_memory_over_512_tokens(commit: str) -> None:
    """Faults A01, A04, A06 and A10: right and wrong drafts, five shapes in one batch, steps that draft nothing in between.

    Tokens equal the undrafted ones; at every 64th of a sequence, all its layers' memory equals that of the undrafted
    walk: the error is flat however many drafts fell.
    """
    engine = make_engine(commit)
    done = [0] * len(PROMPTS)
    transcripts = [Transcript(TARGET) for _ in PROMPTS]
    checked = 0

    def check_memory(event: StreamEvent) -> int:
        before, done[event.index] = done[event.index], done[event.index] + len(event.token_ids)
        if event.finish_reason or before // 64 == done[event.index] // 64:
            return 0
        # Requests are admitted in order, so request i lives in slot i; all events of a step follow its commit.
        length, transcript = engine.cache.length(event.index), transcripts[event.index]
        transcript.run(scripts()[event.index][len(transcript.tokens) : length])
        assert memory_error(engine.cache, event.index, transcript) < TOY_MEMORY
        return 1

    stream = engine.stream(PROMPTS, params())
    while True:
        try:
            checked += check_memory(next(stream))
        except StopIteration as end:
            results = end.value
            break

    assert checked >= 7 * len(PROMPTS)
    assert engine.drafter.num_skipped > 50
    for result, script in zip(results, scripts(), strict=True):
        assert result.prompt_ids + result.token_ids == script
        assert result.finish_reason == "length"
        check_counts(result)
    shares = [result.not_first_sibling_share for result in results]
    assert shares[0] == 0.0
    assert min(shares[1:]) > 0.3, "the trees' later siblings were hardly ever accepted"
    assert all(result.mean_accept_len > 1.5 for result in results)


def test_batch_equals_solo() -> None:
    """Faults C04 and D08: alone, a request takes the same steps and gets the same tokens as beside four others."""
    together = make_engine().generate(PROMPTS, params(128))
    for place, (prompt, one) in enumerate(zip(PROMPTS, params(128), strict=True)):
        solo = make_engine().generate([prompt], one)[0]
        assert solo.token_ids == together[place].token_ids
        assert solo.accept_hist == together[place].accept_hist
        assert solo.kinds == together[place].kinds


def test_more_requests_than_slots() -> None:
    """Slots change hands in mid-run; nobody reads what the tenant before left."""
    engine = make_engine(max_num_seqs=2)
    results = engine.generate(PROMPTS, params(96))
    for result, script, prompt in zip(results, scripts(), PROMPTS, strict=True):
        assert result.token_ids == script[len(prompt) : len(prompt) + 96]
    assert engine.cache.num_free == 2
    engine.cache.check_integrity()


@pytest.mark.parametrize("commit", POLICIES)
def test_short_requests_on_used_slots(commit: str) -> None:
    """Faults B06 and C06: 40 prompts shorter than the conv window through 4 slots, all free memory poisoned."""
    prompts = [[n, *([3] * (n % 3))] for n in range(40)]
    wanted = [continuation(TARGET, prompt, 6) for prompt in prompts]
    engine = make_engine(commit, drafter=ScriptedDrafter(wanted), max_num_seqs=4)
    results = engine.generate(prompts, SamplingParams(max_new_tokens=6, shape=SHAPES[3]))
    assert [result.prompt_ids + result.token_ids for result in results] == wanted


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_prefill_chunks(chunk: int) -> None:
    """Fault D01: a last chunk of one row is no decode; any chunk size gives the same tokens, others decoding meanwhile."""
    results = make_engine(prefill_chunk=chunk).generate(PROMPTS, params(48))
    for result, script, prompt in zip(results, scripts(), PROMPTS, strict=True):
        assert result.token_ids == script[len(prompt) : len(prompt) + 48]


@pytest.mark.parametrize("commit", POLICIES)
def test_strong_writes_and_other_layer_orders(commit: str) -> None:
    """Beta up to 2, and gated-delta layers before, between and after attention layers."""
    prompts = PROMPTS[:3]
    wanted = [continuation(HARD, prompt, 128) for prompt in prompts]
    engine = make_engine(commit, HARD, ScriptedDrafter(wanted, skip=0.1))
    for result, script in zip(engine.generate(prompts, params(128, SHAPES[1:4])), wanted, strict=True):
        assert result.prompt_ids + result.token_ids == script


def test_without_drafts() -> None:
    """Decoding without a drafter is steps of one row, every token plain."""
    results = make_engine(drafter=NoDrafter()).generate(PROMPTS, SamplingParams(max_new_tokens=64))
    for result, script, prompt in zip(results, scripts(), PROMPTS, strict=True):
        assert result.token_ids == script[len(prompt) : len(prompt) + 64]
        assert result.kinds == [TokenKind.PREFILL] + [TokenKind.PLAIN] * 63
        assert (result.num_verify_steps, result.accept_hist, result.mean_accept_len) == (63, {1: 63}, 1.0)


@pytest.mark.parametrize("shape", [DraftTree.chain(4), DraftTree.from_widths([2, 2, 1])])
def test_a_perfect_drafter_is_always_accepted(shape: DraftTree) -> None:
    """Fault L07: acceptance stays at 100% for 500 tokens, whatever sibling holds the right token."""
    drafter = ScriptedDrafter(scripts(), right=1.0)
    result = make_engine(drafter=drafter).generate(PROMPTS[1:2], SamplingParams(max_new_tokens=501, shape=shape))[0]
    deepest = shape.max_depth + 1
    assert result.token_ids == scripts()[1][2:503]
    assert result.accept_hist == {deepest: 500 // deepest}
    assert set(result.accept_rate_by_depth.values()) == {1.0}
    assert result.mean_accept_len == deepest
    assert result.kinds.count(TokenKind.BONUS) == 500 // deepest


def test_a_hopeless_drafter_costs_steps_and_nothing_else() -> None:
    """Fault A12: every draft wrong, for 256 steps; states and tokens are those of plain decoding."""
    drafter = ScriptedDrafter(scripts(), right=0.0)
    engine = make_engine(drafter=drafter)
    result = engine.generate(PROMPTS[:1], SamplingParams(max_new_tokens=257, shape=DraftTree.from_widths([2, 2])))[0]
    assert result.token_ids == scripts()[0][1:258]
    assert result.accept_hist == {1: 256}
    # With one token to go nothing is worth drafting.
    assert result.kinds == [TokenKind.PREFILL] + [TokenKind.RECOVERED] * 255 + [TokenKind.PLAIN]


def test_the_drafter_is_shown_the_hidden_states_of_what_was_committed() -> None:
    """Fault L07: of every token once, in order, of the accepted rows and no others: prefilled, accepted or recovered."""
    recorder = Recorder(ScriptedDrafter(scripts(), skip=0.1))
    make_engine(drafter=recorder, prefill_chunk=7).generate(PROMPTS, params(48))
    for slot, (prompt, script) in enumerate(zip(PROMPTS, scripts(), strict=True)):
        shown = [committed for committed in recorder.shown if committed.slot == slot]
        hidden = torch.cat([committed.hidden for committed in shown]).numpy()
        assert [token for committed in shown for token in committed.tokens] == script[1 : len(prompt) + 48]
        oracle, wanted = Transcript(TARGET), []
        for token in script[: len(prompt) + 47]:
            oracle.push(token)
            wanted.append(oracle.hidden)
        assert np.abs(hidden - np.stack(wanted)).max() < TOY_LOGITS


def test_a_chain_is_a_tree_without_branches() -> None:
    """Fault A08: the chain entry and the tree entry take the same steps over 200 tokens."""
    shapes = [parse_shape(chain=6), parse_shape(tree="1,1,1,1,1,1"), DraftTree(range(-1, 6))]
    results = [
        make_engine().generate(PROMPTS[2:3], SamplingParams(max_new_tokens=200, shape=shape))[0] for shape in shapes
    ]
    assert all(result.token_ids == results[0].token_ids for result in results)
    assert all(result.accept_hist == results[0].accept_hist for result in results)


def test_a_shape_out_of_level_order_is_drafted_in_level_order() -> None:
    """Depth-first shapes are accepted, and drafters only ever see breadth-first ones."""
    depth_first = DraftTree([-1, 0, 1, 2, 0, 4, 4])
    recorder = Recorder(ScriptedDrafter(scripts()))
    result = make_engine(drafter=recorder).generate(PROMPTS[2:3], SamplingParams(max_new_tokens=64, shape=depth_first))[
        0
    ]
    assert result.token_ids == scripts()[2][3:67]
    depths = [tree.depth.tolist() for step in recorder.trees for tree in step]
    assert all(d == sorted(d) for d in depths)
    assert result.not_first_sibling_share > 0


@pytest.mark.parametrize("commit", POLICIES)
@pytest.mark.parametrize("layers", ["dada", "aadd", "ddda"])
def test_each_row_is_its_root_path_run_as_a_chain(commit: str, layers: str) -> None:
    """Faults A04, G01 and G05: row by row, against the target itself as a chain, and against the oracle."""
    target = ToyTarget(ToyConfig(layers=layers, beta_scale=2.0), seed=9)
    rng = np.random.default_rng(9)
    prompts = [[3, 1, 4, 1, 5], [2], rng.integers(0, 64, 20).tolist()]
    pool = make_pool(target, commit)
    slots = [start(target, pool, prompt) for prompt in prompts]
    trees = [
        DraftTree([-1, 0, 0, 0, 3], rng.integers(0, 64, 5).tolist()),
        DraftTree([-1, 0, 0, 1, 1, 3, 2, 6, 7], rng.integers(0, 64, 9).tolist()),
        DraftTree.from_widths([2, 3]).with_tokens(rng.integers(0, 64, 9).tolist()),
    ]
    batch = verify(target, pool, trees, slots)
    for seq, (slot, prompt, tree) in enumerate(zip(slots, prompts, trees, strict=True)):
        oracle = Transcript(target)
        oracle.run(prompt)
        for row in range(tree.num_rows):
            path = [tree.tokens[node] for node in tree.path(row)]
            got = batch.logits[batch.pending.tree.starts[seq] + row]
            as_chain = verify(target, pool, [DraftTree.chain(len(path) - 1).with_tokens(path)], [slot]).logits[-1]
            torch.testing.assert_close(got, as_chain, rtol=0, atol=TOY_LOGITS)
            assert np.abs(got.numpy() - oracle.fork().run(path)[-1]).max() < TOY_LOGITS


@pytest.mark.parametrize("commit", POLICIES)
def test_state_bytes(commit: str) -> None:
    """A request's peak: under store_all the committed state and a state per row of its own tree, to the byte."""
    state, kv_place = 2 * 4 * 6 * 8 * 8, 2 * 2 * 2 * 8 * 8
    record = 2 * (4 * 6 + 2 * 8 + 2 * 4) * 8
    kept = state + (16 * record + 2 * 8 if commit == "ring" else 0)
    results = make_engine(commit).generate(PROMPTS, params(32))
    for result, shape in zip(results, SHAPES, strict=True):
        rows = shape.num_rows
        assert result.state_bytes == kept + rows * (state if commit == "store_all" else record)
        assert result.conv_bytes == (3 + rows) * 2 * 56 * 8
        assert result.kv_bytes % kv_place == 0
        assert result.kv_bytes <= (len(result.prompt_ids) + 31 + rows) * kv_place


def test_prefill_keeps_no_snapshots() -> None:
    """Every prompt row is committed, so none needs a state of its own, under store_all neither."""
    engine, held = make_engine("store_all", drafter=NoDrafter()), []
    commit = engine.cache.commit

    def spy(pending, paths):
        held.append((pending.tree.num_rows, pending.bytes().state))
        commit(pending, paths)

    engine.cache.commit = spy
    engine.generate([PROMPTS[4][:64]], SamplingParams(max_new_tokens=2))
    state = 2 * 4 * 6 * 8 * 8
    assert held == [(64, 64 * state // 4), (1, state)]


def check_counts(generation: Generation) -> None:
    """What is counted adds up to what was delivered."""
    steps = generation.accept_hist
    assert sum(count * size for size, count in steps.items()) == len(generation.token_ids) - 1
    assert sum(steps.values()) == generation.num_verify_steps
    assert generation.mean_accept_len == (len(generation.token_ids) - 1) / generation.num_verify_steps
    assert len(generation.kinds) == len(generation.token_ids)
    own = sum(kind is not TokenKind.ACCEPTED for kind in generation.kinds)
    assert own == 1 + generation.num_verify_steps
