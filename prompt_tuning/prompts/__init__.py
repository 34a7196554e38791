"""Tuning methods: prompts and projection adapters, and their initial values.

Start with `soft.SoftPrompt`. `prompt_module` has the base classes.
"""

from prompt_tuning.core.config_folder import with_configured

_LISTED = {
    "SoftPrompt": "prompt_tuning.prompts.soft",
    "InferenceOnlyPrompt": "prompt_tuning.prompts.soft",
    "AddMultiTaskPrompt": "prompt_tuning.prompts.multitask",
    "ConcatTimeMultiTaskPrompt": "prompt_tuning.prompts.multitask",
    "ConcatFeaturesMultiTaskPrompt": "prompt_tuning.prompts.multitask",
    "ProjectMultiTaskPrompt": "prompt_tuning.prompts.multitask",
    "FactorizedMultiTaskPrompt": "prompt_tuning.prompts.factorized",
    "factors_of_ones": "prompt_tuning.prompts.factorized",
    "normal_factors": "prompt_tuning.prompts.factorized",
    "MLPPrompt": "prompt_tuning.prompts.reparameterized",
    "ResidualPrompt": "prompt_tuning.prompts.reparameterized",
    "WaywardPrompt": "prompt_tuning.prompts.wayward",
    "DroppedPrompt": "prompt_tuning.prompts.wrapped",
    "InstancePrompt": "prompt_tuning.prompts.input_dependent",
    "PromptPool": "prompt_tuning.prompts.input_dependent",
    "DeepPrompt": "prompt_tuning.prompts.deep",
    "AddedDeepPrompt": "prompt_tuning.prompts.deep",
    "KeyValuePrefix": "prompt_tuning.prompts.prefix",
    "ProjectedKeyValuePrefix": "prompt_tuning.prompts.prefix",
    "normal": "prompt_tuning.prompts.prefix",
    "LoRA": "prompt_tuning.prompts.low_rank_adapters",
    "IA3": "prompt_tuning.prompts.projection_adapters",
    "TrainedTokens": "prompt_tuning.settings.trained_tokens",
    "ClassHead": "prompt_tuning.settings.class_head",
    "Prompting": "prompt_tuning.settings.prompting",
    "uniform": "prompt_tuning.prompts.initializers",
    "from_file": "prompt_tuning.prompts.initializers",
    "from_sampled_vocabulary": "prompt_tuning.prompts.initializers",
    "from_class_labels": "prompt_tuning.prompts.initializers",
    "from_text": "prompt_tuning.prompts.initializers",
    "from_chunks": "prompt_tuning.prompts.text_starts",
    "from_attention_matching": "prompt_tuning.prompts.text_starts",
    "from_template": "prompt_tuning.prompts.initializers",
}
FACTORIES = with_configured(_LISTED, "prompts", ("prompts", "adapters"))
"""Each factory that a config can name and its module; `adapter_kinds` imports them.

A new prompt or projection adapter is found by the name of its module, which is that of
its config.
"""
