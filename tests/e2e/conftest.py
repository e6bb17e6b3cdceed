"""Small models with a known will: one that never ends, one that says what a test writes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tools.make_tiny_gguf import make_tiny_gguf


@pytest.fixture(scope="session")
def endless_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that answers C, again and again, with a context long enough for a test to act meanwhile."""
    path = tmp_path_factory.mktemp("models") / "endless.gguf"
    make_tiny_gguf(path, context_length=131_072, tied=False, dtype="f32", next_default=3 + ord("C"))
    return path


@pytest.fixture(scope="session")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with random weights: what it says depends on everything it has read."""
    path = tmp_path_factory.mktemp("models") / "random.gguf"
    make_tiny_gguf(path, context_length=2048)
    return path


@pytest.fixture
def speaking_model(tmp_path: Path) -> Callable[[str], Path]:
    """Return a function that makes a model which, after any prompt's end `>`, says a text and ends its turn.

    No byte may occur twice in the text: what comes next depends on the last token alone.
    """

    def make(text: str) -> Path:
        chain = [3 + ord(">"), *(3 + byte for byte in text.encode()), 2]
        assert len(set(chain)) == len(chain), "a byte occurs twice"
        path = tmp_path / "speaking.gguf"
        script = dict(itertools.pairwise(chain))
        make_tiny_gguf(path, tied=False, dtype="f32", hidden_size=256, next_token=script, next_default=2)
        return path

    return make
