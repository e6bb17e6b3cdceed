"""The engine as the service sees it; the only package that imports cyengine.

`Model` wraps an opened file, `open_engine` runs an engine in this process, `AsyncEngine` puts one behind an event loop.
"""

from __future__ import annotations

import cyengine
from cyengine import exit_on_lost_file
from cyengine.types import (
    AcceptedEvent,
    Candidate,
    DecodeMode,
    EngineInfo,
    EngineStats,
    Event,
    Fact,
    FinishedEvent,
    FinishReason,
    Plan,
    PrefillEvent,
    Slot,
    SlotInfo,
    SlotState,
    Status,
    TokenEvent,
)
from xllm_service.engine.async_engine import AsyncEngine
from xllm_service.engine.config import engine_config
from xllm_service.engine.core import CoreEngine, create_core
from xllm_service.engine.failures import to_service_error
from xllm_service.engine.local import LocalEngine, open_engine
from xllm_service.engine.masks import ConstraintComplete
from xllm_service.engine.model import Model, open_model
from xllm_service.engine.requests import CacheUse
from xllm_service.engine.stream import Bounds, Progress

__all__ = [
    "AcceptedEvent",
    "AsyncEngine",
    "Bounds",
    "CacheUse",
    "Candidate",
    "ConstraintComplete",
    "CoreEngine",
    "DecodeMode",
    "EngineInfo",
    "EngineStats",
    "Event",
    "Fact",
    "FinishReason",
    "FinishedEvent",
    "LocalEngine",
    "Model",
    "Plan",
    "PrefillEvent",
    "Progress",
    "Slot",
    "SlotInfo",
    "SlotState",
    "Status",
    "TokenEvent",
    "build_id",
    "create_core",
    "engine_config",
    "exit_on_lost_file",
    "open_engine",
    "open_model",
    "to_service_error",
    "version",
]

version: str = cyengine.__version__
build_id: str = cyengine.build_id
