"""What a server with the demo model holds in memory: the file once, little else, and nothing for length."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

MB = 1 << 20

# Run apart: the same process before and after it has a model.
MEASURE = """
import json, re, sys
import xllm_service.app
from cyengine import Engine, EngineConfig
from cyengine.types import Backend

def resident():
    with open("/proc/self/status") as status:
        return int(re.search(r"VmRSS:\\s+(\\d+)", status.read())[1]) << 10

before = resident()
engine = Engine(sys.argv[1], EngineConfig(backend=Backend.CPU, max_seq_len=int(sys.argv[2]), num_threads=2))
for _ in engine.generate("Once upon a time there was a river", max_tokens=64, ignore_eos=True):
    pass
print(json.dumps([resident() - before, engine.info.plan.kv_bytes_per_token * engine.info.block_size * 2]))
"""


@pytest.mark.parametrize("max_seq_len", [512, 8192])
def test_memory_is_the_file_and_little_more(demo_model: Path, max_seq_len: int) -> None:
    run = subprocess.run(
        [sys.executable, "-c", MEASURE, str(demo_model), str(max_seq_len)], capture_output=True, text=True, check=True
    )
    taken, kv = json.loads(run.stdout)
    assert re.search(r"error", run.stderr, re.I) is None
    assert taken <= demo_model.stat().st_size + 60 * MB + kv
