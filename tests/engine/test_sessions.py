"""Sessions: requests that join, end and are aborted at any moment, and never show in each other's tokens."""

import numpy as np
import pytest
import torch

from drafters import ScriptedDrafter
from textkit import ByteTokenizer, ScriptTarget
from toy_head import HIDDEN, ToyHead
from toy_oracle import continuation
from toy_steps import raising_at
from treewy.cache import CachePool
from treewy.draft import MTPDrafter
from treewy.engine import Engine, SamplingParams, Session, step
from treewy.errors import CapacityError, RequestError
from treewy.model import ToyConfig, ToyTarget
from treewy.ops.attention.eager import _bits
from treewy.packed import pack
from treewy.tree import DraftTree

TARGET = ToyTarget(ToyConfig(max_len=128), seed=1)
PROMPTS = [[17], [40, 2], [8, 8, 8], [5, 6, 7, 8, 9], [63], [1, 2, 3]]
SCRIPTS = [continuation(TARGET, prompt, 48) for prompt in PROMPTS]
TREE = DraftTree.from_widths([2, 2])
SMALL = ToyTarget(ToyConfig(hidden=HIDDEN, vocab_size=10), seed=2)


def make_engine(num_slots: int = 3, **options) -> Engine:
    options = {"shape": TREE, "max_num_seqs": num_slots, "poison": True, "prefill_chunk": 2, **options}
    return Engine(TARGET, ScriptedDrafter(SCRIPTS), **options)


def drain(session: Session) -> None:
    while not session.is_idle:
        session.step()


def expected(place: int, num_tokens: int) -> list[int]:
    return SCRIPTS[place][len(PROMPTS[place]) :][:num_tokens]


def check_empty(engine: Engine) -> None:
    assert engine.cache.num_free == engine.cache.num_slots
    engine.cache.check_integrity()
    assert engine.drafter.known == {}


@pytest.mark.parametrize("commit", ["store_all", "reconstruct"])
def test_requests_join_while_others_run(commit: str) -> None:
    """Requests that join at steps 0, 1, 2, ... decode what they decode alone."""
    engine = make_engine(4, commit=commit)
    with engine.open() as session:
        numbers = []
        for prompt in PROMPTS:
            numbers.append(session.add(prompt, SamplingParams(max_new_tokens=20)))
            session.step()
        drain(session)
        assert [session.result(n).token_ids for n in numbers] == [expected(i, 20) for i in range(len(PROMPTS))]
    check_empty(engine)


@pytest.mark.parametrize("after", range(8))
def test_an_abort_leaves_the_others(after: int) -> None:
    """Aborted while it waits, prefills or decodes: it keeps what it had, its slot is free at once, the rest goes on."""
    engine = make_engine(2)
    with engine.open() as session:
        numbers = session.add_all(PROMPTS[3:], SamplingParams(max_new_tokens=12))
        for _ in range(after):
            session.step()
        free = engine.cache.num_free
        ran = session._requests[numbers[0]].slot is not None
        gone = session.abort(numbers[0])
        assert engine.cache.num_free == free + ran
        assert gone.finish_reason == ("abort" if len(gone.token_ids) < 12 else "length")
        assert gone.token_ids == expected(3, len(gone.token_ids))
        drain(session)
        assert session.result(numbers[0]) == session.abort(numbers[0])
        for place, number in zip((4, 5), numbers[1:], strict=True):
            assert session.result(number).token_ids == expected(place, 12)
    check_empty(engine)


def test_hundreds_of_random_arrivals_and_aborts() -> None:
    """Fault C12: slots are taken and given back once, through 300 requests; a freed slot's memory is poison and never shows."""
    engine, rng = make_engine(3), np.random.default_rng(0)
    done = 0
    with engine.open() as session:
        place_of: dict[int, int] = {}
        while done < 300 or not session.is_idle:
            if done < 300 and rng.random() < 0.6:
                place, wanted = int(rng.integers(len(PROMPTS))), int(rng.integers(1, 12))
                place_of[session.add(PROMPTS[place], SamplingParams(max_new_tokens=wanted))] = place
                done += 1
            if rng.random() < 0.15 and place_of:
                session.abort(int(rng.integers(len(place_of))))
            session.step()
        reasons = set()
        for number, place in place_of.items():
            result = session.result(number)
            reasons.add(result.finish_reason)
            assert result.token_ids == expected(place, len(result.token_ids))
    assert reasons == {"abort", "length"}
    check_empty(engine)


def test_a_sampled_request_is_the_same_in_any_company() -> None:
    """Faults H10 and H12: one seed, one text: alone, beside greedy and sampled neighbours, early or late, in any slot."""
    params = SamplingParams(temperature=0.9, top_k=7, seed=11, max_new_tokens=24)

    def run(before: list[int], alone: bool) -> list[int]:
        engine = Engine(SMALL, MTPDrafter(ToyHead(vocab_size=10), 4), shape=TREE, max_num_seqs=4, poison=True)
        with engine.open() as session:
            for place in before:
                other = SamplingParams(
                    temperature=place % 2 * 1.3, seed=place, max_new_tokens=9, shape=DraftTree.chain(3)
                )
                session.add([place, 1], other)
                session.step()
            mine = session.add([4, 2], params)
            session.step()
            if not alone:
                session.add([8, 8, 8], SamplingParams(temperature=2.0, seed=11, max_new_tokens=30))
            drain(session)
            assert session.result(mine).num_verify_steps < 20
            return session.result(mine).token_ids

    alone = run([], alone=True)
    assert all(run(before, alone=False) == alone for before in ([], [3], [4, 5, 0]))


def test_a_result_before_its_time_and_a_number_nobody_has() -> None:
    engine = make_engine()
    with engine.open() as session:
        number = session.add(PROMPTS[0])
        with pytest.raises(RequestError, match="request 0 has not"):
            session.result(number)
        with pytest.raises(RequestError, match="no request 7 among the 1 added"):
            session.abort(7)
    check_empty(engine)


def test_what_is_forgotten_is_gone_and_its_number_is_not_given_again() -> None:
    """A session that runs for long keeps only what it is asked to keep."""
    engine = make_engine()
    with engine.open() as session:
        first = session.add(PROMPTS[0], SamplingParams(max_new_tokens=4))
        with pytest.raises(RequestError, match="request 0 has not"):
            session.forget(first)
        drain(session)
        assert session.forget(first).token_ids == expected(0, 4)
        with pytest.raises(RequestError, match="no request 0 among the 1 added"):
            session.result(first)
        assert session.add(PROMPTS[1], SamplingParams(max_new_tokens=4)) == 1
        drain(session)
        assert session.result(1).token_ids == expected(1, 4)
    check_empty(engine)


def test_a_closed_session_takes_nothing() -> None:
    engine = make_engine()
    with engine.open() as session:
        session.add(PROMPTS[0], SamplingParams(max_new_tokens=4))
        drain(session)
    for add in (lambda: session.add(PROMPTS[1]), lambda: session.add_all(PROMPTS[:2])):
        with pytest.raises(RequestError, match="this one is closed"):
            add()
    assert session.is_idle
    check_empty(engine)


def test_a_bad_prompt_is_not_queued() -> None:
    session = make_engine().open()
    with pytest.raises(RequestError, match="prompt 1 is empty"):
        session.add_all([[1], []])
    assert session.is_idle
    assert session.step() == []
    assert session.add([1]) == 0


def test_closing_ends_what_runs() -> None:
    engine = make_engine()
    session = engine.open()
    numbers = session.add_all(PROMPTS, SamplingParams(max_new_tokens=30))
    session.step()
    session.close()
    assert {session.result(number).finish_reason for number in numbers} == {"abort"}
    check_empty(engine)


def test_two_sessions_share_the_slots() -> None:
    engine = make_engine(1)
    with engine.open() as one, engine.open() as two:
        first, second = (
            one.add(PROMPTS[0], SamplingParams(max_new_tokens=6)),
            two.add(PROMPTS[1], SamplingParams(max_new_tokens=9)),
        )
        one.step()
        with pytest.raises(CapacityError, match="held by other streams"):
            two.step()
        drain(one)
        drain(two)
        assert one.result(first).token_ids == expected(0, 6)
        assert two.result(second).token_ids == expected(1, 9)


def test_an_aborted_text_keeps_what_was_held_back() -> None:
    """What might have begun a stop string is text after all when the request ends before it."""
    script = [1, 2, *b"hello wor"]
    engine = Engine(
        ScriptTarget(script),
        ScriptedDrafter([script], right=1.0, vocab_size=256),
        shape=DraftTree.chain(2),
        tokenizer=ByteTokenizer(),
    )
    with engine.open() as session:
        number = session.add([1, 2], SamplingParams(stop=["ello world"], max_new_tokens=64))
        while len(session._requests[number].output) < 6:
            session.step()
        result = session.abort(number)
    assert result.text == bytes(result.token_ids).decode()
    assert len(result.token_ids) >= 6


PLACES: list[tuple[object, str]] = [
    (ToyTarget, "verify"),
    (CachePool, "commit"),
    (ScriptedDrafter, "allocate"),
    (ScriptedDrafter, "propose"),
    (ScriptedDrafter, "observe"),
    (step, "deliver"),
    (step, "_recorded"),
]


@pytest.mark.parametrize("call", [1, 2, 5])
@pytest.mark.parametrize("place", PLACES, ids=lambda place: place[1])
def test_a_step_that_dies_ends_what_ran(place: tuple[object, str], call: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it dies: no half-done request goes on to a wrong text, and who still waits is served by the next steps."""
    engine = make_engine(2)
    with engine.open() as session:
        numbers = session.add_all(PROMPTS, SamplingParams(max_new_tokens=9))
        with monkeypatch.context() as patch:
            patch.setattr(*place, raising_at(call, getattr(*place)))
            with pytest.raises(RuntimeError, match="planted"):
                drain(session)
        check_empty(engine)
        drain(session)
        results = [session.result(number) for number in numbers]
    assert [result.token_ids for result in results] == [expected(i, len(x.token_ids)) for i, x in enumerate(results)]
    reasons = [result.finish_reason for result in results]
    assert 1 <= reasons.count("abort") <= 2
    assert all((reason == "length") == (len(x.token_ids) == 9) for reason, x in zip(reasons, results, strict=True))
    check_empty(engine)


def test_a_tokenizer_that_fails_keeps_no_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ending a request asks for the text that was held back: its slot, and its neighbours', come back even if that raises."""
    engine = make_engine(tokenizer=ByteTokenizer())
    session = engine.open()
    session.add_all(PROMPTS)
    session.step()
    monkeypatch.setattr(ByteTokenizer, "decode", raising_at(1, ByteTokenizer.decode))
    with pytest.raises(RuntimeError, match="planted"):
        session.abort(0)
    assert engine.cache.num_free == 1
    monkeypatch.setattr(ByteTokenizer, "decode", None)
    with pytest.raises(TypeError):
        session.close()
    check_empty(engine)
    assert session.is_idle


def test_what_outlives_a_step_can_be_written_outside_it() -> None:
    """Steps run in inference mode; memory that grew in one, and tables that are cached, are ordinary tensors."""
    engine = make_engine(1)
    prompt = [1] * 100
    with engine.open() as session:
        script = continuation(TARGET, prompt, 12)
        engine.drafter.scripts.append(script)
        number = session.add(prompt, SamplingParams(max_new_tokens=8))
        drain(session)
        assert session.result(number).token_ids == script[100:108]
    pools = [x for layer in engine.cache.layers for x in vars(layer).values() if isinstance(x, torch.Tensor)]
    assert max(x.shape[1] for x in pools) >= 100
    tree = pack([TREE])
    tables = [tree.rows, tree.parents, tree.ancestors, tree.strict_ancestors, tree.nearest_ancestors(4)]
    assert not any(x.is_inference() for x in [*pools, *tables, _bits(TREE.parents, 0, "cpu")])
