"""Fixtures of the client's tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_server import FakeServer


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FakeServer]:
    fake = FakeServer(tmp_path / "xllm.sock")
    fake.set_serving(True)
    fake.start()
    yield fake
    fake.stop()
