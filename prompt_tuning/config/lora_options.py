"""The options of LoRA: where it adapts the model, and how."""

from prompt_tuning.config.flat_option import FlatOption
from prompt_tuning.core.adapter_names import LORA_PLUS_RATIO
from prompt_tuning.core.number_ranges import NonnegativeInteger, PositiveNumber

LORA_OPTIONS = (
    FlatOption(
        "lora_at",
        "modules that LoRA adapts: all-linear, or names or their ends as in PEFT's "
        "target_modules, e.g. q_proj v_proj; queries and values without this option",
        "LoRA.at",
        kind=list,
        metavar="NAME",
    ),
    FlatOption(
        "lora_alpha",
        "scale of LoRA; its product is multiplied by alpha / rank",
        "LoRA.alpha",
    ),
    FlatOption(
        "lora_rank_stabilized",
        "multiply LoRA's product by alpha / sqrt(rank) instead",
        "LoRA.rank_stabilized",
    ),
    FlatOption(
        "lora_dropout",
        "share of the elements of LoRA's input that each training step zeroes",
        "LoRA.dropout",
    ),
    FlatOption(
        "lora_layers",
        "numbers of the blocks that LoRA adapts, from 0; all without this option",
        "LoRA.layers",
        kind=list,
        item=NonnegativeInteger,
        metavar="N",
    ),
    FlatOption(
        "lora_rank_pattern",
        "ranks of some modules by expressions, as in PEFT: '{\"down_proj\": 16}'",
        "LoRA.rank_pattern",
        kind=dict,
        metavar="JSON",
    ),
    FlatOption(
        "lora_alpha_pattern",
        "alphas of some modules by expressions, as in PEFT",
        "LoRA.alpha_pattern",
        kind=dict,
        metavar="JSON",
    ),
    FlatOption("lora_initial", "first values of LoRA, by PEFT's names", "LoRA.initial"),
    FlatOption(
        "lora_eva_rho",
        "maximum rank of a layer with --lora_initial eva, in units of --rank",
        "LoRA.eva_rho",
    ),
    FlatOption(
        "dora",
        "train a magnitude of each output of LoRA's projections too (DoRA)",
        "LoRA.dora",
    ),
    FlatOption(
        "lora_invocation",
        "ids of tokens from whose last occurrence in a row on LoRA acts (aLoRA); "
        "everywhere without this option",
        "LoRA.invocation",
        kind=list,
        item=NonnegativeInteger,
        metavar="ID",
    ),
    FlatOption(
        "lora_bias",
        "biases of the model that are trained beside LoRA, by PEFT's names",
        "LoRA.bias",
    ),
    FlatOption(
        "lora_plus_ratio",
        "learning rate of LoRA's second factor b, in units of the first one's (LoRA+)",
        "ParameterGroup.lora_plus_ratio",
        kind=PositiveNumber,
        default=LORA_PLUS_RATIO,
    ),
)
