"""Chat templates come with the model file: code from a stranger, and the text that goes through them from another."""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.serving import serving
from tests.fault.invariants import unharmed
from tests.tools.make_tiny_gguf import make_tiny_gguf
from xllm_client import AsyncClient, FailedPreconditionError, InvalidArgumentError, XllmError
from xllm_client.v1 import model_service_pb2
from xllm_service.app import Server
from xllm_service.sandbox import SandboxUnavailableError, TooMuchError

HELLO = [{"role": "user", "content": "x"}]
CANARY = "XLLM_TEST_CANARY"


async def warm(server: Server, client: AsyncClient) -> None:
    """Let the process that renders templates start, so that it belongs to the baseline."""
    with contextlib.suppress(XllmError):
        await client.render_chat(HELLO)
    # The rendering may have cost the process its life, or not, as the machine had time for it.
    process = server.served.get("").engine.model.chat_template._sandbox.process
    with contextlib.suppress(SandboxUnavailableError, TooMuchError):
        await asyncio.to_thread(process.open)


@pytest.mark.parametrize(
    "expression",
    [
        "''.__class__.__mro__[1].__subclasses__()",
        "messages.__class__.__base__",
        "messages[0].__init__.__globals__",
        "raise_exception.__globals__['os'].environ",
        "strftime_now.__globals__.json.codecs.builtins.open('/etc/passwd').read()",
        "tojson.__globals__",
        "cycler.__init__.__globals__.os.popen('id').read()",
        "lipsum.__globals__['os'].environ",
        "self._TemplateReference__context",
        "environ",
        "request.application.__globals__",
        "strftime_now('%{' ~ '" + CANARY + "' ~ '}')",
        "('%s' | format(raise_exception))",
    ],
)
async def test_13_nothing_but_the_messages_is_within_reach(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expression: str
) -> None:
    monkeypatch.setenv(CANARY, "the-secret-of-the-environment")
    path = tmp_path / "m.gguf"
    make_tiny_gguf(path, context_length=2048, chat_template="{{ " + expression + " }}")
    async with serving(path, tmp_path) as (server, client):
        await warm(server, client)
        async with unharmed(server, client) as seen:
            try:
                text = await client.render_chat(HELLO)
            except InvalidArgumentError as refused:
                assert refused.reason == "TEMPLATE_REFUSED"
                text = seen.saw(refused).message
            for secret in ("the-secret-of-the-environment", "root:", "uid=", "Popen", "/usr/", os.getcwd()):
                assert secret not in text


@pytest.mark.parametrize("tag", ["include", "import", "extends"])
async def test_13_no_other_template_is_within_reach(tmp_path: Path, tag: str) -> None:
    path = tmp_path / "m.gguf"
    source = "{% " + tag + " '/etc/passwd' " + ("as x " if tag == "import" else "") + "%}"
    make_tiny_gguf(path, context_length=2048, chat_template=source)
    async with serving(path, tmp_path) as (server, client):
        await warm(server, client)
        async with unharmed(server, client) as seen:
            with pytest.raises(XllmError) as caught:
                await client.render_chat(HELLO)
            assert caught.value.reason in ("TEMPLATE_REFUSED", "NO_CHAT_TEMPLATE")
            assert "root:" not in str(seen.saw(caught.value))


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(1000000000) %}x{% endfor %}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}",
        "{% set n = namespace(v='a') %}{% for i in range(99) %}{% set n.v = n.v ~ n.v %}{% endfor %}{{ n.v }}",
        "{% set n = namespace(v=[1]) %}{% for i in range(60) %}{% set n.v = n.v + n.v %}{% endfor %}{{ n.v|length }}",
        "{% set n = namespace(v='a') %}{% for i in range(60) %}{% set n.v = [n.v, n.v] %}{% endfor %}{{ n.v|tojson }}",
        "{{ [1]|tojson(indent=1000000000) }}",
    ],
)
async def test_14_a_template_that_never_ends(tmp_path: Path, source: str) -> None:
    path = tmp_path / "m.gguf"
    make_tiny_gguf(path, context_length=2048, chat_template=source)
    async with serving(path, tmp_path) as (server, client):
        await warm(server, client)
        async with unharmed(server, client) as seen:
            for call in (client.chat(HELLO, max_tokens=1).result(), client.chat_once(HELLO), client.render_chat(HELLO)):
                with pytest.raises(InvalidArgumentError) as caught:
                    await call
                assert seen.saw(caught.value).reason == "TEMPLATE_REFUSED"
                assert caught.value.field_violations[0].field.endswith("chat.messages")


EVERYTHING = (
    "{% for m in messages %}{{ m.role }}|{{ m.content }}|{{ m.reasoning_content }}|{{ m.name }}|{{ m.tool_call_id }}|"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}|{{ c.function.arguments|tojson }}|{% endfor %}{% endfor %}"
    "{{ tools|tojson }}|{{ extra }}"
)
HOSTILE = "{{ 7*7 }}{% for x in range(3) %}x{% endfor %}{# gone #}"


@pytest.mark.parametrize("field", ["content", "reasoning", "name", "tool_call_id", "call", "tools", "argument"])
async def test_15_template_code_in_a_message_stays_as_written(tmp_path: Path, field: str) -> None:
    path = tmp_path / "m.gguf"
    make_tiny_gguf(path, context_length=2048, chat_template=EVERYTHING)
    quoted = HOSTILE.replace('"', '\\"')
    turns: dict[str, dict[str, Any]] = {
        "content": {"role": "user", "parts": [{"text": HOSTILE}]},
        "reasoning": {"role": "assistant", "reasoning_text": HOSTILE},
        "name": {"role": "tool", "name": HOSTILE},
        "tool_call_id": {"role": "tool", "tool_call_id": HOSTILE},
        "call": {"role": "assistant", "tool_calls": [{"name": "f", "arguments_json": '{"a": "' + quoted + '"}'}]},
    }
    chat: dict[str, Any] = {"messages": [turns.get(field, {"role": "user", "parts": [{"text": "x"}]})]}
    if field == "tools":
        chat["tools_json"] = '[{"type": "function", "function": {"name": "f", "description": "' + quoted + '"}}]'
    if field == "argument":
        chat["template_args_json"] = '{"extra": "' + quoted + '"}'
    async with serving(path, tmp_path) as (server, client):
        await warm(server, client)
        async with unharmed(server, client):
            call = model_service_pb2.RenderChatRequest(chat=chat)
            text = (await client._call(client._model.RenderChat, call)).text
            assert HOSTILE in text and "49" not in text


@pytest.mark.parametrize(
    "template", ["{% nonsense %}", "{{ unclosed", "{% for %}", "{{ 'a' | no_such_filter( }}", None]
)
async def test_16_a_template_that_does_not_compile_turns_only_chat_off(tmp_path: Path, template: str | None) -> None:
    path = tmp_path / "m.gguf"
    make_tiny_gguf(path, context_length=2048, chat_template=template)
    async with serving(path, tmp_path) as (server, client), unharmed(server, client):
        for call in (client.chat_once(HELLO), client.chat(HELLO).result(), client.render_chat(HELLO)):
            with pytest.raises(FailedPreconditionError) as caught:
                await call
            assert caught.value.reason == "NO_CHAT_TEMPLATE"
        assert (await client.generate_once("x", max_tokens=2)).usage.num_prompt_tokens == 1
        assert await client.tokenize("x")
