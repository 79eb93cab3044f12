"""manylora verify: whether a model and its adapters are served as transformers + PEFT compute them."""

from __future__ import annotations

import argparse
import gc
import json
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from manylora.checkpoints.gguf.config import linked_files
from manylora.config.model_folder import local_adapter, local_model
from manylora.doors.cli.chat import adapter_of, ask_server
from manylora.errors import ConfigError, RequestError
from manylora.generation.outputs import from_logits
from manylora.generation.tokenizer import Tokenizer
from manylora.system.command_line import Parser

if TYPE_CHECKING:
    import torch

    from manylora.config.model import ModelConfig

DESCRIPTION = """Compare the log probabilities that a served model gives, with each adapter, with those of
transformers + PEFT in float32. The noise floor is how far the served base model is from them, and the
reference itself in the served dtype. Status 0: all agree within it; 1: one does not; 2: not compared."""
PROMPTS = (
    "The capital of France is Paris. The capital of Japan is",
    "Question: A train leaves at 9:40 and arrives at 11:15. How long does it travel?\nAnswer:",
    "def fibonacci(n: int) -> int:\n    if n < 2:\n        return n\n",
    '{"name": "Ada", "age": 36, "languages": ["English", "French"], "city":',
    "Dear Sir or Madam,\n\nI am writing to complain about the delay of my order, which was due",
    "SELECT customer, SUM(amount) FROM orders WHERE year = 2024 GROUP BY",
    "Übersetze ins Deutsche: The weather is nice today. →",
    "Once upon a time there was a king who had three daughters. The youngest",
)
BASE = "base model"
TOKENS = 16  # that a served model adds to each prompt: they are compared too
AT_ONCE = 8  # adapters in one batch, so that mixed batches are what is compared
FACTOR = 3.0  # of the noise floor that is allowed
LEAST = {"max": 0.02, "mean": 0.002}  # allowed in any case: adapters may be rounded to 16 bits
Prompts = Sequence[tuple[int, ...]]
Scored = tuple[Sequence[int], np.ndarray]
"""A text's token ids, and the log probability of each after the first."""
Served = tuple[dict[str, list[Scored]], dict[str, str], "torch.dtype"]
"""By name what was served, and why not; the dtype that was computed in."""


def _parser() -> Parser:
    parser = Parser(prog="manylora verify", description=DESCRIPTION)
    add: Callable[..., Any] = parser.add_argument
    add("model", metavar="MODEL", help="Hugging Face folder, GGUF file, or hub id org/name")
    adapter = "an adapter; PATH: a PEFT folder or hub id. NAME alone: one in --lora-root. May be repeated"
    add(
        "--lora",
        "--lora-modules",
        action="extend",
        nargs="+",
        default=[],
        metavar="NAME[=PATH]",
        help=adapter,
    )
    add("--lora-root", type=Path, metavar="FOLDER", help="folder with one adapter per subfolder")
    add("--reference", choices=("hf",), default="hf", help="transformers + PEFT")
    other = "the base model for the reference, if transformers cannot read MODEL"
    add("--reference-model", metavar="MODEL", help=other)
    add("--prompts", type=Path, metavar="FILE", help="a prompt per line; default: eight short texts")
    add(
        "--tolerance", type=float, metavar="X", help="largest difference allowed; default: by the noise floor"
    )
    add("--device", help="of the served model: auto, cpu, cuda, cuda:N; not with --url")
    dtypes = ("auto", "float32", "float16", "bfloat16")
    add("--dtype", choices=dtypes, help="of the served model; with --url: for the noise floor only")
    add("--url", metavar="ADDRESS", help="a running server with OpenAI's API; its key: OPENAI_API_KEY")
    add(
        "--model",
        dest="served",
        metavar="NAME",
        help="with --url: the base model's name there; default: its first",
    )
    add("--json", action="store_true", help="print the report as JSON")
    return parser


def main(arguments: list[str]) -> int:
    options = _parser().parse_args(arguments)
    if options.url and options.device:
        raise ConfigError("--device is of a model that is served here: leave it out, or --url")
    if options.served and not options.url:
        raise ConfigError("--model is a name at a running server: give --url too")
    adapters = _adapters(options)
    prompts: Sequence[str] = PROMPTS
    if options.prompts is not None:
        lines = options.prompts.read_text(encoding="utf-8").splitlines()
        prompts = [line for line in lines if line.strip()]
    folder = local_model(options.model)
    reference = folder if options.reference_model is None else local_model(options.reference_model)
    import peft  # noqa: F401 - before the model is served
    import torch
    import transformers  # noqa: F401

    from manylora.model.checkpoint import read_model_config

    config = read_model_config(folder)
    if config.encoder is not None or not config.makes_text:
        raise ConfigError(f"{folder} is no decoder that makes text: its log probabilities cannot be compared")
    warnings.simplefilter("ignore")  # of these libraries
    tokenizer = Tokenizer(folder)
    ids = [tuple(tokenizer.encode(text)) for text in prompts]
    if min(map(len, ids), default=0) < 2:
        raise ConfigError(f"{options.prompts}: each line is a prompt, and must have at least two tokens")
    _say(f"serving {options.model} …")
    serve = _by_server if options.url else _by_llm
    served, problems, dtype = serve(options, config, adapters, ids)
    if options.dtype not in (None, "auto"):  # weights were rounded to it, whatever is computed in
        dtype = getattr(torch, options.dtype)
    gc.collect()
    return _report(options, _compare(reference, adapters, served, problems, dtype), dtype)


def _adapters(options: argparse.Namespace) -> dict[str, Path]:
    """Raises ConfigError."""
    root = options.lora_root
    given = [adapter_of(one, below_root=root is not None) for one in options.lora]
    if root is not None and not given:
        given = [(file.parent.name, "") for file in sorted(root.glob("*/adapter_config.json"))]
        if not given:
            raise ConfigError(f"--lora-root {root} has no folders with an adapter_config.json")
    return {name: local_adapter(path or root / name) for name, path in given}


def _by_llm(
    options: argparse.Namespace, config: ModelConfig, adapters: Mapping[str, Path], ids: Prompts
) -> Served:
    """All adapters together, in this process. Raises ConfigError, RequestError."""
    from manylora.doors.python.llm import LLM
    from manylora.doors.python.llm_args import LoRARequest
    from manylora.generation.sampling import SamplingParams
    from manylora.kernels.device import open_device
    from manylora.model.weights import compute_dtype

    params = SamplingParams(max_tokens=TOKENS, logprobs=0, return_context_logits=True)
    found: dict[str, list[Scored]] = {BASE: []}
    problems: dict[str, str] = {}
    with LLM(
        options.model,
        enable_lora=True if adapters else None,
        max_batch_size=AT_ONCE,
        max_seq_len=min(config.max_seq_len, max(map(len, ids)) + TOKENS),
        device=options.device,
        dtype=options.dtype,
    ) as llm:
        chosen: dict[str, LoRARequest | None] = {BASE: None}
        for number, (name, path) in enumerate(adapters.items(), 1):
            request = LoRARequest(name, number, str(path))
            try:
                llm.generate([list(ids[0])], SamplingParams(max_tokens=1), request, use_tqdm=False)
            except RequestError as error:
                problems[name] = f"it is not served: {error}"
            else:
                chosen[name], found[name] = request, []
        names = list(chosen)
        for prompt in ids:
            for start in range(0, len(names), AT_ONCE):
                some = names[start : start + AT_ONCE]
                asked = [list(prompt)] * len(some), params, [chosen[name] for name in some]
                outputs = llm.generate(*asked, use_tqdm=False)
                assert isinstance(outputs, list)
                for name, output in zip(some, outputs, strict=True):
                    made = output.outputs[0]
                    assert output.context_logits is not None and made.logprobs is not None
                    values = [one.logprob for one in from_logits(prompt[1:], output.context_logits, 0)]
                    pairs = zip(made.token_ids, made.logprobs, strict=False)
                    values += [known[one].logprob for one, known in pairs]
                    found[name].append(((*prompt, *made.token_ids), np.array(values)))
        dtype = compute_dtype(llm.config.dtype, config, open_device(llm.config.device))
    return found, problems, dtype


def _by_server(
    options: argparse.Namespace, config: ModelConfig, adapters: Mapping[str, Path], ids: Prompts
) -> Served:
    """Prompts only, one after the other. Raises RequestError for the base model."""
    import torch

    url, base = options.url, options.served
    if base is None:
        with ask_server(url, "models") as answer:
            base = next((one["id"] for one in json.load(answer)["data"] if not one.get("parent")), "")
    found, problems = {BASE: [_ask(url, base, one) for one in ids]}, {}
    for name in adapters:
        try:
            found[name] = [_ask(url, name, one) for one in ids]
        except RequestError as error:
            problems[name] = f"it is not served: {error}"
    return found, problems, getattr(torch, config.dtype)


def _ask(url: str, model: str, ids: Sequence[int]) -> Scored:
    """Raises RequestError."""
    asked = {"model": model, "prompt": list(ids), "max_tokens": 1, "temperature": 0}
    with ask_server(url, "completions", {**asked, "echo": True, "logprobs": 1}) as answer:
        found = json.load(answer)["choices"][0].get("logprobs") or {}
    known = (found.get("token_logprobs") or [])[1 : len(ids)]
    if len(known) != len(ids) - 1 or None in known:
        raise RequestError("the server gives no log probabilities of prompts (echo with logprobs)")
    return ids, np.array(known)


def _compare(
    folder: Path,
    adapters: Mapping[str, Path],
    served: Mapping[str, list[Scored]],
    problems: dict[str, str],
    dtype: torch.dtype,
) -> list[dict[str, Any]]:
    """A row for the report of each. One reference model at a time is in memory. Raises ConfigError."""
    import torch

    known: dict[torch.dtype, dict[str, list[Scored]]] = {torch.float32: {}, dtype: {}}
    plain: dict[str, list[Scored]] = {}  # the same texts without the adapter
    for kind, found in known.items():
        _say(f"computing the reference in {_name(kind)} …")
        model = _load(folder, kind)
        before = _reference(model, None, served[BASE][:1])[0][1]
        for name, texts in served.items():
            if kind == torch.float32:
                plain[name] = _reference(model, None, texts)
            try:
                found[name] = _reference(model, adapters.get(name), texts)
                after = _reference(model, None, served[BASE][:1])[0][1]
            except Exception as error:  # PEFT has no class of its own for what it cannot read
                problems[name] = f"PEFT cannot read it: {type(error).__name__}: {str(error)[:300]}"
                after = before[:0]
            if not np.array_equal(before, after):  # it left a bias, or a module that was saved, in the base
                del model
                model = _load(folder, kind)
        del model
        gc.collect()
    exact = known[torch.float32]
    base, rows = _difference(served[BASE], exact[BASE]), []
    for name, texts in served.items():
        if name not in problems:
            noise = _difference(known[dtype][name], exact[name])
            if name != BASE:
                noise = {one: max(value, base[one]) for one, value in noise.items()}
            row = {"served": _difference(texts, exact[name]), "noise": noise}
            rows.append({"name": name, **row, "effect": _difference(exact[name], plain[name])})
    return rows + [{"name": name, "problem": problem} for name, problem in problems.items()]


def _difference(some: Sequence[Scored], others: Sequence[Scored]) -> dict[str, float]:
    """The largest and the mean one of log probabilities. What is no number is infinitely far."""
    apart = np.concatenate([np.abs(a - b) for (_, a), (_, b) in zip(some, others, strict=True)])
    apart = np.where(np.isnan(apart), np.inf, apart)
    return {"max": float(apart.max()), "mean": float(apart.mean()), "tokens": len(apart)}


def _agrees(row: Mapping[str, Any], tolerance: float | None) -> bool:
    """tolerance: the largest difference allowed, instead of a multiple of the noise floor."""
    if "problem" in row:
        return False
    if tolerance is not None:
        return bool(row["served"]["max"] <= tolerance)
    return all(row["served"][one] <= max(least, FACTOR * row["noise"][one]) for one, least in LEAST.items())


def _load(folder: Path, dtype: torch.dtype) -> Any:
    """Raises ConfigError."""
    import transformers

    files = linked_files(folder)
    source = {"gguf_file": files[0].resolve().name} if files else {}
    where = files[0].resolve().parent if files else folder
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        load = transformers.AutoModelForCausalLM.from_pretrained
        return load(where, dtype=dtype, low_cpu_mem_usage=True, **source).eval()
    except (ValueError, KeyError, OSError, ImportError, NotImplementedError) as error:
        reason = f"transformers cannot read {where}: {str(error)[:300]}; name another with --reference-model"
        raise ConfigError(reason) from error


def _reference(model: Any, adapter: Path | None, texts: Sequence[Scored]) -> list[Scored]:
    """Raises ValueError if PEFT leaves tensors of the adapter's file out, and what PEFT raises."""
    import peft
    import torch

    adapted, found = model, []
    try:
        if adapter is not None:
            config = peft.PeftConfig.from_pretrained(str(adapter))
            config.inference_mode = True
            adapted = peft.get_peft_model(model, config)
            left = adapted.load_adapter(str(adapter), "default").unexpected_keys
            if left:
                raise ValueError(f"it leaves out {len(left)} tensors, as {left[0]}")
        adapted.eval()
        with torch.inference_mode():
            for ids, _ in texts:
                given = torch.tensor([list(ids)])
                values = adapted(given).logits[0, -len(ids) : -1].float().log_softmax(-1)
                found.append((ids, values.gather(1, given[0, 1:, None])[:, 0].numpy()))
    finally:
        if adapted is not model and hasattr(adapted.base_model, "unload"):
            adapted.unload()
    return found


def _report(options: argparse.Namespace, rows: list[dict[str, Any]], dtype: torch.dtype) -> int:
    """Print it, and return the exit status."""
    for row in rows:
        row["verdict"] = "PASS" if _agrees(row, options.tolerance) else "FAIL"
    failed = sum(row["verdict"] == "FAIL" for row in rows)
    if options.json:
        shown = {"model": options.model, "dtype": _name(dtype), "reference": "float32", "results": rows}
        print(json.dumps(shown | {"verdict": "FAIL" if failed else "PASS"}, indent=2))
        return int(failed > 0)
    width = max(len(row["name"]) for row in rows)
    print(f"log probabilities served in {_name(dtype)}: differences from transformers + PEFT in float32")
    heads = ("max", "mean", "noise max", "noise mean", "effect")
    print(f"{'':<{width}}" + "".join(f"{head:>12}" for head in heads))
    for row in rows:
        if "problem" in row:
            print(f"{row['name']:<{width}}  {row['verdict']}: {row['problem']}")
            continue
        noise, effect = row["noise"], row["effect"]["mean"]
        numbers = [*(row[one][of] for one in ("served", "noise") for of in LEAST), effect]
        little = row["name"] != BASE and effect < max(LEAST["mean"], FACTOR * noise["mean"])
        hint = ": the adapter changes less than this can tell" if little else ""
        texts = "".join(f"{number:>12.2g}" for number in numbers)
        print(f"{row['name']:<{width}}{texts}  {row['verdict']}{hint}")
    print(f"FAIL: {failed} of {len(rows)} differ by more than the noise" if failed else "PASS")
    return int(failed > 0)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
