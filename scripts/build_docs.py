"""Builds the site: the documents beside the code, notebooks, and the Python interface.

    ./scripts/install docs
    .venv/bin/python -m scripts.build_docs     # writes build/site/index.html

Needs no network. A broken link, an unknown name or a docstring that cannot be parsed
ends it with an error.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import prompt_tuning as pt
from prompt_tuning import losses, prompts

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "build" / "docs"
CONFIG = ROOT / "scripts" / "site" / "mkdocs.yml"
DOCUMENTS = ("*.md", ".github/*.md", "prompt_tuning/**/*.md", "scripts/**/*.md")
NOTEBOOKS = "scripts/examples/*.ipynb"

API = {
    "start": (
        "Start",
        "load tune reinforce remember compose retrieve load_tuned Model TunedModel "
        "TrainingResult InputError",
    ),
    "methods": (
        "Methods",
        "SoftPrompt DeepPrompt AddedDeepPrompt KeyValuePrefix ProjectedKeyValuePrefix "
        "StatePrefix LoRA IA3 TrainedTokens ClassHead Prompting MLPPrompt "
        "ResidualPrompt DroppedPrompt WaywardPrompt ContextPrompt InstancePrompt "
        "PromptPool AddMultiTaskPrompt ConcatTimeMultiTaskPrompt "
        "ConcatFeaturesMultiTaskPrompt ProjectMultiTaskPrompt "
        "FactorizedMultiTaskPrompt InferenceOnlyPrompt",
    ),
    "initial_values": (
        "Initial values",
        "uniform from_sampled_vocabulary from_class_labels from_text from_template "
        "from_chunks from_attention_matching from_file normal factors_of_ones "
        "normal_factors",
    ),
    "data": (
        "Models, data and evaluation",
        "Pretrained t5_config DataSource Evaluation",
    ),
    "objectives": (
        "Objectives",
        "TokenObjective ClassObjective Contrastive DPO ORPO SimPO KTO GRPO Rollouts "
        "ContextDistillation OnPolicyDistillation PolicyGradient OutputGradients",
    ),
    "optimizers": (
        "Optimizers",
        "adafactor adamw optax_transformation optax_chain ParameterGroup "
        "warmup_constant warmup_linear_decay warmup_cosine_decay warmup_rsqrt_decay",
    ),
    "generation": ("Generation", "Sampling BeamSearch"),
    "devices": (
        "Memory and devices",
        "MeshShape AxisRules Pipeline Rematerialization BlockRange",
    ),
    "loops": (
        "Loops of your own",
        "Batch TrainState train_step gradients update Run open_run train",
    ),
}
"""Title and names of each page about the Python interface, in order.

Other objectives and prompts follow on their pages.
"""

MEMBERS = """\
    options:
      filters: ["!^_"]
      inherited_members: {inherited}
      members: null
"""
WITH_MEMBERS = {"Model": "true", "TunedModel": "false"}
"""Classes whose members are described, and whether inherited ones are too."""


def copy_documents() -> None:
    """Copies the documents, and the files that they show or link to."""
    for pattern in DOCUMENTS:
        for file in ROOT.glob(pattern):
            _copy(file)
            for target in re.findall(r"\]\(([^)#\s:]+)[^):]*\)", file.read_text()):
                linked = (file.parent / target).resolve()
                if linked.is_file() and linked.suffix not in (".md", ".ipynb"):
                    _copy(linked)


def _copy(file: Path) -> None:
    target = PAGES / file.relative_to(ROOT)
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(file, target)


def write_notebooks() -> None:
    """Writes each notebook as a page, and a copy to download."""
    for file in ROOT.glob(NOTEBOOKS):
        _copy(file)
        parts = []
        for cell in json.loads(file.read_text())["cells"]:
            source = "".join(cell["source"])
            is_code = cell["cell_type"] == "code"
            parts.append(f"```python\n{source}\n```" if is_code else source)
        parts.append(f"[Download the notebook]({file.name})")
        page = PAGES / file.relative_to(ROOT).with_suffix(".md")
        page.write_text("\n\n".join(parts))


def pages_of_names() -> dict[str, list[str]]:
    """Returns the names on each page."""
    pages = {page: names.split() for page, (_, names) in API.items()}
    listed = {name for names in pages.values() for name in names}
    pages["methods"] += sorted(set(prompts.FACTORIES) - listed)
    pages["objectives"] += sorted(set(losses.FACTORIES) - listed)
    return pages


def check_names() -> None:
    """Checks that each public name is on one page."""
    listed = sorted(name for names in pages_of_names().values() for name in names)
    expected = sorted(set(pt.__all__) - {"__version__"})
    if listed != expected:
        odd = sorted(set(listed) ^ set(expected)) or "a name twice"
        sys.exit(f"scripts/build_docs.py lists other names than pt.__all__: {odd}")


def write_interface() -> None:
    """Writes the pages about the public names."""
    for page, names in pages_of_names().items():
        title, _ = API[page]
        text = f"# {title}\n\nThe examples begin with `import prompt_tuning as pt`.\n\n"
        for name in names:
            text += f"::: prompt_tuning.{name}\n"
            if name in WITH_MEMBERS:
                text += MEMBERS.format(inherited=WITH_MEMBERS[name])
            text += "\n"
        (PAGES / "api").mkdir(parents=True, exist_ok=True)
        (PAGES / "api" / f"{page}.md").write_text(text)


def main() -> None:
    """Builds the site; warnings are errors."""
    check_names()
    shutil.rmtree(PAGES, ignore_errors=True)
    copy_documents()
    write_notebooks()
    write_interface()
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(CONFIG)]
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}  # a notice about its successor
    ended = subprocess.run(command, cwd=ROOT, env=quiet)
    if ended.returncode:
        sys.exit(ended.returncode)
    print(f"the site is {ROOT / 'build' / 'site' / 'index.html'}")


if __name__ == "__main__":
    main()
