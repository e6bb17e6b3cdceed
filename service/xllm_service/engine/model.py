"""An opened model file: tokenizer, chat template, facts."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self, TypeVar

import cyengine
from cyengine.types import EndToken, Fact, Metadata, ModelInfo, Plan, TensorInfo, TextPiece
from xllm_service.answer_markers import find_markers, marker_ids
from xllm_service.chat_template import ChatTemplate, Piece, TemplateRenderError, TemplateUnusableError
from xllm_service.config import ServeConfig
from xllm_service.constraints import CompiledConstraint, Constraint, ConstraintCompiler, ConstraintError, Matcher
from xllm_service.digest import FileDigest, shard_paths
from xllm_service.engine.compilations import Compilations
from xllm_service.engine.config import engine_config
from xllm_service.engine.failures import translated
from xllm_service.errors import Reason, ServiceError
from xllm_service.sandbox import SandboxUnavailableError

# Values of tokenizer.ggml.token_type.
_UNKNOWN, _CONTROL, _UNUSED = 2, 3, 5
_NUM_WORKERS = 2
_T = TypeVar("_T")


class Model:
    """An opened model file with its tokenizer and chat template; loads no weights. Close it, or use it in `with`.

    Every method raises ServiceError. None of them waits for a device; those that read text take time linear in it.
    """

    def __init__(self, core: Any) -> None:
        """Take over an opened cyengine.Model."""
        self.core = core
        self.info: ModelInfo = core.info
        self.digest = FileDigest(shard_paths(Path(self.info.path)))
        # Reading a text takes up to 25 times its bytes for a moment: very long ones are read one by one, and leave a
        # worker to the others.
        self.very_long_texts = asyncio.Semaphore(_NUM_WORKERS - 1)
        self._pieces: list[bytes] = []
        self._control: frozenset[int] = frozenset()
        self._textless: frozenset[int] = frozenset()  # that no output ever has, or that give it no text
        self._workers = ThreadPoolExecutor(_NUM_WORKERS, thread_name_prefix="xllm-text")
        self._compiler: ConstraintCompiler | None = None
        self._compilations = Compilations(self._compile)
        if self.info.has_tokenizer:
            self._read_vocabulary()
        self.markers = find_markers(self.info.chat_template)
        control = [(i, self.piece(i).decode("utf-8", "replace")) for i in sorted(self._control)]
        self.marker_ids = marker_ids(self.markers, control)
        # note: a message may spell neither a control token nor what answers are read with.
        guarded = [*(piece for _, piece in control), *self.markers.texts]
        self.chat_template = ChatTemplate(self.info.chat_template, guarded, self._names())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Unmap the file; engines made from it go on. Waits for text that is being read."""
        self._workers.shutdown()
        self._compilations.close()
        if self._compiler is not None:
            self._compiler.close()
        self.digest.stop()
        self.chat_template.close()
        self.core.close()

    def _read_vocabulary(self) -> None:
        control, textless = [], []
        for token_id in range(self.info.vocab_size):
            piece, token_type = self.core.token_piece(token_id)
            self._pieces.append(piece)
            if token_type == _CONTROL:
                control.append(token_id)
            if token_type in (_UNKNOWN, _UNUSED):
                textless.append(token_id)
        self._control, self._textless = frozenset(control), frozenset(textless)

    def _names(self) -> dict[str, str]:
        """What a template may call the special tokens: bos_token, eos_token, ..."""
        names = {}
        for entry in self.metadata():
            match = re.fullmatch(r"tokenizer\.ggml\.(bos|eos|unknown|padding)_token_id", entry.key)
            if match is None or not self._pieces:
                continue
            token_id = json.loads(entry.value_json)
            if isinstance(token_id, int) and 0 <= token_id < len(self._pieces):
                short = {"unknown": "unk", "padding": "pad"}.get(match[1], match[1])
                names[f"{short}_token"] = self.piece(token_id).decode("utf-8", "replace")
        return names

    def metadata(self) -> list[Metadata]:
        """Every key of the file, in its order."""
        entries: list[Metadata] = self.core.metadata()
        return entries

    def tensors(self) -> list[TensorInfo]:
        """Every tensor of the file, in its order."""
        tensors: list[TensorInfo] = self.core.tensors()
        return tensors

    def facts(self) -> list[Fact]:
        """What was inferred while reading the file, with its source."""
        found: list[Fact] = self.core.facts()
        return found

    def end_tokens(self) -> list[EndToken]:
        """The end-of-generation set, with the source of each member."""
        tokens: list[EndToken] = self.core.end_tokens()
        return tokens

    def plan(self, config: ServeConfig | None = None) -> Plan:
        """What an engine would take on this machine, before anything is loaded."""
        with translated():
            plan: Plan = self.core.plan(engine_config(config) if config is not None else None)
            return plan

    def check_tokenizer(self) -> None:
        """Raise NO_TOKENIZER where text cannot be read with this model."""
        if self.info.has_tokenizer:
            return
        has_vocabulary = self.info.tokenizer_model not in ("", "no_vocab")
        metadata = {"key": "tokenizer.ggml.pre" if has_vocabulary else "tokenizer.ggml.model"}
        if has_vocabulary:
            metadata["flag"] = "--pretokenizer"
        message = "the model file has no usable tokenizer: send token ids"
        try:
            self.encode("")  # the core knows what is missing
        except ServiceError as error:
            message = error.message
        raise ServiceError(Reason.NO_TOKENIZER, message, metadata=metadata)

    def is_control(self, token_id: int) -> bool:
        """The id is a CONTROL token, which gives no text."""
        return token_id in self._control

    def piece(self, token_id: int) -> bytes:
        """The raw bytes of one token; for a CONTROL token its name. Empty for an id outside the vocabulary."""
        return self._pieces[token_id] if 0 <= token_id < len(self._pieces) else b""

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Return the ids of a text; written control tokens become those tokens only with parse_special."""
        with translated():
            ids: list[int] = self.core.encode(text, add_special=add_special, parse_special=parse_special)
            return ids

    def decode(self, ids: Sequence[int], *, render_special: bool = False) -> str:
        """Return the text of ids; bytes that form no code point become U+FFFD."""
        with translated():
            text: str = self.core.decode(ids, render_special=render_special)
            return text

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Any] = (),
        add_generation_prompt: bool = True,
        arguments: Mapping[str, Any] | None = None,
    ) -> list[Piece]:
        """Return the prompt of a conversation in pieces; `encode_pieces` makes ids of them.

        Raises NO_CHAT_TEMPLATE where the model has none that works, TEMPLATE_REFUSED where it refuses the messages,
        RENDERER_UNAVAILABLE where the machine has nothing left to render it with.
        """
        try:
            return self.chat_template.render(
                messages, tools=tools, add_generation_prompt=add_generation_prompt, arguments=arguments
            )
        except TemplateUnusableError as error:
            raise ServiceError(Reason.NO_CHAT_TEMPLATE, str(error)) from None
        except TemplateRenderError as error:
            raise ServiceError(Reason.TEMPLATE_REFUSED, str(error), field="chat.messages") from None
        except SandboxUnavailableError as error:
            raise ServiceError(Reason.RENDERER_UNAVAILABLE, str(error)) from None

    async def in_worker(self, work: Callable[[], _T]) -> _T:
        """Run what takes its time, such as reading a long text, in a thread of this model's own."""
        return await asyncio.get_running_loop().run_in_executor(self._workers, work)

    async def compile(self, constraint: Constraint, field: str, owner: str) -> Matcher:
        """Return what follows an output that is constrained, compiled in a thread by turns of principals.

        Raises INVALID_CONSTRAINT for a constraint that cannot be held to, NO_TOKENIZER where the model has no text,
        QUEUE_FULL where too many of this owner's wait, COMPILER_UNAVAILABLE where the machine has nothing left to
        compile it with.
        """
        self.check_tokenizer()
        if not self.end_tokens():
            raise ServiceError(
                Reason.NO_TOKENIZER, "the model has no token that ends an output: leave constraint unset"
            )
        try:
            constraint.check()
            return await self._compilations.get(owner, constraint)
        except ConstraintError as error:
            raise ServiceError(Reason.INVALID_CONSTRAINT, f"{field}: {error}", field=field) from None
        except SandboxUnavailableError as error:
            raise ServiceError(Reason.COMPILER_UNAVAILABLE, str(error)) from None

    def expect_mask_threads(self, num_threads: int) -> None:
        """Compile constraints from now on so that as many threads can work on outputs of the same one."""
        self._compilations.num_copies = max(self._compilations.num_copies, num_threads)

    def _compile(self, constraint: Constraint) -> CompiledConstraint:
        if self._compiler is None:
            ends = [end.token_id for end in self.end_tokens()]
            pieces = [b"" if i in self._textless else piece for i, piece in enumerate(self._pieces)]
            encode = functools.partial(self.encode, add_special=False)
            self._compiler = ConstraintCompiler(pieces, self._control, ends, encode)
        return self._compiler.compile(constraint)

    @property
    def mask_bytes(self) -> int:
        """Size of a mask over all rows of the head."""
        return 4 * -(-self.info.vocab_size // 32)

    @functools.cached_property
    def free_mask(self) -> bytes:
        """The mask that allows every token but those that end an output."""
        words = bytearray(b"\xff" * self.mask_bytes)
        for end in self.end_tokens():
            words[end.token_id // 8] &= ~(1 << end.token_id % 8)
        return bytes(words)

    def encode_pieces(self, pieces: Sequence[Piece]) -> list[int]:
        """Return the ids of a rendered conversation; only text of the template may spell control tokens."""
        # note: as in transformers nothing is added around it: a template writes its own BOS where the model wants one.
        with translated():
            texts = [TextPiece(piece.text, piece.trusted, not piece.trusted) for piece in pieces]
            ids: list[int] = self.core.encode(texts, add_special=False)
            return ids


def open_model(path: str | os.PathLike[str], *, pretokenizer: str | None = None) -> Model:
    """Map a GGUF file and read everything but its weights.

    Raises ServiceError: MODEL_NOT_FOUND, INVALID_MODEL, TRUNCATED_MODEL, UNSUPPORTED_MODEL, with the key or tensor and
    the byte offset in its message.
    """
    with translated():
        core = cyengine.Model(path, pretokenizer=pretokenizer)
        try:
            return Model(core)
        except BaseException:
            core.close()
            raise
