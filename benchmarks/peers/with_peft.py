"""transformers and PEFT: batches of prompts of equal length, with adapters through `adapter_names`."""

from __future__ import annotations

import peft
import torch
import transformers
from peft import PeftModel
from transformers import AutoModelForCausalLM
from worker import Setup, serve

BASE = "__base__"  # PEFT's name for the base model in `adapter_names`


class Peft:
    def __init__(self, setup: Setup) -> None:
        torch.set_num_threads(setup.threads)
        self._at_once = setup.at_once
        model = AutoModelForCausalLM.from_pretrained(setup.model, dtype=getattr(torch, setup.dtype))
        self._has_adapters = bool(setup.adapters)
        for number, path in enumerate(setup.adapters):
            if number == 0:
                model = PeftModel.from_pretrained(model, path, adapter_name="0")
            else:
                model.load_adapter(path, adapter_name=str(number))
        self._model = model.eval()

    @torch.inference_mode()
    def generate(self, prompts: list[list[int]], adapters: list[int | None], tokens: int) -> list[list[int]]:
        found: list[list[int]] = []
        for start in range(0, len(prompts), self._at_once):
            some = slice(start, start + self._at_once)
            ids = torch.tensor(prompts[some])
            named = {}
            if self._has_adapters:
                names = [BASE if i is None else str(i) for i in adapters[some]]
                if len(set(names)) == 1 and names[0] != BASE:  # avoids PEFT's loop over adapters
                    self._model.set_adapter(names[0])
                else:
                    named = {"adapter_names": names}
            new = self._model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens,
                min_new_tokens=tokens, do_sample=False, pad_token_id=0, eos_token_id=None, **named,
            )  # fmt: skip
            found += new[:, ids.shape[1] :].tolist()
        return found


if __name__ == "__main__":
    serve(
        Peft,
        lambda: {
            "transformers": transformers.__version__,
            "peft": peft.__version__,
            "torch": torch.__version__,
        },
    )
