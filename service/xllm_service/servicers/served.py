"""What the servicers share: the server's model and engine, its phase, its settings."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from xllm_service.admission import Gate, LiveGenerations, Phase
from xllm_service.config import ServeConfig
from xllm_service.engine import AsyncEngine, Model
from xllm_service.errors import Reason, ServiceError
from xllm_service.metrics import Metrics
from xllm_service.validation import RequestLimits

# Counts up with each addition to xllm.v1; see protos/README.md.
SCHEMA_REVISION = 1


@dataclass
class Served:
    """A server's insides.

    Attributes:
        engine: None until the model is loaded.
    """

    config: ServeConfig
    gate: Gate
    metrics: Metrics
    engine: AsyncEngine | None = None
    generations: LiveGenerations = field(default_factory=LiveGenerations)
    start_time: float = field(default_factory=time.time)

    @property
    def name(self) -> str:
        """The name that calls use for the model."""
        return self.config.model_name

    @property
    def is_draining(self) -> bool:
        """No new work is taken."""
        return self.gate.phase is Phase.DRAINING

    def get_engine(self, model: str) -> AsyncEngine:
        """Return the engine that a call means; "" is the only one. Raises MODEL_NOT_FOUND, LOADING."""
        if model not in ("", self.name):
            raise ServiceError(
                Reason.MODEL_NOT_FOUND,
                f"no model {model!r} is served here; {self.name} is",
                resource=("xllm.v1.Model", model),
            )
        if self.engine is None:
            raise ServiceError(Reason.LOADING, "the model is still loading; try again in a moment")
        return self.engine

    def get_model(self, model: str) -> Model:
        """Return the model that a call means. Raises as get_engine."""
        return self.get_engine(model).model

    def limits(self, model: Model) -> RequestLimits:
        """What requests to a model may ask for."""
        return RequestLimits(
            num_head_rows=model.info.vocab_size,
            default_max_tokens=self.config.default_max_tokens or None,
            default_queue_s=self.config.default_queue_time or None,
            max_chat_messages=self.config.max_chat_messages,
        )
