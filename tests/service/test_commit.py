"""The commit that GetServerInfo tells: of a checkout, a worktree, packed references; else nothing."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from xllm_service.commit import find_commit


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=x", "-c", "user.email=x@localhost")
    done = subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_the_commit_of_a_checkout(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    assert find_commit(root) == ""
    git(root, "init", "-q", "-b", "main")
    (root / "pyproject.toml").touch()
    assert find_commit(root) == "", "no commit yet"
    git(root, "add", "."), git(root, "commit", "-q", "-m", "one")
    sha = git(root, "rev-parse", "HEAD")
    assert find_commit(root) == sha
    git(root, "pack-refs", "--all")
    assert find_commit(root) == sha
    git(root, "worktree", "add", "-q", "-b", "other", str(tmp_path / "tree"))
    assert find_commit(tmp_path / "tree") == sha
    git(root, "checkout", "-q", "--detach")
    assert find_commit(root) == sha
    (root / ".git" / "HEAD").write_text("ref: refs/heads/none\n")
    assert find_commit(root) == ""
