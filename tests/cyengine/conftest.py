import pathlib
from collections.abc import Iterator

import pytest

from cyengine import Engine, EngineConfig
from cyengine.types import Backend
from tests.tools.make_tiny_gguf import make_tiny_gguf


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("cyengine") / "tiny.gguf"
    make_tiny_gguf(path, arch="llama", dtype="q4_1")
    return path


@pytest.fixture
def engine(tiny_model: pathlib.Path) -> Iterator[Engine]:
    with Engine(tiny_model, EngineConfig(backend=Backend.CPU, num_threads=1)) as made:
        yield made
