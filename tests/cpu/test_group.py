"""Protects an engine of several processes: its answers are those of one process, whatever is asked of it, and
when one of its processes ends or hangs, all do, and every request is told."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from forked import ForkServer
from running import read, run, tokens_of
from tiny_models import make_adapter, make_model

from manylora.adapters.convert import convert_peft
from manylora.config.engine import EngineConfig, LoraCacheConfig
from manylora.engine.engine import Engine
from manylora.engine.loop import EngineLoop
from manylora.engine.step_messages import Others
from manylora.errors import EngineDeadError
from manylora.model.checkpoint import read_model_config
from manylora.request import Event, Guide, LoraInput, Request, SamplingConfig, mix
from manylora.stats import EngineStats

pytestmark = pytest.mark.usefixtures("one_thread")

ENDED_S = 60.0  # within which a loss must be told; it takes at most 4 on an idle machine
NEW = 10
MODULES = ("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj")
TENSOR, PIPELINE = {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}
# In rows of rank 1: room for a few of the adapters on the device and on the host.
CACHE = {"max_adapter_size": 16, "num_device_module_layer": 224, "num_host_module_layer": 260}
SCHEMA = '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'


class World:
    """A tiny model, adapters of several ranks, and what one process answers."""

    def __init__(
        self, folder: Path, family: str = "llama", modules: tuple[str, ...] = MODULES, **settings: int
    ) -> None:
        picks = random.Random(1)
        self.model = make_model(folder / "model", family, seed=1, **settings)
        self.lora: list[LoraInput | None] = [None]
        for task in range(1, 7):
            own = tuple(picks.sample(modules, 3))
            rank = picks.choice([4, 8, 16])
            made = make_adapter(folder / str(task), self.model, seed=task, rank=rank, modules=own)
            self.lora.append(LoraInput(task, *convert_peft(made, "float32")))
        self.requests = [*self._greedy(picks), *self._others(picks)]
        engine = self.engine()
        self.answers = [run(engine, *self.requests), run(engine, *self.requests[-6:])]

    def engine(self, **settings: int) -> Engine:
        lora = LoraCacheConfig(**CACHE)
        limits = {"max_seq_len": 128, "tokens_per_block": 4, "max_batch_size": 4, "max_beam_width": 3}
        given = {**limits, "max_num_tokens": 64, **settings}
        return Engine(EngineConfig(self.model, device="cpu", tokenizer_dir=self.model, lora=lora, **given))

    def _greedy(self, picks: random.Random) -> list[Request]:
        lengths = [picks.randint(1, 90) for _ in range(14)]
        prompts = [tuple(picks.randrange(250) for _ in range(length)) for length in lengths]
        params = SamplingConfig(max_tokens=NEW)
        return [Request(one, params, self.lora[i % 7]) for i, one in enumerate(prompts)]

    def _others(self, picks: random.Random) -> list[Request]:
        prompt = tuple(picks.randrange(250) for _ in range(20))
        table = np.random.default_rng(1).standard_normal((3, 64)).astype(np.float32)
        vocab = read_model_config(self.model).vocab_size
        return [
            Request(prompt, SamplingConfig(max_tokens=NEW, beam_width=3), self.lora[1]),
            Request(prompt, SamplingConfig(max_tokens=NEW, temperature=0.8, top_p=0.9, seed=5), self.lora[2]),
            Request(prompt, SamplingConfig(max_tokens=NEW, guide=Guide("json_schema", SCHEMA)), self.lora[3]),
            Request(
                prompt,
                SamplingConfig(max_tokens=4, return_context_logits=True, return_generation_logits=True),
                self.lora[4],
            ),
            Request((vocab, *prompt, vocab + 2), SamplingConfig(max_tokens=NEW), prompt_table=table),
            Request(prompt, SamplingConfig(max_tokens=NEW), self.lora[5], draft=(1, 2, 3)),
        ]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("group"))


@pytest.fixture(scope="module", params=[TENSOR, PIPELINE], ids=["tensor", "pipeline"])
def engine(world: World, forks: ForkServer, request: pytest.FixtureRequest) -> Iterator[Engine]:
    """Ranks that share layers are started as everywhere, those of stages as test_group_models.py does."""
    if request.param is PIPELINE:
        request.getfixturevalue("forked_ranks")
    made = world.engine(**request.param)
    yield made
    made.close()
    assert not followers(forks)


def test_mixes_and_activated_adapters_answer_as_in_one_process(
    world: World, engine: Engine, tmp_path: Path
) -> None:
    invoke = {"alora_invocation_tokens": [7, 8], "task_type": "CAUSAL_LM"}
    folder = make_adapter(tmp_path / "a", world.model, seed=9, rank=4, modules=MODULES, **invoke)
    activated, members = read(folder, world.model, 9), world.lora
    prompt, params = tuple(range(30, 170)), SamplingConfig(max_tokens=NEW)
    loras = [
        mix([(members[1], 0.5), (members[2], -1.25), (members[4], 2.0)]),  # type: ignore[list-item]
        mix([(members[3], 0.7)]),  # type: ignore[list-item]
        activated,
        None,
    ]
    requests = [Request((*prompt[: 40 + 10 * i], 7, 8, i), params, one) for i, one in enumerate(loras)]
    alone = world.engine()
    want, got = run(alone, *requests), run(engine, *requests)
    alone.close()
    assert [tokens_of(events) for events in got] == [tokens_of(events) for events in want]
    assert len({tuple(tokens_of(events)) for events in want}) == len(loras)


def followers(forks: ForkServer) -> list[int]:
    """The processes of other ranks that this one has started."""
    found = forks.running()
    for task in Path("/proc/self/task").iterdir():
        for pid in _text(task / "children").split():
            found += [int(pid)] if "manylora.engine.follower" in _text(Path(f"/proc/{pid}/cmdline")) else []
    return found


def _text(file: Path) -> str:
    """Empty for a thread or a process that has just ended."""
    try:
        return file.read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return ""


def assert_same(found: list[list[Event]], expected: list[list[Event]]) -> None:
    for i, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        assert mine[-1].error is None, i
        assert [e.token_ids for e in mine] == [e.token_ids for e in theirs], i
        assert [b.token_ids for b in mine[-1].beams] == [b.token_ids for b in theirs[-1].beams], i
        for name in ("context_logits", "generation_logits"):
            for one, other in zip(mine, theirs, strict=True):
                if getattr(other, name) is not None:
                    np.testing.assert_allclose(getattr(one, name), getattr(other, name), atol=2e-4)


def test_answers_are_those_of_one_process(
    world: World, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, keep = [], Others.keep
    monkeypatch.setattr(Others, "keep", lambda *given: (kept.append(given), keep(*given)))
    stats = check(world, engine)
    assert stats.adapters.device_evictions
    if engine.config.tensor_parallel_size > 1:  # half of the layers leave room for all on the host
        assert stats.adapters.host_evictions
        assert kept, "no adapter that was waited for had to leave the host"


def check(world: World, engine: Engine) -> EngineStats:
    assert_same(run(engine, *world.requests), world.answers[0])
    assert_same(run(engine, *world.requests[-6:]), world.answers[1])
    stats = engine.stats()
    assert stats.kv_tokens_reused
    assert stats.max_adapters_in_step > 1
    return stats


@pytest.mark.usefixtures("forked_ranks")
def test_ranks_share_a_mixture_of_experts(tmp_path: Path) -> None:
    sparse = World(tmp_path, "mixtral", ("q_proj", "k_proj", "v_proj", "o_proj"))
    engine = sparse.engine(**TENSOR, **PIPELINE, moe_expert_parallel_size=2, enable_overlap=True)
    try:
        check(sparse, engine)
    finally:
        engine.close()


@pytest.mark.usefixtures("slow_steps")
def test_a_lost_process_ends_the_group_and_tells_every_request(engine: Engine, forks: ForkServer) -> None:
    """By SIGKILL or, of a pipeline, by SIGSTOP."""
    (pid,), number = followers(forks), signal.SIGKILL
    reason = "rank 1 of 2 ended with signal 9"
    if engine.config.pipeline_parallel_size > 1:
        number, reason = signal.SIGSTOP, "rank 1 of 2 was stopped by a signal"
    loop, under_way, told = EngineLoop(engine), threading.Event(), threading.Semaphore(0)
    errors: list[Exception | None] = []

    def sink(event: Event) -> None:
        under_way.set()
        if event.last:
            errors.append(event.error)
            told.release()

    for _ in range(20):
        loop.submit(Request((1, 2, 3), SamplingConfig(max_tokens=120), streaming=True), sink)
    assert under_way.wait(ENDED_S)
    os.kill(pid, number)
    assert all(told.acquire(timeout=ENDED_S) for _ in range(20))
    assert {str(error) for error in errors} == {f"The engine stopped: {reason}"}
    with pytest.raises(EngineDeadError, match=reason):
        loop.submit(Request((1,)), sink)
    loop.close()
    assert not followers(forks)
