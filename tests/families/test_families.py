"""Every family computes what transformers and PEFT compute.

`scripts/make_fixtures.py` makes the folders; FAMILY_FIXTURES names another one. After
all cases have passed, WRITE_FAMILIES=1 writes the table of families in the README.
"""

import functools
import json
import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from prompt_tuning.adapters.peft.folder import read_folder
from prompt_tuning.adapters.peft.peft_conversion import from_peft
from prompt_tuning.decoding.batch_decoding import continue_batch
from prompt_tuning.decoding.row_progress import first_choices
from prompt_tuning.decoding.sampling_settings import Sampling
from prompt_tuning.families import FAMILIES as KNOWN
from prompt_tuning.families.hf_folder import read_config
from prompt_tuning.pretrained.source import read_vocabulary
from prompt_tuning.settings.pretrained import Pretrained
from tests.support.adapters import assert_same_logits, batch_of, our_logits, restored
from tests.support.exhaustive import sample

FOLDER = Path(
    os.environ.get("FAMILY_FIXTURES", Path(__file__).parents[1] / "fixtures/families")
)
FAMILIES = sorted(path.name for path in FOLDER.iterdir())
KINDS = ("base", "prompt_tuning", "prefix_tuning", "lora", "ia3")
FUSED = ("phi3", "gpt_neox")


def cases(kinds):
    return [
        (family, kind)
        for family in FAMILIES
        for kind in kinds
        if (FOLDER / family / kind).is_dir()
    ]


# Adapters of most families repeat what other tests check for the layers they share.
FIRST = [
    *cases(["base"]),
    *((name, kind) for name in FUSED for kind in ("lora", "ia3")),
]
CASES = sample(
    len(FIRST), [*FIRST, *(case for case in cases(KINDS) if case not in FIRST)]
)
TABLE = Path(__file__).parents[2] / "prompt_tuning/families/README.md"
BEGIN = "<!-- families: made by tests/families/test_families.py -->"
END = "<!-- /families -->"
passed: set[tuple[str, str]] = set()
"""Cases of which the test has passed."""


@functools.cache
def reference(family):
    return dict(np.load(FOLDER / family / "ref.npz"))


def adapted(family, kind):
    """Returns the config, and the model with an adapter."""
    base = FOLDER / family / "base"
    config, adapter = read_config(base), None
    if kind != "base":
        folder = FOLDER / family / kind
        adapter = from_peft(read_folder(folder), config, str(folder))
    return config, *restored(base, adapter)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "kind"), CASES)
def test_logits_and_greedy_tokens_are_those_of_transformers(family, kind):
    config, graph, parameters = adapted(family, kind)
    given = reference(family)
    batch = batch_of(given)
    ours = our_logits(parameters, batch, graph=graph)
    assert_same_logits(ours, given[f"{kind}.logits"], given)
    if not config.bidirectional:  # else it is an encoder, which generates no text
        assert_same_greedy_tokens(config, graph, parameters, batch, given, kind)
    passed.add((family, kind))


def assert_same_greedy_tokens(config, graph, parameters, batch, given, kind):
    expected = given[f"{kind}.greedy_single"]
    ends = [end for end in (config.eos_id, *config.stop_ids) if end is not None]
    generated = continue_batch(
        parameters,
        batch.tokens,
        batch.lengths,
        first_choices(Sampling(), ends, range(len(batch.lengths))),
        None,
        graph=graph,
        new_tokens=expected.shape[1],
        pad_id=config.pad_id,
    )
    np.testing.assert_array_equal(generated, expected)


def rendered_table():
    """Returns the table of families with the adapters of their fixtures."""
    rows = [BEGIN, "| models | `model_type` | PEFT adapters tested |", "|---|---|---|"]
    for model_type, family in KNOWN.items():
        folders = [
            name
            for name in FAMILIES
            if json.loads((FOLDER / name / "base/config.json").read_text())[
                "model_type"
            ]
            == model_type
        ]
        kinds = [kind for kind in KINDS[1:] if (FOLDER / folders[0] / kind).is_dir()]
        cells = (family.title, f"`{model_type}`", ", ".join(kinds).replace("_", " "))
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join([*rows, END])


def test_the_document_has_the_table_of_tested_families():
    text = TABLE.read_text()
    before, begin, rest = text.partition(BEGIN)
    current, end, after = rest.partition(END)
    assert begin and end
    if os.environ.get("WRITE_FAMILIES"):
        assert passed == {*cases(KINDS)}, "run all cases of this file, with -m ''"
        TABLE.write_text(before + rendered_table() + after)
    else:
        expected = rendered_table()
        assert begin + current + end == expected, "WRITE_FAMILIES=1 writes the table"


def test_initial_values_from_the_vocabulary_are_what_gemma_reads():
    base = FOLDER / "gemma/base"
    stored = load_file(base / "model.safetensors")["model.embed_tokens.weight"]
    table = read_vocabulary(Pretrained(checkpoint=str(base))).embeddings
    np.testing.assert_allclose(table[[3, 5]], stored[[3, 5]] * 8**0.5, rtol=1e-6)
