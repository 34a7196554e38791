"""Opens a checkpoint as a frozen model, with prompts and adapters attached.

`source.Pretrained` says which checkpoint; `prompted_model.PromptedModel` is the model.
"""
