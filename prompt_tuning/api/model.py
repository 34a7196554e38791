"""`Model`: a frozen model that reads data and texts."""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Unpack

import jax
import numpy as np
from jaxtyping import Array, Float, Key

from prompt_tuning.config.argument_types import BatchFields, EvaluationFields, Method
from prompt_tuning.config.deferred_factories import Configured
from prompt_tuning.config.python_runs import attachments
from prompt_tuning.config.run import DataSource, Run
from prompt_tuning.core import number_ranges
from prompt_tuning.core.batch import Batch
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.field_checks import check_value
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.core.parameter_groups import match_any
from prompt_tuning.core.parameters import Parameters
from prompt_tuning.data.batching.batches import stream_batches
from prompt_tuning.data.batching.plan_batches import plan_batches
from prompt_tuning.data.examples.example_loading import load_examples
from prompt_tuning.data.rows.python_rows import (
    data_files,
    is_columns,
    split_of,
    table_rows,
)
from prompt_tuning.data.text.tokenizers import Tokenizer
from prompt_tuning.models.scoring import merge_model
from prompt_tuning.pretrained.prompted_model import PromptedModel, open_pretrained
from prompt_tuning.pretrained.text_encoding import TextEncoding
from prompt_tuning.prompts.activation_probes import check_without_data
from prompt_tuning.prompts.tools.inspection import input_vectors
from prompt_tuning.settings.evaluation_settings import Evaluation
from prompt_tuning.texts.text_embeddings import Pooling, embed_ids
from prompt_tuning.texts.text_model import TextModel
from prompt_tuning.training.objective_data import open_evaluator
from prompt_tuning.tuned.prediction import predict_inputs

TRAINED = (".*/prompt/.*", ".*/adapters/.*")
"""Paths of the parameters that prompts and adapters add to a frozen model."""


class Model(TextModel):
    """A frozen model, optionally with untrained prompts and adapters.

    Use `load` to open one. `tune` trains it; for a training loop of your own, use
    `attach`, `partition` and `batches`.

    Attributes:
      settings: settings of `Pretrained`.
      run: configuration of how data and texts are read.
      prompted: the opened model: structure, restore plan, prompts.

    Examples:
      >>> model = pt.load("bundled:skills-decoder")
      >>> model.predict("upper: abc=", labels=["ABC", "cba"]).label
      'ABC'
      >>> sorted(model.evaluate(pairs, batch_size=8))
      ['accuracy', 'loss']
      >>> both = model.attach(pt.SoftPrompt(length=5), pt.LoRA(rank=4), seed=1)
      >>> trained, frozen = both.partition()
      >>> len(trained)
      5
    """

    def __init__(
        self,
        settings: Configured,
        run: Run,
        prompted: PromptedModel,
        parameters: Parameters | None = None,
    ):
        super().__init__(run, prompted, parameters)
        self.settings = settings

    @classmethod
    def open(
        cls, settings: Configured, methods: Sequence[Method] = (), seed: int = 0
    ) -> "Model":
        """Opens a checkpoint without reading its weights."""
        fields = attachments(methods)
        run: Run = Configured(
            "Run", {"model": settings, "seed": seed, **fields}
        ).build()
        key = jax.random.key(seed)
        return cls(settings, run, open_pretrained(run.model, run.tuning, key=key))

    def attach(self, *methods: Method, seed: int = 0) -> "Model":
        """Returns a copy with fresh prompts and adapters, for your own loop.

        Args:
          methods: prompts and adapters, e.g. `pt.SoftPrompt(length=5)`.
          seed: seed of their initial values.

        Raises:
          InputError: if a method's initial values come from training data.

        Examples:
          >>> both = model.attach(pt.SoftPrompt(length=5), pt.LoRA(rank=4), seed=1)
          >>> len(both.partition()[0])
          5
        """
        attached = Model.open(self.settings, methods, seed)
        check_without_data(attached.prompted.loras)
        if self.loaded is not None:
            attached.loaded = attached.prompted.read_parameters(self.loaded)
        return attached

    def with_parameters(self, parameters: Parameters) -> "Model":
        """Returns a copy of the model with some parameters replaced.

        Args:
          parameters: new values by path, e.g. those that your loop trained.

        Examples:
          >>> attached = model.attach(pt.SoftPrompt(length=5))
          >>> trained, _ = attached.partition()
          >>> zeros = {path: 0 * array for path, array in trained.items()}
          >>> vectors = attached.with_parameters(zeros).prompt_vectors()
          >>> vectors["decoder/prompt"].max().item()
          0.0
        """
        values = {path: parameters.get(path, x) for path, x in self.parameters.items()}
        return Model(self.settings, self.run, self.prompted, values)

    @property
    def config(self) -> ModelConfig:
        """Architecture of the model."""
        return self.prompted.config

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer.

        Raises:
          InputError: if the checkpoint has none.
        """
        return self.prompted.needed_tokenizer()

    def share(self, parameters: Parameters) -> None:
        """Takes over frozen parameters of a run, unless the model has read its own."""
        paths = self.prompted.plan.abstract
        if self.loaded is None and all(path in parameters for path in paths):
            self.loaded = {path: parameters[path] for path in paths}

    @property
    def graph(self) -> Any:
        """Structure of the model; pass it to `train_step` and `gradients`."""
        return self.prompted.graph

    def partition(
        self, regexes: Sequence[str] = TRAINED
    ) -> tuple[Parameters, Parameters]:
        """Splits the parameters into `(trained, frozen)`.

        Args:
          regexes: a parameter is trained if one of these matches its whole path;
            prompts and adapters by default.

        Examples:
          >>> trained, frozen = model.attach(pt.SoftPrompt(length=5)).partition()
          >>> {path: array.shape for path, array in trained.items()}
          {'decoder/prompt/prompt': (5, 128)}
        """
        matches = match_any(regexes)
        trained = {p: x for p, x in self.parameters.items() if matches(p)}
        frozen = {p: x for p, x in self.parameters.items() if not matches(p)}
        return trained, frozen

    def hidden(
        self,
        batch: Batch,
        parameters: Parameters | None = None,
        key: Key[Array, ""] | None = None,
    ) -> Float[Array, "B m D"]:
        """Computes the states that predict a batch's `m` learned tokens per row.

        Args:
          batch: one batch; see `batches`.
          parameters: parameters by path; None for the model's own.
          key: key of dropout; None for no dropout.
        """
        chosen = self.parameters if parameters is None else parameters
        return merge_model(self.graph, chosen).hidden(batch, key)

    def batches(
        self,
        data: Any,
        *,
        batch_size: int = 32,
        steps: int | None = None,
        seed: int = 0,
        **settings: Unpack[BatchFields],
    ) -> Iterator[Batch]:
        """Yields shuffled batches.

        Args:
          data: training data in any form that `tune` takes.
          batch_size: rows per batch.
          steps: number of batches; None for one pass over the data.
          seed: seed of the order.
          settings: other fields of `DataSource`.

        Raises:
          InputError: if a number is out of range, or the data cannot be used.

        Examples:
          >>> len(list(model.batches(pairs, batch_size=4)))
          2
        """
        check_value("steps", steps, number_ranges.PositiveInteger | None)
        check_value("seed", seed, number_ranges.NonnegativeInteger)
        source = DataSource(files=(), batch_size=batch_size, **settings)
        data = split_of(data, "data", held_out=False)
        with data_files(data, source) as files:
            source = dataclasses.replace(source, files=files)
            interface = self.prompted.interface
            examples = load_examples(source, interface)
            plan = plan_batches(source, interface, examples, seed=seed, shuffle=True)
            count = plan.batches_per_epoch if steps is None else steps
            for batch in stream_batches(
                examples, plan, 0, count, pad_id=self.config.pad_id
            ):
                yield jax.device_put(batch)

    def predict(
        self,
        inputs: Any,
        *,
        labels: Sequence[str] | None = None,
        batch_size: int | None = None,
        prompt_id: int | None = None,
    ) -> Any:
        """Finds the most probable label of each input, as `prompt-tuning predict` does.

        Args:
          inputs: one input or a list: texts, mappings with the data's keys, or a table
            with these columns (see `tune`).
          labels: labels to choose from; None for the run's.
          batch_size: rows per batch; each pair of an input and a label is a row.
          prompt_id: prompt for all inputs, if the model has more than one.

        Returns:
          for one input `Prediction(label, probabilities)`, for a list a list of them. A
          class head returns `LabelSet(labels, probabilities)` for multi-label problems,
          `Numbers(values)` for regression, and `WordTags(words, tags, probabilities)`
          for tags of a text or a list of words.

        Raises:
          InputError: if an argument cannot be used.
        """
        check_value("batch_size", batch_size, number_ranges.RowCount | None)
        single = isinstance(inputs, str | Mapping) and not is_columns(inputs)
        several = [inputs] if single else list(table_rows(inputs, "inputs"))
        choices = {"labels": labels, "batch_size": batch_size, "prompt_id": prompt_id}
        predictions = predict_inputs(
            self.run, self.prompted, self.parameters, several, **choices
        )
        return predictions[0] if single else predictions

    def embed(
        self,
        texts: str | Sequence[str],
        *,
        pooling: Pooling = "mean",
        normalize: bool = True,
        prompt_id: int | None = None,
    ) -> Float[np.ndarray, "n D"]:
        """Computes a vector for each text, as the server's `/v1/embeddings` does.

        A vector pools the states after the last layer and its norm; the model's prompt
        or adapter applies. Each text runs alone.

        Args:
          texts: one text or a list of them; the run's template, if any, is applied.
          pooling: which state is used: the "mean" over the text's tokens, that of the
            "last" token, or that of the "first" token (for encoders trained so).
          normalize: whether to scale each vector to length 1.
          prompt_id: prompt for all texts, if the model has more than one.

        Raises:
          InputError: if the model is an encoder-decoder or has a class head, or a text
            is too long.

        Examples:
          >>> vectors = model.embed(["abc", "abd"])
          >>> vectors.shape, bool(vectors[0] @ vectors[1] < 1)
          ((2, 128), True)
          >>> model.embed([]).shape
          (0, 128)
        """
        check_value("texts", texts, str | Sequence[str])
        check_value("pooling", pooling, Pooling)
        encoding = TextEncoding(self.prompted, self.run.source)
        vectors = [
            embed_ids(self.prompted, self.parameters, ids, pooling, prompt_id)
            for ids in map(
                encoding.encode, [texts] if isinstance(texts, str) else texts
            )
        ]
        if not vectors:
            return np.zeros((0, self.config.width), np.float32)
        stacked = np.stack(vectors)
        if not normalize:
            return stacked
        return stacked / np.maximum(np.linalg.norm(stacked, axis=1)[:, None], 1e-12)

    def evaluate(
        self, data: Any = None, **settings: Unpack[EvaluationFields]
    ) -> dict[str, float]:
        """Evaluates on held-out data, read in the same way as the training data.

        Args:
          data: data in any form that `tune` takes; of a `DatasetDict`, the split
            "validation" or "test". None for the run's own held-out data.
          settings: fields of `Evaluation`, e.g. `exact_match=True`, and of
            `DataSource`.

        Returns:
          metrics by name, e.g. `loss` (mean nats per learned token).

        Raises:
          InputError: if the data or a setting cannot be used.
        """
        names = {field.name for field in dataclasses.fields(Evaluation)}
        fields: dict[str, Any] = {**settings}
        of_data = {k: x for k, x in fields.items() if k not in names}
        of_evaluation = {k: x for k, x in fields.items() if k in names}
        given = self.run.evaluation
        if data is None and given is None:
            raise InputError("no held-out data was given: evaluate(data)")
        with contextlib.ExitStack() as stack:
            source = self.run.source if given is None else given.data
            if data is not None:
                source = dataclasses.replace(self.run.source, **of_data)
                files = stack.enter_context(data_files(data, source))
                source = dataclasses.replace(source, files=files)
            else:
                source = dataclasses.replace(source, **of_data)
            if given is None:
                evaluation = Evaluation(data=source, **of_evaluation)
            else:
                evaluation = dataclasses.replace(given, data=source, **of_evaluation)
            objective = self.run.objective
            evaluator = open_evaluator(objective, self.prompted, evaluation)
            return evaluator(self.parameters)

    def prompt_vectors(self) -> dict[str, Float[np.ndarray, "P D"]]:
        """Returns the prompt vectors by path, e.g. `decoder/prompt`.

        Raises:
          InputError: if the method has no input vectors, as with LoRA or a prefix.

        Examples:
          >>> tuned.prompt_vectors()["decoder/prompt"].shape
          (5, 128)
        """
        model = merge_model(self.graph, self.parameters)
        return input_vectors(model.prompts())

    def report(self) -> str:
        """Lists restored, fresh and ignored parameters with their bytes."""
        return self.prompted.plan.report()

    def __repr__(self) -> str:
        config = self.config
        return (
            f"{type(self).__name__}({self._name()}: {config.architecture}, "
            f"{config.layers} layers, width {config.width}, vocabulary "
            f"{config.vocabulary_size:,}{self._details()})"
        )

    def _name(self) -> str:
        return str(self.settings.parameters["checkpoint"])

    def _details(self) -> str:
        fresh = self.prompted.plan.fresh
        return f", {len(fresh)} fresh parameters" if fresh else ""
