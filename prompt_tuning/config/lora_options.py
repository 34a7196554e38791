"""The options of LoRA: where it adapts the model, and how."""

from prompt_tuning.config.flat_option import FlatOption
from prompt_tuning.core.adapter_names import LORA_PLUS_RATIO
from prompt_tuning.core.number_ranges import NonnegativeInteger, PositiveNumber

LORA_OPTIONS = (
    FlatOption(
        "lora_at",
        "modules to adapt with LoRA: all-linear, or names or suffixes as in PEFT's "
        "target_modules, e.g. q_proj v_proj; if not given, queries and values",
        "LoRA.at",
        kind=list,
        metavar="NAME",
    ),
    FlatOption(
        "lora_alpha",
        "alpha of LoRA; its product is scaled by alpha / rank",
        "LoRA.alpha",
    ),
    FlatOption(
        "lora_rank_stabilized",
        "scale LoRA's product by alpha / sqrt(rank) instead",
        "LoRA.rank_stabilized",
    ),
    FlatOption(
        "lora_dropout",
        "dropout rate of LoRA's input in training",
        "LoRA.dropout",
    ),
    FlatOption(
        "lora_layers",
        "indices of the blocks to adapt with LoRA, from 0; if not given, all",
        "LoRA.layers",
        kind=list,
        item=NonnegativeInteger,
        metavar="N",
    ),
    FlatOption(
        "lora_rank_pattern",
        "ranks of modules that match expressions, as in PEFT: '{\"down_proj\": 16}'",
        "LoRA.rank_pattern",
        kind=dict,
        metavar="JSON",
    ),
    FlatOption(
        "lora_alpha_pattern",
        "alphas of modules that match expressions, as in PEFT",
        "LoRA.alpha_pattern",
        kind=dict,
        metavar="JSON",
    ),
    FlatOption(
        "lora_initial", "initialization of LoRA, named as in PEFT", "LoRA.initial"
    ),
    FlatOption(
        "lora_eva_rho",
        "maximum rank of a layer with --lora_initial eva, in units of --rank",
        "LoRA.eva_rho",
    ),
    FlatOption(
        "dora",
        "also train a magnitude for each output of LoRA's projections (DoRA)",
        "LoRA.dora",
    ),
    FlatOption(
        "lora_invocation",
        "ids of the tokens that activate LoRA from their last occurrence in a row on "
        "(aLoRA); if not given, LoRA is always active",
        "LoRA.invocation",
        kind=list,
        item=NonnegativeInteger,
        metavar="ID",
    ),
    FlatOption(
        "lora_bias",
        "biases of the model to train together with LoRA, named as in PEFT",
        "LoRA.bias",
    ),
    FlatOption(
        "lora_plus_ratio",
        "learning rate of LoRA's factor b relative to that of a (LoRA+)",
        "ParameterGroup.lora_plus_ratio",
        kind=PositiveNumber,
        default=LORA_PLUS_RATIO,
    ),
)
