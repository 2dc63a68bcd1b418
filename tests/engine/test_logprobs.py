"""Log-probabilities under drafting: those of the undrafted text, one per delivered token, wherever it ends."""

from collections.abc import Sequence

import numpy as np
import pytest

from drafters import ScriptedDrafter
from textkit import ByteTokenizer, ScriptTarget
from tolerances import TOY_LOGITS
from toy_oracle import Transcript, continuation
from treewy.draft import NoDrafter
from treewy.engine import Engine, Generation, SamplingParams
from treewy.model import ToyConfig, ToyTarget
from treewy.tree import DraftTree

TARGET = ToyTarget(ToyConfig(max_len=128), seed=1)
PROMPT = [40, 2]
SCRIPT = continuation(TARGET, PROMPT, 50)
SHAPES = [DraftTree.chain(4), DraftTree.from_widths([2, 2, 1])]


def log_law(prompt: Sequence[int], tokens: Sequence[int]) -> np.ndarray:
    """Return the log-softmax at each of `tokens`, token by token, by the oracle."""
    logits = Transcript(TARGET).run([*prompt, *tokens[:-1]])[len(prompt) - 1 :]
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def check(result: Generation, prompt: Sequence[int], num_top: int) -> None:
    want = log_law(prompt, result.token_ids)
    assert len(result.logprobs) == len(result.token_ids)
    for row, token, got in zip(want, result.token_ids, result.logprobs, strict=True):
        assert abs(got.logprob - row[token]) < TOY_LOGITS
        best = np.argsort(-row, kind="stable")[:num_top]
        assert list(got.top) == best.tolist()
        assert np.abs(np.array(list(got.top.values())) - row[best]).max(initial=0.0) < TOY_LOGITS


@pytest.mark.parametrize("num_top", [0, 1, 5])
@pytest.mark.parametrize("shape", SHAPES)
def test_greedy(shape: DraftTree, num_top: int) -> None:
    """Faults I09 and I10: accepted, recovered and bonus tokens each with their own row, not their block's."""
    drafter = ScriptedDrafter([SCRIPT], right=0.8, skip=0.1, cut=0.2)
    engine = Engine(TARGET, drafter, shape=shape)
    result = engine.generate([PROMPT], SamplingParams(max_new_tokens=40, logprobs=num_top))[0]
    assert result.token_ids == SCRIPT[2:42]
    check(result, PROMPT, num_top)


@pytest.mark.parametrize("drafts", ["argmax", "sampled"])
def test_at_a_temperature_they_stay_the_models_own(drafts: str) -> None:
    """Temperature and truncation decide what is sampled, not what the model thinks of it."""
    from toy_head import HIDDEN, ToyHead
    from treewy.draft import MTPDrafter

    target = ToyTarget(ToyConfig(hidden=HIDDEN, vocab_size=10), seed=2)
    engine = Engine(target, MTPDrafter(ToyHead(vocab_size=10), 1), shape=SHAPES[1], max_num_seqs=1)
    params = SamplingParams(temperature=0.6, top_k=4, seed=5, max_new_tokens=30, logprobs=3, drafts=drafts)
    result = engine.generate([[4, 2]], params)[0]
    logits = Transcript(target).run([4, 2, *result.token_ids[:-1]])[1:]
    want = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    got = [x.logprob for x in result.logprobs]
    assert np.abs(got - want[np.arange(30), result.token_ids]).max() < TOY_LOGITS
    assert result.num_verify_steps < 29


def test_top_n_of_a_whole_vocabulary_and_beyond() -> None:
    engine = Engine(TARGET, NoDrafter(), shape=DraftTree([-1]))
    result = engine.generate([PROMPT], SamplingParams(max_new_tokens=2, logprobs=1000))[0]
    assert sorted(result.logprobs[0].top) == list(range(64))


@pytest.mark.parametrize("place", range(1, 10))
def test_cut_in_mid_block_by_an_eos(place: int) -> None:
    """Nothing is recorded of what was accepted and then cut."""
    script = [1, 2, *range(30, 60)]
    script[1 + place] = 9
    drafter = ScriptedDrafter([script], right=1.0, vocab_size=256)
    engine = Engine(ScriptTarget(script), drafter, shape=DraftTree.chain(4), eos_ids=[9])
    result = engine.generate([[1, 2]], SamplingParams(logprobs=1, record_gaps=True))[0]
    assert result.token_ids == script[2 : 2 + place]
    assert [next(iter(x.top)) for x in result.logprobs] == result.token_ids
    assert len(result.top2_gaps) == len(result.kinds) == place


@pytest.mark.parametrize("stop", ["lo", "hello wor", "d"])
def test_cut_in_mid_block_by_a_stop_string(stop: str) -> None:
    """Fault I04: nothing is recorded past the stop."""
    script = [1, 2, *b"hello world and more"]
    drafter = ScriptedDrafter([script], right=1.0, vocab_size=256)
    engine = Engine(ScriptTarget(script), drafter, shape=DraftTree.chain(4), tokenizer=ByteTokenizer())
    result = engine.generate([[1, 2]], SamplingParams(logprobs=1, stop=[stop]))[0]
    assert result.finish_reason == "stop"
    assert bytes(result.token_ids).decode() == "hello world"[: "hello world".index(stop) + len(stop)]
    assert [next(iter(x.top)) for x in result.logprobs] == result.token_ids


def test_events_carry_what_the_result_holds() -> None:
    """A request that asks beside one that does not: each event has one entry per token, or none at all."""
    prompts, wants = [PROMPT, [8, 8, 8]], [2, None]
    scripts = [SCRIPT, continuation(TARGET, prompts[1], 30)]
    engine = Engine(TARGET, ScriptedDrafter(scripts), shape=SHAPES[1])
    events = engine.stream(prompts, [SamplingParams(max_new_tokens=20, logprobs=n) for n in wants])
    gathered: list[list] = [[], []]
    while True:
        try:
            event = next(events)
        except StopIteration as stop:
            results = stop.value
            break
        assert len(event.logprobs) == (len(event.token_ids) if wants[event.index] is not None else 0)
        gathered[event.index] += event.logprobs
    assert gathered == [results[0].logprobs, []]
    assert results[1].logprobs == []
    check(results[0], PROMPT, 2)
