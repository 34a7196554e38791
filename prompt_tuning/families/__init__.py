"""Families of models: one module each, registered in `FAMILIES`.

To add a family, write a module with a `Family`, add a line below, and make a fixture
with `scripts/make_fixtures.py`. `hf_folder` reads and writes the Hugging Face folders
of all families.
"""

from prompt_tuning.families.arcee import ARCEE
from prompt_tuning.families.bamba import BAMBA
from prompt_tuning.families.bart import BART
from prompt_tuning.families.bert import BERT
from prompt_tuning.families.bloom import BLOOM
from prompt_tuning.families.cohere import COHERE, COHERE2
from prompt_tuning.families.deberta_v2 import DEBERTA_V2
from prompt_tuning.families.deepseek_v3 import DEEPSEEK_V3
from prompt_tuning.families.distilbert import DISTILBERT
from prompt_tuning.families.electra import ELECTRA
from prompt_tuning.families.ernie4_5 import ERNIE4_5
from prompt_tuning.families.exaone4 import EXAONE4
from prompt_tuning.families.falcon import FALCON
from prompt_tuning.families.falcon_h1 import FALCON_H1
from prompt_tuning.families.family import Family
from prompt_tuning.families.gemma import GEMMA
from prompt_tuning.families.gemma2 import GEMMA2
from prompt_tuning.families.gemma3 import GEMMA3, GEMMA3_TEXT
from prompt_tuning.families.gemma4 import GEMMA4, GEMMA4_TEXT
from prompt_tuning.families.glm4 import GLM, GLM4
from prompt_tuning.families.glm4_moe import GLM4_MOE
from prompt_tuning.families.gpt2 import GPT2
from prompt_tuning.families.gpt_neo import GPT_NEO
from prompt_tuning.families.gpt_neox import GPT_NEOX
from prompt_tuning.families.gpt_oss import GPT_OSS
from prompt_tuning.families.gptj import GPTJ
from prompt_tuning.families.granite import GRANITE
from prompt_tuning.families.granitemoe import GRANITEMOE
from prompt_tuning.families.granitemoehybrid import GRANITEMOEHYBRID
from prompt_tuning.families.helium import HELIUM
from prompt_tuning.families.hunyuan import HUNYUAN_DENSE, HUNYUAN_MOE
from prompt_tuning.families.jamba import JAMBA
from prompt_tuning.families.lfm2 import LFM2
from prompt_tuning.families.lfm2_moe import LFM2_MOE
from prompt_tuning.families.llama import LLAMA
from prompt_tuning.families.llama4 import LLAMA4, LLAMA4_TEXT
from prompt_tuning.families.marian import MARIAN, PEGASUS
from prompt_tuning.families.mbart import M2M_100, MBART
from prompt_tuning.families.minimax import MINIMAX
from prompt_tuning.families.ministral3 import MINISTRAL3
from prompt_tuning.families.mistral import MINISTRAL, MISTRAL
from prompt_tuning.families.mistral3 import MISTRAL3
from prompt_tuning.families.mixtral import MIXTRAL
from prompt_tuning.families.modernbert import MODERNBERT
from prompt_tuning.families.nemotron_h import NEMOTRON_H
from prompt_tuning.families.olmo import OLMO
from prompt_tuning.families.olmo2 import OLMO2, OLMO3
from prompt_tuning.families.olmo_hybrid import OLMO_HYBRID
from prompt_tuning.families.olmoe import FLEX_OLMO, OLMOE
from prompt_tuning.families.opt import OPT
from prompt_tuning.families.phi import PHI
from prompt_tuning.families.phi3 import PHI3
from prompt_tuning.families.phimoe import PHIMOE
from prompt_tuning.families.pure_mamba import FALCON_MAMBA, MAMBA
from prompt_tuning.families.pure_mamba2 import MAMBA2
from prompt_tuning.families.qwen2 import QWEN2
from prompt_tuning.families.qwen2_moe import QWEN2_MOE
from prompt_tuning.families.qwen3 import QWEN3
from prompt_tuning.families.qwen3_5 import QWEN3_5_TEXT
from prompt_tuning.families.qwen3_5_images import QWEN3_5, QWEN3_5_MOE
from prompt_tuning.families.qwen3_5_moe import QWEN3_5_MOE_TEXT
from prompt_tuning.families.qwen3_moe import QWEN3_MOE
from prompt_tuning.families.qwen3_next import QWEN3_NEXT
from prompt_tuning.families.qwen3_vl import QWEN3_VL
from prompt_tuning.families.qwen3_vl_moe import QWEN3_VL_MOE
from prompt_tuning.families.roberta import ROBERTA, XLM_ROBERTA
from prompt_tuning.families.seed_oss import SEED_OSS
from prompt_tuning.families.smollm3 import SMOLLM3
from prompt_tuning.families.stablelm import STABLELM
from prompt_tuning.families.starcoder2 import STARCODER2
from prompt_tuning.families.t5 import T5
from prompt_tuning.families.t5_multilingual import MT5, UMT5
from prompt_tuning.families.t5gemma import T5GEMMA

REFUSED = {
    "deepseek_v2": "its choice of experts is not implemented",
}
"""Other values of `model_type`, with the reason for which they are refused."""

ALIASES = {"kimi_k2": "deepseek_v3"}
"""Other names of families; transformers knows the text part of Kimi K2.5 by both."""

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        LLAMA,
        MISTRAL,
        MINISTRAL,
        MINISTRAL3,
        MISTRAL3,
        QWEN2,
        QWEN3,
        QWEN3_VL,
        QWEN3_VL_MOE,
        GEMMA,
        GEMMA2,
        GEMMA3_TEXT,
        GEMMA3,
        GEMMA4_TEXT,
        GEMMA4,
        PHI3,
        SMOLLM3,
        OLMO,
        OLMO2,
        OLMO3,
        OLMO_HYBRID,
        GRANITE,
        STABLELM,
        STARCODER2,
        PHI,
        GLM,
        GLM4,
        SEED_OSS,
        ERNIE4_5,
        EXAONE4,
        HUNYUAN_DENSE,
        HUNYUAN_MOE,
        ARCEE,
        HELIUM,
        LFM2,
        LFM2_MOE,
        QWEN3_NEXT,
        QWEN3_5_TEXT,
        QWEN3_5,
        QWEN3_5_MOE_TEXT,
        QWEN3_5_MOE,
        COHERE,
        COHERE2,
        GPT_NEOX,
        MIXTRAL,
        PHIMOE,
        QWEN2_MOE,
        QWEN3_MOE,
        OLMOE,
        FLEX_OLMO,
        GRANITEMOE,
        GRANITEMOEHYBRID,
        NEMOTRON_H,
        BAMBA,
        FALCON_H1,
        MAMBA2,
        JAMBA,
        MINIMAX,
        FALCON_MAMBA,
        MAMBA,
        GLM4_MOE,
        DEEPSEEK_V3,
        LLAMA4_TEXT,
        LLAMA4,
        GPT_OSS,
        GPTJ,
        GPT_NEO,
        FALCON,
        BLOOM,
        GPT2,
        OPT,
        T5,
        MT5,
        UMT5,
        T5GEMMA,
        BART,
        MARIAN,
        PEGASUS,
        MBART,
        M2M_100,
        BERT,
        ROBERTA,
        XLM_ROBERTA,
        DEBERTA_V2,
        DISTILBERT,
        ELECTRA,
        MODERNBERT,
    )
}
