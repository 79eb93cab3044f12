#!/usr/bin/env python3
"""Sends a request to the `tensorrt_llm` model over gRPC. Flags and output as in tensorrtllm_backend's client.

A non-streaming request is sent as a unary call if the model is not decoupled, and over a gRPC stream if it
is. Exit status 0 if answered as expected, 1 otherwise.
"""

from __future__ import annotations

import argparse
import csv
import queue
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as grpc
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

STATISTICS = (
    "arrival_time_ns", "first_scheduled_time_ns", "first_token_time_ns", "last_token_time_ns",
    "kv_cache_alloc_new_blocks", "kv_cache_reused_blocks", "kv_cache_alloc_total_blocks",
    "acceptance_rate", "total_accepted_draft_tokens", "total_draft_tokens",
)  # fmt: skip
LOOKAHEAD = ("window_size", "ngram_size", "verification_set_size")
LONG = 256
ANSWER_TIMEOUT_S = 600


class ClientError(Exception):
    """Ends the client with status 1."""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Send one request to the tensorrt_llm model.")
    add = parser.add_argument
    on = {"action": "store_true"}
    add("-v", "--verbose", **on)
    add("-u", "--url", default="localhost:8001", help="address of the server's gRPC port")
    add("--text", default="Born in north-east France, Soyer trained as a", help="the prompt")
    add("--input-tokens-csv", default="", help="prompt as token ids: the first row of a CSV file")
    add("--draft-tokens-csv", default="")
    add("--output-tokens-csv", default="", help="expected ids, for --check-output")
    add("--end-id", type=int, default=-1, help="with --input-tokens-csv")
    add("--pad-id", type=int, default=50256, help="with --input-tokens-csv")
    add("-s", "--ssl", **on)
    add("-r", "--root-certificates")
    add("-p", "--private-key")
    add("-x", "--certificate-chain")
    add("-t", "--stream-timeout", type=float)
    add("-C", "--grpc-compression-algorithm", choices=("deflate", "gzip"))
    add("-S", "--streaming", **on)
    add("-c", "--check-output", **on)
    add("--correctness-threshold", type=float, default=1.0)
    add("-n", "--num-return-sequences", type=int)
    add("-b", "--beam-width", type=int, default=1)
    add("--temperature", type=float, default=1.0)
    add("--repetition-penalty", type=float)
    add("--presence-penalty", type=float)
    add("--frequency-penalty", type=float)
    add("--prompt-ignore-length", type=int, help="number of prompt tokens that the last two options ignore")
    add("--request-output-len", type=int, default=16)
    add("--stop-after-ms", type=int, default=0)
    add("--stop-via-request-cancel", **on)
    add("--tokenizer-dir", default="", help="a folder with tokenizer.json, or a GGUF file")
    add("--tokenizer-type", default="auto", choices=("auto", "t5", "llama"), help="tokenizer.json decides")
    add("--request-id", default="")
    add("--lora-path", default="", help="folder with model.lora_weights.npy and model.lora_config.npy")
    add("--lora-task-id", type=int)
    add("--exclude-input-in-output", **on)
    add("--return-log-probs", **on)
    add("--return-context-logits", **on)
    add("--return-generation-logits", **on)
    add("--return-perf-metrics", **on)
    add("--top-k", type=int, default=1)
    add("--top-p", type=float, default=0.0)
    add("--requested-outputs", nargs="*", default=[])
    add("--model-name", default="tensorrt_llm")
    add("--prompt-embedding-table-path", default="", help=".npy: [rows, hidden] or [tasks, rows, hidden]")
    add("--prompt-task-id", type=int, default=0, help="which table of a three-dimensional file")
    add(
        "--dtype",
        default="float16",
        choices=("float16", "float32", "bfloat16"),
        help="dtype of the table's file",
    )
    add("--prompt_table_extra_id", type=int, help="accepted; reuse is keyed by the table's content")
    add("--vocab_size", type=int, help="with --prompt_table_extra_id: ids from here on refer to the table")
    add("--lookahead_config", type=int, nargs=3, metavar=("W", "N", "G"), help="refused by the server")
    return parser.parse_args()


def tensor(name: str, value: np.ndarray) -> grpc.InferInput:
    if value.dtype.kind == "V":  # bfloat16 as written by the converter
        made = grpc.InferInput(name, value.shape, "BF16")
        made._raw_content = value.tobytes()
        return made
    made = grpc.InferInput(name, value.shape, np_to_triton_dtype(value.dtype))
    made.set_data_from_numpy(value)
    return made


def scalar(name: str, value: Any, dtype: type) -> grpc.InferInput:
    return tensor(name, np.array([[value]], dtype))


def csv_row(path: str) -> list[int]:
    with Path(path).open(encoding="utf-8") as file:
        return [int(cell) for cell in next(csv.reader(file))]


def lora_tensors(flags: argparse.Namespace) -> list[grpc.InferInput]:
    made = []
    if flags.lora_path:
        folder = Path(flags.lora_path)
        config = folder / "model.lora_config.npy"
        config = config if config.exists() else folder / "model.lora_keys.npy"
        weights = folder / "model.lora_weights.npy"
        if not weights.exists():
            raise ClientError(f"{weights} does not exist: convert the adapter with tools/hf_lora_convert.py")
        made.append(tensor("lora_weights", np.load(weights, allow_pickle=False)))
        made.append(tensor("lora_config", np.load(config, allow_pickle=False)))
        activated = folder / "model.lora_invocation_tokens.npy"
        if activated.exists():
            made.append(tensor("lora_invocation_tokens", np.load(activated, allow_pickle=False)))
    if flags.lora_task_id is not None:
        made.append(scalar("lora_task_id", flags.lora_task_id, np.uint64))
    return made


def prompt_table_tensors(flags: argparse.Namespace, ids: list[int]) -> list[grpc.InferInput]:
    """The rows for ids beyond the vocabulary. They are sent as float16."""
    made = []
    if flags.prompt_embedding_table_path:
        table = np.load(flags.prompt_embedding_table_path, allow_pickle=False)
        if table.dtype.kind == "V":
            table = (table.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        table = table[flags.prompt_task_id] if table.ndim == 3 else table
        made.append(tensor("prompt_embedding_table", table.astype(np.float16)[np.newaxis]))
        made.append(scalar("prompt_vocab_size", len(table), np.int32))
    if flags.prompt_table_extra_id is not None:
        if flags.vocab_size is None:
            raise ClientError("--prompt_table_extra_id needs --vocab_size")
        extra = [flags.prompt_table_extra_id if token >= flags.vocab_size else 0 for token in ids]
        made.append(tensor("prompt_table_extra_ids", np.array([extra], np.uint64)))
    return made


def build_inputs(
    flags: argparse.Namespace, ids: list[int], end_id: int, pad_id: int
) -> list[grpc.InferInput]:
    made = [
        tensor("input_ids", np.array([ids], np.int32)),
        scalar("input_lengths", len(ids), np.int32),
        scalar("request_output_len", flags.request_output_len, np.int32),
        scalar("beam_width", flags.beam_width, np.int32),
        scalar("temperature", flags.temperature, np.float32),
        scalar("streaming", flags.streaming, np.bool_),
        scalar("end_id", end_id, np.int32),
        scalar("pad_id", pad_id, np.int32),
        scalar("runtime_top_k", flags.top_k, np.int32),
        scalar("runtime_top_p", flags.top_p, np.float32),
    ]
    for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
        if getattr(flags, name) is not None:
            made.append(scalar(name, getattr(flags, name), np.float32))
    for name in ("prompt_ignore_length", "num_return_sequences"):
        if getattr(flags, name) is not None:
            made.append(scalar(name, getattr(flags, name), np.int32))
    for name in (
        "exclude_input_in_output", "return_log_probs", "return_context_logits", "return_generation_logits",
        "return_perf_metrics",
    ):  # fmt: skip
        if getattr(flags, name):
            made.append(scalar(name, True, np.bool_))
    if flags.draft_tokens_csv:
        made.append(tensor("draft_input_ids", np.array([csv_row(flags.draft_tokens_csv)], np.int32)))
    if flags.lookahead_config:
        for name, value in zip(LOOKAHEAD, flags.lookahead_config, strict=True):
            made.append(scalar(f"lookahead_{name}", value, np.int32))
    return made + prompt_table_tensors(flags, ids) + lora_tensors(flags)


def stop_inputs() -> list[grpc.InferInput]:
    return [
        tensor("input_ids", np.zeros((1, 1), np.int32)),
        scalar("input_lengths", 0, np.int32),
        scalar("request_output_len", 0, np.int32),
        scalar("stop", True, np.bool_),
    ]


class Exchange:
    """One request and its responses."""

    def __init__(self, client: grpc.InferenceServerClient, flags: argparse.Namespace) -> None:
        self._client, self._flags = client, flags
        self._answers: queue.Queue = queue.Queue()
        self.cancelled = False

    def run(self, inputs: list[grpc.InferInput]) -> list[grpc.InferResult]:
        flags = self._flags
        config = self._client.get_model_config(flags.model_name).config
        outputs = [grpc.InferRequestedOutput(name) for name in flags.requested_outputs] or None
        if config.model_transaction_policy.decoupled or flags.streaming or flags.num_return_sequences:
            return self._stream(inputs, outputs)
        return self._unary(inputs, outputs)

    def _stream(self, inputs: list[grpc.InferInput], outputs: Any) -> list[grpc.InferResult]:
        flags = self._flags
        call = {
            "outputs": outputs,
            "request_id": flags.request_id,
            "enable_empty_final_response": True,
        }
        self._client.start_stream(
            self._take,
            stream_timeout=flags.stream_timeout,
            compression_algorithm=flags.grpc_compression_algorithm,
        )
        self._client.async_stream_infer(flags.model_name, inputs, **call)
        pending = 1
        if flags.stop_after_ms > 0:
            time.sleep(flags.stop_after_ms / 1000)
            if flags.stop_via_request_cancel:
                self._client.stop_stream(cancel_requests=True)
            else:
                self._client.async_stream_infer(flags.model_name, stop_inputs(), **call)
                pending = 2
        results: list[grpc.InferResult] = []
        while pending and not self.cancelled:
            result = self._next()
            if result is None:
                break
            response = result.get_response()
            pending -= response.parameters["triton_final_response"].bool_param
            if response.outputs:
                results.append(result)
        if flags.streaming:
            print()
        return results

    def _unary(self, inputs: list[grpc.InferInput], outputs: Any) -> list[grpc.InferResult]:
        flags = self._flags
        call = {
            "outputs": outputs,
            "request_id": flags.request_id,
            "parameters": {"Streaming": False},
            "compression_algorithm": flags.grpc_compression_algorithm,
        }
        running = self._client.async_infer(flags.model_name, inputs, self._take, **call)
        pending = 1
        if flags.stop_after_ms > 0:
            time.sleep(flags.stop_after_ms / 1000)
            if flags.stop_via_request_cancel:
                running.cancel()
            else:
                call["outputs"] = None
                self._client.async_infer(flags.model_name, stop_inputs(), self._take, **call)
                pending = 2
        results = [self._next() for _ in range(pending)]
        return [result for result in results if result is not None and result.get_response().outputs]

    def _take(self, result: Any, error: Any) -> None:
        self._answers.put((result, error))

    def _next(self) -> grpc.InferResult | None:
        """The next response, printed. None if the request was cancelled."""
        try:
            result, error = self._answers.get(timeout=ANSWER_TIMEOUT_S)
        except queue.Empty:
            raise ClientError(f"no answer within {ANSWER_TIMEOUT_S} s") from None
        if error is not None:
            if isinstance(error, InferenceServerException) and "CANCELLED" in str(error.status()):
                print("Request is cancelled")
                self.cancelled = True
                return None
            print("Received an error from server:")
            print(error)
            raise ClientError(str(error))
        self._print(result)
        return result

    def _print(self, result: grpc.InferResult) -> None:
        ids = result.as_numpy("output_ids")
        if ids is None:
            final = result.get_response().parameters["triton_final_response"].bool_param
            if not self._flags.streaming or not final:
                print("Got cancellation response from server")
            return
        length = result.as_numpy("sequence_length")
        if not self._flags.streaming:
            print("Got completed request", flush=True)
            print(length)
        elif length is not None and length[0, 0] > 0:
            print(ids[0, 0, : length[0, 0]].tolist(), flush=True)


def sequences_of(results: list[grpc.InferResult], flags: argparse.Namespace, prompt: list[int]) -> dict:
    """Return sequence -> beams of ids. The prompt is put in front of a streamed sequence."""
    found: dict[int, list[list[int]]] = {}
    for result in results:
        ids, lengths = result.as_numpy("output_ids")[0], result.as_numpy("sequence_length")
        index = result.as_numpy("sequence_index")
        index = 0 if index is None else int(index[0, 0])
        beams = [
            row.tolist() if lengths is None else row[: lengths[0, i]].tolist() for i, row in enumerate(ids)
        ]
        if flags.streaming:
            start = [] if flags.exclude_input_in_output else prompt
            beams = [
                old + new for old, new in zip(found.get(index, [start] * len(beams)), beams, strict=True)
            ]
        found[index] = beams
    return found


def show(found: dict, results: list[grpc.InferResult], flags: argparse.Namespace, tokenizer: Any) -> None:
    for index in sorted(found):
        beams = found[index]
        for beam, ids in enumerate(beams):
            if tokenizer is not None:
                text = tokenizer.decode(ids, skip_special_tokens=True)
                echo = not flags.exclude_input_in_output and text.startswith(flags.text)
                text = text[len(flags.text) :] if echo else text
                print("Input:", flags.text)
                print(f"Output beam {beam}:", text)
            if len(ids) > LONG:
                print("Output sequence starts with: ", ids[:LONG])
            else:
                print("Output sequence: ", ids)
    for result in results[-1:]:
        if flags.return_log_probs:
            print(f"cum_log_probs: {result.as_numpy('cum_log_probs')}")
            print(f"output_log_probs: {result.as_numpy('output_log_probs')}")
        for name in ("context_logits", "generation_logits"):
            if getattr(flags, f"return_{name}"):
                print(f"{name}.shape: {result.as_numpy(name).shape}")
                print(f"{name}: {result.as_numpy(name)}")
        if flags.return_perf_metrics:
            for name in STATISTICS:
                print(f"{name}: {result.as_numpy(name)[0][0]}")


def check(found: dict, flags: argparse.Namespace, prompt: list[int]) -> None:
    if not flags.output_tokens_csv:
        raise ClientError("--check-output needs --output-tokens-csv")
    expected = csv_row(flags.output_tokens_csv)
    expected = expected if flags.exclude_input_in_output else prompt + expected
    ids = found.get(0, [[]])[0]
    if flags.correctness_threshold < 1:
        rate = sum(a == b for a, b in zip(ids, expected, strict=False)) / max(1, len(expected))
        print(f"Output token matching rate: {rate}")
        print("expected_output_ids = ", expected)
        passed = rate > flags.correctness_threshold
    else:
        passed = ids == expected
    print("\n=====\nPASS!\n=====" if passed else "\n=====\nFAIL!\n=====")
    if not passed:
        raise ClientError("the output is not the expected one")


def tokenizer_folder(given: str) -> Path:
    """The folder that --tokenizer-dir names, or that stands for the GGUF file it names."""
    if not given.lower().endswith(".gguf"):
        return Path(given)
    try:
        from manylora.config.model_folder import model_folder
        from manylora.errors import ConfigError
    except ImportError as error:
        raise ClientError("a GGUF file as --tokenizer-dir needs the package manylora here") from error
    try:
        return model_folder(Path(given))
    except ConfigError as error:
        raise ClientError(f"--tokenizer-dir: {error}") from error


def load_tokenizer(directory: Path) -> Any:
    from tokenizers import Tokenizer

    path = directory / "tokenizer.json"
    if not path.is_file():
        raise ClientError(
            f"--tokenizer-dir {str(directory)!r} has no tokenizer.json; or give --input-tokens-csv"
        )
    return Tokenizer.from_file(str(path))


def special_ids(directory: Path, tokenizer: Any) -> tuple[int, int]:
    """End and pad id from tokenizer_config.json. Without a pad token the end token is used."""
    import json

    path = directory / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}

    def find(key: str) -> int | None:
        value = settings.get(key)
        value = value.get("content") if isinstance(value, dict) else value
        return tokenizer.token_to_id(value) if value else None

    end, pad = find("eos_token"), find("pad_token")
    end = -1 if end is None else end
    return end, end if pad is None else pad


def main() -> int:
    flags = parse_arguments()
    tokenizer, end_id, pad_id = None, flags.end_id, flags.pad_id
    try:
        if flags.num_return_sequences and flags.beam_width > 1:
            raise ClientError("--num-return-sequences needs --beam-width 1")
        if flags.requested_outputs and "output_ids" not in flags.requested_outputs:
            raise ClientError("--requested-outputs must contain output_ids")
        if flags.input_tokens_csv:
            prompt = csv_row(flags.input_tokens_csv)
        else:
            print("=========")
            folder = tokenizer_folder(flags.tokenizer_dir)
            tokenizer = load_tokenizer(folder)
            prompt = tokenizer.encode(flags.text).ids
            end_id, pad_id = special_ids(folder, tokenizer)
            print("Using pad_id: ", pad_id)
            print("Using end_id: ", end_id)
        long = len(prompt) > LONG
        print("Input sequence starts with: " if long else "Input sequence: ", prompt[:LONG], flush=True)
        with grpc.InferenceServerClient(
            url=flags.url,
            verbose=flags.verbose,
            ssl=flags.ssl,
            root_certificates=flags.root_certificates,
            private_key=flags.private_key,
            certificate_chain=flags.certificate_chain,
        ) as client:
            results = Exchange(client, flags).run(build_inputs(flags, prompt, end_id, pad_id))
            found = sequences_of(results, flags, prompt)
            show(found, results, flags, tokenizer)
            if flags.check_output:
                check(found, flags, prompt)
    except (ClientError, InferenceServerException, OSError, ValueError) as error:
        print(f"Encountered error: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
