#!/usr/bin/env python3
"""Sends requests to the `ensemble` over gRPC, text in and text out. Flags and output as in
tensorrtllm_backend.

Exit status 0 if every request was answered (as expected), 1 otherwise.
"""

from __future__ import annotations

import argparse
import json
import queue
import sys
from typing import Any

import numpy as np
import tritonclient.grpc as grpc
from inflight_batcher_llm_client import ANSWER_TIMEOUT_S, STATISTICS, ClientError, lora_tensors, tensor
from tritonclient.utils import InferenceServerException


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Send prompts to the ensemble.")
    add = parser.add_argument
    on = {"action": "store_true"}
    add("-v", "--verbose", **on)
    add("-u", "--url", default="localhost:8001", help="address of the server's gRPC port")
    add("-p", "--prompt", required=True, help="a prompt, or a JSON list of prompts")
    add("--model-name", default="ensemble", choices=("ensemble", "tensorrt_llm_bls"))
    add("-S", "--streaming", **on)
    add("-n", "--num-return-sequences", type=int)
    add("-b", "--beam-width", type=int, default=1)
    add("--temperature", type=float, default=1.0)
    add("--repetition-penalty", type=float)
    add("--presence-penalty", type=float)
    add("--frequency-penalty", type=float)
    add("--prompt-ignore-length", type=int, help="number of prompt tokens that the last two options ignore")
    add("-o", "--output-len", type=int, default=100)
    add("--request-id", default="")
    add("--stop-words", nargs="+", default=[])
    add("--bad-words", nargs="+", default=[])
    add("--embedding-bias-words", nargs="+", default=[])
    add("--embedding-bias-weights", nargs="+", type=float, default=[])
    add("--overwrite-output-text", help="replace streamed text instead of appending", **on)
    add("--return-log-probs", **on)
    add("--return-context-logits", **on)
    add("--return-generation-logits", **on)
    add("--return-perf-metrics", **on)
    add("--batch-inputs", help="send all prompts in one request", **on)
    add("--end-id", type=int)
    add("--pad-id", type=int)
    add("--lora-path", help="folder with model.lora_weights.npy and model.lora_config.npy")
    add("--lora-task-id", type=int)
    add("--exclude-input-in-output", **on)
    add("--guided-decoding-guide-type")
    add("--guided-decoding-guide")
    add("--check-outputs", **on)
    add("--expected-outputs", help="JSON list of texts, for --check-outputs")
    return parser.parse_args()


def prompts_of(text: str) -> list[str]:
    """The prompts: a JSON list of strings has several, anything else is one."""
    try:
        parsed = json.loads(text)
    except ValueError:
        return [text]
    return parsed if isinstance(parsed, list) and all(isinstance(p, str) for p in parsed) else [text]


def build_inputs(flags: argparse.Namespace, prompts: list[str]) -> list[grpc.InferInput]:
    count = len(prompts)

    def column(name: str, value: Any, dtype: type) -> grpc.InferInput:
        return tensor(name, np.full((count, 1), value, dtype))

    def words(name: str, values: list) -> grpc.InferInput:
        return tensor(name, np.array([[value.encode() for value in values]] * count, np.object_))

    made = [
        tensor("text_input", np.array([[prompt.encode()] for prompt in prompts], np.object_)),
        column("max_tokens", flags.output_len, np.int32),
        column("stream", flags.streaming, np.bool_),
        column("beam_width", flags.beam_width, np.int32),
        column("temperature", flags.temperature, np.float32),
        column("exclude_input_in_output", flags.exclude_input_in_output, np.bool_),
    ]
    for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
        if getattr(flags, name) is not None:
            made.append(column(name, getattr(flags, name), np.float32))
    for name in ("prompt_ignore_length", "num_return_sequences", "end_id", "pad_id"):
        if getattr(flags, name) is not None:
            made.append(column(name, getattr(flags, name), np.int32))
    for name in (
        "return_log_probs",
        "return_context_logits",
        "return_generation_logits",
        "return_perf_metrics",
    ):
        if getattr(flags, name):
            made.append(column(name, True, np.bool_))
    for name in ("stop_words", "bad_words", "embedding_bias_words"):
        if getattr(flags, name):
            made.append(words(name, getattr(flags, name)))
    if flags.embedding_bias_weights:
        made.append(
            tensor("embedding_bias_weights", np.array([flags.embedding_bias_weights] * count, np.float32))
        )
    for name in ("guided_decoding_guide_type", "guided_decoding_guide"):
        if getattr(flags, name) is not None:
            made.append(words(name, [getattr(flags, name)]))
    return made + _repeated(lora_tensors(flags), count)


def _repeated(tensors: list[grpc.InferInput], count: int) -> list[grpc.InferInput]:
    """Repeat the adapter's tensors, which have a batch of one, for each prompt of a batch."""
    for one in tensors if count > 1 else ():
        one._raw_content = one._raw_content * count
        one.set_shape([count, *one.shape()[1:]])
    return tensors


def requested_outputs(flags: argparse.Namespace) -> list[grpc.InferRequestedOutput]:
    names = ["text_output"]
    if flags.return_log_probs:
        names += ["cum_log_probs", "output_log_probs"]
    names += [n for n in ("context_logits", "generation_logits") if getattr(flags, f"return_{n}")]
    if flags.return_perf_metrics:
        names += STATISTICS
    if flags.num_return_sequences and flags.num_return_sequences > 1:
        names.append("sequence_index")
    if flags.batch_inputs:
        names.append("batch_index")
    return [grpc.InferRequestedOutput(name) for name in names]


def ask(
    client: grpc.InferenceServerClient, flags: argparse.Namespace, prompts: list[str], first: int
) -> dict:
    """Send requests. Returns texts by (prompt, return sequence)."""
    answers: queue.Queue = queue.Queue()
    client.start_stream(lambda result, error: answers.put((result, error)))
    client.async_stream_infer(
        flags.model_name,
        build_inputs(flags, prompts),
        outputs=requested_outputs(flags),
        request_id=flags.request_id,
        enable_empty_final_response=True,
    )
    texts: dict[tuple[int, int], str] = {}
    final = False
    while not final:
        try:
            result, error = answers.get(timeout=ANSWER_TIMEOUT_S)
        except queue.Empty:
            raise ClientError(f"no answer within {ANSWER_TIMEOUT_S} s") from None
        if error is not None:
            print("Received an error from server:")
            print(error)
            raise ClientError(str(error))
        final = result.get_response().parameters["triton_final_response"].bool_param
        if result.get_response().outputs:
            show(result, flags, first, texts)
    client.stop_stream()
    return texts


def show(result: grpc.InferResult, flags: argparse.Namespace, first: int, texts: dict) -> None:
    def index(name: str) -> int:
        value = result.as_numpy(name)
        return 0 if value is None else int(value.reshape(-1)[0])

    key = first + index("batch_index"), index("sequence_index")
    raw = result.as_numpy("text_output")
    text = raw[0].decode(errors="replace")
    if flags.streaming and flags.beam_width == 1:
        texts[key] = text if flags.overwrite_output_text else texts.get(key, "") + text
        if key[1] == 0:
            print(key[0], [raw[0]], flush=True)
    else:
        texts[key] = text
        many = (flags.num_return_sequences or 1) > 1
        print(f"{key[0]} [{key[1]}]: {text}" if many else f"{key[0]}: {text}", flush=True)
    if flags.return_log_probs:
        values = result.as_numpy("output_log_probs")
        print(f"output_log_probs.shape: {values.shape}")
        print(f"output_log_probs: {values}")
    for name in ("context_logits", "generation_logits"):
        if getattr(flags, f"return_{name}"):
            print(f"{name}.shape: {result.as_numpy(name).shape}")
    if flags.return_perf_metrics:
        for name in STATISTICS:
            print(f"{name}: {result.as_numpy(name)[0][0]}")


def check(flags: argparse.Namespace, prompts: list[str], texts: dict) -> None:
    expected = json.loads(flags.expected_outputs)
    for i, (prompt, wanted) in enumerate(zip(prompts, expected, strict=True)):
        echo = not flags.streaming and not flags.exclude_input_in_output
        wanted = prompt + wanted if echo else wanted
        if texts.get((i, 0)) != wanted:
            raise ClientError(f"prompt {i}: expected {wanted!r}, got {texts.get((i, 0))!r}")


def main() -> int:
    flags = parse_arguments()
    prompts = prompts_of(flags.prompt)
    try:
        if flags.lora_path and flags.lora_task_id is None:
            raise ClientError("Must specify `lora-task-id` with `lora-path` argument")
        if bool(flags.embedding_bias_words) != bool(flags.embedding_bias_weights):
            raise ClientError("--embedding-bias-words and --embedding-bias-weights go together")
        if flags.check_outputs and (flags.beam_width > 1 or not flags.expected_outputs):
            raise ClientError("--check-outputs needs --expected-outputs and --beam-width 1")
        texts: dict = {}
        with grpc.InferenceServerClient(url=flags.url, verbose=flags.verbose) as client:
            if flags.batch_inputs:
                texts = ask(client, flags, prompts, 0)
            else:
                for i, prompt in enumerate(prompts):
                    texts |= ask(client, flags, [prompt], i)
        if flags.streaming and flags.beam_width == 1:
            for key in sorted(texts):
                print(texts[key])
        if flags.check_outputs:
            check(flags, prompts, texts)
    except (ClientError, InferenceServerException, OSError, ValueError) as error:
        print(f"Encountered error: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
