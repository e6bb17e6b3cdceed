"""A byte-level BPE vocabulary of about 320 tokens: every byte, some merges, a few special tokens."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class TokenType(IntEnum):
    """Values of tokenizer.ggml.token_type."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


#: Ids 0, 1 and 2 of every vocabulary made here.
CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
USER_DEFINED_TOKEN = "<tool_call>"

#: Best first; each half is a byte or the result of an earlier merge. Ġ stands for a space, Ċ for a newline.
MERGES = tuple(
    """Ġ t,h e,i n,Ġ a,r e,o n,Ġt he,e r,Ġ s,a t,Ġ w,Ġ o,e n,Ġ c,i t,i s,a n,o r,e s,Ġ b,e d,Ġ f,in g,Ġ p,o u,Ġa n,
    a l,a r,Ġt o,Ġ m,Ġo f,Ġ in,Ġ d,Ġ h,Ġan d,i c,a s,l e,i on,o m,l l,en t,Ġ n,Ġ l,s t,Ġ re,v e,r o,l y,Ġb e,Ġ T,ĠT he,
    e l,h el,l o,hel lo,or l,w orl,worl d,Ċ Ċ""".replace("\n    ", "").split(",")
)

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' "
    "+ '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def byte_alphabet() -> list[str]:
    """Return GPT-2's character for each byte: itself where it prints, else the next free one from U+0100 on."""
    prints = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in prints]
    return [chr(byte) if byte in prints else chr(0x100 + others.index(byte)) for byte in range(256)]


@dataclass(frozen=True)
class TinyVocab:
    """The tables of a `gpt2` tokenizer.

    Attributes:
        tokens: Text of each token, in the byte alphabet.
        types: TokenType of each token.
        merges: "left right", best first.
    """

    tokens: list[str]
    types: list[int]
    merges: list[str]

    def id_of(self, token: str) -> int:
        """Return the id of a token, written in the byte alphabet."""
        return self.tokens.index(token)


def make_vocab(extra_control: tuple[str, ...] = (), num_padding: int = 0) -> TinyVocab:
    """Build the vocabulary.

    Order: CONTROL_TOKENS, the 256 bytes by value, merges, the USER_DEFINED token, `extra_control`, then
    `num_padding` tokens [PAD0], [PAD1], ... of type UNUSED.
    """
    words = byte_alphabet() + [merge.replace(" ", "") for merge in MERGES]
    padding = [f"[PAD{i}]" for i in range(num_padding)]
    parts = [
        (list(CONTROL_TOKENS), TokenType.CONTROL),
        (words, TokenType.NORMAL),
        ([USER_DEFINED_TOKEN], TokenType.USER_DEFINED),
        (list(extra_control), TokenType.CONTROL),
        (padding, TokenType.UNUSED),
    ]
    tokens = [token for names, _ in parts for token in names]
    types = [int(kind) for names, kind in parts for _ in names]
    return TinyVocab(tokens, types, list(MERGES))
