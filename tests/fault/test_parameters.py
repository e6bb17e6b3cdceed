"""Parameters out of their range, and constraints that are no constraints: refused by the name of the field."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.e2e.serving import serving
from tests.fault.invariants import unharmed
from xllm_client import InvalidArgumentError, XllmError

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"temperature": NAN}, "spec.sampling.temperature"),
        ({"temperature": INF}, "spec.sampling.temperature"),
        ({"temperature": -1.0}, "spec.sampling.temperature"),
        ({"top_p": NAN}, "spec.sampling.top_p"),
        ({"top_p": -1.0}, "spec.sampling.top_p"),
        ({"top_p": 1.5}, "spec.sampling.top_p"),
        ({"top_k": -5}, "spec.sampling.top_k"),
        ({"min_p": -0.1}, "spec.sampling.min_p"),
        ({"repetition_penalty": 0.0}, "spec.sampling.repetition_penalty"),
        ({"repetition_penalty": NAN}, "spec.sampling.repetition_penalty"),
        ({"frequency_penalty": INF}, "spec.sampling.frequency_penalty"),
        ({"presence_penalty": -INF}, "spec.sampling.presence_penalty"),
    ],
)
async def test_22_sampling_out_of_range(random_model: Path, tmp_path: Path, options: Any, field: str) -> None:
    await refused(random_model, tmp_path, options, field)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"max_tokens": 0}, "spec.limits.max_tokens"),
        ({"max_tokens": -1}, "spec.limits.max_tokens"),
        ({"max_tokens": 2**31}, "spec.limits.max_tokens"),
        ({"num_outputs": 1_000_000}, "spec.num_outputs"),
        ({"top_logprobs": 320}, "spec.output.top_logprobs"),
        ({"top_logprobs": 2**31 - 1}, "spec.output.top_logprobs"),
        ({"stop": ["x"] * 17}, "spec.stop.strings"),
        ({"stop": ["x" * 257]}, "spec.stop.strings[0]"),
    ],
)
async def test_23_counts_beyond_their_cap(random_model: Path, tmp_path: Path, options: Any, field: str) -> None:
    await refused(random_model, tmp_path, options, field)


async def refused(model: Path, folder: Path, options: Any, field: str) -> None:
    async with serving(model, folder) as (server, client), unharmed(server, client) as seen:
        for call in (client.generate("x", **options).result(), client.generate_once("x", **options)):
            with pytest.raises(InvalidArgumentError) as caught:
                await call
            assert seen.saw(caught.value).field_violations[0].field == field


@pytest.mark.parametrize(
    "constraint",
    [
        {"json_schema": "{" * 60_000},
        {"json_schema": '{"items": ' * 60_000 + "{}" + "}" * 60_000},
        {"json_schema": '{"type": "nonsense"}'},
        {"regex": "(" * 60_000},
        {"regex": "(" * 60_000 + ")" * 60_000},
        {"regex": "(?=look)ahead"},
        {"grammar": "start: (" * 20_000},
        {"grammar": "no grammar at all"},
        {"choice": [""]},
    ],
)
async def test_24_constraints_that_are_invalid_or_too_deep(random_model: Path, tmp_path: Path, constraint: Any) -> None:
    async with contextlib.AsyncExitStack() as stack:
        server, client = await stack.enter_async_context(serving(random_model, tmp_path))
        await client.generate_once("x", choice=["a"])  # constraints are tried in a process that stays from the first on
        seen = await stack.enter_async_context(unharmed(server, client))
        seen.received_bytes += len(str(constraint))
        for call in (client.generate("x", **constraint).result(), client.generate_once("x", **constraint)):
            with pytest.raises(XllmError) as caught:
                await call
            assert seen.saw(caught.value).code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED)
