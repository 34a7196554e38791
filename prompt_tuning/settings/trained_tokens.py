"""Settings of trained rows of the embedding table."""

import dataclasses
from collections.abc import Sequence

from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.field_checks import check_fields
from prompt_tuning.core.number_ranges import NonnegativeInteger


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainedTokens:
    """Trained embedding rows of single tokens, new or existing; the table stays frozen.

    Use it for words that the model does not know, e.g. `<tool>` before a call, alone or
    with any prompt or adapter. A text that is already one token names that token, and
    its row starts from the table's. Any other text becomes a new token of the run's
    tokenizer; its row starts from the mean of the table, as with
    `resize_token_embeddings` in transformers. An output head that shares the table uses
    these rows as well; a separate head gets a row for each new token. This is PEFT's
    `trainable_token_indices`.

    Attributes:
      tokens: texts of tokens, or ids.
      head: tokens whose rows in a separate output head are trained, too; None for the
        new tokens.

    Raises:
      InputError: if a token is named twice, or none is.

    Examples:
      >>> tuned = model.attach(pt.TrainedTokens(tokens=["<tool>", "a"]))
      >>> trained, _ = tuned.partition()
      >>> for path, array in trained.items():
      ...     print(path, array.shape)
      token_embedder/adapters/tokens/rows (2, 128)
    """

    tokens: Sequence[str | NonnegativeInteger]
    head: Sequence[str | NonnegativeInteger] | None = None

    def __post_init__(self):
        check_fields(self)
        for name in ("tokens", "head"):
            value = getattr(self, name)
            if isinstance(value, str) or (value is not None and not value):
                raise InputError(
                    f"TrainedTokens.{name} is {shown(value)}, expected a list of texts "
                    "or ids, such as ['<tool>', '<end>']"
                )
            if any(text == "" for text in value or ()):
                raise InputError(
                    f"TrainedTokens.{name} has an empty text, expected that of a token"
                )

    def check_trained(self) -> None:
        """Does nothing: rows can always be trained."""
