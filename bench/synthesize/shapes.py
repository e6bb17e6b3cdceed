"""The models whose shape is known here: dimensions, keys and tokenizer sizes of the published GGUF files."""

from __future__ import annotations

from bench.synthesize.model import ModelShape, Special, TokenizerShape

_CONTROL, _USER_DEFINED = 3, 4

_CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_LLAMA3_TURNS = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content }}"
    "<|eot_id|>{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)


def _control(*texts: str) -> tuple[Special, ...]:
    return tuple(Special(text, _CONTROL) for text in texts)


def _user_defined(*texts: str) -> tuple[Special, ...]:
    return tuple(Special(text, _USER_DEFINED) for text in texts)


_QWEN_SPECIALS = (
    *_control("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    *_control(
        *(f"<|{thing}_{side}|>" for thing in ("object_ref", "box", "quad", "vision") for side in ("start", "end"))
    ),
    *_control("<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
    *_user_defined("<tool_call>", "</tool_call>"),
    *_user_defined(
        "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"
    ),
)
_QWEN3_SPECIALS = (*_QWEN_SPECIALS, *_user_defined("<tool_response>", "</tool_response>", "<think>", "</think>"))


def _qwen_tokenizer(specials: tuple[Special, ...]) -> TokenizerShape:
    num_words = 151_643
    return TokenizerShape(
        pre="qwen2",
        num_words=num_words,
        num_merges=151_387,
        specials=specials,
        num_padding=151_936 - num_words - len(specials),
        bos="<|endoftext|>",
        eos="<|im_end|>",
        pad="<|endoftext|>",
        adds_bos=False,
        chat_template=_CHATML,
    )


def _llama3_specials() -> tuple[Special, ...]:
    named = {
        0: "<|begin_of_text|>",
        1: "<|end_of_text|>",
        6: "<|start_header_id|>",
        7: "<|end_header_id|>",
        9: "<|eot_id|>",
    }
    reserved = (f"<|reserved_special_token_{i}|>" for i in range(256))
    return _control(*(named[i] if i in named else next(reserved) for i in range(256)))


_LLAMA3_TOKENIZER = TokenizerShape(
    pre="llama-bpe",
    num_words=128_000,
    num_merges=280_147,
    specials=_llama3_specials(),
    num_padding=0,
    bos="<|begin_of_text|>",
    eos="<|eot_id|>",
    pad=None,
    adds_bos=True,
    chat_template=_LLAMA3_TURNS,
)


def _qwen2(name: str, layers: int, hidden: int, inner: int, heads: int) -> ModelShape:
    return ModelShape(
        name=name,
        arch="qwen2",
        num_layers=layers,
        hidden_size=hidden,
        intermediate_size=inner,
        num_heads=heads,
        num_kv_heads=2,
        head_dim=hidden // heads,
        context_length=32_768,
        rope_freq_base=1e6,
        rms_eps=1e-6,
        is_tied=True,
        has_qkv_bias=True,
        has_qk_norm=False,
        has_head_dim_keys=False,
        tokenizer=_qwen_tokenizer(_QWEN_SPECIALS),
    )


def _llama3(name: str, context_length: int, factor: float) -> ModelShape:
    return ModelShape(
        name=name,
        arch="llama",
        num_layers=32,
        hidden_size=4096,
        intermediate_size=14_336,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        context_length=context_length,
        rope_freq_base=5e5,
        rms_eps=1e-5,
        is_tied=False,
        has_qkv_bias=False,
        has_qk_norm=False,
        has_head_dim_keys=False,
        tokenizer=_LLAMA3_TOKENIZER,
        rope_dim=128,
        llama3_factor=factor,
    )


SHAPES = {
    shape.name: shape
    for shape in (
        _qwen2("qwen2.5-0.5b", layers=24, hidden=896, inner=4864, heads=14),
        _qwen2("qwen2.5-1.5b", layers=28, hidden=1536, inner=8960, heads=12),
        ModelShape(
            name="qwen3-8b",
            arch="qwen3",
            num_layers=36,
            hidden_size=4096,
            intermediate_size=12_288,
            num_heads=32,
            num_kv_heads=8,
            head_dim=128,
            context_length=40_960,
            rope_freq_base=1e6,
            rms_eps=1e-6,
            is_tied=False,
            has_qkv_bias=False,
            has_qk_norm=True,
            has_head_dim_keys=True,
            tokenizer=_qwen_tokenizer(_QWEN3_SPECIALS),
        ),
        _llama3("llama-3-8b", context_length=8192, factor=0.0),
        _llama3("llama-3.1-8b", context_length=131_072, factor=8.0),
    )
}
