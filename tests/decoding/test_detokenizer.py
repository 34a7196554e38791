import pytest

from prompt_tuning.core.errors import InputError
from prompt_tuning.data.text.tokenizers import HuggingFaceTokenizer, SpecialTokens
from prompt_tuning.decoding.detokenizer import (
    Detokenizer,
    StopSearch,
    distinct_names,
    stop_tokens,
    token_content,
)
from prompt_tuning.decoding.row_encoding import continuation_text
from prompt_tuning.server.given_parts import GivenText
from tests.support.dummies import LetterTokenizer


@pytest.mark.parametrize("stop", [["cd"], ["xyz", "cd"], ["c"]])
def test_a_stop_text_across_tokens_is_never_shown(stop):
    pieces = Detokenizer(LetterTokenizer(), [], stop)
    shown = ""
    for token in LetterTokenizer().encode("abcacdef"):
        new = pieces.add(token)
        shown += new.text
        if new.stopped:
            break
    end = "ab" if stop == ["c"] else "abca"
    assert (shown, pieces.text) == (end, end)


def test_a_beginning_of_a_stop_text_is_shown_when_the_row_ends():
    pieces = Detokenizer(LetterTokenizer(), [], ["cd"])
    first = [pieces.add(token).text for token in LetterTokenizer().encode("abc")]
    assert (first, pieces.finish()) == (["a", "b", ""], "c")


class Bytes(LetterTokenizer):
    """Each token is a byte of UTF-8."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids) -> str:
        return bytes(ids).decode(errors="replace")


def test_text_is_shown_when_its_characters_are_complete():
    pieces = Detokenizer(Bytes(), list(b"a "))
    new = list("né €!".encode())
    shown = [*(pieces.add(token).text for token in new), pieces.finish()]
    assert [text for text in shown if text] == ["n", "é", " ", "€", "!"]
    # The last token of a text that is cut off may be a part of a character.
    cut = Detokenizer(Bytes(), [])
    assert [cut.add(token).text for token in new[:2]] == ["n", ""]
    assert (cut.finish(), cut.text) == ("\ufffd", "n\ufffd")


def byte_tokenizer(*, fallback: bool) -> HuggingFaceTokenizer:
    """Each byte is a token: as in byte-level BPE, or as sentencepiece falls back."""
    tokenizers = pytest.importorskip("tokenizers")
    from tokenizers import decoders, models, pre_tokenizers

    if fallback:
        entries = [f"<0x{byte:02X}>" for byte in range(256)]
        decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    else:
        entries = list(dict.fromkeys(map(chr, [*range(33, 127), *range(161, 173)])))
        entries += [chr(i) for i in [*range(174, 256), *range(256, 324)]]
        assert set(entries) == set(pre_tokenizers.ByteLevel.alphabet())
        decoder = decoders.ByteLevel()
    model = models.WordLevel({x: i for i, x in enumerate(entries)}, "<s>")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens(["<s>"])
    return HuggingFaceTokenizer(tokenizer, SpecialTokens())


def byte_ids(tokenizer: HuggingFaceTokenizer, text: str) -> list[int]:
    contents = [token_content(tokenizer, i) for i in range(256)]
    return [contents.index(bytes([byte])) for byte in text.encode()]


@pytest.mark.parametrize("fallback", [False, True])
@pytest.mark.parametrize("size", range(1, 5))
def test_a_character_that_the_given_tokens_begin_is_new_text(size, fallback):
    tokenizer = byte_tokenizer(fallback=fallback)
    ids = byte_ids(tokenizer, "Hello world \N{HOT PEPPER}\N{HOT PEPPER} red END more")
    given, new = ids[: 12 + size], ids[12 + size :]
    right = "\N{HOT PEPPER}" * (2 - size // 4) + " red "
    pieces, shown = Detokenizer(tokenizer, given, ["END"]), []
    for token in new:
        shown.append(pieces.add(token))
        if shown[-1].stopped:
            break
    assert pieces.text == "".join(piece.text for piece in shown) == right
    assert shown[-1].stopped and len([x for x in shown if x.text]) > 5
    assert continuation_text(tokenizer, given, new) == right + "END more"


@pytest.mark.parametrize("fallback", [False, True])
def test_a_row_of_characters_of_several_tokens_is_decoded_whole(fallback):
    tokenizer = byte_tokenizer(fallback=fallback)
    text = "\N{HOT PEPPER}" * 7 + "a\u02ae\u20ac" * 5
    pieces = Detokenizer(tokenizer, byte_ids(tokenizer, "ab\u20ac"))
    new = [pieces.add(token) for token in byte_ids(tokenizer, text)]
    assert pieces.text == "".join(piece.text for piece in new) == text
    places = [i for i, character in enumerate(text) for _ in character.encode()]
    assert [piece.offset for piece in new] == places


def test_bytes_that_are_no_character_have_offsets():
    tokenizer = byte_tokenizer(fallback=False)
    ids = [
        byte_ids(tokenizer, x)[0] for x in ("\u02ae", "\u20ac", "\N{HOT PEPPER}", "a")
    ]
    pieces = Detokenizer(tokenizer, [])
    assert [pieces.add(token).offset for token in ids] == [0, 1, 2, 3]
    assert pieces.text == "\ufffd\ufffd\ufffda"


def test_bytes_that_continue_no_character_have_their_own_offsets():
    tokenizer = byte_tokenizer(fallback=False)
    first, last = byte_ids(tokenizer, "\u02ae")
    euro, letter = byte_ids(tokenizer, "\u20ac")[:2], byte_ids(tokenizer, "a")
    pieces = Detokenizer(tokenizer, letter)
    ids = [first, last, last, last, *euro]
    assert [pieces.add(token).offset for token in ids] == [0, 0, 1, 2, 3, 3]
    assert pieces.add(*letter).offset == 4
    assert pieces.text == "\u02ae\ufffd\ufffd\ufffda"


def test_the_rest_of_a_text_is_added_once():
    tokenizer = byte_tokenizer(fallback=False)
    pieces = Detokenizer(tokenizer, [])
    pieces.add(byte_ids(tokenizer, "\u02ae")[0])
    assert (pieces.finish(), pieces.finish(), pieces.text) == ("\ufffd", "", "\ufffd")


def test_tokens_of_one_text_have_different_names():
    tokenizer = byte_tokenizer(fallback=False)
    first, second = byte_ids(tokenizer, "\u02ae")
    names = distinct_names(tokenizer, [first, second, 256, first])
    assert names == {first: r"bytes:\xca", second: r"bytes:\xae", 256: "<s>"}
    assert [*token_content(tokenizer, first), *token_content(tokenizer, second)] == [
        *(202, 174)
    ]


@pytest.mark.parametrize("text", ["a ' b", "do n ' t", "I ' ve , n ' s . ' '", "a n "])
def test_cleaned_spaces_are_shown_as_in_the_whole_text(text):
    tokenizer = byte_tokenizer(fallback=True)
    tokenizer.cleans_spaces = True
    ids = byte_ids(tokenizer, f"no, {text}")
    pieces = Detokenizer(tokenizer, ids[:3])
    shown = [*(pieces.add(token).text for token in ids[3:]), pieces.finish()]
    whole = tokenizer.decode(ids)
    assert "".join(shown) == pieces.text == whole[3:]
    assert GivenText.decode(tokenizer, ids).text == whole


@pytest.mark.parametrize(
    ("stops", "text", "right"),
    [
        (["Y", "XY"], "abXYcd", "ab"),
        (["aab"], "aaab", "a"),
        (["abab", "zzz"], "abaabab!", "aba"),
        (["bc", "abcd"], "abcd", "a"),
    ],
)
def test_the_stop_text_that_ends_first_is_found(stops, text, right):
    for size in (1, 2, len(text)):
        search, read = StopSearch(stops), 0
        for start in range(0, len(text), size):
            found = search.find(text[start : start + size])
            if found:
                read = start + found.end - found.length
                break
        assert text[:read] == right


@pytest.mark.slow
def test_long_stop_texts_take_linear_time():
    search = StopSearch(["a" * 250_000 + "b"] * 16)
    assert search.find("a" * 20_000) is None
    assert search.held == 20_000


def test_stop_texts_do_not_end_in_the_minimum_of_tokens():
    letters = LetterTokenizer()
    pieces = Detokenizer(letters, [], ["e", "fe"], minimum=6)
    new = [pieces.add(token) for token in letters.encode("abcedefe")]
    assert [piece.stopped for piece in new] == [False] * 7 + [True]
    assert pieces.text == "abcede"
    assert "".join(piece.text for piece in new) == "abcede"


def test_special_tokens_among_stop_texts_end_rows_by_their_ids():
    tokenizer = byte_tokenizer(fallback=False)
    assert stop_tokens(tokenizer, ["<s>", "s>"]) == (256,)
    with pytest.raises(InputError, match="give id 256 as one of stop_token_ids"):
        stop_tokens(tokenizer, ["a<s>"])
