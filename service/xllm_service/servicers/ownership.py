"""Whose slot it is: a principal's that was authenticated, or whoever can show the secret that came with it."""

from __future__ import annotations

import hmac
import re
import secrets
import time
from dataclasses import dataclass, field

from xllm_service.engine import Slot

_SECRET_BYTES = 16
_NAME = re.compile(r"(.+)/(0|[1-9][0-9]{0,5})")


def slot_name(model: str, index: int) -> str:
    """Return the name of a slot, unique in the server."""
    return f"{model}/{index}"


def parse_slot_name(name: str) -> tuple[str, int] | None:
    """Return model and index of a slot's name; None for a text that is none."""
    match = _NAME.fullmatch(name)
    return (match[1], int(match[2])) if match is not None else None


@dataclass(frozen=True, slots=True)
class Ownership:
    """One acquisition of a slot.

    Attributes:
        slot: the engine's own handle of it, with its epoch.
        principal: the owner; "" for one that only its secret tells.
        secret: returned once; empty where there is a principal.
        acquired_at: seconds since 1970.
    """

    slot: Slot
    principal: str
    secret: bytes = field(repr=False)
    acquired_at: float = field(default_factory=time.time)

    @classmethod
    def new(cls, slot: Slot, principal: str) -> Ownership:
        """Give a slot that was acquired just now to a caller; draws a secret for one without a name."""
        return cls(slot, principal, b"" if principal else secrets.token_bytes(_SECRET_BYTES))

    def is_of(self, principal: str, secret: bytes) -> bool:
        """Whether a caller is the owner; takes equally long for every wrong secret."""
        if self.principal or principal:
            return hmac.compare_digest(self.principal.encode(), principal.encode())
        return hmac.compare_digest(self.secret, secret)


@dataclass(frozen=True, slots=True)
class Seat:
    """The call that runs in a slot, or did last: of one epoch of the slot."""

    epoch: int
    request_id: str
    owner: str
