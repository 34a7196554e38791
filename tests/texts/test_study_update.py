"""The new parts of a text that has changed, and the rows that are kept."""

import pytest

from prompt_tuning.core.errors import InputError
from prompt_tuning.texts.study_update import (
    OldStudy,
    joined_chunks,
    kept_chunks,
    new_parts,
)
from tests.support import dummies

OLD = "One is here. Two is there.\nThree stands.\n\nFour falls. Five flies."


def study(text, chunks=()):
    lines = [{"text": chunk} for chunk in chunks]
    return OldStudy(text, lines, [], [], {"text": "0"})


class Characters(dummies.LetterTokenizer):
    def encode(self, text):
        return [1] * len(text)


def test_sentences_that_the_text_did_not_have_are_new():
    new = OLD.replace("Three stands.", "Three stands still.")
    parts = new_parts(study(OLD), new, Characters(), least=4)
    assert [new[start:stop] for start, stop in parts] == ["Three stands still.\n\n"]
    # What has moved, or is left out, is nothing to learn.
    moved = "Five flies. " + OLD.replace(" Five flies.", "")
    for text in (OLD, moved, OLD.replace("Two is there.\n", "")):
        with pytest.raises(InputError, match="nothing new"):
            new_parts(study(OLD), text, Characters(), least=4)


def test_a_part_has_units_beside_it_until_it_is_long_enough():
    new = OLD.replace("Three stands.", "No.")
    parts = new_parts(study(OLD), new, Characters(), least=16)
    assert [new[a:b] for a, b in parts] == ["Two is there.\nNo.\n\nFour falls. "]
    parts = new_parts(study(OLD), new, Characters(), least=999)
    assert parts == [(0, len(new))]


def test_chunks_that_the_text_still_has_keep_their_rows():
    chunks = ["One is here. Two is there.\n", "Three stands.\n\n", "Four falls. "]
    new = "Zero. " + OLD.replace("Three", "3")
    assert kept_chunks([{"text": x} for x in chunks], new) == {
        0: 6,
        2: new.index("Four"),
    }
    parts = new_parts(study(None, chunks), new, Characters(), least=2)
    assert [new[a:b] for a, b in parts] == ["Zero. ", "3 stands.\n\n", "Five flies."]
    # Of two equal chunks, one may be gone.
    twice = [{"text": "Same. "}, {"text": "Same. "}]
    assert kept_chunks(twice, "Same. Same. ") == {0: 0, 1: 6}
    assert kept_chunks(twice, "Same. ") == {0: 0}


def test_an_update_needs_the_rows_of_the_memory(tmp_path):
    with pytest.raises(InputError, match=r"study\.json is missing"):
        OldStudy.read(tmp_path, None)


def test_a_teacher_of_the_whole_text_keeps_the_rows_of_all_chunks():
    # `chunk` divided the old text for the writer of its rows alone.
    old, new = study(OLD, ["One is here.", "Four falls."]), study(None, ["No."])
    lines, numbers = joined_chunks(old, new, "No.", [0], {}, Characters())
    assert [line["text"] for line in lines] == ["No."]
    assert numbers == {("old", 0): 0, ("old", 1): 0, ("new", 0): 0}


@pytest.mark.parametrize("damaged", ["[1]", '{"ids": '])
def test_a_damaged_line_of_rows_is_refused(damaged, tmp_path):
    for name in ("study.json", "chunks.jsonl", "rows.jsonl"):
        (tmp_path / name).write_text("{}\n")
    (tmp_path / "chunks.jsonl").write_text(f"{damaged}\n")
    with pytest.raises(InputError, match=r"chunks\.jsonl"):
        OldStudy.read(tmp_path, None)
