"""Field cases of text and tokens: pre-tokenizers, whole words, added tokens, decoding (numbers 2 to 7)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from cyengine import Engine, EngineConfig, Model, TokenEvent, errors
from cyengine.types import Backend, FinishedEvent
from tests.cases.make_slices import ADDED, NAMES, SPACES, WORDS
from tests.cases.slices import FOLDER, Slice, open_slice
from tests.differential.vocabulary import BYTE, CONTROL, NORMAL, UNKNOWN, USER_DEFINED, Vocabulary
from tests.tools.make_tiny_gguf import make_tiny_gguf
from tests.tools.tiny_vocab import byte_alphabet

OpenSlice = Callable[..., Slice]


@pytest.fixture(scope="module")
def slices(tmp_path_factory: pytest.TempPathFactory) -> OpenSlice:
    folder = tmp_path_factory.mktemp("slices")
    opened: dict[tuple[str, str | None], Slice] = {}

    def get(name: str, pre: str | None = None) -> Slice:
        if (name, pre) not in opened:
            opened[name, pre] = open_slice(name, folder, pre)
        return opened[name, pre]

    return get


# ---- 2: the pre-tokenizer's name is missing, `default` or an alias


@pytest.mark.parametrize("pre", [None, "", "default"])
def test_a_byte_level_vocabulary_without_a_pre_tokenizer_is_not_guessed(tmp_path: Path, pre: str | None) -> None:
    path = tmp_path / "model.gguf"
    make_tiny_gguf(path, pre=pre)
    with Model(path) as model:
        with pytest.raises(errors.NoTokenizerError, match=r"tokenizer\.ggml\.pre.*flag"):
            model.encode("hello")
        assert model.decode([model.info.vocab_size - 1])  # ids have their text all the same
    with Engine(path, EngineConfig(backend=Backend.CPU, num_threads=1)) as engine:
        events = list(engine.generate([5, 6, 7], max_tokens=3, ignore_eos=True))
        assert sum(isinstance(event, TokenEvent) for event in events) == 3
        with pytest.raises(errors.NoTokenizerError, match=r"tokenizer\.ggml\.pre"):
            list(engine.generate("hello", max_tokens=3))
    with Model(path, pretokenizer="smollm") as model:
        assert model.decode(model.encode("hello world")) == "hello world"
        assert [fact.source for fact in model.facts() if fact.value == "smollm"] == ["flag"]


def test_an_unknown_pre_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    make_tiny_gguf(tmp_path / "model.gguf", pre="no-such-family")
    with pytest.raises(errors.ModelUnsupportedError, match=r"tokenizer\.ggml\.pre.*no-such-family"):
        Model(tmp_path / "model.gguf")


ALIASES = {
    "qwen2": ["deepseek-r1-qwen"],
    "llama-bpe": ["llama3", "llama-v3"],
}


@pytest.mark.parametrize(("name", "alias"), [(name, alias) for name, many in ALIASES.items() for alias in many])
def test_an_alias_splits_as_the_name_does(slices: OpenSlice, name: str, alias: str) -> None:
    aliased = slices(name, alias)
    for text, ids in aliased.ids.items():
        assert aliased.encode(text) == ids, text


def write_sentencepiece(
    path: Path, add_bos: bool | None = None, extra: dict[str, bool | list[int]] | None = None
) -> Path:
    """A small SentencePiece vocabulary: bytes, letters, a few words."""
    words = ["▁", "▁▁", "▁two", "two", "▁words", "words", "▁t", "wo", "▁w", "or", "ds", "w", "ord", "▁wor"]
    letters = [chr(code) for code in range(0x21, 0x7F) if chr(code) not in words] + ["é"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words, *letters]
    types = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * (len(words) + len(letters))
    scores = [0.0] * 259 + [-float(i) for i in range(len(words) + len(letters))]
    return Vocabulary("llama", tokens, types, scores=scores, add_bos=add_bos, extra=extra or {}).write(path)


@pytest.mark.parametrize("pre", ["", "default"])
def test_sentencepiece_needs_no_pre_tokenizer(tmp_path: Path, pre: str) -> None:
    path = write_sentencepiece(tmp_path / "spm.gguf")
    with Model(path) as model:
        assert model.decode(model.encode("two words", add_special=False)) == "two words"


# ---- 3 to 5: what the models' own tokenizers say, in whole; the texts of the page by hand


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
        "Shelf 90210 holds 6045331": [2016, 490, 220, 24, 15, 17, 16, 15, 9982, 220, 21, 15, 19, 20, 18, 18, 16],
        "WE'RE here, she'D said": [12457, 94153, 1588, 11, 1340, 27705, 1053],
        "a \n\n  b\n": [64, 4710, 220, 293, 198],
        "t\r\n\r\n\tu": [83, 871, 10676],
        "wait <tool_call> now": [11489, 220, 151657, 1431],
    },
}


@pytest.mark.parametrize("name", REPORTED)
def test_ids_of_the_reported_texts(slices: OpenSlice, name: str) -> None:
    for text, ids in REPORTED[name].items():
        assert slices(name).encode(text) == ids, text


@pytest.mark.parametrize("name", NAMES)
def test_digits_contractions_blank_lines_and_words_as_the_models_own_tokenizer_has_them(
    slices: OpenSlice, name: str
) -> None:
    opened = slices(name)
    assert set(SPACES + WORDS + ADDED) <= set(opened.ids)
    for text, ids in opened.ids.items():
        assert opened.encode(text) == ids, text


def test_the_families_differ_where_the_cases_say(slices: OpenSlice) -> None:
    # note: without this, slices that had lost what tells the rules apart would prove nothing.
    qwen, gpt2 = slices("qwen2").ids, slices("gpt-2").ids
    assert qwen["we're they've I'll I'm he'd it's don't"] == gpt2["we're they've I'll I'm he'd it's don't"]
    for text in ("WE'RE THEY'VE I'LL I'M HE'D IT'S DON'T", "x\n\n\ny", "\t\tif\t(x)"):
        assert qwen[text] != gpt2[text], text


def byte_level(path: Path, pre: str, words: list[str], merges: list[str], added: dict[str, int] | None = None) -> Model:
    """A byte-level vocabulary: the bytes, words, and added tokens with their types."""
    tokens = [*byte_alphabet(), *words, *(added or {})]
    types = [NORMAL] * (256 + len(words)) + list((added or {}).values())
    return Model(Vocabulary("gpt2", tokens, types, pre=pre, merges=merges, add_bos=False).write(path))


WHOLE_WORDS = {"llama-bpe": True, "tekken": True, "qwen2": False, "gpt-2": False, "smollm": False, "starcoder": False}


@pytest.mark.parametrize("pre", WHOLE_WORDS)
def test_a_word_that_no_merge_reaches_is_found_where_the_family_looks_words_up(tmp_path: Path, pre: str) -> None:
    model = byte_level(tmp_path / "words.gguf", pre, ["ab", "abcd", "Ġabcd"], ["a b"])
    expected = ["abcd", " abcd"] if WHOLE_WORDS[pre] else ["ab", "c", "d", " ", "ab", "c", "d"]
    assert [model.token_piece(i)[0].decode() for i in model.encode("abcd abcd")] == expected
    # Part of a longer word: merges alone decide.
    assert [model.token_piece(i)[0].decode() for i in model.encode("abcde")] == ["ab", "c", "d", "e"]


CONTRACTIONS_IN_CAPITALS = {"llama-bpe": True, "qwen2": True, "gpt-2": False, "smollm": False, "starcoder": False}


@pytest.mark.parametrize("pre", CONTRACTIONS_IN_CAPITALS)
def test_contractions_match_in_capitals_where_the_family_says(tmp_path: Path, pre: str) -> None:
    endings = ["s", "t", "d", "m", "re", "ve", "ll"]
    words, merges = [], []
    for ending in endings + [ending.upper() for ending in endings]:
        if len(ending) == 2:
            words.append(ending)
            merges.append(f"{ending[0]} {ending[1]}")
        words.append("'" + ending)
        merges.append(f"' {ending}")
    model = byte_level(tmp_path / "contractions.gguf", pre, words, merges)

    def pieces(text: str) -> list[str]:
        return [model.token_piece(i)[0].decode() for i in model.encode(text)]

    for ending in endings:
        assert pieces(f"x'{ending}") == ["x", f"'{ending}"]
        capital = ending.upper()
        whole = CONTRACTIONS_IN_CAPITALS[pre]
        assert (f"'{capital}" in pieces(f"X'{capital}")) == whole, capital


# ---- 6: added tokens that are not control tokens


def test_user_defined_tokens_match_longest_first_and_control_tokens_do_not(tmp_path: Path) -> None:
    added = {"<tool": USER_DEFINED, "<tool_call>": USER_DEFINED, "<|im_start|>": CONTROL, "  ": USER_DEFINED}
    model = byte_level(tmp_path / "added.gguf", "qwen2", ["Ġx"], ["Ġ x"], added)

    def pieces(text: str, *, parse_special: bool = False) -> list[bytes]:
        return [model.token_piece(i)[0] for i in model.encode(text, parse_special=parse_special)]

    assert pieces("<tool_call>") == [b"<tool_call>"]
    assert pieces("<tool_cal") == [b"<tool", *(bytes([byte]) for byte in b"_cal")]
    assert pieces("a<tool<tool_call>b") == [b"a", b"<tool", b"<tool_call>", b"b"]
    # Before pre-tokenising: two spaces go to the added token, though the last one would start a word.
    assert pieces("   x") == [b"  ", b" x"]
    assert pieces("<|im_start|>x") == [bytes([byte]) for byte in b"<|im_start|>x"]
    assert pieces("<|im_start|>x", parse_special=True) == [b"<|im_start|>", b"x"]
    assert model.decode(model.encode("<tool_call><|im_start|>", parse_special=True)) == "<tool_call>"


def test_added_tokens_of_a_published_vocabulary(slices: OpenSlice) -> None:
    qwen = slices("qwen2")
    assert qwen.encode("wait <tool_call> now") == [11489, 220, 151657, 1431]
    assert 151644 not in qwen.encode("<|im_start|>x")
    assert qwen.encode("<|im_start|>x", parse_special=True)[0] == 151644
    assert qwen.decode(qwen.encode("<|im_start|>x", parse_special=True)) == "x"
    assert qwen.decode([151657]) == "<tool_call>"


def test_in_output_user_defined_tokens_are_text_and_control_tokens_are_not(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    options = {"tied": False, "dtype": "f32", "extra_control": ("<|note|>",), "hidden_size": 256}
    tokens = make_tiny_gguf(path, **options).tokens
    a, b, tool, note = (tokens.id_of(name) for name in ("a", "b", "<tool_call>", "<|note|>"))
    make_tiny_gguf(path, **options, next_token={a: tool, tool: note, note: b}, next_default=b)
    with Engine(path, EngineConfig(backend=Backend.CPU, num_threads=1)) as engine:
        events = list(engine.generate([a], max_tokens=3))
        generated = [event for event in events if isinstance(event, TokenEvent)]
        assert [event.token_id for event in generated] == [tool, note, b]
        assert [event.text for event in generated] == ["<tool_call>", "", "b"]
        assert engine.model.decode([tool, note, b]) == "<tool_call>b"


# ---- 7: decoding "improves" the text, or grows it


def test_decoding_adds_strips_and_tidies_nothing(slices: OpenSlice) -> None:
    text = "if ( 'ok' ) ; x != y"
    assert slices("llama-bpe").decode([333, 320, 364, 564, 6, 883, 2652, 865, 976, 379]) == text
    for name in NAMES:
        opened = slices(name)
        for text, ids in opened.ids.items():
            whole = opened.decode(ids, render_special=True)
            assert whole.encode() == text.encode() or name == "qwen2", text  # qwen2 composes characters first
            assert opened.encode(whole) == ids


@pytest.mark.parametrize("flag", [True, False])
def test_no_clean_up_flag_changes_what_is_decoded(tmp_path: Path, flag: bool) -> None:
    path = tmp_path / "model.gguf"
    keys = {"tokenizer.ggml.clean_up_tokenization_spaces": flag, "tokenizer.ggml.remove_extra_whitespaces": False}
    make_tiny_gguf(path, metadata=keys)
    with Model(path) as model:
        for text in ("if ( 'ok' ) ; x != y", " a .  b , c ! d ? n't 's ", "don 't  do n't"):
            assert model.decode(model.encode(text)) == text


@pytest.mark.parametrize(
    ("key", "value", "harmless"),
    [
        ("precompiled_charsmap", [1, 2, 3], None),
        ("normalizer.lowercase", True, False),
        ("add_sep_token", True, False),
        ("remove_extra_whitespaces", True, False),
    ],
)
def test_rules_for_text_that_are_not_followed_are_refused_by_name(
    tmp_path: Path, key: str, value: bool | list[int], harmless: bool | None
) -> None:
    with pytest.raises(errors.ModelUnsupportedError, match=f"tokenizer.ggml.{key}"):
        Model(write_sentencepiece(tmp_path / "refused.gguf", extra={key: value}))
    if harmless is not None:
        with Model(write_sentencepiece(tmp_path / "loaded.gguf", extra={key: harmless})) as model:
            assert model.decode(model.encode("two  words")) == "two  words"


def sentencepiece_models(tmp_path: Path) -> Iterator[Model]:
    for number, add_bos in enumerate((None, True, False)):
        yield Model(write_sentencepiece(tmp_path / f"spm{number}.gguf", add_bos))


def test_encoding_and_decoding_again_is_stable_on_sentencepiece(tmp_path: Path) -> None:
    for model in sentencepiece_models(tmp_path):
        for text in ("two  words", " two words ", "  ", "two\n words", "é two", "", "▁two", "\ttwo"):
            first = model.encode(text)
            ids, shown = first, text
            for _ in range(5):
                shown = model.decode(ids)
                assert shown == text.replace("▁", " ")
                ids = model.encode(shown)
                assert ids == first


def test_streamed_and_whole_decoding_agree(tmp_path: Path) -> None:
    # A character byte by byte, broken bytes, words with their spaces, a character cut short by the end.
    path = tmp_path / "model.gguf"
    options = {"tied": False, "dtype": "f32", "hidden_size": 256}
    tokens, alphabet = make_tiny_gguf(path, **options).tokens, byte_alphabet()
    raw = "🙂 Ω".encode() + b"\xff\xfe\xc3"
    script = [tokens.id_of("a"), *(tokens.id_of(alphabet[byte]) for byte in raw), tokens.id_of("Ġthe")]
    script += [tokens.id_of("hello"), tokens.id_of("Ċ"), tokens.id_of(alphabet[0xE2])]
    following = dict(pairwise(script))
    assert len(following) == len(script) - 1, "a script says one thing after each token"
    make_tiny_gguf(path, **options, next_token=following)
    with Engine(path, EngineConfig(backend=Backend.CPU, num_threads=1)) as engine:
        for count in range(1, len(script)):
            pieces, generated = [], []
            for event in engine.generate(script[:1], max_tokens=count, ignore_eos=True):
                if isinstance(event, TokenEvent):
                    generated.append(event.token_id)
                    pieces.append(event.text)
                elif isinstance(event, FinishedEvent):
                    pieces.append(event.text)
            assert generated == script[1 : count + 1]
            assert "".join(pieces) == engine.model.decode(generated)


def test_slices_are_whole(slices: OpenSlice) -> None:
    for name in NAMES:
        content = json.loads((FOLDER / f"{name}.json").read_text())
        known = {token for _, token, _ in content["tokens"]}
        assert known >= set(byte_alphabet())
        assert {merge.replace(" ", "") for merge in content["merges"]} <= known
