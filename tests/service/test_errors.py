"""The table of failures: row by row as the contract's pages say, and small enough for a trailer."""

from __future__ import annotations

import re
from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

from cyengine.types import Status
from xllm_client.v1 import error_reason_pb2, generation_pb2
from xllm_service.engine.failures import service_error
from xllm_service.errors import DOMAIN, TABLE, Detail, InvalidFieldError, Reason, ServiceError, to_status

PROTO = Path(__file__).parents[2] / "protos" / "xllm" / "v1" / "error_reason.proto"
_ENTRY = re.compile(r"((?:  //[^\n]*\n)+)  ERROR_REASON_(\w+) = \d+;")


def proto_rows() -> dict[str, str]:
    """Return the comment of each reason in the contract."""
    rows = {name: " ".join(comment.replace("//", " ").split()) for comment, name in _ENTRY.findall(PROTO.read_text())}
    del rows["UNSPECIFIED"]
    return rows


def unpack(error: ServiceError) -> status_pb2.Status:
    trailing = dict(to_status(error).trailing_metadata)
    return status_pb2.Status.FromString(trailing["grpc-status-details-bin"])


def test_the_reasons_are_those_of_the_contract() -> None:
    names = {name.removeprefix("ERROR_REASON_") for name in error_reason_pb2.ErrorReason.DESCRIPTOR.values_by_name} - {
        "UNSPECIFIED"
    }
    assert {reason.value for reason in Reason} == names == set(TABLE)


@pytest.mark.parametrize(("name", "comment"), proto_rows().items())
def test_each_row_is_what_the_contract_says(name: str, comment: str) -> None:
    row = TABLE[Reason(name)]
    assert comment.startswith(f"{row.code.name}. "), comment
    # "RetryInfo when it restarts" promises none to an engine that does not.
    promises_retry = "RetryInfo" in comment and "when it restarts" not in comment
    assert (row.retry_delay_s is not None) == promises_retry
    expected = {
        grpc.StatusCode.INVALID_ARGUMENT: Detail.FIELDS,
        grpc.StatusCode.NOT_FOUND: Detail.RESOURCE,
        grpc.StatusCode.ALREADY_EXISTS: Detail.RESOURCE,
        grpc.StatusCode.DATA_LOSS: Detail.RESOURCE,
        grpc.StatusCode.FAILED_PRECONDITION: Detail.PRECONDITION,
    }.get(row.code, Detail.NONE)
    assert row.detail is expected


@pytest.mark.parametrize("reason", Reason)
def test_every_reason_travels_whole(reason: Reason) -> None:
    error = ServiceError(
        reason, "what happened", metadata={"key": 5}, field="spec.text", resource=("xllm.v1.Model", "m")
    )
    status = unpack(error)
    assert (status.code, status.message) == (TABLE[reason].code.value[0], "what happened")
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    assert (info.domain, info.reason, dict(info.metadata)) == (DOMAIN, reason.value, {"key": "5"})
    kinds = [detail.TypeName().removeprefix("google.rpc.") for detail in status.details[1:]]
    wanted = [] if TABLE[reason].detail is Detail.NONE else [TABLE[reason].detail.value]
    assert kinds == wanted + (["RetryInfo"] if TABLE[reason].retry_delay_s is not None else [])


def test_every_violation_is_told() -> None:
    status = unpack(InvalidFieldError([("spec.a", "too big"), ("spec.b", "too small")]))
    bad = error_details_pb2.BadRequest()
    assert status.details[1].Unpack(bad)
    assert [(v.field, v.description) for v in bad.field_violations] == [("spec.a", "too big"), ("spec.b", "too small")]


@pytest.mark.parametrize("character", ["x", "é", "\x00", "漢", "\ud800"])
def test_trailers_stay_under_four_kilobytes(character: str) -> None:
    long = character * 100_000
    error = InvalidFieldError([(long, long)] * 50)
    error.metadata = {f"{number}": long for number in range(50)}
    error.extra = [generation_pb2.Usage(num_prompt_tokens=1)]
    status = to_status(error)
    wire = sum(len(key) + len(value) * 4 // 3 + 8 for key, value in status.trailing_metadata)
    # gRPC writes what is not printable ASCII as three characters a byte.
    wire += sum(1 if 0x20 <= byte < 0x7F else 3 for byte in status.details.encode("utf-8", "replace"))
    assert wire < 4096
    info = error_details_pb2.ErrorInfo()
    assert unpack(error).details[0].Unpack(info) and info.reason == "INVALID_FIELD"


def test_a_plan_or_usage_goes_along() -> None:
    error = ServiceError(Reason.NON_FINITE_LOGITS, "NaN", extra=[generation_pb2.Usage(num_generated_tokens=3)])
    usage = generation_pb2.Usage()
    assert unpack(error).details[1].Unpack(usage) and usage.num_generated_tokens == 3


@pytest.mark.parametrize(
    ("status", "said", "told"),
    [
        (
            Status.QUEUE_TIMEOUT,
            "waited longer than max_queue_s for a slot",
            "waited longer than max_queue_time for a slot",
        ),
        (Status.DEADLINE_UNREACHABLE, "max_duration_s is 0.3", "the time allowed is 0.3"),
        (Status.INVALID_ARGUMENT, "logit_biases forbid every token", "logit_bias forbid every token"),
    ],
)
def test_the_core_is_quoted_in_the_words_of_the_contract(status: Status, said: str, told: str) -> None:
    assert service_error(status, said, {}).message == told
