"""Model class for lm-evaluation-harness (`lm_eval`, extra `eval`).

Importing this package registers the model `prompt_tuning` with the harness.
"""

from prompt_tuning.lm_eval.harness_model import HarnessModel as HarnessModel
