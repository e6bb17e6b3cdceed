"""xLLM's engine in Python: GGUF models from their quantised blocks, without a server.

from cyengine import Engine

with Engine("model.gguf") as engine:
    for event in engine.generate("The capital of France is", max_tokens=32):
        print(getattr(event, "text", ""), end="", flush=True)
"""

from cyengine._core import Engine, Model, build_id, exit_on_lost_file, version
from cyengine.errors import XllmError
from cyengine.types import (
    AcceptedEvent,
    Backend,
    Candidate,
    DecodeMode,
    EndToken,
    EngineConfig,
    EngineInfo,
    EngineStats,
    Event,
    Fact,
    FinishedEvent,
    FinishReason,
    KvType,
    Metadata,
    ModelInfo,
    Plan,
    PrefillEvent,
    Request,
    SamplingParams,
    Slot,
    SlotInfo,
    SlotState,
    SlotStep,
    Status,
    TensorInfo,
    TextPiece,
    TokenEvent,
    TokenMask,
)

__version__ = version

__all__ = [
    "AcceptedEvent",
    "Backend",
    "Candidate",
    "DecodeMode",
    "EndToken",
    "Engine",
    "EngineConfig",
    "EngineInfo",
    "EngineStats",
    "Event",
    "Fact",
    "FinishReason",
    "FinishedEvent",
    "KvType",
    "Metadata",
    "Model",
    "ModelInfo",
    "Plan",
    "PrefillEvent",
    "Request",
    "SamplingParams",
    "Slot",
    "SlotInfo",
    "SlotState",
    "SlotStep",
    "Status",
    "TensorInfo",
    "TextPiece",
    "TokenEvent",
    "TokenMask",
    "XllmError",
    "build_id",
    "exit_on_lost_file",
]
