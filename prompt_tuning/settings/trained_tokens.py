"""The tokens whose rows of the embedding table a run trains."""

import dataclasses
from collections.abc import Sequence

from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.field_checks import check_fields
from prompt_tuning.core.number_ranges import NonnegativeInteger


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainedTokens:
    """Rows of single tokens, new or existing, trained while the table stays frozen.

    For words that the model does not know, such as `<tool>` before a call. It stands
    alone or beside any prompt or adapter. A text that is one token already names that
    token, and its row starts as it is. Any other text becomes a new token of the run's
    tokenizer, whose row starts as the mean of the table, where transformers'
    `resize_token_embeddings` puts new rows too. A head that shares the table sees the
    rows as well; one that does not gets a row for each new token. This is PEFT's
    `trainable_token_indices`.

    Attributes:
      tokens: texts of tokens, or ids.
      head: the tokens whose rows of an output head of its own are trained too; the new
        ones if None.

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
            given = getattr(self, name)
            if isinstance(given, str) or (given is not None and not given):
                raise InputError(
                    f"TrainedTokens.{name} is {shown(given)}, expected a list of texts "
                    "or ids, such as ['<tool>', '<end>']"
                )
            if any(text == "" for text in given or ()):
                raise InputError(
                    f"TrainedTokens.{name} has an empty text, expected that of a token"
                )

    def check_trained(self) -> None:
        """Checks that training can change what it does, which is always so."""
