"""Where a request ends inside an accepted block: tokens, text, committed rows and counts end together."""

from collections.abc import Sequence

import numpy as np
import pytest

from drafters import ScriptedDrafter
from textkit import ByteTokenizer, PieceTokenizer, ScriptTarget
from tolerances import TOY_LOGITS
from toy_oracle import Transcript, continuation
from toy_steps import committed_lengths
from treewy.engine import Engine, Generation, SamplingParams, TokenKind
from treewy.model import ToyConfig, ToyTarget
from treewy.tree import DraftTree

EOS = 9
PROMPT = [1, 2]
CHAIN = DraftTree.chain(4)
BYTES = ByteTokenizer()


def make_engine(
    script: Sequence[int], tokenizer=None, *, right: float = 1.0, shape: DraftTree = CHAIN, **options
) -> Engine:
    """Return an engine whose target follows `script` and whose drafter knows it."""
    target = ScriptTarget(script)
    drafter = ScriptedDrafter([script], right=right, vocab_size=256)
    return Engine(target, drafter, shape=shape, tokenizer=tokenizer, eos_ids=[EOS], **options)


def generate(text: str, stop: Sequence[str] = (), *, shape: DraftTree = CHAIN, max_new_tokens: int = 64) -> Generation:
    """Run a target that says `text`, byte by byte."""
    script = [1, 2, *text.encode()]
    engine = make_engine(script, BYTES, shape=shape)
    return engine.generate([PROMPT], SamplingParams(max_new_tokens=max_new_tokens, stop=stop))[0]


@pytest.mark.parametrize("place", range(1, 12))
def test_eos_anywhere_in_a_block(place: int) -> None:
    """Faults I01 and I08: an EOS accepted in mid-block ends everything there: tokens, committed rows, counts, kinds."""
    script = [*PROMPT, *range(30, 60)]
    script[1 + place] = EOS  # the place-th token
    engine = make_engine(script)
    lengths = committed_lengths(engine)
    result = engine.generate([PROMPT])[0]
    assert result.token_ids == script[2 : 2 + place]
    assert result.finish_reason == "eos"
    assert lengths[-1] == len(PROMPT) + place - 1  # all but the newest token
    # One token from prefill, then blocks of five; the last counts what it delivered.
    whole, rest = divmod(place - 1, 5)
    assert result.accept_hist == {size: count for size, count in ((rest, rest > 0), (5, whole)) if count}
    assert len(result.kinds) == place
    assert result.mean_accept_len == ((place - 1) / result.num_verify_steps if place > 1 else 0)
    # Every node that was reached stood; a cut step says nothing of the depths below its cut.
    reached = range(1, 5) if whole else range(1, rest)
    assert result.accept_rate_by_depth == dict.fromkeys(reached, 1.0)


def test_eos_inside_a_tree_block_counts_three() -> None:
    """Fault I08: of [d1, d2, EOS, d4, d5] and a bonus, the step counts 3."""
    script = [*PROMPT, 40, 41, 42, EOS, 44, 45, 46]
    result = make_engine(script, shape=DraftTree.from_widths([2, 1, 1, 1, 1])).generate([PROMPT])[0]
    assert result.token_ids == [40, 41, 42, EOS]
    assert result.accept_hist == {3: 1}
    assert result.kinds == [TokenKind.PREFILL] + [TokenKind.ACCEPTED] * 3


@pytest.mark.parametrize("shape", [CHAIN, DraftTree.from_widths([3, 2])])
def test_a_drafted_eos_that_the_target_rejects(shape: DraftTree) -> None:
    """Fault I13: only the target ends a text; a wrong EOS draft is a wrong draft."""

    class Pessimist(ScriptedDrafter):
        def _filled(self, shape, root, future, rng):
            return shape.with_tokens([root] + [EOS] * shape.num_drafts)

    script = [*PROMPT, *range(30, 90)]
    engine = Engine(ScriptTarget(script), Pessimist([script]), shape=shape, eos_ids=[EOS])
    result = engine.generate([PROMPT], SamplingParams(max_new_tokens=40))[0]
    assert result.token_ids == script[2:42]
    assert result.finish_reason == "length"
    assert result.accept_hist == {1: 39}


def test_ignore_eos_goes_on() -> None:
    script = [*PROMPT, 30, EOS, 31, EOS, 32, 33]
    result = make_engine(script).generate([PROMPT], SamplingParams(max_new_tokens=6, ignore_eos=True))[0]
    assert result.token_ids == script[2:]
    assert result.finish_reason == "length"


def test_eos_of_one_request_leaves_the_others() -> None:
    """On the toy: the first token of request 0's text that comes again is its EOS; the batch around it goes on."""
    target = ToyTarget(seed=1)
    prompts = [[17], [40, 2], [8, 8, 8]]
    scripts = [continuation(target, prompt, 60) for prompt in prompts]
    eos = scripts[0][12]
    wanted = [script[len(prompt) :] for prompt, script in zip(prompts, scripts, strict=True)]
    wanted = [text[: text.index(eos) + 1] if eos in text else text for text in wanted]
    engine = Engine(target, ScriptedDrafter(scripts, skip=0.1), shape=DraftTree.from_widths([3, 2, 1]), eos_ids=[eos])
    results = engine.generate(prompts, SamplingParams(max_new_tokens=60))
    assert [result.token_ids for result in results] == wanted
    assert results[0].finish_reason == "eos"
    assert len(wanted[0]) < 60


@pytest.mark.parametrize("num_tokens", range(1, 17))
def test_exactly_max_new_tokens(num_tokens: int) -> None:
    """Fault I06: with blocks of 5, any limit is delivered and counted to the token."""
    engine = make_engine([*PROMPT, *range(30, 90)])
    lengths = committed_lengths(engine)
    result = engine.generate([PROMPT], SamplingParams(max_new_tokens=num_tokens))[0]
    assert result.token_ids == list(range(30, 30 + num_tokens))
    assert result.finish_reason == "length"
    assert lengths[-1] == len(PROMPT) + num_tokens - 1
    assert sum(size * count for size, count in result.accept_hist.items()) == num_tokens - 1
    assert result.num_verify_steps == -(-(num_tokens - 1) // 5)


@pytest.mark.parametrize("shape", [DraftTree.chain(7), DraftTree.from_widths([2, 2, 1, 1])])
@pytest.mark.parametrize("from_limit", [1, 2, 3, 4])
def test_the_context_limit(shape: DraftTree, from_limit: int) -> None:
    """Fault I14: deep trees near the limit are cut to what fits; the text ends there, and nothing runs past it."""
    target = ToyTarget(ToyConfig(max_len=64), seed=1)
    prompt = np.random.default_rng(14).integers(0, 64, 64 - from_limit).tolist()
    script = continuation(target, prompt, 8)
    positions: list[int] = []
    begin = ToyTarget.verify

    def verify(batch, cache):
        step = cache.begin(batch.tree, batch.slots)
        positions.extend(step.positions.tolist())
        return begin(target, batch, cache)

    target.verify = verify
    engine = Engine(target, ScriptedDrafter([script], right=1.0), shape=shape)
    result = engine.generate([prompt], SamplingParams(max_new_tokens=100))[0]
    assert result.prompt_ids + result.token_ids == script[:64]
    assert result.finish_reason == "length"
    assert max(positions) <= 63


@pytest.mark.parametrize("shape", [DraftTree([-1]), CHAIN, DraftTree.chain(11)])
@pytest.mark.parametrize("stop", ["!", "lo", "hello", "ello wor", "d", " "])
def test_a_stop_string_anywhere_in_a_block(stop: str, shape: DraftTree) -> None:
    """Faults I03 and I04: found wherever it lies in an accepted block; the text ends before it, whatever the blocks were."""
    result = generate("hello world!", [stop], shape=shape)
    end = "hello world!".index(stop)
    assert result.text == "hello world!"[:end]
    assert result.finish_reason == "stop"
    # Token ids end with the token that completed it.
    assert result.token_ids == list(b"hello world!"[: end + len(stop)])
    assert len(result.kinds) == len(result.token_ids)


def test_a_stop_string_that_never_comes() -> None:
    """Fault I15: what was held back as its possible beginning is delivered at the end."""
    result = generate("so long and thanks for all the f", ["fish"], max_new_tokens=32)
    assert result.text == "so long and thanks for all the f"
    assert result.finish_reason == "length"


def test_a_stop_string_completed_by_the_last_token() -> None:
    """At the limit, the stop is the reason."""
    result = generate("abcdef", ["ef"], max_new_tokens=6)
    assert (result.text, result.finish_reason, len(result.token_ids)) == ("abcd", "stop", 6)


def test_text_after_characters_of_several_bytes() -> None:
    """Fault I15: a stop string after, and inside, characters that several accepted tokens make up."""
    assert generate("né🙂 end", [" end"]).text == "né🙂"
    assert generate("né🙂 end", ["🙂"]).text == "né"


@pytest.mark.parametrize(
    ("pieces", "text", "reason", "num_tokens"),
    [
        (["foo", " STOP", "<eos>", "x"], "foo", "stop", 2),
        (["foo", "<eos>", " STOP", "x"], "foo", "eos", 2),
        (["foo", " ST", "OP", "<eos>"], "foo", "stop", 3),
        (["foo", " ST", "<eos>", "OP"], "foo ST", "eos", 3),
        (["<eos>", "foo", " STOP", "x"], "", "eos", 1),
    ],
)
def test_stop_string_and_eos_in_one_block(pieces: list[str], text: str, reason: str, num_tokens: int) -> None:
    """Fault I05: whichever comes first in token order wins."""
    tokenizer = PieceTokenizer(["a", "b", *pieces], special=[2 + pieces.index("<eos>")])
    script = [0, 1, *range(2, 6), 0, 0, 0]
    engine = Engine(
        ScriptTarget(script),
        ScriptedDrafter([script], right=1.0),
        shape=CHAIN,
        tokenizer=tokenizer,
        eos_ids=[2 + pieces.index("<eos>")],
    )
    result = engine.generate([[0, 1]], SamplingParams(max_new_tokens=20, stop=[" STOP"]))[0]
    assert (result.text, result.finish_reason) == (text, reason)
    assert len(result.token_ids) == num_tokens


@pytest.mark.parametrize("place", range(8, 14))
def test_gaps_are_those_of_each_token(place: int) -> None:
    """Fault I10: the recorded top-2 gap stands at its token: accepted, recovered or bonus, up to a cut in mid-block."""
    target = ToyTarget(seed=1)
    script = continuation(target, [40, 2], 50)
    drafter = ScriptedDrafter([script], right=0.95, skip=0.1)
    engine = Engine(target, drafter, shape=DraftTree.from_widths([2, 1, 1, 1]), eos_ids=[script[place]])
    result = engine.generate([[40, 2]], SamplingParams(max_new_tokens=50, record_gaps=True))[0]
    assert result.finish_reason == "eos"
    logits = Transcript(target).run([40, 2, *result.token_ids[:-1]])[1:]
    top = np.sort(logits, axis=1)
    assert len(result.top2_gaps) == len(result.token_ids)
    assert np.abs(np.array(result.top2_gaps) - (top[:, -1] - top[:, -2])).max() < TOY_LOGITS


@pytest.mark.parametrize(("max_new_tokens", "drafted"), [(1, 0), (2, 0), (3, 1), (4, 2), (6, 4), (7, 4), (8, 5)])
def test_no_row_is_drafted_that_the_limit_would_cut(max_new_tokens: int, drafted: int) -> None:
    """One token from prefill, then blocks of a chain of 4: the last tree is as deep as the tokens left allow."""
    engine = make_engine([*PROMPT, *range(30, 60)], shape=DraftTree.chain(4))
    result = engine.generate([PROMPT], SamplingParams(max_new_tokens=max_new_tokens))[0]
    assert len(result.token_ids) == max_new_tokens
    assert result.num_drafted == drafted
