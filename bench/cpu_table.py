"""The whole CPU comparison in one go: every file and cell beside what was asked of it.

    python -m bench.cpu_table --models FOLDER [--demo SMOLLM2.gguf] [--library LIBLLAMA] [--pairs 11]

Wants a machine that does nothing else; about fifteen minutes on two cores. FOLDER holds, or is given, the synthesised
models. Each file is measured by bench.bench_cpu_peer in a process of its own, which writes
bench/results/cpu_peer_NAME.json; then the time to the first token of nine is measured at five caps, and everything is
printed as one table: the median of the ratios, their quartiles, and whether the cell passes (of decode cells the lower
quartile must pass as well); the share of the read bandwidth that one sequence's decode reaches, and what eight do of
the file's own rate of prefill, where that is asked for.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import machine
from bench.bench_cpu_peer import PREFILL
from cyengine import Engine, EngineConfig, Request, TokenEvent
from cyengine.types import Backend

RESULTS = Path(__file__).parent / "results"
CAPS = (512, 2048, 8192, 32_768, 131_072)
TTFT_REPEATS = 15


@dataclass(frozen=True)
class Job:
    """One run of bench.bench_cpu_peer.

    Attributes:
        name: Of the result file.
        synthesized: Shape and mix; None: the demo model.
        asked: The ratio that each cell should reach.
        share: Of the read bandwidth that decode bs 1 should reach, and of its own rate of prefill that bs 8 should.
        options: For bench.bench_cpu_peer.
    """

    name: str
    synthesized: tuple[str, str] | None
    asked: dict[str, float]
    options: tuple[str, ...] = ()
    share: float | None = None


SMALL = {"decode bs 1": 1.15, "decode bs 4": 1.8, "decode bs 8": 2.0, "prefill 512": 2.0}
LARGE = SMALL | {"decode bs 8": 4.0}
OTHER = {"decode bs 1": 1.05, "decode bs 4": 1.5, "decode bs 8": 1.8, "prefill 512": 1.5}
FEW = ("--steps", "8", "--prefill-pairs", "5")

JOBS = (
    Job("smollm2_q4_1", None, SMALL),
    Job("qwen2.5_0.5b_q4_k_m", ("qwen2.5-0.5b", "q4_k_m"), SMALL, ("--steps", "16")),
    Job("qwen2.5_1.5b_q4_k_m", ("qwen2.5-1.5b", "q4_k_m"), LARGE, ("--steps", "8"), share=0.8),
    Job(
        "qwen2.5_1.5b_q4_k_m_depth_2048",
        ("qwen2.5-1.5b", "q4_k_m"),
        {"decode bs 1": 1.5},
        ("--steps", "8", "--depth", "2048", "--batch", "1", "--no-prefill"),
    ),
    Job("qwen2.5_1.5b_q8_0", ("qwen2.5-1.5b", "q8_0"), OTHER, FEW),
    Job("qwen2.5_1.5b_q6_k", ("qwen2.5-1.5b", "q6_k"), OTHER, FEW),
)


def model_of(job: Job, folder: Path, demo: Path | None) -> Path:
    """Return the job's file, made where it is missing."""
    if job.synthesized is None:
        if demo is not None:
            return demo
        pull = [sys.executable, "-m", "xllm_service", "pull", "smollm2-135m"]
        done = subprocess.run(pull, stdout=subprocess.PIPE, text=True, check=True)
        return Path(done.stdout.strip().splitlines()[-1])
    shape, mix = job.synthesized
    path = folder / f"{shape}-{mix}.gguf"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run([sys.executable, "-m", "bench.synthesize", shape, mix, str(path)], check=True)
    return path


def times_to_first_token(model: Path, threads: int) -> dict[int, float]:
    """Return the median time to the first token of a nine-token prompt by cap, in ms; caps take turns."""
    engines = {}
    for cap in CAPS:
        config = EngineConfig(
            backend=Backend.CPU, num_threads=threads, max_slots=1, max_seq_len=cap, allow_long_context=True
        )
        engines[cap] = Engine(model, config)
    times: dict[int, list[float]] = {cap: [] for cap in CAPS}
    for repeat in range(TTFT_REPEATS + 1):
        # Another one begins each time: what comes before an engine's turn costs it something.
        for cap in CAPS[repeat % len(CAPS) :] + CAPS[: repeat % len(CAPS)]:
            engine = engines[cap]
            prompt = [300 + 11 * repeat + i for i in range(9)]  # the prefix cache knows none of them
            started = time.monotonic()
            for event in engine.stream(Request(prompt=prompt, max_tokens=1, ignore_eos=True)):
                if isinstance(event, TokenEvent):
                    times[cap].append(time.monotonic() - started)
    for engine in engines.values():
        engine.close()
    return {cap: 1000 * statistics.median(found[1:]) for cap, found in times.items()}


def row_of(job: Job, cell: dict[str, Any]) -> str:
    """One line of the table."""
    asked, (low, high) = job.asked[cell["cell"]], cell["ratio_quartiles"]
    counts = (cell["ratio"], low) if cell["cell"].startswith("decode") else (cell["ratio"],)
    verdict = "pass" if min(counts) >= asked else "**short**"
    return (
        f"| {job.name} | {cell['cell']} | {asked:.2f} | {cell['ratio']:.2f} ({low:.2f} to {high:.2f}) | "
        f"{cell['pairs']} | {cell['tokens_per_s']:.1f} | {cell['peer_tokens_per_s']:.1f} | {verdict} |"
    )


def shares_of(job: Job, document: dict[str, Any]) -> list[str]:
    """Lines of the table for what is no ratio to the peer."""
    cells = {cell["cell"]: cell for cell in document["rows"]}
    found: dict[str, float] = {}
    one, eight, prefill = (cells.get(name, {}) for name in ("decode bs 1", "decode bs 8", f"prefill {PREFILL}"))
    if "read_share" in one:
        found[f"bs 1 / read bandwidth of {document['read_bandwidth'] / 1e9:.1f} GB/s"] = one["read_share"]
    if job.share is not None and eight and prefill:
        found["bs 8 / own prefill"] = eight["tokens_per_s"] / prefill["tokens_per_s"]
    lines = []
    for name, share in found.items():
        verdict = "" if job.share is None else "pass" if share >= job.share else "**short**"
        lines.append(f"| {job.name} | {name} | {job.share or ''} | {share:.2f} | | | | {verdict} |")
    return lines


def main() -> None:
    """Measure everything and print the table."""
    parser = argparse.ArgumentParser(description="Measure the CPU backend beside llama.cpp on every file.")
    parser.add_argument("--models", type=Path, required=True, help="folder of the synthesised models")
    parser.add_argument("--demo", type=Path, default=None, help="default: what `xllm pull smollm2-135m` finds")
    parser.add_argument("--library", type=Path, default=None, help="a libllama; default: that of xllamacpp")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=11)
    parser.add_argument("--cpu-time", action="store_true", help="see bench.bench_cpu_peer")
    parser.add_argument("--only", default="", help="jobs whose name holds this")
    args = parser.parse_args()

    jobs = [job for job in JOBS if args.only in job.name]
    models = {job.name: model_of(job, args.models, args.demo) for job in jobs}
    lines = []
    started = time.monotonic()
    for job in jobs:
        out = RESULTS / f"cpu_peer_{job.name}.json"
        command = [sys.executable, "-m", "bench.bench_cpu_peer", str(models[job.name])]
        command += ["--threads", str(args.threads), "--pairs", str(args.pairs), "--json", str(out), *job.options]
        command += ["--library", str(args.library)] if args.library is not None else []
        command += ["--cpu-time"] if args.cpu_time else []
        print(f"== {job.name}, after {time.monotonic() - started:.0f} s", flush=True)
        if subprocess.run(command, check=False).returncode != 0:
            lines.append(f"| {job.name} | failed | | | | | | **short** |")
            continue
        document = json.loads(out.read_text())
        lines += [row_of(job, cell) for cell in document["rows"]] + shares_of(job, document)

    times = times_to_first_token(models[jobs[0].name], args.threads)
    document = {"machine": machine.describe(), "model": models[jobs[0].name].name, "ttft_ms_by_cap": times}
    (RESULTS / "cpu_ttft.json").write_text(json.dumps(document, indent=1) + "\n")
    print("\n| file | cell | asked | reached (quartiles) | pairs | xLLM t/s | llama.cpp t/s | |")
    print("|---|---|---|---|---|---|---|---|")
    print("\n".join(lines))
    middle = statistics.median(times.values())
    spread = max(abs(t / middle - 1) for t in times.values())
    shown = ", ".join(f"{cap}: {t:.2f}" for cap, t in times.items())
    print(f"\nTTFT of nine tokens by cap, ms: {shown}; at most {100 * spread:.1f} % from their median")


if __name__ == "__main__":
    main()
