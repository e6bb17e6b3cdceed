"""xLLM beside llama.cpp on the same file: tokens, logits and perplexity.

    python -m bench.compare_llama MODEL [--threads N] [--json bench/results/compare_llama.json]

Needs the packages of requirements/test.txt and requirements/peer.txt, and logits_cli (the target of that name).

Three questions, all on the CPU with f16 keys and values:

* tokens      20 fixed prompts, 32 tokens each, greedily. Where the two part, the float64 reference says how close its
              two best tokens were, and how far each engine's logits were from it. As a control, llama.cpp is compared
              with itself, with flash attention and without: what rounding alone does to tokens. The prompts are those
              whose continuations the reference is sure of (bench/prompts.py); `--open` takes others, unselected.
* logits      relative L2 error of every position of those texts against the reference.
* perplexity  of a committed text in windows of 512 tokens, of which the second half is scored.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bench import machine
from bench.core_logits import PROGRAM, CoreLogits
from bench.llama_cpp import LlamaCpp
from bench.prompts import NUM_PROMPTS, NUM_TOKENS, OPEN_PROMPTS, PROMPTS, is_chat
from cyengine import Engine, EngineConfig, TokenEvent
from tests.reference.forward import ReferenceModel
from tests.reference.forward import load as load_reference

ROOT = Path(__file__).resolve().parents[1]
TEXT = ROOT / "tests" / "data" / "text" / "alice.txt"
WINDOW = 512

Floats = npt.NDArray[np.floating[Any]]
Result = dict[str, Any]


def relative_errors(found: Floats, expected: Floats) -> Floats:
    """Return the relative L2 error of each row."""
    difference = np.linalg.norm(found.astype(np.float64) - expected, axis=1)
    return np.asarray(difference / np.linalg.norm(expected, axis=1))


def step_by_step(peer: LlamaCpp, prompt: Sequence[int], following: Sequence[int]) -> Floats:
    """Logits of prompt and following, computed as in a generation: the prompt at once, then token by token."""
    return np.concatenate([peer.logits(prompt), *(peer.extend([token]) for token in following)])


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """Return where two equally long sequences part, or None."""
    return next((i for i, pair in enumerate(zip(left, right, strict=True)) if pair[0] != pair[1]), None)


def compare_prompt(
    kind: str, text: str, engine: Engine, core: CoreLogits, peer: LlamaCpp, control: LlamaCpp, reference: ReferenceModel
) -> Result:
    """Run one prompt through both engines and hold both to the reference along xLLM's answer."""
    prompt = engine.model.encode(text, parse_special=is_chat(kind))
    peer_prompt = peer.encode(text, parse_special=is_chat(kind))
    events = engine.generate(prompt, max_tokens=NUM_TOKENS, ignore_eos=True)
    tokens = [event.token_id for event in events if isinstance(event, TokenEvent)]
    peer_tokens = peer.greedy(prompt, NUM_TOKENS)
    at = first_difference(tokens, peer_tokens)

    ids = prompt + tokens[:-1]
    exact = reference.logits(ids)
    ours, theirs = core.logits(ids), step_by_step(peer, prompt, tokens[:-1])
    row = len(prompt) - 1
    if list(np.argmax(ours[row:], axis=1)) != tokens:
        raise RuntimeError(f"the engine's tokens are not those of its logits: {text!r}")
    result: Result = {
        "kind": kind,
        "prompt": text,
        "prompt_ids_equal": prompt == peer_prompt,
        "tokens": tokens,
        "peer_tokens": peer_tokens,
        "first_difference": at,
        "control_first_difference": first_difference(peer_tokens, control.greedy(prompt, NUM_TOKENS)),
        "errors": relative_errors(ours, exact),
        "peer_errors": relative_errors(theirs, exact),
    }
    if at is not None:
        # Up to here both have the same context. A shift of a whole row changes nothing: it is taken out.
        expected = exact[row + at]
        best = np.sort(expected)[-2:]
        result["top_two_gap"] = float(best[1] - best[0])
        for name, logits in (("error_there", ours), ("peer_error_there", theirs)):
            difference = logits[row + at] - expected
            result[name] = float(np.max(np.abs(difference - np.mean(difference))))
        result["is_explained"] = result["top_two_gap"] <= result["error_there"] + result["peer_error_there"]
    return result


def negative_log_likelihood(logits: Floats, targets: Sequence[int]) -> float:
    """Return the sum over rows of -log softmax(logits)[target]."""
    rows = logits.astype(np.float64)
    largest = rows.max(axis=1)
    log_sum = largest + np.log(np.exp(rows - largest[:, None]).sum(axis=1))
    return float(np.sum(log_sum - rows[np.arange(len(rows)), list(targets)]))


def perplexities(ids: Sequence[int], core: CoreLogits, peer: LlamaCpp, num_windows: int | None) -> Result:
    """Score the second half of every whole window with both engines."""
    half = WINDOW // 2
    windows = [ids[start : start + WINDOW] for start in range(0, len(ids) - WINDOW + 1, WINDOW)][:num_windows]
    total = peer_total = 0.0
    for number, window in enumerate(windows):
        targets = window[half:]
        total += negative_log_likelihood(core.logits(window, half - 1)[:-1], targets)
        peer_total += negative_log_likelihood(peer.logits(window, half - 1)[:-1], targets)
        print(f"\rperplexity: window {number + 1} of {len(windows)}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    count = len(windows) * half
    ours, theirs = math.exp(total / count), math.exp(peer_total / count)
    return {
        "text": str(TEXT.relative_to(ROOT)),
        "num_scored": count,
        "perplexity": ours,
        "peer_perplexity": theirs,
        "difference_percent": 100 * (ours / theirs - 1),
    }


def _statistics(name: str, errors: Floats) -> dict[str, float]:
    median, p99, largest = (float(np.percentile(errors, q)) for q in (50, 99, 100))
    return {f"{name}_median": median, f"{name}_p99": p99, f"{name}_max": largest}


def summary(results: Sequence[Result]) -> Result:
    """Return counts, and the errors over every position."""
    errors = np.concatenate([result.pop("errors") for result in results])
    peer_errors = np.concatenate([result.pop("peer_errors") for result in results])
    return {
        "prompts": len(results),
        "prompt_ids_equal": sum(result["prompt_ids_equal"] for result in results),
        "tokens_equal": sum(result["first_difference"] is None for result in results),
        "control_tokens_equal": sum(result["control_first_difference"] is None for result in results),
        "differences_explained": sum(result.get("is_explained", False) for result in results),
        "positions": len(errors),
        **_statistics("error", errors),
        **_statistics("peer_error", peer_errors),
    }


def print_tables(document: Result) -> None:
    """Print what the JSON holds."""
    totals, results = document["summary"], document["prompts"]
    print(f"{document['model']['file']}  |  {document['peer']}  |  {document['kernels']} kernels")
    print(f"prompt ids equal in {totals['prompt_ids_equal']} of {totals['prompts']}")
    print(f"{NUM_TOKENS} tokens equal in {totals['tokens_equal']} of {totals['prompts']}", end="")
    print(f" (llama.cpp with itself, flash attention on and off: {totals['control_tokens_equal']})")
    for result in results:
        if result["first_difference"] is not None:
            print(
                f"  token {result['first_difference']:2} of {result['prompt'][:30]!r}: top-two gap "
                f"{result['top_two_gap']:.4f}, largest logit error {result['error_there']:.4f} (llama.cpp "
                f"{result['peer_error_there']:.4f}){'' if result['is_explained'] else '  NOT EXPLAINED'}"
            )
    print(f"relative L2 error of the logits of {totals['positions']} positions:")
    for engine, key in (("xLLM", "error"), ("llama.cpp", "peer_error")):
        numbers = "  ".join(f"{name} {totals[f'{key}_{name}']:.5f}" for name in ("median", "p99", "max"))
        print(f"  {engine:10} {numbers}")
    if scores := document["perplexity"]:
        print(f"perplexity of {scores['text']}, {scores['num_scored']} tokens:")
        print(f"  xLLM {scores['perplexity']:.4f}  llama.cpp {scores['peer_perplexity']:.4f}", end="")
        print(f"  ({scores['difference_percent']:+.3f} %)")


def main() -> None:
    """Compare, print and write; ends with 1 when a difference is not explained."""
    parser = argparse.ArgumentParser(description="Compare xLLM with llama.cpp on the same model file.")
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, default=1, help="of each engine; the numbers do not depend on it")
    parser.add_argument("--prompts", type=int, default=NUM_PROMPTS, help="the first so many")
    parser.add_argument("--open", action="store_true", help="prompts whose continuations rounding may decide")
    parser.add_argument("--windows", type=int, default=None, help="of the text, at most; 0: no perplexity")
    parser.add_argument("--json", type=Path, default=None, help="also write the results to this file")
    parser.add_argument("--logits-cli", type=Path, default=PROGRAM)
    args = parser.parse_args()

    reference = load_reference(args.model)
    config = EngineConfig(num_threads=args.threads, max_seq_len=WINDOW)
    with (
        Engine(args.model, config) as engine,
        CoreLogits(args.model, num_threads=args.threads, program=args.logits_cli) as core,
        LlamaCpp(args.model, args.threads, WINDOW) as peer,
        LlamaCpp(args.model, args.threads, WINDOW, flash_attention=False) as control,
    ):
        results = []
        prompts = [("open", text) for text in OPEN_PROMPTS] if args.open else PROMPTS
        for number, (kind, text) in enumerate(prompts[: args.prompts]):
            results.append(compare_prompt(kind, text, engine, core, peer, control, reference))
            print(f"\rprompt {number + 1} of {args.prompts}", end="", file=sys.stderr, flush=True)
        print(file=sys.stderr)
        scores = {}
        if args.windows != 0:
            text_ids = engine.model.encode(TEXT.read_text(), add_special=False)
            if text_ids != peer.encode(TEXT.read_text(), add_special=False):
                raise RuntimeError(f"the two encode {TEXT.name} differently")
            scores = perplexities(text_ids, core, peer, args.windows)
        document = {
            "machine": machine.describe(),
            "model": {"file": args.model.name, "sha256": hashlib.sha256(args.model.read_bytes()).hexdigest()},
            "peer": peer.version,
            "peer_system_info": peer.system_info,
            "kernels": engine.info.kernels,
            "threads": args.threads,
            "summary": summary(results),
            "perplexity": scores,
            "prompts": results,
        }
    print_tables(document)
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(document, indent=1) + "\n")
    totals = document["summary"]
    if totals["tokens_equal"] + totals["differences_explained"] < totals["prompts"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
