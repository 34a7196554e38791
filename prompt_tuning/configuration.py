"""gin, and the only place that knows of it.

What is bound here are plain dataclasses, classes and functions of the package; bound
in gin, each is a factory that is called to build the thing.
"""

import contextlib
import functools
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

import gin

from prompt_tuning import optim
from prompt_tuning.errors import InputError
from prompt_tuning.models.config import t5_config
from prompt_tuning.models.prompted import Prompting
from prompt_tuning.pretrained import Pretrained
from prompt_tuning.prompts import initializers
from prompt_tuning.prompts.modules import InferenceOnlyPrompt, SoftPrompt
from prompt_tuning.run import DataSource, Evaluation, Run

PACKAGE = Path(__file__).parent
# In a checkout the configs lie beside the package, in a wheel inside it.
CONFIG_FOLDERS = (PACKAGE / "configs", PACKAGE.parent / "configs")


@functools.cache
def register() -> None:
    """Makes the package's factories known to gin, once."""
    for factory in (
        Run,
        Pretrained,
        Prompting,
        DataSource,
        Evaluation,
        optim.ParameterGroup,
        optim.adafactor,
        optim.adamw,
        optim.warmup_linear_decay,
        t5_config,
        SoftPrompt,
        InferenceOnlyPrompt,
        initializers.uniform,
        initializers.from_file,
        initializers.from_sampled_vocabulary,
        initializers.from_class_labels,
        initializers.from_text,
    ):
        gin.external_configurable(factory, module="prompt_tuning")
    for folder in filter(Path.is_dir, CONFIG_FOLDERS):
        gin.add_config_file_search_path(str(folder))


def read_run(files: Sequence[str], bindings: Sequence[str]) -> Run:
    """Parses gin files and bindings, and builds the run that they describe.

    Args:
      files: paths, or names below `configs/` such as "runs/skills_upper.gin".
      bindings: such as `Run.steps = 10`; they override the files.

    Raises:
      InputError: for a missing file or include, a misspelt name or parameter, and
        whatever the values themselves are refused for.
    """
    register()
    gin.clear_config()
    try:
        with _quiet_search():
            gin.parse_config_files_and_bindings(list(files), list(bindings))
        return gin.get_configurable(Run)()
    except InputError:
        raise
    except (OSError, ValueError, TypeError, SyntaxError, AttributeError) as problem:
        raise InputError(_explain(problem, files)) from problem


@contextlib.contextmanager
def _quiet_search() -> Iterator[None]:
    """Hides the error that gin logs for each folder in which a file is not."""
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def _explain(problem: Exception, files: Sequence[str]) -> str:
    text = str(problem)
    hint = (
        "names are looked for in the working directory and in "
        f"{', '.join(str(f) for f in CONFIG_FOLDERS if f.exists())}"
        if isinstance(problem, OSError)
        else "text values need quotes inside the shell's: --gin.MODEL='\"folder\"'"
    )
    return (
        f"the config {', '.join(files) or '(no file)'} cannot be used: {text}\n{hint}"
    )


def operative_config() -> str:
    """All values in use, defaults included; as a gin file it starts the run again."""
    return gin.operative_config_str()
