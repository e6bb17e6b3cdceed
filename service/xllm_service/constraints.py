"""Structured output: from what a request asks for to which tokens may come next, by llguidance.

What a client sends is code from a stranger, to be compiled: its size and nesting are bounded before any parser sees it,
what compiling costs is found out in a process that the kernel holds to limits, the work of a step is bounded by fuel,
and whatever goes wrong is a refusal before anything runs.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer

from xllm_service.constraint_sandbox import ConstraintSandbox

MAX_CONSTRAINT_BYTES = 65_536
MAX_CHOICES = 1024
_MAX_DEPTH = 48  # of brackets; llguidance's parsers call themselves once a level
_MAX_MESSAGE = 300
_NOTHING_FITS = "no output satisfies it; change it so that at least one does"

# Fuel is work: some 50 to 100 ms each for compiling and, at the very worst, for one mask. States are memory, 1 to 2 kB.
# note: fuel does not bound everything, so each constraint is compiled in a process of its own first.
_LIMITS: Mapping[str, Any] = {
    "max_items_in_row": 500,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 20_000,
    "max_lexer_states": 10_000,
    "max_grammar_size": 50_000,
    "precompute_large_lexemes": False,
    "verbose_errors": False,
}
# White space as the models write JSON, and one way to write it: a small model left to itself may never stop indenting.
_JSON_STYLE: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_REPEAT = re.compile(r"\{(\d+)(?:,(\d*))?\}")
_MAX_REPEAT = 4096
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*+"', re.DOTALL)


class ConstraintError(ValueError):
    """A constraint that cannot be used; the message says what is wrong with it."""


@dataclass(frozen=True, slots=True)
class Constraint:
    """What an output must look like.

    Attributes:
        kind: json_schema, regex, grammar, choice or json_object, as in the contract.
        text: the schema, expression or grammar.
        options: of a choice.
    """

    kind: str
    text: str = ""
    options: tuple[str, ...] = ()

    @property
    def size_bytes(self) -> int:
        """Of its text and options."""
        return len(self.text.encode()) + sum(len(option.encode()) for option in self.options)

    def check(self) -> None:
        """Refuse what is too large or nested too deeply. Takes time linear in it. Raises ConstraintError."""
        if self.size_bytes > MAX_CONSTRAINT_BYTES:
            raise ConstraintError(f"expected at most {MAX_CONSTRAINT_BYTES} bytes, found {self.size_bytes}")
        if self.kind == "choice":
            self._check_options()
            return
        if self.kind != "json_object" and not self.text:
            raise ConstraintError("expected a text, found nothing")
        if "\0" in self.text:
            raise ConstraintError("expected text without a NUL")
        # note: of a JSON text, what stands in quotes nests nothing, but is a pattern or a key, and may be one itself.
        if (depth := _depth(self.text)) > _MAX_DEPTH:
            raise ConstraintError(f"expected at most {_MAX_DEPTH} brackets inside one another, found {depth}")
        for match in _REPEAT.finditer(self.text):
            if max(int(bound[:9]) for bound in match.groups(default="0") if bound) > _MAX_REPEAT:
                raise ConstraintError(f"expected at most {_MAX_REPEAT} repeats, found {match[0][:20]}")

    def _check_options(self) -> None:
        if not 1 <= len(self.options) <= MAX_CHOICES:
            raise ConstraintError(f"expected 1 to {MAX_CHOICES} options, found {len(self.options)}")
        if "" in self.options:
            raise ConstraintError("expected options that are not empty")
        if len(set(self.options)) != len(self.options):
            raise ConstraintError("expected options that all differ")

    def grammar(self) -> str:
        """Return it in llguidance's own form. Raises ConstraintError."""
        match self.kind:
            case "json_schema":
                return _json_grammar(self.text)
            case "json_object":
                return _json_grammar('{"type": "object"}')
            case "regex":
                return LLMatcher.grammar_from_regex(self.text)
            case "grammar":
                return LLMatcher.grammar_from_lark(self.text)
            case "choice":
                options = " | ".join(json.dumps(option, ensure_ascii=False) for option in self.options)
                return LLMatcher.grammar_from_lark(f"start: {options}")
        raise ConstraintError(f"{self.kind} is no kind of constraint")


def _json_grammar(text: str) -> str:
    try:
        schema = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ConstraintError(f"expected JSON: {error}") from None
    if not isinstance(schema, (dict, bool)):
        raise ConstraintError("expected a JSON object, which a JSON Schema is")
    if schema is False:
        raise ConstraintError(_NOTHING_FITS)
    if schema is True:  # llguidance takes no bare one
        schema = {}
    else:
        # Its own switches for how a schema is read, some of which leave keywords out.
        schema.pop("x-guidance", None)
    return LLMatcher.grammar_from_json_schema(json.dumps(schema, ensure_ascii=False), overrides=_JSON_STYLE)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _depth(text: str) -> int:
    """Return how many brackets are open at most, whatever they mean."""
    depth = deepest = 0
    for character in text:
        if character in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif character in ")]}":
            depth = max(0, depth - 1)
    return deepest


class CompiledConstraint:
    """A constraint that was found good, for any number of outputs.

    It may be there in several copies. Outputs of one copy share what it has learned of its lexer, and wait for one
    another where their masks are computed at the same time; outputs of two copies do not.

    Args:
        make: compiles it once more.
        first: the first copy; has no error.
    """

    def __init__(self, make: Callable[[], LLMatcher], first: LLMatcher) -> None:
        self._make = make
        self._copies = [first]
        self._num_started = 0

    @property
    def num_copies(self) -> int:
        """How many there are; one at first."""
        return len(self._copies)

    def add_copy(self) -> None:
        """Compile it once more, which takes as long as it did; where that fails, the first copy counts twice."""
        try:
            copy = self._make()
        except Exception:  # of the machine's: it was found good before
            copy = self._copies[0]
        self._copies.append(self._copies[0] if copy.is_error() else copy)

    def start(self) -> Matcher:
        """Return what follows one output from its beginning, of each copy in turn."""
        self._num_started += 1
        return Matcher(self._copies[self._num_started % len(self._copies)].deep_copy(), self)


class Matcher:
    """Follows one output. Not for two threads at once.

    Attributes:
        error: why it cannot go on; empty while it can.
    """

    def __init__(self, core: LLMatcher, compiled: CompiledConstraint) -> None:
        """Take over a matcher that has no error."""
        self._core = core
        self._compiled = compiled
        self.error = ""

    def another(self) -> Matcher:
        """Return one for another output of the same constraint, at its beginning."""
        return self._compiled.start()

    @property
    def is_complete(self) -> bool:
        """The constraint is satisfied, and nothing may follow."""
        return not self.error and bool(self._core.is_stopped())

    def consume(self, token_id: int) -> None:
        """Go on by one token; `error` says so where it does not fit."""
        if not self._core.consume_token(token_id):
            self.error = _one_line(self._core.get_error()) or "a token came that the constraint does not allow"

    def mask(self) -> bytes:
        """Return which tokens may come next, one bit each; empty where there is an error."""
        words: bytes = self._core.compute_bitmask()
        return b"" if self._has_failed() else words

    def _has_failed(self) -> bool:
        if self._core.is_error():
            self.error = _one_line(self._core.get_error()) or "the constraint is too complex"
        return bool(self.error)

    def _mask_or_error(self) -> bytes:
        try:
            return self.mask()
        except BaseException as error:  # a panic of llguidance's is no Exception
            self.error = type(error).__name__
            return b""


class MaskMaker:
    """Computes masks of several outputs at once, each as `Matcher.mask` would. Not for two threads at once.

    Args:
        num_threads: that compute, where they can be had.
        mask_bytes: size of a mask, a bit for each row of the head; a multiple of four. A row that has no token is not
            allowed.
    """

    def __init__(self, num_threads: int, mask_bytes: int) -> None:
        self._executor = None
        if num_threads > 1:
            with contextlib.suppress(BaseException):  # where no thread can be had, the caller's computes them
                self._executor = LLExecutor(num_threads)
        self._mask_bytes = mask_bytes

    def masks(self, matchers: Sequence[Matcher]) -> list[bytes | memoryview]:
        """Return which tokens may come next; empty where there is an error."""
        if self._executor is None or len(matchers) < 2:
            return [matcher._mask_or_error()[: self._mask_bytes] for matcher in matchers]
        size = self._mask_bytes
        buffer = bytearray(len(matchers) * size)
        address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
        places = [(matcher._core, place) for place, matcher in enumerate(matchers)]
        try:
            self._executor.unsafe_compute_mask_ptr(places, address, size, len(matchers))
        except BaseException:  # of one of them, which is found by itself
            return [matcher._mask_or_error()[:size] for matcher in matchers]
        view = memoryview(buffer)
        return [
            b"" if matcher._has_failed() else view[place * size : (place + 1) * size]
            for place, matcher in enumerate(matchers)
        ]


@dataclass(slots=True)
class Constrained:
    """What one output must keep to, and how far it is.

    Attributes:
        matcher: follows the output that is constrained.
        free_until: text that ends the part in front of it, which may be anything but over; empty: there is none.
        field: the request's field, for errors.
        is_complete: the output is all there, and nothing may follow.
        error: why it cannot go on.
    """

    matcher: Matcher
    free_until: str = ""
    field: str = ""
    is_complete: bool = False
    error: str = ""
    _tail: bytes = b""

    def another(self) -> Constrained:
        """Return one for another output, at its beginning; this one has not gone on yet."""
        return Constrained(self.matcher.another(), self.free_until, self.field)

    def advance(self, token_id: int, piece: bytes) -> None:
        """Go on by one token."""
        if not self.free_until:
            self.matcher.consume(token_id)
            return
        closing = self.free_until.encode()
        self._tail += piece
        if closing in self._tail:
            self.free_until = ""
        self._tail = self._tail[-len(closing) :]


class ConstraintCompiler:
    """Compiles constraints for one model. Methods may be called from any thread, and take their time.

    Args:
        pieces: the bytes of each token; empty for one that never comes, such as padding.
        control_ids: tokens that give no text.
        end_ids: tokens that end an output; at least one.
        encode: text to token ids.
    """

    def __init__(
        self,
        pieces: Sequence[bytes],
        control_ids: Iterable[int],
        end_ids: Sequence[int],
        encode: Callable[[str], list[int]],
    ) -> None:
        special = set(control_ids) | set(end_ids)
        vocabulary = _Vocabulary(pieces, special, end_ids[0], encode)
        self._sandbox = ConstraintSandbox()
        self._tokenizer = LLTokenizer(vocabulary, n_vocab=len(pieces), eos_token=list(end_ids))  # type: ignore[arg-type]

    def close(self) -> None:
        """End the process that tries constraints."""
        self._sandbox.close()

    def compile(self, constraint: Constraint) -> CompiledConstraint:
        """Return what outputs of it start with. Raises ConstraintError for anything that cannot be held to."""
        constraint.check()
        try:
            grammar = constraint.grammar()
            if problem := self._sandbox.problem(grammar, _LIMITS):
                raise ConstraintError(_one_line(problem))
            core = self._make(grammar)
        except ConstraintError:
            raise
        except ValueError as error:
            raise ConstraintError(_one_line(str(error))) from None
        if core.is_error():
            raise ConstraintError(_one_line(core.get_error()))
        if warnings := core.get_grammar_warnings():
            raise ConstraintError(_one_line(warnings[0]))
        compiled = CompiledConstraint(lambda: self._make(grammar), core)
        # Some limits show only now, and so does a constraint that no output satisfies.
        matcher = compiled.start()
        words = matcher.mask()
        if matcher.error:
            raise ConstraintError(matcher.error)
        if not any(words):
            raise ConstraintError(_NOTHING_FITS)
        return compiled

    def _make(self, grammar: str) -> LLMatcher:
        return LLMatcher(self._tokenizer, grammar, log_level=0, limits=LLParserLimits(**_LIMITS))


class _Vocabulary:
    """A model's tokens in the shape that llguidance asks for."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(
        self, pieces: Sequence[bytes], special: set[int], end_id: int, encode: Callable[[str], list[int]]
    ) -> None:
        self.eos_token_id = end_id
        self.special_token_ids = sorted(special)
        # A byte that text never has marks what is not text, so that no output can spell it.
        self.tokens = [b"\xff<%d>" % i if i in special else piece for i, piece in enumerate(pieces)]
        self._encode = encode

    def __call__(self, text: str | bytes) -> list[int]:
        return self._encode(text.decode("utf-8", "replace") if isinstance(text, bytes) else text)


def _one_line(text: str) -> str:
    """Return the first lines of a parser's message, as one, in words that a client can use."""
    line = " ".join(text.removesuffix("<non-verbose/>").split())[:_MAX_MESSAGE]
    return _NOTHING_FITS if line == "NoExtensionBias" else line
