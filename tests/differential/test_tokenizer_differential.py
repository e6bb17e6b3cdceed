from __future__ import annotations

from pathlib import Path

import pytest

from .tokenizer_differential import NAMES, compare, default_cache, load_reference


def test_smollm_equals_its_own_tokenizer(demo_model: Path) -> None:
    assert compare(load_reference("smollm", default_cache(), demo_model), count=3000) == 0


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", NAMES)
def test_ids_equal_the_models_own_tokenizer(name: str, demo_model: Path) -> None:
    assert compare(load_reference(name, default_cache(), demo_model), count=100_000) == 0
