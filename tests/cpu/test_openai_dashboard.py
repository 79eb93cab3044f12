"""Protects the dashboard for `manylora serve`: every panel finds samples in a real scrape."""

from __future__ import annotations

from dashboard import without_samples
from serving import DEMO, Running


def test_every_panel_finds_samples_in_a_scrape_of_serve() -> None:
    with Running(lora_root=(DEMO / "adapters",)) as server:
        assert server.post(model="chinese", prompt="a", max_tokens=2).status_code == 200
        scrape = server.http.get("/metrics").text
    assert without_samples(scrape) == []
    assert without_samples(scrape.replace("manylora_adapter_ttft", "x")) != []
