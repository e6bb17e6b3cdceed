"""Which type llama-quantize gives each matrix of a dense llama-like model.

The rules are those of its default command line (no importance matrix, no overrides), for the mixes below and the
architectures of bench/synthesize/shapes.py. They are facts about the files that people run, restated here.
"""

from __future__ import annotations

from dataclasses import dataclass

from bench.synthesize.dtypes import DTYPES


@dataclass(frozen=True)
class Mix:
    """A row of llama-quantize's menu.

    Attributes:
        name: As its command line spells it, in lower case.
        file_type: general.file_type.
        base: Type of every matrix without a rule.
        more: Type of attn_v and ffn_down in the layers that get more bits; None: no such layers.
    """

    name: str
    file_type: int
    base: str
    more: str | None = None


MIXES = {
    mix.name: mix
    for mix in (
        Mix("q4_k_m", 15, "q4_k", "q6_k"),
        Mix("q5_k_m", 17, "q5_k", "q6_k"),
        Mix("q6_k", 18, "q6_k"),
        Mix("q8_0", 7, "q8_0"),
    )
}

#: For rows that are not whole blocks of 256.
_FALLBACK = {"q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0"}


def gets_more_bits(layer: int, num_layers: int) -> bool:
    """Whether a layer is in the first or last eighth, or every third one between."""
    first_eighth = num_layers // 8
    return layer < first_eighth or layer >= 7 * num_layers // 8 or (layer - first_eighth) % 3 == 2


def matrix_dtype(mix: Mix, name: str, cols: int, num_layers: int, is_tied: bool) -> str:
    """Return the type of a matrix.

    Args:
        mix: The row of the menu.
        name: Of the tensor, as in the file: "blk.3.attn_v.weight".
        cols: Length of a row.
        num_layers: Of the model.
        is_tied: Whether the embedding is the head too; it is then typed as a head.
    """
    base_fits = cols % DTYPES[mix.base].block_elems == 0
    if name == "output.weight" or (is_tied and name == "token_embd.weight"):
        return "q6_k" if base_fits and mix.base != "q8_0" else "q8_0"
    dtype = mix.base
    if mix.more is not None and name.endswith((".attn_v.weight", ".ffn_down.weight")):
        layer = int(name.split(".")[1])
        if gets_more_bits(layer, num_layers):
            dtype = mix.more
    if cols % DTYPES[dtype].block_elems:
        dtype = _FALLBACK.get(dtype, "f16")
    return "f16" if cols % DTYPES[dtype].block_elems else dtype
