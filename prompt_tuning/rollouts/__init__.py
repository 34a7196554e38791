"""Samples answers with the model that is trained, and has them judged by rewards.

Start with `rollout_stream.RolloutStream`, which makes the batch of a step.
`rollout_settings.Rollouts` says how answers are sampled and judged.
"""
