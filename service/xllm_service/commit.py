"""Which commit of its source this service is, where that can be known."""

from __future__ import annotations

import json
import re
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

_SHA = re.compile(r"[0-9a-f]{40,64}")


def find_commit(folder: Path | None = None) -> str:
    """Return the commit that is checked out where this code runs from, or that pip installed; "" for neither.

    Reads files only: no git is needed. A checkout may have changes beside its commit, which this does not tell.
    """
    root = folder or Path(__file__).resolve().parents[2]
    try:
        return _of_checkout(root) or ("" if folder else _of_installation())
    except (OSError, ValueError):
        return ""


def _of_checkout(root: Path) -> str:
    git = root / ".git"
    if not (root / "pyproject.toml").is_file() or not git.exists():
        return ""
    if git.is_file():  # a worktree: the file names its folder
        git = (root / git.read_text().removeprefix("gitdir:").strip()).resolve()
    head = (git / "HEAD").read_text().strip()
    if not head.startswith("ref:"):
        return head if _SHA.fullmatch(head) else ""
    name = head.removeprefix("ref:").strip()
    common = git / "commondir"
    for place in (git, (git / common.read_text().strip()).resolve() if common.is_file() else git):
        if (place / name).is_file():
            found = (place / name).read_text().strip()
            return found if _SHA.fullmatch(found) else ""
        if (place / "packed-refs").is_file():
            for line in (place / "packed-refs").read_text().splitlines():
                sha, _, ref = line.partition(" ")
                if ref == name and _SHA.fullmatch(sha):
                    return sha
    return ""


def _of_installation() -> str:
    """What pip noted (PEP 610) when it installed from a repository."""
    try:
        text = distribution("xllm").read_text("direct_url.json")
    except PackageNotFoundError:
        return ""
    found = str(json.loads(text or "{}").get("vcs_info", {}).get("commit_id", ""))
    return found if _SHA.fullmatch(found) else ""
