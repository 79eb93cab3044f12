"""Protects an engine of several processes: its answers are those of one process, whatever is asked of it; how
its ranks find each other and what they tell each other; those that `manylora build` records; and when one of
its processes ends or hangs, all do, and every request is told."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from forked import ForkServer
from running import read, run, tokens_of
from serving import DEMO, Running
from tiny_models import make_adapter, make_model
from waiting import wait_for

from manylora import LLM, LoRARequest, SamplingParams
from manylora.adapters.convert import convert_peft
from manylora.adapters.tensors import Adapter
from manylora.cli import main
from manylora.config.engine import EngineConfig, LoraCacheConfig
from manylora.doors.triton.launcher.processes import free_port
from manylora.engine.engine import Engine
from manylora.engine.follower import Follower
from manylora.engine.loop import EngineLoop
from manylora.engine.step_messages import END, Others, write_message
from manylora.errors import ConfigError, EngineDeadError
from manylora.model.checkpoint import read_model_config
from manylora.ranks import leader as leader_module
from manylora.ranks import rendezvous
from manylora.ranks.channel import Channel, Message
from manylora.ranks.leader import Leader, Watch
from manylora.ranks.rank_info import RankInfo, ends_with_launcher, find_rank, started_rank
from manylora.ranks.rendezvous import Link, check_identity, identity
from manylora.request import Event, Guide, LoraInput, Request, SamplingConfig, mix
from manylora.stats import EngineStats
from manylora.system.lifeline import OwnClock

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


@pytest.fixture
def channels() -> Iterator[tuple[Link, Channel, Channel]]:
    """Rank 0's link to rank 1, and the other ends of its two channels."""
    steps, adapters = (tuple(map(Channel, socket.socketpair())) for _ in range(2))
    yield Link(1, steps[0], adapters[0], None), steps[1], adapters[1]
    for one in (*steps, *adapters):
        one.close()


def open_leader(link: Link, patch: pytest.MonkeyPatch) -> Leader:
    watch = SimpleNamespace(links=[link], reason=None, close=lambda: None)
    patch.setattr(leader_module, "Watch", lambda *_: watch)
    patch.setattr(rendezvous, "open_store", lambda _: SimpleNamespace(port=0))
    patch.setattr(rendezvous, "group_store", lambda *_: None)
    patch.setattr(Leader, "_greet", lambda *_: None)
    return Leader(EngineConfig(Path()), RankInfo(0, 2, 0, 2))


def open_follower(patch: pytest.MonkeyPatch) -> Follower:
    """Without a model; each adapter is of no rows."""
    pool = SimpleNamespace(geometry=None, element_bytes=4, write_host=lambda *_: None)
    ops = SimpleNamespace(reserve=lambda *_: None)
    device = SimpleNamespace(ops=ops, torch=None, activate=lambda: None)
    slicer = SimpleNamespace(layout=lambda *_: None, slice=lambda adapter: adapter)
    parts = SimpleNamespace(device=device, limits=None, slicer=slicer)
    patch.setattr("manylora.engine.follower.open_pool", lambda _: pool)
    return Follower(parts)  # type: ignore[arg-type]


def test_pages_are_given_to_another_adapter_after_the_steps_that_read_them(
    channels: tuple[Link, Channel, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank may be behind: rank 0 does not wait for it after each step."""
    link, steps, adapters = channels
    leader, follower = open_leader(link, monkeypatch), open_follower(monkeypatch)
    go, found = threading.Event(), []

    def read(message: Message) -> None:
        assert go.wait(ENDED_S)
        found.append(sorted(follower._held))

    follower._do["read"] = read
    threads = [
        threading.Thread(target=follower.take_adapters, args=(adapters,), daemon=True),
        threading.Thread(target=follower.run, args=(steps,), daemon=True),
    ]
    for thread in threads:
        thread.start()
    leader.ask(write_message(Adapter("old", (), ()), [0]))
    leader.tell(Message("read"))
    leader.tell(Message("read"))
    message = write_message(Adapter("new", (), ()), [0])
    writer = threading.Thread(target=leader.ask, args=(message,), daemon=True)
    writer.start()
    writer.join(0.3)
    assert writer.is_alive(), "written while a step was to read what was there before"
    go.set()
    writer.join(ENDED_S)
    leader.tell(Message("read"))
    leader.tell(Message(END, {"for_good": True}))
    threads[1].join(ENDED_S)
    assert found == [["old"], ["old"], ["new"]]


def test_a_pause_of_all_ranks_is_no_loss(
    channels: tuple[Link, Channel, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a container that is paused; a silence while rank 0 runs is one."""
    link, steps, _ = channels
    pause, looks = [0.0], itertools.count()
    looked = [0.0, 0]  # the clock at the last look, and which look it was

    def clock() -> float:
        looked[:] = time.monotonic() + pause[0], next(looks)
        return looked[0]

    monkeypatch.setattr(leader_module, "OwnClock", partial(OwnClock, clock=clock))
    watch = Watch(2, [link])
    try:
        steps.send(Message("alive"))
        wait_for(lambda: 1 in watch._heard)
        before, pause[0] = looked[0], 1000.0
        wait_for(lambda: looked[0] > before + 1000.0)
        paused = looked[1]  # its ranks have been judged once the next look begins
        wait_for(lambda: looked[1] > paused)
        assert watch.reason is None
        monkeypatch.setattr(leader_module, "SILENCE_S", 1.0)
        assert watch.wait_loss(ENDED_S) == "rank 1 of 2 has not answered for 1 s"
    finally:
        watch.close()


TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
MPIRUN = {
    f"OMPI_COMM_WORLD_{name}": value
    for name, value in {"RANK": "3", "SIZE": "4", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}.items()
}
SCRIPT = """
import sys
from manylora import LLM, SamplingParams
with LLM(sys.argv[1], tensor_parallel_size=2, device="cpu", max_batch_size=2) as llm:
    print(llm.generate("The", SamplingParams(max_tokens=8, temperature=0)).outputs[0].token_ids)
"""


def test_places_are_those_of_launchers() -> None:
    assert find_rank(2, {}) == RankInfo.alone(2)
    host = {"MASTER_ADDR": "host0"}
    assert find_rank(4, TORCHRUN | host | {"MASTER_PORT": "7"}) == RankInfo(3, 4, 1, 2, "host0", 7)
    assert find_rank(4, MPIRUN | host) == RankInfo(3, 4, 1, 2, "host0", 29500)
    assert find_rank(1, TORCHRUN) == RankInfo.alone(1), "each process has an engine of its own"
    assert (started_rank(TORCHRUN), started_rank({}), started_rank({"RANK": "0", "WORLD_SIZE": "1"})) == (
        3,
        0,
        0,
    )
    assert ends_with_launcher(MPIRUN) and not ends_with_launcher(TORCHRUN), "set by hand, nobody waits"


@pytest.mark.parametrize(
    ("environment", "text"),
    [
        (TORCHRUN | {"MASTER_ADDR": "a", "WORLD_SIZE": "8"}, "torchrun has started 8 processes"),
        (MPIRUN, "ranks on several hosts need MASTER_ADDR"),
        (TORCHRUN | {"RANK": "x"}, "RANK must be a whole number, got 'x'"),
        (
            {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "host0"},
            "LOCAL_WORLD_SIZE is not: set it to the number of ranks on this host, and LOCAL_RANK to 0",
        ),
    ],
)
def test_places_that_cannot_be_are_refused(environment: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        find_rank(4, environment)


def test_a_rank_with_something_else_is_named(tmp_path: Path) -> None:
    config = EngineConfig(DEMO / "base", tensor_parallel_size=2)
    expected = identity(config)
    check_identity(1, identity(replace(config, tokenizer_dir=Path("/elsewhere"))), expected)
    with pytest.raises(ConfigError, match="rank 1 was started with another max_batch_size than rank 0: 3,"):
        check_identity(1, identity(replace(config, max_batch_size=3)), expected)
    other = shutil.copytree(DEMO / "base", tmp_path / "model")
    with (other / "model.safetensors").open("ab") as file:
        file.write(b"\0")
    with pytest.raises(ConfigError, match=r"another checkpoint than rank 0$"):
        check_identity(1, identity(replace(config, model_dir=other)), expected)


def test_two_processes_that_a_launcher_has_started_are_one_engine() -> None:
    """On two hosts: tests/server/test_ranks_on_hosts.py."""
    both = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    both |= {"MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(DEMO / "base")],
            env=os.environ | both | {"RANK": rank, "LOCAL_RANK": rank},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in "01"
    ]
    try:
        (answer, log), (nothing, _) = (process.communicate(timeout=100) for process in processes)
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], log
    assert json.loads(answer) and not nothing


CHINESE, TEXT = DEMO / "adapters" / "chinese", "What is the capital of France?\nAnswer:"
GREEDY = SamplingParams(max_tokens=24, temperature=0)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For two ranks that share each layer."""
    path = tmp_path_factory.mktemp("built") / "model"
    flags = ["--model_dir", str(DEMO / "base"), "--output_dir", str(path), "--max_seq_len", "128"]
    assert main(["build", *flags, "--tp_size", "2"]) == 0
    return path


@pytest.fixture(scope="module")
def expected(forked_ranks: ForkServer) -> list[str]:
    """Of the base and of the adapter, by one process."""
    return texts(forked_ranks, DEMO / "base", ranks=1)


def texts(forks: ForkServer, model: Path, ranks: int, **settings: int) -> list[str]:
    with LLM(model, device="cpu", dtype="float32", enable_lora=True, **settings) as llm:
        assert len(forks.running()) == ranks - 1
        adapters = [None, LoRARequest("chinese", 1, str(CHINESE))]
        return [one.outputs[0].text for one in llm.generate([TEXT] * 2, GREEDY, adapters)]


def test_the_python_api_starts_them(built: Path, expected: list[str], forked_ranks: ForkServer) -> None:
    assert expected[0] != expected[1]
    assert texts(forked_ranks, built, ranks=2) == expected
    assert not forked_ranks.running()


def test_others_that_are_asked_for_win(built: Path, expected: list[str], forked_ranks: ForkServer) -> None:
    assert texts(forked_ranks, built, ranks=1, tensor_parallel_size=1) == expected


def test_the_server_starts_them(built: Path, expected: list[str], forked_ranks: ForkServer) -> None:
    server = Running(model=built, dtype="float32", lora_root=(CHINESE.parent,))
    try:
        assert len(forked_ranks.running()) == 1
        for name, text in zip(("demo", "chinese"), expected, strict=True):
            answer = server.post(model=name, prompt=TEXT, max_tokens=24, temperature=0)
            assert answer.json()["choices"][0]["text"] == text
    finally:
        server.close()
    assert not forked_ranks.running()


def test_a_build_for_ranks_that_cannot_share_the_model_says_what_would_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_model(tmp_path / "model", "granite4")
    assert main(["build", "--model_dir", str(model), "--output_dir", str(tmp_path / "out"), "--tp_size", "3"])
    assert "--tp_size must divide the model's 4 attention heads, got 3; " in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
