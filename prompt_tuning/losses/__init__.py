"""Objectives of training: losses of tokens and classes, and what divides their sums."""

FACTORIES = {
    "TokenObjective": "prompt_tuning.losses.token_objective",
    "ClassObjective": "prompt_tuning.losses.class_objective",
    "OutputGradients": "prompt_tuning.losses.fixed_gradients",
    "PolicyGradient": "prompt_tuning.losses.policy_gradient",
    "ContextDistillation": "prompt_tuning.losses.context_distillation",
}
"""The module of each class that gin binds to `Run.objective`; imported when needed."""
