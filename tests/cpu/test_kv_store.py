"""Protects KV blocks in host memory and on disk: they come back to what computed them and to nothing else,
from files that are whole, within the bounds; tokens are those without a store."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from running import read, run, tokens, tokens_of
from tiny_models import make_adapter, make_model

from manylora import LLM, KvCacheConfig, SamplingParams
from manylora.config.engine import EngineConfig
from manylora.engine.engine import Engine
from manylora.errors import ConfigError
from manylora.request import Request, Retention, SamplingConfig, mix
from manylora.stats import KvStoreStats

SIZE, LENGTH, NEW = 4, 41, 3
WHOLE = LENGTH // SIZE  # blocks of the prompt
BLOCK_BYTES = 4 * 2 * 2 * 2 * 16 * SIZE


class World:
    """Requests with one prompt, each computed by something else, and their tokens without a store."""

    def __init__(self, folder: Path) -> None:
        self.model = make_model(folder / "model", seed=1)
        kinds = {"modules": ("q_proj", "v_proj")}, {"modules": ("k_proj",), "rank": 4, "use_dora": True}
        paths = [make_adapter(folder / f"a{i}", self.model, seed=i, **kind) for i, kind in enumerate(kinds)]
        one, two = (read(path, self.model, number) for number, path in enumerate(paths, 1))
        again = read(make_adapter(folder / "a2", self.model, seed=9, modules=("q_proj",)), self.model, 3)
        loras = None, one, two, again, mix([(one, 0.5)]), mix([(one, 0.25)]), mix([(one, 0.5), (again, 2.0)])
        self.prompt = tuple(tokens(LENGTH))
        self.requests = [Request(self.prompt, SamplingConfig(max_tokens=NEW), lora) for lora in loras]
        self.requests += [
            Request(self.prompt, SamplingConfig(max_tokens=NEW), lora, cache_salt=salt)
            for lora, salt in ((None, "one"), (None, "two"), (one, "one"))
        ]
        plainly = Engine(EngineConfig(self.model, "cpu", "float32", tokens_per_block=SIZE))
        self.answers = [ask(plainly, request)[0] for request in self.requests]
        plainly.close()

    def engine(self, blocks: int = 20, **options: object) -> Engine:
        """With room for little more than one of them."""
        size = {"max_tokens_in_paged_kv_cache": blocks * SIZE, "tokens_per_block": SIZE}
        return Engine(EngineConfig(self.model, "cpu", "float32", **size, **options))  # type: ignore[arg-type]


def ask(engine: Engine, request: Request) -> tuple[list[int], int]:
    """The tokens, and how many blocks were not computed. Afterwards all blocks are in the store."""
    [events] = run(engine, request)
    metrics = events[-1].metrics
    assert metrics is not None
    while engine.save_blocks(1):
        pass
    return tokens_of(events), metrics.kv_reused_blocks


def stats(engine: Engine) -> KvStoreStats:
    found = engine.stats().kv_store
    assert found is not None
    return found


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("kv"))


def test_blocks_come_back_after_a_restart_and_only_to_what_computed_them(
    world: World, tmp_path: Path
) -> None:
    for expected in (0, WHOLE):
        engine = world.engine(kv_disk_cache_dir=tmp_path / "kv")
        for request, answer in zip(world.requests, world.answers, strict=True):
            assert ask(engine, request) == (answer, expected)
        assert stats(engine).disk_hits == expected * len(world.requests)
        engine.close()
    folder = tmp_path / "kv"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {file.stat().st_mode & 0o777 for file in folder.glob("*.kv")} == {0o600}


def test_evicted_blocks_come_back_from_host_memory_within_its_bound(world: World) -> None:
    engine = world.engine(kv_cache_host_memory_bytes=200 * BLOCK_BYTES)
    for expected in (0, WHOLE):
        found = [ask(engine, request) for request in world.requests]
        assert found == [(answer, expected) for answer in world.answers]
    counts = stats(engine)
    assert counts.host_hits > 0 == counts.host_evictions and counts.disk_bytes == 0
    engine.close()
    small = world.engine(kv_cache_host_memory_bytes=4 * BLOCK_BYTES)
    for request, answer in zip(world.requests * 2, world.answers * 2, strict=True):
        assert ask(small, request)[0] == answer
        assert stats(small).host_bytes <= 4 * BLOCK_BYTES
    assert stats(small).host_evictions > 0
    small.close()


@pytest.mark.parametrize("level", [1, 2])
def test_blocks_come_back_after_sleep_unless_the_weights_were_read_again(
    world: World, tmp_path: Path, level: int
) -> None:
    stays = tmp_path / "model"
    shutil.copytree(world.model, stays)
    engine = Engine(
        EngineConfig(stays, "cpu", "float32", tokens_per_block=SIZE, kv_cache_host_memory_bytes=2**20)
    )
    assert ask(engine, world.requests[0])[0] == world.answers[0]
    engine.sleep(level)
    if level == 2:
        other = make_model(tmp_path / "other", seed=2)
        shutil.copy(other / "model.safetensors", stays / "model.safetensors")
    engine.wake_up({"weights", "kv_cache"})
    found, reused = ask(engine, world.requests[0])
    assert (found == world.answers[0], reused) == ((True, WHOLE) if level == 1 else (False, 0))
    engine.reset_prefix_cache()
    assert ask(engine, world.requests[0])[1] == 0
    engine.close()


def test_another_checkpoint_or_dtype_finds_nothing(world: World, tmp_path: Path) -> None:
    request = world.requests[0]
    for model, dtype, expected in (
        (world.model, "float32", 0),
        (make_model(tmp_path / "other", seed=2), "float32", 0),  # its files have the same sizes
        (world.model, "float16", 0),
        (shutil.copytree(world.model, tmp_path / "copy"), "float32", WHOLE),
    ):
        engine = Engine(
            EngineConfig(model, "cpu", dtype, tokens_per_block=SIZE, kv_disk_cache_dir=tmp_path / "kv")
        )
        assert ask(engine, request)[1] == expected, (model, dtype)
        engine.close()


def test_a_file_that_is_not_whole_is_deleted_and_computed_again(world: World, tmp_path: Path) -> None:
    folder, request, answer = tmp_path / "kv", world.requests[1], world.answers[1]

    def broken(index: int, damage: Callable[[Path, Path], object]) -> None:
        engine = world.engine(kv_disk_cache_dir=folder)
        ask(engine, request)
        engine.close()
        files = sorted(folder.glob("*.kv"))
        damage(files[index], files[index - 1])
        engine = world.engine(kv_disk_cache_dir=folder)
        found, reused = ask(engine, request)
        assert found == answer and reused < WHOLE and stats(engine).damaged == 1
        engine.close()
        engine = world.engine(kv_disk_cache_dir=folder)
        assert ask(engine, request) == (answer, WHOLE), "it was written again"
        engine.close()

    def flip(file: Path, other: Path) -> None:
        content = bytearray(file.read_bytes())
        content[-7] ^= 1
        file.write_bytes(content)

    broken(0, flip)
    broken(1, lambda file, other: os.truncate(file, 100))
    broken(2, lambda file, other: os.truncate(file, 2**31))
    broken(3, lambda file, other: file.write_bytes(other.read_bytes()))  # valid, but another block's


def test_the_disk_is_bounded_and_its_loss_costs_nothing_but_copies(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, most = tmp_path / "kv", 12 * BLOCK_BYTES
    engine = world.engine(kv_disk_cache_dir=folder, kv_disk_cache_bytes=most)
    for request, answer in zip(world.requests, world.answers, strict=True):
        assert ask(engine, request)[0] == answer
        assert stats(engine).disk_bytes <= most
    engine.close()
    assert 0 < sum(file.stat().st_size for file in folder.glob("*.kv*")) <= most
    assert stats(engine).disk_evictions > 0
    engine = world.engine(kv_disk_cache_dir=folder)
    shutil.rmtree(folder)
    folder.write_text("no folder any more")
    with caplog.at_level(logging.WARNING, "manylora"):
        for request, answer in zip(world.requests, world.answers, strict=True):
            assert ask(engine, request)[0] == answer
        engine.close()
    assert len([one for one in caplog.records if "cannot be written" in one.message]) == 1


def test_blocks_below_the_least_priority_are_not_kept(world: World, tmp_path: Path) -> None:
    first = world.requests[0]
    low = Request(first.prompt, first.params, retention=Retention(((0, None, 20, None),), 20))
    for request, expected in ((low, 0), (low, 0), (first, 0), (first, WHOLE)):
        engine = world.engine(kv_disk_cache_dir=tmp_path, secondary_offload_min_priority=30)
        assert ask(engine, request)[1] == expected
        engine.close()


def test_many_at_once_with_blocks_that_come_and_go(world: World, tmp_path: Path) -> None:
    for policy, overlap in (("guaranteed_no_evict", False), ("max_utilization", True)):
        for _ in range(2):
            engine = world.engine(
                45, kv_disk_cache_dir=tmp_path / policy, batch_scheduler_policy=policy,
                enable_overlap=overlap, kv_cache_host_memory_bytes=30 * BLOCK_BYTES)  # fmt: skip
            found = run(engine, *world.requests, *world.requests)
            assert [tokens_of(events) for events in found] == world.answers * 2
            engine.close()


def test_a_sequence_goes_on_after_the_registered_blocks_of_its_prompt_are_gone(world: World) -> None:
    long = Request(world.prompt, SamplingConfig(max_tokens=30))
    plain = world.engine(60)
    [expected] = [tokens_of(events) for events in run(plain, long)]
    plain.close()
    for evicts in (False, True):
        engine = world.engine(36, kv_cache_host_memory_bytes=2**20)
        handles = [engine.submit(engine.prepare(one)) for one in (world.requests[0], long)]
        found = [token for _ in range(4) for token in tokens_of_step(engine, handles[1])]
        if evicts:  # those of the first request, which were computed twice
            others = [Request(tuple(tokens(LENGTH, seed)), SamplingConfig(max_tokens=NEW)) for seed in (3, 4)]
            handles += [engine.submit(engine.prepare(one)) for one in others]
        else:
            engine.reset_prefix_cache()
        while engine.has_work:
            found += tokens_of_step(engine, handles[1])
        assert found == expected
        engine.check()
        engine.close()


def tokens_of_step(engine: Engine, handle: int) -> list[int]:
    return [token for number, event in engine.step() if number == handle for token in event.token_ids]


def test_an_idle_engine_writes_blocks_and_llm_has_tensorrt_llms_names(world: World, tmp_path: Path) -> None:
    sizes = KvCacheConfig(host_cache_size=2**20, disk_cache_path=str(tmp_path), tokens_per_block=SIZE)
    greedy = SamplingParams(max_tokens=NEW, temperature=0, ignore_eos=True)
    for _ in range(2):
        with LLM(world.model, skip_tokenizer_init=True, kv_cache_config=sizes, dtype="float32") as llm:
            [output] = llm.generate([{"prompt_token_ids": list(world.prompt)}], greedy)
            assert list(output.outputs[0].token_ids) == world.answers[0]
    assert len(list(tmp_path.glob("*.kv"))) == (LENGTH + NEW - 1) // SIZE
    with pytest.raises(ValueError, match="disk_cache_size needs disk_cache_path"):
        KvCacheConfig(disk_cache_size=2**20)


def test_what_cannot_work_is_named(world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(
        ConfigError, match="kv_cache_host_memory_bytes 100 holds no block: one of 4 tokens takes"
    ):
        world.engine(kv_cache_host_memory_bytes=100)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"kv_disk_cache_dir .*file/kv cannot be made: Not a directory"):
        world.engine(kv_disk_cache_dir=tmp_path / "file" / "kv")
    model = make_model(tmp_path / "recurrent", "qwen3-next")
    with caplog.at_level(logging.WARNING, "manylora"):
        engine = Engine(EngineConfig(model, "cpu", "float32", kv_disk_cache_dir=tmp_path / "kv"))
    assert "kv_disk_cache_dir have no effect: models with recurrent layers" in caplog.text
    ask(engine, Request(world.prompt, SamplingConfig(max_tokens=2)))
    engine.close()
    assert not (tmp_path / "kv").exists()
