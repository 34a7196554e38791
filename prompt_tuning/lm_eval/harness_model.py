"""Score and continue the texts of lm-evaluation-harness in this process."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lm_eval.api.model import TemplateLM  # pyright: ignore[reportMissingImports]
from lm_eval.api.registry import (  # pyright: ignore[reportMissingImports]
    register_model,
)
from lm_eval.models.utils import (  # pyright: ignore[reportMissingImports]
    normalize_gen_kwargs,
)
from lm_eval.utils import (  # pyright: ignore[reportMissingImports]
    get_rolling_token_windows,
    make_disjoint_window,
)

from prompt_tuning.api import tune
from prompt_tuning.core.adapter_names import BASE, TRAINED
from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.decoding.request import Request, separate_equal
from prompt_tuning.decoding.request_checks import slots_for
from prompt_tuning.decoding.sampling_settings import Sampling
from prompt_tuning.prompts.placement import TEMPLATE
from prompt_tuning.texts.text_model import TextModel
from prompt_tuning.texts.text_settings import TextSettings

LONGEST = 4096
"""Maximum number of tokens of a text, if the model has no limit."""
NEW_TOKENS = 256
"""Default maximum number of new tokens, as in the harness's own models."""
DRAWN = ("top_p", "top_k", "min_p")
"""Task settings that only matter when tokens are sampled."""


@register_model("prompt_tuning")
class HarnessModel(TemplateLM):
    """The model behind `--model prompt_tuning`, with or without an adapter.

    Texts are encoded as the harness does for its own models, after the tokens that the
    model expects before a text. A run's template is not applied; prompts are up to the
    task.

    Args:
      run: run directory, to evaluate with what it trained.
      model: frozen model, if there is no run: a checkpoint as `load` takes it.
      adapter: adapter to evaluate (run, PEFT folder or prompt file), or `base` for the
        frozen model of a run.
      prompt_id: number of the prompt, if the adapter has more than one.
      max_length: maximum number of tokens of a text; None for the model's.
      add_bos_token: whether texts start with the tokens that the model expects before a
        text, e.g. BOS.
      batch_size: number of texts that run together.
      device: an option of the harness; JAX ignores it.
      max_batch_size: likewise.

    Raises:
      InputError: if the model or the adapter cannot be read.
    """

    def __init__(
        self,
        run: str | None = None,
        model: str | None = None,
        adapter: str | None = None,
        prompt_id: int | None = None,
        max_length: int | None = None,
        add_bos_token: bool = True,
        batch_size: int | str = 32,
        device: str | None = None,
        max_batch_size: int | None = None,
    ):
        del device, max_batch_size
        super().__init__()
        self._model = _open(run, model)
        self._adapter, self._prompt_id = adapter, prompt_id
        if adapter not in (None, BASE, TRAINED):
            self._adapter = Path(adapter).name
            self._model.load_adapter(self._adapter, adapter)
        chosen = self._model.texts.find(self._adapter).model
        if chosen.prompting.placement == TEMPLATE and chosen.prompts.at_input:
            raise InputError(
                "the prompt's vectors are within the template of its data, and the "
                "texts of a task have no template: use `prompt-tuning evaluate`"
            )
        self._name = str(adapter or run or model)
        self.max_length = int(max_length or chosen.maximum_length or LONGEST)
        self.batch_size = 32 if batch_size == "auto" else int(batch_size)
        self._tokenizer = chosen.needed_tokenizer()
        self._begin = list(self._tokenizer.begin_ids) if add_bos_token else []
        self.backend = "causal"
        if chosen.config.architecture == "encoder_decoder":
            self.backend = "seq2seq"

    # Tokens

    @property
    def tokenizer_name(self) -> str:
        """Name under which the harness stores results of this tokenizer."""
        return self._name

    @property
    def eot_token_id(self) -> int:
        """Id of the token that ends a text."""
        if self._tokenizer.eos_id is None:
            raise InputError("the tokenizer has no end-of-sequence token")
        return self._tokenizer.eos_id

    @property
    def prefix_token_id(self) -> int:
        """Id of the token that precedes a text without context."""
        bos = self._tokenizer.bos_id
        return self.eot_token_id if bos is None else bos

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **ignored: Any
    ) -> list[int]:
        """Encodes a text, with BOS unless `add_special_tokens` is False."""
        del ignored
        begin = [] if add_special_tokens is False else self._begin
        return [*begin, *self._tokenizer.encode(string)]

    # Requests

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[Any, list[int], list[int]]],
        disable_tqdm: bool = False,
        **ignored: Any,
    ) -> list[tuple[float, bool]]:
        """Scores continuations given their contexts, truncated on the left."""
        del disable_tqdm, ignored
        pairs = [
            (given[-max(self.max_length - len(ids), 1) :], ids)
            for _, given, ids in requests
        ]
        scores = self._model.loglikelihood(
            pairs,
            adapter=self._adapter,
            prompt_id=self._prompt_id,
            batch_size=self.batch_size,
        )
        results = [(score.logprob, score.greedy) for score in scores]
        for (key, _, _), result in zip(requests, results, strict=True):
            if key is not None:
                self.cache_hook.add_partial("loglikelihood", key, result)
        return results

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """Scores whole texts, in windows of the maximum length."""
        windows = [
            [
                (None, *make_disjoint_window(window))
                for window in get_rolling_token_windows(
                    token_list=self.tok_encode(text, add_special_tokens=False),
                    prefix_token=self.prefix_token_id,
                    max_seq_len=self.max_length - 1,
                    context_len=1,
                )
            ]
            for (text,) in [request.args for request in requests]
        ]
        several = [window for each in windows for window in each]
        scores = iter(self._loglikelihood_tokens(several, disable_tqdm))
        sums = [sum(next(scores)[0] for _ in each) for each in windows]
        for request, total in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return sums

    def generate_until(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[str]:
        """Continues each text until one of its stop texts."""
        del disable_tqdm
        rows = [self._request(*request.args) for request in requests]
        settings = TextSettings(slots=slots_for(len(rows), self.batch_size))
        completions = self._model.texts.complete(separate_equal(rows), settings)
        texts = [completion.text for (completion,) in completions]
        for request, text in zip(requests, texts, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, text)
        return texts

    def _request(self, context: str, settings: Mapping[str, Any]) -> Request:
        """Returns a request with a task's settings."""
        fields: dict[str, Any] = {**normalize_gen_kwargs(settings, NEW_TOKENS)}
        until, new_tokens = fields.pop("until"), fields.pop("max_gen_toks")
        drawn, temperature = fields.pop("do_sample"), fields.pop("temperature", 0.0)
        seed = fields.pop("seed", 0)
        chosen = {name: fields.pop(name) for name in DRAWN if name in fields}
        if fields:
            raise InputError(
                f"the task sets {shown(list(fields))} in generation_kwargs, expected "
                f"until, max_gen_toks, do_sample, temperature, seed, {', '.join(DRAWN)}"
            )
        sampling = Sampling(
            stop=tuple(text for text in until if text),
            temperature=temperature if drawn else 0.0,
            seed=seed,
            **(chosen if drawn and temperature else {}),
        )
        ids = self.tok_encode(context)
        room = self.max_length - (new_tokens if self.backend == "causal" else 0)
        return self._model.texts.request(
            ids[-max(room, 1) :],
            TextSettings(
                sampling=dataclasses.replace(sampling, new_tokens=new_tokens),
                new_tokens=new_tokens,
                adapter=self._adapter,
                prompt_id=self._prompt_id,
            ),
        )


def _open(run: str | None, model: str | None) -> TextModel:
    """Opens a run or a frozen model."""
    if (run is None) == (model is None):
        raise InputError(
            "name what is evaluated: --model_args run=DIRECTORY, or model=FOLDER"
        )
    return tune.load(str(model)) if run is None else tune.load_tuned(run)


def main() -> None:
    """Runs the harness's command with this model registered.

    Raises:
      SystemExit: with the message, for bad input.
    """
    from lm_eval.__main__ import (  # pyright: ignore[reportMissingImports]
        cli_evaluate,
    )

    try:
        cli_evaluate()
    except InputError as problem:
        raise SystemExit(f"prompt-tuning-lm-eval: {problem}") from None
