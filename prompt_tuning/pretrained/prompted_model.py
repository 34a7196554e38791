"""A frozen model from a checkpoint, with the prompts and adapters that tune it.

First the checkpoint is opened and described (`plan_restore` checks every shape), then
the prompt is initialized from its vocabulary, and only then are weights read.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx
from jaxtyping import Array, Key

from prompt_tuning import processes
from prompt_tuning.checkpoints.fingerprint import sampled
from prompt_tuning.checkpoints.restore_plan import RestorePlan, plan_restore
from prompt_tuning.checkpoints.run_store.orbax_arrays import Leaf
from prompt_tuning.checkpoints.stored_tensors import PartReader
from prompt_tuning.core.array_slices import whole
from prompt_tuning.core.batch import ONE_PART, RowDivision
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.core.parameters import Parameters, describe, merge, named_key, split
from prompt_tuning.core.status_line import status
from prompt_tuning.data.model_interface import OF_CONFIG, ModelInterface
from prompt_tuning.data.text.tokenizers import Tokenizer
from prompt_tuning.families.hf_folder import find_recipes
from prompt_tuning.models.attention_choice import check_attention, choose_attention
from prompt_tuning.models.build import adaptable, build_model
from prompt_tuning.models.language_model import LanguageModel
from prompt_tuning.pretrained.fresh_parameters import (
    check_on_device,
    complete_adapters,
    initialize,
    initialized_by,
)
from prompt_tuning.pretrained.source import (
    open_embeddings,
    with_tokenizer,
    with_whole_scales,
)
from prompt_tuning.pretrained.text_prefixes import check_start, start_prefix
from prompt_tuning.pretrained.trained_rows import open_rows, open_tuned
from prompt_tuning.pretrained.tuning import PromptPair, Tuning
from prompt_tuning.pretrained.weight_storage import WeightStorage, check_location
from prompt_tuning.prompts.initializers import Vocabulary
from prompt_tuning.prompts.low_rank import EVA, LowRank
from prompt_tuning.prompts.placement import TEMPLATE
from prompt_tuning.prompts.projection_adapters import ProjectionAdapter
from prompt_tuning.settings.mesh_shape import MeshShape
from prompt_tuning.settings.pretrained import Pretrained
from prompt_tuning.settings.prompting import Prompting
from prompt_tuning.sharding.array_placement import Placement
from prompt_tuning.sharding.mesh import mesh_layout
from prompt_tuning.sharding.mesh_layout import MeshLayout


@dataclasses.dataclass(frozen=True)
class PromptedModel:
    """A model that is described and checked; its parameters are read on request.

    Attributes:
      config: config of the frozen model.
      graph: structure of the model, prompt included.
      prompts: the prompt modules with their initial vectors.
      prompting: where the prompt is placed and what it attends to.
      tokenizer: the tokenizer with the run's new tokens; None if the checkpoint has
        none.
      plan: which parameters are restored, fresh and ignored.
      initialize: computes the fresh parameters, by path.
      placement: placement of the parameters on a mesh; None on one device.
      weight_storage: where the weights of blocks are stored.
      base_tokenizer: the checkpoint's own tokenizer.
    """

    config: ModelConfig
    graph: nnx.GraphDef
    prompts: PromptPair
    prompting: Prompting
    tokenizer: Tokenizer | None
    plan: RestorePlan
    initialize: Callable[[], Parameters]
    placement: Placement | None = None
    weight_storage: WeightStorage = dataclasses.field(default_factory=WeightStorage)
    base_tokenizer: Tokenizer | None = None

    @property
    def layout(self) -> MeshLayout | None:
        """Layout of the model on a mesh; None on one device."""
        return None if self.placement is None else self.placement.layout

    def in_training(
        self, trained_weights: str, trained: Collection[str]
    ) -> "PromptedModel":
        """Stores the trained weights separately; see `WeightStorage`."""
        storage, placement = self.weight_storage, self.placement
        storage = storage.in_training(trained_weights, trained, self.plan)
        if placement is not None:
            placement = placement.with_pinned(storage.pinned)
        return dataclasses.replace(self, weight_storage=storage, placement=placement)

    @status("reading the model")
    def read_parameters(
        self, reuse: Mapping[str, Array] | None = None, given: Collection[str] = ()
    ) -> Parameters:
        """Restores or initializes all parameters except streamed ones, by path.

        On a mesh each process reads only the slices of the checkpoint for its devices.

        Args:
          reuse: parameters of the same checkpoint that were read before; on one device,
            restored ones are taken from here.
          given: paths of parameters that the caller already has from elsewhere; they
            may stay as `initialize` returns them.

        Raises:
          InputError: if the checkpoint is damaged, or its numbers differ from another
            process's checkpoint.
        """
        processes.check_same("weights in its checkpoint", lambda: sampled(self.plan))
        parameters = self.initialize()
        known = (reuse or {}) if self.placement is None else {}
        for path, read in self.plan.readers():
            if path in known:
                parameters[path] = known[path]
            elif path not in self.weight_storage.streamed:
                # One at a time, so that a host never holds all parameters that it
                # passes on to its devices.
                parameters[path] = jax.block_until_ready(self._restore(path, read))
        parameters = self.complete(parameters, given)
        return {
            path: parameters[path] for path in self.plan.abstract if path in parameters
        }

    def complete(
        self, parameters: Parameters, given: Collection[str] = ()
    ) -> Parameters:
        """Computes the fresh parameters that depend on restored ones.

        `parameters` are all of them, as restored or from `initialize`. For `given` see
        `read_parameters`.
        """
        parameters = complete_adapters(parameters, self.loras, self.placement, given)
        start = self.prompts.prefix_start
        if start is None:
            return parameters
        return start_prefix(parameters, start, self.config, self.placement)

    def _restore(self, path: str, read: PartReader) -> Any:
        if self.placement is not None:
            return self.placement.restore(path, read)
        (array,) = read([whole(self.plan.abstract[path].shape)])
        return self.weight_storage.put(path, array)

    def put(self, leaves: Mapping[str, Leaf]) -> Parameters:
        """Puts parameters from another source where the model computes."""
        return {path: self._put(path, leaf) for path, leaf in leaves.items()}

    def _put(self, path: str, array: Leaf) -> Any:
        if self.placement is None:
            return self.weight_storage.put(path, np.asarray(array))
        return self.placement.put(path, array)

    def by_layer(self, parameters: Parameters) -> dict[str, Any]:
        """Returns all parameters in the form for a function that streams layers."""
        if self.placement is not None:
            parameters = self.placement.crop(parameters)
        return self.weight_storage.with_streamed(parameters)

    @property
    def prompt_length(self) -> int:
        """Number of prompt vectors `P`, or of prefix positions; 0 without a prompt."""
        return self.prompts.length

    @property
    def prompt_count(self) -> int:
        """Number of prompts that an example can select from, `N`."""
        return self.prompts.count

    @property
    def drops(self) -> bool:
        """Whether training applies dropout, which requires a random key."""
        return (
            self.config.dropout_rate > 0
            or self.prompts.drops
            or any(adapter.drops for _, adapter in self._adapters)
        )

    @property
    def loras(self) -> dict[str, LowRank]:
        """LoRA of each projection that has one, without arrays, by its path."""
        return {p: x for p, x in self._adapters if isinstance(x, LowRank)}

    @property
    def activation_loras(self) -> dict[str, LowRank]:
        """Those of `loras` that start from activations of the first batches."""
        return {path: x for path, x in self.loras.items() if x.initial == EVA}

    @functools.cached_property
    def _adapters(self) -> list[tuple[str, ProjectionAdapter]]:
        """The adapters of projections with their paths, without arrays."""
        return [
            (path, adapter)
            for path, dense in adaptable(merge(self.graph, self.plan.abstract))
            for adapter in dense.adapters.values()
        ]

    @property
    def maximum_length(self) -> int | None:
        """Maximum number of tokens next to the prompt; None if positions are unlimited.

        Prompt vectors that a template inserts count as tokens. In an encoder-decoder it
        applies to inputs and to targets, next to the longer of their prompts.
        """
        if self.config.maximum_positions is None:
            return None
        among_tokens = self.prompting.placement == TEMPLATE
        length = 0 if among_tokens else self.prompt_length
        length = max(length, self.prompts.decoder_length)
        return self.config.maximum_positions - length

    @property
    def eos_id(self) -> int | None:
        """Token that ends a row of data: the tokenizer's EOS, else the config's."""
        if self.tokenizer is None or self.tokenizer.eos_id is None:
            return self.config.eos_id
        return self.tokenizer.eos_id

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Tokens that end a generated text."""
        ids = (self.eos_id, self.config.eos_id, *self.config.stop_ids)
        return tuple(dict.fromkeys(token for token in ids if token is not None))

    @property
    def ends(self) -> str | None:
        """Describes the end tokens if the tokenizer's and the config's differ."""
        more_ends = self.stop_ids[1:]
        if self.eos_id == self.config.eos_id or not more_ends:
            return None
        listed = " and ".join(map(str, more_ends))
        return (
            f"rows end with token {self.eos_id}, the tokenizer's EOS; generation also "
            f"stops at {listed}, which the model's config names"
        )

    @property
    def attention(self) -> str:
        """Describes how attention is computed in training, and why."""
        choice = choose_attention(self.config)
        if choice.kernel is None:
            return str(choice)
        if self.prompts.count > 1:
            return "reference, because rows attend to one of several prompts"
        if self.prompting.prefix_attention:
            return "reference, because given text attends in both directions"
        return f"{choice}" + "; reference in packed rows" * (not choice.kernel.packs)

    @property
    def predicts_without_text(self) -> bool:
        """Whether a row without tokens still predicts a next token."""
        if self.config.architecture == "encoder_decoder":
            return self.prompt_length > 0
        return self.prompts.at_input

    @property
    def predicts_first_token(self) -> bool:
        """Whether a prompt vector precedes every row's first token."""
        return self.prompts.at_input and self.prompting.placement == "prefix"

    @property
    def interface(self) -> ModelInterface:
        """Properties of the model that determine how it reads data."""
        rows = ONE_PART
        if self.layout is not None:
            rows = RowDivision(self.layout.row_parts, tuple(self.layout.row_axes))
        return ModelInterface(
            **{name: getattr(self.config, name) for name in OF_CONFIG},
            tokenizer=self.tokenizer,
            origin=str(self.plan.origin),
            eos_id=self.eos_id,
            maximum_length=self.maximum_length,
            predicts_first_token=self.predicts_first_token,
            prompt_length=self.prompt_length,
            prompt_count=self.prompt_count,
            placement=self.prompting.placement,
            prefix_attention=self.prompting.prefix_attention,
            rows=rows,
            pooling=self.prompts.pooling or self.config.pooling,
            encodes=self.config.bidirectional,
        )

    def needed_tokenizer(self) -> Tokenizer:
        """Returns the tokenizer.

        Raises:
          InputError: if the checkpoint has none.
        """
        return self.interface.require_tokenizer()


@status("opening the model")
def open_pretrained(
    source: Pretrained,
    tuning: Tuning | None = None,
    *,
    key: Key[Array, ""],
    mesh: MeshShape | None = None,
) -> PromptedModel:
    """Opens a frozen model and initializes the prompts and adapters that tune it.

    The only arrays read from the checkpoint are the rows of the embedding table that a
    prompt starts from.

    Raises:
      InputError: if the checkpoint lacks something that the model needs, or the model
        cannot be sharded.
    """
    policies = (source.rematerialization, source.encoder_rematerialization)
    check_location(source.weights, source.trained_weights, mesh is not None, policies)
    tuning, started = tuning or Tuning(), PromptPair()
    config, recipes, stored = open_tuned(source, tuning.class_head)
    config = with_whole_scales(config, mesh)
    check_attention(config)
    config, tokenizer = with_tokenizer(source, config)
    if tuning.prompt is not None or tuning.decoder_prompt is not None:
        vocabulary = Vocabulary(open_embeddings(config, recipes, stored), tokenizer)
        started = tuning.start(key, vocabulary, config)
        started.check_positions(config)
        if started.prefix_start is not None:
            check_start(started.prefix_start, config, source.weights, mesh)
    base_tokenizer, opened = tokenizer, (config, recipes, stored)
    arguments, on_mesh = (source, tuning, started, opened, tokenizer), mesh is not None
    config, tokenizer, started = open_rows(*arguments, key=key, on_mesh=on_mesh)
    if started.classes is not None:  # there may be frozen layers before the head
        recipes = find_recipes(config, stored)

    def build(key: Key[Array, ""]) -> tuple[nnx.GraphDef, Parameters]:
        return split(build_tuned(key, config, started, tuning))

    model_key = named_key(key, "model")
    graph, abstract = describe(build, model_key)
    placement = mesh and Placement.create(mesh_layout(mesh, config), graph, abstract)
    plan = plan_restore(
        abstract,
        recipes,
        stored,
        assignment_map=source.assignment_map,
        fallback_to_scratch=source.fallback_to_scratch,
        fresh_by=lambda path: initialized_by(path, tuning),
        stores=dict(config.stores),
    )
    check_on_device(abstract, source.weights)
    storage = WeightStorage.create(source.weights, graph, plan)
    if placement is not None:
        placement = placement.with_pinned(storage.pinned)
        storage = storage.on_mesh(placement)
    return PromptedModel(
        config=config,
        graph=graph,
        prompts=started,
        prompting=tuning.prompting or Prompting(),
        tokenizer=tokenizer,
        base_tokenizer=base_tokenizer,
        plan=plan,
        initialize=lambda: initialize(build, model_key, list(plan.fresh), placement),
        placement=placement,
        weight_storage=dataclasses.replace(storage, slices=source.slices),
    )


def build_tuned(
    key: Key[Array, ""], config: ModelConfig, started: PromptPair, tuning: Tuning
) -> LanguageModel:
    """Builds the model with its prompts and adapters; see `build_model`."""
    return build_model(
        key,
        config,
        started.prompt,
        tuning.prompting,
        decoder_prompt=started.decoder_prompt,
        decoder_prompting=tuning.decoder_prompting,
        adapters=tuning.projection_adapters,
        tokens=started.tokens,
        classes=started.classes,
    )
