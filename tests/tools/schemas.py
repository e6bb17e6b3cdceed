"""JSON Schemas for structured output: random ones whose outputs are bounded, and ones that nobody should be held to."""

from __future__ import annotations

import json
import random
from typing import Any

_WORDS = (
    "name city age count color size kind id title score tag note unit owner state level rank price code year".split()
)


def random_schema(seed: int) -> dict[str, Any]:
    """Return an object schema whose every output is short; the same for the same seed."""
    return _object(random.Random(seed), depth=0)


def _object(draw: random.Random, depth: int) -> dict[str, Any]:
    names = draw.sample(_WORDS, draw.randint(1, 4 if depth == 0 else 2))
    required = [name for name in names if draw.random() < 0.8]
    return {
        "type": "object",
        "properties": {name: _value(draw, depth + 1) for name in names},
        "required": required or names[:1],
        "additionalProperties": False,
    }


def _value(draw: random.Random, depth: int) -> dict[str, Any]:
    kinds = ["string", "enum", "integer", "boolean", "null", "const", "pattern", "number", "anyOf", "nullable"]
    if depth < 3:
        kinds += ["array", "array", "object", "object"]
    low = draw.randint(-50, 50)
    match draw.choice(kinds):
        case "string":
            return {"type": "string", "minLength": draw.randint(0, 2), "maxLength": draw.randint(3, 16)}
        case "enum":
            return {"enum": draw.sample(["red", "green", 'a "b"', "é", 7, -1.5, True, None], draw.randint(1, 4))}
        case "integer":
            return {"type": "integer", "minimum": low, "maximum": low + draw.randint(0, 500)}
        case "number":
            return {"enum": [draw.randint(0, 9) + 0.5, draw.randint(10, 99)]}
        case "boolean":
            return {"type": "boolean"}
        case "null":
            return {"type": "null"}
        case "const":
            return {"const": draw.choice(["v1", 3, [1, "x"], {"k": None}])}
        case "pattern":
            return {"type": "string", "pattern": draw.choice(["^[A-Z]{2}[0-9]{3}$", "^(yes|no)$", "^[a-f0-9]{4,8}$"])}
        case "anyOf":
            return {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 9}, {"type": "string", "maxLength": 6}]}
        case "nullable":
            return {"type": ["boolean", "null"]}
        case "array":
            return {"type": "array", "items": _value(draw, depth + 1), "minItems": 0, "maxItems": draw.randint(1, 3)}
        case _:
            return _object(draw, depth)


def _nested(depth: int, opening: str, closing: str, core: str = "") -> str:
    return opening * depth + core + closing * depth


def hostile_schemas() -> dict[str, str]:
    """Return texts by name that must be refused before anything runs."""
    texts: dict[str, Any] = {
        # no JSON, or no schema
        "empty": "",
        "not JSON": "{",
        "two values": "{} {}",
        "a word": "schema",
        "a number": "5",
        "a list": "[]",
        "null": "null",
        "a string": '"object"',
        "NaN": '{"maximum": NaN}',
        "infinity": '{"minimum": -Infinity}',
        "NUL": '{"const": "\0"}',
        "comment": "{} // all",
        "single quotes": "{'type': 'object'}",
        "byte order mark": "\ufeff{}",
        # wrong values of keywords
        "unknown type": {"type": "numeral"},
        "type is a number": {"type": 5},
        "a property is a number": {"properties": {"a": 5}},
        "properties is a list": {"type": "object", "properties": []},
        "enum is a text": {"enum": "red"},
        "enum is empty": {"enum": []},
        "minLength is a text": {"type": "string", "minLength": "x"},
        "minLength is negative": {"type": "string", "minLength": -1},
        "unknown format": {"type": "string", "format": "moon"},
        "required is a text": {"type": "object", "required": "a"},
        "items is a number": {"type": "array", "items": 3},
        "anyOf is empty": {"anyOf": []},
        "anyOf is an object": {"anyOf": {}},
        # what no output satisfies
        "false": "false",
        "minimum above maximum": {"type": "integer", "minimum": 5, "maximum": 4},
        "minLength above maxLength": {"type": "string", "minLength": 5, "maxLength": 4},
        "minItems above maxItems": {"type": "array", "minItems": 5, "maxItems": 4},
        "a required property that may not be": {"type": "object", "properties": {"a": False}, "required": ["a"]},
        # references
        "no such definition": {"$ref": "#/$defs/none"},
        "a remote reference": {"$ref": "http://example.org/schema.json"},
        "a file": {"$ref": "file:///etc/passwd"},
        "a reference to itself": {"$ref": "#"},
        "a ring": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        # keywords that cannot be held to
        "not": {"not": {"type": "string"}},
        "if": {"if": {"type": "string"}, "then": {"maxLength": 3}},
        "unevaluatedProperties": {"type": "object", "unevaluatedProperties": False},
        "contains": {"type": "array", "contains": {"type": "string"}},
        "uniqueItems": {"type": "array", "uniqueItems": True},
        # patterns
        "open group": {"type": "string", "pattern": "(a"},
        "look-ahead": {"type": "string", "pattern": "(?=a)a"},
        "back-reference": {"type": "string", "pattern": r"(a)\1"},
        "many repeats": {"type": "string", "pattern": "a{1000000}"},
        # sizes and depths
        "deep": _nested(60_000, '{"items":', "}", "{}"),
        "deep, of lists": '{"enum": ' + _nested(60_000, "[", "]") + "}",
        "deep, inside the limit of bytes": _nested(5_000, '{"items":', "}", "{}"),
        "never closed": '{"items":' * 5_000,
        "deep pattern": {"type": "string", "pattern": _nested(2_000, "(", ")", "a")},
        "large": {"enum": ["x" * 100_000]},
        "many values": {"enum": list(range(100_000))},
    }
    return {name: text if isinstance(text, str) else json.dumps(text) for name, text in texts.items()}


def heavy_schemas() -> dict[str, str]:
    """Return texts by name that mean something, and cost much: refused or held to, they must do no harm."""
    many = {f"p{i}": {"type": "string", "pattern": f"^(a|b){{1,{i + 1}}}$"} for i in range(700)}
    chain = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(1200)} | {"d1200": {"type": "null"}}
    wide = {f"w{i}": {"anyOf": [{"$ref": f"#/$defs/w{i + 1}"}] * 2} for i in range(30)} | {"w30": {"type": "null"}}
    texts = {
        "repeats of repeats": {"type": "string", "pattern": "((a{99}){99}){99}"},
        "many letters": {"type": "string", "pattern": "^" + "(a|b)?" * 4000},
        "many patterns": {"type": "object", "properties": many, "required": list(many)},
        "a long string": {"type": "string", "minLength": 10_000_000},
        "a long list": {"type": "array", "items": {}, "minItems": 10_000_000},
        "a chain of references": {"$ref": "#/$defs/d0", "$defs": chain},
        "doubling references": {"$ref": "#/$defs/w0", "$defs": wide},
        "recursive": {"$ref": "#/$defs/t", "$defs": {"t": {"type": "array", "items": {"$ref": "#/$defs/t"}}}},
        "many choices": {"enum": [f"{i:05d}" for i in range(6000)]},
        "ambiguous": {"anyOf": [{"type": "string", "pattern": f".*{c}.*"} for c in "abcdefghijklmnopqrstuvwxyz"]},
        "all of many": {"allOf": [{"type": "string", "pattern": f"^[a-z]*{c}[a-z]*$"} for c in "abcdefgh"]},
    }
    return {name: json.dumps(text) for name, text in texts.items()}
