"""A vocabulary as a model file holds it, and that file."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from gguf import GGUFWriter

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


@dataclass
class Vocabulary:
    """The fields of a model file's tokenizer section; empty and None mean that the key is absent."""

    model: str
    tokens: list[str]
    types: list[int]
    pre: str = ""
    merges: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    add_bos: bool | None = None
    # Further keys of the section.
    extra: dict[str, bool | list[int]] = field(default_factory=dict)

    def write(self, path: Path) -> Path:
        """Write a file that holds the vocabulary alone; returns `path`."""
        writer = GGUFWriter(path, "llama")
        writer.add_tokenizer_model(self.model)
        writer.add_token_list(self.tokens)
        writer.add_token_types(self.types)
        if self.pre:
            writer.add_tokenizer_pre(self.pre)
        if self.merges:
            writer.add_token_merges(self.merges)
        if self.scores:
            writer.add_token_scores(self.scores)
        if self.add_bos is not None:
            writer.add_add_bos_token(self.add_bos)
        for key, value in self.extra.items():
            if isinstance(value, bool):
                writer.add_bool(f"tokenizer.ggml.{key}", value)
            else:
                writer.add_array(f"tokenizer.ggml.{key}", value)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        return path
