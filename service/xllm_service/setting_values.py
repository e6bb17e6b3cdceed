"""The values that settings take, as they are written: text of a flag or of the environment, or a TOML value.

Each function returns the value, or raises ValueError saying what was expected and what was found.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from xllm_client.endpoint import Endpoint

BLOCK_SIZES = (16, 32, 64, 128)

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?", re.IGNORECASE)
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


def integer(low: int, high: int) -> Callable[[object], int]:
    """Whole numbers from `low` to `high`."""

    def parse(value: object) -> int:
        try:
            number = value if isinstance(value, int) and not isinstance(value, bool) else int(str(value), 10)
        except ValueError:
            raise ValueError(f"expected a whole number from {low} to {high}, found {value!r}") from None
        if not low <= number <= high:
            raise ValueError(f"expected a whole number from {low} to {high}, found {number}")
        return number

    return parse


def seconds(low: float, high: float) -> Callable[[object], float]:
    """Seconds from `low` to `high`, fractions included."""

    def parse(value: object) -> float:
        try:
            number = float(str(value))
        except ValueError:
            raise ValueError(f"expected seconds from {low:g} to {high:g}, found {value!r}") from None
        if not low <= number <= high:
            raise ValueError(f"expected seconds from {low:g} to {high:g}, found {value!r}")
        return number

    return parse


def choice(*options: str) -> Callable[[object], str]:
    """One of several words."""

    def parse(value: object) -> str:
        if value not in options:
            raise ValueError(f"expected one of {', '.join(options)}, found {value!r}")
        return str(value)

    return parse


def parse_size(value: object) -> int:
    """Return a number of bytes written as 1500000, 1.5GB or 2GiB. Raises ValueError."""
    match = _SIZE.fullmatch(str(value).strip())
    if match is None or isinstance(value, bool):
        raise ValueError(f"expected bytes, such as 2GiB or 1500000000, found {value!r}")
    size = (
        float(match[1]) * _UNITS[(match[2] or "").lower()]
        if "." in match[1]
        else int(match[1]) * _UNITS[(match[2] or "").lower()]
    )
    if size >= 2**63:
        raise ValueError(f"expected fewer than 2^63 bytes, found {value!r}")
    return int(size)


def size_or_auto(value: object) -> int:
    """Bytes as `parse_size` reads them; `auto` is 0."""
    return 0 if value == "auto" else parse_size(value)


def block_size(value: object) -> int:
    """A number of token positions that the KV cache can be cut into."""
    number = integer(1, 1 << 20)(value)
    if number not in BLOCK_SIZES:
        raise ValueError(f"expected one of {', '.join(map(str, BLOCK_SIZES))}, found {number}")
    return number


def boolean(value: object) -> bool:
    """A switch, in the words that people use."""
    if isinstance(value, bool):
        return value
    known = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    try:
        return known[str(value).lower()]
    except KeyError:
        raise ValueError(f"expected true or false, found {value!r}") from None


def tcp(value: object) -> Endpoint:
    """A TCP address."""
    endpoint = Endpoint.parse(str(value))
    if endpoint.is_unix:
        raise ValueError(f"expected HOST:PORT or [IPV6]:PORT, found {value!r}")
    return endpoint


def endpoints(value: object) -> tuple[Endpoint, ...]:
    """Addresses: a list of them, or text with commas between."""
    texts = value if isinstance(value, (list, tuple)) else str(value).split(",")
    return tuple(text if isinstance(text, Endpoint) else Endpoint.parse(str(text).strip()) for text in texts)


def path(value: object) -> Path:
    """A path; `~` is the user's home."""
    if not str(value):
        raise ValueError("expected a path, found nothing")
    return Path(str(value)).expanduser()


def model_name(value: object) -> str:
    """A name for a model, as calls may use it."""
    if not _NAME.fullmatch(str(value)):
        raise ValueError(f"expected at most 64 of A-Z a-z 0-9 . _ -, found {value!r}")
    return str(value)


def text(value: object) -> str:
    """Any text that is not empty."""
    if not str(value):
        raise ValueError("expected a name, found nothing")
    return str(value)
