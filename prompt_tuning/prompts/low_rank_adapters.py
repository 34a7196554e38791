"""LoRA: low-rank products next to projections."""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Key

from prompt_tuning.adapters.adapter import LORA, Adapter
from prompt_tuning.adapters.peft.expert_parameters import WEIGHT, is_parameter
from prompt_tuning.adapters.peft.lora_biases import biases_of
from prompt_tuning.adapters.peft.modules import ALL_LINEAR, match_targets
from prompt_tuning.adapters.peft.peft_settings import find_pattern
from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.field_checks import check_value
from prompt_tuning.core.number_ranges import PositiveNumber
from prompt_tuning.core.parameter_groups import match_any
from prompt_tuning.core.setting_hints import NUMBER, how_to_set
from prompt_tuning.prompts.dora import LORA_A, MAGNITUDE
from prompt_tuning.prompts.low_rank import EVA, ExpertLowRank, LowRank, initial_factors
from prompt_tuning.prompts.projection_adapters import (
    AdaptedProjection,
    AdapterSpec,
    ProjectionAdapter,
)
from prompt_tuning.prompts.weight_starts import FROM_WEIGHTS, START_A
from prompt_tuning.settings.lora_settings import LoRASettings

EXPERTS = "/experts/"
"""In the paths of projections of experts, which an expression must name."""

QUERIES_AND_VALUES = (r".*/(query|value)",)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoRA(LoRASettings, AdapterSpec):
    """Low-rank products next to projections: `y + alpha / r * x @ a @ b`.

    The usual choice on small models, and where a prompt does not reach the loss that
    you need (Hu et al. 2022). It can be merged into the weights (`TunedModel.save(...,
    form="merged")`), and then costs nothing at inference. It starts as the identity,
    since `a @ b` is 0.

    Attributes:
      regexes: expressions that match the whole paths of the projections to adapt, e.g.
        `.*/(query|key|value|out)` or `.*/mlp/.*`; queries and values by default.
      at: modules to adapt, by their names in transformers instead, like PEFT's
        `target_modules`: `"all-linear"` for all projections of all blocks, a list such
        as `["q_proj", "v_proj"]` of names or their ends after a dot, or one expression
        that matches whole names. A list may also name the parameters of experts and
        routers, like PEFT's `target_parameters`: `["experts.gate_up_proj",
        "experts.down_proj", "gate.weight"]`.
      rank: rank `r` of the product.
      alpha: scale; the product is multiplied by `alpha / r`.
      rank_stabilized: whether to multiply by `alpha / sqrt(r)` instead (Kalajdzievski
        2023), which keeps high ranks trainable.
      dropout: share of the product's input that each training step zeroes.
      layers: indices of the blocks to adapt; all if None.
      rank_pattern: ranks of some modules, by expressions that match a module's name in
        transformers or its end after a dot. The first match counts.
      alpha_pattern: the same for `alpha`. All layers of a projection must have the same
        scaling, so a rank for one layer needs an `alpha` in proportion.
      initial: first values of `a` and `b`, by PEFT's names: "kaiming" (uniform `a`, `b`
        0), "gaussian" (normal `a`, `b` 0), "orthogonal" (both nonzero, with the product
        0), or from the frozen weights, "pissa" (singular vectors, Meng et al. 2024) or
        "olora" (QR, Büyükakyüz 2024). From weights, the first product is subtracted,
        and the run is exported as a plain LoRA of twice the rank. With "eva", `a`
        starts from the principal components of the projections' inputs in the first
        batches (Paischer et al. 2024), and `b` is 0.
      eva_rho: maximum rank of a layer with "eva", in units of `rank`: ranks go to the
        layers and projections with components that explain most of the variance, and
        their sum stays. With 1 all keep theirs. The arrays have the maximum rank.
      dora: whether a trained magnitude rescales each output, as in DoRA (Liu et al.
        2024); the frozen weights must be on the device.
      invocation: ids of tokens from whose last occurrence in a row on the product is
        added, and nowhere in rows without them (aLoRA, Greenewald et al. 2025), so that
        the frozen model's keys and values of the text before remain valid. If None, it
        is added everywhere. For decoder-only models without prompts.
      bias: which biases of the model are trained, too, by PEFT's names: "none",
        "lora_only" (in adapted modules) or "all" (in norms and the head, too). The
        model must have such biases; the frozen weights must be on the device.

    Raises:
      InputError: if a number is out of range, or an expression or name matches nothing.

    Examples:
      >>> trained, _ = model.attach(pt.LoRA(rank=4)).partition()
      >>> for path, array in trained.items():
      ...     print(path, array.shape)
      decoder/layers/self_attention/query/adapters/lora/a (4, 128, 4)
      decoder/layers/self_attention/query/adapters/lora/b (4, 4, 128)
      decoder/layers/self_attention/value/adapters/lora/a (4, 128, 4)
      decoder/layers/self_attention/value/adapters/lora/b (4, 4, 128)
    """

    regexes: Sequence[str] = QUERIES_AND_VALUES
    name: ClassVar[str] = "lora"
    kind: ClassVar[str] = LORA

    def __post_init__(self):
        super().__post_init__()
        if self.at is not None and tuple(self.regexes) != QUERIES_AND_VALUES:
            raise InputError(
                f"LoRA.regexes is {shown(self.regexes)} and LoRA.at {shown(self.at)}, "
                "which both choose what to adapt; leave one of them out"
            )
        if self.dora and self.initial in FROM_WEIGHTS:
            raise InputError(
                f"LoRA.initial is {self.initial!r}, which takes a part out of the "
                "weights whose norms DoRA trains: leave out LoRA.initial or LoRA.dora"
            )
        if self.invocation is not None and (self.dora or self.bias != "none"):
            name = "dora" if self.dora else "bias"
            raise InputError(
                f"LoRA.{name} acts on whole rows, and LoRA.invocation on a part of "
                "each: leave one of them out"
            )
        for name in ("at", "layers", "invocation"):
            if getattr(self, name) is not None and not getattr(self, name):
                raise InputError(
                    f"LoRA.{name} is empty, so nothing would be adapted; leave it out"
                )

    def check_trained(self) -> None:
        """Refuses an `alpha` of 0 (no gradient) or below, which a file may have.

        Raises:
          InputError: if an `alpha` is not above 0.
        """
        check_value("LoRA.alpha", self.alpha, PositiveNumber)
        for pattern, alpha in (self.alpha_pattern or {}).items():
            label = f"LoRA.alpha_pattern of {shown(pattern)}"
            check_value(label, alpha, PositiveNumber)

    @property
    def names_modules(self) -> bool:
        """Whether `at`, `bias` or a pattern is given."""
        chosen = self.at or self.rank_pattern or self.alpha_pattern
        return bool(chosen) or self.bias != "none"

    @property
    def _targets(self) -> str | Sequence[str] | None:
        """`at` as PEFT's `target_modules`."""
        targets = self.at
        if not isinstance(targets, str) and targets and len(targets) == 1:
            targets = targets[0] if targets[0].lower() == ALL_LINEAR else targets
        if isinstance(targets, str) and targets.lower() == ALL_LINEAR:
            return ALL_LINEAR
        return targets

    def select(self, modules: Mapping[str, Sequence[str]]) -> list[str]:
        """Returns the paths of the projections that `regexes` or `at` choose.

        Raises:
          InputError: if an expression or a name chooses nothing.
        """
        if self._targets is None:
            chosen = self._match_regexes(modules)
        else:
            self._check_targets([x for names in modules.values() for x in names])
            chosen = [path for path in modules if any(self._targeted(modules[path]))]
        adapted = [name for path in chosen for name in modules[path]]
        for setting in ("rank_pattern", "alpha_pattern"):
            for pattern in getattr(self, setting) or ():
                if not any(find_pattern([pattern], setting, x) for x in adapted):
                    raise InputError(
                        f"LoRA.{setting} has {shown(pattern)}, which matches none of "
                        f"the adapted modules: expected the whole of a name such as "
                        f"{adapted[0]}, or its end after a dot"
                    )
        return chosen

    def _match_regexes(self, modules: Mapping[str, Sequence[str]]) -> list[str]:
        """Returns the paths that `regexes` match; experts need a specific expression.

        Raises:
          InputError: if an expression matches none.
        """
        plain = {path: x for path, x in modules.items() if EXPERTS not in path}
        regexes = [x for x in self.regexes if EXPERTS.strip("/") in x]
        if not regexes:
            return super().select(plain)
        matched = super().select(modules)
        meant = match_any(regexes)
        return [path for path in matched if path in plain or meant(path)]

    def _check_targets(self, names: Sequence[str]) -> None:
        """Checks that each name in `at`, or its expression, matches a module.

        Raises:
          InputError: for the first that does not.
        """
        targets = self._targets
        alone = isinstance(targets, str)
        for target in [targets] if alone else [[name] for name in targets or ()]:
            if self._match(target, names):
                continue
            hint = ""
            if alone and match_targets([target], names):
                hint = f"; write [{target!r}] for all names that end with it"
            raise InputError(
                f"LoRA.at has {shown(target if alone else target[0])}, which matches "
                f"none of the modules {', '.join(sorted(names)[:4])}, ...: expected "
                "'all-linear', a list of names or of their ends after a dot, or an "
                f"expression that matches whole names{hint}"
            )

    def _targeted(self, names: Sequence[str]) -> list[bool]:
        """Returns whether `at` chooses each layer's module."""
        if self._targets is None:
            return [True] * len(names)
        matched = self._match(self._targets, names)
        return [name in matched for name in names]

    @staticmethod
    def _match(targets: str | Sequence[str], names: Sequence[str]) -> set[str]:
        """Returns the modules that targets select; parameters only by their name."""
        plain = [name for name in names if not is_parameter(name)]
        if isinstance(targets, str):
            return match_targets(targets, plain)
        parts = (EXPERTS.strip("/"), WEIGHT)
        parameters = [x for x in targets if any(part in x for part in parts)]
        return match_targets(targets, plain) | match_targets(parameters, names)

    def build(
        self, key: Key[Array, ""], projection: AdaptedProjection
    ) -> ProjectionAdapter:
        """Initializes the factors; see `initial_factors`.

        Raises:
          InputError: if the projection has no such layer, its layers differ in scaling,
            or the rank is odd where it must be even.
        """
        if projection.experts or any(map(is_parameter, projection.modules)):
            self._check_experts(projection.path)
        count, *sizes = projection.shape
        names = projection.modules or [""] * count
        layers = range(count) if self.layers is None else self.layers
        if max(layers) >= count:
            raise InputError(
                f"LoRA.layers has {max(layers)}, but {projection.path} has {count} "
                f"layers, 0 to {count - 1}"
            )
        targeted = self._targeted(names)
        ranks = [0] * count
        scalings: dict[float, int] = {}
        for layer in sorted(set(layers)):
            if targeted[layer]:
                ranks[layer] = self._rank(names[layer])
                scalings.setdefault(self._scaling(names[layer]), layer)
        self._check_layers(projection.path, ranks, scalings)
        if projection.experts:
            shape = projection.experts, sizes[0], sizes[1]
            scaling = next(iter(scalings))
            return ExpertLowRank(key, shape, ranks, scaling, projection.axes)
        if self.initial in FROM_WEIGHTS and max(ranks) > min(sizes):
            raise InputError(
                f"LoRA.initial is {self.initial!r}, which takes ranks up to the "
                f"{min(sizes)} of the weights of {projection.path}, and the rank is "
                f"{max(ranks)}"
            )
        most = ranks
        if self.initial == EVA:
            most = [min(round(rank * self.eva_rho), sizes[0]) for rank in ranks]
        return LowRank(
            initial_factors(key, (sizes[0], sizes[1]), most, self.initial),
            next(iter(scalings)),
            projection.axes,
            # `initial_magnitudes` replaces them when the frozen weights are there.
            magnitude=jnp.zeros((count, sizes[1])) if self.dora else None,
            path=projection.path,
            dropout=self.dropout,
            rank_stabilized=self.rank_stabilized,
            initial=self.initial,
            ranks=ranks,
            most_ranks=most,
            invocation=self.invocation or (),
        )

    def _check_experts(self, path: str) -> None:
        """Refuses the settings that PEFT supports only for linear layers.

        Raises:
          InputError: names the setting.
        """
        neutral = {
            "dora": False,
            "dropout": 0,
            "initial": "kaiming",
            "invocation": None,
        }
        for name, usual in neutral.items():
            value = getattr(self, name)
            if value != usual:
                raise InputError(
                    f"LoRA.{name} is {shown(value)}, but the LoRA of experts and "
                    f"routers ({path}) has none of this, as in PEFT: leave out "
                    f"LoRA.{name}, or adapt other projections"
                )

    def _check_layers(
        self, path: str, ranks: Sequence[int], scalings: Mapping[float, int]
    ) -> None:
        if not scalings:
            raise InputError(
                f"LoRA.layers is {shown(self.layers)}, and LoRA.at chooses none of "
                f"these layers of {path}"
            )
        if len(scalings) > 1:
            found = ", ".join(f"{x:g} in layer {i}" for x, i in scalings.items())
            raise InputError(
                f"LoRA.rank_pattern and LoRA.alpha_pattern scale {path} by {found}, "
                "expected one scaling (alpha / r) in all layers of a projection: give "
                "these layers an alpha in proportion to their rank"
            )
        if self.initial == "orthogonal" and any(rank % 2 for rank in ranks):
            odd = next(rank for rank in ranks if rank % 2)
            raise InputError(
                f"LoRA.initial is 'orthogonal', which takes even ranks, and {path} has "
                f"rank {odd}"
            )

    def _rank(self, module: str) -> int:
        patterns = self.rank_pattern or {}
        pattern = find_pattern(patterns, "rank_pattern", module)
        return self.rank if pattern is None else patterns[pattern]

    def _scaling(self, module: str) -> float:
        patterns = self.alpha_pattern or {}
        pattern = find_pattern(patterns, "alpha_pattern", module)
        alpha = self.alpha if pattern is None else patterns[pattern]
        rank = self._rank(module)
        return alpha / (math.sqrt(rank) if self.rank_stabilized else rank)

    @classmethod
    def rebuild(cls, adapter: Adapter) -> tuple["LoRA", ...]:
        """Returns one spec for each rank and scaling.

        Raises:
          InputError: if the scaling of a LoRA is unknown.
        """
        groups: dict[tuple[int, float, bool, bool], list[str]] = {}
        for path, leaf in adapter.parameters.items():
            if not path.endswith(LORA_A):
                continue
            projection = path.removesuffix(LORA_A)
            if projection not in adapter.scalings:
                raise InputError(
                    f"the scaling (alpha / r) of the LoRA of {projection} is unknown: "
                    "give the adapters that it was trained with, e.g. "
                    f"{how_to_set('LoRA.rank', NUMBER)}"
                )
            dora = projection + MAGNITUDE in adapter.parameters
            starts = projection + START_A in adapter.parameters
            group = (leaf.shape[-1], adapter.scalings[projection], dora, starts)
            groups.setdefault(group, []).append(re.escape(projection))
        stabilized = bool(adapter.settings.get("use_rslora"))
        biases = biases_of(adapter)
        return tuple(
            cls(
                regexes=regexes,
                rank=rank,
                alpha=scaling * (math.sqrt(rank) if stabilized else rank),
                rank_stabilized=stabilized,
                dropout=adapter.settings.get("lora_dropout") or 0.0,
                dora=dora,
                bias=biases,
                invocation=adapter.settings.get("alora_invocation_tokens") or None,
                # Either one has these parameters, and their values are known.
                initial="olora" if starts else "kaiming",
            )
            for (rank, scaling, dora, starts), regexes in groups.items()
        )
