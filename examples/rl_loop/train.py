#!/usr/bin/env python3
"""Reinforcement learning with rollouts from the served policy. Takes a minute on a CPU.

The adapter is trained with PEFT. After each step its tensors are loaded under the name `policy`, and the next
rollouts use this version. Rollouts come from `LLM` in this process, or over HTTP from `manylora serve`.

The reward is the share of vowels in an answer's characters. Advantages are computed within the samples of one
prompt (GRPO without clipping, because each rollout is used only once). Every rollout contains the version
that generated it. Its log probabilities are compared with the trainer's, and must agree in float32.

    python examples/rl_loop/train.py
    python examples/rl_loop/train.py --http
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import save
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

BASE = Path(__file__).resolve().parents[1] / "demo" / "base"
PROMPTS = ("What is the capital of France?\nAnswer:", "What is the capital of Italy?\nAnswer:")
SAMPLES, LENGTH = 8, 12  # samples per prompt, tokens per sample
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass
class Rollout:
    """One sample. log_probs: of each token, from the served policy. versions: the versions that generated
    it."""

    token_ids: list[int]
    log_probs: list[float]
    versions: list[int]


class Policy(Protocol):
    def put(self, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> int:
        """Serve these tensors from now on. Returns the version's number."""
        ...

    def sample(self, prompt: str, seed: int) -> list[Rollout]: ...

    def close(self) -> None: ...


class InProcess:
    def __init__(self) -> None:
        from manylora import LLM, LoRARequest
        from manylora import LoraConfig as Served

        self._llm = LLM(BASE, lora_config=Served(), dtype="float32", device="cpu")
        self._name = LoRARequest("policy", 1, None)

    def put(self, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> int:
        return self._llm.load_adapter(self._name, tensors, config).number

    def sample(self, prompt: str, seed: int) -> list[Rollout]:
        from manylora import SamplingParams

        params = SamplingParams(
            n=SAMPLES, max_tokens=LENGTH, temperature=1.0, top_p=1.0, logprobs=0, seed=seed, ignore_eos=True
        )
        found = []
        for one in self._llm.generate(prompt, params, self._name).outputs:
            log_probs = [
                entry[token].logprob for token, entry in zip(one.token_ids, one.logprobs or [], strict=True)
            ]
            found.append(Rollout(one.token_ids, log_probs, [v.version for v in one.lora_versions]))
        return found

    def close(self) -> None:
        self._llm.shutdown()


class OverHttp:
    def __init__(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "manylora.cli", "serve", str(BASE), "--port", str(port)]
        command += ["--allow-runtime-lora-updating", "--dtype", "float32", "--device", "cpu"]
        self._server = subprocess.Popen(command)
        while not self._is_ready():
            time.sleep(0.1)

    def put(self, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> int:
        body = save(dict(tensors), {"adapter_config": json.dumps(config)})
        answer = self._send("PUT", "/v1/lora_adapters/policy", body, "application/octet-stream")
        return int(answer["version"])

    def sample(self, prompt: str, seed: int) -> list[Rollout]:
        asked = {
            "model": "policy", "prompt": prompt, "n": SAMPLES, "max_tokens": LENGTH, "temperature": 1.0,
            "logprobs": 0, "seed": seed, "ignore_eos": True, "return_token_ids": True,
        }  # fmt: skip
        answer = self._send("POST", "/v1/completions", json.dumps(asked).encode(), "application/json")
        return [
            Rollout(
                choice["token_ids"],
                choice["logprobs"]["token_logprobs"],
                [version["version"] for version in choice["lora_versions"]],
            )
            for choice in answer["choices"]
        ]

    def close(self) -> None:
        self._server.terminate()
        self._server.wait(30)

    def _is_ready(self) -> bool:
        if self._server.poll() is not None:
            raise SystemExit("the server has ended")
        try:
            urllib.request.urlopen(f"{self._url}/health/ready", timeout=1)
        except (urllib.error.URLError, TimeoutError):
            return False
        return True

    def _send(self, method: str, path: str, body: bytes, kind: str) -> dict[str, Any]:
        request = urllib.request.Request(
            self._url + path, body, headers={"Content-Type": kind}, method=method
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)


def reward(text: str) -> float:
    return sum(one in "aeiou" for one in text.lower()) / max(1, len(text))


def log_probs_of(model: Any, prompt: list[int], rollouts: list[Rollout]) -> Tensor:
    """Log probabilities [rollouts, tokens] from the trainer's model."""
    ids = torch.tensor([prompt + one.token_ids for one in rollouts])
    logits = model(ids).logits[:, len(prompt) - 1 : -1].float()
    chosen = ids[:, len(prompt) :].unsqueeze(-1)
    return torch.log_softmax(logits, -1).gather(-1, chosen).squeeze(-1)


def plain_config(model: Any) -> dict[str, Any]:
    """The content of adapter_config.json."""
    config = model.peft_config["default"].to_dict()
    return {
        name: sorted(value) if isinstance(value, set) else value
        for name, value in config.items()
        if value is None or isinstance(value, bool | int | float | str | list | set | dict)
    }


def train(policy: Policy, steps: int) -> list[float]:
    """Returns the mean reward of each step. Raises SystemExit if a rollout is not from the new version."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    base = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32)
    model = get_peft_model(base, LoraConfig(r=8, lora_alpha=16, target_modules=list(LINEARS)))
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=5e-3)
    rewards = []
    for step in range(1, steps + 1):
        tensors = {name: one.contiguous() for name, one in get_peft_model_state_dict(model).items()}
        begun = time.monotonic()
        version = policy.put(tensors, plain_config(model))
        put_ms = 1000 * (time.monotonic() - begun)
        found: list[float] = []
        losses, gaps = [], []
        for number, prompt in enumerate(PROMPTS):
            rollouts = policy.sample(prompt, seed=1000 * step + number)
            if any(one.versions != [version] for one in rollouts):
                raise SystemExit(f"step {step}: rollouts are not from version {version}")
            ours = log_probs_of(model, tokenizer(prompt).input_ids, rollouts)
            served = torch.tensor([one.log_probs for one in rollouts])
            gaps.append(float((ours.detach() - served).abs().max()))
            scores = torch.tensor([reward(tokenizer.decode(one.token_ids)) for one in rollouts])
            found += scores.tolist()
            advantages = (scores - scores.mean()) / (scores.std() + 1e-4)
            losses.append(-(advantages.unsqueeze(1) * (ours - ours.detach()).exp()).mean())
        optimizer.zero_grad()
        torch.stack(losses).mean().backward()
        optimizer.step()
        rewards.append(sum(found) / len(found))
        print(
            f"step {step}: version {version}, loaded in {put_ms:.0f} ms, reward {rewards[-1]:.3f}, "
            f"log probabilities differ by at most {max(gaps):.1e}",
            flush=True,
        )
        if max(gaps) > 1e-3:
            raise SystemExit("the served policy is not the trained one")
    return rewards


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--http", action="store_true", help="get rollouts from a server instead of this process"
    )
    parser.add_argument("--steps", type=int, default=12)
    arguments = parser.parse_args()
    policy: Policy = OverHttp() if arguments.http else InProcess()
    try:
        rewards = train(policy, arguments.steps)
    finally:
        policy.close()
    print(f"reward: {rewards[0]:.3f} in the first step, {rewards[-1]:.3f} in the last")


if __name__ == "__main__":
    main()
