"""StarCoder 2: biases, layer norms, a window, and a feed-forward layer without gate."""

import functools

from prompt_tuning.families import llama_layout
from prompt_tuning.families.hf_settings import HuggingFaceSettings, ModelFields
from prompt_tuning.families.layer_settings import has_window, read_windows
from prompt_tuning.families.llama import LLAMA
from prompt_tuning.families.rotary_settings import FULL, SLIDING

MODULES = llama_layout.PROJECTIONS | {"mlp/up": "mlp.c_fc", "mlp/down": "mlp.c_proj"}


def _read_starcoder2(settings: HuggingFaceSettings) -> ModelFields:
    fields = llama_layout.read_rotated(settings, tied=True, divided=True)
    activation = settings.text("hidden_act", "gelu_pytorch_tanh")
    kind = SLIDING if has_window(settings) else FULL
    return {
        **fields,
        **read_windows(settings, fields["layers"], [kind] * fields["layers"]),
        "norm": "layer",
        "norm_epsilon": settings.positive("norm_epsilon", 1e-5),
        "activation": settings.activation(activation),
        "gated": False,
        "biases": "all" if settings.flag("use_bias", True) else "none",
    }


STARCODER2 = LLAMA.like(
    "starcoder2",
    "StarCoder 2",
    _read_starcoder2,
    recipes=functools.partial(llama_layout.layout_recipes, modules=MODULES),
    more_inert={"residual_dropout", "embedding_dropout"},
)
