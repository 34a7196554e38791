"""OLMo 2 and 3: norms after sublayers, and of queries and keys over all heads."""

from prompt_tuning.families.hf_settings import HuggingFaceSettings, ModelFields
from prompt_tuning.families.layer_settings import alternating, read_windows
from prompt_tuning.families.llama import LLAMA
from prompt_tuning.families.llama_layout import read_biases, read_rotated
from prompt_tuning.families.rotary_settings import read_window_rotary


def read_olmo2(settings: HuggingFaceSettings, base: float = 10_000.0) -> ModelFields:
    """Returns fields of `ModelConfig`; see `Family.read_fields`."""
    fields = read_rotated(settings, epsilon=1e-5, base=base)
    return fields | {
        "norm_placement": "after",
        "query_key_norm": "width",
        "biases": read_biases(settings),
    }


def _read_olmo3(settings: HuggingFaceSettings) -> ModelFields:
    """Returns fields of `ModelConfig`; three of four layers have a window."""
    base = 500_000.0
    fields = read_olmo2(settings, base)
    layers = fields["layers"]
    return (
        fields
        | read_windows(settings, layers, alternating(layers, 4))
        | read_window_rotary(settings, settings.positive("rope_theta", base))
    )


OLMO2 = LLAMA.like("olmo2", "OLMo 2", read_olmo2)
OLMO3 = OLMO2.like("olmo3", "OLMo 3", _read_olmo3)
