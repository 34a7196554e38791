"""Sample answers from the model in training, and reward them.

Start with `rollout_stream.RolloutStream`, which makes the batch of a step.
`settings.rollout_settings.Rollouts` says how answers are sampled and rewarded.
"""
