"""Parity: compares the decoder with transformers + PEFT, for every family, kind of adapter and source.

`python tests/parity.py` prints what agrees and what is refused; docs/models.md sums it up.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from driver import Adapter, Driver, Tensors, agree
from tiny_configs import ENCODER_DECODER_FAMILIES, FAMILIES, MOE_FAMILIES
from tiny_models import make_adapter, make_model, make_nemo, make_wide, read_adapter_folder, reference_logits

from manylora.adapters.convert import write_runtime_tensors
from manylora.adapters.formats.base_weights import BaseWeights
from manylora.adapters.formats.npy import write_llgtrt, write_npy
from manylora.adapters.formats.read_options import ReadOptions
from manylora.adapters.formats.sources import find_source, read_lora
from manylora.adapters.modules import lora_modules
from manylora.checkpoints.quant.config import SERVED, QuantConfig
from manylora.config.model import ModelConfig
from manylora.errors import ManyloraError
from manylora.kernels.device import open_device
from manylora.model.checkpoint import read_model_config
from manylora.model.families import FAMILIES as ARCHITECTURES
from manylora.model.quant import EffectiveWeights
from manylora.model.weights import load_decoder

PROMPT, ENCODER_PROMPT = 60, 37  # tokens


class LayerNames(NamedTuple):
    """The last parts of a model's module names, as used in PEFT's settings.

    linears: the linear layers of a block, attention's first. layers: the list of blocks.
    """

    linears: tuple[str, ...]
    layers: str
    embedding: str
    norms: tuple[str, ...]


# Kinds of PEFT adapters. Each function returns the arguments of `make_adapter` for a model's layer names.
KINDS: dict[str, Callable[[LayerNames], dict[str, Any]]] = {
    "LoRA": lambda _: {"rank": 5},
    "rank 1": lambda _: {"rank": 1},
    "rank 64": lambda names: {"rank": 64, "modules": (names.linears[0], names.linears[-1])},
    "patterns": lambda names: {"rank": 4, **_patterns(names)},
    "some layers": lambda names: {"rank": 6, "layers_to_transform": [1], "layers_pattern": names.layers},
    "rsLoRA": lambda names: {"rank": 9, "use_rslora": True, "rank_pattern": {names.linears[-1]: 2}},
    "DoRA": lambda _: {"rank": 6, "use_dora": True},
    "DoRA + rsLoRA + patterns": lambda names: {
        "rank": 3,
        "use_dora": True,
        "use_rslora": True,
        **_patterns(names),
    },
    "bias": lambda names: {"rank": 4, "bias": "all", "modules": names.linears[1:]},
    "lora_bias": lambda _: {"rank": 4, "lora_bias": True},
    "DoRA + bias": lambda _: {"rank": 4, "bias": "lora_only", "use_dora": True},
    "embedding": lambda names: {"rank": 4, "modules": (names.linears[0], names.embedding)},
    "lm_head": lambda names: {"rank": 4, "modules": (names.linears[0], "lm_head")},
    "both + DoRA": lambda names: {
        "rank": 4,
        "modules": (names.linears[0], names.embedding, "lm_head"),
        "use_dora": True,
    },
    "modules_to_save": lambda names: {"rank": 4, "modules_to_save": [names.embedding, "lm_head"]},
    "norms saved": lambda names: {"rank": 4, "modules_to_save": list(names.norms)},
    "token indices": lambda _: {"rank": 4, "trainable_token_indices": list(range(248, 0, -3))},
}
LAYER_INPUTS = ("per_layer_model_projection", "per_layer_input_gate", "per_layer_projection")
ALTUP = ("modality_router", "prediction_coefs", "correction_coefs", "linear_left", "linear_right")
ALTUP_ENDS = ("altup_projections", "altup_unembed_projections")
REFUSED = "refused: "
WITHOUT_OUT = ("NemotronHForCausalLM", "FalconH1ForCausalLM")  # PEFT refuses out_proj there
SOURCES = ("peft", "npy", "llgtrt")
# Models that are quantised when they are loaded. The reference model has the rounded weights.
QUANTISED = {f"llama {algo}": ("llama", QuantConfig(algo)) for algo in SERVED}
NEMO = "NeMo"  # another kind, with its own sources: the archive, and the output of nemo_lora_convert
NEMO_SOURCES = ("nemo", "converted nemo")


def _patterns(names: LayerNames) -> dict[str, Any]:
    first, last, layers = names.linears[0], names.linears[-1], names.layers
    return {
        "rank_pattern": {first: 3, rf"{layers}\.1\..*{last}": 17},
        "alpha_pattern": {last: 1, f"{layers}.0.*{first}": 30},
    }


def linear_names(model: ModelConfig) -> LayerNames:
    """The names of the model's linear layers and norms, from its family."""
    family = ARCHITECTURES[model.architecture]
    names = family.names(model)
    stacks = [names] if family.encoder is None else [names, family.encoder(model)]
    norms = [n for s in stacks for n in (s.norm, s.embedding_norm, *s.block_norms.values()) if n]
    inner = model.latent or model.qk_norm not in ("", "plain")
    norms += [n for n in (names.q_norm, names.k_norm) if inner and "{}" not in n]
    linears = (*names.qkv, *names.latent, names.out, *names.up_gate, names.down)
    if (
        model.moe is not None
    ):  # PEFT would also match the experts with an MLP's names; other tests cover experts
        linears = linears[: -len(names.up_gate) - 1]
    if model.recurrent is not None:
        linears += names.recurrent_in
        if model.architecture not in WITHOUT_OUT:
            linears += (names.recurrent_out,)
    if model.layer_inputs is not None:
        norms += ["post_per_layer_input_norm", "per_layer_projection_norm"]
        linears = (linears[0], *LAYER_INPUTS, *linears[1:])
    if model.altup is not None:
        norms += ["router_norm", "post_laurel_norm"]
        ends = [f"{end}.{n}" for end in ALTUP_ENDS for n in range(model.altup.streams - 1)]
        own = LayerNames(_last_parts(linears), names.layers, names.embed, _last_parts(norms))
        return own._replace(linears=(own.linears[0], *ALTUP, *ends, *own.linears[1:]))
    return LayerNames(_last_parts(linears), names.layers, names.embed, _last_parts(norms))


def _last_parts(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name.rpartition(".")[2] for name in names))


def make_kind(path: Path, model_dir: Path, kind: str, seed: int) -> Path:
    """A PEFT adapter of one of KINDS, on all linear layers unless the kind says otherwise."""
    names = linear_names(read_model_config(model_dir))
    return make_adapter(path, model_dir, seed, **{"modules": names.linears, **KINDS[kind](names)})


def read_from(source: str, adapter: Path, model_dir: Path, quant: QuantConfig | None = None) -> Tensors:
    """A PEFT adapter's tensors, read through one of SOURCES. quant: how the base model is quantised at load
    time.

    Raises AdapterInvalidError.
    """
    config = read_model_config(model_dir)
    base = BaseWeights(model_dir, EffectiveWeights(config, quant))
    tensors = read_adapter_folder(adapter, base, lora_modules(config))
    if source == "peft":
        return tensors
    copy = adapter.with_name(f"{adapter.name}-{source}")
    if source == "npy":
        write_npy(copy, *tensors)
    else:
        write_llgtrt(copy / "adapter.safetensors", *tensors)
    return read_adapter_folder(copy)


def read_nemo_from(source: str, archive: Path, model_dir: Path) -> Tensors:
    """A NeMo archive's tensors, read through one of NEMO_SOURCES. Raises AdapterInvalidError."""
    modules = lora_modules(read_model_config(model_dir))
    if source == "nemo":
        return read_adapter_folder(archive, modules=modules)
    copy = archive.with_suffix(".npy")
    write_runtime_tensors(archive, copy, "float32")
    return read_adapter_folder(copy)


class _Comparison:
    """One variant of a model, its adapters of every kind, and the result for each."""

    def __init__(self, folder: Path, variant: str) -> None:
        family, quant = QUANTISED.get(variant, (variant, None))
        self._quant: QuantConfig | None = quant
        self._path = folder / variant
        self._model_dir = self._reference_dir = make_model(self._path, family, seed=3)
        self._config = read_model_config(self._model_dir)
        if quant is not None:
            wide, linears = folder / f"{variant}-wide", linear_names(self._config).linears
            self._reference_dir = make_wide(wide, self._model_dir, quant, linears)
        picks = random.Random(len(variant))
        self._ids = [picks.randrange(250) for _ in range(PROMPT)]
        self._text = [picks.randrange(250) for _ in range(ENCODER_PROMPT)] if self._config.encoder else []
        self._folders: dict[str, Path | None] = {"base": None}
        self._adapters: list[tuple[str, str, Adapter]] = [("base", "", None)]  # kind, source, content
        self._verdicts: dict[str, str] = {}

    def run(self) -> dict[str, str]:
        """Compare all. Returns, for `base` and each kind of adapter, `pass`, `differs` with the source, or
        the reason for a refusal.
        """
        for seed, kind in enumerate(KINDS):
            self._add_peft(seed, kind)
        self._add_nemo()
        for (kind, source, _), logits in zip(self._adapters, self._logits(), strict=True):
            folder = self._folders[kind]
            expected = reference_logits(self._reference_dir, folder, self._ids, encoder_ids=self._text)
            verdict = "pass" if agree(logits, expected) else f"differs {source}".strip()
            if self._verdicts.setdefault(kind, verdict) != verdict:
                self._verdicts[kind] = f"{self._verdicts[kind]}, {verdict}"
        return self._verdicts

    def _add_peft(self, seed: int, kind: str) -> None:
        modules = lora_modules(self._config)
        base = BaseWeights(self._model_dir, EffectiveWeights(self._config, self._quant))
        try:
            adapter = make_kind(
                self._path.with_name(f"{self._path.name}-{seed}"), self._reference_dir, kind, seed
            )
            self._folders[kind] = adapter
            whole = read_lora(find_source(adapter), 0, ReadOptions(modules, base))
            if whole.extras:
                self._adapters.append((kind, "peft", whole))
                return
            for source in SOURCES:
                self._adapters.append(
                    (kind, source, read_from(source, adapter, self._model_dir, self._quant))
                )
        except ManyloraError as error:
            self._verdicts[kind] = REFUSED + str(error).partition(": ")[2]

    def _add_nemo(self) -> None:
        config = self._config
        others = (config.encoder, config.latent, config.recurrent)
        if config.kv_readers or config.layer_shapes or any(part is not None for part in others):
            self._verdicts[NEMO] = "none"
            return
        folder = self._path.with_name(f"{self._path.name}-nemo")
        archive, self._folders[NEMO] = make_nemo(folder, self._reference_dir)
        for source in NEMO_SOURCES:
            self._adapters.append((NEMO, source, read_nemo_from(source, archive, self._model_dir)))

    def _logits(self) -> list[torch.Tensor]:
        """Logits for each adapter, up to eight adapters per batch."""
        cpu = open_device("cpu")
        decoder = load_decoder(self._model_dir, self._config, torch.float32, cpu, PROMPT, self._quant)
        found, adapters = [], [adapter for _, _, adapter in self._adapters]
        for first in range(0, len(adapters), 8):
            part = adapters[first : first + 8]
            texts = [self._text] * len(part) if self._text else ()
            found += Driver(decoder, [self._ids] * len(part), part, texts).run()
        return found


def _parse(arguments: Sequence[str]) -> Sequence[str]:
    """The variants named on the command line, or all."""
    known = (*FAMILIES, *MOE_FAMILIES, *ENCODER_DECODER_FAMILIES, *QUANTISED)
    parser = argparse.ArgumentParser(
        "python tests/parity.py",
        description="Compare tiny models of each variant with transformers and PEFT, and report differences.",
        epilog=f"variants: {', '.join(known)}",
    )
    parser.add_argument("variants", nargs="*", metavar="VARIANT", help="one of those below (default: all)")
    named: list[str] = parser.parse_args(arguments).variants
    unknown = [name for name in named if name not in known]
    if unknown:
        parser.error(f"unknown variant {unknown[0]!r}; must be one of {', '.join(known)}")
    return named or known


def report(found: Mapping[str, Mapping[str, str]]) -> str:
    """The results in Markdown. found: for each variant, the result of each kind of adapter.

    Variants with the same exceptions share a row. Reasons for refusal are footnotes, numbered from 1.
    """
    reasons: list[str] = []
    rows: dict[str, list[str]] = {}
    for variant, verdicts in found.items():
        rest: dict[str, list[str]] = {}
        for kind, verdict in verdicts.items():
            if verdict != "pass":
                rest.setdefault(_shown(verdict, reasons), []).append(kind)
        text = "; ".join(f"{', '.join(kinds)}: {verdict}" for verdict, kinds in rest.items())
        rows.setdefault(text, []).append(variant)
    lines = [f"`pass` for every kind: {', '.join(rows.pop('', ['none']))}."]
    if rows:
        lines += ["", "| models | `pass` except |", "|---|---|"]
        lines += [f"| {', '.join(variants)} | {text} |" for text, variants in rows.items()]
    for number, reason in enumerate(reasons, 1):
        lines += ["", f"({number}) {reason}"]
    return "\n".join(lines)


def _shown(verdict: str, reasons: list[str]) -> str:
    if not verdict.startswith(REFUSED):
        return verdict
    reason = verdict.removeprefix(REFUSED)
    if reason not in reasons:
        reasons.append(reason)
    return f"refused ({reasons.index(reason) + 1})"


def main(arguments: Sequence[str] = ()) -> int:
    """Print the report for all variants of models, or for the named ones. Returns 1 if something differs."""
    variants = _parse(arguments)
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # the matrices are so small that threads only wait for each other
    found: dict[str, dict[str, str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for variant in variants:
            print(variant, file=sys.stderr, flush=True)
            found[variant] = _Comparison(Path(folder), variant).run()
    print(f"Kinds: {', '.join(('base', *KINDS, NEMO))}.\n")
    print(report(found))
    print(
        f"\nSources of each kind: {', '.join(SOURCES)}; only peft if there are extras; for {NEMO}: "
        f"{', '.join(NEMO_SOURCES)}."
    )
    good = not any("differs" in verdict for verdicts in found.values() for verdict in verdicts.values())
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
