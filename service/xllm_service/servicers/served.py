"""What the servicers share: the server's engines, its phase, its settings."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from xllm_service.admission import Gate, LiveGenerations, Phase
from xllm_service.config import ServeConfig
from xllm_service.engine import AsyncEngine, Model
from xllm_service.errors import Reason, ServiceError
from xllm_service.metrics import Metrics
from xllm_service.servicers.draining import Draining
from xllm_service.servicers.roster import Hosted, Loader, Roster
from xllm_service.validation import RequestLimits

# Counts up with each addition to xllm.v1; see protos/README.md.
SCHEMA_REVISION = 1


@dataclass
class Served:
    """A server's insides.

    Attributes:
        roster: the engines, by the names that calls use.
        generations: every call that computes something, on any engine.
        draining: how the server stops taking work.
    """

    config: ServeConfig
    gate: Gate
    metrics: Metrics
    loader: Loader
    generations: LiveGenerations = field(default_factory=LiveGenerations)
    start_time: float = field(default_factory=time.time)

    def __post_init__(self) -> None:
        self.roster = Roster(self.config, self.loader, self.generations)
        self.roster.on_engine = self._count_steps
        self.draining = Draining(self.gate, self.generations, self.config.drain_grace)

    def _count_steps(self, engine: AsyncEngine) -> None:
        engine.on_freed = self.metrics.cancel_to_free.observe
        engine.on_batch = self.metrics.batch_size.observe

    @property
    def is_draining(self) -> bool:
        """No new work is taken."""
        return self.gate.phase is Phase.DRAINING

    def get(self, model: str, field: str = "model") -> Hosted:
        """Return the engine that a call means; "" is the only one.

        Raises MODEL_NOT_FOUND, LOADING, DRAINING; INVALID_FIELD on `field` for "" where there are several.
        """
        return self.roster.get(model, field)

    def get_model(self, model: str) -> Model:
        """Return the model that a call means. Raises as get."""
        return self.get(model).engine.model

    def limits(self, engine: AsyncEngine) -> RequestLimits:
        """What requests to an engine may ask for."""
        return RequestLimits(
            num_head_rows=engine.model.info.vocab_size,
            num_places=engine.info.max_slots + engine.info.max_queue,
            default_max_tokens=self.config.default_max_tokens or None,
            default_queue_s=self.config.default_queue_time or None,
            max_chat_messages=self.config.max_chat_messages,
        )

    def refuse_when_draining(self) -> None:
        """Raise DRAINING when no work is taken any more, also while the first model is still loading."""
        if self.is_draining:
            raise ServiceError(Reason.DRAINING, "the server is about to stop and takes no new work")
