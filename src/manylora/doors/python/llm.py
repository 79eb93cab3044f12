"""LLM: one base model with many adapters, in this process."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import numpy as np

from manylora.doors.python.base import BaseLLM
from manylora.doors.python.llm_args import LoRAChoice, LoRARequest, is_choice, members_of
from manylora.doors.python.outputs import (
    ClassificationOutput,
    EmbeddingOutput,
    GenerationResult,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringOutput,
)
from manylora.doors.python.service import (
    ChatText,
    Input,
    LlmGeneration,
    LlmPooledGeneration,
    as_prompts,
    chat_variables,
    for_each,
    shown_message,
)
from manylora.errors import AdapterNotCachedError, ConfigError, RequestError
from manylora.generation.chat_template import ChatTemplate, Messages
from manylora.generation.decoding import Decoding, decoding_of, with_defaults
from manylora.generation.outputs import (
    PoolingParams,
    embedding,
    pair_score,
    pair_up,
    pooling_of,
    probabilities,
    similarity,
)
from manylora.generation.sampling import SamplingParams
from manylora.request import Pooling

PIN_ATTEMPTS = 3
TASKS = ("embed", "classify", "token_embed", "token_classify")
Loras = str | LoRAChoice | Sequence[str | LoRAChoice | None] | None
Known = dict[int, tuple[SamplingParams, Decoding]]
"""By the id() of the parameters, within one call."""


class LLM(BaseLLM):
    """One base model and any number of its adapters, in this process. A context manager; thread-safe.

    model: a Hugging Face directory or a hub id, org/name or org/name@revision, which is downloaded.
    tokenizer: the same, or a `manylora.generation.tokenizer.Tokenizer`. revision, tokenizer_revision: of a
    hub id. skip_tokenizer_init: prompts and outputs are token ids. lora_config: required for requests with
    adapters. peft_cache_config: size of the adapter cache. lora_root: folder or folders with named adapters;
    a name is the path below it. lora_alias: more names. lora_trust: FOLDER, or FOLDER=PART,PART, or several:
    adapters in it are used with their own chat_template, generation_config and tokenizer (the PARTs).
    lora_tokenizer_bytes: memory for these tokenizers. generation_config: where values come from for fields
    that SamplingParams leave None: vllm (nowhere), auto (the model's generation_config.json), or a folder.
    override_generation_config: values instead of those. quant_config: quantise the weights.
    guided_decoding_backend: llguidance or xgrammar, which are equivalent here.

    The others are settings of the engine, described in docs/python_api.md. None: the limit that `manylora
    build` recorded, or the default. Raises ConfigError for what cannot be served, or an unknown argument.
    """

    def generate(
        self,
        inputs: Input | Sequence[Input] | Sequence[ChatText],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        lora_request: str | LoRAChoice | Sequence[str | LoRAChoice | None] | None = None,
        use_tqdm: bool = True,
    ) -> RequestOutput | list[RequestOutput]:
        """Continue one prompt, or several at once, and wait. Returns a list for several.

        sampling_params, lora_request: one for all prompts, or a list; None in the list is the base model.
        (LoRARequest, scale) is an adapter with a scale, a list of up to 8 such pairs a mix of adapters; a
        name in `lora_root` may replace a LoRARequest. use_tqdm: show a progress bar on a terminal. Raises
        RequestError or ValueError for the first prompt that cannot be served; the others are cancelled.
        """
        prompts, single = as_prompts(inputs)
        params = for_each(prompts, "sampling_params", sampling_params)
        lora_request = self._named(lora_request)
        adapters = for_each(prompts, "lora_request", lora_request, is_choice(lora_request))
        made: list[LlmGeneration] = []
        known: Known = {}
        try:
            for prompt, one_params, one_adapter in zip(prompts, params, adapters, strict=True):
                made.append(self._make(prompt, one_params, one_adapter, False, known))
        except BaseException:
            for generation in made:
                self._service.registry.release(generation.task_ids, accepted=False)
            raise
        results = [self._submit(generation) for generation in made]
        try:
            shown: Iterable[GenerationResult] = results
            if use_tqdm and find_spec("tqdm") is not None:
                tqdm = importlib.import_module("tqdm").tqdm
                shown = tqdm(results, desc="Processed requests", dynamic_ncols=True, disable=None)
            outputs = [result.result() for result in shown]
        except BaseException:
            for result in results:
                result.abort()
            raise
        return outputs[0] if single else outputs

    def generate_async(
        self,
        inputs: Input | ChatText,
        sampling_params: SamplingParams | None = None,
        lora_request: str | LoRAChoice | None = None,
        streaming: bool = False,
    ) -> GenerationResult:
        """Start to continue one prompt. Raises RequestError, ValueError; the result raises later ones."""
        made = self._make(inputs, sampling_params, self._named(lora_request), streaming, {})
        return self._submit(made)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        lora_request: Any = None,
        use_tqdm: bool = True,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> RequestOutput | list[RequestOutput]:
        """Answer one conversation, or several at once, and wait, as `generate`. Returns a list for several.

        messages: with `role`, `content` (a text or parts {"type": "text", "text": …}) and `tool_calls`, as in
        OpenAI's API, and whatever else the template takes. tools: likewise. For a template that does not know
        them, tools, calls and results are shown as text. chat_template: None: the adapter's if it has a
        trusted one, else the model's. add_generation_prompt: end the prompt with the start of an answer;
        continue_final_message: continue the last message instead. chat_template_kwargs: more variables.
        """
        if continue_final_message and add_generation_prompt:
            raise ValueError("continue_final_message needs add_generation_prompt=False")
        variables = {"add_generation_prompt": add_generation_prompt, **chat_variables(chat_template_kwargs)}
        single = bool(messages) and isinstance(messages[0], Mapping)
        chats: list[Any] = [messages] if single else list(messages)
        adapters = self._named(lora_request)
        each = for_each(chats, "lora_request", adapters, is_choice(adapters))
        how = tools, chat_template, variables, continue_final_message
        prompts = [self._chat_prompt(chat, adapter, *how) for chat, adapter in zip(chats, each, strict=True)]
        outputs = self.generate(prompts, sampling_params, adapters, use_tqdm)
        assert isinstance(outputs, list)
        return outputs[0] if single else outputs

    def chat_async(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        lora_request: Any = None,
        streaming: bool = False,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> GenerationResult:
        """Start to answer one conversation, and return at once, as `generate_async`."""
        variables = {"add_generation_prompt": True, **chat_variables(chat_template_kwargs)}
        adapter = self._named(lora_request)
        prompt = self._chat_prompt(messages, adapter, tools, chat_template, variables, False)
        return self.generate_async(prompt, sampling_params, adapter, streaming)

    def _chat_prompt(
        self,
        chat: Messages,
        adapter: LoRAChoice | None,
        tools: Sequence[Mapping[str, Any]] | None,
        template: str | None,
        variables: Mapping[str, Any],
        continues: bool,
    ) -> ChatText:
        """Raises ValueError, RequestError."""
        if not all(isinstance(tool, Mapping) for tool in tools or ()):
            raise ValueError('tools: each must be like {"type": "function", "function": {"name": "f"}}')
        tokenizer = self._tokenizer_for(adapter)
        if tokenizer is None:
            raise ValueError("chat needs a tokenizer: leave skip_tokenizer_init out")
        if template is not None:
            try:
                made = ChatTemplate({"default": template}, tokenizer.settings)
            except ConfigError as error:
                raise ValueError(f"chat_template: {error}") from error
            tokenizer = tokenizer.with_parts(tokenizer.settings, made)
        shown = [shown_message(message) for message in chat]
        if not shown:
            raise ValueError("messages: there is none")
        return ChatText(tokenizer.chat(shown, tools or (), self._max_seq_len, variables, continues))

    def embed(
        self, prompts: Any, *, pooling_params: PoolingParams | None = None, lora_request: Loras = None
    ) -> list[PoolingRequestOutput[EmbeddingOutput]]:
        """An embedding of each prompt, pooled and normalised as configured in the model's folder."""
        found = self._pooled(prompts, "embed", pooling_params, lora_request)
        return [_output(one, EmbeddingOutput(values.tolist())) for one, values in found]

    def classify(
        self, prompts: Any, *, pooling_params: PoolingParams | None = None, lora_request: Loras = None
    ) -> list[PoolingRequestOutput[ClassificationOutput]]:
        """Probabilities of the labels of the adapter's classification head, or else of the model's own."""
        found = self._pooled(prompts, "classify", pooling_params, lora_request)
        return [_output(one, ClassificationOutput(values.tolist())) for one, values in found]

    def reward(
        self, prompts: Any, *, pooling_params: PoolingParams | None = None, lora_request: Loras = None
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """The head's raw output for the last token."""
        made = self._run(prompts, "classify", pooling_params or PoolingParams(), lora_request)
        return [_output(one, PoolingOutput(one.result.result())) for one in made]

    def encode(
        self,
        prompts: Any,
        *,
        pooling_task: str = "embed",
        pooling_params: PoolingParams | None = None,
        lora_request: Loras = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """pooling_task: embed, classify, token_embed or token_classify."""
        if pooling_task not in TASKS:
            raise ValueError(f"pooling_task must be one of {', '.join(TASKS)}, got {pooling_task!r:.40}")
        found = self._pooled(prompts, pooling_task, pooling_params, lora_request)
        return [_output(one, PoolingOutput(values)) for one, values in found]

    def score(
        self,
        text_1: str | Sequence[str],
        text_2: str | Sequence[str],
        *,
        pooling_params: PoolingParams | None = None,
        lora_request: str | LoRAChoice | None = None,
    ) -> list[PoolingRequestOutput[ScoringOutput]]:
        """The score of each pair. A single text_1 is paired with every text_2.

        With a head (the adapter's, or the model's with one label), the head reads both texts together, and
        the score is the sigmoid of its first value. Otherwise the score is the cosine of both embeddings.
        """
        params = pooling_params or PoolingParams()
        pairs, lora = pair_up(text_1, text_2), self._named(lora_request)
        acting, registry = [one for one, scale in members_of(lora) if scale], self._service.registry
        if self._model.num_labels == 1 or any(map(registry.num_labels, acting)):
            tokenizer = self._tokenizer_for(lora)
            if tokenizer is None:
                raise ValueError("score needs a tokenizer: leave skip_tokenizer_init out")
            joined = [tokenizer.encode_pair(*pair) for pair in pairs]
            prompts = [
                (tuple(ids), Pooling(self._pooling.head_mode, head=True, first=first))
                for ids, first in joined
            ]
            made = self._submit_all(prompts, for_each(prompts, "lora_request", lora, is_choice(lora)))
            scores = [pair_score(one.result.result(), self._pooling, params) for one in made]
            return [_output(one, ScoringOutput(score)) for one, score in zip(made, scores, strict=True)]
        flat = [text for pair in pairs for text in pair]
        found = self._pooled(flat, "embed", params, lora)
        outputs = []
        for (first, a), (second, b) in zip(found[::2], found[1::2], strict=True):
            ids = [*first.prompt, *second.prompt]
            score = ScoringOutput(similarity(a, b))
            outputs.append(PoolingRequestOutput(int(first.request_id), score, ids, lora))
        return outputs

    def pin_lora(self, lora_request: LoRARequest | str) -> None:
        """Keep an adapter in both levels of the cache until `unpin_lora`. Raises RequestError."""
        problem: RequestError | None = None
        request: LoRARequest = self._named(lora_request)
        for _ in range(PIN_ATTEMPTS):
            if self._model.encoder is None:
                # A hidden state: an adapter with a classification head generates no text.
                self._submit_all([((0,), Pooling())], [request])
            else:
                self.generate([0], SamplingParams(max_tokens=1), request, use_tqdm=False)
            problem = self._service.pin(request.lora_int_id)
            if not isinstance(problem, AdapterNotCachedError):  # otherwise it was evicted in between
                break
        if problem is not None:
            raise problem

    def _make(
        self,
        inputs: Input | ChatText,
        sampling_params: SamplingParams | None,
        lora_request: LoRAChoice | None,
        streaming: bool,
        known: Known,
    ) -> LlmGeneration:
        """known: conversions of parameters in this call, without an adapter's text settings."""
        tokenizer, own = self.tokenizer, self._text_of(lora_request)
        if own is None and id(sampling_params) in known:
            params, decoding = known[id(sampling_params)]
        else:
            if not isinstance(sampling_params, SamplingParams | None):
                raise ValueError(
                    f"sampling_params must be a SamplingParams, got {sampling_params!r:.80}: give, for "
                    "example, SamplingParams(max_tokens=64)"
                )
            params = replace(sampling_params) if sampling_params else SamplingParams()
            defaults = self._defaults
            if own is not None:
                tokenizer, defaults = own.tokenizer, own.defaults.over(defaults)
            params = with_defaults(params, defaults, own_length=sampling_params is not None)
            end_ids = self._model.eos_token_ids if defaults.end_ids is None else defaults.end_ids
            decoding = decoding_of(params, tokenizer, end_ids)
            if own is None:
                known[id(sampling_params)] = params, decoding
        if streaming and decoding.n < params.num_samples:
            raise ValueError(f"best_of ({params.best_of}) must equal n ({params.n}) when streaming")
        if streaming and decoding.params.beam_width > 1:
            raise ValueError("use_beam_search cannot stream: beams may still change their beginning")
        if params.guided_decoding and self.config.tokenizer_dir is None:
            raise ValueError("guided_decoding needs LLM(guided_decoding_backend='llguidance')")
        # Checked before anything is created for each prompt.
        name, most = "max_batch_size", self.config.max_batch_size
        if params.use_beam_search:
            name, most = "max_beam_width", self.config.max_beam_width
        if decoding.num_results > most:
            raise ValueError(f"n and best_of must be at most {name} ({most}), got {decoding.num_results}")
        prompt = self._read(inputs, params, tokenizer)
        decoding = decoding.within(self._max_seq_len - prompt.length)
        made = LlmGeneration(
            next(self._ids), prompt, decoding, lora_request, streaming, tokenizer, self._abort
        )
        made.request(made.lora)  # so that its errors are raised here
        self._claim(lora_request)
        return made

    def _submit(self, generation: LlmGeneration) -> GenerationResult:
        """Raises RequestError after `shutdown`. All other errors are set on the result."""
        self._service.send(generation)
        return generation.result

    def _abort(self, generation: LlmGeneration) -> None:
        self._service.abort(generation)

    def _pooled(
        self, prompts: Any, task: str, params: PoolingParams | None, lora_request: Loras
    ) -> list[tuple[LlmPooledGeneration, np.ndarray]]:
        """Each with its probabilities or its embedding."""
        params, found = params or PoolingParams(), []
        for one in self._run(prompts, task, params, lora_request):
            values = one.result.result()
            if one.pooling.head:
                values = probabilities(values, self._pooling, params.use_activation)
            else:
                values = embedding(values, self._pooling, params)
            found.append((one, values))
        return found

    def _run(
        self, prompts: Any, task: str, params: PoolingParams, lora_request: Loras
    ) -> list[LlmPooledGeneration]:
        """The generations, submitted and finished."""
        given, _ = as_prompts(prompts)
        sampling = SamplingParams(
            truncate_prompt_tokens=params.truncate_prompt_tokens, add_special_tokens=params.add_special_tokens
        )
        named, pooling = self._named(lora_request), pooling_of(task, self._pooling)
        loras = for_each(given, "lora_request", named, is_choice(named))
        read = [
            self._read(one, sampling, self._tokenizer_for(lora))
            for one, lora in zip(given, loras, strict=True)
        ]
        return self._submit_all([(one.token_ids, pooling) for one in read], loras)

    def _submit_all(
        self, prompts: Sequence[tuple[tuple[int, ...], Pooling]], loras: Sequence[LoRAChoice | None]
    ) -> list[LlmPooledGeneration]:
        made: list[LlmPooledGeneration] = []
        try:
            for (ids, pooling), lora in zip(prompts, loras, strict=True):
                self._claim(lora)
                made.append(LlmPooledGeneration(next(self._ids), ids, pooling, lora))
        except BaseException:
            for one in made:
                self._service.registry.release(one.task_ids, accepted=False)
            raise
        for one in made:
            self._service.send(one)
        errors = [one.result.exception() for one in made]  # waits for all of them
        if failed := next(filter(None, errors), None):
            raise failed
        return made


def _output(one: LlmPooledGeneration, output: Any) -> PoolingRequestOutput[Any]:
    return PoolingRequestOutput(int(one.request_id), output, list(one.prompt), one.lora_request)
