"""The models of the end-to-end tests serve here too, and the server without a model of the service's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.conftest import endless_model, random_model, speaking_model
from tests.service.conftest import engine, model_file, serve
from tests.tools.make_tiny_gguf import make_tiny_gguf

__all__ = ["endless_model", "engine", "long_model", "model_file", "random_model", "serve", "speaking_model"]


@pytest.fixture(scope="session")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with random weights that takes 131,072 tokens; a window keeps the time linear in them."""
    path = tmp_path_factory.mktemp("models") / "long.gguf"
    window = {"llama.attention.sliding_window": 64}
    make_tiny_gguf(path, context_length=131_072, num_layers=1, dtype="q8_0", metadata=window)
    return path
