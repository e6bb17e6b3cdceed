"""Every status of the core is one typed error, and bad values never get past the boundary in silence."""

import pathlib
import re

import pytest

from cyengine import (
    DecodeMode,
    Engine,
    EngineConfig,
    FinishReason,
    KvType,
    Model,
    Request,
    SamplingParams,
    Status,
    errors,
)
from cyengine.types import Backend, SlotState

HEADER = pathlib.Path(__file__).parents[2] / "cuda_src" / "include" / "xllm.h"


@pytest.mark.parametrize(
    ("prefix", "enum"),
    [
        ("XLLM_STATUS_", Status),
        ("XLLM_DECODE_MODE_", DecodeMode),
        ("XLLM_BACKEND_", Backend),
        ("XLLM_KV_TYPE_", KvType),
        ("XLLM_FINISH_", FinishReason),
        ("XLLM_SLOT_", SlotState),
    ],
)
def test_enums_have_the_numbers_of_the_header(prefix: str, enum: type) -> None:
    found = {name: int(number) for name, number in re.findall(rf"\b{prefix}(\w+) = (\d+)", HEADER.read_text())}
    assert found == {member.name: member.value for member in enum}  # type: ignore[attr-defined]


def test_every_status_has_its_own_error_class() -> None:
    classes = {type(errors.error_from_status(status, "text")) for status in Status if status is not Status.OK}
    assert len(classes) == len(Status) - 1
    assert all(
        errors.error_from_status(status, "text").status is status for status in Status if status is not Status.OK
    )


def test_an_unknown_status_is_an_internal_error() -> None:
    assert isinstance(errors.error_from_status(999, "text"), errors.InternalError)


def test_a_missing_file_is_named(tmp_path: pathlib.Path) -> None:
    with pytest.raises(errors.NotFoundError, match=r"absent\.gguf"):
        Model(tmp_path / "absent.gguf")


def test_a_damaged_file_is_refused_with_the_place(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(b"GGUF")
    with pytest.raises(errors.ModelTruncatedError):
        Model(path)


@pytest.mark.parametrize(
    ("field", "config"),
    [
        ("max_slots", EngineConfig(max_slots=-1)),
        ("max_slots", EngineConfig(max_slots=2**40)),
        ("max_slots", EngineConfig(max_slots=100_000)),
        ("block_size", EngineConfig(block_size=17)),
        ("prefill_chunk", EngineConfig(prefill_chunk=1_000_000)),
        ("kv_memory", EngineConfig(kv_memory=2**64)),
        ("memory_limit", EngineConfig(memory_limit=-1)),
        ("log_fd", EngineConfig(log_fd=-1)),
    ],
)
def test_config_values_out_of_range_name_the_field(tiny_model: pathlib.Path, field: str, config: EngineConfig) -> None:
    with pytest.raises(errors.InvalidArgumentError) as caught:
        Engine(tiny_model, config)
    assert caught.value.details["field"] == field


def test_an_unknown_instruction_set_is_refused_by_name(tiny_model: pathlib.Path) -> None:
    with pytest.raises(errors.XllmError, match="quantum"):
        Engine(tiny_model, EngineConfig(backend=Backend.CPU, instruction_set="quantum"))


@pytest.mark.parametrize(
    ("field", "request_"),
    [
        ("prompt", Request(prompt=[])),
        ("prompt", Request(prompt=[0, -1])),
        ("prompt", Request(prompt=[2**31 - 1])),
        ("token_ids", Request(prompt=[2**31])),
        ("temperature", Request(prompt=[1], sampling=SamplingParams(temperature=float("nan")))),
        ("temperature", Request(prompt=[1], sampling=SamplingParams(temperature=-1.0))),
        ("top_p", Request(prompt=[1], sampling=SamplingParams(top_p=1.5))),
        ("top_k", Request(prompt=[1], sampling=SamplingParams(top_k=-5))),
        ("min_p", Request(prompt=[1], sampling=SamplingParams(min_p=-0.1))),
        ("repetition_penalty", Request(prompt=[1], sampling=SamplingParams(repetition_penalty=0.0))),
        ("seed", Request(prompt=[1], sampling=SamplingParams(seed=2**64))),
        ("max_tokens", Request(prompt=[1], max_tokens=-1)),
        ("max_tokens", Request(prompt=[1], max_tokens=2**32)),
        ("num_logprobs", Request(prompt=[1], num_logprobs=1000)),
        ("stop_strings", Request(prompt=[1], stop_strings=[""])),
        ("stop_token_ids", Request(prompt=[1], stop_token_ids=[10**6])),
        ("logit_bias", Request(prompt=[1], logit_bias={5: float("nan")})),
        ("logit_bias", Request(prompt=[1], logit_bias={10**6: 1.0})),
        ("logit_bias", Request(prompt=[1], logit_bias={2**40: 1.0})),
    ],
)
def test_request_values_out_of_range_name_the_field(engine: Engine, field: str, request_: Request) -> None:
    with pytest.raises(errors.InvalidArgumentError) as caught:
        engine.submit(request_)
    assert caught.value.details["field"].startswith(field)
    assert engine.stats().num_running == engine.stats().num_waiting == 0


def test_a_long_stop_string_is_refused_with_its_own_length(engine: Engine) -> None:
    with pytest.raises(errors.InvalidArgumentError, match="found 1000"):
        engine.submit(Request(prompt=[1], stop_strings=["a", "x" * 1000]))


def test_values_of_another_kind_are_refused(engine: Engine) -> None:
    with pytest.raises(TypeError):
        engine.submit(Request(prompt=[1.9, 2.9]))  # type: ignore[list-item]
    with pytest.raises(errors.InvalidArgumentError, match="list"):
        engine.submit(Request(prompt=[1], stop_strings="abc"))
    with pytest.raises(errors.InvalidArgumentError):
        engine.take_events(0, float("nan"))
    for request_id in (-1, 2**70):
        with pytest.raises(errors.InvalidArgumentError):
            engine.cancel(request_id)
        with pytest.raises(errors.InvalidArgumentError):
            engine.take_events(request_id)


def test_a_mode_mismatch_says_what_to_do(engine: Engine) -> None:
    with pytest.raises(errors.DecodeModeMismatchError) as caught:
        engine.submit(Request(prompt=[1], decode_mode=DecodeMode.PER_SLOT))
    assert {"engine_mode", "requested_mode", "call", "remedy"} <= set(caught.value.details)
