"""Prompts that start as examples in the context, and learn their answers (CPT)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Key

from prompt_tuning.adapters.adapter import PROMPT
from prompt_tuning.core.bounded_updates import Ball
from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.number_ranges import NonnegativeInteger, NonnegativeNumber
from prompt_tuning.core.typed_json import as_object, parse_json, read_limited
from prompt_tuning.prompts.initializers import Vocabulary, from_array
from prompt_tuning.prompts.prompt_module import Constant, ExportedPrompt
from prompt_tuning.prompts.soft import SoftPrompt

FORMAT, INPUT, ANSWER = (1, 3), 2, 0
"""Types of tokens modulo 4, as in PEFT: what separates inputs and answers, the inputs,
and the answers. Each example adds 4; a type of 0 marks a token of no part."""
PARTS = {"prompt": INPUT, "completion": 4}
"""The texts of an example, with the type of their tokens in the first one."""
USUAL_WIDTH = 2048
"""Width of the models that distances are stated for, as in PEFT."""
LARGEST_FILE = 2**24


class ContextAnswers(NamedTuple):
    """Tokens of answers inside a prompt, which the loss counts.

    Attributes:
      positions: their positions in the prompt, from 1.
      ids: the tokens.
      weights: weight of each.
    """

    positions: tuple[int, ...]
    ids: tuple[int, ...]
    weights: tuple[float, ...]


class ContextPrompt(SoftPrompt):
    """Vectors that start as examples in the context and stay near them (CPT).

    Examples in front of each text already steer a model. Here their embeddings are
    trained, each within a small distance, except for the answers, which stay (Blau et
    al. 2024). The loss also counts the answers in the context, once per row. Use it
    with few examples, where a free prompt overfits.

    Args:
      examples: the examples, each with a `prompt` and a `completion` that continues it
        (end each completion with your separator of examples), or a file with one as
        JSON per line.
      token_ids: ids of the tokens instead, PEFT's `cpt_token_ids`.
      token_types: type of each of these tokens, `cpt_tokens_type_mask`: in the first
        example 1 for the input's template, 2 for the input, 3 for the answer's template
        and 4 for the answer; 4 more in each next example. By default all are 1.
      epsilon: largest distance of an input token's vector from its embedding, in a
        model of width 2,048; it grows with the root of the width.
      format_epsilon: the same for tokens of templates.
      decay: factor of the loss of the last answer in the context, squared for the one
        before it, and so on; 1 counts all alike.

    Attributes:
      prompt: the vectors, `[P, D]`, float32; `P` is the number of tokens.

    Raises:
      InputError: if there are no examples, both forms are given, or the lists do not
        match.

    Examples:
      >>> shots = [{"prompt": "upper: ab=", "completion": "AB "}]
      >>> attached = model.attach(pt.ContextPrompt(examples=shots))
      >>> attached.prompt_vectors()["decoder/prompt"].shape
      (13, 128)
    """

    def __init__(
        self,
        key: Key[Array, ""],
        vocabulary: Vocabulary,
        *,
        examples: str | Sequence[Mapping[str, str]] | None = None,
        token_ids: Sequence[NonnegativeInteger] | None = None,
        token_types: Sequence[NonnegativeInteger] | None = None,
        epsilon: NonnegativeNumber = 0.1,
        format_epsilon: NonnegativeNumber = 0.1,
        decay: NonnegativeNumber = 1.0,
    ):
        if (examples is None) == (token_ids is None):
            raise InputError(
                "ContextPrompt starts from examples or from token_ids: give one of them"
            )
        if examples is not None:
            rows = self.read_examples(examples)
            token_ids, token_types = _encode(rows, vocabulary)
        ids, types = (
            list(token_ids or ()),
            list(token_types or [1] * len(token_ids or ())),
        )
        if not ids or len(ids) != len(types):
            raise InputError(
                f"ContextPrompt has {len(ids)} tokens and {len(types)} types, expected "
                "one type for each, and at least one token"
            )
        start = np.asarray(vocabulary.rows(ids))
        super().__init__(
            key, vocabulary, length=len(ids), initializer=from_array(start)
        )
        self.ids, self.types = tuple(ids), tuple(types)
        self.epsilon, self.format_epsilon = float(epsilon), float(format_epsilon)
        self.decay = float(decay)
        self._start = Constant(start)

    @staticmethod
    def read_examples(
        examples: str | Sequence[Mapping[str, str]],
    ) -> list[dict[str, str]]:
        """Returns the prompt and completion of each example, or of a file's lines.

        Raises:
          InputError: if one is not an object, or lacks either.
        """
        if isinstance(examples, str):
            lines = read_limited(Path(examples), LARGEST_FILE).splitlines()
            places = {f"{examples}, line {n}": x for n, x in enumerate(lines, 1)}
            rows = {
                place: parse_json(x, place) for place, x in places.items() if x.strip()
            }
        else:
            rows = {f"ContextPrompt.examples[{n}]": x for n, x in enumerate(examples)}
        objects = [
            as_object(dict(row) if isinstance(row, Mapping) else row, place)
            for place, row in rows.items()
        ]
        return [{name: row.text(name) for name in PARTS} for row in objects]

    @property
    def ball(self) -> Ball:
        """Region that training may move the vectors in."""
        kinds, width = np.array(self.types), self._start.array.shape[1]
        marked = kinds > 0
        radius = np.where(marked & (kinds % 4 == INPUT), self.epsilon, 0.0)
        formats = marked & np.isin(kinds % 4, FORMAT)
        radius = np.where(formats, self.format_epsilon, radius)
        scale = (width / USUAL_WIDTH) ** 0.5
        return Ball(self._start.array, (scale * radius).astype(np.float32))

    @property
    def answers(self) -> ContextAnswers:
        """Answers in the context, except for a first token, which nothing predicts."""
        chosen = [
            i for i, x in enumerate(self.types) if i and x > 0 and x % 4 == ANSWER
        ]
        # The row's own answer comes after all of these and has the weight 1.
        order = sorted({self.types[i] for i in chosen}, reverse=True)
        weights = {kind: self.decay ** (1 + n) for n, kind in enumerate(order)}
        return ContextAnswers(
            tuple(chosen),
            tuple(self.ids[i] for i in chosen),
            tuple(weights[self.types[i]] for i in chosen),
        )

    def export(self) -> ExportedPrompt:
        """Exports the vectors with PEFT's settings."""
        settings = {
            "peft_type": "CPT",
            "cpt_token_ids": list(self.ids),
            "cpt_mask": [1] * len(self.ids),
            "cpt_tokens_type_mask": list(self.types),
            "opt_weighted_loss_type": "none" if self.decay == 1 else "decay",
            "opt_loss_decay_factor": self.decay,
            "opt_projection_epsilon": self.epsilon,
            "opt_projection_format_epsilon": self.format_epsilon,
        }
        return ExportedPrompt(PROMPT, {"prompt": np.asarray(self())}, settings)


def _encode(
    examples: Sequence[Mapping[str, str]], vocabulary: Vocabulary
) -> tuple[list[int], list[int]]:
    """Encodes examples one after the other; returns the tokens and their types."""
    ids, types, tokenizer = [], [], vocabulary.tokenizer
    for number, texts in enumerate(examples):
        for part, kind in PARTS.items():
            if not ids:
                part_ids = vocabulary.encode(texts[part])
            else:
                assert tokenizer is not None  # `encode` has refused
                part_ids = tokenizer.encode_continuation(texts[part])
            ids += part_ids
            types += [kind + 4 * number] * len(part_ids)
    if not ids:
        raise InputError(
            f"ContextPrompt.examples is {shown(examples)}, expected an example"
        )
    return ids, types
