"""All methods with their configs, and the table of tested combinations.

`tests/test_methods.py` tests each cell. An empty cell of the table has its reason here,
with part of the message with which the library rejects the combination.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from scripts import skills

README = Path(__file__).parents[2] / "prompt_tuning" / "prompts" / "README.md"
BEGIN, END = "<!-- methods: made by tests/test_methods.py -->\n", "<!-- /methods -->\n"
MODELS = {"decoder": "bundled decoder", "gpt2": "GPT-2", "t5": "bundled T5"}
DECODERS = ("decoder", "gpt2")
WIDTH = 128


@dataclasses.dataclass(frozen=True)
class Reason:
    """Why a combination is not supported.

    Attributes:
      text: text of the footnote.
      message: pattern of the library's error message.
    """

    text: str
    message: str


PLACED = Reason(
    "PEFT puts every prompt before the text, where it sees what a prefix sees: "
    "written as an array",
    r"PEFT puts every prompt before the text",
)
DEEP = Reason(
    "PEFT has no deep prompts; a decoder-only model's become the keys and values that "
    "they make, an encoder's are written as they are",
    r"PEFT has no deep prompts",
)
DEPENDS_ON_TEXT = Reason(
    "PEFT has no prompts that depend on the text: written as a checkpoint",
    r"PEFT has no prompts that depend on the text",
)
IN_ENCODER = Reason(
    "PEFT's prefixes of a T5 are its decoder's: an encoder's is written as an array",
    r"prefixes into a decoder only",
)
DECODER_ALONE = Reason(
    "PEFT has no prompt for a T5's decoder alone: written as an array",
    r"no prompt for the decoder of an encoder-decoder alone",
)
BIDIRECTIONAL = Reason(
    "refused: an encoder's tokens attend to each other anyway",
    r"prefix_attention is for decoder-only models",
)
ONE_STACK = Reason(
    "refused: the model has one stack, whose prompt is `Run.prompt`",
    r"decoder_prompt is for encoder-decoders",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method:
    """One row of the table.

    Attributes:
      name: name of the method.
      files: gin files added after the run's own.
      choices: bindings that select the method; shown in the table.
      sizes: bindings that adapt it to the tests; not shown.
      peft: PEFT's methods that it is exported to.
      arrays: reason, by model, why it is exported as an array instead.
      refused: reason, by model, why the library rejects the method.
    """

    name: str
    files: Sequence[str] = ()
    choices: Sequence[str] = ()
    sizes: Sequence[str] = ()
    peft: str = "PROMPT_TUNING"
    arrays: Mapping[str, Reason] = dataclasses.field(default_factory=dict)
    refused: Mapping[str, Reason] = dataclasses.field(default_factory=dict)

    @property
    def asked_for(self) -> str:
        """The options added to a run's command, in Markdown."""
        shown = [*self.files, *(choice.replace(" = ", "=") for choice in self.choices)]
        return " ".join(f"`{part}`" for part in shown)


def _several_tasks(name: str, *sizes: str) -> Method:
    return Method(
        name=f"several tasks: {name.replace('_', ' ')}",
        files=("data/task_ids.gin", f"prompts/multitask_{name}.gin"),
        sizes=("TASKS = 2", *sizes),
        peft="MULTITASK_PROMPT_TUNING",
    )


METHODS = (
    Method(name="soft prompt", files=("prompts/sampled_vocabulary.gin",)),
    Method(
        name="soft prompt after the text",
        choices=("Prompting.placement = 'suffix'",),
        arrays=dict.fromkeys(MODELS, PLACED),
    ),
    Method(
        name="template of text and vectors",
        files=("data/template.gin",),
        sizes=("TEMPLATE = '{soft:2}{prompt}{soft:1}'",),
        arrays=dict.fromkeys(MODELS, PLACED),
    ),
    Method(
        name="prefix language model",
        choices=("Prompting.prefix_attention = True",),
        arrays=dict.fromkeys(DECODERS, PLACED),
        refused={"t5": BIDIRECTIONAL},
    ),
    Method(name="MLP over a prompt", files=("prompts/mlp.gin",)),
    Method(
        name="residual MLP over a prompt",
        files=("prompts/residual.gin",),
        sizes=("HIDDEN_WIDTH = 16",),
    ),
    Method(name="dropout in a prompt", files=("prompts/dropped.gin",)),
    Method(
        name="Wayward prompt",
        files=("prompts/wayward.gin",),
        sizes=("PROMPT_TEXT = 'up:'",),
    ),
    Method(
        name="examples in the context (CPT)",
        files=("prompts/cpt.gin",),
        sizes=("PROMPT_EXAMPLES = [{'prompt': 'up: a=', 'completion': 'A '}]",),
        refused={"t5": Reason("refused: the context is a decoder's", "ContextPrompt")},
    ),
    _several_tasks("add"),
    _several_tasks("concat_time", "TASK_LENGTH = 2"),
    _several_tasks("concat_features", "SHARED_FEATURES = 28", "TASK_FEATURES = 100"),
    _several_tasks("project", "SHARED_FEATURES = 8"),
    _several_tasks("factorized"),
    Method(
        name="prompt from the mean embedding of the text",
        files=("prompts/instance.gin",),
        arrays=dict.fromkeys(MODELS, DEPENDS_ON_TEXT),
    ),
    Method(
        name="mixture of prompts, chosen by the text",
        files=("prompts/pool.gin",),
        arrays=dict.fromkeys(MODELS, DEPENDS_ON_TEXT),
    ),
    Method(
        name="deep prompt",
        files=("prompts/deep.gin",),
        peft="PREFIX_TUNING",
        arrays={"t5": DEEP},
    ),
    Method(
        name="deep prompt, added",
        files=("prompts/added_deep.gin",),
        peft="PREFIX_TUNING",
        arrays={"t5": DEEP},
    ),
    Method(
        name="key/value prefix",
        files=("prompts/prefix.gin",),
        peft="PREFIX_TUNING",
        arrays={"t5": IN_ENCODER},
    ),
    Method(
        name="projected prefix",
        files=("prompts/projected_prefix.gin",),
        sizes=("ProjectedKeyValuePrefix.hidden = 16",),
        peft="PREFIX_TUNING",
        arrays={"t5": IN_ENCODER},
    ),
    Method(
        name="prompts in encoder and decoder",
        files=("prompts/encoder_and_decoder.gin",),
        peft="MULTITASK_PROMPT_TUNING",
        refused=dict.fromkeys(DECODERS, ONE_STACK),
    ),
    Method(
        name="prompt in the decoder alone",
        files=("prompts/encoder_and_decoder.gin",),
        choices=("Run.prompt = None",),
        arrays={"t5": DECODER_ALONE},
        refused=dict.fromkeys(DECODERS, ONE_STACK),
    ),
    Method(
        name="prefix in the decoder alone",
        files=("prompts/decoder_prefix.gin",),
        choices=("Run.prompt = None",),
        peft="PREFIX_TUNING",
        refused=dict.fromkeys(DECODERS, ONE_STACK),
    ),
    Method(name="IA3", files=("adapters/ia3.gin",), peft="IA3"),
    Method(name="LoRA", files=("adapters/lora.gin",), peft="LORA"),
    Method(
        name="DoRA",
        files=("adapters/lora.gin",),
        choices=("LoRA.at = 'all-linear'", "LoRA.dora = True"),
        peft="LORA",
    ),
    Method(
        name="LoRA and a soft prompt",
        files=("adapters/lora.gin",),
        choices=(
            "Run.prompt = @SoftPrompt",
            "ParameterGroup.regexes = ['.*/prompt/.*', '.*/adapters/.*']",
        ),
        peft="PROMPT_TUNING, LORA",
    ),
)


BIASES = Method(
    name="LoRA and biases",
    files=("adapters/lora.gin",),
    choices=("LoRA.at = 'all-linear'", "LoRA.bias = 'all'"),
)
INVOKED = Method(
    name="aLoRA",
    files=("adapters/lora.gin",),
    choices=("LoRA.at = 'all-linear'", "LoRA.invocation = [4]"),
)


@dataclasses.dataclass(frozen=True)
class Proof:
    """Result of the tests of one method on one model.

    Attributes:
      marks: number of passed checks among train, save, resume and decode.
      exported: format of the export.
      reason: why a check is missing; None if none is.
    """

    marks: int
    exported: str
    reason: Reason | None = None


def render(proofs: Mapping[tuple[str, str], Proof]) -> str:
    """Renders the table and its footnotes, between their markers.

    Args:
      proofs: result of every cell by the names of its method and model.
    """
    in_order = [proofs[method.name, model] for method in METHODS for model in MODELS]
    reasons = list(dict.fromkeys(proof.reason for proof in in_order if proof.reason))
    lines = [
        f"| method | added to the run | {' | '.join(MODELS.values())} |",
        "|---|---|" + "---|" * len(MODELS),
    ]
    for method in METHODS:
        cells = []
        for model in MODELS:
            proof = proofs[method.name, model]
            note = f"[{reasons.index(proof.reason) + 1}]" if proof.reason else ""
            cells.append(f"{'✓' * proof.marks} {proof.exported} {note}".strip())
        lines.append(f"| {method.name} | {method.asked_for} | {' | '.join(cells)} |")
    notes = [f"{n}. {reason.text}." for n, reason in enumerate(reasons, 1)]
    return "\n".join([BEGIN, *lines, "", *notes, "", END])


def write_gpt2(folder: Path) -> Path:
    """Writes a tiny GPT-2 with random weights in the format of transformers."""
    folder.mkdir()
    shapes = {
        "ln_1.weight": (WIDTH,),
        "ln_1.bias": (WIDTH,),
        "attn.c_attn.weight": (WIDTH, 3 * WIDTH),
        "attn.c_attn.bias": (3 * WIDTH,),
        "attn.c_proj.weight": (WIDTH, WIDTH),
        "attn.c_proj.bias": (WIDTH,),
        "ln_2.weight": (WIDTH,),
        "ln_2.bias": (WIDTH,),
        "mlp.c_fc.weight": (WIDTH, 2 * WIDTH),
        "mlp.c_fc.bias": (2 * WIDTH,),
        "mlp.c_proj.weight": (2 * WIDTH, WIDTH),
        "mlp.c_proj.bias": (WIDTH,),
    }
    shapes = {f"h.{layer}.{n}": x for layer in range(2) for n, x in shapes.items()}
    shapes |= {"ln_f.weight": (WIDTH,), "ln_f.bias": (WIDTH,)}
    shapes |= {"wte.weight": (len(skills.VOCABULARY), WIDTH), "wpe.weight": (64, WIDTH)}
    shapes = {f"transformer.{name}": shape for name, shape in shapes.items()}
    settings = {
        "model_type": "gpt2",
        "n_embd": WIDTH,
        "n_inner": 2 * WIDTH,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 64,
    }
    return _write_model(folder, shapes, settings)


def write_granite4(folder: Path) -> Path:
    """Writes a tiny Granite 4 with random weights: Mamba-2 around attention."""
    width, inner, heads, states = 32, 64, 4, 8
    channels = inner + 2 * states
    mamba = {
        "A_log": (heads,),
        "D": (heads,),
        "dt_bias": (heads,),
        "conv1d.weight": (channels, 1, 3),
        "conv1d.bias": (channels,),
        "in_proj.weight": (inner + channels + heads, width),
        "norm.weight": (inner,),
        "out_proj.weight": (width, inner),
    }
    attention = {f"{name}_proj.weight": (width, width) for name in "qkvo"}
    others = {
        "input_layernorm.weight": (width,),
        "post_attention_layernorm.weight": (width,),
        "shared_mlp.input_linear.weight": (2 * inner, width),
        "shared_mlp.output_linear.weight": (width, inner),
    }
    shapes = {"model.norm.weight": (width,)}
    shapes |= {
        f"{name}.weight": (len(skills.VOCABULARY), width)
        for name in ("model.embed_tokens", "lm_head")
    }
    mixers = [("mamba", mamba), ("self_attn", attention), ("mamba", mamba)]
    for layer, (mixer, parts) in enumerate(mixers):
        named = {f"{mixer}.{name}": shape for name, shape in parts.items()}
        shapes |= {f"model.layers.{layer}.{n}": x for n, x in (named | others).items()}
    settings = {
        "model_type": "granitemoehybrid",
        "hidden_size": width,
        "layer_types": ["mamba", "attention", "mamba"],
        **{"num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 1},
        **{"num_local_experts": 0, "shared_intermediate_size": inner},
        **{"mamba_n_heads": heads, "mamba_d_state": states, "mamba_d_conv": 3},
        "max_position_embeddings": 64,
    }
    return _write_model(folder, shapes, settings, deviation=0.4)


def _write_model(
    folder: Path,
    shapes: Mapping[str, tuple[int, ...]],
    settings: Mapping[str, Any],
    *,
    deviation: float = 0.1,
) -> Path:
    """Writes random weights of some shapes, settings and the tokenizer of skills."""
    folder.mkdir(exist_ok=True)
    random = np.random.default_rng(0)
    tensors = {}
    for name, shape in shapes.items():
        norm = "ln_" in name or "norm" in name
        start = 1.0 if norm and name.endswith("weight") else 0.0
        drawn = start + deviation * random.standard_normal(shape)
        tensors[name] = drawn.astype(np.float32)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    tokens = {
        "vocab_size": len(skills.VOCABULARY),
        "bos_token_id": skills.BOS_ID,
        "eos_token_id": skills.EOS_ID,
        "pad_token_id": skills.PAD_ID,
    }
    (folder / "config.json").write_text(json.dumps({**settings, **tokens}))
    skills.save_tokenizer(folder, add_bos=True)
    return folder
