"""The digest of a model: of all its parts in order, known when it is known, and never in the way."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from xllm_service.digest import FileDigest, shard_paths
from xllm_service.errors import ServiceError


def test_one_file(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"x" * 5_000_000)
    digest = FileDigest([path])
    assert digest.value == ""
    assert digest.wait() == digest.value == f"sha256:{hashlib.sha256(b'x' * 5_000_000).hexdigest()}"


def test_the_parts_of_a_split_model_count_in_their_order(tmp_path: Path) -> None:
    paths = shard_paths(tmp_path / "m-00001-of-00003.gguf")
    assert [path.name for path in paths] == [f"m-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    for number, path in enumerate(paths):
        path.write_bytes(b"%d" % number)
    assert FileDigest(paths).wait() == f"sha256:{hashlib.sha256(b'012').hexdigest()}"


def test_a_file_that_has_gone_is_said(tmp_path: Path) -> None:
    digest = FileDigest([tmp_path / "gone.gguf"])
    with pytest.raises(ServiceError, match="No such file"):
        digest.wait()
    assert str(tmp_path) not in digest.problem


def test_a_file_that_was_replaced_gives_no_digest(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"the one that is served")
    digest = FileDigest([path])
    other = tmp_path / "other"
    other.write_bytes(b"another")
    other.replace(path)
    with pytest.raises(ServiceError, match="replaced"):
        digest.wait()
    assert digest.value == ""


def test_stopping_ends_it(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"x")
    digest = FileDigest([path])
    digest.stop()
    digest.start()
    with pytest.raises(ServiceError):
        digest.wait()
