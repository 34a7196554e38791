"""SmolLM3: a Llama without rotary embedding in every fourth layer."""

from prompt_tuning.families.hf_settings import HuggingFaceSettings, ModelFields
from prompt_tuning.families.layer_settings import read_unrotated, read_windows
from prompt_tuning.families.llama import LLAMA
from prompt_tuning.families.llama_layout import read_biases, read_rotated
from prompt_tuning.families.rotary_settings import FULL, SLIDING


def _read_smollm3(settings: HuggingFaceSettings) -> ModelFields:
    fields = read_rotated(settings, tied=True, base=2_000_000.0)
    layers = fields["layers"]
    unrotated = read_unrotated(settings, layers)
    kinds = [FULL] * layers
    if not settings.flag("use_sliding_window", False):
        settings.require("layer_types", kinds, "use_sliding_window is not set")
    elif "sliding_window" in settings:
        kinds = [SLIDING if i in unrotated else FULL for i in range(layers)]
    return {
        **fields,
        **read_windows(settings, layers, kinds),
        "key_value_heads": settings.size("num_key_value_heads"),
        "biases": read_biases(settings),
        "unrotated_layers": unrotated,
    }


SMOLLM3 = LLAMA.like("smollm3", "SmolLM3", _read_smollm3)
