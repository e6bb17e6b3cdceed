"""A request becomes plain values in range, once; code behind it does not check again.

All violations are collected, each with the path of its field. What this build does not offer is refused by name, never
ignored. What needs the tokenizer (is the prompt too long?) or the engine's state is checked by them.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from xllm_client.v1 import chat_pb2, decode_mode_pb2, generation_service_pb2, sampling_pb2, slot_service_pb2
from xllm_service import convert
from xllm_service.config import (
    MAX_LOGIT_BIAS,
    MAX_OUTPUTS,
    MAX_STOP_STRING_BYTES,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKENS,
    MAX_TOP_LOGPROBS,
)
from xllm_service.constraints import Constrained, Constraint
from xllm_service.errors import InvalidFieldError

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_ROLE = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")
_MAX_TOKENS = 2**31 - 1
_MAX_CACHE_SALT_BYTES = 256
_MAX_SECONDS = 10 * 365 * 86400.0
# Names a template gets from the service itself, which template_args_json cannot replace.
_RESERVED_ARGUMENTS = frozenset(
    "messages tools tool_choice add_generation_prompt bos_token eos_token unk_token pad_token".split()
)


@dataclass(frozen=True, slots=True)
class Conversation:
    """A chat, ready for the template: plain values in the shape that `transformers` gives them."""

    messages: list[dict[str, Any]]
    tools: list[Any] = field(default_factory=list)
    arguments: dict[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True


@dataclass(frozen=True, slots=True)
class PromptInput:
    """What is to be computed before anything is generated.

    Attributes:
        text, token_ids, chat: the prompt; exactly one is set.
        add_special_tokens: for a text; None: the call's own default.
        cache_salt, bypass_cache: how it uses the prefix cache.
    """

    text: str | None = None
    token_ids: Sequence[int] | None = None
    chat: Conversation | None = None
    add_special_tokens: bool | None = None
    parse_special: bool = False
    cache_salt: str = ""
    bypass_cache: bool = False


@dataclass(frozen=True, slots=True)
class DecodeChoices:
    """How tokens are chosen, what ends them and what is reported: every field in range, defaults filled in.

    Attributes:
        seed: None: the engine draws one.
        top_logprobs: None: no log-probabilities.
        wants_tokens: one Token record for every token.
        max_tokens, max_queue_s, max_duration_s: None: no bound.
        decode_mode: what was asked for, by its number.
        constraint: what the output must look like; None: anything.
        constrained: the constraint once it is compiled, which the model does.
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    logit_bias: Mapping[int, float]
    seed: int | None
    stop_strings: Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    min_tokens: int
    wants_tokens: bool
    top_logprobs: int | None
    max_tokens: int | None
    max_queue_s: float | None
    max_duration_s: float | None
    decode_mode: int = 0
    priority: int = 0
    constraint: Constraint | None = None
    constrained: Constrained | None = None


@dataclass(frozen=True, slots=True)
class ValidRequest:
    """A generation that may be run."""

    request_id: str
    model: str
    expected_digest: str
    prompt: PromptInput
    choices: DecodeChoices
    num_outputs: int = 1


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What the server allows and fills in.

    Attributes:
        num_head_rows: token ids lie below this.
        num_places: most outputs that the engine runs or queues at once (max_slots + max_queue).
        default_max_tokens, default_queue_s: where a request has none; None: no bound.
        max_chat_messages: most messages of one conversation.
    """

    num_head_rows: int
    num_places: int = MAX_OUTPUTS
    default_max_tokens: int | None = None
    default_queue_s: float | None = None
    max_chat_messages: int = 4096

    @property
    def max_outputs(self) -> int:
        """Most outputs of one request."""
        return min(MAX_OUTPUTS, self.num_places)


class Checker:
    """Collects what is wrong with the fields of one request."""

    def __init__(self) -> None:
        self.violations: list[tuple[str, str]] = []

    def refuse(self, path: str, text: str) -> None:
        """Note what is wrong with a field."""
        self.violations.append((path, text))

    def raise_if_any(self) -> None:
        """Raise InvalidFieldError with all that was noted."""
        if self.violations:
            raise InvalidFieldError(self.violations)

    def number(
        self, message: Any, name: str, path: str, default: float, low: float, high: float, *, open_low: bool = False
    ) -> float:
        """A float in [low, high], or (low, high] with open_low."""
        if not message.HasField(name):
            return default
        value = float(getattr(message, name))
        if not math.isfinite(value) or not low <= value <= high or (open_low and value == low):
            bracket = "(" if open_low else "["
            self.refuse(f"{path}.{name}", f"expected a number in {bracket}{low:g}, {high:g}], found {value}")
            return default
        return value

    def integer(self, message: Any, name: str, path: str, default: int | None, low: int, high: int) -> int | None:
        """A whole number in [low, high]."""
        if not message.HasField(name):
            return default
        value = int(getattr(message, name))
        if not low <= value <= high:
            self.refuse(
                f"{path}.{name}" if path else name, f"expected a whole number in [{low}, {high}], found {value}"
            )
            return default
        return value

    def span(
        self,
        message: Any,
        name: str,
        path: str,
        default: float | None,
        *,
        low: float = 0.0,
        high: float = _MAX_SECONDS,
        open_low: bool = True,
    ) -> float | None:
        """A Duration in (low, high], or [low, high] without open_low, in seconds."""
        if not message.HasField(name):
            return default
        value = getattr(message, name)
        span = convert.seconds(value)
        if not -(10**9) < value.nanos < 10**9 or not low <= span <= high or (open_low and span == low):
            bracket = "(" if open_low else "["
            at = f"{path}.{name}" if path else name
            self.refuse(at, f"expected a duration in {bracket}{low:g}, {high:g}] seconds, found {span:g} s")
            return default
        return span

    def request_id(self, text: str, path: str) -> None:
        """A caller's name for its call; none is one too."""
        if text and not _REQUEST_ID.fullmatch(text):
            self.refuse(path, "expected at most 128 of A-Z a-z 0-9 . _ : -")

    def digest(self, text: str, path: str) -> None:
        """The digest of a model's file; none is one too."""
        if text and not _DIGEST.fullmatch(text):
            self.refuse(path, 'expected "sha256:" and 64 hex digits in lower case')

    def decode_mode(self, value: int, path: str) -> None:
        """A number that DecodeMode knows."""
        if value not in decode_mode_pb2.DecodeMode.values():
            self.refuse(path, f"expected a value of DecodeMode, found {value}")

    def token_ids(self, ids: Sequence[int], path: str, num_rows: int) -> None:
        """Ids in [0, num_rows); the first that is not is told, which is enough where there may be a million."""
        if not ids or (min(ids) >= 0 and max(ids) < num_rows):
            return
        index = next(index for index, token_id in enumerate(ids) if not 0 <= token_id < num_rows)
        self.refuse(f"{path}[{index}]", f"expected a token id in [0, {num_rows}), found {ids[index]}")

    def json(self, text: str, path: str, kind: type | tuple[type, ...], what: str) -> Any:
        """JSON text of a given kind; None for empty text and what was refused."""
        if not text:
            return None
        try:
            value = json.loads(text, parse_constant=_refuse_constant)
            if "\\u" in text:
                _refuse_lone_surrogates(value)
        except (ValueError, RecursionError) as error:
            problem = "nested too deeply" if isinstance(error, RecursionError) else str(error)
            self.refuse(path, f"expected JSON: {problem}")
            return None
        if not isinstance(value, kind):
            self.refuse(path, f"expected {what}")
            return None
        return value


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _refuse_lone_surrogates(value: Any) -> None:
    # An escape can write half of a character, which no UTF-8 has: a template would make other text of it.
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise ValueError(f"\\u{ord(half):04x} without its other half is no character") from None


def validate(spec: generation_service_pb2.GenerationSpec, limits: RequestLimits) -> ValidRequest:
    """Check a whole request.

    Raises InvalidFieldError with every field that is at fault, or ServiceError (NOT_IMPLEMENTED) for a feature that is
    not offered.
    """
    check = Checker()
    check.request_id(spec.request_id, "spec.request_id")
    check.digest(spec.expected_digest, "spec.expected_digest")
    check.decode_mode(spec.decode_mode, "spec.decode_mode")
    prompt = _prompt(check, spec, "spec.", limits)
    choices = _choices(check, spec, "spec.", limits)
    priority = check.integer(spec, "priority", "spec", 0, -100, 100) or 0
    num_outputs = check.integer(spec, "num_outputs", "spec", 1, 1, MAX_OUTPUTS) or 1
    if num_outputs > 1 and spec.HasField("slot"):
        check.refuse("spec.num_outputs", "expected 1 in a slot; fork the slot for further outputs")
    elif num_outputs > limits.num_places:
        # They are queued together or not at all: no retry would find the places.
        places = f"{limits.num_places}, this server's max_slots + max_queue"
        check.refuse("spec.num_outputs", f"expected at most {places}, found {num_outputs}")
    check.raise_if_any()
    return ValidRequest(
        request_id=spec.request_id,
        model=spec.model,
        expected_digest=spec.expected_digest,
        prompt=prompt,
        choices=replace(choices, decode_mode=int(spec.decode_mode), priority=priority),
        num_outputs=num_outputs,
    )


def validate_prompt(message: slot_service_pb2.PrefillRequest, limits: RequestLimits) -> PromptInput:
    """Check the prompt of a Prefill. Raises as `validate`."""
    check = Checker()
    prompt = _prompt(check, message, "", limits)
    check.raise_if_any()
    return prompt


def validate_decode(
    request_id: str, options: Mapping[str, slot_service_pb2.DecodeOptions], limits: RequestLimits
) -> list[DecodeChoices]:
    """Check a decode of slots: `options` by the path of each in the request, with its dot. Raises as `validate`."""
    check = Checker()
    check.request_id(request_id, "request_id")
    choices = [_choices(check, message, path, limits) for path, message in options.items()]
    check.raise_if_any()
    return choices


def _prompt(check: Checker, message: Any, path: str, limits: RequestLimits) -> PromptInput:
    chat = None
    token_ids: tuple[int, ...] | None = None
    match message.WhichOneof("input"):
        case "chat":
            chat = _conversation(check, message.chat, f"{path}chat", limits.max_chat_messages)
        case "token_ids":
            token_ids = tuple(message.token_ids.ids)
            if not token_ids:
                check.refuse(f"{path}token_ids.ids", "expected at least one token id")
            check.token_ids(token_ids, f"{path}token_ids.ids", limits.num_head_rows)
        case "text":
            pass
        case _:
            check.refuse(f"{path}input", "expected one of text, token_ids and chat")
    options = message.text_options
    salt_size = len(message.cache.salt.encode())
    if salt_size > _MAX_CACHE_SALT_BYTES:
        check.refuse(f"{path}cache.salt", f"expected at most {_MAX_CACHE_SALT_BYTES} bytes, found {salt_size}")
    return PromptInput(
        text=message.text if message.WhichOneof("input") == "text" else None,
        token_ids=token_ids,
        chat=chat,
        add_special_tokens=options.add_special_tokens if options.HasField("add_special_tokens") else None,
        parse_special=options.parse_special,
        cache_salt=message.cache.salt,
        bypass_cache=message.cache.bypass,
    )


def _choices(check: Checker, message: Any, path: str, limits: RequestLimits) -> DecodeChoices:
    """What a GenerationSpec and a DecodeOptions have in common."""
    sampling, stop, output, bounds = message.sampling, message.stop, message.output, message.limits
    at = {name: f"{path}{name}" for name in ("sampling", "stop", "output", "limits")}
    top_k = check.integer(sampling, "top_k", at["sampling"], 0, 0, 2**63 - 1) or 0
    max_tokens = check.integer(bounds, "max_tokens", at["limits"], limits.default_max_tokens, 1, _MAX_TOKENS)
    min_high = max_tokens if max_tokens is not None else _MAX_TOKENS
    return DecodeChoices(
        temperature=check.number(sampling, "temperature", at["sampling"], 0.0, 0.0, 100.0),
        top_k=0 if top_k >= limits.num_head_rows else top_k,
        top_p=check.number(sampling, "top_p", at["sampling"], 1.0, 0.0, 1.0),
        min_p=check.number(sampling, "min_p", at["sampling"], 0.0, 0.0, 1.0),
        repetition_penalty=check.number(sampling, "repetition_penalty", at["sampling"], 1.0, 0.0, 100.0, open_low=True),
        frequency_penalty=check.number(sampling, "frequency_penalty", at["sampling"], 0.0, -100.0, 100.0),
        presence_penalty=check.number(sampling, "presence_penalty", at["sampling"], 0.0, -100.0, 100.0),
        logit_bias=_logit_bias(check, sampling, at["sampling"], limits.num_head_rows),
        seed=sampling.seed if sampling.HasField("seed") else None,
        stop_strings=_stop_strings(check, stop, at["stop"]),
        stop_token_ids=_stop_tokens(check, stop, at["stop"], limits.num_head_rows),
        ignore_eos=stop.ignore_eos,
        min_tokens=check.integer(stop, "min_tokens", at["stop"], 0, 0, min_high) or 0,
        wants_tokens=output.token_ids or output.HasField("top_logprobs"),
        top_logprobs=check.integer(output, "top_logprobs", at["output"], None, 0, MAX_TOP_LOGPROBS),
        max_tokens=max_tokens,
        max_queue_s=check.span(bounds, "max_queue_time", at["limits"], limits.default_queue_s),
        max_duration_s=check.span(bounds, "max_duration", at["limits"], None),
        constraint=_constraint(message.constraint),
    )


def _constraint(constraint: sampling_pb2.Constraint) -> Constraint | None:
    """What is asked for; whether it can be held to, the model tells when it compiles it."""
    match constraint.WhichOneof("kind"):
        case None:
            return None
        case "choice":
            return Constraint("choice", options=tuple(constraint.choice.options))
        case "json_object":
            return Constraint("json_object")
        case kind:
            return Constraint(kind, text=getattr(constraint, kind))


def validate_chat(chat: chat_pb2.Chat, max_messages: int) -> Conversation:
    """Check a conversation on its own. Raises InvalidFieldError."""
    check = Checker()
    conversation = _conversation(check, chat, "chat", max_messages)
    check.raise_if_any()
    return conversation


def validate_token_ids(ids: Sequence[int], path: str, num_head_rows: int) -> list[int]:
    """Check ids on their own. Raises InvalidFieldError with the position of the first that is wrong."""
    check = Checker()
    check.token_ids(ids, path, num_head_rows)
    check.raise_if_any()
    return list(ids)


def _or(message: Any, name: str, default: bool) -> bool:
    return bool(getattr(message, name)) if message.HasField(name) else default


def _logit_bias(check: Checker, sampling: sampling_pb2.SamplingParams, within: str, num_rows: int) -> dict[int, float]:
    path = f"{within}.logit_bias"
    if len(sampling.logit_bias) > MAX_LOGIT_BIAS:
        check.refuse(path, f"expected at most {MAX_LOGIT_BIAS} entries, found {len(sampling.logit_bias)}")
        return {}
    for token_id, bias in sampling.logit_bias.items():
        if not 0 <= token_id < num_rows:
            check.refuse(f"{path}[{token_id}]", f"expected a token id in [0, {num_rows})")
        if math.isnan(bias) or bias == math.inf:
            check.refuse(f"{path}[{token_id}]", f"expected a finite number or -Infinity, found {bias}")
    return dict(sampling.logit_bias)


def _stop_strings(check: Checker, stop: sampling_pb2.StopOptions, within: str) -> tuple[str, ...]:
    path = f"{within}.strings"
    if len(stop.strings) > MAX_STOP_STRINGS:
        check.refuse(path, f"expected at most {MAX_STOP_STRINGS}, found {len(stop.strings)}")
        return ()
    for index, text in enumerate(stop.strings):
        size = len(text.encode())
        if not 1 <= size <= MAX_STOP_STRING_BYTES:
            check.refuse(f"{path}[{index}]", f"expected 1 to {MAX_STOP_STRING_BYTES} bytes, found {size}")
    return tuple(stop.strings)


def _stop_tokens(check: Checker, stop: sampling_pb2.StopOptions, within: str, num_rows: int) -> tuple[int, ...]:
    path = f"{within}.token_ids"
    if len(stop.token_ids) > MAX_STOP_TOKENS:
        check.refuse(path, f"expected at most {MAX_STOP_TOKENS}, found {len(stop.token_ids)}")
        return ()
    check.token_ids(stop.token_ids, path, num_rows)
    return tuple(stop.token_ids)


def _conversation(check: Checker, chat: chat_pb2.Chat, path: str, max_messages: int) -> Conversation:
    if not 1 <= len(chat.messages) <= max_messages:
        check.refuse(f"{path}.messages", f"expected 1 to {max_messages} messages, found {len(chat.messages)}")
        return Conversation([])
    messages = [_message(check, message, f"{path}.messages[{i}]") for i, message in enumerate(chat.messages)]
    tools = check.json(chat.tools_json, f"{path}.tools_json", list, "a JSON array of tools")
    arguments = check.json(chat.template_args_json, f"{path}.template_args_json", dict, "a JSON object") or {}
    for name in sorted(_RESERVED_ARGUMENTS & arguments.keys()):
        check.refuse(f"{path}.template_args_json", f"{name} is set by the server; leave it out")
    choice = check.json(chat.tool_choice_json, f"{path}.tool_choice_json", (str, dict), "a JSON string or object")
    if choice is not None:
        arguments["tool_choice"] = choice
    return Conversation(messages, tools or [], arguments, _or(chat, "add_generation_prompt", True))


def _message(check: Checker, message: chat_pb2.ChatMessage, path: str) -> dict[str, Any]:
    if not _ROLE.fullmatch(message.role):
        check.refuse(f"{path}.role", "expected a letter, then at most 63 of A-Z a-z 0-9 _ . -")
    for index, part in enumerate(message.parts):
        if part.WhichOneof("kind") is None:
            check.refuse(f"{path}.parts[{index}]", "expected text")
    values: dict[str, Any] = {"role": message.role, "content": "".join(part.text for part in message.parts)}
    if message.tool_calls:
        values["tool_calls"] = [
            _tool_call(check, call, f"{path}.tool_calls[{index}]") for index, call in enumerate(message.tool_calls)
        ]
    if message.tool_call_id:
        values["tool_call_id"] = message.tool_call_id
    if message.name:
        values["name"] = message.name
    if message.reasoning_text:
        values["reasoning_content"] = message.reasoning_text
    return values


def _tool_call(check: Checker, call: chat_pb2.ToolCall, path: str) -> dict[str, Any]:
    if not call.name:
        check.refuse(f"{path}.name", "expected the function's name, found nothing")
    arguments = check.json(call.arguments_json, f"{path}.arguments_json", dict, "a JSON object")
    value: dict[str, Any] = {"type": "function", "function": {"name": call.name, "arguments": arguments or {}}}
    return {"id": call.id, **value} if call.id else value
