"""What a model file says of itself, through Python."""

import os
import pathlib

import pytest

from cyengine import Engine, EngineConfig, Model, TextPiece, errors
from cyengine.types import Backend
from tests.tools.make_tiny_gguf import make_tiny_gguf


@pytest.fixture
def model(tiny_model: pathlib.Path) -> Model:
    return Model(tiny_model)


def test_text_survives_encoding_and_decoding(model: Model) -> None:
    for text in ["", "hello world", "  two  spaces ", "é\u0000\n\r\t🙂", "<|im_start|>"]:
        assert model.decode(model.encode(text, add_special=False), render_special=True) == text


def test_control_tokens_come_from_trusted_text_alone(model: Model) -> None:
    (special,) = model.encode("<|im_start|>", add_special=False, parse_special=True)
    assert special not in model.encode("<|im_start|>", add_special=False)
    pieces = [TextPiece("<|im_start|>", trusted=True), TextPiece("<|im_start|>")]
    ids = model.encode(pieces, add_special=False)
    assert ids[0] == special
    assert special not in ids[1:]
    assert model.token_piece(special) == (b"<|im_start|>", 3)


def test_invalid_utf8_is_refused_with_its_place(model: Model) -> None:
    with pytest.raises(errors.InvalidArgumentError, match="3"):
        model.encode(b"abc\xff")
    with pytest.raises(errors.InvalidArgumentError):
        model.encode("lone \ud800 surrogate")


def test_ids_outside_the_vocabulary_are_refused(model: Model) -> None:
    rows = model.info.vocab_size
    for bad in (-1, rows, 2**31, 2**70):
        with pytest.raises(errors.InvalidArgumentError):
            model.decode([0, bad])
    for bad in (-1, rows, 2**40):
        with pytest.raises(errors.InvalidArgumentError):
            model.token_piece(bad)


def test_lists_show_the_file(model: Model) -> None:
    assert {"general.architecture", "tokenizer.ggml.tokens"} <= {entry.key for entry in model.metadata()}
    tensors = {tensor.name: tensor for tensor in model.tensors()}
    assert tensors["blk.0.attn_q.weight"].dtype == "q4_1"
    assert sum(tensor.size_bytes for tensor in tensors.values()) < model.info.file_bytes
    assert all(fact.source for fact in model.facts())
    assert "<|im_end|>" in {token.text for token in model.end_tokens()}


def test_a_plan_loads_nothing_and_does_not_grow_with_the_context(model: Model) -> None:
    small = model.plan(EngineConfig(backend=Backend.CPU, max_seq_len=64, kv_memory=1 << 20))
    large = model.plan(
        EngineConfig(backend=Backend.CPU, max_seq_len=1 << 17, kv_memory=1 << 20, allow_long_context=True)
    )
    assert small.fits
    assert small.kv_pool_bytes == large.kv_pool_bytes <= 1 << 20
    assert small.scratch_bytes == large.scratch_bytes
    assert small.table_bytes == large.table_bytes


def test_a_vocabulary_file_opens_without_weights(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "vocab.gguf"
    make_tiny_gguf(path, vocab_only=True)
    with Model(path) as model:
        assert not model.info.has_weights
        assert model.decode(model.encode("words")) == "words"
        with pytest.raises(errors.ModelUnsupportedError):
            model.plan()


def test_a_file_without_tokenizer_still_takes_ids(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "no_vocab.gguf"
    make_tiny_gguf(path, vocab="none")
    with Model(path) as model:
        assert not model.info.has_tokenizer
        with pytest.raises(errors.NoTokenizerError):
            model.encode("words")


def test_a_file_that_has_become_shorter_is_refused_before_its_weights_are_read(
    tiny_model: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(tiny_model.read_bytes())
    with Model(path) as model:
        os.truncate(path, path.stat().st_size - 4096)
        with pytest.raises(errors.ModelTruncatedError, match=r"cut\.gguf"):
            Engine(model, EngineConfig(backend=Backend.CPU, num_threads=1))
    path.write_bytes(tiny_model.read_bytes())
    with Model(path) as model:
        path.rename(tmp_path / "elsewhere.gguf")  # the file that was opened is still whole
        path.write_bytes(b"short")
        Engine(model, EngineConfig(backend=Backend.CPU, num_threads=1)).close()
