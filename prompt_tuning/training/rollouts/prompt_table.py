"""The prompts that are answered in training."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.setting_hints import how_to_set
from prompt_tuning.data.examples.context_column import ContextColumn
from prompt_tuning.data.examples.example_groups import ExampleGroups
from prompt_tuning.data.examples.row_readers import Example
from prompt_tuning.data.rows.jsonl import JsonLine
from prompt_tuning.data.rows.row_sources import Repetition
from prompt_tuning.data.rows.text_records import read_records
from prompt_tuning.data.rows.token_columns import CONTEXTS
from prompt_tuning.data.source_reading import files_of, reads_text
from prompt_tuning.data.text.conversations import (
    MESSAGES_KEY,
    conversation_key,
    has_prompt_messages,
    joined_text,
    read_chat_messages,
    without_answer,
)
from prompt_tuning.data.text.record_fields import WEIGHTS
from prompt_tuning.losses.grpo import GRPO, SAMPLER_LOGPROBS
from prompt_tuning.pretrained.prompted_model import PromptedModel
from prompt_tuning.pretrained.text_encoding import TextEncoding
from prompt_tuning.settings.data_source import ADVANTAGES, DataSource
from prompt_tuning.settings.rollout_settings import Rollouts
from prompt_tuning.training.rollouts.rewards import Reward, open_rewards


@dataclasses.dataclass(frozen=True)
class RolloutPrompt:
    """A prompt.

    Attributes:
      ids: its token ids.
      text: its text; in a conversation, that of the last message.
      row: its record, for rewards.
      location: source of the record.
      ends: ids that end an answer, in addition to the model's own.
      context: number of the context that a teacher reads before it.
    """

    ids: tuple[int, ...]
    text: str
    row: Mapping[str, Any]
    location: str
    ends: tuple[int, ...] = ()
    context: int = 0


class RolloutPrompts(ExampleGroups):
    """`E` prompts, each with a group of answers sampled in training.

    Args:
      prompts: the prompts.
      rollouts: how they are answered.
      rewards: rewards of the answers; none if a teacher judges them.
      skipped: number of prompts left out because they are too long.
      decoder_only: whether the model has no encoder.
      contexts: column of the contexts that a teacher reads, or None.
    """

    def __init__(
        self,
        prompts: Sequence[RolloutPrompt],
        rollouts: Rollouts,
        rewards: Sequence[Reward],
        skipped: int = 0,
        *,
        decoder_only: bool,
        contexts: ContextColumn | None = None,
    ):
        self.prompts, self.rollouts, self.rewards = prompts, rollouts, rewards
        # A teacher reads whole rows.
        self.shares_prompt = bool(rewards) and rollouts.group > 1
        self._whole_rows = decoder_only and not self.shares_prompt
        self.columns = GRPO.columns if rewards else ()
        self.contexts = contexts
        if contexts is not None:
            self.columns = (*self.columns, CONTEXTS)
        self.context_numbers = np.array([x.context for x in prompts], np.int64)
        self.gold = np.zeros(len(prompts), np.int32)
        self.weights = np.ones(len(prompts), np.float32)
        self.skipped, self.truncated, self.unlearned = skipped, 0, 0
        self.without_completion, self.repetition = 0, Repetition()
        self.has_prompt_ids = False
        self.rows_per_example = rollouts.group
        # Lengths are those of prompts with the longest possible answers.
        prompt_lengths = np.array([len(prompt.ids) for prompt in prompts], np.int64)
        self.weight_counts = np.full(len(prompts), rollouts.new_tokens, np.int64)
        self.input_lengths = prompt_lengths + (rollouts.new_tokens * self._whole_rows)
        self.target_lengths = (
            self.input_lengths if self._whole_rows else self.weight_counts
        )

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, number: int) -> list[Example]:
        """Returns a prompt without an answer."""
        return [self.answered(self.prompts[number], [], [], 0.0)]

    def answered(
        self,
        prompt: RolloutPrompt,
        ids: Sequence[int],
        logprobs: Sequence[float],
        advantage: float,
        *,
        learned: bool = True,
    ) -> Example:
        """Returns a prompt with an answer, in one row or as inputs and targets.

        Args:
          prompt: the prompt.
          ids: token ids of the answer.
          logprobs: their log-probabilities when sampled.
          advantage: the answer's advantage; unused without rewards.
          learned: whether to learn from it.
        """
        given, new = np.array(prompt.ids, np.int32), np.array(ids, np.int32)
        offset = len(given) if self._whole_rows else 0
        tokens = np.concatenate([given, new])

        def of_answer(values: Any) -> np.ndarray:
            numbers = np.zeros(offset + len(new), np.float32)
            numbers[offset:] = values
            return numbers

        return Example(
            inputs=tokens if self._whole_rows else given,
            targets=tokens if self._whole_rows else new,
            weights=of_answer(float(learned)),
            prefix_length=offset,
            columns={
                name: of_answer(values)
                for name, values in (
                    (ADVANTAGES, advantage),
                    (SAMPLER_LOGPROBS, logprobs),
                    (CONTEXTS, prompt.context),
                )
                if name in self.columns
            },
        )


def load_prompts(
    source: DataSource,
    model: PromptedModel,
    rollouts: Rollouts,
    contexts: ContextColumn | None = None,
) -> RolloutPrompts:
    """Reads the prompts of a data source; completions are only used by rewards.

    Raises:
      InputError: if a setting, a record or a reward cannot be used.
    """
    _check(source, model)
    rewards = open_rewards(rollouts.rewards, source.completion_key)
    if model.prompts.tokens is not None and any(x.is_logprob for x in rewards):
        raise InputError(
            "the reward logprob is of the frozen model, which has no rows for the new "
            "tokens: leave TrainedTokens out, or the reward"
        )
    encoding = TextEncoding(model, source)
    decoder_only = model.config.architecture == "decoder_only"
    room = model.maximum_length
    if room is not None and decoder_only:
        room -= rollouts.new_tokens
    prompts, skipped = [], 0
    for line in _lines(source):
        with line.locating_errors():
            prompt = _prompt(line, source, encoding)
            if contexts is not None:
                number = contexts.number(line)
                prompt = dataclasses.replace(prompt, context=number)
            _check_answers(line, rewards)
            if room is None or len(prompt.ids) <= room:
                prompts.append(prompt)
            elif source.on_too_long == "skip":
                skipped += 1
            else:
                raise InputError(
                    f"the prompt has {len(prompt.ids)} tokens, expected at most "
                    f"{room}, so that {rollouts.new_tokens} new ones fit the model; "
                    "to leave such prompts out, give "
                    f"{how_to_set('DataSource.on_too_long', 'skip')}"
                )
    if not prompts:
        raise InputError(f"{source.files} has no prompt, expected at least one")
    return RolloutPrompts(
        prompts,
        rollouts,
        rewards,
        skipped,
        decoder_only=decoder_only,
        contexts=contexts,
    )


def _check(source: DataSource, model: PromptedModel) -> None:
    """Checks that rollouts support the data and the model."""
    unread = {
        "packing": False,
        "template": None,
        "prompt_id_key": None,
        "task_token": None,
        "chat": False,
    }
    for name, default in unread.items():
        if getattr(source, name) != default:
            raise InputError(
                f"DataSource.{name} is {shown(getattr(source, name))}, which Rollouts "
                "do not support: leave it out"
            )
    if source.on_too_long not in ("error", "skip"):
        raise InputError(
            f"DataSource.on_too_long is {shown(source.on_too_long)}, but a prompt that "
            "is answered is never cut: expected 'error' or 'skip'"
        )
    if not reads_text(source):
        raise InputError(
            f"{files_of(source)[0]} contains token ids, but Rollouts answer texts: "
            "give records with a prompt, such as jsonl"
        )
    if model.drops:
        raise InputError(
            "the model or what is trained has dropout, with which the probabilities of "
            "training are not those of sampling: set it to 0 for Rollouts"
        )


def _lines(source: DataSource) -> Iterator[JsonLine]:
    count = 0
    for path in files_of(source):
        for line in read_records(path):
            if count == source.maximum_examples:
                return
            count += 1
            yield line


def _prompt(
    line: JsonLine, source: DataSource, encoding: TextEncoding
) -> RolloutPrompt:
    """Encodes the prompt of a record, as for generation."""
    content, key = line.content, source.prompt_key
    named = conversation_key(content)
    if key in content and named != MESSAGES_KEY:
        named = key if has_prompt_messages(content, key) else None
    if named is not None:
        elsewhere = [*WEIGHTS, *(name for name in content if name != named)]
        record = without_answer(
            read_chat_messages(content, named, line.location, elsewhere)
        )
        if not record.messages:
            raise InputError("the only message is an answer, expected one to answer")
        ids = encoding.chat(record, line.location)
        text, ends = joined_text(record.messages[-1]), encoding.chat.turn_ends()
    else:
        if key is None:
            raise InputError("DataSource.prompt_key is None, but prompts are answered")
        text, ends = line.text(key, "DataSource.prompt_key"), []
        ids = encoding.encode(text)
    if not text or not ids:
        raise InputError("the prompt is empty, expected a text to answer")
    return RolloutPrompt(tuple(ids), text, content, line.location, tuple(ends))


def _check_answers(line: JsonLine, rewards: Sequence[Reward]) -> None:
    """Checks that a record has the answer that its rewards compare with."""
    for reward in rewards:
        key = reward.answer_key
        if key is not None and not isinstance(line.content.get(key), str | int | float):
            raise InputError(
                f"the reward {reward.name} compares with the field {key!r}, expected a "
                f"text or a number there and found {shown(line.content.get(key))}; to "
                "name another field, give "
                f"{how_to_set('DataSource.completion_key', 'KEY')}"
            )
