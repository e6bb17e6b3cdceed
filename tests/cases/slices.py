"""Slices of published vocabularies as model files; make_slices.py wrote them and says why a slice is enough."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from cyengine import Model
from tests.differential.vocabulary import Vocabulary

FOLDER = Path(__file__).resolve().parents[1] / "data" / "vocabularies"


@dataclass(frozen=True)
class Slice:
    """A slice, opened.

    Attributes:
        model: A vocabulary file of the slice's tokens alone, numbered from 0.
        published: The published id of each.
        ids: What the model's own tokenizer makes of the texts, in published ids.
    """

    model: Model
    published: list[int]
    ids: dict[str, list[int]]

    def encode(self, text: str, *, parse_special: bool = False) -> list[int]:
        """Encode a text that the slice was made for; returns published ids."""
        return [self.published[i] for i in self.model.encode(text, add_special=False, parse_special=parse_special)]

    def decode(self, ids: list[int], *, render_special: bool = False) -> str:
        """Decode published ids."""
        return self.model.decode([self.published.index(i) for i in ids], render_special=render_special)


def open_slice(name: str, folder: Path, pre: str | None = None) -> Slice:
    """Open a slice by the name of its file, as a model that calls its pre-tokenizer `pre`."""
    content = json.loads((FOLDER / f"{name}.json").read_text())
    published, tokens, types = (list(column) for column in zip(*content["tokens"], strict=True))
    vocabulary = Vocabulary(
        "gpt2", tokens, types, pre=content["pre"] if pre is None else pre, merges=content["merges"], add_bos=False
    )
    path = folder / f"{name}-{pre}.gguf"
    return Slice(Model(vocabulary.write(path)), published, content["ids"])
