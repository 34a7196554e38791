"""Objectives of training: losses of tokens and classes, and what divides their sums."""

from prompt_tuning.core.config_folder import with_configured

_LISTED = {
    "TokenObjective": "prompt_tuning.losses.token_objective",
    "ClassObjective": "prompt_tuning.losses.class_objective",
    "OutputGradients": "prompt_tuning.losses.fixed_gradients",
    "PolicyGradient": "prompt_tuning.losses.policy_gradient",
    "ContextDistillation": "prompt_tuning.losses.context_distillation",
}
FACTORIES = with_configured(_LISTED, "losses", ("losses",))
"""The module of each class that gin binds to `Run.objective`; imported when needed."""
