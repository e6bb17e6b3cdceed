"""What a measurement was made on and with."""

from __future__ import annotations

import contextlib
import datetime
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any


def describe_machine() -> dict[str, Any]:
    """Return processor, memory, system, driver, build, commit and date, as far as they can be known."""
    from xllm_service.engine import build_id, version

    cpu, cores = _processor()
    return {
        "cpu": cpu,
        "physical_cores": cores,
        "usable_cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "system": f"{platform.system()} {platform.release()}",
        "driver": _driver(),
        "python": platform.python_version(),
        "xllm_version": version,
        "build_id": build_id,
        "commit": _commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


class PeakMemory:
    """The most memory that this process had resident since the last `reset`."""

    def reset(self) -> None:
        """Begin anew, where the kernel lets a process do that."""
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")

    def bytes(self) -> int:
        """Return the peak."""
        match = re.search(r"^VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
        return int(match[1]) * 1024 if match else 0


def _processor() -> tuple[str, int]:
    """Return the processor's name and the number of physical cores of the machine."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.machine(), os.cpu_count() or 1
    name = re.search(r"^model name\s*: (.*)$", text, re.MULTILINE)
    ids = re.findall(r"^physical id\s*: (\d+)$.*?^core id\s*: (\d+)$", text, re.MULTILINE | re.DOTALL)
    return name[1].strip() if name else platform.machine(), len(set(ids)) or os.cpu_count() or 1


def _driver() -> str | None:
    """Return the version of the GPU's driver; None where there is none."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    match = re.search(r"\d{3}\.\d+(?:\.\d+)?", text)
    return match[0] if match else None


def _commit() -> str | None:
    """Return the commit of the checkout that this package runs from, with "+" where it was changed."""
    folder = Path(__file__).parent
    try:
        commit = _git(folder, "rev-parse", "--short=12", "HEAD")
        return commit + ("+" if _git(folder, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True, timeout=10
    )
    return done.stdout.strip()
