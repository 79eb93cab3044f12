"""Protects the benchmark's arithmetic and its files: every figure against timings made by hand, the dataset
line to the letter, traffic shapes, options files; and that `bench --help` costs no torch."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from manylora import LoRARequest
from manylora.bench.datasets import (
    POPULARITIES,
    BenchRequest,
    adapters_of,
    normal_lengths,
    random_requests,
    read_dataset,
    spread,
    to_line,
    uniform_lengths,
    with_adapters,
)
from manylora.bench.report import (
    Answer,
    Record,
    dataset_details,
    issue_rate,
    measure,
    percentiles,
    render,
    tier_figures,
)
from manylora.bench.run import run_load
from manylora.cli import COMMANDS, main
from manylora.errors import ConfigError
from manylora.llmapi.options import llm_arguments, read_options

DEMO = Path(__file__).resolve().parents[2] / "examples" / "demo"


def request(task_id: int = 0, adapter: int | None = None, **options: object) -> BenchRequest:
    lora = None if adapter is None else LoRARequest(f"lora_{adapter}", adapter, None)
    values = {"prompt": None, "input_ids": (1, 2, 3), "output_tokens": 4, "lora": lora, **options}
    return BenchRequest(task_id, **values)  # type: ignore[arg-type]


def record(
    start: float, first: float | None, end: float, inputs: int, outputs: int, tier: str = "", task_id: int = 0
) -> Record:
    answer = Answer(first, inputs, outputs, adapter_tier=tier)
    return Record(request(task_id, 1 if tier else None), start, end, answer)


def test_the_golden_dataset_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "loras" / "1").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    made = BenchRequest(3, None, (5, 6), 7, LoRARequest("lora_1", 1, "loras/1"))
    line = (
        '{"task_id":3,"input_ids":[5,6],"output_tokens":7,'
        '"lora_request":{"lora_name":"lora_1","lora_int_id":1,"lora_path":"loras/1"}}'
    )
    assert to_line(made) == line
    Path("data").write_text(f"{line}\n\n{to_line(request())}\n")
    assert read_dataset(Path("data")) == [made, request()]
    assert read_dataset(Path("data"), 1) == [made]


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("{}", "prompt, input_ids, and turns for task -1 are all None."),
        ('{"task_id":7}', "prompt, input_ids, and turns for task 7 are all None."),
        ('{"prompt":"a"}', "output_tokens must be a number of tokens, at least 1, got None"),
        ('{"input_ids":[],"output_tokens":1}', "input_ids must be a list of token ids"),
        ('{"prompt":"a","output_tokens":1,"lora_request":{"lora_name":"a","lora_int_id":1}}', "lora_path ()"),
        ('{"turns":["a"],"output_tokens":1}', "turns is not supported"),
        ("[]", "a line must be a JSON object"),
        ("{", "line 1 is not JSON"),
        ("", "holds no request"),
    ],
)
def test_a_line_that_cannot_be_sent_is_named(tmp_path: Path, line: str, text: str) -> None:
    path = tmp_path / "data"
    path.write_text(line + "\n")
    with pytest.raises(ConfigError) as error:
        read_dataset(path)
    assert text in str(error.value)


def test_logits_is_another_name_of_input_ids_and_too_few_lines_are_an_error(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_text('{"task_id":0,"logits":[4],"output_tokens":1}\n')
    assert read_dataset(path)[0].input_ids == (4,)
    with pytest.raises(ConfigError, match="fewer than --num_requests"):
        read_dataset(path, 2)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_dataset(tmp_path / "none")


def test_popularities_have_their_shape() -> None:
    rng, adapters = random.Random(1), list("abcd")
    assert spread("distinct", adapters, 6, rng) == list("abcdab")
    assert spread("identical", adapters, 3, rng) == list("aaa")
    uniform = Counter(spread("uniform", adapters, 4000, rng))
    assert all(900 < uniform[name] < 1100 for name in adapters)
    zipf = Counter(spread("zipf", adapters, 4000, rng))
    weights = [k**-1.5 for k in (1, 2, 3, 4)]
    for name, weight in zip(adapters, weights, strict=True):
        assert zipf[name] == pytest.approx(4000 * weight / sum(weights), rel=0.15)
    for name in POPULARITIES:
        assert spread(name, adapters, 9, random.Random(2)) == spread(name, adapters, 9, random.Random(2))
    with pytest.raises(ValueError, match="must be one of"):
        spread("hot", adapters, 1, rng)


def test_random_requests_have_the_lengths_and_adapters_asked_for() -> None:
    def make(rng: random.Random) -> list[BenchRequest]:
        adapters = [None, LoRARequest("lora_1", 1, None)]
        return random_requests(300, normal_lengths(20, 2), uniform_lengths(3, 5), 100, rng, adapters)

    made = make(random.Random(4))
    assert made == make(random.Random(4))
    assert [r.task_id for r in made] == list(range(300))
    lengths = [len(r.input_ids or ()) for r in made]
    assert sum(lengths) / 300 == pytest.approx(20, abs=0.5)
    assert {r.output_tokens for r in made} == {3, 4, 5}
    assert all(0 <= token < 100 for r in made for token in r.input_ids or ())
    assert 100 < sum(r.lora is None for r in made) < 200
    assert adapters_of(made) == [LoRARequest("lora_1", 1, None)]
    assert normal_lengths(-5, 0)(random.Random(0)) == 1


def test_prepare_dataset_writes_what_bench_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(3):
        (tmp_path / "loras" / str(number)).mkdir(parents=True)
    file = tmp_path / "data.jsonl"
    flags = ["--output", str(file), "--rand-task-id", "0", "2", "--lora-dir", str(tmp_path / "loras")]
    lengths = ["--input-mean", "9", "--input-stdev", "1", "--output-mean", "5", "--output-stdev", "0"]
    kind = ["token-norm-dist", "--num-requests", "20", *lengths]
    assert main(["bench", "--model", str(DEMO / "base"), "prepare-dataset", *flags, *kind]) == 0
    made = read_dataset(file)
    assert len(made) == 20 and {r.output_tokens for r in made} == {5}
    assert {r.lora.lora_path for r in made if r.lora} == {str(tmp_path / "loras" / str(i)) for i in range(3)}
    direct = ["prepare-dataset", "--tokenizer", str(DEMO / "base"), "--stdout"]
    uniform = ["token-unif-dist", "--num-requests", "2", "--input-min", "3", "--input-max", "3"]
    assert main([*direct, *uniform, "--output-min", "1", "--output-max", "1"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [len(line["input_ids"]) for line in lines] == [3, 3] and "lora_request" not in lines[0]
    assert main([*direct, "--task-id", "9", *kind]) == 1
    assert "need --lora-dir" in capsys.readouterr().err
    assert main([*direct, "--task-id", "9", "--lora-dir", str(tmp_path), *kind]) == 1
    assert "does not exist" in capsys.readouterr().err


# Three requests: from 10.0, 10.5 and 11.0 s, with their first tokens after 0.1, 0.2 and 0.3 s.
RECORDS = [
    record(10.0, 10.1, 11.1, 10, 11, "", 0),
    record(10.5, 10.7, 12.7, 20, 5, "device", 1),
    record(11.0, 11.3, 12.0, 30, 8, "disk", 2),
]


SECTIONS = ("request_info", "performance", "streaming_metrics")


def test_every_figure_is_what_the_timings_say() -> None:
    broken = Record(request(3, 1), 9.0, 20.0, None, "no room")
    records = [*RECORDS, broken]
    made = measure(records, streaming=True)
    requests, performance, streaming = (made[name] for name in SECTIONS)
    assert (requests["num_requests"], requests["num_failed"]) == (3, 1)
    assert requests["avg_num_concurrent_requests"] == pytest.approx(4.3 / 2.7)
    assert (requests["avg_input_length"], requests["avg_output_length"]) == (20, 8)
    assert performance["total_latency_ms"] == pytest.approx(2700)
    assert performance["request_throughput_req_s"] == pytest.approx(3 / 2.7)
    assert performance["system_output_throughput_tok_s"] == pytest.approx(24 / 2.7)
    assert performance["system_total_throughput_tok_s"] == pytest.approx(84 / 2.7)
    assert performance["output_throughput_per_gpu_tok_s"] == pytest.approx(24 / 2.7)
    assert performance["avg_request_latency_ms"] == pytest.approx((1100 + 2200 + 1000) / 3)
    per_user = (11 / 1.1 + 5 / 2.2 + 8 / 1.0) / 3
    assert performance["output_throughput_per_user_tok_s"] == pytest.approx(per_user)
    assert performance["request_latency_percentiles_ms"]["p50"] == pytest.approx(1100)
    assert streaming["ttft_ms"]["average"] == pytest.approx(200)
    assert streaming["tpot_ms"]["minimum"] == pytest.approx(100)
    assert streaming["tpot_ms"]["maximum"] == pytest.approx(500)
    assert streaming["output_speed_tok_s"]["maximum"] == pytest.approx(10)
    assert issue_rate(records) == pytest.approx(2.0)
    assert issue_rate(RECORDS[:1]) is None
    assert measure(RECORDS, streaming=False)["streaming_metrics"] is None
    with pytest.raises(ValueError, match="no request was answered: no room"):
        measure([broken], streaming=False)


def test_percentiles_are_values_that_occurred() -> None:
    made = percentiles([float(i) for i in range(100, 0, -1)])
    assert made == {
        "minimum": 1, "maximum": 100, "average": 50.5, "p50": 51, "p90": 91, "p95": 96, "p99": 100,
    }  # fmt: skip
    assert set(percentiles([3.0]).values()) == {3.0}


def test_first_tokens_are_told_apart_by_tier() -> None:
    silent = record(0.0, None, 1.0, 1, 1, "device")
    made = tier_figures([*RECORDS, silent, Record(request(), 0, 1, None, "x")])
    assert list(made) == ["base", "warm", "disk_cold"]
    assert made["base"]["ttft_ms"]["average"] == pytest.approx(100)
    assert made["warm"]["num_requests"] == 2
    assert made["warm"]["ttft_ms"]["average"] == pytest.approx(200)
    assert "ttft_ms" not in tier_figures([silent])["warm"]


def test_sections_come_in_upstreams_order() -> None:
    report = {
        "engine": {"model": "m"}, "machine": {}, "world_info": {"issue_rate": None},
        **measure(RECORDS, streaming=True), "decoding_stats": None,
        "dataset": {"path": "d", **dataset_details(RECORDS)},
        "adapters": {
            "num_distinct": 1, "num_requests": 2, "tiers": tier_figures(RECORDS),
            "cache": {"device_loads": 1, "host_evictions": 2, "device_evictions": 3}, "ratio": 0.9,
        },
    }  # fmt: skip
    lines = render(report).splitlines()
    assert [line for line in lines if line.startswith("= ")] == [
        "= PYTORCH BACKEND", "= MACHINE DETAILS", "= REQUEST DETAILS", "= WORLD + RUNTIME INFORMATION",
        "= PERFORMANCE OVERVIEW", "= ADAPTERS", "= DATASET DETAILS",
    ]  # fmt: skip
    values = dict(line.rsplit(":", 1) for line in lines if ":" in line)
    assert values["Request Throughput (req/sec)"].strip() == "1.1111"
    assert values["Average Input Length (tokens)"].strip() == "20.0000"
    assert values["Output throughput with adapters / without, same load"].strip() == "0.9000"
    assert values["Evictions from the device"].strip() == "3"
    json.dumps(report, allow_nan=False)


class Fake:
    """Answers after `delay` seconds and counts who is with it."""

    def __init__(self, delay: float) -> None:
        self.delay, self.now, self.most = delay, 0, 0

    async def send(self, request: BenchRequest) -> Answer:
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(self.delay)
        self.now -= 1
        if request.task_id == 2:
            raise ValueError("no")
        return Answer(time.monotonic(), 3, 1)


def test_a_closed_loop_keeps_its_concurrency_and_an_error_is_one_requests() -> None:
    fake, seen = Fake(0.01), []
    requests = [request(i) for i in range(9)]
    records = asyncio.run(run_load(fake.send, requests, concurrency=3, on_done=seen.append))
    assert fake.most == 3 and len(seen) == 9
    assert [r.request.task_id for r in records] == list(range(9))
    assert [r.error for r in records] == [None, None, "no", *[None] * 6]
    asyncio.run(run_load(fake.send, requests))
    assert fake.most == 9


def test_adapters_are_exchanged_one_for_one() -> None:
    made = with_adapters([request(0, 1), request(1, 2)], [None, LoRARequest("b", 2, None)])
    assert [r.lora.lora_name if r.lora else None for r in made] == [None, "b"]


def test_an_options_file_is_llm_arguments_with_every_key_known(tmp_path: Path) -> None:
    path = tmp_path / "options.yaml"
    path.write_text(
        "lora_config:\n  lora_target_modules: ['attn_q', 'attn_k', 'attn_v']\n  max_lora_rank: 8\n"
        "peft_cache_config:\n  host_cache_size: 1000\nmax_batch_size: 4\ncuda_graph_config: null\n"
    )
    made = llm_arguments(read_options(path))
    assert (made["lora_config"].max_lora_rank, made["peft_cache_config"].host_cache_size) == (8, 1000)
    assert made["max_batch_size"] == 4 and "cuda_graph_config" not in made
    for given, text in (
        ({"max_batchsize": 4}, "unknown option: max_batchsize; did you mean max_batch_size?"),
        ({"lora_config": {"max_rank": 8}}, "unknown field of lora_config: max_rank"),
        ({"lora_config": {"max_lora_rank": 0}}, "option lora_config: max_lora_rank must be at least 1"),
        ({"kv_cache_config": 3}, "option kv_cache_config must hold its fields by name"),
    ):
        with pytest.raises(ConfigError) as error:
            llm_arguments(given)
        assert text in str(error.value)
    path.write_text("a: [")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_options(path)
    path.write_text("")
    assert read_options(path) == {}


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--concurrency", "0"], "--concurrency must be -1 or at least 1"),
        (["--num_requests", "3"], "holds 1 requests, fewer than --num_requests"),
    ],
)
def test_flags_that_cannot_work_are_named(
    tmp_path: Path, flags: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "data").write_text(to_line(request()))
    command = ["bench", "--model", str(DEMO / "base"), "throughput", "--dataset", str(tmp_path / "data")]
    assert main([*command, *flags]) == 1
    assert text in capsys.readouterr().err


def test_every_command_is_there_and_help_costs_no_torch() -> None:
    assert {"bench", "prepare-dataset"} <= set(COMMANDS)
    code = "import sys, manylora.commands.bench; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("throughput --endpoint http://x", "to measure a running server, use aiperf or guidellm"),
        ("low-latency", "it is called latency here"),
        ("throughput --num-prompts 3", "--num-prompts is not taken here: use --num_requests"),
        ("throughput --input-len 3", "write a dataset with manylora prepare-dataset"),
        ("throughput --concurency 3", "did you mean --concurrency?"),
        ("throughput", "--dataset is missing: manylora prepare-dataset writes one"),
        ("throughput --dataset {readme} --model {base}", "line 1 is not JSON"),
    ],
)
def test_a_command_of_another_benchmark_is_answered_in_one_line_with_ours(
    line: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = line.format(base=DEMO / "base", readme=DEMO / "README.md")
    try:
        status = main(["bench", *given.split()])
    except SystemExit as end:
        status = int(str(end.code))
    said = capsys.readouterr().err
    assert status in (1, 2) and said.count("\n") == 1 and text in said
