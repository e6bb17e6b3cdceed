"""What holds after every fault, whatever it was; each test of this folder runs inside `unharmed`.

I1 the process lives; I2 a stream beside the fault keeps its bytes; I3 blocks, slots, queue, tasks and descriptors are
back at their baseline; I4 memory follows the bytes that came; I5 health tells the truth; I6 no log line holds another
request's text or a path of the server's.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.e2e.serving import eventually, is_idle, stats
from xllm_client import AsyncClient, XllmError
from xllm_service.app import Server

# The answer is to be there within a second; a machine that is busy elsewhere gets more.
SOON_S = 10.0
# Of growth that no input explains: allocators keep pages, and the stream beside the fault has its own.
_SLACK_BYTES = 64 << 20

PROMPT = "the world"


def descriptors() -> int:
    """Descriptors that this process has open."""
    return len(os.listdir("/proc/self/fd"))


def memory_bytes(key: str = "VmRSS") -> int:
    """Memory of this process: VmRSS now, VmHWM at its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith(f"{key}:")]
    return int(line.split()[1]) * 1024


def forget_peak() -> None:
    """Let VmHWM begin again from here; where the kernel does not offer that, the peak is an older one."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


class _Lines(logging.Handler):
    """Keeps every line that is logged, with its facts."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        facts = getattr(record, "facts", "")
        self.lines.append(f"{record.getMessage()} {facts} {record.exc_info or ''}")


@dataclass
class Beside:
    """What a test tells of its fault while it runs.

    Attributes:
        received_bytes: what the hostile side sent, which bounds the memory it may have cost.
        replies: what it was told.
        secrets: what no reply and no log line may hold.
    """

    received_bytes: int = 0
    replies: list[str] = field(default_factory=list)
    secrets: list[str] = field(default_factory=list)

    def saw(self, error: XllmError) -> XllmError:
        """Note a refusal, so that it is looked through for what it must not say."""
        self.replies.append(f"{error} {error.metadata} {getattr(error, 'field_violations', '')}")
        return error


@asynccontextmanager
async def unharmed(server: Server, client: AsyncClient, prompt: str = PROMPT) -> AsyncIterator[Beside]:
    """Whatever happens inside, all of I1 to I6 hold."""
    options: dict[str, Any] = {"max_tokens": 300, "temperature": 1.0, "seed": 5, "ignore_eos": True}
    alone = await client.generate_once(prompt, **options)
    await eventually(lambda: is_idle(server))
    before = descriptors(), len(asyncio.all_tasks())
    forget_peak()
    memory = memory_bytes()
    seen = Beside(secrets=[alone.text[:40], str(server.config.model.parent)])
    log = _Lines()
    logger = logging.getLogger("xllm")
    logger.addHandler(log)
    try:
        beside = client.generate(prompt, **options)
        await anext(beside)
        yield seen
        assert (await beside.result()).text == alone.text, "I2"
    finally:
        logger.removeHandler(log)
    del beside
    await eventually(lambda: is_idle(server), SOON_S)
    await eventually(lambda: descriptors() <= before[0] and len(asyncio.all_tasks()) <= before[1], SOON_S)
    assert not stats(server).has_failed, "I1"
    peak = memory_bytes("VmHWM") - memory
    assert peak <= 10 * seen.received_bytes + _SLACK_BYTES, f"I4: {peak} bytes"
    await client.wait_ready(5)
    for secret in seen.secrets:
        assert not [line for line in (*log.lines, *seen.replies) if secret in line], "I6"
