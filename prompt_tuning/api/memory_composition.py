"""`compose` and `retrieve`: join memories, and find those that fit a question."""

import contextlib
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from prompt_tuning.adapters.adapter import PREFIX_PATH
from prompt_tuning.api.memories import RATE, check_folder, finish_memory
from prompt_tuning.api.memory_update import STUDY, study_of
from prompt_tuning.api.model import Model
from prompt_tuning.api.tune import TunedModel, load_sharing, tune
from prompt_tuning.config.config_values import CONFIG_FILE
from prompt_tuning.config.deferred_factories import Configurable
from prompt_tuning.core.atomic_files import replace_file
from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.field_checks import check_value
from prompt_tuning.core.number_ranges import NonnegativeInteger, PositiveInteger
from prompt_tuning.core.numpy_files import numpy_bytes, read_npy
from prompt_tuning.pretrained.attention_matching import move_prefix
from prompt_tuning.texts.memory_comparison import key_value_prefix
from prompt_tuning.texts.study_files import CHUNK_KEY
from prompt_tuning.texts.study_update import join_studies

APART, PARTS = "apart.npy", "parts"
"""File of the memories as trained separately; folder of each after joint training."""

Prefix = Float[Array, "L 2 P G K"]


def compose(
    memories: Sequence[TunedModel | str | Path],
    *,
    steps: int | None = None,
    batch_size: int = 64,
    directory: str | Path | None = None,
    seed: int = 0,
    progress: bool = True,
) -> TunedModel:
    """Joins memories of different texts into a single prefix.

    The keys of each memory are rotated so that they keep their distance to the row; the
    order of the memories therefore does not matter. Memories that were trained
    separately disturb each other: each answers worse than alone. `steps` trains them
    together to repair this: each row is read with all memories in place, while its
    teacher reads only the text that the row is about. The directory is then an ordinary
    run directory, with a comparison (`memory.json`) and PEFT folders of the whole
    (`peft`) and of each memory (`parts/0`, ...). An interrupted call resumes when you
    repeat it.

    Args:
      memories: at least two results of `remember` on the same frozen model, or their
        directories.
      steps: number of steps of joint training; None for none.
      batch_size: rows per step, over all texts.
      directory: run directory of the joint training; None for a temporary one.
      seed: seed of the order of the rows.
      progress: whether to show progress and the comparison.

    Returns:
      the frozen model with a prefix that has the slots of all memories.

    Raises:
      InputError: if there are fewer than two memories, one is not a key/value prefix,
        they belong to different models, or the rows for joint training are gone.

    Examples:
      >>> prefix = pt.KeyValuePrefix(length=4)
      >>> parts = [
      ...     pt.tune(model, prefix, pairs, steps=1, seed=i, progress=False)
      ...     for i in (0, 1)
      ... ]
      >>> both = pt.compose(parts)
      >>> both.trained["decoder/prompt/prompt"].shape
      (4, 2, 8, 4, 32)
    """
    check_value("steps", steps, PositiveInteger | None)
    check_value("seed", seed, NonnegativeInteger)
    if steps is None and directory is not None:
        raise InputError(
            "a directory is for memories that are trained together: give their number "
            "of steps, too"
        )
    loaded = [x for x in load_memories(memories) if isinstance(x, TunedModel)]
    if len(loaded) < max(len(memories), 2):
        raise InputError(
            f"compose got {len(memories)} memories, {len(loaded)} of them trained; "
            "expected at least two, all trained"
        )
    both, lengths = _joined(loaded)
    if steps is None:
        return both
    studies = [study_of(memory) for memory in loaded]
    folder = Path(directory or tempfile.mkdtemp(prefix="prompt-tuning-"))
    start = folder / STUDY / APART
    check_folder(folder, start)
    with _removed_if_refused(folder):
        files = join_studies(folder / STUDY, studies, both.prompted.needed_tokenizer())
        write_start(start, np.asarray(both.trained[PREFIX_PATH]))
        tuned = tune(
            both,
            Configurable("KeyValuePrefix")(length=sum(lengths), frozen_slots=1),
            [files.train],
            steps=steps,
            learning_rate=RATE,
            evaluation=files.held_out and [files.held_out],
            objective=Configurable("ContextDistillation")(
                context_key=CHUNK_KEY, contexts=str(files.chunks)
            ),
            batch_size=batch_size,
            directory=folder,
            seed=seed,
            start_from=str(start),
            progress=progress,
        )
    if directory is None:
        tuned.keep_until_collected(str(folder))
    if tuned.result is None or tuned.result.finished:
        if files.held_out is not None:
            finish_memory(tuned, progress=progress)
        _write_parts(tuned, lengths, folder / PARTS)
    return tuned


@contextlib.contextmanager
def _removed_if_refused(folder: Path) -> Iterator[None]:
    """Removes the rows that are written inside, unless a run begins with them."""
    new = [x for x in (folder / STUDY, folder) if not x.exists()]
    try:
        yield
    except InputError:
        if not (folder / CONFIG_FILE).exists():
            for path in new:
                shutil.rmtree(path, ignore_errors=True)
        raise


def _joined(memories: Sequence[TunedModel]) -> tuple[TunedModel, list[int]]:
    """Puts memories one after the other; returns the number of slots of each, too."""
    prefixes = _prefixes(memories)
    lengths = [prefix.shape[2] for prefix in prefixes]
    moved = [
        move_prefix(prefix, sum(lengths) - length, memories[0].config)
        for prefix, length in zip(prefixes, lengths, strict=True)
    ]
    return _behind(memories[0], jnp.concatenate(moved, axis=2)), lengths


def write_start(file: Path, prefix: Float[np.ndarray, "L 2 P G K"]) -> None:
    """Writes the memories as they were trained apart, unless an earlier call has.

    Raises:
      InputError: if the file has others.
    """
    if not file.exists():
        replace_file(file, numpy_bytes(prefix))
        return
    known = read_npy(file)
    # Another device may rotate keys to slightly different numbers.
    if known.shape != prefix.shape or not np.allclose(known, prefix, atol=1e-3):
        raise InputError(
            f"{file} has other memories than these, or they were trained further "
            "since: give another directory"
        )


def _prefixes(memories: Sequence[TunedModel]) -> list[Prefix]:
    """Returns the memories' prefixes; all must belong to one model."""
    prefixes = []
    for number, one in enumerate(memories):
        prefix = key_value_prefix(one.trained)
        if prefix is None or len(one.trained) > 1:
            found = {path: tuple(array.shape) for path, array in one.trained.items()}
            raise InputError(
                f"memory {number} is not a key/value prefix alone, but has "
                f"{shown(found)}: give runs of remember"
            )
        prefixes.append(prefix)
    check_same_model(memories)
    return prefixes


def load_memories(memories: Sequence[Model | str | Path]) -> list[Model]:
    """Loads memories, which share the parameters of one frozen model.

    Raises:
      InputError: if one cannot be loaded, or they are a single path.
    """
    if isinstance(memories, str | Path):
        raise InputError(f"memories is {shown(str(memories))}, expected a list of them")
    loaded: list[Model] = []
    for each in memories:
        loaded.append(each if isinstance(each, Model) else load_sharing(each, loaded))
    return loaded


def check_same_model(memories: Sequence[Model]) -> None:
    """Checks that memories belong to one frozen model.

    Raises:
      InputError: at the first one that belongs to another.
    """
    models = [memory.run.model for memory in memories]
    for number, model in enumerate(models):
        if model != models[0]:
            raise InputError(
                f"memory {number} belongs to {model.checkpoint}, and memory 0 to "
                f"{models[0].checkpoint}, or they read it with other settings: give "
                "memories of one model"
            )


def _behind(base: Model, prefix: Prefix) -> TunedModel:
    """Returns the frozen model with a prefix attached."""
    config = Configurable("KeyValuePrefix")(length=prefix.shape[2])
    model = Model.open(base.settings, [config])
    parameters = base.parameters | {PREFIX_PATH: prefix}
    return TunedModel(base.settings, model.run, model.prompted, parameters)


def _write_parts(tuned: TunedModel, lengths: Sequence[int], folder: Path) -> None:
    """Writes each memory as a PEFT folder."""
    whole = tuned.trained[PREFIX_PATH]
    parts = jnp.split(whole, np.cumsum(lengths)[:-1], axis=2)
    for number, part in enumerate(parts):
        moved = move_prefix(part, part.shape[2] - whole.shape[2], tuned.config)
        _behind(tuned, moved).to_peft(folder / str(number), force=True)


def retrieve(
    memories: Sequence[Model | str | Path], question: str, *, count: int = 1
) -> list[int]:
    """Chooses the memories that make a question most likely.

    A memory's score is the log-probability of the question's tokens, except the first
    one, which nothing predicts. The frozen model therefore reads the question once per
    memory. Pass the chosen memories to `compose` to answer with all of them.

    Args:
      memories: results of `remember`, or their directories.
      question: the question, exactly as the model reads it.
      count: maximum number of memories to choose.

    Returns:
      indices of the chosen memories, best first.

    Raises:
      InputError: if there are no memories, or the question has only one token.

    Examples:
      >>> texts = "upper: apple=APPLE", "reverse: dog=god"
      >>> memories = [
      ...     model.attach(pt.KeyValuePrefix(length=8, initializer=pt.from_text(text)))
      ...     for text in texts
      ... ]
      >>> len(pt.retrieve(memories, "reverse: dog="))
      1
    """
    check_value("count", count, PositiveInteger)
    check_value("question", question, str)
    if not memories:
        raise InputError("retrieve has no memories, expected at least one")
    loaded = load_memories(memories)
    check_same_model(loaded)
    scores = [-_score(memory, question) for memory in loaded]
    return [int(number) for number in np.argsort(scores, stable=True)[:count]]


def _score(memory: Model, question: str) -> float:
    ids = list(memory.texts.find().encoding.encode(question))
    if len(ids) < 2:
        raise InputError(
            f"the question has {len(ids)} tokens, expected at least two: the first one "
            "cannot be scored"
        )
    return memory.loglikelihood([(ids[:1], ids[1:])])[0].logprob
