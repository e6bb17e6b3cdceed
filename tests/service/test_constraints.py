"""Constraints: what they let through, token by token, and what is refused before anything runs."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.tools.schemas import heavy_schemas, hostile_schemas, random_schema
from xllm_service.constraints import (
    MAX_CONSTRAINT_BYTES,
    Constrained,
    Constraint,
    ConstraintCompiler,
    ConstraintError,
    MaskMaker,
)

END = 256
PADDING = 258


@pytest.fixture(scope="module")
def compiler() -> Iterator[ConstraintCompiler]:
    """For a vocabulary of the bytes, an end, a control token and a row of padding."""
    pieces = [*(bytes([value]) for value in range(256)), b"<|end|>", b"<|user|>", b""]
    compiler = ConstraintCompiler(pieces, [257], [END], lambda text: list(text.encode()))
    yield compiler
    compiler.close()


def allowed(words: bytes) -> set[int]:
    return {i for i in range(len(words) * 8) if words[i // 8] >> i % 8 & 1}


def accepts(compiler: ConstraintCompiler, constraint: Constraint, text: str) -> bool:
    """Whether a whole text satisfies a constraint, token by token."""
    matcher = compiler.compile(constraint).start()
    for byte in text.encode():
        if matcher.is_complete or byte not in allowed(matcher.mask()):
            return False
        matcher.consume(byte)
    return matcher.is_complete or END in allowed(matcher.mask())


SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"a": {"type": "integer", "maximum": 12, "minimum": 0}, "b": {"enum": ["x", 'é "']}},
        "required": ["a"],
        "additionalProperties": False,
    }
)


@pytest.mark.parametrize(
    ("constraint", "text", "fits"),
    [
        (Constraint("json_schema", SCHEMA), '{"a": 12, "b": "é \\""}', True),
        (Constraint("json_schema", SCHEMA), '{"a": 13}', False),
        (Constraint("json_schema", SCHEMA), '{"b": "x"}', False),
        (Constraint("json_schema", SCHEMA), '{"a": 1, "c": 1}', False),
        (Constraint("json_schema", SCHEMA), '{"a": 1', False),
        (Constraint("json_object"), '{"k": [1, null, {"x": 2.5}]}', True),
        (Constraint("json_object"), "[1]", False),
        (Constraint("regex", r"\d{3}-[a-c]+"), "123-abc", True),
        (Constraint("regex", r"\d{3}-[a-c]+"), "123-abd", False),
        (Constraint("grammar", 'start: "x" NUM ("," NUM)*\nNUM: /[0-9]+/'), "x1,22", True),
        (Constraint("grammar", 'start: "x" NUM ("," NUM)*\nNUM: /[0-9]+/'), "x1,", False),
        (Constraint("choice", options=("red", 'a "b" \\', "é")), 'a "b" \\', True),
        (Constraint("choice", options=("red", "redder")), "redd", False),
        (Constraint("choice", options=("red", "redder")), "red", True),
    ],
)
def test_what_fits(compiler: ConstraintCompiler, constraint: Constraint, text: str, fits: bool) -> None:
    assert accepts(compiler, constraint, text) is fits


def test_padding_and_control_tokens_are_never_allowed(compiler: ConstraintCompiler) -> None:
    matcher = compiler.compile(Constraint("regex", "(?s:.*)")).start()
    for byte in b"<|user|>":
        words = allowed(matcher.mask())
        assert END in words and not words & {257, PADDING} and max(words) == END
        matcher.consume(byte)


def test_an_output_that_nothing_may_follow_is_complete(compiler: ConstraintCompiler) -> None:
    matcher = compiler.compile(Constraint("regex", "ab")).start()
    matcher.consume(ord("a"))
    assert not matcher.is_complete
    matcher.consume(ord("b"))
    assert matcher.is_complete
    wrong = compiler.compile(Constraint("regex", "ab")).start()
    wrong.consume(ord("b"))
    assert wrong.error and not wrong.is_complete


def test_what_comes_in_front_is_free(compiler: ConstraintCompiler) -> None:
    row = Constrained(compiler.compile(Constraint("regex", "ab")).start(), free_until="</t>")
    for byte in b"anything </ </t>":
        assert row.free_until
        row.advance(byte, bytes([byte]))
    assert not row.free_until
    for byte in b"ab":
        row.advance(byte, bytes([byte]))
    assert row.matcher.is_complete


@pytest.mark.parametrize("name", hostile_schemas())
def test_hostile_schemas_fail_closed(compiler: ConstraintCompiler, name: str) -> None:
    with pytest.raises(ConstraintError):
        compiler.compile(Constraint("json_schema", hostile_schemas()[name]))
    assert accepts(compiler, Constraint("regex", "ok"), "ok"), "the next one is served"


def test_there_are_fifty_hostile_schemas() -> None:
    assert len(set(hostile_schemas().values())) >= 50


HOSTILE: dict[str, Constraint] = {
    "regex that is open": Constraint("regex", "(a"),
    "regex that looks ahead": Constraint("regex", "(?=a)a"),
    "regex of postfixes": Constraint("regex", "a" + "?" * 60_000),
    "regex that compiles for minutes": Constraint("regex", ".*" * 20_000),
    "regex that is deep": Constraint("regex", "(" * 60_000 + "a" + ")" * 60_000),
    "regex of nothing": Constraint("regex", ""),
    "grammar without a start": Constraint("grammar", 'a: "b"'),
    "grammar that ends early": Constraint("grammar", 'start: "'),
    "grammar of a deep chain": Constraint(
        "grammar", "\n".join(["start: r0", *(f"r{i}: r{i + 1}" for i in range(4000)), 'r4000: "a"'])
    ),
    "grammar whose terminals double": Constraint(
        "grammar", "\n".join(["start: T0", *(f"T{i}: T{i + 1} T{i + 1}" for i in range(40)), 'T40: "a"'])
    ),
    "grammar that imports what is not there": Constraint("grammar", "%import python\nstart: python"),
    "choice of nothing": Constraint("choice"),
    "choice of an empty text": Constraint("choice", options=("a", "")),
    "choice of two alike": Constraint("choice", options=("a", "a")),
    "choice of too many": Constraint("choice", options=tuple(map(str, range(5000)))),
    "too large": Constraint("regex", "a" * (MAX_CONSTRAINT_BYTES + 1)),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_other_hostile_constraints_fail_closed(compiler: ConstraintCompiler, name: str) -> None:
    with pytest.raises(ConstraintError) as caught:
        compiler.compile(HOSTILE[name])
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


HEAVY = {
    **{name: Constraint("json_schema", text) for name, text in heavy_schemas().items()},
    "alternatives": Constraint("regex", "|".join(["ab"] * 20_000)),
    "long words": Constraint("regex", r"\w{1,4000}\W{1,4000}" * 4),
    "left recursion": Constraint("grammar", 'start: start "a" | "a"'),
    "ambiguity": Constraint("grammar", 'start: s\ns: s s | "a" | ""'),
    "doubling rules": Constraint(
        "grammar", "\n".join(["start: r0", *(f"r{i}: r{i + 1} r{i + 1}" for i in range(40)), 'r40: "a"'])
    ),
}


@pytest.mark.parametrize("name", HEAVY)
def test_what_costs_much_is_refused_or_goes_on_or_ends_by_itself(compiler: ConstraintCompiler, name: str) -> None:
    try:
        matcher = compiler.compile(HEAVY[name]).start()
    except ConstraintError:
        return
    began = time.process_time()
    for _ in range(40):
        words = allowed(matcher.mask())
        if matcher.error or matcher.is_complete:
            break
        matcher.consume(max(words - {END}, default=END))
    assert time.process_time() - began < 10, "forty steps"


@pytest.mark.parametrize("mask_bytes", [36, 32, 40])
def test_masks_of_several_outputs_are_those_of_each_alone(compiler: ConstraintCompiler, mask_bytes: int) -> None:
    """Of the same constraint and of others, in several threads; with rows that have no token, or fewer rows."""
    same = compiler.compile(Constraint("regex", "(ab|cd)*e"))
    same.add_copy()
    assert same.num_copies == 2
    compiled = [*([same] * 6), *(compiler.compile(Constraint("regex", f"{letter}+z")) for letter in "pqrs")]
    together = [one.start() for one in compiled]
    alone = [one.start() for one in compiled]
    makers = [MaskMaker(num_threads, mask_bytes) for num_threads in (1, 3)]
    for _ in range(12):
        expected = [one.mask()[:mask_bytes].ljust(mask_bytes, b"\0") for one in alone]
        for maker in makers:
            found = [bytes(mask).ljust(mask_bytes, b"\0") for mask in maker.masks(together)]
            assert found == expected
        for place, words in enumerate(expected):
            going_on = sorted(allowed(words) - {ord("e"), ord("z")})
            token_id = going_on[place % len(going_on)]
            together[place].consume(token_id)
            alone[place].consume(token_id)


def test_without_threads_masks_are_computed_all_the_same(
    compiler: ConstraintCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    outputs = [compiler.compile(Constraint("regex", text)).start() for text in ("ab", "cd")]

    def no_threads(num_threads: int) -> None:
        raise RuntimeError("no threads left")

    monkeypatch.setattr("xllm_service.constraints.LLExecutor", no_threads)
    masks = MaskMaker(3, 36).masks(outputs)
    assert [allowed(bytes(mask)) for mask in masks] == [{ord("a")}, {ord("c")}]


def test_a_copy_that_cannot_be_made_costs_no_output(
    compiler: ConstraintCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = compiler.compile(Constraint("regex", "ab"))

    def no_memory(grammar: str) -> None:
        raise MemoryError

    monkeypatch.setattr(compiler, "_make", no_memory)
    compiled.add_copy()
    assert compiled.num_copies == 2, "it is not tried again with every call"
    assert [allowed(compiled.start().mask()) for _ in range(3)] == [{ord("a")}] * 3


def test_an_output_that_cannot_go_on_leaves_the_masks_of_others(compiler: ConstraintCompiler) -> None:
    outputs = [compiler.compile(Constraint("regex", text)).start() for text in ("ab", "cd", "ef")]
    outputs[1].consume(ord("x"))
    for num_threads in (1, 2):
        masks = MaskMaker(num_threads, 36).masks(outputs)
        assert [allowed(bytes(mask)) for mask in masks] == [{ord("a")}, set(), {ord("e")}]
        assert [bool(one.error) for one in outputs] == [False, True, False]


@pytest.mark.parametrize("seed", range(0, 500, 25))
def test_random_schemas_compile(compiler: ConstraintCompiler, seed: int) -> None:
    matcher = compiler.compile(Constraint("json_schema", json.dumps(random_schema(seed)))).start()
    assert allowed(matcher.mask()) == {ord("{")}


def test_a_schemas_own_switches_are_not_obeyed(compiler: ConstraintCompiler) -> None:
    schema: dict[str, Any] = {"not": {"type": "string"}, "x-guidance": {"lenient": True}}
    with pytest.raises(ConstraintError, match=re.compile("not", re.IGNORECASE)):
        compiler.compile(Constraint("json_schema", json.dumps(schema)))


@pytest.mark.parametrize(
    "constraint",
    [
        Constraint("regex", r"[^\x00-\U0010ffff]"),
        Constraint("grammar", "start: start"),
        Constraint("json_schema", '{"$ref": "#"}'),
        Constraint("json_schema", "false"),
    ],
    ids=["regex", "grammar", "schema", "false"],
)
def test_what_no_output_satisfies_is_refused_in_plain_words(
    compiler: ConstraintCompiler, constraint: Constraint
) -> None:
    with pytest.raises(ConstraintError, match=r"^no output satisfies it"):
        compiler.compile(constraint)


def test_the_schema_that_is_true_lets_any_json_through(compiler: ConstraintCompiler) -> None:
    for text in ("12", '"x"', "[1, {}]"):
        assert accepts(compiler, Constraint("json_schema", "true"), text)
