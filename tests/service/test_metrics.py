"""Metrics: what the dashboard asks for exists, and says what happened."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import generate_latest

from tests.service.conftest import Serve, eventually
from tests.service.fake_engine import FakeEngine
from xllm_client import ResourceExhaustedError
from xllm_service.app import Server

DASHBOARD = Path(__file__).parents[2] / "deploy" / "grafana" / "xllm.json"


def samples(server: Server) -> dict[str, float]:
    """Every sample by its name and labels, as a scrape would give them."""
    text = generate_latest(server.metrics.registry).decode()
    lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in lines}


def expressions(value: Any) -> list[str]:
    """Every query of a dashboard."""
    if isinstance(value, dict):
        own = [text for key in ("expr", "query") if isinstance(text := value.get(key), str)]
        return own + [text for each in value.values() for text in expressions(each)]
    return [text for each in value for text in expressions(each)] if isinstance(value, list) else []


async def test_every_metric_of_the_dashboard_exists_with_its_labels(serve: Serve, engine: FakeEngine) -> None:
    engine.answer = ["a", "b"]
    queries = expressions(json.loads(DASHBOARD.read_text()))
    wanted = set(re.findall(r"\bxllm_\w+", " ".join(queries)))
    assert len(wanted) > 15
    async with serve(metrics="127.0.0.1:0") as (server, client):
        await client.generate_once("x")
        with pytest.raises(Exception, match="temperature"):  # so that there is a failure
            await client.generate_once("x", temperature=-1.0)
        found = samples(server)
    assert wanted <= {name.partition("{")[0] for name in found}
    for query in queries:
        for name, labels in re.findall(r"\b(xllm_\w+)\{([^}]*)\}", query):
            own = set(re.findall(r"(\w+)=", labels)) - {"instance"}
            known = {label for sample in found if sample.startswith(name) for label in re.findall(r"(\w+)=", sample)}
            assert own <= known, query
        for labels in re.findall(r"by \((\w+)\)", query):
            assert labels in ("le", "model", "code", "reason"), query


async def test_a_generation_is_counted_in_every_way(serve: Serve, engine: FakeEngine) -> None:
    async with serve(metrics="127.0.0.1:0") as (server, client):
        call = client.generate("x")
        await eventually(lambda: engine.live)
        engine.accept()
        for _ in range(3):
            engine.token(1, "a")
            await anext(call)
        engine.finish()
        await call.result()
        found = samples(server)
    assert found["xllm_queue_seconds_count"] == 1
    assert found["xllm_time_to_first_token_seconds_count"] == 1
    assert found["xllm_time_per_output_token_seconds_count"] == 1
    assert found["xllm_delta_tokens_sum"] == 3
    assert found["xllm_inter_token_latency_seconds_count"] == found["xllm_delta_tokens_count"] - 1
    assert found["xllm_batch_size_requests_sum"] >= 1


async def test_a_call_cut_short_is_timed_until_its_blocks_are_free(serve: Serve, engine: FakeEngine) -> None:
    async with serve(metrics="127.0.0.1:0") as (server, client):
        call = client.generate("x")
        await eventually(lambda: engine.live)
        call.close()
        await eventually(lambda: engine.cancelled)
        await eventually(lambda: samples(server)["xllm_cancel_to_free_seconds_count"] == 1)


async def test_failures_are_counted_by_the_reason_that_was_told(serve: Serve, engine: FakeEngine) -> None:
    engine.max_queue = 0
    async with serve(metrics="127.0.0.1:0") as (server, client):
        with pytest.raises(ResourceExhaustedError):
            await client.generate_once("x")
        assert samples(server)['xllm_failures_total{reason="QUEUE_FULL"}'] == 1
