"""What may run now: the server's own state, how many calls are open, and which generations are live."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import grpc

from xllm_client.v1 import generation_service_pb2
from xllm_service import convert
from xllm_service.errors import Reason, ServiceError
from xllm_service.owned_store import OwnedStore

# How long the receipt of a generation is kept; of how many of one principal, and of all of them together.
RECEIPT_TTL_S = 300.0
MAX_RECEIPTS = 4096
_MAX_RECEIPTS_OF_ALL = 65536


class Phase(Enum):
    """Where the server is in its life."""

    LOADING = "loading"
    SERVING = "serving"
    DRAINING = "draining"


class Gate:
    """Lets calls in by the server's phase and counts those that are open.

    Attributes:
        phase: set by the server as it starts and stops.
    """

    def __init__(self, max_calls: int) -> None:
        self.phase = Phase.LOADING
        self._max_calls = max_calls
        self._num_calls = 0
        self._num_work = 0

    @property
    def num_calls(self) -> int:
        """Calls that are open now."""
        return self._num_calls

    @property
    def num_work(self) -> int:
        """Of these, the ones a server waits for before it stops: those that only tell about it are left out."""
        return self._num_work

    def check(self) -> None:
        """Raise UNAVAILABLE (LOADING, DRAINING) when no work is taken."""
        if self.phase is Phase.LOADING:
            raise ServiceError(Reason.LOADING, "the model is still loading; try again in a moment")
        if self.phase is Phase.DRAINING:
            raise ServiceError(Reason.DRAINING, "the server is about to stop and takes no new work")

    def enter(self, *, is_work: bool = True) -> None:
        """Count a call. Raises TOO_MANY_CALLS; then `leave` must not be called."""
        if self._num_calls >= self._max_calls:
            raise ServiceError(
                Reason.TOO_MANY_CALLS,
                f"{self._num_calls} calls are open, which is the limit; try again later",
                metadata={"limit": self._max_calls},
            )
        self._num_calls += 1
        self._num_work += is_work

    def leave(self, *, is_work: bool = True) -> None:
        """Take a call back that `enter` let in."""
        self._num_calls -= 1
        self._num_work -= is_work


class GenerationState(Enum):
    """Where a generation stands; the names of the contract."""

    QUEUED = "QUEUED"
    RUNNING = "RUNNING"
    FINISHED = "FINISHED"
    CANCELLED = "CANCELLED"
    TIMED_OUT = "TIMED_OUT"
    FAILED = "FAILED"


class LiveGeneration:
    """One generation from its call's arrival to its end.

    Attributes:
        request_id: its name.
        owner: the principal whose call it is; nobody else can cancel it.
        fingerprint: equal for equal bodies.
        state: QUEUED until the engine accepts it.
        receipt: what it has used so far; its state and end are filled in when they are known.
        failure: why the service itself ends it; None while it does not.
        is_retry: it replaced a call with the same body, which may not have ended yet.
    """

    def __init__(self, request_id: str, owner: str, fingerprint: bytes, interrupt: Callable[[], object]) -> None:
        """Describe one; `interrupt` wakes its call, wherever it waits, to find `failure`."""
        self.request_id = request_id
        self.owner = owner
        self.fingerprint = fingerprint
        self.state = GenerationState.QUEUED
        self.failure: ServiceError | None = None
        self.is_retry = False
        self.receipt = generation_service_pb2.GenerationReceipt(
            request_id=request_id, create_time=convert.timestamp(time.time())
        )
        self._interrupt = interrupt

    def end(self, failure: ServiceError) -> None:
        """End it from outside; its call fails with `failure`. Harmless when it is being ended already."""
        if self.failure is None:
            self.failure = failure
            self._interrupt()

    def stalled(self) -> None:
        """End it because its client does not read."""
        self.end(ServiceError(Reason.CLIENT_STALLED, "the client did not read its stream for too long"))


@dataclass(frozen=True, slots=True)
class _Ended:
    """What is kept of a generation that has ended, and since when."""

    at: float
    state: GenerationState
    written: bytes

    @property
    def receipt(self) -> generation_service_pb2.GenerationReceipt:
        """The receipt as it was at the end."""
        return generation_service_pb2.GenerationReceipt.FromString(self.written)


class LiveGenerations:
    """The generations that are live, by owner and request id, and for a while the receipts of those that were."""

    def __init__(self) -> None:
        self._live: dict[tuple[str, str], LiveGeneration] = {}
        self._ended: OwnedStore[str, _Ended] = OwnedStore(MAX_RECEIPTS, _MAX_RECEIPTS_OF_ALL)

    def __len__(self) -> int:
        return len(self._live)

    def add(self, generation: LiveGeneration) -> None:
        """Begin one. The same body under a live id replaces that call, which ends with CANCELLED.

        Raises REQUEST_ID_IN_USE for another body.
        """
        key = (generation.owner, generation.request_id)
        earlier = self._live.get(key)
        if earlier is not None:
            if earlier.fingerprint != generation.fingerprint:
                raise ServiceError(
                    Reason.REQUEST_ID_IN_USE,
                    f"request_id {generation.request_id} is live with another body; choose another id",
                    resource=("xllm.v1.Generation", generation.request_id),
                )
            earlier.end(ServiceError(Reason.CANCELLED, "the same request was sent again, and that call goes on"))
        self._ended.remove(*key)
        self._live[key] = generation
        generation.is_retry = earlier is not None

    def remove(self, generation: LiveGeneration, code: grpc.StatusCode, reason: str = "") -> None:
        """End one with its call's status, and keep its receipt; calling it again is harmless."""
        key = (generation.owner, generation.request_id)
        if self._live.get(key) is not generation:
            return  # it has been replaced
        del self._live[key]
        now, wall = time.monotonic(), time.time()
        receipt = generation.receipt
        receipt.status_code = code.value[0]
        receipt.error_reason = reason
        receipt.end_time.CopyFrom(convert.timestamp(wall))
        receipt.expire_time.CopyFrom(convert.timestamp(wall + RECEIPT_TTL_S))
        # note: its receipt alone is kept, as bytes: the generation holds its call, with all that is in its frames.
        self._ended.put(*key, _Ended(now, generation.state, receipt.SerializeToString()))
        self._ended.expire(lambda ended: now - ended.at >= RECEIPT_TTL_S)

    def cancel(self, owner: str, request_id: str) -> GenerationState:
        """Stop a generation and return the state it was found in. Raises REQUEST_NOT_FOUND."""
        generation = self._find(owner, request_id)
        state = generation.state
        if isinstance(generation, LiveGeneration):
            generation.end(ServiceError(Reason.CANCELLED, "cancelled by CancelGeneration"))
        return state

    def receipt(self, owner: str, request_id: str) -> generation_service_pb2.GenerationReceipt:
        """Return what is known of a generation, live or ended. Raises REQUEST_NOT_FOUND."""
        generation = self._find(owner, request_id)
        receipt = generation_service_pb2.GenerationReceipt(state=state_value(generation.state))
        receipt.MergeFrom(generation.receipt)
        return receipt

    def count(self, model: str) -> int:
        """How many are live on one model's engine."""
        return sum(generation.receipt.model == model for generation in self._live.values())

    def count_states(self) -> tuple[int, int]:
        """How many run, and how many still wait."""
        num_waiting = sum(one.state is GenerationState.QUEUED for one in self._live.values())
        return len(self._live) - num_waiting, num_waiting

    def end_all(self, failure: ServiceError, model: str | None = None) -> None:
        """End every live one, or those of one model."""
        for generation in list(self._live.values()):
            if model is None or generation.receipt.model == model:
                generation.end(failure)

    def _find(self, owner: str, request_id: str) -> LiveGeneration | _Ended:
        live = self._live.get((owner, request_id))
        if live is not None:
            return live
        ended = self._ended.get(owner, request_id)
        if ended is not None and time.monotonic() - ended.at < RECEIPT_TTL_S:
            return ended
        raise ServiceError(
            Reason.REQUEST_NOT_FOUND,
            f"no generation {request_id} is live or has ended lately",
            resource=("xllm.v1.Generation", request_id),
        )


def state_value(state: GenerationState) -> Any:
    """Return a state as the contract's enum."""
    return f"GENERATION_STATE_{state.value}"
