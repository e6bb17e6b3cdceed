"""Log lines: one for each record, whatever a peer has written into it."""

from __future__ import annotations

import io
import json
import logging

import pytest

from xllm_service import logs


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_what_a_peer_has_written_forges_no_line(log_format: str) -> None:
    forged = "hello\n12:00:00.000 error   all is lost\r\nand more"
    logger = logging.getLogger(logs.LOGGER)
    before = logger.handlers[:], logger.level, logger.propagate
    out = io.StringIO()
    try:
        logs.configure("info", log_format, out)
        logs.get_logger("said").info("prompt %s", forged, extra=logs.facts(text=forged))
    finally:
        logger.handlers[:], logger.level, logger.propagate = before
    (line,) = out.getvalue().splitlines()
    assert "all is lost" in line
    if log_format == "json":
        assert json.loads(line)["text"] == forged
