"""A vocabulary as the core takes it, and the file that tests/tools/tokenizer_cli.cc reads."""

from __future__ import annotations

import struct
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
ADD_SPECIAL, PARSE_SPECIAL = 1, 2
FAILED = 2**32 - 1


@dataclass
class Vocabulary:
    """The fields of a model file's tokenizer section; None and -1 mean that the key is absent."""

    model: str
    tokens: list[str]
    types: list[int]
    pre: str = ""
    merges: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    bos: int = -1
    eos: int = -1
    add_bos: int = -1
    add_eos: int = -1
    add_space_prefix: int = -1

    def to_bytes(self) -> bytes:
        """The file's bytes; its layout is described in tokenizer_cli.cc."""
        count = len(self.tokens)
        parts = [_string(self.model), _string(self.pre), _string("")]
        ids = (self.bos, self.eos, -1, -1, self.add_bos, self.add_eos, self.add_space_prefix)
        parts.append(struct.pack("<7iI", *ids, count))
        parts += map(_string, self.tokens)
        parts.append(struct.pack(f"<{count}i", *self.types))
        parts.append(struct.pack(f"<{count}f", *(self.scores or [0.0] * count)))
        parts.append(struct.pack("<I", len(self.merges)))
        parts += map(_string, self.merges)
        return b"".join(parts)


@dataclass
class Answer:
    """Ids of a text, and the text decoded from them piece by piece."""

    ids: list[int]
    text: str


def encode_all(
    cli: Path, vocabulary: Vocabulary, texts: Sequence[str], flags: int = 0
) -> list[Answer]:
    """Run the core's tokenizer over all texts; raises RuntimeError with its message."""
    requests = b"".join(struct.pack("<I", flags) + _string(text) for text in texts)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "vocabulary"
        path.write_bytes(vocabulary.to_bytes())
        done = subprocess.run([str(cli), str(path)], input=requests, capture_output=True)
    if done.returncode != 0:
        raise RuntimeError(f"tokenizer_cli ended with {done.returncode}: {done.stderr.decode()}")
    answers = []
    position = 0
    for _ in texts:
        (count,) = struct.unpack_from("<I", done.stdout, position)
        position += 4
        ids: list[int] = []
        if count != FAILED:
            ids = list(struct.unpack_from(f"<{count}i", done.stdout, position))
            position += 4 * count
        (size,) = struct.unpack_from("<I", done.stdout, position)
        position += 4
        text = done.stdout[position : position + size].decode()
        position += size
        if count == FAILED:
            raise RuntimeError(text)
        answers.append(Answer(ids, text))
    return answers


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<I", len(data)) + data
