import math

import numpy as np
import pytest

import prompt_tuning as pt
from prompt_tuning.core.errors import InputError
from prompt_tuning.evaluation.ranking import candidate_nats
from prompt_tuning.pretrained.text_encoding import encode_given
from tests.support.exhaustive import sample
from tests.support.shared_data import FIXTURES

LLAMA, GPT2 = "llama_gqa_untied", "gpt2_tied"
PEFT_KINDS = ("base", "prompt_tuning", "prefix_tuning", "lora")
TEXT = "upper: abc="


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    model = pt.load("bundled:skills-decoder")
    vectors = np.random.default_rng(1).normal(size=(4, model.config.width))
    file = tmp_path_factory.mktemp("soft") / "soft.npy"
    np.save(file, vectors.astype("f4"))
    model.load_adapter("soft", file)
    return model


def test_the_score_of_an_answer_is_that_of_its_tokens(model):
    sampling = pt.Sampling(new_tokens=6, logprobs=1)
    (answer,) = model.generate(TEXT, sampling=sampling)
    (score,) = model.loglikelihood([(TEXT, str(answer))])
    expected = math.fsum(each.logprob for each in answer.logprobs)
    assert score.greedy
    assert score.logprob == pytest.approx(expected, abs=1e-5)
    other, again = model.loglikelihood([(TEXT, "cba"), (TEXT, str(answer))])
    assert not other.greedy and other.logprob < score.logprob
    assert again == score


def test_an_adapter_changes_scores_and_may_precede_the_first_token(model):
    pairs = [(TEXT, "ABC"), ([5, 6, 7], [8, 9]), ([], [8])]
    scores = model.loglikelihood(pairs, adapter="soft")
    assert scores[0] != model.loglikelihood(pairs[:1])[0]
    adapter = model.texts.find("soft")
    rows = [encode_given(model.prompted, TEXT), [5, 6, 7], []]
    ids = [model.tokenizer.encode_continuation("ABC"), [8, 9], [8]]
    nats = [
        candidate_nats(
            adapter.model, adapter.parameters, [row], [[each]], batch_size=1
        )[0, 0]
        for row, each in zip(rows, ids, strict=True)
    ]
    np.testing.assert_allclose([-x.logprob for x in scores], nats, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind"),
    sample(
        4,
        [
            *((LLAMA, kind) for kind in PEFT_KINDS),
            *((GPT2, kind) for kind in (*PEFT_KINDS, "ia3")),
        ],
    ),
)
def test_scores_are_those_of_peft(name, kind):
    folder = FIXTURES / "peft" / name
    reference = np.load(folder / "ref.npz")
    logits = reference[f"{kind}.logits"].astype(float)
    logits = logits[:, -reference["input_ids"].shape[1] :]  # without a prompt's
    nats = np.log(np.exp(logits).sum(-1, keepdims=True)) - logits
    pairs, expected = [], []
    lengths = reference["attention_mask"].sum(1)
    for row, length, cost in zip(reference["input_ids"], lengths, nats, strict=True):
        ids = row[:length].tolist()
        for k in range(1, length):
            pairs.append((ids[:k], ids[k:]))
            costs = cost[np.arange(k, length) - 1, ids[k:]]
            greedy = (cost[k - 1 : length - 1].argmin(-1) == ids[k:]).all()
            expected.append((-costs.sum(), greedy))
    model, adapter = pt.load(folder / "base"), None
    if kind != "base":
        adapter = kind
        model.load_adapter(kind, folder / kind)
    scores = model.loglikelihood(pairs, adapter=adapter)
    np.testing.assert_allclose(scores, expected, atol=1e-4)


def test_an_encoder_decoder_is_scored_as_an_evaluation_scores_labels():
    model = pt.load("bundled:skills-t5")
    right, wrong = model.loglikelihood([(TEXT, "ABC"), (TEXT, "cba")])
    assert right.greedy and not wrong.greedy
    given = encode_given(model.prompted, TEXT)
    candidates = [[model.tokenizer.encode(text) for text in ("ABC", "cba")]]
    nats = candidate_nats(
        model.prompted, model.parameters, [given], candidates, batch_size=1
    )
    np.testing.assert_allclose([-right.logprob, -wrong.logprob], nats[0], rtol=1e-4)


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        ((TEXT, ""), "continuation of pair 0 has no token"),
        (([1] * 5000, [2]), "does not fit"),
        (([], [2]), "has no token"),
    ],
    ids=["nothing", "long", "alone"],
)
def test_a_pair_that_cannot_be_scored_is_refused(pair, message, model):
    with pytest.raises(InputError, match=message):
        model.loglikelihood([pair])
