"""Stop strings: the text does not depend on how it was cut into tokens, and never holds a stop string."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nn.generate.stops import StopText

LETTERS = st.text(alphabet="abc", max_size=12)
STOPS = st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=1, max_size=4)


def whole(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The definition: of all places where a stop string stands, the one that ends first; the longest of those."""
    places = [(at + len(s), at, s) for s in stops for at in range(len(text)) if text.startswith(s, at)]
    if not places:
        return text, None
    _, at, stop = min(places)
    return text[:at], stop


def streamed(chunks: list[str], stops: list[str]) -> tuple[str, str | None]:
    stop, out = StopText(stops), ""
    text = ""
    for chunk in chunks:
        out += stop.push(chunk)
        text += chunk
        if stop.found is None:  # held back is only what can still become a stop string
            held = text[len(out) :]
            assert out + held == text
            assert not held or any(s.startswith(held) and s != held for s in stops)
        else:
            assert stop.push("more") == "" and stop.flush() == ""
    return out + stop.flush(), stop.found


@given(st.lists(LETTERS, max_size=8), STOPS)
def test_any_cutting_gives_what_searching_the_whole_gives(chunks, stops):
    assert streamed(chunks, stops) == whole("".join(chunks), stops)


@given(LETTERS, STOPS)
def test_one_character_at_a_time_and_all_at_once(text, stops):
    assert streamed(list(text), stops) == streamed([text], stops) == whole(text, stops)
    got, found = streamed(list(text), stops)
    assert not any(s in got for s in stops)
    assert (found is None) == (got == text)


@pytest.mark.parametrize(
    ("chunks", "stops", "text", "found"),
    [
        (["ab", "cd"], ["bcd", "c"], "ab", "c"),  # complete first, though it begins later
        (["xab"], ["b", "ab"], "x", "ab"),  # complete together: the longer
        (["aaab"], ["aab"], "a", "aab"),  # begins again within itself
        (["a\n", "\nUser", ": hi"], ["\n\nUser:"], "a", "\n\nUser:"),
        (["caf", "\u00e9 \U0001f600", "!"], ["\U0001f600!"], "caf\u00e9 ", "\U0001f600!"),
        (["", "", ""], ["x"], "", None),
        (["nothing"], [], "nothing", None),
    ],
)
def test_by_hand(chunks, stops, text, found):
    assert streamed(chunks, stops) == (text, found)


def test_text_goes_out_as_soon_as_it_is_certain():
    stop = StopText(["END"])
    assert [stop.push(piece) for piece in ("one E", "N", "x two ", "EN", "D more")] == ["one ", "", "ENx two ", "", ""]
    assert stop.found == "END" and stop.flush() == ""
    assert StopText([]).push("anything") == "anything"
