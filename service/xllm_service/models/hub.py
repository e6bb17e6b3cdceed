"""Fetches a GGUF file from the Hugging Face hub, through huggingface_hub: resumed, verified and locked by it."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from xllm_service.models.store import ModelFetchError, cache_folder

_REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_SHARD = re.compile(r"(?P<stem>.*)-(?P<index>\d{5})-of-(?P<count>\d{5})\.gguf")


@dataclass(frozen=True, slots=True)
class HubName:
    """ORG/REPO[:FILE]; `file` is a path in the repository, or a part of one file's name such as Q4_K_M, or empty."""

    repo: str
    file: str = ""

    @classmethod
    def parse(cls, text: str) -> HubName | None:
        """Read a name as a user writes it; None when it cannot be one."""
        repo, _, file = text.partition(":")
        if not _REPO.fullmatch(repo) or (repo.endswith(".gguf") and not file):
            return None
        return cls(repo, file)

    def __str__(self) -> str:
        """Return the name as a user writes it."""
        return f"{self.repo}:{self.file}" if self.file else self.repo


def choose_file(name: HubName, files: Sequence[str]) -> str:
    """Return the one file of the repository that is meant; of a split model, its first shard.

    Raises ModelFetchError, which lists the files, when there is none or the name does not decide. Nothing is guessed.
    """
    candidates = sorted(file for file in files if file.endswith(".gguf") and not _is_later_shard(file))
    if not candidates:
        raise ModelFetchError(f"{name.repo} holds no .gguf file; name a repository that does (often called ...-GGUF)")
    if name.file in candidates:
        return name.file
    wanted = [file for file in candidates if name.file.lower() in file.lower()]
    if len(wanted) == 1:
        return wanted[0]
    problem = "several files match" if wanted else "no such file"
    choices = ", ".join(wanted or candidates)
    raise ModelFetchError(f"{name}: {problem}; name one, as {name.repo}:FILE, of {choices}")


def shards_of(file: str) -> list[str]:
    """Return the files of a split model whose first shard is `file`; of another model, `file` alone."""
    match = _SHARD.fullmatch(file)
    if match is None:
        return [file]
    count = match["count"]
    return [f"{match['stem']}-{index:05d}-of-{count}.gguf" for index in range(1, int(count) + 1)]


def cached(name: HubName) -> Path | None:
    """Return the file if it was fetched before, without a look at the network."""
    folder = _folder() / f"models--{name.repo.replace('/', '--')}"
    try:
        snapshot = folder / "snapshots" / (folder / "refs" / "main").read_text().strip()
        file = choose_file(name, [str(path.relative_to(snapshot)) for path in snapshot.rglob("*.gguf")])
    except (OSError, ModelFetchError):
        return None
    return snapshot / file if all((snapshot / shard).is_file() for shard in shards_of(file)) else None


def fetch(name: HubName) -> Path:
    """Fetch the file, unless the newest one is there already, and return its path."""
    import huggingface_hub
    from huggingface_hub import errors

    _quieten()
    try:
        if name.file.endswith(".gguf"):  # most likely the whole name: then the list is not needed
            try:
                return _download(name, name.file)
            except errors.LocalEntryNotFoundError:  # the hub did not answer
                raise
            except errors.EntryNotFoundError:
                pass
        return _download(name, choose_file(name, huggingface_hub.list_repo_files(name.repo)))
    except errors.GatedRepoError as error:
        raise ModelFetchError(
            f"{name.repo} asks for its licence to be accepted: do so on its page, then run `hf auth login`"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ModelFetchError(
            f"{name.repo}: no such repository on the hub, or a private one; check the name, or run `hf auth login`"
        ) from error
    except ModelFetchError:
        raise
    except (
        Exception
    ) as error:  # note: also what the HTTP library under huggingface_hub raises, which has changed before
        if (path := cached(name)) is not None:
            return path
        raise ModelFetchError(
            f"{name} could not be fetched from the hub ({_first_line(error)}); check the network, "
            "or give the path of a .gguf file instead of a name"
        ) from error


def _download(name: HubName, file: str) -> Path:
    import huggingface_hub

    paths = [
        huggingface_hub.hf_hub_download(name.repo, shard, cache_dir=_folder(), library_name="xllm")
        for shard in shards_of(file)
    ]
    return Path(paths[0])


def _quieten() -> None:
    """Leave stderr to our own one line, and to the hub's bars where somebody sees them."""
    from huggingface_hub.utils import disable_progress_bars, logging  # type: ignore[attr-defined]

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    if not sys.stderr.isatty():
        disable_progress_bars()


def _folder() -> Path:
    return cache_folder() / "hub"


def _is_later_shard(file: str) -> bool:
    match = _SHARD.fullmatch(file)
    return match is not None and int(match["index"]) != 1


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
