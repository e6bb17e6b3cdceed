"""Files that lie: each is refused before anything is allocated, one line says where, and nothing else notices.

Every damage is done to a sound model, so that it alone is what is refused. Each is opened three ways: by CreateEngine
beside a running stream, in a process that has next to no memory to spare, and by `xllm serve`.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.serving import serving
from tests.e2e.slot_calls import failure
from tests.fault.gguf_surgery import ARRAY, F32, I8, I32, STRING, U8, U16, U32, Gguf, Key, array, text, u16, u32
from tests.fault.invariants import unharmed
from xllm_client.v1 import admin_service_pb2

TRUNCATED, MALFORMED, UNSUPPORTED = {"TRUNCATED_MODEL"}, {"INVALID_MODEL"}, {"UNSUPPORTED_MODEL"}
# A size that the file cannot hold: whether it is cut or lies cannot be told.
IMPOSSIBLE = TRUNCATED | MALFORMED
PARTS = {"MODEL_NOT_FOUND"} | IMPOSSIBLE
HUGE = (2**63 - 1, 2**64 - 1)

Damage = Iterator[tuple[bytes, set[str]]]


def cut(sound: Gguf) -> Damage:
    whole = sound.to_bytes()
    yield b"", TRUNCATED
    yield b"GGUF", TRUNCATED
    metadata = len(whole) - len(sound.data)
    for size in (1, 3, 5, 8, 20, 24, 30, metadata // 2, metadata - 40, metadata + 1, len(whole) - 1):
        yield whole[:size], TRUNCATED


def counts(sound: Gguf) -> Damage:
    for count in (*HUGE, 2**40, len(sound.to_bytes())):
        sound.num_tensors = count
        yield sound.to_bytes(), IMPOSSIBLE
        sound.num_tensors = None
        sound.num_keys = count
        yield sound.to_bytes(), IMPOSSIBLE
        sound.num_keys = None


def string_lengths(sound: Gguf) -> Damage:
    for length in (*HUGE, 2**32, len(sound.to_bytes()) + 1):
        first = sound.keys[0]
        first.name_length = length
        yield sound.to_bytes(), IMPOSSIBLE
        first.name_length = None
        name = sound.key(b"general.name")
        value, name.value = name.value, text(b"x", length)
        yield sound.to_bytes(), IMPOSSIBLE
        name.value = value
        tokens = sound.key(b"tokenizer.ggml.tokens")
        value, tokens.value = tokens.value, array(STRING, [text(b"x"), text(b"y", length)])
        yield sound.to_bytes(), IMPOSSIBLE
        tokens.value = array(STRING, [text(b"x")], length)
        yield sound.to_bytes(), IMPOSSIBLE
        tokens.value = value


def products(sound: Gguf) -> Damage:
    tensor = sound.tensor(b"attn_q.weight")
    for dims in ([2**42 + 1, 2**22], [2**42 + 1, 2**22, 2**22], [2**62, 4], [2**32, 2**32], [-64, 64], [64, -1], [-1]):
        tensor.dims = dims
        yield sound.to_bytes(), IMPOSSIBLE


def dimensions(sound: Gguf) -> Damage:
    tensor = sound.tensor(b"attn_q.weight")
    tensor.dims = [64, 64, 1, 1, 1]
    yield sound.to_bytes(), MALFORMED
    tensor.dims = [64, 64]
    for number in (0, 5, 255, 2**31, 2**32 - 1):
        tensor.num_dims = number
        yield sound.to_bytes(), IMPOSSIBLE


def alignments(sound: Gguf) -> Damage:
    for alignment in (0, 3, 24, 2**31 + 8, 2**32 - 1):
        sound.set(b"general.alignment", U32, u32(alignment))
        yield sound.to_bytes(), IMPOSSIBLE
    sound.set(b"general.alignment", STRING, text(b"32"))
    yield sound.to_bytes(), MALFORMED


def twice(sound: Gguf) -> Damage:
    for key in (sound.keys[0], sound.key(b"context_length"), sound.key(b"tokenizer.ggml.tokens")):
        sound.keys.append(Key(key.name, key.type, key.value))
        yield sound.to_bytes(), MALFORMED
        sound.keys.pop()
    tensor = sound.tensors[1]
    tensor.name = sound.tensors[0].name
    yield sound.to_bytes(), MALFORMED


def beyond_the_end(sound: Gguf) -> Damage:
    last = max(sound.tensors, key=lambda tensor: tensor.offset)
    offset = last.offset
    for beyond in (offset + 32, len(sound.data), 2**40, 2**63, 2**64 - 32):
        last.offset = beyond
        yield sound.to_bytes(), IMPOSSIBLE
    last.offset = offset
    sound.data = sound.data[:-1]
    yield sound.to_bytes(), TRUNCATED


def vocabularies(sound: Gguf) -> Damage:
    num_tokens = int.from_bytes(sound.key(b"tokenizer.ggml.tokens").value[4:12], "little")
    entries = [
        (b"scores", array(U8, [b"\x00"] * num_tokens)),
        (b"scores", array(F32, [bytes(4)] * (num_tokens - 1))),
        (b"scores", array(STRING, [text(b"x")] * num_tokens)),
        (b"token_type", array(U8, [b"\x01"] * num_tokens)),
        (b"token_type", array(I8, [b"\x01"] * num_tokens)),
        (b"token_type", array(I32, [u32(1)] * (num_tokens + 1))),
        (b"token_type", array(F32, [bytes(4)] * num_tokens)),
        (b"tokens", array(I32, [u32(1)] * num_tokens)),
        (b"merges", array(I32, [u32(1)] * 8)),
    ]
    for name, value in entries:
        name = b"tokenizer.ggml." + name
        before = [Key(key.name, key.type, key.value) for key in sound.keys]
        sound.set(name, ARRAY, value)
        yield sound.to_bytes(), MALFORMED
        sound.keys = before
    sound.set(b"tokenizer.ggml.tokens", STRING, text(b"one"))
    yield sound.to_bytes(), MALFORMED


def layer_counts(sound: Gguf) -> Damage:
    key = sound.key(b"block_count")
    values = [
        (U32, u32(0)), (U32, u32(10**9)), (U32, u32(2**32 - 1)), (I32, u32(-1)), (F32, b"\x00\x00\x00\x40"),
        (STRING, text(b"2")),
    ]  # fmt: skip
    for kind, value in values:
        key.type, key.value = kind, value
        yield sound.to_bytes(), MALFORMED


def types(sound: Gguf) -> Damage:
    key = sound.key(b"general.name")
    was = key.type, key.value
    for kind in (13, 255, 2**32 - 1):
        key.type = kind
        yield sound.to_bytes(), MALFORMED | UNSUPPORTED
    key.type, key.value = ARRAY, array(77, [])
    yield sound.to_bytes(), MALFORMED | UNSUPPORTED
    key.type, key.value = was
    tensor = sound.tensor(b"attn_q.weight")
    was_type = tensor.type
    for kind in (4, 5, 99, 2**31, 2**32 - 1):
        tensor.type = kind
        yield sound.to_bytes(), MALFORMED | UNSUPPORTED
    tensor.type = was_type
    for width in (63, 33, 1):  # no whole number of blocks of 32
        tensor.dims = [width, 64]
        yield sound.to_bytes(), MALFORMED


def parts(sound: Gguf) -> Damage:
    sound.set(b"split.count", U16, u16(2))
    sound.set(b"split.tensors.count", I32, u32(2 * len(sound.tensors)))
    for number in (0, 1):  # the second part is missing, or what is opened is no first part
        sound.set(b"split.no", U16, u16(number))
        yield sound.to_bytes(), PARTS


DAMAGES = {
    "01_cut_short": cut,
    "02_counts_of_tensors_and_keys": counts,
    "03_lengths_of_strings": string_lengths,
    "04_products_of_dimensions": products,
    "05_numbers_of_dimensions": dimensions,
    "06_alignment": alignments,
    "07_names_given_twice": twice,
    "08_tensors_beyond_the_end": beyond_the_end,
    "09_vocabularies": vocabularies,
    "10_layer_counts": layer_counts,
    "11_types_and_broken_rows": types,
    "12_parts_of_split_models": parts,
}

# Opens files with next to no memory to spare: four times the file, and 16 MiB.
OPENER = """
import resource, sys
import cyengine
for path in sys.argv[1:]:
    with open("/proc/self/status") as status, open(path, "rb") as file:
        size = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmSize"))
        limit = size + 4 * len(file.read()) + (16 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    try:
        cyengine.Model(path).close()
        print("opened")
    except cyengine.errors.XllmError as error:
        print(error.status.name, error.message)
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
"""


@pytest.mark.parametrize("name", DAMAGES)
async def test_a_file_that_lies_is_refused(random_model: Path, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    files = []
    for number, (content, reasons) in enumerate(DAMAGES[name](Gguf.read(random_model))):
        is_part = reasons is PARTS
        path = folder / (f"part-0000{number + 1}-of-00002.gguf" if is_part else f"damaged-{number}.gguf")
        path.write_bytes(content)
        files.append((path, reasons))

    # Beside a stream, through a server that runs already.
    async with serving(random_model, tmp_path, model_dir=folder) as (server, client), unharmed(server, client) as seen:
        for path, reasons in files:
            seen.received_bytes += path.stat().st_size
            request = admin_service_pb2.CreateEngineRequest(name="b", source=path.name)
            refused = seen.saw(await failure(client._call(client._admin.CreateEngine, request)))
            assert refused.reason in reasons, (path.name, str(refused))
            assert str(tmp_path) not in seen.replies[-1]

    # By the core alone, which allocates nothing that a file only claims to need.
    command = [sys.executable, "-c", OPENER, *(str(path) for path, _ in files)]
    opener = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert opener.returncode == 0, opener.stderr
    lines = opener.stdout.splitlines()
    assert len(lines) == len(files), "one line each"
    assert not [line for line in lines if line.startswith(("opened", "INTERNAL"))], lines

    # At the start of a server: one line that says which key or tensor, and where.
    path, reasons = files[-1]
    command = [sys.executable, "-m", "xllm_service", "serve", str(path), "--listen", f"unix:{tmp_path}/n/x.sock"]
    started = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert started.returncode == 1
    assert "Traceback" not in started.stderr
    (line,) = [line for line in started.stderr.splitlines() if line.startswith("xllm: ")]
    assert re.search(r"byte \d+", line), line
    assert reasons is not PARTS or "part-00001-of-00002.gguf" in line, "the file that is wanted"
