"""adapter_config.json of a PEFT directory, and which of its settings are refused.

PEFT accepts unknown keys with a warning, so such adapters are served with a note. A key that looks like
another type of adapter is refused.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from manylora.adapters.bounds import ANY_MODEL, Bounds
from manylora.adapters.extras import check_invocation
from manylora.adapters.formats import gguf, mlx, one_line
from manylora.adapters.formats.safe_files import EMBEDDED, OpenFile, is_gguf, is_plain, read_small
from manylora.adapters.formats.tensor_files import read_metadata
from manylora.errors import AdapterInvalidError

CONFIG = "adapter_config.json"
MAX_BYTES = 2**21
AUTOMODEL, SCALED = "automodel_peft_config.json", "moe_rank_scaling"
"""NeMo AutoModel's file beside it, and its word for experts of a smaller rank than `r`."""
NORMALIZED = "dora_normalized"
"""Key that tools/normalize_dora.py sets: the magnitudes are divided by the row norms already."""
# Settings under which PEFT computes something else than the base plus scale * B A x.
UNSUPPORTED = ("arrow_config", "layer_replication")
# Settings under which the matrices of the file are not yet those of a plain LoRA, or there are others.
WRITTEN_OUT = ("use_qalora", "use_bdlora", "monteclora_config", "velora_config", "kasa_config")
# Initialisations that change the base's weights by what nobody can compute from these alone, and what to do.
CONVERT = "convert it to a plain LoRA with PEFT's path_initial_model_for_weight_conversion"
CHANGED_BASE = {
    "pissa_niter": CONVERT,
    "corda": CONVERT,
    "loftq": "serve that one, and say so by init_lora_weights true, as LoftQ's own scripts do",
}
ALORA = "alora_invocation_tokens"
ALONE = ("use_dora", "target_parameters", *WRITTEN_OUT)  # settings that do not go with ALORA


def read_settings(folder: Path, bounds: Bounds = ANY_MODEL) -> dict[str, Any]:
    """adapter_config.json of an adapter of any PEFT type, that of mlx-lm in PEFT's words. folder: or a file
    with it in its metadata. Raises AdapterInvalidError."""
    path = folder / CONFIG
    try:
        if is_gguf(folder, bounds):
            settings: Any = gguf.read_settings(folder, bounds)
        elif is_plain(folder):
            text = read_metadata(OpenFile(folder, bounds), bounds).get(EMBEDDED, "")
            if not isinstance(text, str) or not text or len(text) > MAX_BYTES:
                raise AdapterInvalidError(f"the metadata of {folder.name} has no text {EMBEDDED}")
            settings = json.loads(text)
        elif is_plain(path):
            settings = json.loads(read_small(path, bounds, MAX_BYTES).decode())
        else:
            raise AdapterInvalidError(f"{CONFIG} is missing: not an adapter directory of PEFT")
    except (OSError, ValueError, RecursionError) as error:
        raise AdapterInvalidError(f"{CONFIG} is not readable JSON: {one_line(error)}") from error
    if not isinstance(settings, dict):
        raise AdapterInvalidError(f"{CONFIG} must be an object of JSON")
    if settings.get("target_parameters") and is_plain(folder / AUTOMODEL):
        with suppress(OSError, ValueError, RecursionError):
            more = json.loads(read_small(folder / AUTOMODEL, bounds, MAX_BYTES))
            settings[SCALED] = isinstance(more, dict) and more.get(SCALED) is True
    if mlx.SETTINGS in settings or mlx.KIND in settings:
        settings = mlx.settings_in_peft(settings)
    _check_types(settings)
    return settings


def shown(value: Any) -> str:
    """A value as errors show it: short, and without the content of lists, which may be nested deeply."""
    return type(value).__name__ if isinstance(value, list | dict) else str(value)[:40]


def peft_type(settings: Mapping[str, Any]) -> str:
    """The adapter's PEFT type in capitals; LORA by default."""
    return shown(settings.get("peft_type", "LORA")).upper()


def initial_kind(settings: Mapping[str, Any]) -> str:
    """The initialisation of an adapter's matrices, in lower case. pissa, olora, kasa and others change the
    base's weights."""
    return "kasa" if settings.get("kasa_config") else shown(settings.get("init_lora_weights")).lower()


def form_of(settings: Mapping[str, Any]) -> str:
    """The PEFT type with its variants, for inspect and the log."""
    found = [name for name in (*WRITTEN_OUT, "use_dora") if settings.get(name)]
    variants = [name.removeprefix("use_").removesuffix("_config") for name in found]
    start = initial_kind(settings)
    variants += [start] if start.startswith(("pissa", "olora")) else []
    return " with ".join((peft_type(settings), *variants))


def is_plain_lora(settings: Mapping[str, Any]) -> bool:
    """Whether A and B of a LoRA are stored as they are used."""
    written_out = any(settings.get(name) for name in WRITTEN_OUT)
    changed = initial_kind(settings).startswith(("pissa", "olora"))
    return peft_type(settings) == "LORA" and not written_out and not changed


PLAIN = re.compile(r"\^?((?:[\w.-]|\\\.)+)\$?")  # a name, or the regular expression of one
# Repetitions and groups: where a match may go on in more than one way. Their number is the power of a name's
# length that the time of a comparison grows with. One at the front comes free: there PEFT puts one itself.
CHOICES = re.compile(r"(?<!\()[*+?{]|\(")
MAX_CHOICES = 3
FRONT = ".*"
MAX_LENGTH = 256  # characters of a pattern
MAX_NAME = 128  # of a name that is compared with one
MAX_INVOLVED = 64  # patterns that are not the name of a module
SECONDS = 1.0  # for all comparisons of one adapter


class Patterns:
    """Patterns for names of modules, as PEFT's alpha_pattern and rank_pattern have them; the first that
    matches is used. setting: its name, for errors. Plain names are looked up, however many there are. Regular
    expressions must be few and simple, or they are refused."""

    def __init__(self, setting: str, patterns: Iterable[str]) -> None:
        self._setting = setting
        self._names: dict[str, int] = {}  # name -> place among the patterns
        self._involved: list[tuple[int, str]] = []
        self._all = list(patterns)
        self._seconds = 0.0
        for place, pattern in enumerate(self._all):
            plain = PLAIN.fullmatch(pattern)
            if plain is not None:
                # A pattern that begins with ^ means whole names only.
                name = ("^" if pattern.startswith("^") else "") + plain[1].replace("\\.", ".")
                self._names.setdefault(name, place)
            else:
                self._involved.append((place, pattern))
        if len(self._involved) > MAX_INVOLVED:
            raise AdapterInvalidError(
                f"{setting} has {len(self._involved)} regular expressions, at most {MAX_INVOLVED} are matched"
            )

    def first(self, path: str) -> str | None:
        """The first pattern that matches the module or parameter at `path`. Raises AdapterInvalidError."""
        if not self._all:
            return None
        name = path.removeprefix("base_model.model.")
        parts = name.split(".")
        ends = (".".join(parts[first:]) for first in range(len(parts)))
        found = [self._names[end] for end in (f"^{name}", *ends) if end in self._names]
        best = min(found, default=len(self._all))
        if self._involved and len(name) > MAX_NAME:
            raise AdapterInvalidError(f"{name[:80]} is too long a name to compare with {self._setting}")
        started = time.perf_counter()
        for place, pattern in self._involved:
            if place > best:
                break
            if self._expressions[pattern].match(name):
                best = place
        self._seconds += time.perf_counter() - started
        if self._seconds > SECONDS:
            raise AdapterInvalidError(f"{self._setting} takes too long to compare with the adapter's modules")
        return self._all[best] if best < len(self._all) else None

    @cached_property
    def _expressions(self) -> dict[str, re.Pattern[str]]:
        found = {}
        for _, pattern in self._involved:
            is_long = len(pattern) > MAX_LENGTH or re.search(r"\)[*+{]", pattern)
            if is_long or len(CHOICES.findall(pattern.removeprefix(FRONT))) > MAX_CHOICES:
                raise AdapterInvalidError(f"the {self._setting} {pattern[:80]} is too involved")
            whole = f"({pattern})$" if pattern.startswith(FRONT) else rf"(.*\.)?({pattern})$"
            try:
                found[pattern] = re.compile(whole)
            except (re.error, RecursionError, OverflowError) as error:
                raise AdapterInvalidError(f"{self._setting} {pattern[:80]} is not a pattern") from error
        return found


@dataclass(frozen=True)
class PeftConfig:
    """The settings of a LoRA that its tensors do not show.

    token_indices: trainable_token_indices by module; those of a plain list have an empty name and mean the
    input embedding. base: the trainer's name of the base model. folded: B already contains the scaling.
    invocation: the adapter acts from the last of these token ids in the prompt on; empty: on every token.
    moe_rank_scaling: stacked experts have another rank than the settings', the same in each.
    """

    alpha: float
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    default_rank: int | None = None
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    target_parameters: tuple[str, ...] = ()
    use_rslora: bool = False
    use_dora: bool = False
    dora_normalized: bool = False
    fan_in_fan_out: bool = False
    modules_to_save: tuple[str, ...] = ()
    ensure_weight_tying: bool = False
    token_indices: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    base: str = ""
    folded: bool = False
    moe_rank_scaling: bool = False
    invocation: tuple[int, ...] = ()

    @cached_property
    def _alphas(self) -> Patterns:
        return Patterns("alpha_pattern", self.alpha_pattern)

    @cached_property
    def _ranks(self) -> Patterns:
        return Patterns("rank_pattern", self.rank_pattern)

    def saves(self, path: str) -> bool:
        """Whether the adapter contains the whole module at `path`."""
        return self.ensure_weight_tying or any(path.endswith(name) for name in self.modules_to_save)

    def token_ids(self, path: str, is_embedding: bool) -> tuple[int, ...]:
        """The tokens whose rows of the module at `path` were trained, in the order of the tensor's rows.
        Raises AdapterInvalidError."""
        named = [ids for name, ids in self.token_indices.items() if name and path.endswith(name)]
        if not named and is_embedding:
            named = [ids for name, ids in self.token_indices.items() if not name]
        if len(named) != 1:
            raise AdapterInvalidError(
                f"{CONFIG}: trainable_token_indices must name the tokens of {path} once"
            )
        return named[0]

    def scale(self, path: str, rank: int) -> float:
        """The factor of B A for the module at `path`: alpha / r, or alpha / sqrt(r) with use_rslora, where
        alpha_pattern may replace alpha; 1 if B already contains it. Raises AdapterInvalidError."""
        if self.folded:
            return 1.0
        pattern = self._alphas.first(path)
        alpha = self.alpha if pattern is None else float(self.alpha_pattern[pattern])
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank

    def check_rank(self, path: str, found: int) -> None:
        """found: the rank of the matrices. Raises AdapterInvalidError if the settings give another one."""
        if self.default_rank is not None and found != (told := self.rank(path)):
            raise AdapterInvalidError(f"{path} has rank {found}, and {CONFIG} says {told}")

    def rank(self, path: str) -> int:
        """The rank in the settings of the module or parameter at `path`. Raises AdapterInvalidError."""
        pattern = self._ranks.first(path)
        rank = self.default_rank if pattern is None else self.rank_pattern[pattern]
        if type(rank) is not int or not 0 < rank < 2**31:
            raise AdapterInvalidError(f"{CONFIG}: r of {path} must be a positive number, got {shown(rank)}")
        return rank


def config_of(settings: Mapping[str, Any]) -> PeftConfig:
    """The settings of a LoRA, of types that `read_settings` has checked. Raises AdapterInvalidError naming
    the setting that cannot be served."""
    for name in UNSUPPORTED:
        if settings.get(name):
            raise AdapterInvalidError(f"{CONFIG} sets {name}: this kind of LoRA is not supported")
    start = initial_kind(settings)
    for name, advice in CHANGED_BASE.items():
        if start.startswith(name):
            raise AdapterInvalidError(
                f"{CONFIG} sets init_lora_weights to {start[:40]}: the adapter needs a changed base model; "
                f"{advice}"
            )
    alpha = settings.get("lora_alpha")
    if alpha is None:
        raise AdapterInvalidError(f"{CONFIG}: lora_alpha must be a number, got None")
    given = settings.get("trainable_token_indices") or {}
    lists = given if isinstance(given, dict) else {"": given}
    for ids in lists.values():
        numbers = isinstance(ids, list) and all(type(i) is int and i >= 0 for i in ids)
        if not numbers or len(set(ids)) != len(ids):
            raise AdapterInvalidError(
                f"{CONFIG}: trainable_token_indices must be a list of different token ids, or map modules to "
                "such lists"
            )
    flags = ("use_rslora", "use_dora", "dora_normalized", "fan_in_fan_out", "ensure_weight_tying", SCALED)
    return PeftConfig(
        float(alpha),
        settings.get("alpha_pattern") or {},
        settings.get("r"),
        settings.get("rank_pattern") or {},
        names_in(settings, "target_parameters"),
        modules_to_save=names_in(settings, "modules_to_save"),
        token_indices={str(name): tuple(ids) for name, ids in lists.items()},
        base=str(settings.get("base_model_name_or_path") or ""),
        invocation=invocation_of(settings),
        **{name: bool(settings.get(name)) for name in flags},
    )


def names_in(settings: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """The names of modules that a setting has, which may be one or a list."""
    names = settings.get(key) or ()
    return (names,) if isinstance(names, str) else tuple(filter(None, names))


def invocation_of(settings: Mapping[str, Any]) -> tuple[int, ...]:
    """`PeftConfig.invocation` of an adapter of any type. Raises AdapterInvalidError, also for settings that
    PEFT does not combine with it."""
    if settings.get("invocation_string") and not settings.get(ALORA):
        raise AdapterInvalidError(
            f"{CONFIG} sets invocation_string, of the first activated LoRAs: set {ALORA} to its token ids"
        )
    given = settings.get(ALORA) or []
    if not given:
        return ()
    if not isinstance(given, list):
        raise AdapterInvalidError(f"{CONFIG}: {ALORA} must be a list of token ids, got {shown(given)}")
    task = settings.get("task_type") or "CAUSAL_LM"
    others = [name for name in ALONE if settings.get(name)]
    others += [f"task_type {shown(task)}"] * (task != "CAUSAL_LM")
    if others:
        raise AdapterInvalidError(f"{CONFIG} sets {ALORA} and {others[0]}: PEFT has no such activated LoRA")
    return check_invocation(given, f"{CONFIG}: {ALORA}")


LARGEST_COUNT = 2**31  # above every count and every rank
MAX_SHOWN = 5  # names in one line


def _count(value: Any) -> bool:
    return type(value) is int and 0 <= value < LARGEST_COUNT


def _number(value: Any) -> bool:
    # An integer may be too large for a float.
    return type(value) in (int, float) and -math.inf < value < math.inf and abs(value) < 2.0**1023


# What a value must be where there is one: in words, the test, the keys.
SETTING_TYPES: list[tuple[str, Callable[[Any], bool], str]] = [
    (
        "true or false",
        lambda value: type(value) is bool,
        "apply_GS block_share coft decompose_both dora_normalized ensure_weight_tying fan_in_fan_out "
        "lora_bias moe_rank_scaling para prefix_projection sample_at_inference save_indices "
        "save_only_topk_weights save_projection use_cayley_neumann use_dora use_effective_conv2d use_qalora "
        "use_rslora",
    ),
    (
        f"a count, an integer from 0 to {LARGEST_COUNT - 1}",
        _count,
        "boft_block_num boft_block_size depth encoder_hidden_size encoder_num_layers gralora_k "
        "group_size hybrid_r init_r mini_r num_attention_heads num_cayley_neumann_terms num_frozen_tokens "
        "num_layers num_transformer_submodules num_vectors num_virtual_tokens oft_block_size "
        "qalora_group_size r target_r theta_d_length token_dim topk u vector_length",
    ),
    ("a number", _number, "alpha delora_lambda eps lora_alpha lora_dropout scaling weight_tying"),
    (
        "a name, or a list of names",
        lambda value: all(isinstance(name, str) for name in (value if isinstance(value, list) else [value])),
        "exclude_modules feedforward_modules layers_pattern modules_to_save target_modules target_parameters",
    ),
    (
        "the number of a layer, or a list of them",
        lambda value: all(map(_count, value if isinstance(value, list) else [value])),
        "layers_to_transform",
    ),
    (
        "a text",
        lambda value: isinstance(value, str),
        "act_fn base_model_name_or_path bias decomposition_method peft_type peft_version revision task_type "
        "variant",
    ),
    (
        "an object",
        lambda value: isinstance(value, dict),
        "alpha_pattern arrow_config corda_config eva_config kasa_config loftq_config lora_ga_config "
        "monteclora_config rank_pattern runtime_config use_bdlora velora_config",
    ),
]
# The same of what modules are given by their names.
MODULE_SETTING_TYPES: list[tuple[str, Callable[[Any], bool], str]] = [
    (f"an integer from 1 to {LARGEST_COUNT - 1}", lambda value: _count(value) and value > 0, "rank_pattern"),
    ("a number", _number, "alpha_pattern"),
]
# Checked by the readers of their PEFT types, or without effect once the adapter is trained.
OTHER_SETTINGS = """
adapter_layers adapter_len alora_invocation_tokens auto_mapping beta1 beta2 block_size block_size_pattern
boft_dropout boft_n_butterfly_factor cpt_mask cpt_token_ids cpt_tokens_type_mask d_initial decompose_factor
deft_dropout deltaT enable_lora encoder_dropout encoder_reparameterization_type fine_tune_type
general.architecture generator_seed gralora_dropout
inference_mode init_ia3_weights init_logits_std init_lora_weights init_scale init_theta_d_bound init_v_bound
init_vector_bank_bound init_weights lambda_pattern layer_replication lora_dtype megatron_config megatron_core
merge_weights miss_dropout module_dropout opt_loss_decay_factor opt_projection_epsilon
opt_projection_format_epsilon opt_weighted_loss_type orth_reg_weight proj_seed projection_prng_key
projection_seed prompt_tuning_init prompt_tuning_init_text pvera_dropout rank_dropout rank_dropout_scale
tfinal tinit tinylora_dropout token_indices tokenizer_kwargs tokenizer_name_or_path total_step
trainable_token_indices unilora_dropout vblora_dropout vera_dropout
"""
KNOWN_SETTINGS = frozenset(OTHER_SETTINGS.split()).union(*(names.split() for *_, names in SETTING_TYPES))


def _check_types(settings: Mapping[str, Any]) -> None:
    """Raises AdapterInvalidError for a value of the wrong type. A value of null counts as absent."""
    for what, fits, names in SETTING_TYPES:
        for name in names.split():
            value = settings.get(name)
            if value is not None and not fits(value):
                raise AdapterInvalidError(f"{CONFIG}: {name} must be {what}, got {shown(value)}")
    for what, fits, name in MODULE_SETTING_TYPES:
        if name == "rank_pattern" and peft_type(settings) == "ADALORA":
            continue  # lists of the ranks that were kept, which its reader checks
        for module, value in (settings.get(name) or {}).items():
            if not fits(value):
                where = f"{name} of {module[:80]}"
                raise AdapterInvalidError(f"{CONFIG}: {where} must be {what}, got {shown(value)}")


def check_keys(settings: Mapping[str, Any], tell: Callable[[str], None]) -> None:
    """Raises AdapterInvalidError for a key of another kind of adapter. tell: as in `ReadOptions`."""
    if initial_kind(settings).startswith("lora_ga"):
        tell(
            "its training began with a base that LoRA-GA had changed; here, as in PEFT, it is added to the "
            "base as it is, which is right if that is the changed one"
        )
    unknown = sorted(name[:40] for name, value in settings.items() if name not in KNOWN_SETTINGS and value)
    for name in unknown:
        if name.startswith("use_") or name.endswith("_config"):
            raise AdapterInvalidError(
                f"{CONFIG} sets {name}, which is not supported: it may mean another kind of adapter"
            )
    if unknown:
        tell(f"{CONFIG} sets {some(unknown)}, which nobody here knows: without effect, as in PEFT")


def some(names: Iterable[object]) -> str:
    """The first few of these names, in one line."""
    texts = [str(name) for name in names]
    more = f" and {len(texts) - MAX_SHOWN} more" if len(texts) > MAX_SHOWN else ""
    return ", ".join(texts[:MAX_SHOWN]) + more
