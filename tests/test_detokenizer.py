"""Streaming text: the same characters as decoding at once, never half a character, never part of a stop string."""

import time

import hypothesis
import hypothesis.strategies as st
import pytest
import tokenizers
from test_tokenizer import TEXTS, sentencepiece_metadata

from jaxserve.detokenizer import IncrementalDetokenizer
from jaxserve.tokenizer import Tokenizer
from jaxserve.weights.demo import demo_gguf
from jaxserve.weights.gguf_file import GGUFFile
from jaxserve.weights.gguf_tokenizer import tokenizer_from_gguf

DEMO = tokenizer_from_gguf(GGUFFile(demo_gguf()).metadata)
SENTENCEPIECE = tokenizer_from_gguf(sentencepiece_metadata())


def without_table(tokenizer):
    """The same tokenizer, taken for one whose tokens depend on their neighbours."""
    other = Tokenizer(tokenizer.backend, named_tokens=tokenizer.named_tokens)
    other.pieces = None
    return other


TOKENIZERS = {"bytes": DEMO, "sentencepiece": SENTENCEPIECE, "window": without_table(DEMO)}


def stream(detokenizer, ids, group=1):
    """The deltas, and the stop string that was met."""
    deltas, shown, stop = [], "", None
    for i in range(0, len(ids), group):
        stop = detokenizer.append(ids[i : i + group])
        text = detokenizer.text_ready(stop is not None)
        assert text.startswith(shown), "text that was shown must not change"
        deltas.append(text[len(shown) :])
        shown = text
        if stop is not None:
            break
    final = detokenizer.text_ready(True)
    assert final.startswith(shown)
    return [*deltas, final[len(shown) :]], stop


def char_ids(text):
    """Token ids of the demo model, one a byte or character: boundaries fall everywhere."""
    table = {piece: i for i, piece in enumerate(DEMO.pieces)}
    return [table[bytes([b])] for b in text.encode()]


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("text", TEXTS)
def test_deltas_are_the_text(name, text):
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(text, add_special_tokens=False)
    deltas, _ = stream(IncrementalDetokenizer(tokenizer, tokenizer.encode("x"), skip_special_tokens=False), ids)
    want = tokenizer.decode(ids, skip_special_tokens=False)
    prefix = " " if ids and name == "sentencepiece" else ""  # put before every text; decode takes it away
    assert "".join(deltas) == prefix + want
    assert not any("\ufffd" in delta for delta in deltas)


@pytest.mark.parametrize("name", ["bytes", "window"])
def test_no_half_character_is_shown(name):
    text = "é日😀"
    detokenizer = IncrementalDetokenizer(TOKENIZERS[name], [])
    assert stream(detokenizer, char_ids(text))[0] == ["", "é", "", "", "日", "", "", "", "😀", ""]


@pytest.mark.parametrize("name", ["bytes", "window"])
def test_a_character_that_the_prompt_begins_is_completed(name):
    ids = char_ids("a😀b")
    for cut in (2, 3, 4):
        deltas, _ = stream(IncrementalDetokenizer(TOKENIZERS[name], ids[:cut]), ids[cut:])
        assert "".join(deltas) == "😀b"


def test_a_character_that_never_completes_is_left_out():
    assert stream(IncrementalDetokenizer(DEMO, []), char_ids("a😀")[:-1])[0] == ["a", "", "", "", ""]


def test_broken_bytes_in_the_middle_become_one_replacement_character():
    ids = char_ids("😀")[:2] + char_ids("ab")
    assert "".join(stream(IncrementalDetokenizer(DEMO, []), ids)[0]) == "\ufffdab"


def test_a_window_decoder_lets_endless_broken_bytes_through():
    ids = char_ids("é")[1:] * 40
    deltas, _ = stream(IncrementalDetokenizer(TOKENIZERS["window"], []), ids)
    assert sum(map(len, deltas)) > 20


@pytest.mark.parametrize("name", TOKENIZERS)
def test_special_tokens_are_left_out_or_shown(name):
    tokenizer = TOKENIZERS[name]
    ids = [*tokenizer.encode("a", add_special_tokens=False), tokenizer.eos_token_id]
    eos = tokenizer.convert_ids_to_tokens(ids[-1:])[0]
    plain, full = (
        "".join(stream(IncrementalDetokenizer(tokenizer, [], skip_special_tokens=skip), ids)[0]).strip()
        for skip in (True, False)
    )
    assert (plain, full) == ("a", "a" + eos)


def test_a_special_token_inside_a_character_that_is_skipped_does_not_break_it():
    ids = char_ids("é")
    ids.insert(1, DEMO.eos_token_id)
    assert "".join(stream(IncrementalDetokenizer(DEMO, []), ids)[0]) == "é"


def test_ids_beyond_the_tokenizer_are_nothing():
    assert stream(IncrementalDetokenizer(DEMO, []), [*char_ids("a"), 50_000, *char_ids("b")])[0] == ["a", "", "b", ""]


def test_a_leading_space_of_the_continuation_is_kept():
    tokenizer = SENTENCEPIECE
    prompt, both = (tokenizer.encode(text, add_special_tokens=False) for text in ("The", "The quick"))
    assert both[: len(prompt)] == prompt
    assert "".join(stream(IncrementalDetokenizer(tokenizer, prompt), both[len(prompt) :])[0]) == " quick"


@pytest.mark.parametrize("group", [1, 2, 3, 100])
@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_across_tokens_ends_the_text(group, include):
    detokenizer = IncrementalDetokenizer(DEMO, [], stop=["\nUser:"], include_stop=include)
    deltas, stop = stream(detokenizer, char_ids("Hello\nUsed\nUser: more"), group)
    assert stop == "\nUser:"
    assert "".join(deltas) == "Hello\nUsed" + ("\nUser:" if include else "")
    assert detokenizer.num_tokens == len("Hello\nUsed\nUser:")  # the rest is dropped


def test_no_part_of_a_stop_string_is_shown_early():
    deltas, _ = stream(IncrementalDetokenizer(DEMO, [], stop=["<end>"]), char_ids("ab<en<end>"))
    assert deltas == ["", "", "", "", "a", "b", "<", "e", "n", "", ""]


def test_what_was_held_back_comes_with_the_end():
    detokenizer = IncrementalDetokenizer(DEMO, [], stop=["<end>"])
    deltas, stop = stream(detokenizer, char_ids("abc<end"))
    assert stop is None
    assert deltas[-1] == "<end"
    assert detokenizer.text_ready(True) == "abc<end"


def test_nothing_is_held_back_when_stop_strings_are_kept():
    deltas, _ = stream(IncrementalDetokenizer(DEMO, [], stop=["<end>"], include_stop=True), char_ids("a<e"))
    assert deltas == ["a", "<", "e", ""]


def test_the_leftmost_of_several_stop_strings_wins():
    text = DEMO.encode(" international", add_special_tokens=False)
    assert len(text) == 1  # both stop strings lie inside one token
    deltas, stop = stream(IncrementalDetokenizer(DEMO, [], stop=["nation", "inter"]), text)
    assert (stop, "".join(deltas)) == ("inter", " ")


@pytest.mark.parametrize("stop", [["ab", "abc"], ["abc", "ab"]])
@pytest.mark.parametrize("group", [1, 3])
def test_of_two_stop_strings_at_one_place_the_shorter_wins(stop, group):
    found = stream(IncrementalDetokenizer(DEMO, [], stop=stop), char_ids("xabc"), group)
    assert ("".join(found[0]), found[1]) == ("x", "ab")


def test_stop_strings_wait_for_min_tokens():
    ids = char_ids("ab.ab.ab.")
    assert "".join(stream(IncrementalDetokenizer(DEMO, [], stop=["."], min_tokens=3), ids)[0]) == "ab.ab"
    assert "".join(stream(IncrementalDetokenizer(DEMO, [], stop=["."], min_tokens=2), ids)[0]) == "ab"
    # One that began before and ends after counts.
    assert "".join(stream(IncrementalDetokenizer(DEMO, [], stop=["b."], min_tokens=2), ids)[0]) == "a"
    # A short one in the text that is watched for a long one does not count later.
    assert (
        "".join(stream(IncrementalDetokenizer(DEMO, [], stop=["a", "bcdefg"], min_tokens=2), char_ids("xabc"))[0])
        == "xabc"
    )


def test_a_stop_string_may_hold_several_byte_characters():
    deltas, stop = stream(IncrementalDetokenizer(DEMO, [], stop=["日本"]), char_ids("é日日本語"))
    assert ("".join(deltas), stop) == ("é日", "日本")


@hypothesis.settings(deadline=None, max_examples=200)
@hypothesis.given(
    text=st.text(alphabet="ab日😀", max_size=30),
    stop=st.lists(st.text(alphabet="ab日😀", min_size=1, max_size=4), max_size=3),
    group=st.integers(1, 5),
    include=st.booleans(),
)
def test_any_text_any_stops_any_grouping(text, stop, group, include):
    deltas, found = stream(IncrementalDetokenizer(DEMO, [], stop=stop, include_stop=include), char_ids(text), group)
    ends = {(text.find(s) + len(s), -len(s), s) for s in stop if s in text}  # by characters: the one that ends first
    if not ends:
        assert ("".join(deltas), found) == (text, None)
        return
    end, _, first = min(ends)
    assert found == first
    assert "".join(deltas) == text[: end if include else end - len(first)]


def test_the_cost_of_a_token_does_not_grow_with_the_length():
    """Delta streaming of 20,000 tokens costs little more a token at the end than at the start (a copy would be 20x)."""
    detokenizer = IncrementalDetokenizer(DEMO, [], stop=["never to be seen"])
    ids = DEMO.encode(" word") * 1000
    times, shown = [], 0
    for _ in range(20):
        start = time.process_time()
        for token_id in ids:
            detokenizer.append([token_id])
        times.append(time.process_time() - start)
        shown = len(detokenizer.text_ready(False))
    assert shown > 90_000
    assert min(times[-5:]) < 4 * min(times[:5])


def test_a_decoder_without_fixed_bytes_puts_its_spaces():
    backend = tokenizers.Tokenizer(
        tokenizers.models.WordPiece({"play": 0, "##ing": 1, "now": 2, "[U]": 3}, unk_token="[U]")
    )
    backend.decoder = tokenizers.decoders.WordPiece()
    deltas, _ = stream(IncrementalDetokenizer(Tokenizer(backend), [2]), [0, 1, 2])
    assert deltas == [" play", "ing", " now", ""]
