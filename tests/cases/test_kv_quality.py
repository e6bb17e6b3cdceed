"""What int8 and int4 keys and values cost in quality, on the demo model over real text (docs/perf/kv.md)."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.kv_quality import measure


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_quantised_keys_and_values_stay_close_to_f16(demo_model: Path) -> None:
    # About one and a half times what is on record: two windows of the text are not all of it.
    results = measure(demo_model, num_windows=2)
    assert results["f16"]["kl_mean"] == 0
    assert results["int8"]["kl_mean"] < 0.006
    assert results["int8"]["top1_agreement"] > 0.93
    assert abs(results["int8"]["perplexity"] / results["f16"]["perplexity"] - 1) < 0.01
    assert results["int4"]["kl_mean"] < 0.08
    assert results["int4"]["top1_agreement"] > 0.78
    assert results["int4"]["perplexity"] / results["f16"]["perplexity"] < 1.1
