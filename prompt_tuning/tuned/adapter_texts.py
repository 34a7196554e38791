"""How an adapter's texts are encoded: by its run, or by the files in its folder.

A run keeps the template and the chat template that its data was rendered with. Trainers
such as TRL save a tokenizer and its chat template in the folder of a PEFT adapter.
"""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prompt_tuning.checkpoints.run_store.checkpoint_names import FOLDER, KEPT
from prompt_tuning.config.config_values import CONFIG_FILE
from prompt_tuning.config.gin_files import read_run_directory
from prompt_tuning.config.run import Run
from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.setting_hints import how_to_set
from prompt_tuning.data.text import tokenizers
from prompt_tuning.data.text.chat_templates import has_own_template
from prompt_tuning.pretrained.prompted_model import PromptedModel
from prompt_tuning.pretrained.text_encoding import TextEncoding
from prompt_tuning.settings.data_source import DataSource
from prompt_tuning.settings.prompting import Prompting

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.txt")
TEXT_FIELDS = ("template", "chat", "chat_template", "chat_date", "joiner", "add_eos")
"""Fields of `DataSource` that decide how texts are rendered."""

CONFLICTS = ("template", "chat_template", "joiner")
"""Those in which the runs of a model and of an adapter must not differ."""


def text_encoding_of(
    path: Path, model: PromptedModel, source: DataSource
) -> TextEncoding:
    """Returns how an adapter's texts are encoded.

    `source` has the data settings for an adapter without its own.
    """
    folder = run_folder(path)
    if folder is not None:
        return TextEncoding(model, read_run_directory(folder).source)
    own = path if has_own_template(path) else None
    return TextEncoding(model, source, own)


def run_folder(path: Path) -> Path | None:
    """Returns the run directory that an adapter is, or is a checkpoint of."""
    checkpoints = (x for x in path.absolute().parents if x.name in (FOLDER, KEPT))
    folders = [path, *(folder.parent for folder in checkpoints)]
    return next((x for x in folders if (x / CONFIG_FILE).is_file()), None)


def check_same_tokenizer(path: Path, tokenizer: tokenizers.Tokenizer | None) -> None:
    """Checks that an adapter's tokenizer, if it has one, equals its model's.

    Raises:
      InputError: if the adapter's run or folder has a different one.
    """
    tokenizer_path = own_tokenizer(path)
    if tokenizer_path is None or tokenizer is None:
        return
    if _definition(tokenizers.load_tokenizer(tokenizer_path)) != _definition(tokenizer):
        raise InputError(
            f"{path} belongs to the tokenizer in {tokenizer_path}, which encodes texts "
            "in another way than the model's: give it by "
            f"{how_to_set('Pretrained.tokenizer', tokenizer_path)}"
        )


def own_tokenizer(path: Path) -> str | None:
    """Returns the tokenizer in an adapter's run or folder, if any."""
    folder = run_folder(path)
    if folder is not None:
        return read_run_directory(folder).model.tokenizer
    if any((path / name).is_file() for name in TOKENIZER_FILES):
        return str(path)
    return None


def _definition(tokenizer: tokenizers.Tokenizer) -> Any:
    """Returns everything that determines the ids of texts."""
    begin = tokenizers.encode_prompt(tokenizer, "")
    if not isinstance(tokenizer, tokenizers.HuggingFaceTokenizer):
        return begin, tokenizer.vocabulary_size
    definition = json.loads(tokenizer.tokenizer.to_str())
    # Neither is used.
    return begin, definition | {"padding": None, "truncation": None}


def with_texts_of(run: Run, settings: Sequence["AdapterTextSettings"]) -> Run:
    """Returns a run that reads texts as each of the adapters does.

    Raises:
      InputError: if the settings of the adapters, or of the run, differ.
    """
    known = [each for each in settings if each.source is not None]
    for each in known[1:]:
        if each.fields != known[0].fields:
            raise InputError(
                f"{known[0].path} and {each.path} were trained with different settings "
                f"of texts ({', '.join(TEXT_FIELDS)}): evaluate each alone"
            )
    for each in settings:
        run = each.used_by(run)
    return run


@dataclasses.dataclass(frozen=True)
class AdapterTextSettings:
    """How an adapter reads texts, for a run that uses it.

    Attributes:
      path: the adapter: run directory, checkpoint, PEFT folder, or prompt file.
      tokenizer: its own tokenizer, with its chat template; None for the model's.
      source: data settings of its run; None without a run.
      prompting: position and visibility of its prompt; None without a run.
    """

    path: Path
    tokenizer: str | None = None
    source: DataSource | None = None
    prompting: Prompting | None = None

    @classmethod
    def read(cls, path: Path) -> "AdapterTextSettings":
        """Reads the settings of an adapter."""
        folder = run_folder(path)
        if folder is not None:
            run = read_run_directory(folder)
            return cls(path, run.model.tokenizer, run.source, run.prompting)
        return cls(path, own_tokenizer(path) if has_own_template(path) else None)

    @property
    def fields(self) -> dict[str, Any]:
        """Its data settings that decide how texts are rendered."""
        return {name: getattr(self.source, name) for name in TEXT_FIELDS}

    def used_by(self, run: Run) -> Run:
        """Returns a run that reads texts as the adapter does.

        Raises:
          InputError: if the run's own settings contradict them.
        """
        model, evaluation = run.model, run.evaluation
        if self.tokenizer is not None and model.tokenizer is None:
            model = dataclasses.replace(model, tokenizer=self.tokenizer)
        if self.source is None:
            return dataclasses.replace(run, model=model)
        data = None if run.data is None and evaluation else self._render(run.source)
        if evaluation is not None:
            rendered = self._render(evaluation.data)
            evaluation = dataclasses.replace(evaluation, data=rendered)
        prompting = run.prompting or self.prompting
        return dataclasses.replace(
            run, model=model, data=data, evaluation=evaluation, prompting=prompting
        )

    def _render(self, source: DataSource) -> DataSource:
        """Returns data settings with the adapter's fields."""
        defaults = DataSource(files=())
        changes = {}
        for name, value in self.fields.items():
            run_value = getattr(source, name)
            if value == run_value:
                continue
            if run_value == getattr(defaults, name):
                changes[name] = value
            elif name in CONFLICTS:
                raise InputError(
                    f"{self.path} was trained with DataSource.{name} = {shown(value)}, "
                    f"and the data is read with {shown(run_value)}: leave the setting "
                    "out, and the adapter's is used"
                )
        return dataclasses.replace(source, **changes)
