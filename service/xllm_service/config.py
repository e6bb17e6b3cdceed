"""Everything that can be set when a server starts: one frozen object, checked as a whole.

A setting has three spellings: a flag (``--max-slots 4``), a line of a TOML file (``max-slots = 4``) and a name in the
environment (``XLLM_MAX_SLOTS=4``). Flags win over the environment, which wins over the file. Each field below is the
one place where its setting is documented: meaning, unit, default, and what happens at the extremes.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from xllm_client.endpoint import Endpoint, default_endpoint
from xllm_service import setting_values as values

DECODE_MODES = ("auto", "batched", "per-slot")
BACKENDS = ("auto", "cpu", "cuda")
KV_TYPES = ("f16", "int8", "int4")
REFLECTION = ("auto", "on", "off")
LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")

# Limits that the engine has by construction; GetServerInfo reports them beside the settings.
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_BYTES = 256
MAX_STOP_TOKENS = 64
MAX_LOGIT_BIAS = 1024
MAX_TOP_LOGPROBS = 20
MAX_OUTPUTS = 128

_ENV_PREFIX = "XLLM_"


class ConfigError(ValueError):
    """A setting that cannot be used; the message names it and says what to write instead."""


# ---------------------------------------------------------------- settings


@dataclass(frozen=True)
class Setting:
    """How one field of ServeConfig is written, for command lines and manuals.

    Attributes:
        field: the field's name; its spelling in a TOML file and its flag replace ``_`` by ``-``.
        help: one line or two: meaning, unit, default, extremes.
        metavar: what stands for its value; empty for a switch.
        parse: text or TOML value to the field's value; raises ValueError.
        is_multiple: the flag may be given several times.
    """

    field: str
    help: str
    metavar: str
    parse: Callable[[object], Any]
    is_multiple: bool = False

    @property
    def name(self) -> str:
        """Its spelling in a TOML file."""
        return self.field.replace("_", "-")

    @property
    def flag(self) -> str:
        """Its spelling on a command line."""
        return f"--{self.name}"

    @property
    def env(self) -> str:
        """Its name in the environment."""
        return f"{_ENV_PREFIX}{self.field.upper()}"

    @property
    def is_switch(self) -> bool:
        """The flag takes no value."""
        return not self.metavar


def _setting(
    default: object, metavar: str, parse: Callable[[object], Any], text: str, *, is_multiple: bool = False
) -> Any:
    return field(default=default, metadata={"setting": (metavar, parse, text, is_multiple)})


@dataclass(frozen=True)
class ServeConfig:
    """What `xllm serve` does. Build it with `load_config`, which checks everything; fields are documented beside them.

    Attributes:
        model: the GGUF file to serve.
        sources: for every field that was set, from where: a flag, a name in the environment, or the file.
        default_name: what the model is called where nothing else says; empty: as its file is.
        ignored: names that begin with XLLM_ but are no setting, as orchestrators like to add them.
    """

    model: Path

    # ---- listening ----
    listen: tuple[Endpoint, ...] = _setting(
        (),
        "ADDRESS",
        values.endpoints,
        "Where to listen: unix:PATH, HOST:PORT or [IPV6]:PORT; may be repeated. Default: one unix socket in the user's "
        "runtime directory, where clients look by themselves.",
        is_multiple=True,
    )
    allow_plaintext: bool = _setting(
        False,
        "",
        values.boolean,
        "Allow listening without TLS on an address that other machines can reach. Default: that is refused.",
    )
    tls_cert: Path | None = _setting(
        None,
        "FILE",
        values.path,
        "The server's certificate chain, PEM. With --tls-key: TLS on every TCP address. The three TLS files are read "
        "again when they change, for connections made from then on.",
    )
    tls_key: Path | None = _setting(None, "FILE", values.path, "The private key of --tls-cert, PEM.")
    tls_client_ca: Path | None = _setting(
        None, "FILE", values.path, "Take only clients whose certificate this CA signed (mTLS), on every TCP address."
    )
    token_file: Path | None = _setting(
        None,
        "FILE",
        values.path,
        "Take only calls that carry one of the bearer tokens in this file, one a line, at least 16 characters each; "
        "on every address and method, health and reflection included.",
    )
    admin_token_file: Path | None = _setting(
        None,
        "FILE",
        values.path,
        "Bearer tokens as in --token-file, and let only their callers make and end engines and drain the server. "
        "Default: whoever is let in may.",
    )
    reflection: str = _setting(
        "auto",
        "auto|on|off",
        values.choice(*REFLECTION),
        "Let clients list the services. Default: auto, on unix sockets and loopback only.",
    )
    metrics: Endpoint | None = _setting(
        None, "HOST:PORT", values.tcp, "Serve Prometheus metrics over plain HTTP here. Default: none are served."
    )
    allow_remote_metrics: bool = _setting(
        False,
        "",
        values.boolean,
        "Allow --metrics on an address that other machines can reach: they are plain HTTP and ask for no token. "
        "Default: that is refused.",
    )
    tracing: bool = _setting(
        False,
        "",
        values.boolean,
        "Make an OpenTelemetry span of every call, as part of the trace that its client is in; where they are sent is "
        "for the OTEL_* names. Needs the extra `otel`. Default: none are made.",
    )
    health: Endpoint | None = _setting(
        None,
        "HOST:PORT",
        values.tcp,
        "Answer health checks, and nothing else, here: without TLS and without a token, as probes ask that know "
        "neither. Default: only where everything else is answered.",
    )
    max_message_bytes: int = _setting(
        16 * 2**20,
        "BYTES",
        values.parse_size,
        "Largest message taken. Default: 16MiB. A larger one is RESOURCE_EXHAUSTED before it is read.",
    )
    max_metadata_bytes: int = _setting(
        16 * 2**10,
        "BYTES",
        values.parse_size,
        "Largest metadata taken with one call. Default: 16KiB. A call with more is RESOURCE_EXHAUSTED.",
    )
    max_concurrent_calls: int = _setting(
        1024,
        "N",
        values.integer(1, 65536),
        "Calls that may be open at once, health checks aside. Default: 1024. More are RESOURCE_EXHAUSTED "
        "(TOO_MANY_CALLS).",
    )
    max_calls_per_connection: int = _setting(
        0,
        "N",
        values.integer(0, 65536),
        "Calls that one connection may have open; a client's further ones wait on its side. Default: 0, as many as the "
        "server takes in all.",
    )
    max_connections: int = _setting(
        1024,
        "N",
        values.integer(1, 65536),
        "Connections that each address may have open. Default: 1024. A further one is closed at once.",
    )
    handshake_timeout: float = _setting(
        20.0,
        "SECONDS",
        values.seconds(0.1, 3600),
        "How long a new connection may take to say its first words, TLS included. Default: 20. Then it is closed.",
    )
    max_connection_idle: float = _setting(
        0.0,
        "SECONDS",
        values.seconds(0, 31_536_000),
        "Close a connection that has had no call for this long; its client makes a new one when it needs it. Default: "
        "0, never.",
    )
    max_connection_age: float = _setting(
        0.0,
        "SECONDS",
        values.seconds(0, 31_536_000),
        "Ask a connection to end after this long, a little more or less; calls on it finish, new ones take a new "
        "connection, and with it a reloaded certificate or another server behind a balancer. Default: 0, never.",
    )
    keepalive_time: float = _setting(
        30.0,
        "SECONDS",
        values.seconds(1, 86400),
        "Ping a connection that has been quiet this long, to find out about machines that have gone. Default: 30.",
    )
    keepalive_timeout: float = _setting(
        10.0,
        "SECONDS",
        values.seconds(1, 3600),
        "Close a connection whose ping is not answered for this long; its calls end as cancelled. Default: 10.",
    )
    min_ping_interval: float = _setting(
        10.0,
        "SECONDS",
        values.seconds(0, 3600),
        "How often clients may ping, also between calls, as during a long prefill. Default: 10. One that pings more is "
        "told to go away.",
    )
    stall_allowance: float = _setting(
        30.0,
        "SECONDS",
        values.seconds(0.1, 86400),
        "How long a client may not read while output waits for it. Default: 30. Then its call ends with "
        "RESOURCE_EXHAUSTED (CLIENT_STALLED).",
    )
    drain_grace: float = _setting(
        30.0,
        "SECONDS",
        values.seconds(0, 86400),
        "How long running calls may go on after SIGTERM or SIGINT. Default: 30. 0 ends them at once; a second signal "
        "does too.",
    )

    # ---- model ----
    name: str = _setting(
        "",
        "NAME",
        values.model_name,
        "The name that calls use for the model. Default: the name it was fetched by, or the file's without its ending.",
    )
    model_dir: Path | None = _setting(
        None,
        "FOLDER",
        values.path,
        "CreateEngine may load the files below this folder, by their path in it. Default: none, only models that have "
        "a name.",
    )
    pretokenizer: str | None = _setting(
        None,
        "NAME",
        values.text,
        "Stands in for the file's tokenizer.ggml.pre, which decides how text is split. Default: the file decides.",
    )

    # ---- engine ----
    decode_mode: str = _setting(
        "batched",
        "auto|batched|per-slot",
        values.choice(*DECODE_MODES),
        "Which way to decode: batched (raw quantised weights, the fast one), per-slot (fp32, the accuracy reference), "
        "or auto (each loads on first use). Default: batched.",
    )
    backend: str = _setting(
        "auto",
        "auto|cpu|cuda",
        values.choice(*BACKENDS),
        "The device. Default: auto, a GPU where there is a usable one.",
    )
    device: int = _setting(0, "N", values.integer(0, 1023), "Which GPU, counted from 0. Default: 0.")
    max_slots: int = _setting(
        8, "N", values.integer(1, 1024), "Requests that decode at once; more wait in the queue. Default: 8."
    )
    max_queue: int = _setting(
        256,
        "N",
        values.integer(0, 1_000_000),
        "Requests that may wait for a slot. Default: 256. More are RESOURCE_EXHAUSTED (QUEUE_FULL).",
    )
    max_seq_len: int = _setting(
        0,
        "N",
        values.integer(0, 2**31 - 1),
        "Longest sequence in tokens, prompt and answer together. Default: 0, the model's context length.",
    )
    allow_long_context: bool = _setting(
        False, "", values.boolean, "Let --max-seq-len exceed the model's context length. Default: that is refused."
    )
    kv_type: str = _setting(
        "f16", "f16|int8|int4", values.choice(*KV_TYPES), "How keys and values are stored. Default: f16."
    )
    kv_memory: int = _setting(
        0,
        "BYTES|auto",
        values.size_or_auto,
        "Size of the KV pool. Default: auto, what the device has left, or a quarter of the memory the process is "
        "granted on a CPU; untouched until used.",
    )
    memory_limit: int = _setting(
        0, "BYTES", values.parse_size, "Most memory the engine may take on its device. Default: 0, no limit."
    )
    block_size: int = _setting(
        64, "N", values.block_size, "Token positions per KV block: 16, 32, 64 or 128. Default: 64."
    )
    prefill_chunk: int = _setting(
        512, "N", values.integer(1, 8192), "Most prompt tokens computed in one step. Default: 512."
    )
    max_token_gap: float = _setting(
        0.2,
        "SECONDS",
        values.seconds(0, 3600),
        "Seconds between two tokens of a stream at most: beside running streams, prompts are computed in pieces that "
        "fit into it, by what steps have taken so far. Default: 0.2. 0: no bound; --prefill-chunk alone counts.",
    )
    threads: int = _setting(
        0,
        "N",
        values.integer(0, 4096),
        "Threads of a CPU engine. Default: 0, the least of affinity, cgroup quota and physical cores.",
    )
    instruction_set: str | None = _setting(
        None,
        "NAME",
        values.choice("scalar", "avx2", "avx512", "neon"),
        "Which CPU kernels: scalar, avx2, avx512 or neon. Default: the best there is. The bytes are the same.",
    )
    stuck_after: float = _setting(
        30.0,
        "SECONDS",
        values.seconds(1, 3600),
        "When the step loop shows no sign of life for this long, health says NOT_SERVING and calls end with "
        "UNAVAILABLE. Default: 30; longer than any one step.",
    )

    # ---- requests ----
    default_max_tokens: int = _setting(
        0,
        "N",
        values.integer(0, 2**31 - 1),
        "Tokens a request may generate when it does not say. Default: 0, what the context leaves.",
    )
    default_queue_time: float = _setting(
        0.0,
        "SECONDS",
        values.seconds(0, 86400),
        "How long a request may wait for a slot when it does not say. Default: 0, no limit. Then it is "
        "RESOURCE_EXHAUSTED (QUEUE_TIMEOUT).",
    )
    max_chat_messages: int = _setting(
        4096, "N", values.integer(1, 1_000_000), "Most messages of one conversation. Default: 4096."
    )

    max_lease: float = _setting(
        3600.0,
        "SECONDS",
        values.seconds(1, 86400),
        "Longest lease of a slot. Default: 3600. A longer one is INVALID_ARGUMENT.",
    )

    # ---- log ----
    log_level: str = _setting(
        "info", "LEVEL", values.choice(*LOG_LEVELS), "debug, info, warning or error. Default: info."
    )
    log_format: str = _setting(
        "text",
        "text|json",
        values.choice(*LOG_FORMATS),
        "Lines for people, or one JSON object a line. Default: text. No line holds a secret, nor a prompt or an answer "
        "unless --log-prompts says so.",
    )
    log_prompts: bool = _setting(
        False, "", values.boolean, "Log the prompt and the outputs of every generation, in full. Default: none of them."
    )

    sources: Mapping[str, str] = field(default_factory=dict, compare=False)
    ignored: tuple[str, ...] = field(default=(), compare=False)
    default_name: str = ""

    @property
    def model_name(self) -> str:
        """The name that calls use for the model."""
        if self.name or self.default_name:
            return self.name or self.default_name
        stem = re.sub(r"[^A-Za-z0-9._-]", "-", self.model.name.removesuffix(".gguf"))
        return stem[:64] or "model"

    @property
    def has_tls(self) -> bool:
        """TCP addresses speak TLS."""
        return self.tls_cert is not None

    def describe(self) -> list[str]:
        """One line for each setting, with where it came from; for the log at start."""
        lines = [f"model = {self.model}"]
        for setting in SETTINGS:
            source = self.sources.get(setting.field, "default")
            value = self.model_name if setting.field == "name" else getattr(self, setting.field)
            lines.append(f"{setting.name} = {_show(value)} ({source})")
        lines += [f"{name} is no setting and is ignored" for name in self.ignored]
        return lines


def _show(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


SETTINGS: tuple[Setting, ...] = tuple(
    Setting(f.name, text, metavar, parse, is_multiple)
    for f in fields(ServeConfig)
    if "setting" in f.metadata
    for metavar, parse, text, is_multiple in (f.metadata["setting"],)
)


# ---------------------------------------------------------------- loading


def load_config(
    model: str | Path,
    flags: Mapping[str, object] | None = None,
    *,
    config_file: Path | None = None,
    environ: Mapping[str, str] | None = None,
    default_name: str = "",
) -> ServeConfig:
    """Put the three spellings together and check them.

    Args:
        model: the GGUF file.
        flags: by field name, as text or as the field's own type; None, an empty list and False for a switch: not given.
        config_file: a TOML file with the settings at its top level.
        environ: where names that begin with XLLM_ are looked up; None: nowhere.
        default_name: a name for the model where no setting gives one; empty: its file's.

    Raises:
        ConfigError: a value out of range, an unknown setting in the file, or settings that contradict each other.
    """
    found: dict[str, Any] = {}
    sources: dict[str, str] = {}
    by_name = {setting.name: setting for setting in SETTINGS}
    for name, value in (_read_toml(config_file) if config_file is not None else {}).items():
        setting = by_name.get(name.replace("_", "-"))
        if setting is None:
            raise ConfigError(f"{config_file}: {name} is no setting; known are {', '.join(sorted(by_name))}")
        if setting.field in found:
            raise ConfigError(f"{config_file}: {name} is {setting.name} in another spelling; give it once")
        found[setting.field] = _parse(setting, value, f"{config_file}: {name}")
        sources[setting.field] = str(config_file)
    by_env = {setting.env: setting for setting in SETTINGS}
    ignored = []
    for name, text in sorted((environ or {}).items()):
        if not name.startswith(_ENV_PREFIX):
            continue
        if name not in by_env:
            ignored.append(name)
            continue
        found[by_env[name].field] = _parse(by_env[name], text, name)
        sources[by_env[name].field] = name
    by_field = {setting.field: setting for setting in SETTINGS}
    for name, value in (flags or {}).items():
        setting = by_field.get(name)
        if setting is None:
            raise ConfigError(f"{name} is no setting")
        if value is None or value == [] or value == () or (setting.is_switch and value is False):
            continue
        found[name] = _parse(setting, value, setting.flag)
        sources[name] = setting.flag
    if not found.get("listen"):
        found["listen"] = (default_endpoint(),)
    config = ServeConfig(Path(model), **found, sources=sources, ignored=tuple(ignored), default_name=default_name)
    _check_addresses(config)
    _check_security(config)
    _check_model_dir(config)
    return config


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not a TOML file: {error}") from None


def _parse(setting: Setting, value: object, spelling: str) -> Any:
    try:
        return setting.parse(value)
    except ValueError as error:
        raise ConfigError(f"{spelling}: {error}") from None


def _check_addresses(config: ServeConfig) -> None:
    seen: list[str] = []
    fixed = [a for a in (*config.listen, config.metrics, config.health) if a is not None and (a.is_unix or a.port != 0)]
    for address in map(str, fixed):
        if address in seen:
            raise ConfigError(f"{address} is given twice; give each address once")
        seen.append(address)


def _check_security(config: ServeConfig) -> None:
    """Refuse what is not safe, and a security setting that would have no effect."""
    tcp = [address for address in config.listen if not address.is_unix]
    exposed = [address for address in tcp if not address.is_loopback]
    for given, other in (("tls_cert", "tls_key"), ("tls_key", "tls_cert"), ("tls_client_ca", "tls_cert")):
        if getattr(config, given) is not None and getattr(config, other) is None:
            raise ConfigError(f"--{given.replace('_', '-')} needs --{other.replace('_', '-')} too")
    if config.has_tls and not tcp:
        raise ConfigError("--tls-cert has no effect: TLS is for TCP, and only unix sockets are listened on")
    if exposed and not config.has_tls and not config.allow_plaintext:
        raise ConfigError(
            f"--listen {exposed[0]}: other machines can reach it, and it would have no TLS; give --tls-cert and "
            "--tls-key, or say --allow-plaintext"
        )
    if config.allow_plaintext and (config.has_tls or not exposed):
        reason = "TLS is on" if config.has_tls else "no address that other machines can reach is listened on"
        raise ConfigError(f"--allow-plaintext has no effect: {reason}; leave it out")
    if config.metrics is not None and not config.metrics.is_loopback and not config.allow_remote_metrics:
        raise ConfigError(
            f"--metrics {config.metrics}: other machines can reach it, and metrics are plain HTTP without a token; say "
            "--allow-remote-metrics, or give a loopback address"
        )
    if config.allow_remote_metrics and (config.metrics is None or config.metrics.is_loopback):
        raise ConfigError("--allow-remote-metrics has no effect: no --metrics address that other machines can reach")
    for name in ("tls_cert", "tls_key", "tls_client_ca", "token_file", "admin_token_file"):
        path = getattr(config, name)
        if path is not None and not path.is_file():
            raise ConfigError(f"--{name.replace('_', '-')} {path}: no such file")


def _check_model_dir(config: ServeConfig) -> None:
    if config.model_dir is not None and not config.model_dir.is_dir():
        raise ConfigError(f"--model-dir {config.model_dir}: no such folder")


def read_tokens(path: Path) -> tuple[str, ...]:
    """Return the bearer tokens of a file: one a line; empty lines and lines that begin with # are skipped.

    Raises ConfigError for a file that cannot be read, others may read, or that holds no token or a short one. The
    message never holds a token.
    """
    try:
        if path.stat().st_mode & 0o077:
            raise ConfigError(f"token file {path}: others can read it; chmod 600 it")
        lines: Sequence[str] = path.read_text(encoding="ascii").splitlines()
    except OSError as error:
        raise ConfigError(f"token file {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"token file {path}: tokens are ASCII") from None
    tokens = tuple(line.strip() for line in lines if line.strip() and not line.startswith("#"))
    for number, token in enumerate(tokens, 1):
        if len(token) < 16 or not token.isprintable() or " " in token:
            raise ConfigError(f"token file {path}: token {number}: expected at least 16 printable characters")
    if not tokens:
        raise ConfigError(f"token file {path}: holds no token")
    return tokens
