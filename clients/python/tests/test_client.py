"""The ordinary client, against a real gRPC server on a unix socket."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from fake_server import FakeServer, accepted, refuse, repeat
from google.rpc import error_details_pb2  # type: ignore[import-untyped]

from xllm_client import (
    NO_RETRY,
    CallCancelledError,
    Client,
    DeadlineExceededError,
    DecodeModeMismatchError,
    InvalidArgumentError,
    NotFoundError,
    QueueFullError,
    ResourceExhaustedError,
    RetryPolicy,
    UnavailableError,
    UnimplementedError,
    XllmError,
)
from xllm_client.v1 import generation_pb2, generation_service_pb2, plan_pb2

Response = generation_service_pb2.GenerateResponse
Request = generation_service_pb2.GenerateRequest


@pytest.fixture
def client(server: FakeServer) -> Iterator[Client]:
    with Client(server.endpoint) as connected:
        yield connected


def endless(request: Request, context: grpc.ServicerContext) -> Iterator[Response]:
    yield Response(accepted=accepted(request.spec))
    while context.is_active():
        yield Response(delta=generation_pb2.Delta(text="x"))
        time.sleep(0.001)


def test_events_in_order_and_text(client: Client) -> None:
    events = list(client.generate("naïve 🙂"))
    assert [e.kind for e in events] == ["accepted", "prefill_progress", *["delta"] * 7, "output_finished", "finished"]
    assert "".join(event.text for event in events) == "naïve 🙂"


def test_result_equals_the_unary_twin(client: Client) -> None:
    streamed = client.generate("Hello there", max_tokens=5, seed=3).result()
    once = client.generate_once("Hello there", max_tokens=5, seed=3)
    assert streamed == once
    assert (once.text, once.finish_reason, once.usage.num_generated_tokens) == ("Hello", "MAX_TOKENS", 5)


def test_accepted_echoes_the_seed_that_was_drawn(client: Client) -> None:
    generation = client.generate("Hi")
    assert generation.accepted is None
    next(generation)
    assert generation.accepted is not None
    assert generation.accepted.effective.sampling.seed == 7


def test_chat_and_token_prompts(client: Client) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    assert client.chat(messages).result().text == "<user>Hi"
    assert client.chat_once(messages, max_tokens=3).text == "<us"
    assert client.generate_once(list(b"abc")).text == "abc"
    assert client.render_chat(messages, template_args={"a": 1}) == "<user>Hi"


def test_text_tools(client: Client) -> None:
    assert client.tokenize("é") == [0, 0xC3, 0xA9]
    assert client.tokenize("é", add_special_tokens=False) == [0xC3, 0xA9]
    assert client.detokenize([0, 0xC3, 0xA9]) == "é"


def test_models_and_server(client: Client) -> None:
    assert [model.name for model in client.models()] == ["fake"]
    assert client.get_model().plan.kv_bytes_per_token == 1024
    assert client.server_info().schema_revision == 1


def test_several_outputs_and_tool_calls_are_joined_each_on_its_own(server: FakeServer, client: Client) -> None:
    def two(request: Request, context: grpc.ServicerContext) -> Iterator[Response]:
        part = generation_pb2.ToolCallDelta
        yield Response(accepted=accepted(request.spec))
        yield Response(delta=generation_pb2.Delta(output_index=1, text="b", reasoning_text="r"))
        yield Response(delta=generation_pb2.Delta(text="a", tool_calls=[part(call_index=0, id="1", name="f")]))
        yield Response(delta=generation_pb2.Delta(tool_calls=[part(arguments_json='{"x"'), part(call_index=1, id="2")]))
        yield Response(delta=generation_pb2.Delta(output_index=1, text="B"))
        yield Response(delta=generation_pb2.Delta(tool_calls=[part(arguments_json=": 1}")]))
        for index in (1, 0):
            finished = generation_pb2.OutputFinished(output_index=index, reason=generation_pb2.FINISH_REASON_EOS)
            yield Response(output_finished=finished)
        yield Response(finished=generation_pb2.Finished())

    server.on_generate = two
    first, second = client.generate("Hi", num_outputs=2).result().outputs
    assert (first.text, second.text, second.reasoning_text) == ("a", "bB", "r")
    assert [(c.id, c.name, c.arguments_json) for c in first.tool_calls] == [("1", "f", '{"x": 1}'), ("2", "", "")]


def test_events_of_a_newer_contract_are_skipped(server: FakeServer, client: Client) -> None:
    def newer(request: Request, context: grpc.ServicerContext) -> Iterator[Response]:
        yield Response.FromString(b"\xfa\x07\x00")  # field 127, an event that this client does not know
        yield from repeat(request, context)

    server.on_generate = newer
    assert client.generate("Hi").result().text == "Hi"


@pytest.mark.parametrize("how", ["break", "close", "with", "client"])
def test_leaving_early_cancels_the_call(server: FakeServer, client: Client, how: str) -> None:
    server.on_generate = endless
    if how == "break":
        for event in client.generate("Hi"):
            if event.text:
                break
    elif how == "with":
        with client.generate("Hi") as generation:
            next(generation)
    else:
        generation = client.generate("Hi")
        next(generation)
        if how == "close":
            generation.close()
            generation.close()
            assert list(generation) == []
        else:
            client.close()
    assert server.call_ended.wait(5)


def test_close_from_another_thread_ends_the_iteration(server: FakeServer, client: Client) -> None:
    server.on_generate = endless
    generation = client.generate("Hi")
    closer = threading.Timer(0.05, generation.close)
    closer.start()
    list(generation)
    closer.join()
    assert server.call_ended.wait(5)


def test_closed_generation_has_the_result_so_far(server: FakeServer, client: Client) -> None:
    server.on_generate = endless
    generation = client.generate("Hi")
    generation.close()
    result = generation.result()
    assert (result.text, result.finish_reason) == ("", "UNSPECIFIED")


def test_server_that_dies_in_the_middle(server: FakeServer, client: Client) -> None:
    server.on_generate = endless
    generation = client.generate("Hi")
    next(generation)
    server.stop()
    with pytest.raises(UnavailableError, match=r"the connection to unix:.* broke"):
        generation.result()
    assert len(server.requests) == 1


def test_deadline(server: FakeServer, client: Client) -> None:
    server.on_generate = endless
    with pytest.raises(DeadlineExceededError):
        client.generate("Hi", timeout_s=0.1).result()


def test_cancel_by_the_server_is_an_error(server: FakeServer, client: Client) -> None:
    def cancelled(request: Request, context: grpc.ServicerContext) -> Iterator[Response]:
        yield Response(accepted=accepted(request.spec))
        spent = generation_pb2.Usage(num_prompt_tokens=2, num_generated_tokens=5)
        refuse(context, grpc.StatusCode.CANCELLED, "CANCELLED", "cancelled by its id", spent)

    server.on_generate = cancelled
    with pytest.raises(CallCancelledError) as caught:
        client.generate("Hi").result()
    assert caught.value.usage is not None
    assert caught.value.usage.num_generated_tokens == 5


def test_field_violations(server: FakeServer, client: Client) -> None:
    def invalid(request: Request, context: grpc.ServicerContext) -> Iterator[Response]:
        violation = error_details_pb2.BadRequest.FieldViolation(field="spec.sampling.top_p", description="must be <= 1")
        bad = error_details_pb2.BadRequest(field_violations=[violation])
        refuse(context, grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD", "top_p is 7", bad)
        yield

    server.on_generate = invalid
    with pytest.raises(InvalidArgumentError, match=r"INVALID_ARGUMENT \(INVALID_FIELD\): top_p is 7") as caught:
        client.generate("Hi", top_p=7.0).result()
    (violation,) = caught.value.field_violations
    assert (violation.field, violation.description) == ("spec.sampling.top_p", "must be <= 1")


def test_reasons_metadata_and_plan(server: FakeServer, client: Client) -> None:
    def mismatch(request: Request, context: grpc.ServicerContext) -> Iterator[Response]:
        metadata = {"engine_mode": "BATCHED", "requested_mode": "PER_SLOT"}
        refuse(context, grpc.StatusCode.FAILED_PRECONDITION, "DECODE_MODE_MISMATCH", "no", metadata=metadata)
        yield

    def memory(request: Request, context: grpc.ServicerContext) -> Iterator[Response]:
        refuse(context, grpc.StatusCode.RESOURCE_EXHAUSTED, "MEMORY", "no", plan_pb2.Plan(total_bytes=9))
        yield

    server.on_generate = mismatch
    with pytest.raises(DecodeModeMismatchError) as mismatched:
        client.generate("Hi").result()
    assert mismatched.value.metadata == {"engine_mode": "BATCHED", "requested_mode": "PER_SLOT"}
    server.on_generate = memory
    with pytest.raises(ResourceExhaustedError) as exhausted:
        client.generate("Hi").result()
    assert exhausted.value.plan == plan_pb2.Plan(total_bytes=9)


def test_unary_errors(client: Client) -> None:
    with pytest.raises(NotFoundError) as caught:
        client.cancel("nobody")
    assert caught.value.reason == "REQUEST_NOT_FOUND"
    with pytest.raises(UnimplementedError):
        client.load()


def queue_full(times: int, delay_s: float | None, began: bool = False) -> object:
    left = [times]

    def handler(request: Request, context: grpc.ServicerContext) -> Iterator[Response]:
        if left[0] > 0:
            left[0] -= 1
            if began:
                yield Response(accepted=accepted(request.spec))
            code = grpc.StatusCode.RESOURCE_EXHAUSTED
            refuse(context, code, "QUEUE_FULL", "the queue is full", retry_delay_s=delay_s)
        yield from repeat(request, context)

    return handler


def test_push_back_is_waited_for(server: FakeServer, client: Client) -> None:
    server.on_generate = queue_full(2, 0.15)  # type: ignore[assignment]
    began = time.monotonic()
    assert client.generate("Hi").result().text == "Hi"
    assert len(server.requests) == 3
    assert time.monotonic() - began >= 0.3


def test_unary_calls_retry_too(server: FakeServer, client: Client) -> None:
    server.refusals = 2
    assert client.generate_once("Hi").text == "Hi"
    server.refusals = 1
    assert len(client.models()) == 1


@pytest.mark.parametrize(
    ("handler", "retry", "timeout_s"),
    [
        (queue_full(9, None), RetryPolicy(), None),  # the server does not say when
        (queue_full(9, 60.0), RetryPolicy(), None),  # too long a wait
        (queue_full(9, 1.0), RetryPolicy(), 0.5),  # longer than the time left
        (queue_full(9, 0.0, began=True), RetryPolicy(), None),  # after Accepted
        (queue_full(9, 0.0), NO_RETRY, None),
    ],
)
def test_refusals_that_are_raised_at_once(
    server: FakeServer, handler: object, retry: RetryPolicy, timeout_s: float | None
) -> None:
    server.on_generate = handler  # type: ignore[assignment]
    with Client(server.endpoint, retry=retry, timeout_s=timeout_s) as client, pytest.raises(QueueFullError):
        client.generate("Hi").result()
    assert len(server.requests) == 1


def test_attempts_are_bounded(server: FakeServer) -> None:
    server.on_generate = queue_full(9, 0.0)  # type: ignore[assignment]
    retry = RetryPolicy(max_attempts=3, backoff_s=0.001)
    with Client(server.endpoint, retry=retry) as client, pytest.raises(QueueFullError):
        client.generate("Hi").result()
    assert len(server.requests) == 3


def test_token_goes_with_every_call(server: FakeServer) -> None:
    with Client(server.endpoint, token="secret") as client:
        client.generate("Hi").result()
    assert server.metadata[0]["authorization"] == "Bearer secret"


def test_no_server_says_what_to_do(tmp_path: Path) -> None:
    with Client(f"unix:{tmp_path}/none.sock") as client:
        with pytest.raises(UnavailableError, match="start one with `xllm serve`"):
            client.models()
        with pytest.raises(UnavailableError, match=r"not ready after 0\.2 s"):
            client.wait_ready(0.2)


def test_wait_ready_for_a_server_that_is_loading_and_one_that_starts_later(tmp_path: Path) -> None:
    late = FakeServer(tmp_path / "late.sock")
    late.set_serving(False)
    timers = [threading.Timer(0.1, late.start), threading.Timer(0.3, late.set_serving, [True])]
    for timer in timers:
        timer.start()
    try:
        with Client(late.endpoint) as client:
            with pytest.raises(UnavailableError, match=r"NOT_SERVING|no xLLM server|DEADLINE"):
                client.wait_ready(0.15)
            client.wait_ready(10)
            assert client.generate("Hi").result().text == "Hi"
    finally:
        for timer in timers:
            timer.join()
        late.stop()


def test_status_with_broken_details_is_still_an_error(server: FakeServer, client: Client) -> None:
    def broken(request: Request, context: grpc.ServicerContext) -> Iterator[Response]:
        context.set_trailing_metadata((("grpc-status-details-bin", b"\xff\xff"),))
        context.abort(grpc.StatusCode.INTERNAL, "a fault")
        yield

    server.on_generate = broken
    with pytest.raises(XllmError, match="INTERNAL: a fault") as caught:
        client.generate("Hi").result()
    assert caught.value.reason == ""
