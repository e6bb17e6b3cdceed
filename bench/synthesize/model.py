"""What a model's shape is, and the tensors that follow from it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Special:
    """A token beyond the ordinary ones: its text and tokenizer.ggml.token_type."""

    text: str
    kind: int


@dataclass(frozen=True)
class TokenizerShape:
    """Sizes and keys of a byte-level BPE tokenizer.

    Attributes:
        pre: tokenizer.ggml.pre.
        num_words: Ordinary tokens, the 256 bytes included; they come first.
        num_merges: At least num_words - 256. More of them spell the same words in other ways.
        specials: What follows the words.
        num_padding: UNUSED tokens behind them, up to the rows of the embedding.
        bos: Text of the BOS token; likewise the next two.
        pad: None: no such key.
        adds_bos: tokenizer.ggml.add_bos_token.
        chat_template: A short template in the family's form of a turn.
    """

    pre: str
    num_words: int
    num_merges: int
    specials: tuple[Special, ...]
    num_padding: int
    bos: str
    eos: str
    pad: str | None
    adds_bos: bool
    chat_template: str

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding."""
        return self.num_words + len(self.specials) + self.num_padding


@dataclass(frozen=True)
class ModelShape:
    """A model's dimensions, in the words of style and papers.

    Attributes:
        rope_dim: rope.dimension_count; 0: the key is left out.
        llama3_factor: Of Llama 3.1's scaled frequencies, as rope_freqs.weight; 0: none.
        has_head_dim_keys: Whether attention.key_length and value_length are written.
    """

    name: str
    arch: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_length: int
    rope_freq_base: float
    rms_eps: float
    is_tied: bool
    has_qkv_bias: bool
    has_qk_norm: bool
    has_head_dim_keys: bool
    tokenizer: TokenizerShape
    rope_dim: int = 0
    llama3_factor: float = 0.0

    def vectors(self) -> Iterator[tuple[str, int]]:
        """Yield name and size of every f32 vector but rope_freqs.weight."""
        q_rows, kv_rows = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        yield "output_norm.weight", self.hidden_size
        for layer in range(self.num_layers):
            yield f"blk.{layer}.attn_norm.weight", self.hidden_size
            yield f"blk.{layer}.ffn_norm.weight", self.hidden_size
            if self.has_qkv_bias:
                yield f"blk.{layer}.attn_q.bias", q_rows
                yield f"blk.{layer}.attn_k.bias", kv_rows
                yield f"blk.{layer}.attn_v.bias", kv_rows
            if self.has_qk_norm:
                yield f"blk.{layer}.attn_q_norm.weight", self.head_dim
                yield f"blk.{layer}.attn_k_norm.weight", self.head_dim

    def matrices(self) -> Iterator[tuple[str, int, int]]:
        """Yield name, rows and cols of every matrix."""
        q_rows, kv_rows = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        yield "token_embd.weight", self.tokenizer.vocab_size, self.hidden_size
        if not self.is_tied:
            yield "output.weight", self.tokenizer.vocab_size, self.hidden_size
        for layer in range(self.num_layers):
            yield f"blk.{layer}.attn_q.weight", q_rows, self.hidden_size
            yield f"blk.{layer}.attn_k.weight", kv_rows, self.hidden_size
            yield f"blk.{layer}.attn_v.weight", kv_rows, self.hidden_size
            yield f"blk.{layer}.attn_output.weight", self.hidden_size, q_rows
            yield f"blk.{layer}.ffn_gate.weight", self.intermediate_size, self.hidden_size
            yield f"blk.{layer}.ffn_up.weight", self.intermediate_size, self.hidden_size
            yield f"blk.{layer}.ffn_down.weight", self.hidden_size, self.intermediate_size


def miniature(shape: ModelShape, num_layers: int = 8) -> ModelShape:
    """Return the shape made small, with the same tokenizer rules, mixes, fallbacks and ties.

    Rows that are whole blocks of 256 stay so, and those that are not stay that.
    """
    head_dim = 32

    def small(size: int) -> int:
        return 256 if size % 256 == 0 else 160

    tokenizer = shape.tokenizer
    extra_merges = min(tokenizer.num_merges - (tokenizer.num_words - 256), 100)
    return replace(
        shape,
        name=f"{shape.name}-miniature",
        num_layers=num_layers,
        hidden_size=small(shape.hidden_size),
        intermediate_size=small(shape.intermediate_size),
        num_heads=small(shape.num_heads * shape.head_dim) // head_dim,
        num_kv_heads=1 if small(shape.num_heads * shape.head_dim) == 160 else 2,
        head_dim=head_dim,
        rope_dim=head_dim if shape.rope_dim else 0,
        context_length=min(shape.context_length, 2048),
        tokenizer=replace(
            tokenizer,
            num_words=1200,
            num_merges=1200 - 256 + extra_merges,
            num_padding=min(tokenizer.num_padding, 7),
        ),
    )
