"""Constraints compiled by turns of principals, and kept for those who ask again."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from tests.service.conftest import eventually
from xllm_service.constraints import CompiledConstraint, Constraint
from xllm_service.engine.compilations import MAX_WAITING, Compilations
from xllm_service.errors import Reason, ServiceError


class _FakeMatcher:
    """Says what it follows."""

    def __init__(self, text: str) -> None:
        self.text = text


class _FakeCompiled:
    """Says of what it was made."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.num_copies = 1

    def add_copy(self) -> None:
        self.num_copies += 1

    def start(self) -> _FakeMatcher:
        return _FakeMatcher(self.text)


class Shop:
    """Compilations whose compiler waits while a test wants it to."""

    def __init__(self) -> None:
        self.compiled: list[str] = []
        self.go_on = threading.Event()
        self.compilations = Compilations(self._compile)

    def _compile(self, constraint: Constraint) -> CompiledConstraint:
        self.compiled.append(constraint.text)
        assert self.go_on.wait(30)
        self.made = _FakeCompiled(constraint.text)
        return cast(CompiledConstraint, self.made)

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


async def test_calls_that_ask_again_have_a_copy_made_until_there_are_enough(shop: Shop) -> None:
    shop.go_on.set()
    shop.compilations.num_copies = 3
    found = [await shop.ask("a", "x") for _ in range(6)]
    assert shop.compiled == ["x"] and shop.made.num_copies == 3
    assert len({id(one) for one in found}) == 6 and {one.text for one in found} == {"x"}


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

    def compile_one(constraint: Constraint) -> CompiledConstraint:
        if problems:
            raise problems.pop()
        return cast(CompiledConstraint, _FakeCompiled(constraint.text))

    compilations = Compilations(compile_one)
    with pytest.raises(ServiceError):
        await compilations.get("a", Constraint("regex", "x"))
    assert cast(Any, await compilations.get("a", Constraint("regex", "x"))).text == "x"
    await asyncio.to_thread(compilations.close)
