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
ALIKE = {
    "deepseek_v3": ["deepseek_v3_plain"],
    "ernie4_5": [
        *("gemma", "glm", "glm4", "gpt_neox", "granite", "granitemoe", "helium"),
        *("olmo", "qwen2_moe", "qwen2_moe_dense", "seed_oss", "stablelm"),
        *("falcon_new", "falcon_sequential", "gpt_neox_sequential"),
        *("llama_attention_bias", "stablelm_parallel"),
    ],
    "falcon_h1": ["falcon_h1_norm"],
    "gemma3_text": ["gemma3"],
    "gemma4_text": ["gemma4_experts"],
    "gpt2": ["opt"],
    "granitemoehybrid": ["bamba", "granitemoehybrid_dense"],
    "hunyuan_v1_dense": ["hunyuan_v1_moe"],
    "jamba": ["falcon_mamba", "jamba_dense"],
    "lfm2": ["lfm2_moe"],
    "llama4_text": ["llama4"],
    "ministral3": ["mistral3"],
    "mistral": ["ministral", "mixtral", "phi3", "qwen2", "starcoder2"],
    "nemotron_h": ["nemotron_h_dense"],
    "olmo2": ["flex_olmo", "olmoe"],
    "qwen3": ["glm4_moe", "phi", "qwen3_moe", "qwen3_vl", "qwen3_vl_moe"],
    "qwen3_5": ["qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"],
}
"""Families, and those with the same kinds of attention and memories."""
ENCODERS = {"electra", *(name for name in FAMILIES if "bert" in name)}
"""Families that generate no text."""
REPEATED = {name for names in ALIKE.values() for name in names}
DECODED = [case for case in cases(["base"]) if case[0] not in ENCODERS | REPEATED]
FURTHER = [
    case for case in cases(KINDS) if case[0] not in ENCODERS and case not in DECODED
]
TABLE = Path(__file__).parents[2] / "prompt_tuning/families/README.md"
BEGIN = "<!-- families: made by tests/families/test_families.py -->"
END = "<!-- /families -->"
passed: set[tuple[str, str]] = set()
decoded: set[tuple[str, str]] = set()
"""Cases whose tests have passed."""


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
def test_logits_and_next_tokens_are_those_of_transformers(family, kind):
    config, graph, parameters = adapted(family, kind)
    given = reference(family)
    decoder = not config.bidirectional and not config.encoder_layers
    read = with_continuation(given, kind) if decoder else given
    ours = np.asarray(our_logits(parameters, batch_of(read), graph=graph))
    theirs = given[f"{kind}.logits"]
    assert_same_logits(ours[:, : theirs.shape[1]], theirs, given)
    if decoder:
        lengths = given["attention_mask"].sum(1)
        following = given[f"{kind}.greedy_single"]
        for row, length, tokens in zip(ours, lengths, following, strict=True):
            expected = until_end(config, tokens)
            chosen = row[length - 1 :].argmax(1)[: len(expected)]
            np.testing.assert_array_equal(chosen, expected)
    passed.add((family, kind))


def with_continuation(given, kind):
    """Returns the rows of a decoder, each with the tokens that follow it."""
    tokens, mask = given["input_ids"], given["attention_mask"]
    following = given[f"{kind}.greedy_single"]
    tokens = np.concatenate([tokens, np.zeros_like(following)], axis=1)
    rows = np.arange(len(tokens))[:, None]
    places = mask.sum(1)[:, None] + np.arange(following.shape[1])
    tokens[rows, places] = following
    mask = np.concatenate([np.ones_like(following), mask], axis=1)
    return {"input_ids": tokens, "attention_mask": mask}


def ends_of(config):
    """Returns the tokens that end a text."""
    return [end for end in (config.eos_id, *config.stop_ids) if end is not None]


def until_end(config, tokens):
    """Returns the tokens without the padding after the one that ends the text."""
    [ended] = np.nonzero(np.isin(tokens, ends_of(config)))
    return tokens[: ended[0] + 1] if ended.size else tokens


@pytest.mark.slow
@pytest.mark.parametrize(("family", "kind"), sample(len(DECODED), DECODED + FURTHER))
def test_a_cache_gives_the_tokens_of_transformers(family, kind):
    config, graph, parameters = adapted(family, kind)
    given = reference(family)
    batch = batch_of(given)
    expected = given[f"{kind}.greedy_single"]
    choices = first_choices(Sampling(), ends_of(config), range(len(batch.lengths)))
    generated = continue_batch(
        parameters,
        batch.tokens,
        batch.lengths,
        choices,
        None,
        graph=graph,
        new_tokens=expected.shape[1],
        pad_id=config.pad_id,
    )
    np.testing.assert_array_equal(generated, expected)
    decoded.add((family, kind))


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
        finished = passed == {*cases(KINDS)} and decoded == {*DECODED, *FURTHER}
        assert finished, "run all cases of this file, with -m ''"
        TABLE.write_text(before + rendered_table() + after)
    else:
        expected = rendered_table()
        assert begin + current + end == expected, "WRITE_FAMILIES=1 writes the table"


def test_initial_values_from_the_vocabulary_are_what_gemma_reads():
    base = FOLDER / "gemma/base"
    stored = load_file(base / "model.safetensors")["model.embed_tokens.weight"]
    table = read_vocabulary(Pretrained(checkpoint=str(base))).embeddings
    np.testing.assert_allclose(table[[3, 5]], stored[[3, 5]] * 8**0.5, rtol=1e-6)
