"""Accuracy and memory of narrow weights of a real model."""

import pytest

from prompt_tuning.pretrained.checkpoint_path import BUNDLED
from scripts.bench import load_cost, quantization_cost
from tests.support.shared_data import SHARED


@pytest.mark.exhaustive
@pytest.mark.released
def test_a_real_model_predicts_stories_equally_well_with_narrow_weights():
    rows = quantization_cost.text_rows(
        str(SHARED / "data/models/stories260k"),
        SHARED / "data/text/tinystories/tinystories_sample.txt",
    )
    rows = rows[:3]
    assert [row[1] for row in rows] == ["float32", "bfloat16", "int8"]
    size, nats, agreement = (
        [float(row[column].strip("%").replace(",", "")) for row in rows]
        for column in (2, 3, 4)
    )
    assert size[0] == 4 * 260_032 and size[1] == size[0] / 2 and size[2] < size[0] / 3
    assert nats[0] == pytest.approx(1.333, abs=1e-3)
    assert nats == pytest.approx([nats[0]] * 3, abs=2e-3)
    assert agreement[0] == 100 and min(agreement) >= 98


def test_the_cost_of_loading_is_measured():
    checkpoint = str(BUNDLED / "skills-decoder")
    cost = load_cost.load(checkpoint, "float32")
    assert cost["weights"] == 4 * 799_488
    assert cost["largest"] == 4 * 344 * 128
    assert load_cost.load(checkpoint, "int8")["weights"] == 829_696
