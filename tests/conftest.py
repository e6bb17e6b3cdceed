"""Fixtures and rules that every test shares."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest


def pytest_configure() -> None:
    """Let interrupts arrive: what a shell starts in the background ignores them, and so does what that starts."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """Return the path of the demo model, fetched once into the user's cache through `xllm pull`."""
    pull = [sys.executable, "-m", "xllm_service", "pull", "smollm2-135m"]
    done = subprocess.run(pull, stdout=subprocess.PIPE, text=True, check=True, timeout=600)
    return Path(done.stdout.strip().splitlines()[-1])


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs a CUDA device where there is none; nothing else is ever skipped."""
    if item.get_closest_marker("gpu") and not Path("/dev/nvidiactl").exists():
        pytest.skip("needs a CUDA device: this machine has none (/dev/nvidiactl)")
