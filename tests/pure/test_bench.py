"""Protects the benchmark's arithmetic and its files: every figure against timings made by hand, the dataset
line to the letter, traffic shapes, options files; and that `bench --help` costs no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from manylora import LoRARequest
from manylora.cli import COMMANDS, main
from manylora.doors.cli.bench_report import Answer, Record, issue_rate, measure
from manylora.doors.cli.prepare_dataset import BenchRequest, read_dataset, to_line
from manylora.errors import ConfigError

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
        ('{"task_id":7}', "prompt, input_ids, and turns for task 7 are all None."),
        ('{"prompt":"a"}', "output_tokens must be a number of tokens, at least 1, got None"),
        ('{"prompt":"a","output_tokens":1,"lora_request":{"lora_name":"a","lora_int_id":1}}', "lora_path ()"),
        ('{"turns":["a"],"output_tokens":1}', "turns is not supported"),
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


def test_every_command_is_there_and_help_costs_no_torch() -> None:
    assert {"bench", "prepare-dataset"} <= set(COMMANDS)
    code = "import sys, manylora.doors.cli.bench; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("throughput --endpoint http://x", "to measure a running server, use aiperf or guidellm"),
        ("throughput --num-prompts 3", "--num-prompts is not taken here: use --num_requests"),
        ("throughput", "--dataset is missing: manylora prepare-dataset writes one"),
        ("throughput --dataset {readme} --model {base}", "line 1 is not JSON"),
        (
            "throughput --dataset {data} --model {base} --concurrency 0",
            "--concurrency must be -1 or at least 1",
        ),
        ("throughput --dataset {data} --model {base} --num_requests 3", "holds 1 requests, fewer than"),
    ],
)
def test_a_wrong_command_is_answered_in_one_line_with_the_right_one(
    line: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "data").write_text(to_line(request()))
    given = line.format(base=DEMO / "base", readme=DEMO / "README.md", data=tmp_path / "data")
    try:
        status = main(["bench", *given.split()])
    except SystemExit as end:
        status = int(str(end.code))
    said = capsys.readouterr().err
    assert status in (1, 2) and said.count("\n") == 1 and text in said
