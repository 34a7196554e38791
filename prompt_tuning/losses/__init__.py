"""Objectives: what training minimizes, and how it divides the sum of losses.

Start with `objective.Objective`. `cross_entropy` has a hand-written backward pass.
"""

from prompt_tuning.core.config_folder import with_configured

_LISTED = {
    "TokenObjective": "prompt_tuning.losses.token_objective",
    "ClassObjective": "prompt_tuning.losses.class_objective",
    "OutputGradients": "prompt_tuning.losses.fixed_gradients",
    "PolicyGradient": "prompt_tuning.losses.policy_gradient",
    "ContextDistillation": "prompt_tuning.losses.context_distillation",
    "OnPolicyDistillation": "prompt_tuning.losses.context_distillation",
    "Contrastive": "prompt_tuning.losses.contrastive",
    "DPO": "prompt_tuning.losses.dpo",
    "ORPO": "prompt_tuning.losses.orpo",
    "SimPO": "prompt_tuning.losses.simpo",
    "KTO": "prompt_tuning.losses.kto",
    "GRPO": "prompt_tuning.losses.grpo",
}
FACTORIES = with_configured(_LISTED, "losses", ("losses",))
"""The module of each class that gin binds to `Run.objective`; imported when needed."""
