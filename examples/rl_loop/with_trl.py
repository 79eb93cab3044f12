#!/usr/bin/env python3
"""GRPO with TRL's trainer and rollouts from `manylora serve`. Takes a minute on a CPU.

A callback loads the adapter into the server under the name `policy` when training begins and after each step.
TRL's `rollout_func` asks the server, so the trainer needs no vLLM and no second copy of the base model.
Prompts and reward are those of train.py. Every rollout must be from the latest version, and its log
probabilities must agree with the trainer's model.

    pip install trl
    python examples/rl_loop/with_trl.py
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model_state_dict
from train import (
    BASE,
    LENGTH,
    LINEARS,
    PROMPTS,
    SAMPLES,
    OverHttp,
    Policy,
    log_probs_of,
    plain_config,
    reward,
)
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class ServedPolicy(TrainerCallback):
    """Loads each version into the server and samples from it. gaps: the largest difference of log
    probabilities for each prompt."""

    def __init__(self, policy: Policy) -> None:
        self._policy, self._version, self._calls = policy, 0, 0
        self.gaps: list[float] = []
        self.rewards: list[float] = []

    def on_train_begin(self, *given: Any, model: Any, **others: Any) -> None:
        self._put(model)

    def on_step_end(self, *given: Any, model: Any, **others: Any) -> None:
        self._put(model)

    def rollout(self, prompts: Sequence[str], trainer: Any) -> dict[str, Any]:
        """TRL's rollout_func. Each prompt is repeated SAMPLES times in a row."""
        found: dict[str, Any] = {"prompt_ids": [], "completion_ids": [], "logprobs": []}
        self._calls += 1
        for number, prompt in enumerate(prompts[::SAMPLES]):
            rollouts = self._policy.sample(prompt, seed=1000 * self._calls + number)
            if any(one.versions != [self._version] for one in rollouts):
                raise SystemExit(f"rollouts are not from version {self._version}")
            ids = trainer.processing_class(prompt).input_ids
            with torch.no_grad():
                ours = log_probs_of(trainer.model, ids, rollouts)
            served = torch.tensor([one.log_probs for one in rollouts])
            self.gaps.append(float((ours - served).abs().max()))
            found["prompt_ids"] += [ids] * len(rollouts)
            found["completion_ids"] += [one.token_ids for one in rollouts]
            found["logprobs"] += [one.log_probs for one in rollouts]
        return found

    def reward(self, completions: Sequence[str], **others: Any) -> list[float]:
        """TRL's reward function."""
        scores = [reward(text) for text in completions]
        self.rewards.append(sum(scores) / len(scores))
        print(f"version {self._version}: reward {self.rewards[-1]:.3f}", flush=True)
        return scores

    def _put(self, model: Any) -> None:
        tensors = {name: one.contiguous() for name, one in get_peft_model_state_dict(model).items()}
        self._version = self._policy.put(tensors, plain_config(model))


def train(policy: Policy, steps: int) -> ServedPolicy:
    """Raises SystemExit if a rollout is not from the latest version or not from the trainer's policy."""
    served = ServedPolicy(policy)
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32),
            processing_class=AutoTokenizer.from_pretrained(BASE),
            reward_funcs=served.reward,
            train_dataset=Dataset.from_dict({"prompt": list(PROMPTS)}),
            peft_config=LoraConfig(r=8, lora_alpha=16, target_modules=list(LINEARS)),
            rollout_func=served.rollout,
            callbacks=[served],
            args=GRPOConfig(
                folder,
                num_generations=SAMPLES,
                per_device_train_batch_size=SAMPLES * len(PROMPTS),
                max_completion_length=LENGTH,
                max_steps=steps,
                learning_rate=5e-3,
                lr_scheduler_type="constant",
                use_cpu=True,
                bf16=False,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
            ),
        )
        trainer.train()
    print(f"log probabilities differ by at most {max(served.gaps):.1e}")
    if max(served.gaps) > 1e-3:
        raise SystemExit("the served policy is not the trained one")
    return served


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=12)
    arguments = parser.parse_args()
    policy = OverHttp()
    try:
        rewards = train(policy, arguments.steps).rewards
    finally:
        policy.close()
    print(f"reward: {rewards[0]:.3f} in the first step, {rewards[-1]:.3f} in the last")


if __name__ == "__main__":
    main()
