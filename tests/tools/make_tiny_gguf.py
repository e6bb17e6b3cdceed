"""Writes small seeded GGUF models: random weights, real layouts, under 1 MB.

    python -m tests.tools.make_tiny_gguf OUT.gguf [--arch qwen2] [--dtype q4_k] [--set num_layers=3] ...

or, from a test, `make_tiny_gguf(path, arch="qwen2", dtype="q4_k")`. The same options give the same bytes. `--set` and
the keyword arguments name the fields of TinyModel.

note: GGUF stores the Q and K rows of the llama family in the order that rotates neighbours (2i, 2i + 1), those of the
qwen families for halves (i, i + d/2). Random weights are what they are in either order; a reference must rotate by the
file's architecture.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGUFWriter

from tests.tools.quant_blocks import FLOAT_TYPES, RANDOM_TYPES, block_elems, encode, qtype, random_blocks
from tests.tools.tiny_vocab import CHATML, TinyVocab, make_vocab

ARCHS = ("llama", "qwen2", "qwen3")
DTYPES = FLOAT_TYPES + RANDOM_TYPES

Floats = npt.NDArray[np.float32]

#: Every embedding's element 0 in models whose head must prefer some rows whatever the context: see _shape_head.
_CONSTANT = 4.0


@dataclass(frozen=True)
class TinyModel:
    """What to write. None and 0 stand for the defaults told here.

    Attributes:
        arch: general.architecture, one of ARCHS.
        dtype: Type of every matrix that nothing below names, one of DTYPES.
        embedding_dtype: Type of token_embd.weight; None: dtype.
        head_dtype: Type of output.weight; None: embedding_dtype.
        dtypes: Types by the end of a tensor's name, before `dtype`: {"ffn_down.weight": "q6_k"}.
        seed: Of all weights.
        tied: No output.weight: the embedding is the head.
        hidden_size: 0: 64, or 256 where a type's blocks are that long.
        intermediate_size: 0: twice hidden_size, but 256 for 256.
        head_dim: 0: hidden_size / num_heads, and attention.key_length is left out.
        qkv_bias: None: for qwen2 alone. Any architecture may have one.
        bias_values: Constants for the Q, K and V biases instead of random ones.
        rope_dim: rope.dimension_count; 0: left out.
        rope_scaling: None, "linear" or "yarn" by rope_factor, from half the context.
        rope_freqs: Adds rope_freqs.weight, one divisor per rotated pair, as Llama 3 has it.
        vocab: "bpe", or "none" for tokenizer.ggml.model = no_vocab.
        vocab_only: No tensors and no keys of the architecture: a file for tokenizers alone.
        pre: tokenizer.ggml.pre; None: left out.
        extra_control: More CONTROL tokens.
        num_padding: Head rows beyond the real tokens, type UNUSED, that have the highest logits.
        padding_listed: Whether tokenizer.ggml.tokens goes on to the padding rows.
        next_token: A script: after token k the model's greedy choice is next_token[k]. Needs tied=False.
        next_default: The choice after any token that next_token does not name.
        metadata: Keys to add or replace; None removes one. Types as _add_value maps them.
        tensors: More tensors, f32, by name.
    """

    arch: str = "llama"
    dtype: str = "q4_1"
    embedding_dtype: str | None = None
    head_dtype: str | None = None
    dtypes: Mapping[str, str] = field(default_factory=dict)
    seed: int = 0
    tied: bool = True
    hidden_size: int = 0
    intermediate_size: int = 0
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 0
    context_length: int = 512
    qkv_bias: bool | None = None
    bias_values: tuple[float, float, float] | None = None
    rope_freq_base: float = 10000.0
    rope_dim: int = 0
    rope_scaling: str | None = None
    rope_factor: float = 2.0
    rope_freqs: bool = False
    vocab: str = "bpe"
    vocab_only: bool = False
    pre: str | None = "smollm"
    chat_template: str | None = CHATML
    extra_control: tuple[str, ...] = ()
    num_padding: int = 0
    padding_listed: bool = True
    next_token: Mapping[int, int] = field(default_factory=dict)
    next_default: int | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, Floats] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse what cannot be written."""
        if self.arch not in ARCHS:
            raise ValueError(f"arch: expected one of {ARCHS}, found {self.arch!r}")
        named = (self.dtype, self.embedding_dtype or "f32", self.head_dtype or "f32", *self.dtypes.values())
        for dtype in named:
            if dtype not in DTYPES:
                raise ValueError(f"dtype: expected one of {DTYPES}, found {dtype!r}")
        if self.is_scripted and self.tied:
            raise ValueError("next_token needs tied=False: the head is not the embedding")

    @property
    def is_scripted(self) -> bool:
        """Whether the weights spell out next_token."""
        return bool(self.next_token) or self.next_default is not None

    @property
    def tokens(self) -> TinyVocab:
        """The vocabulary, padding rows included."""
        return make_vocab(self.extra_control, self.num_padding)

    @property
    def width(self) -> int:
        """hidden_size with its default filled in."""
        return self.hidden_size or max(64, *(block_elems(dtype) for dtype in self._dtypes()))

    @property
    def key_length(self) -> int:
        """head_dim with its default filled in."""
        return self.head_dim or self.width // self.num_heads

    def dtype_of(self, name: str) -> str:
        """Return the type of a matrix, by its name in the file."""
        for end, dtype in self.dtypes.items():
            if name.endswith(end):
                return dtype
        # A head that is shaped row by row needs a type that can be written.
        can_be_any = not self.is_scripted and self.num_padding == 0
        usual = self.dtype if can_be_any or self.dtype in FLOAT_TYPES else "f16"
        if name == "token_embd.weight":
            return self.embedding_dtype or usual
        if name == "output.weight":
            return self.head_dtype or self.embedding_dtype or usual
        return self.dtype

    def _dtypes(self) -> list[str]:
        return [self.dtype, self.embedding_dtype or "f32", self.head_dtype or "f32", *self.dtypes.values()]


def make_tiny_gguf(path: str | Path, **options: Any) -> TinyModel:
    """Write a model to `path`; `options` are fields of TinyModel. Returns what was written."""
    model = TinyModel(**options)
    writer = GGUFWriter(path, model.arch)
    for key, value in (_metadata(model) | dict(model.metadata)).items():
        if value is not None:
            _add_value(writer, key, value)
    for name, (array, dtype) in ({} if model.vocab_only else _tensors(model)).items():
        writer.add_tensor(name, array, raw_dtype=qtype(dtype))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _add_value(writer: GGUFWriter, key: str, value: Any) -> None:
    """Write int as u32 (negative: i32), float as f32, bool, str, and lists as arrays of i32, f32 or strings."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        (writer.add_uint32 if value >= 0 else writer.add_int32)(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, list(value))


def _metadata(model: TinyModel) -> dict[str, Any]:
    arch = model.arch
    if model.vocab_only:
        return {"general.name": "tiny vocabulary"} | _tokenizer_metadata(model)
    keys: dict[str, Any] = {
        "general.name": f"tiny {arch} {model.dtype}",
        "general.quantization_version": 2,
        f"{arch}.block_count": model.num_layers,
        f"{arch}.context_length": model.context_length,
        f"{arch}.embedding_length": model.width,
        f"{arch}.feed_forward_length": _intermediate_size(model),
        f"{arch}.attention.head_count": model.num_heads,
        f"{arch}.attention.head_count_kv": model.num_kv_heads,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{arch}.rope.freq_base": model.rope_freq_base,
        f"{arch}.vocab_size": len(model.tokens.tokens),
    }
    if model.head_dim:
        keys[f"{arch}.attention.key_length"] = model.head_dim
        keys[f"{arch}.attention.value_length"] = model.head_dim
    if model.rope_dim:
        keys[f"{arch}.rope.dimension_count"] = model.rope_dim
    if model.rope_scaling is not None:
        keys[f"{arch}.rope.scaling.type"] = model.rope_scaling
        keys[f"{arch}.rope.scaling.factor"] = model.rope_factor
        keys[f"{arch}.rope.scaling.original_context_length"] = model.context_length // 2
    return keys | _tokenizer_metadata(model)


def _tokenizer_metadata(model: TinyModel) -> dict[str, Any]:
    if model.vocab == "none":
        return {"tokenizer.ggml.model": "no_vocab"}
    vocab = model.tokens
    listed = len(vocab.tokens) - (0 if model.padding_listed else model.num_padding)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": model.pre,
        "tokenizer.ggml.tokens": vocab.tokens[:listed],
        "tokenizer.ggml.token_type": vocab.types[:listed],
        "tokenizer.ggml.merges": vocab.merges,
        "tokenizer.ggml.bos_token_id": vocab.id_of("<|im_start|>"),
        "tokenizer.ggml.eos_token_id": vocab.id_of("<|im_end|>"),
        "tokenizer.ggml.unknown_token_id": vocab.id_of("<|endoftext|>"),
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": model.chat_template,
    }


def _intermediate_size(model: TinyModel) -> int:
    return model.intermediate_size or (model.width if model.width >= 256 else 2 * model.width)


def _tensors(model: TinyModel) -> dict[str, tuple[npt.NDArray[np.generic], str]]:
    """Return every tensor in file order: the stored array and its type."""
    rng = np.random.default_rng(model.seed)
    out: dict[str, tuple[npt.NDArray[np.generic], str]] = {}
    width, num_rows = model.width, len(model.tokens.tokens)
    q_rows, kv_rows = model.num_heads * model.key_length, model.num_kv_heads * model.key_length
    has_bias = model.arch == "qwen2" if model.qkv_bias is None else model.qkv_bias

    def vector(name: str, values: npt.NDArray[np.floating[Any]]) -> None:
        out[name] = (encode(values.astype(np.float32), "f32"), "f32")

    def norm(name: str, size: int) -> None:
        vector(name, 1 + 0.1 * rng.standard_normal(size))

    def matrix(name: str, rows: int, cols: int) -> None:
        dtype, std = model.dtype_of(name), cols**-0.5
        num_zero = 0
        if name.endswith(("attn_output.weight", "ffn_down.weight")):
            # The layers of a script add nothing; those of a padded model leave element 0 alone.
            num_zero = rows if model.is_scripted else min(model.num_padding, 1)
        if dtype in FLOAT_TYPES:
            values = (std * rng.standard_normal((rows, cols))).astype(np.float32)
            values[:num_zero] = 0
            out[name] = (encode(values, dtype), dtype)
        else:
            blocks = random_blocks(rng, rows, cols, std, dtype)
            blocks[:num_zero] = 0  # a block of zero bytes holds zeros, in every type
            out[name] = (blocks, dtype)

    _add_embedding_and_head(model, rng, num_rows, out)
    norm("output_norm.weight", width)
    if model.is_scripted:
        vector("output_norm.weight", np.ones(width))
    if model.rope_freqs:
        vector("rope_freqs.weight", np.linspace(1, 8, (model.rope_dim or model.key_length) // 2))
    for layer in range(model.num_layers):
        blk = f"blk.{layer}."
        norm(blk + "attn_norm.weight", width)
        for i, (name, rows) in enumerate((("attn_q", q_rows), ("attn_k", kv_rows), ("attn_v", kv_rows))):
            matrix(f"{blk}{name}.weight", rows, width)
            if model.bias_values is not None:
                vector(f"{blk}{name}.bias", np.full(rows, model.bias_values[i]))
            elif has_bias:
                vector(f"{blk}{name}.bias", 0.5 * rng.standard_normal(rows))
        if model.arch == "qwen3":
            norm(blk + "attn_q_norm.weight", model.key_length)
            norm(blk + "attn_k_norm.weight", model.key_length)
        matrix(blk + "attn_output.weight", width, q_rows)
        norm(blk + "ffn_norm.weight", width)
        matrix(blk + "ffn_gate.weight", _intermediate_size(model), width)
        matrix(blk + "ffn_up.weight", _intermediate_size(model), width)
        matrix(blk + "ffn_down.weight", width, _intermediate_size(model))
    for name, values in model.tensors.items():
        vector(name, values)
    return out


def _add_embedding_and_head(
    model: TinyModel,
    rng: np.random.Generator,
    num_rows: int,
    out: dict[str, tuple[npt.NDArray[np.generic], str]],
) -> None:
    """Add token_embd.weight and, unless tied, output.weight, shaped where the model asks for it."""
    width = model.width
    std = 3 * width**-0.5  # logits of deviation 3: some tokens are clearly likelier than others
    names = ["token_embd.weight"] if model.tied else ["token_embd.weight", "output.weight"]
    embedding: Floats | None = None
    for name in names:
        dtype = model.dtype_of(name)
        if dtype in RANDOM_TYPES:
            out[name] = (random_blocks(rng, num_rows, width, std, dtype), dtype)
            continue
        values = (std * rng.standard_normal((num_rows, width))).astype(np.float32)
        if model.is_scripted:
            if name == "token_embd.weight":
                values = rng.choice(np.array([-1, 1], np.float32), (num_rows, width))
                values[:, 0] = 1
                embedding = values
            elif embedding is not None:
                values = _scripted_head(model, embedding)
        if model.num_padding:
            _shape_padding(model, name, values)
        out[name] = (encode(values, dtype), dtype)


def _shape_padding(model: TinyModel, name: str, values: Floats) -> None:
    """Give the padding rows the highest logits in every context.

    Element 0 of the residual stream stays positive, since the layers leave it alone, and the padding rows of the head
    have more of it than any other row.
    """
    is_head = model.tied or name == "output.weight"
    if name == "token_embd.weight" and not model.is_scripted:
        values[:, 0] = _CONSTANT
    if is_head:
        if not model.tied and not model.is_scripted:
            values[:, 0] = 0
        values[-model.num_padding :] = 0
        values[-model.num_padding :, 0] = 10 * model.width**0.5 if model.is_scripted else 10 * _CONSTANT


def _scripted_head(model: TinyModel, embedding: Floats) -> Floats:
    """Return head rows that pick next_token[k] after token k.

    Embeddings are random signs, nearly orthogonal; with layers that add nothing, the head sees the last token's
    alone. Element 0 is 1 in all of them: it carries next_default.
    """
    head = np.zeros_like(embedding)
    for token, following in model.next_token.items():
        head[following, 1:] += embedding[token, 1:]
    if model.next_default is not None:
        head[model.next_default, 0] += model.width / 2
    logits = embedding @ head.T
    for token in range(len(embedding)):
        wanted = model.next_token.get(token, model.next_default)
        if wanted is not None and int(logits[token].argmax()) != wanted:
            raise ValueError(f"next_token: token {token} is not told apart; try another seed or a larger hidden_size")
    return head


def main() -> None:
    """Parse the command line and write one file."""
    parser = argparse.ArgumentParser(description="Write a small seeded GGUF model.")
    parser.add_argument("path", type=Path)
    parser.add_argument("--arch", choices=ARCHS, default="llama")
    parser.add_argument("--dtype", choices=DTYPES, default="q4_1")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--untied", action="store_true", help="write a head of its own")
    names = ", ".join(f.name for f in fields(TinyModel))
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help=f"FIELD: {names}")
    args = parser.parse_args()
    options: dict[str, Any] = {}
    for assignment in args.set:
        name, _, text = assignment.partition("=")
        try:
            options[name] = ast.literal_eval(text)
        except (SyntaxError, ValueError):
            options[name] = text
    base = {"arch": args.arch, "dtype": args.dtype, "seed": args.seed, "tied": not args.untied}
    try:
        make_tiny_gguf(args.path, **(base | options))
    except (TypeError, ValueError) as error:
        parser.error(str(error))
    print(args.path)


if __name__ == "__main__":
    main()
