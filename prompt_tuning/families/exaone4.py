"""EXAONE 4: norms after sublayers, no rotary embedding in layers without a window."""

from prompt_tuning.families.hf_settings import HuggingFaceSettings, ModelFields
from prompt_tuning.families.layer_settings import alternating, read_windows
from prompt_tuning.families.llama import LLAMA
from prompt_tuning.families.llama_layout import read_rotated
from prompt_tuning.families.rotary_settings import FULL


def _read_exaone4(settings: HuggingFaceSettings) -> ModelFields:
    fields = read_rotated(settings, epsilon=1e-5)
    layers, windows = fields["layers"], {}
    if "sliding_window" in settings:
        kinds = []
        if "layer_types" not in settings:
            # Published folders have both, and then a text such as "LLLG" here.
            kinds = alternating(layers, settings.size("sliding_window_pattern", 4))
        windows = read_windows(settings, layers, kinds)
        windowed = windows.get("windowed_layers", ())
        unwindowed = tuple(i for i in range(layers) if i not in windowed)
        windows["unrotated_layers"] = unwindowed
    else:
        reason = "there is no sliding_window"
        settings.require("layer_types", [FULL] * layers, reason)
    return {
        **fields,
        **windows,
        "norm_placement": "after",
        "query_key_norm": "head",
    }


EXAONE4 = LLAMA.like("exaone4", "EXAONE 4", _read_exaone4)
