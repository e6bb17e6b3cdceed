"""Write cuda_src/src/tokenizer/unicode_tables.cc from the Unicode character database.

Needs `unicodedataplus==16.0.0.post1` (the standard library's `unicodedata` is as old as the
interpreter, and knows no ages). Categories are those of Unicode 16.0. Normalization data stop at
Unicode 9.0: the reference tokenizers normalize with tables of that version, so younger characters
neither decompose nor reorder there.

    python tests/tools/make_unicode_tables.py [--check]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import unicodedataplus as ucd

TARGET = Path(__file__).resolve().parents[2] / "cuda_src/src/tokenizer/unicode_tables.cc"
NORMALIZATION_VERSION = (9, 0)
# Falcon's tokenizer calls punctuation what Unicode 8.0 did. Two of these are symbols now.
FALCON_VERSION = (8, 0)
FALCON_ONLY = (0x166D, 0x111C9)
FALCON_PUNCTUATION = 0x80  # set beside the category
CATEGORIES = ("Cn Cc Cf Co Cs Ll Lm Lo Lt Lu Mc Me Mn Nd Nl No Pc Pd Pe Pf Pi Po Ps Sc Sk Sm So Zl Zp Zs").split()

HEADER = """\
// Written by tests/tools/make_unicode_tables.py from the Unicode character database; do not edit.
// Categories: Unicode {unicode}. Normalization: Unicode {normalization}.
#include "tokenizer/unicode_tables.h"

namespace xllm {{

// clang-format off
"""


def ranges(values: list[int]) -> list[tuple[int, int]]:
    """First code point and value of every run of equal values."""
    starts = [c for c in range(len(values)) if c == 0 or values[c] != values[c - 1]]
    return [(c, values[c]) for c in starts]


def is_known(char: str, version: tuple[int, int]) -> bool:
    """Whether this version of Unicode had the character."""
    age = ucd.age(char)
    return age[0].isdigit() and tuple(map(int, age.split("."))) <= version


def decompositions() -> list[int]:
    """Canonical mappings as composes << 63 | char << 42 | first << 21 | second; second may be 0."""
    entries = []
    for code in range(0x110000):
        char = chr(code)
        mapping = ucd.decomposition(char)
        if not mapping or mapping.startswith("<") or not is_known(char, NORMALIZATION_VERSION):
            continue
        parts = [int(part, 16) for part in mapping.split()]
        first, second = parts[0], parts[1] if len(parts) == 2 else 0
        pair = chr(first) + chr(second)
        composes = second != 0 and ucd.normalize("NFC", pair) == char
        entries.append(composes << 63 | code << 42 | first << 21 | second)
    return entries


def table(c_type: str, name: str, items: list[str]) -> str:
    """One C++ array and its size, at most 100 columns wide."""
    lines, line = [], ""
    for item in items:
        if len(line) + len(item) + 1 > 100:
            lines.append(line)
            line = ""
        line += item + ","
    lines.append(line)
    body = "\n".join(lines)
    return f"const {c_type} {name}[] = {{\n{body}\n}};\nconst size_t {name}Size = {len(items)};\n\n"


def render() -> str:
    """The whole source file."""
    chars = [chr(code) for code in range(0x110000)]
    category = [CATEGORIES.index(ucd.category(char)) for char in chars]
    for code, char in enumerate(chars):
        is_falcon = ucd.category(char)[0] == "P" and is_known(char, FALCON_VERSION)
        if is_falcon or code in FALCON_ONLY:
            category[code] |= FALCON_PUNCTUATION
    combining = [ucd.combining(char) if is_known(char, NORMALIZATION_VERSION) else 0 for char in chars]
    text = HEADER.format(unicode=ucd.unidata_version, normalization=".".join(map(str, NORMALIZATION_VERSION)))
    text += table("uint32_t", "kCategoryRanges", [hex(c << 8 | v) for c, v in ranges(category)])
    text += table("uint32_t", "kCombiningRanges", [hex(c << 8 | v) for c, v in ranges(combining)])
    text += table("uint64_t", "kDecompositions", [hex(entry) for entry in decompositions()])
    return text + "// clang-format on\n\n}  // namespace xllm\n"


def main() -> int:
    """Write the file, or with --check only compare."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--check", action="store_true", help="exit 1 if the file is out of date")
    args = parser.parse_args()
    text = render()
    if args.check:
        return 0 if TARGET.read_text() == text else 1
    TARGET.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
