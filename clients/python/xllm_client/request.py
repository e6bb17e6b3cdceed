"""From the caller's arguments to the contract's messages. Values are not judged here: the server does that."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf import duration_pb2

from xllm_client.types import ChatOptions, DecodeSlotOptions, GenerateOptions, Message, Prompt
from xllm_client.v1 import chat_pb2, generation_service_pb2, sampling_pb2, slot_pb2, slot_service_pb2

_SAMPLING = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "logit_bias",
    "seed",
)
_CONSTRAINTS = ("json_schema", "regex", "grammar", "choice", "json_object")
_DIRECT = (
    "request_id",
    "model",
    "expected_digest",
    "decode_mode",
    "slot",
    "priority",
    "num_outputs",
)
_CHAT = ChatOptions.__optional_keys__ - GenerateOptions.__optional_keys__


def generation_spec(prompt: Prompt, options: GenerateOptions) -> generation_service_pb2.GenerationSpec:
    """Build the spec of a text or token prompt. Raises TypeError for an unknown option or a wrong type."""
    spec = _spec(dict(options), GenerateOptions.__optional_keys__)
    if isinstance(prompt, str):
        spec.text = prompt
    else:
        spec.token_ids.SetInParent()  # an empty list is still a token prompt, which the server refuses by name
        spec.token_ids.ids.extend(prompt)
    return spec


def chat_spec(messages: Sequence[Message], options: ChatOptions) -> generation_service_pb2.GenerationSpec:
    """Build the spec of a chat. Raises TypeError for an unknown option or a wrong type."""
    values = dict(options)
    chat = chat_message_list(messages, {key: values.pop(key) for key in _CHAT & values.keys()})
    spec = _spec(values, GenerateOptions.__optional_keys__)
    spec.chat.CopyFrom(chat)
    return spec


def chat_message_list(messages: Sequence[Message], options: Mapping[str, Any]) -> chat_pb2.Chat:
    """Build a conversation with the template's options. Raises TypeError for an unknown option or key of a message."""
    _check_names(options, _CHAT)
    chat = chat_pb2.Chat(messages=[_chat_message(message) for message in messages])
    for option in ("tools", "tool_choice", "template_args"):
        if option in options:
            setattr(chat, f"{option}_json", _json_text(options[option]))
    if "add_generation_prompt" in options:
        chat.add_generation_prompt = options["add_generation_prompt"]
    return chat


def acquire_request(
    model: str, expected_digest: str, decode_mode: int, slot_name: str, lease_s: float | None, max_wait_s: float
) -> slot_service_pb2.AcquireSlotRequest:
    """Build an AcquireSlot; see Client.acquire_slot."""
    return slot_service_pb2.AcquireSlotRequest(
        model=model,
        expected_digest=expected_digest,
        decode_mode=decode_mode,  # type: ignore[arg-type]  # the same numbers
        slot_name=slot_name,
        ttl=optional_duration(lease_s),
        max_wait=duration(max_wait_s),
    )


def prefill_request(
    ref: slot_pb2.SlotRef, prompt: Prompt, add_special_tokens: bool | None, parse_special: bool
) -> slot_service_pb2.PrefillRequest:
    """Build a Prefill of a text or token prompt."""
    call = slot_service_pb2.PrefillRequest(ref=ref)
    if isinstance(prompt, str):
        call.text = prompt
        call.text_options.parse_special = parse_special
        if add_special_tokens is not None:
            call.text_options.add_special_tokens = add_special_tokens
    else:
        call.token_ids.SetInParent()
        call.token_ids.ids.extend(prompt)
    return call


def decode_slot_request(ref: slot_pb2.SlotRef, options: DecodeSlotOptions) -> slot_service_pb2.DecodeSlotRequest:
    """Build a DecodeSlot. Raises TypeError for an unknown option or a wrong type."""
    return slot_service_pb2.DecodeSlotRequest(
        ref=ref, options=_decode_options(options), request_id=options.get("request_id", "")
    )


def decode_batch_request(
    refs: Sequence[slot_pb2.SlotRef], options: DecodeSlotOptions
) -> slot_service_pb2.DecodeBatchRequest:
    """Build a DecodeBatch, with the same options for every slot. Raises as decode_slot_request."""
    same = _decode_options(options)
    entries = [slot_service_pb2.DecodeBatchEntry(ref=ref, options=same) for ref in refs]
    return slot_service_pb2.DecodeBatchRequest(entries=entries, request_id=options.get("request_id", ""))


def as_generation(
    message: slot_service_pb2.DecodeSlotResponse | slot_service_pb2.DecodeBatchResponse,
) -> generation_service_pb2.GenerateResponse:
    """Return an event of a decode as one of a generation; a batch is accepted as its first slot is."""
    response = generation_service_pb2.GenerateResponse(sequence=message.sequence)
    kind = message.WhichOneof("event")
    if kind == "accepted":
        accepted = message.accepted
        first = accepted.entries[0] if isinstance(accepted, slot_service_pb2.DecodeBatchAccepted) else accepted
        response.accepted.CopyFrom(first)
    elif kind is not None:
        getattr(response, kind).CopyFrom(getattr(message, kind))
    return response


def _decode_options(options: DecodeSlotOptions) -> slot_service_pb2.DecodeOptions:
    spec = _spec(dict(options), DecodeSlotOptions.__optional_keys__)
    parts = {name: getattr(spec, name) for name in ("sampling", "stop", "constraint", "output", "limits")}
    return slot_service_pb2.DecodeOptions(**parts)


def optional_duration(seconds: float | None) -> duration_pb2.Duration | None:
    """Return seconds as a Duration; None for None."""
    return None if seconds is None else duration(seconds)


def duration(seconds: float) -> duration_pb2.Duration:
    """Return seconds as a Duration, to the nanosecond."""
    message = duration_pb2.Duration()
    message.FromNanoseconds(round(seconds * 1e9))
    return message


def _spec(values: dict[str, Any], names: frozenset[str]) -> generation_service_pb2.GenerationSpec:
    _check_names(values, names)
    return generation_service_pb2.GenerationSpec(
        text_options=_message(generation_service_pb2.TextOptions, _pick(values, "add_special_tokens", "parse_special")),
        sampling=_message(sampling_pb2.SamplingParams, _pick(values, *_SAMPLING)),
        stop=_message(sampling_pb2.StopOptions, _stop(values)),
        constraint=_constraint(values),
        output=_message(sampling_pb2.OutputOptions, _pick(values, "token_ids", "top_logprobs")),
        cache=_message(sampling_pb2.CacheOptions, _pick(values, salt="cache_salt", bypass="cache_bypass")),
        limits=_message(sampling_pb2.Limits, _limits(values)),
        **_pick(values, *_DIRECT),
    )


def _check_names(values: Mapping[str, Any], names: frozenset[str]) -> None:
    unknown = sorted(values.keys() - names)
    if unknown:
        raise TypeError(f"unknown option {', '.join(unknown)}; known are {', '.join(sorted(names))}")


def _pick(values: Mapping[str, Any], *same: str, **renamed: str) -> dict[str, Any]:
    """Return the options that are given, under their field names (`field=option` renames)."""
    fields = {**{name: name for name in same}, **renamed}
    return {field: values[option] for field, option in fields.items() if option in values}


def _message(kind: Any, fields: dict[str, Any]) -> Any:
    """Build a message; None, which leaves it unset, where no field is given."""
    return kind(**fields) if fields else None


def _stop(values: Mapping[str, Any]) -> dict[str, Any]:
    fields = _pick(values, "ignore_eos", "min_tokens", token_ids="stop_token_ids", strings="stop")
    if isinstance(fields.get("strings"), str):
        fields["strings"] = [fields["strings"]]
    return fields


def _limits(values: Mapping[str, Any]) -> dict[str, Any]:
    fields = _pick(values, "max_tokens", max_queue_time="max_queue_time_s", max_duration="max_duration_s")
    for name in ("max_queue_time", "max_duration"):
        if name in fields:
            fields[name] = duration(fields[name])
    return fields


def _constraint(values: Mapping[str, Any]) -> sampling_pb2.Constraint | None:
    given = [name for name in _CONSTRAINTS if name in values]
    if len(given) > 1:
        raise TypeError(f"{' and '.join(given)} exclude each other; give one")
    constraint = sampling_pb2.Constraint()
    match given:
        case ["json_schema"]:
            constraint.json_schema = _json_text(values["json_schema"])
        case ["choice"]:
            constraint.choice.SetInParent()
            constraint.choice.options.extend(values["choice"])
        case ["json_object"]:
            if not values["json_object"]:
                return None
            constraint.json_object.SetInParent()
        case [name]:
            setattr(constraint, name, values[name])
        case _:
            return None
    return constraint


def _chat_message(message: Message) -> chat_pb2.ChatMessage:
    if isinstance(message, chat_pb2.ChatMessage):
        return message
    fields = dict(message)
    content = fields.pop("content", None)
    parts = [content] if isinstance(content, str) else content or []
    calls = [
        call if isinstance(call, chat_pb2.ToolCall) else chat_pb2.ToolCall(**call)
        for call in fields.pop("tool_calls", ())
    ]
    known = frozenset(("role", "tool_call_id", "name", "reasoning_text"))
    _check_names(fields, known)
    return chat_pb2.ChatMessage(parts=[chat_pb2.Part(text=part) for part in parts], tool_calls=calls, **fields)


def _json_text(value: Any) -> str:
    """Return JSON text as it is, and anything else as JSON with its own key order and characters."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, allow_nan=False)
