"""The options of the command line that set how answers are sampled and judged."""

from prompt_tuning.config.flat_option import FlatOption

ROLLOUT_OPTIONS = (
    FlatOption(
        "reward",
        "rewards of the model's answers: exact_match, numeric_answer, "
        "regex=EXPRESSION, json_schema=FILE, length=CHARACTERS, logprob, or a function "
        "module:function of (prompt, completion, row); several are added up",
        "Rollouts.rewards",
        kind=list,
        macro="REWARDS",
        default="none",
        metavar="REWARD",
    ),
    FlatOption(
        "group",
        "answers per prompt, which rewards compare",
        "Rollouts.group",
        macro="GROUP",
        default="8; 1 for on_policy_distillation",
    ),
    FlatOption(
        "new_tokens",
        "maximum number of tokens of an answer",
        "Rollouts.new_tokens",
        macro="NEW_TOKENS",
    ),
    FlatOption(
        "temperature",
        "sampling temperature of answers; in contrastive, the divisor of cosines",
        "Rollouts.temperature",
        macro="TEMPERATURE",
    ),
    FlatOption(
        "updates",
        "steps that learn from each answer",
        "Rollouts.updates",
        macro="UPDATES",
    ),
    FlatOption(
        "resample",
        "how often a step replaces groups with equal rewards by groups of new prompts",
        "Rollouts.resample",
        macro="RESAMPLE",
    ),
    FlatOption(
        "replay",
        "learn again from the best earlier answer where all new ones are equally worse",
        "Rollouts.replay",
        macro="REPLAY",
    ),
)
