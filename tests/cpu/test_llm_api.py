"""Protects the LLM API: answers equal transformers + PEFT in any mix of adapters, through eviction, stops,
streaming and abort; what it hands through to the engine; what comes with an adapter; the examples; and what
cannot be served is an error, never another answer."""

from __future__ import annotations

import asyncio
import json
import runpy
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch
from own_text import GEMMA, shortened, with_token
from own_text import adapter as with_files
from tiny_models import make_adapter, make_model, reference_generate
from waiting import wait_for

from manylora import LLM, LoraConfig, LoRARequest, SamplingParams
from manylora._torch.peft.lora.moe_layout import make_per_expert_lora, reference_moe_lora_delta
from manylora.adapters.catalog.reader import AdapterReader
from manylora.errors import AdapterNotFoundError, ConfigError, RequestError

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "examples" / "demo"
ADAPTERS = {None: None, 1: DEMO / "adapters" / "chinese", 2: DEMO / "adapters" / "japanese"}
PROMPTS = ["美国的首都在哪里? \\n答案:", "アメリカ合衆国の首都はどこですか? \\n答え:"]
ABOUT = "日本について教えてください。 \\n答え:"
QKV = ["attn_q", "attn_k", "attn_v"]
EOS, NEW = 2, 20


def adapter(task_id: int | None) -> LoRARequest | None:
    return None if task_id is None else LoRARequest(f"adapter-{task_id}", task_id, str(ADAPTERS[task_id]))


def reference(task_id: int | None, ids: list[int]) -> list[int]:
    made = reference_generate(DEMO / "base", ADAPTERS[task_id], ids, NEW)
    return made[: made.index(EOS)] if EOS in made else made


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    config = LoraConfig(lora_target_modules=QKV, max_lora_rank=16, max_loras=2, max_cpu_loras=4)
    with LLM(DEMO / "base", lora_config=config, device="cpu") as made:
        yield made


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with six adapters of rank 8 in `a0` to `a5`, and one of rank 16 in `wide`."""
    path = tmp_path_factory.mktemp("tiny")
    make_model(path / "model", "llama", seed=4)
    for number in range(6):
        make_adapter(path / f"a{number}", path / "model", seed=number, rank=8)
    make_adapter(path / "wide", path / "model", seed=9, rank=16)
    return path


def open_tiny(tiny: Path, **options: object) -> LLM:
    config = LoraConfig(lora_target_modules=["attn_q"], max_lora_rank=8, max_loras=1, max_cpu_loras=1)
    return LLM(tiny / "model", **{"lora_config": config, "device": "cpu", **options})  # type: ignore[arg-type]


class Gate:
    """Holds the reading of adapters until it is opened, and counts it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self.opened = threading.Event()
        read = AdapterReader.read

        def gated(*what: object):
            self.count += 1
            assert self.opened.wait(60)
            return read(*what)  # type: ignore[arg-type]

        monkeypatch.setattr(AdapterReader, "read", gated)


@pytest.mark.quick
def test_a_batch_of_adapters_and_prompts_equals_the_reference(llm: LLM) -> None:
    tasks = [None, 1, 2, None, 1, 2]
    prompts = [PROMPTS[i // 3] for i in range(6)]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=NEW), [adapter(t) for t in tasks], False)
    assert isinstance(outputs, list)
    for prompt, task_id, output in zip(prompts, tasks, outputs, strict=True):
        assert output.prompt == prompt
        assert output.outputs[0].token_ids == reference(task_id, output.prompt_token_ids)
        assert output.outputs[0].finish_reason == "stop"
        assert output.finished and output.lora_request == adapter(task_id)
    for number in (0, 3):
        texts = [output.outputs[0].text.strip() for output in outputs[number : number + 3]]
        assert texts == ["Washington, D.C.", "华盛顿", "ワシントンD.C."]


def test_a_stream_adds_up_to_the_whole(llm: LLM, held_steps: Callable[[int], threading.Event]) -> None:
    """Plain and asynchronous."""
    params = SamplingParams(max_tokens=64)
    whole = llm.generate(ABOUT, params, adapter(2), False).outputs[0]

    async def astream() -> list:
        pieces, go_on = [], held_steps(3)
        result = llm.generate_async(ABOUT, params, adapter(2), streaming=True)
        async for piece in result:
            pieces.append(piece)
            go_on.set()
        assert (await result) is pieces[-1]
        return pieces

    for pieces in (
        list(llm.generate_async(ABOUT, params, adapter(2), streaming=True)),
        asyncio.run(astream()),
    ):
        assert len(pieces) > 1
        assert "".join(piece.outputs[0].text_diff for piece in pieces) == whole.text
        assert [i for piece in pieces for i in piece.outputs[0].token_ids_diff] == whole.token_ids
        assert [piece.finished for piece in pieces] == [False] * (len(pieces) - 1) + [True]


def test_the_engine_does_not_go_on_after_a_stop_text(
    llm: LLM, held_steps: Callable[[int], threading.Event]
) -> None:
    before, go_on = llm.stats().requests_cancelled, held_steps(20)
    params = SamplingParams(max_tokens=400, ignore_eos=True, stop="国")
    assert llm.generate(ABOUT, params, adapter(2), False).outputs[0].length < 10
    go_on.set()
    wait_for(lambda: llm.stats().requests_cancelled == before + 1)


def test_an_adapter_is_read_once_for_all_who_wait_for_it(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    gate.opened.set()
    with open_tiny(tiny) as llm:
        request = LoRARequest("a", 3, str(tiny / "a3"))
        llm.generate(["three"] * 20, SamplingParams(max_tokens=3), request, False)
        llm.generate("three", None, LoRARequest("a", 3, None), False)
        assert gate.count == 1


def test_reading_stalls_nobody_else(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    with open_tiny(tiny) as llm:
        waits = llm.generate_async("one", None, LoRARequest("a", 1, str(tiny / "a1")))
        assert llm.generate("one", SamplingParams(max_tokens=3), use_tqdm=False).outputs[0].length == 3
        with pytest.raises(TimeoutError, match="has not finished"):
            waits.result(timeout=0.01)
        gate.opened.set()
        assert waits.result(60).finished


@pytest.mark.usefixtures("slow_steps")
def test_abort_ends_a_request_wherever_it_is(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    long = SamplingParams(max_tokens=250, ignore_eos=True)
    with open_tiny(tiny) as llm:
        reading = llm.generate_async("one", long, LoRARequest("a", 1, str(tiny / "a1")))
        reading.abort()
        gate.opened.set()
        assert reading.result(60).outputs[0].finish_reason == "cancelled"
        stream = llm.generate_async("one", long, streaming=True)
        for piece in stream:
            if piece.outputs[0].length > 3:
                stream.abort()
        assert piece.finished and piece.outputs[0].finish_reason == "cancelled"
        assert 4 <= piece.outputs[0].length < 250
        stream.abort()
        assert llm.generate("one", SamplingParams(max_tokens=3), use_tqdm=False).outputs[0].length == 3


def test_an_id_stays_free_while_its_adapters_are_refused(tiny: Path) -> None:
    params, second = SamplingParams(max_tokens=6), LoRARequest("y", 6, str(tiny / "a2"))
    with open_tiny(tiny) as llm:
        for folder, reason in (("", "LoRA adapter: folder"), ("wide", r"Invalid low_rank \(16\)")):
            with pytest.raises(RequestError, match=reason):
                llm.generate("p", params, LoRARequest("x", 5, str(tiny / folder)), False)
        one, two = (LoRARequest("x", 5, str(tiny / name)) for name in ("a1", "a2"))
        with pytest.raises(RequestError, match="belongs to an adapter of another path"):
            llm.generate(["p", "p"], params, [one, two], False)
        answer, other = (llm.generate("p", params, lora, False) for lora in (two, second))
        assert answer.outputs[0].token_ids == other.outputs[0].token_ids


def test_an_llm_without_lora_config_refuses_adapters() -> None:
    with LLM(DEMO / "base", device="cpu", skip_tokenizer_init=True) as llm:
        with pytest.raises(RequestError, match="needs an LLM with a lora_config"):
            llm.generate([5, 6], None, adapter(1), False)
        with pytest.raises(ValueError, match=r"must be a SamplingParams, got \{'max_tokens': 4\}"):
            llm.generate([5, 6], {"max_tokens": 4}, use_tqdm=False)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="prompts must be token ids"):
            llm.generate("text", use_tqdm=False)
        output = llm.generate([1, 5, 6], SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
        assert (output.outputs[0].text, output.outputs[0].length) == ("", 4)


@pytest.mark.usefixtures("slow_steps")
def test_a_shutdown_among_callers_leaves_nobody_waiting_and_no_thread(tiny: Path) -> None:
    before = {*threading.enumerate()}
    made, results, turned_back = open_tiny(tiny), [], []
    adapters = [LoRARequest(f"a{i}", i, str(tiny / f"a{i}")) for i in range(6)]

    def call(first: int) -> None:
        for i in count():
            try:
                request = adapters[(first + i) % 6] if i % 2 else None
                results.append(made.generate_async("one", SamplingParams(max_tokens=3), request))
            except RequestError as error:
                turned_back.append(str(error))
                return

    callers = [threading.Thread(target=call, args=(i,)) for i in range(4)]
    for caller in callers:
        caller.start()
    wait_for(lambda: len(results) >= 40)
    results.append(made.generate_async("one", SamplingParams(max_tokens=200, ignore_eos=True)))
    made.shutdown()
    made.shutdown()
    for caller in callers:
        caller.join()
    left = [one.name for one in threading.enumerate() if one not in before]
    assert not [name for name in left if name.startswith("manylora-")]
    assert turned_back == ["this LLM has been shut down"] * 4
    reasons = set()
    for result in results:
        try:
            reasons.add(result.result(60).outputs[0].finish_reason)
        except RequestError as error:
            reasons.add(str(error))
    assert reasons <= {"length", "cancelled", "this LLM has been shut down"} and "cancelled" in reasons


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("single_adapter", ["Answer: 巴黎"]),
        ("many_adapters", ["base: Tokyo", "task-1: 东京", "task-2: 東京"]),
        ("cache_management", ["カイロ", "1 adapter in"]),
        ("quantised", ["カイロ", "MB of weights"]),
        ("nemo_adapter", ["カイロ"]),
        ("streaming", ["chinese: '罗'", "japanese: 'ナ'"]),
        ("moe_adapters", ["base: ", "first: ", "second: "]),
    ],
)
def test_the_examples_run(script: str, expected: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "examples" / "llm_api" / f"{script}.py"), run_name="__main__")
    said = capsys.readouterr().out
    assert all(text in said for text in expected)


def test_a_process_that_forgets_to_shut_down_ends_well() -> None:
    script = ROOT / "examples" / "llm_api" / "single_adapter.py"
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=240, check=False)
    assert (done.returncode, done.stderr) == (0, "")


IDS = [72, 101, 108, 108, 111, 33, 5, 9, 77]


@pytest.fixture(scope="module")
def plain(tiny: Path) -> Iterator[LLM]:
    with LLM(tiny / "model", device="cpu", dtype="float32") as made:
        yield made


def ask(llm: LLM, lora: LoRARequest | None = None, prompt: object = IDS, **options: object):
    params = SamplingParams(**{"max_tokens": 10, **options})  # type: ignore[arg-type]
    return llm.generate(prompt, params, lora, use_tqdm=False)  # type: ignore[arg-type]


def test_beams_stop_at_tokens_and_at_the_models_longest_sequence(plain: LLM) -> None:
    greedy = ask(plain, ignore_eos=True).outputs[0].token_ids
    stopped = ask(plain, use_beam_search=True, n=2, stop_token_ids=[greedy[2]], ignore_eos=True).outputs
    reasons = [one.stop_reason for one in stopped if one.finish_reason == "stop"]
    assert reasons and set(reasons) == {greedy[2]}
    assert all(greedy[2] not in one.token_ids for one in stopped)
    near_the_end = ask(plain, prompt=[7] * 250, use_beam_search=True, n=2, ignore_eos=True).outputs
    assert [(one.length, one.finish_reason) for one in near_the_end] == [(6, "length")] * 2
    with pytest.raises(ValueError, match="cannot stream"):
        plain.generate_async(IDS, SamplingParams(use_beam_search=True, n=2), streaming=True)
    result = plain.generate_async(IDS, SamplingParams(use_beam_search=True, n=2, max_tokens=200))
    result.abort()
    assert result.result(60).outputs[0].finish_reason in ("cancelled", "stop", "length")


def test_logits_fit_the_tokens_where_a_text_ends_the_output(plain: LLM) -> None:
    bias = torch.zeros(272)
    bias[65] = 1000  # b
    options = {"embedding_bias": bias, "stop": "bbb", "return_generation_logits": True, "max_tokens": 200}
    one = ask(plain, **options).outputs[0]
    assert (one.text, one.length, one.stop_reason) == ("", 3, "bbb")
    assert one.generation_logits is not None and one.generation_logits.shape == (3, 272)
    params = SamplingParams(**options)  # type: ignore[arg-type]
    pieces = list(plain.generate_async(IDS, params, streaming=True))
    assert [piece.finished for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    np.testing.assert_array_equal(pieces[-1].outputs[0].generation_logits, one.generation_logits)
    assert ask(plain).outputs[0].generation_logits is None


def test_metrics_tell_times_and_where_the_adapter_was(tiny: Path) -> None:
    config = LoraConfig(lora_target_modules=QKV, max_lora_rank=8, max_loras=1, max_cpu_loras=8)
    with LLM(tiny / "model", lora_config=config, device="cpu") as llm:
        requests = [LoRARequest(f"a{i}", i, str(tiny / f"a{i}")) for i in (2, 2, 3, 4, 5, 2)]
        outputs = [ask(llm), *(ask(llm, request) for request in requests)]
        tiers = [output.adapter_tier for output in outputs]
        assert tiers == ["", "disk", "device", "disk", "disk", "disk", "host"]
    for output in outputs:
        assert output.metrics is not None and output.metrics.output_tokens == output.outputs[0].length
        times = output.timings
        assert times.first_token is not None and times.finished is not None
        assert 0 < times.first_token < times.finished


TEMPLATE = "{% for m in messages %}{{ m['content'] }}\nAnswer:{% endfor %}{{ more }}"
QUESTION = "What is the capital of France?"
CHAT = [{"role": "user", "content": QUESTION}]
GREEDY = SamplingParams(max_tokens=4)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("adapters")
    spec, settings = shortened(), (DEMO / "base" / "tokenizer_config.json").read_text()
    (root / "base").mkdir()
    (root / "base" / "tokenizer.json").write_text(json.dumps(spec))
    (root / "base" / "tokenizer_config.json").write_text(settings)
    own = with_token(spec, "<|sql|>")
    files = {"chat_template": TEMPLATE, "generation_config": {"max_new_tokens": 3, "stop_strings": ["巴"]}}
    with_files(root / "ours" / "team" / "zh", **files, tokenizer=own)
    with_files(root / "theirs" / "zh", **files, tokenizer=own)
    with_files(root / "ours" / "bad", generation_config={"num_beams": 4})
    with_files(root / "ours" / "plain")
    return root


@pytest.fixture(scope="module")
def named(root: Path) -> Iterator[LLM]:
    with LLM(
        DEMO / "base",
        tokenizer=root / "base",
        lora_config=LoraConfig(max_lora_rank=16, max_loras=4),
        lora_root=[root / "ours", root / "theirs"],
        lora_trust=str(root / "ours"),
        lora_alias={"chinese": "team/zh"},
        device="cpu",
    ) as made:
        yield made


def test_a_name_is_the_adapter_below_the_root(named: LLM, root: Path) -> None:
    assert named.lora_names() == ["bad", "chinese", "plain", "team/zh", "zh"]
    path = LoRARequest("by path", 7, str(root / "ours" / "plain"))
    prompts = [f"{QUESTION}\nAnswer:"] * 4
    outputs = named.generate(prompts, GREEDY, lora_request=[path, "plain", ("plain", 1), None])
    texts = [one.outputs[0].text for one in outputs]
    assert texts[0] == texts[1] == texts[2] != texts[3]
    pairs = [("plain", 0.5), ("zh", 0.5)]
    assert named.generate(prompts[0], GREEDY, pairs).outputs[0].text == texts[0]
    assert named.generate_async(prompts[0], GREEDY, "plain").result().outputs[0].text == texts[0]
    for wrong in ("nothing", "../ours/plain", "/etc", "", "ours\0"):
        with pytest.raises(AdapterNotFoundError):
            named.generate(prompts[0], GREEDY, wrong)


def test_a_chat_has_the_template_of_its_adapter_where_that_is_trusted(named: LLM) -> None:
    base = "<s><|user|>What is the capital of France?<|assistant|>"
    names = ["team/zh", "chinese", "zh", "plain", None]
    outputs = named.chat([CHAT] * 5, GREEDY, names)
    assert [one.prompt for one in outputs] == [f"{QUESTION}\nAnswer:"] * 2 + [base] * 3
    assert named.chat(CHAT, GREEDY, "chinese").outputs[0].token_ids == outputs[0].outputs[0].token_ids
    assert outputs[2].prompt_token_ids == named.tokenizer.encode(base, False)
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert named.chat(parts, GREEDY, "chinese", chat_template_kwargs={"more": "!"}).prompt == "a\nb\nAnswer:!"
    tools = [{"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}]
    told = named.chat(CHAT[-1:], GREEDY, chat_template=GEMMA, tools=tools).prompt
    assert told.startswith("<s><start_of_turn>user\nYou can call") and '"clock"' in told
    own = named.chat(CHAT, GREEDY, chat_template="{{ messages[0].role }}{{ add_generation_prompt }}")
    assert own.prompt == "userTrue"
    begun = [*CHAT, {"role": "assistant", "content": "It is"}]
    goes_on = named.chat(begun, GREEDY, add_generation_prompt=False, continue_final_message=True)
    assert goes_on.prompt.endswith("It is")


def test_the_models_own_values_hold_where_params_are_silent() -> None:
    override = {"temperature": 5.0, "max_new_tokens": 5}
    with LLM(DEMO / "base", device="cpu", override_generation_config=override) as made:
        assert made.get_default_sampling_params() == SamplingParams(temperature=5.0, max_tokens=5)
        assert made.generate([5, 6], None, use_tqdm=False).outputs[0].length <= 5
        asked = [SamplingParams(max_tokens=9, ignore_eos=True, seed=seed) for seed in range(4)]
        assert len({str(one.outputs[0].token_ids) for one in made.generate([[5, 6]] * 4, asked)}) > 1
        greedy = [SamplingParams(max_tokens=9, temperature=0.0, seed=seed) for seed in range(4)]
        assert len({str(one.outputs[0].token_ids) for one in made.generate([[5, 6]] * 4, greedy)}) == 1
    with pytest.raises(ConfigError, match="temprature is not supported"):
        LLM(DEMO / "base", device="cpu", override_generation_config={"temprature": 1})


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("moe-api") / "base", "qwen3-moe", seed=2)


def experts_config(**options: object) -> LoraConfig:
    targets = [*QKV, "moe_gate", "moe_4h_to_h", "moe_h_to_4h"]
    settings = {"lora_target_modules": targets, "max_lora_rank": 16, "max_loras": 8, "max_cpu_loras": 8}
    return LoraConfig(**{**settings, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize("inferred", [False, True])
def test_adapters_of_experts_are_served_as_any_others(inferred: bool, base: Path, tmp_path: Path) -> None:
    """inferred: their targets, from an adapter."""
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    adapters = [
        make_adapter(tmp_path / "a", base, 1, rank=4, target_parameters=experts),
        make_adapter(tmp_path / "b", base, 2, rank=16, target_parameters=experts[1:], modules=("v_proj",)),
    ]
    given: dict[str, object] = {
        "trtllm_modules_to_hf_modules": {"moe_h_to_4h": "mlp.experts.gate_proj", "moe_4h_to_h": ["w2"]}
    }
    if inferred:
        given = {"lora_target_modules": [], "lora_dir": [str(adapters[0])]}
    with LLM(model=str(base), lora_config=experts_config(**given), moe_backend="CUTLASS") as llm:
        requests = [None, *(LoRARequest(path.name, i, str(path)) for i, path in enumerate(adapters, 1))]
        params = SamplingParams(max_tokens=12, ignore_eos=True)
        outputs = llm.generate(["one prompt"] * 3, params, lora_request=requests, use_tqdm=False)
    for output, adapter in zip(outputs, [None, *adapters], strict=True):
        expected = reference_generate(base, adapter, output.prompt_token_ids, 12)
        assert output.outputs[0].token_ids == expected


def test_other_backends_are_refused(base: Path) -> None:
    with pytest.raises(ConfigError, match="Routed-expert MoE LoRA requires moe_backend='CUTLASS'; got "):
        LLM(base, lora_config=experts_config(), moe_backend="TRITON")
    with pytest.raises(ConfigError, match="moe_backend must be 'CUTLASS' or left out"):
        LLM(base, moe_backend="TRITON")


def test_synthetic_adapters() -> None:
    made = make_per_expert_lora(num_experts=8, rank=16, in_dim=2048, out_dim=5632, dtype=torch.bfloat16)
    assert made["A"].shape == (8, 16, 2048) and made["B"].shape == (8, 5632, 16)
    assert made["A"].dtype == torch.bfloat16
    small = make_per_expert_lora(4, 8, 64, 128, shared_side="A", seed=3, dtype=torch.float32)
    again = make_per_expert_lora(4, 8, 64, 128, shared_side="A", seed=3, dtype=torch.float32)
    assert all(torch.equal(small[side], again[side]) for side in "AB")
    assert all(torch.equal(small["A"][e], small["A"][0]) for e in range(4))
    assert not torch.equal(small["B"][1], small["B"][0])
    with pytest.raises(ValueError, match="shared_side"):
        make_per_expert_lora(4, 8, 64, 128, shared_side="C")
    x, chosen = torch.randn(5, 64), torch.tensor([0, 1, 2, 0, 1])
    delta = reference_moe_lora_delta(small["A"], small["B"], x, chosen)
    for t, e in enumerate(chosen.tolist()):
        torch.testing.assert_close(delta[t], small["B"][e] @ (small["A"][e] @ x[t]), rtol=1e-4, atol=1e-4)
    doubled = reference_moe_lora_delta(small["A"], small["B"], x, chosen, scale=2)
    torch.testing.assert_close(doubled, 2 * delta)
