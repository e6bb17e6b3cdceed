"""DecodeMode over the wire: the whole table of what an engine does with a requested mode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.serving import serving, stats
from tests.tools.make_tiny_gguf import make_tiny_gguf
from xllm_client import DecodeMode, DecodeModeMismatchError

AUTO, BATCHED, PER_SLOT = DecodeMode.AUTO, DecodeMode.BATCHED, DecodeMode.PER_SLOT
TABLE = [
    ("batched", AUTO, BATCHED),
    ("batched", BATCHED, BATCHED),
    ("batched", PER_SLOT, None),
    ("per-slot", AUTO, PER_SLOT),
    ("per-slot", BATCHED, None),
    ("per-slot", PER_SLOT, PER_SLOT),
    ("auto", AUTO, BATCHED),
    ("auto", BATCHED, BATCHED),
    ("auto", PER_SLOT, PER_SLOT),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    make_tiny_gguf(path)
    return path


@pytest.mark.parametrize("call", ["Generate", "GenerateOnce"])
@pytest.mark.parametrize(("engine", "requested", "effective"), TABLE)
async def test_each_cell_of_the_table(
    model: Path, tmp_path: Path, call: str, engine: str, requested: DecodeMode, effective: DecodeMode | None
) -> None:
    async with serving(model, tmp_path, decode_mode=engine) as (server, client):

        async def generate() -> Any:
            if call == "Generate":
                return await client.generate("x", max_tokens=2, decode_mode=requested).result()
            return await client.generate_once("x", max_tokens=2, decode_mode=requested)

        if effective is not None:
            assert (await generate()).accepted.decode_mode == effective
            return
        with pytest.raises(DecodeModeMismatchError) as caught:
            await generate()
        told = caught.value.metadata
        assert (told["engine_mode"], told["requested_mode"]) == (engine.upper().replace("-", "_"), requested.name)
        assert told["call"] == call and told["remedy"]
        assert call in str(caught.value)
        assert stats(server).num_generated_tokens == 0, "nothing is moved to the other mode"


@pytest.mark.parametrize(("engine", "mode"), [("batched", BATCHED), ("per-slot", PER_SLOT), ("auto", AUTO)])
async def test_the_engines_own_mode_is_told(model: Path, tmp_path: Path, engine: str, mode: DecodeMode) -> None:
    async with serving(model, tmp_path, decode_mode=engine) as (_, client):
        assert DecodeMode((await client.models())[0].decode_mode) is mode
        plan = (await client.get_model()).plan
        assert DecodeMode(plan.decode_mode) is mode
        assert [DecodeMode(weights.decode_mode) for weights in plan.weight_sets] == (
            [BATCHED, PER_SLOT] if mode is AUTO else [mode]
        )


async def test_auto_loads_each_weight_set_on_its_first_use(model: Path, tmp_path: Path) -> None:
    async with serving(model, tmp_path, decode_mode="auto") as (_, client):

        async def loaded() -> list[DecodeMode]:
            plan = (await client.get_model()).plan
            return [DecodeMode(weights.decode_mode) for weights in plan.weight_sets if weights.is_loaded]

        assert await loaded() == []
        await client.generate_once("x", max_tokens=1, decode_mode=PER_SLOT)
        assert await loaded() == [PER_SLOT]
        await client.generate_once("x", max_tokens=1)
        assert await loaded() == [BATCHED, PER_SLOT]
