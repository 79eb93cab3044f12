"""Protects groups of more than two ranks, and ranks with experts of their own, through whole engines: beams,
guides, drafts, logits, tables of embeddings, prefix reuse and steps that overlap, with adapters mixed."""

from __future__ import annotations

from typing import Any

import pytest
from running import run
from selection import extended
from test_group import World, assert_same

pytestmark = pytest.mark.usefixtures("one_thread", "forked_ranks")

SHARED = {"tensor_parallel_size": 4}
BOTH = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def check(world: World, **settings: Any) -> None:
    engine = world.engine(**settings)
    try:
        assert_same(run(engine, *world.requests), world.answers[0])
        assert_same(run(engine, *world.requests[-6:]), world.answers[1])
        stats = engine.stats()
        assert stats.kv_tokens_reused
        assert stats.max_adapters_in_step > 1
    finally:
        engine.close()


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("sparse"), "mixtral", ATTENTION)


@pytest.mark.parametrize(
    "settings",
    [
        {**BOTH, "moe_expert_parallel_size": 2, "enable_overlap": True},
        *extended(
            {"tensor_parallel_size": 2, "moe_expert_parallel_size": 2},
            {**SHARED, "moe_expert_parallel_size": 2, "enable_overlap": True},
        ),
    ],
    ids=["tp 2, pp 2, ep 2, overlapped", "ep 2", "moe_tp 2, moe_ep 2"],
)
def test_ranks_share_a_mixture_of_experts(sparse: World, settings: dict[str, Any]) -> None:
    check(sparse, **settings)
