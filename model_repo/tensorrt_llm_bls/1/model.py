"""Text in, text out by calling the other models: whole texts in a stream, stop words on text, drafts."""

from __future__ import annotations

import queue
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import triton_python_backend_utils as pb_utils

from manylora.errors import ConfigError, RequestError
from manylora.system.lifeline import Lifeline
from manylora.wire.bls import TO_ENGINE, TO_PREPROCESSING, check_inputs, items, told_outputs
from manylora.wire.client_errors import check_parameters, client_message
from manylora.wire.parameters import flag, parameters_of, value_of
from manylora.wire.shape_guard import check_shapes, read_inputs
from manylora.wire.stop_words import TextStop

THREADS = 64
PERIOD_S = 0.1  # after which it is asked again who has left
FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class Call:
    """A request of a client, and the engine's requests that are open for it. Any thread."""

    def __init__(self, is_cancelled):
        self._is_cancelled = is_cancelled
        self._lock = threading.Lock()
        self._open = set()
        self.left = False  # its client

    @contextmanager
    def asking(self, model):
        """Around a request to an engine's model: its id, which nobody else has. Raises RequestError."""
        if self.left:
            raise RequestError("the client has left")
        asked = (model, str(uuid.uuid4()))
        with self._lock:
            self._open.add(asked)
        try:
            yield asked[1]
        finally:
            with self._lock:
                self._open.discard(asked)

    def to_stop(self):
        """Model and id of what is still open for a client that has left."""
        self.left = self.left or self._is_cancelled()
        with self._lock:
            return list(self._open) if self.left else []


class TritonPythonModel:
    def initialize(self, args):
        self._lifeline = Lifeline(args["model_instance_name"])
        check_shapes(pb_utils)
        parameters = parameters_of(args["model_config"])
        try:
            self._accumulate = flag(parameters, "accumulate_tokens", False)
            self._engine = value_of(parameters, "tensorrt_llm_model_name") or "tensorrt_llm"
            self._draft = value_of(parameters, "tensorrt_llm_draft_model_name")
            if value_of(parameters, "multimodal_encoders_name") is not None:
                raise ConfigError("parameter multimodal_encoders_name: multimodal models are not supported")
        except ConfigError as error:
            raise pb_utils.TritonModelException(str(error)) from None
        self._decoupled = '"decoupled":true' in args["model_config"].replace(" ", "")
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="manylora-bls")
        self._outbox = queue.SimpleQueue()
        self._calls = set()
        self._lock = threading.Lock()
        self._closing = threading.Event()
        threading.Thread(target=self._watch, name="manylora-watch", daemon=True).start()
        if self._decoupled:  # one thread sends: many at once are more than the server bears
            threading.Thread(target=self._send_all, name="manylora-send", daemon=True).start()

    def execute(self, requests):
        if not self._decoupled:
            return list(self._pool.map(self._answer_once, requests))
        for request in requests:
            sender = request.get_response_sender()
            self._pool.submit(self._answer, request, sender, self._begin(sender.is_cancelled))
        return None

    def finalize(self):
        self._pool.shutdown(wait=True)
        self._closing.set()
        self._outbox.put(None)

    def _begin(self, is_cancelled):
        call = Call(is_cancelled)
        with self._lock:
            self._calls.add(call)
        return call

    def _end(self, call):
        with self._lock:
            self._calls.discard(call)

    def _watch(self):
        """End the generations of clients that have left: nothing else tells the engine's model. More than
        once, as a stop may come before the request that it is for."""
        while not self._closing.wait(PERIOD_S):
            with self._lock:
                calls = list(self._calls)
            for call in calls:
                try:
                    for model, request_id in call.to_stop():
                        self._stop(model, request_id)
                except Exception as error:
                    client_message(error, "tensorrt_llm_bls")

    def _send_all(self):
        while (item := self._outbox.get()) is not None:
            sender, response, flags = item
            sender.send(response, flags) if response else sender.send(flags=flags)

    def _answer(self, request, sender, call):
        with self._lifeline.busy():
            try:
                for response in self._responses(request, call):
                    self._outbox.put((sender, response, 0))
            except Exception as error:
                self._end(call)  # before the final flag: behind it nobody may be asked
                self._outbox.put((sender, _failure(error), FINAL))
            else:
                self._end(call)
                self._outbox.put((sender, None, FINAL))

    def _answer_once(self, request):
        call = self._begin(request.is_cancelled)
        with self._lifeline.busy():
            try:
                return next(iter(list(self._responses(request, call))))
            except Exception as error:
                return _failure(error)
            finally:
                self._end(call)

    def _responses(self, request, call):
        """Responses in the order in which they come; every item of a batch is a request of its own."""
        check_parameters(request.parameters())
        arrays = {tensor.name(): tensor for tensor in request.inputs()}
        values = read_inputs(tensor for name, tensor in arrays.items() if name != "lora_weights")
        check_inputs(values, self._accumulate, self._draft is not None)
        batch = items(values)
        weights = _lora_weights(arrays.get("lora_weights"), len(batch))
        if len(batch) == 1:
            yield from self._item(call, batch[0], weights[0], None)
            return
        merged = queue.SimpleQueue()

        def run(index):
            try:
                for response in self._item(call, batch[index], weights[index], index):
                    merged.put(response)
            except Exception as error:
                merged.put(error)
            merged.put(None)

        threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(batch))]
        for thread in threads:
            thread.start()
        left, failure = len(threads), None
        while left:
            response = merged.get()
            if response is None:
                left -= 1
            elif isinstance(response, Exception):
                failure = failure or response
            elif failure is None:
                yield response
        if failure is not None:
            raise failure

    def _item(self, call, values, lora_weights, index):
        prepared = self._call("preprocessing", _named(values, TO_PREPROCESSING))
        inputs = {
            name: pb_utils.Tensor(name, prepared[source].as_numpy())
            for source, name in PREPARED.items()
            if source in prepared
        }
        inputs |= {name: pb_utils.Tensor(name, value) for name, value in _renamed(values, TO_ENGINE)}
        if lora_weights is not None:
            inputs["lora_weights"] = lora_weights
        if "num_draft_tokens" in values and int(values["num_draft_tokens"].reshape(-1)[0]) > 0:
            yield from self._speculate(call, values, inputs, index)
            return
        streaming = bool(values.get("stream", np.zeros(1)).any())
        words = [word.decode() for word in values.get("stop_words", np.array([])).reshape(-1)]
        stops, so_far = {}, {}
        with call.asking(self._engine) as request_id:
            for response in self._stream(inputs, self._engine, request_id):
                if "output_ids" not in response:
                    continue
                key = int(_first(response.get("sequence_index"), 0))
                if self._accumulate and streaming:
                    ids = response["output_ids"].as_numpy()
                    so_far[key] = np.concatenate((so_far[key], ids), axis=2) if key in so_far else ids
                    response = _whole(response, so_far[key])
                texts = self._texts(response)
                if words:
                    texts = self._cut(texts, words, stops, key, streaming, values, response)
                yield _response(texts, response, index)
                if stops and all(stop.stopped for stop in stops.values()):
                    self._stop(self._engine, request_id)

    def _cut(self, texts, words, stops, key, streaming, values, response):
        echoed = not streaming and not values.get("exclude_input_in_output", np.zeros(1)).any()
        skip = len(values["text_input"].reshape(-1)[0].decode()) if echoed else 0
        cut = []
        for beam, text in enumerate(texts):
            place = (key, beam)
            if place not in stops or (self._accumulate and streaming):
                stops[place] = TextStop(words, skip)
            cut.append(stops[place].feed(text))
        return cut

    def _speculate(self, call, values, inputs, index):
        """The draft model guesses, the target model confirms and adds one, until the answer is complete."""
        prompt = inputs["input_ids"].as_numpy().reshape(-1).tolist()
        wanted, guesses = (int(values[n].reshape(-1)[0]) for n in ("max_tokens", "num_draft_tokens"))
        output, reason, last = [], b"", None
        common = {
            n: t for n, t in inputs.items() if n not in ("input_ids", "input_lengths", "request_output_len")
        }
        common["exclude_input_in_output"] = _tensor("exclude_input_in_output", [[True]], bool)
        plain = {n: t for n, t in common.items() if not n.startswith("lora_")}
        while len(output) < wanted and reason in (b"", b"length"):
            ids = [*prompt, *output]
            count = min(guesses, wanted - len(output) - 1)
            draft = []
            if count > 0:
                draft = _ids(self._first_of(call, plain | _prompt(ids, count), self._draft))
            extra = {"draft_input_ids": _tensor("draft_input_ids", [draft], np.int32)} if draft else {}
            last = self._first_of(call, common | _prompt(ids, len(draft) + 1) | extra, self._engine)
            output += _ids(last)
            reason = last["finish_reason"].as_numpy().reshape(-1)[0]
        exclude = values.get("exclude_input_in_output", np.zeros(1)).any()
        ids = np.array([[output if exclude else prompt + output]], np.int32)
        yield _response(self._texts(_whole(last, ids)), last, index)

    def _first_of(self, call, inputs, model):
        with call.asking(model) as request_id:
            return next(self._stream(inputs, model, request_id))

    def _stream(self, inputs, model, request_id):
        """Responses of an engine's model as {name: tensor}, each before the next exists."""
        request = pb_utils.InferenceRequest(
            model_name=model,
            inputs=list(inputs.values()),
            requested_output_names=ENGINE_OUTPUTS,
            request_id=request_id,
        )
        answers = request.exec(decoupled=True) if self._decoupled else [request.exec()]
        for answer in answers:
            _raise_error(answer)
            tensors = {tensor.name(): tensor for tensor in answer.output_tensors()}
            if tensors:
                yield tensors

    def _stop(self, model, request_id):
        stop = dict(_prompt([0], 0), stop=_tensor("stop", [[True]], bool))
        list(self._stream(stop, model, request_id))

    def _texts(self, response):
        sent = {POST[name]: tensor for name, tensor in response.items() if name in POST}
        inputs = {name: pb_utils.Tensor(name, tensor.as_numpy()) for name, tensor in sent.items()}
        output = self._call("postprocessing", inputs)["OUTPUT"].as_numpy().reshape(-1)
        return [text.decode() for text in output]

    def _call(self, model, inputs):
        outputs = CALLED[model]
        answer = pb_utils.InferenceRequest(
            model_name=model, inputs=list(inputs.values()), requested_output_names=outputs
        ).exec()
        _raise_error(answer)
        return {tensor.name(): tensor for tensor in answer.output_tensors()}


PREPARED = {
    "INPUT_ID": "input_ids",
    "REQUEST_INPUT_LEN": "input_lengths",
    "DECODER_INPUT_ID": "decoder_input_ids",
    "REQUEST_DECODER_INPUT_LEN": "decoder_input_lengths",
    "REQUEST_OUTPUT_LEN": "request_output_len",
    "STOP_WORDS_IDS": "stop_words_list",
    "BAD_WORDS_IDS": "bad_words_list",
    "EMBEDDING_BIAS": "embedding_bias",
    "OUT_END_ID": "end_id",
    "OUT_PAD_ID": "pad_id",
    "OUT_PROMPT_TABLE_EXTRA_IDS": "prompt_table_extra_ids",
}
POST = {
    "output_ids": "TOKENS_BATCH", "sequence_length": "SEQUENCE_LENGTH", "previous_ids": "PREVIOUS_IDS",
    "finish_reason": "FINISH_REASON",
}  # fmt: skip
CALLED = {"preprocessing": list(PREPARED), "postprocessing": ["OUTPUT"]}
TOLD = told_outputs()
ENGINE_OUTPUTS = [*POST, *TOLD]


def _first(tensor, default):
    return default if tensor is None else tensor.as_numpy().reshape(-1)[0]


def _named(values, names):
    return {new: pb_utils.Tensor(new, values[old]) for old, new in names.items() if old in values}


def _renamed(values, names):
    return [(new, values[old]) for old, new in names.items() if old in values]


def _tensor(name, rows, dtype):
    return pb_utils.Tensor(name, np.array(rows, dtype))


def _lora_weights(tensor, count):
    """Of each item. A single one goes on as it came: NumPy has no bfloat16."""
    if tensor is None or count == 1:
        return [tensor] * count
    try:
        rows = read_inputs([tensor])["lora_weights"]
    except RequestError:
        raise
    except Exception:
        raise RequestError(
            "lora_weights as BF16 can be sent with a batch of one only: send it once before the batch"
        ) from None
    return [pb_utils.Tensor("lora_weights", rows[index : index + 1]) for index in range(count)]


def _prompt(ids, count):
    return {
        "input_ids": _tensor("input_ids", [ids], np.int32),
        "input_lengths": _tensor("input_lengths", [[len(ids)]], np.int32),
        "request_output_len": _tensor("request_output_len", [[count]], np.int32),
    }


def _ids(response):
    return response["output_ids"].as_numpy()[0, 0].tolist()


def _whole(response, ids):
    """The response with all ids so far in place of the new ones."""
    lengths = np.array([[ids.shape[2]] * ids.shape[1]], np.int32)
    kept = {name: tensor for name, tensor in response.items() if name != "previous_ids"}
    return kept | {
        "output_ids": pb_utils.Tensor("output_ids", ids),
        "sequence_length": pb_utils.Tensor("sequence_length", lengths),
    }


def _response(texts, response, index):
    outputs = [pb_utils.Tensor("text_output", np.array([text.encode() for text in texts], np.object_))]
    outputs += [tensor for name, tensor in response.items() if name in TOLD and name != "batch_index"]
    if index is not None:
        outputs.append(_tensor("batch_index", [[index]], np.int32))
    return pb_utils.InferenceResponse(outputs)


def _raise_error(answer):
    if answer.has_error():
        raise RequestError(answer.error().message())


def _failure(error):
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(client_message(error, "tensorrt_llm_bls")))
