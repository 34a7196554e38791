"""Families of models: one module each, registered in `FAMILIES`.

A new family is a module with a `Family`, a line below, and a fixture that
`scripts/make_fixtures.py` makes. `hf_folder` reads and writes Hugging Face folders of
all of them.
"""

from prompt_tuning.families.family import Family
from prompt_tuning.families.gemma import GEMMA
from prompt_tuning.families.gpt2 import GPT2
from prompt_tuning.families.gpt_neox import GPT_NEOX
from prompt_tuning.families.granite import GRANITE
from prompt_tuning.families.llama import LLAMA
from prompt_tuning.families.opt import OPT
from prompt_tuning.families.qwen2 import QWEN2
from prompt_tuning.families.t5 import T5

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        LLAMA,
        QWEN2,
        GEMMA,
        GRANITE,
        GPT_NEOX,
        GPT2,
        OPT,
        T5,
    )
}
