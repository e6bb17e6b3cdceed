"""Constraints compiled by turns of principals, and kept for those who ask again."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from tests.service.conftest import eventually
from xllm_service.constraints import Constraint, Matcher
from xllm_service.engine.compilations import MAX_WAITING, Compilations
from xllm_service.errors import Reason, ServiceError


class _FakeMatcher:
    """Says what it was made of, and how often it was copied."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.num_forks = 0

    def fork(self) -> _FakeMatcher:
        self.num_forks += 1
        return _FakeMatcher(self.text)


class Shop:
    """Compilations whose compiler waits while a test wants it to."""

    def __init__(self) -> None:
        self.compiled: list[str] = []
        self.go_on = threading.Event()
        self.compilations = Compilations(self._compile)

    def _compile(self, constraint: Constraint) -> Matcher:
        self.compiled.append(constraint.text)
        assert self.go_on.wait(30)
        return cast(Matcher, _FakeMatcher(constraint.text))

    def ask(self, owner: str, text: str) -> asyncio.Task[Any]:
        return asyncio.create_task(self.compilations.get(owner, Constraint("regex", text)))


@pytest.fixture
async def shop() -> AsyncIterator[Shop]:
    shop = Shop()
    yield shop
    shop.go_on.set()
    await asyncio.to_thread(shop.compilations.close)


async def test_one_principals_many_constraints_delay_another_by_one_at_most(shop: Shop) -> None:
    busy = [shop.ask("busy", f"costly {number}") for number in range(20)]
    await eventually(lambda: shop.compiled)
    quiet = shop.ask("quiet", "cheap")
    await asyncio.sleep(0)
    shop.go_on.set()
    await asyncio.gather(*busy, quiet)
    assert shop.compiled.index("cheap") <= 2


async def test_who_has_too_many_waiting_is_told_to_retry_and_others_are_served(shop: Shop) -> None:
    busy = [shop.ask("busy", "first")]
    await eventually(lambda: shop.compiled)
    busy += [shop.ask("busy", str(number)) for number in range(MAX_WAITING)]
    await asyncio.sleep(0)
    with pytest.raises(ServiceError) as caught:
        await shop.ask("busy", "one more")
    assert (caught.value.reason, caught.value.metadata["queue_limit"]) == (Reason.QUEUE_FULL, str(MAX_WAITING))
    assert caught.value.retry_delay_s is not None
    quiet = shop.ask("quiet", "cheap")
    shop.go_on.set()
    await asyncio.gather(*busy, quiet)


async def test_what_was_compiled_is_kept_for_its_principal_and_copied_for_each_call(shop: Shop) -> None:
    shop.go_on.set()
    first = await shop.ask("a", "x")
    assert (await shop.ask("a", "x")) is not first
    assert shop.compiled == ["x"]
    await shop.ask("b", "x")
    assert shop.compiled == ["x", "x"], "how long it takes tells nobody what others have sent"


async def test_calls_that_wait_for_the_same_constraint_get_one_each(shop: Shop) -> None:
    tasks = [shop.ask("a", "x") for _ in range(5)]
    await eventually(lambda: shop.compiled)
    tasks += [shop.ask("a", "y") for _ in range(5)]
    await asyncio.sleep(0)
    shop.go_on.set()
    found = await asyncio.gather(*tasks)
    assert len({id(one) for one in found}) == 10
    assert shop.compiled.count("y") == 1


async def test_one_principal_pushes_out_none_of_anothers(shop: Shop) -> None:
    shop.go_on.set()
    await shop.ask("quiet", "x")
    for number in range(40):
        await shop.ask("busy", str(number))
    shop.compiled.clear()
    await shop.ask("quiet", "x")
    assert shop.compiled == [] and len(shop.compilations) < 30


async def test_a_long_text_whose_matcher_may_be_large_is_not_kept(shop: Shop) -> None:
    shop.go_on.set()
    for _ in range(2):
        await shop.ask("a", "x" * 5000)
    assert len(shop.compiled) == 2 and len(shop.compilations) == 0


async def test_a_failure_is_not_kept(shop: Shop) -> None:
    problems = [ServiceError(Reason.COMPILER_UNAVAILABLE, "no memory")]

    def compile_one(constraint: Constraint) -> Matcher:
        if problems:
            raise problems.pop()
        return cast(Matcher, _FakeMatcher(constraint.text))

    compilations = Compilations(compile_one)
    with pytest.raises(ServiceError):
        await compilations.get("a", Constraint("regex", "x"))
    assert cast(Any, await compilations.get("a", Constraint("regex", "x"))).text == "x"
    await asyncio.to_thread(compilations.close)
