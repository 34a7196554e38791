"""References of PEFT are right, whatever version of transformers computes them."""

# These imports are in the `bench` extra only.
# pyright: reportMissingImports=false

import numpy as np
import pytest

from scripts import peft_versions
from tests.support.shared_data import FIXTURES

PEFT = FIXTURES / "peft"


def test_versions_that_were_not_checked_are_named():
    installed = {"peft": "0.21.2", "torch": "2.13.0+cpu", "transformers": "5.24.1"}
    assert peft_versions.unchecked_versions(installed.__getitem__) == []
    installed |= {"peft": "0.21.20", "transformers": "5.3.0"}
    assert peft_versions.unchecked_versions(installed.__getitem__) == [
        "peft 0.21.20 is installed; checked with 0.21.2",
        "transformers 5.3.0 is installed; checked with 5.23 or 5.24",
    ]


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers
@pytest.mark.parametrize(
    ("case", "kind"),
    [
        ("llama_gqa_untied", "prompt_tuning"),
        ("gpt2_tied", "prefix_tuning"),
        ("t5_orig_tied_relu", "prefix_tuning"),
    ],
)
def test_steps_without_a_cache_continue_as_transformers_5_23_did(case, kind):
    """The fixtures were made by `generate` with 5.23, which 5.24 does not repeat."""
    import peft
    import torch
    import transformers

    from scripts.make_fixtures import auto_class, continued

    folder, given = PEFT / case, np.load(PEFT / case / "ref.npz")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    settings = transformers.AutoConfig.from_pretrained(folder / "base")
    base = auto_class(settings).from_pretrained(folder / "base")
    model = peft.PeftModel.from_pretrained(base, folder / kind).eval()
    expected = given[f"{kind}.greedy_single"]
    with torch.no_grad():
        for ids, mask, tokens in zip(
            given["input_ids"], given["attention_mask"], expected, strict=True
        ):
            row = torch.tensor(ids[mask.astype(bool)])
            made = continued(model, row, len(tokens))
            assert (
                made == tokens[: len(made)].tolist() and not tokens[len(made) :].any()
            )
