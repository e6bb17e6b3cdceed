"""Masks on their way into the core: no request waits for one that does not come."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cyengine.errors import InvalidArgumentError
from cyengine.types import TokenMask
from tests.service.fake_engine import FakeEngine
from xllm_service.constraints import Constrained, Matcher
from xllm_service.engine import masks


class _RefusingEngine(FakeEngine):
    def __init__(self, problem: Exception) -> None:
        super().__init__()
        self.problem = problem

    def push_masks(self, masks: Iterable[TokenMask]) -> None:
        raise self.problem


class _Panic(BaseException):
    """As what a fault of llguidance's own raises."""


class _BrokenMaker:
    def __init__(self, problem: BaseException) -> None:
        self.problem = problem

    def masks(self, matchers: Sequence[Matcher]) -> list[bytes | memoryview]:
        raise self.problem


@pytest.mark.parametrize("problem", [InvalidArgumentError("token_index"), ValueError("words")])
def test_masks_that_the_core_does_not_take_end_their_requests(problem: Exception) -> None:
    core = _RefusingEngine(problem)
    expect_ends(core, lambda: Constrained(cast(Matcher, None), free_until="</think>"))


@pytest.mark.parametrize("problem", [MemoryError(), _Panic()])
def test_masks_that_cannot_be_computed_end_their_requests(
    monkeypatch: pytest.MonkeyPatch, problem: BaseException
) -> None:
    monkeypatch.setattr(masks, "MaskMaker", lambda *_: _BrokenMaker(problem))
    matcher: Any = SimpleNamespace(is_complete=False, error="")
    expect_ends(FakeEngine(), lambda: Constrained(matcher))


def expect_ends(core: FakeEngine, make_row: Callable[[], Constrained]) -> None:
    """Two requests, one after the other, are cancelled with an error; the second one finds the thread alive."""
    model: Any = SimpleNamespace(free_mask=b"\xff" * 4, mask_bytes=4, expect_mask_threads=lambda _: None)
    worker = masks.MaskWorker(core, model)
    try:
        for request_id in (1, 2):
            row = make_row()
            worker.begin([(request_id, row)])
            deadline = time.monotonic() + 20
            while request_id not in core.cancelled:
                assert time.monotonic() < deadline, "the request waits for its mask for ever"
                time.sleep(0.001)
            assert row.error
    finally:
        worker.close()
        core.close()
