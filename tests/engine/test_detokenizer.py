"""Text, piece by piece: nothing is lost, nothing is taken back, and the first stop string ends it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from textkit import ByteTokenizer, PieceTokenizer
from treewy.engine.stream import REPLACEMENT, Detokenizer

TEXTS = st.text(alphabet="ab c€ü🙂", max_size=24)


def run(detokenizer: Detokenizer, tokens: list[int]) -> list[str]:
    """Push tokens until the text stops, then flush; return the pieces."""
    pieces = []
    for token in tokens:
        pieces.append(detokenizer.push(token))
        if detokenizer.stopped:
            break
    return [*pieces, detokenizer.flush()]


@given(
    text=TEXTS, sizes=st.lists(st.integers(1, 5), min_size=1), stop=st.lists(st.text("ab c€", min_size=1, max_size=3))
)
def test_any_text_in_any_tokens(text: str, sizes: list[int], stop: list[str]) -> None:
    """Faults I03 and I15: characters and stop strings split over tokens in any way, against a search in the whole text."""
    pieces, rest = [], text.encode()
    while rest:
        size = sizes[len(pieces) % len(sizes)]
        pieces.append(rest[:size])
        rest = rest[size:]
    detokenizer = Detokenizer(ByteTokenizer(pieces), stop)
    released = run(detokenizer, list(range(len(pieces))))
    assert "".join(released) == detokenizer.text
    assert detokenizer.text == cut_by_tokens(pieces, stop)
    assert detokenizer.stopped == any(s in text for s in stop)


def cut_by_tokens(pieces: list[bytes], stop: list[str]) -> str:
    """Return the text before the stop string that is complete at the earliest token, of those the leftmost."""
    text = ""
    for end in range(len(pieces) + 1):
        text = b"".join(pieces[:end]).decode(errors="ignore")
        starts = [text.find(s) for s in stop if s in text]
        if starts:
            return text[: min(starts)]
    return text


def test_a_character_over_four_tokens() -> None:
    """Fault I15: nothing is released before the character is whole, and all of it then."""
    tokenizer = ByteTokenizer()
    assert run(Detokenizer(tokenizer), tokenizer.encode("a🙂b")) == ["a", "", "", "", "🙂", "b", ""]


def test_a_text_that_ends_inside_a_character() -> None:
    """What is held back is flushed: as the replacement character, never silently dropped."""
    tokenizer = ByteTokenizer()
    detokenizer = Detokenizer(tokenizer)
    assert "".join(run(detokenizer, tokenizer.encode("a🙂")[:-1])) == detokenizer.text == f"a{REPLACEMENT}"


def test_a_short_answer() -> None:
    """Fault I15: three characters, all of which might begin a stop string, still come out."""
    tokenizer = ByteTokenizer()
    detokenizer = Detokenizer(tokenizer, ["STOPPING"])
    assert run(detokenizer, tokenizer.encode("STO")) == ["", "", "", "STO"]
    assert not detokenizer.stopped


def test_a_stop_string_that_begins_twice() -> None:
    """A false start is released as soon as it is one."""
    tokenizer = ByteTokenizer()
    detokenizer = Detokenizer(tokenizer, ["aab"])
    assert run(detokenizer, tokenizer.encode("aaab!")) == ["", "", "a", "", ""]
    assert (detokenizer.text, detokenizer.stopped) == ("a", True)


def test_of_two_stop_strings_the_first_to_be_complete_wins() -> None:
    tokenizer = ByteTokenizer([b"x", b"a", b"bc"])
    assert run(Detokenizer(tokenizer, ["abcd", "bc"]), [0, 1, 2]) == ["x", "", "a", ""]
    assert run(Detokenizer(tokenizer, ["abc", "bc"]), [0, 1, 2]) == ["x", "", "", ""]  # one token completes both


def test_nothing_follows_a_stop() -> None:
    tokenizer = ByteTokenizer()
    detokenizer = Detokenizer(tokenizer, ["!"])
    assert [detokenizer.push(token) for token in tokenizer.encode("a!b")] == ["a", "", ""]
    assert detokenizer.flush() == ""
    assert detokenizer.text == "a"


def test_a_tokenizer_that_strips_leading_spaces() -> None:
    """Spaces inside the text stay: tokens are decoded with those before them."""
    tokenizer = PieceTokenizer([" the", " cat", "s", " ", " sat"])
    tokens = [0, 1, 2, 3, 4, 3]
    detokenizer = Detokenizer(tokenizer)
    run(detokenizer, tokens)
    assert detokenizer.text == tokenizer.decode(tokens) == "the cats  sat "


def test_special_tokens_have_no_text() -> None:
    tokenizer = PieceTokenizer(["a", "<sep>", "b"], special=[1])
    detokenizer = Detokenizer(tokenizer, ["<sep>"])
    assert run(detokenizer, [0, 1, 2]) == ["a", "", "b", ""]


@pytest.mark.parametrize("stop", [(), ("x",)])
def test_without_a_tokenizer_there_is_no_text(stop: tuple[str, ...]) -> None:
    detokenizer = Detokenizer(None, stop)
    assert run(detokenizer, [1, 2]) == ["", "", ""]
    assert (detokenizer.text, detokenizer.stopped) == ("", False)
