"""What the engine refuses, before anything runs; and how it behaves when something breaks while it does."""

from collections.abc import Callable, Sequence

import jaxtyping
import numpy as np
import pytest

from drafters import ScriptedDrafter
from textkit import ByteTokenizer, ScriptTarget
from toy_oracle import continuation
from toy_steps import raising_at
from treewy.cache import CachePool
from treewy.draft import Draft, Drafter, NoDrafter, Root
from treewy.engine import Engine, SamplingParams
from treewy.errors import CapacityError, RequestError, TreeError, TreeWYError, UnsupportedError
from treewy.model import ToyConfig, ToyTarget
from treewy.ops import conv
from treewy.tree import DraftTree

TARGET = ToyTarget(ToyConfig(max_len=64), seed=1)
PROMPTS = [[17], [40, 2], [8, 8, 8]]
SCRIPTS = [continuation(TARGET, prompt, 40) for prompt in PROMPTS]
TREE = DraftTree.from_widths([3, 2])


def make_engine(**options) -> Engine:
    options = {"shape": TREE, "max_num_seqs": 2, "poison": True, **options}
    return Engine(TARGET, ScriptedDrafter(SCRIPTS), **options)


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        ([[1], []], SamplingParams(), "prompt 1 is empty"),
        ([[1] * 64], SamplingParams(), "fit the context of 64 tokens; prompt 0 has 64"),
        ([[1], [3, 64]], SamplingParams(), r"lie in 0\.\.63; prompt 1 holds 64"),
        ([[-1]], SamplingParams(), r"lie in 0\.\.63; prompt 0 holds -1"),
        (["hi"], SamplingParams(), "text prompt needs a tokenizer"),
        ("hi", SamplingParams(), "must be a list; got one string"),
        ([[1]], SamplingParams(stop=["x"]), "Stop strings need a tokenizer"),
        ([[1], [2]], [SamplingParams()], "one params per prompt; got 1 for 2"),
    ],
)
def test_bad_requests_run_nothing(prompts, params, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One bad prompt refuses the call before the target sees any of it, streamed or not."""
    engine = make_engine()
    monkeypatch.setattr(engine.target, "verify", None)
    for call in (engine.generate, engine.stream):
        with pytest.raises(RequestError, match=message):
            call(prompts, params)
    assert engine.cache.num_free == 2


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"repetition_penalty": 1.1}, UnsupportedError, "repetition_penalty=1.1"),
        ({"presence_penalty": 0.5}, UnsupportedError, "presence_penalty=0.5"),
        ({"frequency_penalty": -0.5}, UnsupportedError, "frequency_penalty=-0.5"),
        ({"min_tokens": 3}, UnsupportedError, "min_tokens=3"),
        ({"logit_bias": {3: 1.0}}, UnsupportedError, "logit_bias="),
        ({"bad_words": ["x"]}, UnsupportedError, "bad_words="),
        ({"grammar": "root ::= x"}, UnsupportedError, "grammar="),
        ({"temperature": float("inf")}, RequestError, "finite temperature"),
        ({"top_p": 0.0}, RequestError, "top_p must lie"),
        ({"temperature": True}, RequestError, "temperature must be a number"),
        ({"top_k": -1}, RequestError, "top_k must be"),
        ({"min_p": 1.5}, RequestError, "min_p must lie"),
        ({"seed": -1}, RequestError, "seed must be"),
        ({"drafts": "beam"}, RequestError, "drafts must be"),
        ({"logprobs": -1}, RequestError, "logprobs must be"),
        ({"temperature": -1.0}, RequestError, "at least 0; got -1"),
        ({"temperature": float("nan")}, RequestError, "at least 0; got nan"),
        ({"max_new_tokens": 0}, RequestError, "at least 1; got 0"),
        ({"stop": "end"}, RequestError, "Wrap a single string"),
        ({"stop": ["end", ""]}, RequestError, "non-empty"),
    ],
)
def test_bad_params(options: dict, error: type[TreeWYError], message: str) -> None:
    """Faults H13, H14, H17 and I11: penalties, least lengths and grammars are refused by name, never ignored."""
    with pytest.raises(error, match=message):
        SamplingParams(**options)


@pytest.mark.parametrize(
    ("params", "got"), [({"max_new_tokens": 3}, r"\{'max_new_tokens': 3\}"), (3, "3"), ([None], r"\[None\]")]
)
def test_params_of_another_kind(params: object, got: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a user meets them, whose annotations nothing enforces."""
    engine = make_engine()
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    with pytest.raises(RequestError, match=f"must be a SamplingParams, or one per prompt; got {got}"):
        engine.generate([[1]], params)
    with pytest.raises(RequestError, match="non-empty strings; got 5"):
        SamplingParams(stop=5)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"commit": "replay"}, UnsupportedError, "store_all, reconstruct, ring; got 'replay'"),
        ({"prefill_chunk": 0}, RequestError, r"prefill_chunk must lie in 1\.\.4096"),
        ({"max_num_seqs": 0}, CapacityError, "at least one slot"),
    ],
)
def test_bad_engine_options(options: dict, error: type[TreeWYError], message: str) -> None:
    with pytest.raises(error, match=message):
        make_engine(**options)


def test_no_prompts_no_results() -> None:
    engine = make_engine()
    assert engine.generate([]) == []
    assert list(engine.stream([])) == []


def test_token_ids_of_any_integer_kind() -> None:
    """NumPy's ids are ids, and come back as plain integers."""
    result = make_engine().generate([list(np.array(PROMPTS[1]))], SamplingParams(max_new_tokens=8))[0]
    assert result.token_ids == SCRIPTS[1][2:10]
    assert {type(token) for token in result.prompt_ids + result.token_ids} == {int}


def test_text_in_text_out() -> None:
    tokenizer = ByteTokenizer()
    script = list(b"2+2=4, of course")
    engine = Engine(ScriptTarget(script), NoDrafter(), shape=TREE, tokenizer=tokenizer)
    result = engine.generate(["2+2="], SamplingParams(max_new_tokens=12))[0]
    assert (result.prompt_ids, result.text) == (script[:4], "4, of course")


def test_params_per_prompt() -> None:
    """Each request has its own limit and shape."""
    engine = make_engine()
    each = [SamplingParams(max_new_tokens=5 + n, shape=DraftTree.chain(n)) for n in range(3)]
    results = engine.generate(PROMPTS, each)
    assert [len(result.token_ids) for result in results] == [5, 6, 7]
    assert max(results[1].accept_hist) == 2
    assert set(results[0].accept_hist) == {1}


# Streaming


def test_stream_equals_generate() -> None:
    """Events put together are the generations: tokens, kinds, text and reason; the iterator's value is the same list."""
    tokenizer = ByteTokenizer()
    script = [1, 2, *"né🙂 so it goes. END".encode()]
    params = SamplingParams(max_new_tokens=60, stop=["END"])

    def engine() -> Engine:
        drafter = ScriptedDrafter([script], vocab_size=256)
        return Engine(ScriptTarget(script), drafter, shape=TREE, tokenizer=tokenizer)

    wanted = engine().generate([[1, 2]], params)[0]
    events, stream = [], engine().stream([[1, 2]], params)
    while True:
        try:
            events.append(next(stream))
        except StopIteration as end:
            returned = end.value[0]
            break
    assert [token for event in events for token in event.token_ids] == wanted.token_ids == returned.token_ids
    assert [kind for event in events for kind in event.kinds] == wanted.kinds
    assert "".join(piece for event in events for piece in event.pieces) == wanted.text == "né🙂 so it goes. "
    assert [event.finish_reason for event in events] == [None] * (len(events) - 1) + ["stop"]
    assert all(len(event.token_ids) == len(event.pieces) == len(event.kinds) for event in events)
    assert len(events) == 1 + wanted.num_verify_steps


def test_a_stream_reads_its_prompts_once_and_at_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Encoding is work, and what the caller does to its lists afterwards is none of the stream's business."""
    tokenizer, read = ByteTokenizer(), []
    script = [*b"ab", *b"cdefgh"]
    engine = Engine(ScriptTarget(script), NoDrafter(), shape=TREE, tokenizer=tokenizer)
    encode = tokenizer.encode
    monkeypatch.setattr(tokenizer, "encode", lambda text: read.append(text) or encode(text))
    prompts = ["ab"]
    stream = engine.stream(prompts, SamplingParams(max_new_tokens=3))
    prompts[0] = "zz"
    assert [token for event in stream for token in event.token_ids] == list(b"cde")
    assert read == ["ab"]


def test_events_of_a_batch_carry_their_request() -> None:
    engine = make_engine()
    got: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for event in engine.stream(PROMPTS, SamplingParams(max_new_tokens=20)):
        got[event.index] += event.token_ids
    assert list(got.values()) == [
        script[len(prompt) : len(prompt) + 20] for prompt, script in zip(PROMPTS, SCRIPTS, strict=True)
    ]


def test_closing_a_stream_early_frees_its_slots() -> None:
    engine = make_engine()
    stream = engine.stream(PROMPTS, SamplingParams(max_new_tokens=20))
    next(stream)
    assert engine.cache.num_free == 0
    stream.close()
    check_idle(engine)
    engine.stream(PROMPTS).close()  # never started
    check_idle(engine)


def test_two_streams_share_an_engine() -> None:
    """Interleaved, each gets its own tokens; a third finds no slot and says so instead of waiting for ever."""
    engine = make_engine()
    params = SamplingParams(max_new_tokens=20)
    one, two = engine.stream(PROMPTS[:1], params), engine.stream(PROMPTS[1:2], params)
    got: tuple[list[int], list[int]] = ([], [])
    for _ in range(3):
        got[0].extend(next(one).token_ids)
        got[1].extend(next(two).token_ids)
    with pytest.raises(CapacityError, match="held by other streams"):
        engine.generate(PROMPTS[2:], params)
    for tokens, stream in zip(got, (one, two), strict=True):
        for event in stream:
            tokens.extend(event.token_ids)
    assert got == (SCRIPTS[0][1:21], SCRIPTS[1][2:22])
    check_idle(engine)


# Faults while running


def in_target(engine: Engine) -> tuple[object, str]:
    return engine.target, "verify"


def in_proposal(engine: Engine) -> tuple[object, str]:
    return engine.drafter, "propose"


def in_observation(engine: Engine) -> tuple[object, str]:
    return engine.drafter, "observe"


def in_drafter_start(engine: Engine) -> tuple[object, str]:
    return engine.drafter, "allocate"


def in_commit(engine: Engine) -> tuple[object, str]:
    return conv, "commit"


@pytest.mark.parametrize("where", [in_target, in_proposal, in_observation, in_drafter_start, in_commit])
@pytest.mark.parametrize("call", [1, 2, 5])
def test_a_fault_ends_its_call_and_nothing_else(
    where: Callable[[Engine], tuple[object, str]], call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Faults C12 and G12: the error reaches the caller, no slot stays taken or torn, and the engine decodes on."""
    engine = make_engine(max_num_seqs=3)
    engine.generate(PROMPTS[:1], SamplingParams(max_new_tokens=4))
    owner, name = where(engine)
    if where is in_drafter_start and call > len(PROMPTS):
        call = len(PROMPTS)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, raising_at(call, getattr(owner, name)))
        with pytest.raises(RuntimeError, match="planted"):
            engine.generate(PROMPTS, SamplingParams(max_new_tokens=20))
    check_idle(engine)
    results = engine.generate(PROMPTS, SamplingParams(max_new_tokens=20))
    for result, script, prompt in zip(results, SCRIPTS, PROMPTS, strict=True):
        assert result.token_ids == script[len(prompt) : len(prompt) + 20]


def test_a_fault_reaches_a_stream_after_what_came_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault G12: no half answer passes for a whole one."""
    engine = make_engine()
    stream = engine.stream(PROMPTS[:1])
    monkeypatch.setattr(engine.target, "verify", raising_at(4, engine.target.verify))
    got = [token for _ in range(3) for token in next(stream).token_ids]
    with pytest.raises(RuntimeError, match="planted"):
        next(stream)
    assert got == SCRIPTS[0][1 : 1 + len(got)]
    check_idle(engine)


def test_a_drafter_that_drafts_beyond_the_vocabulary() -> None:
    """Faults L06 and H16: refused by name, before the id reaches an embedding."""

    class Foreign(NoDrafter):
        def propose(self, roots: Sequence[Root]) -> list[Draft]:
            return [Draft(DraftTree([-1, 0], [root.token, 64])) for root in roots]

    engine = Engine(TARGET, Foreign(), shape=TREE)
    with pytest.raises(TreeError, match=r"lie in 0\.\.63; Foreign drafted 64"):
        engine.generate(PROMPTS)
    check_idle(engine)


def check_idle(engine: Engine) -> None:
    """Nothing is held: by the pool, or by the drafter."""
    assert engine.cache.num_free == engine.cache.num_slots
    engine.cache.check_integrity()
    drafter: Drafter = engine.drafter
    assert getattr(drafter, "known", {}) == {}
    pools = [x for x in vars(drafter).values() if isinstance(x, CachePool)]
    assert all(pool.num_free == pool.num_slots for pool in pools)
