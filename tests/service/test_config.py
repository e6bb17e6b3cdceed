"""Settings: three spellings, one meaning, and nothing unsafe or without effect gets through."""

from __future__ import annotations

from pathlib import Path

import pytest

from xllm_client import default_endpoint
from xllm_service.config import SETTINGS, ConfigError, load_config, read_tokens
from xllm_service.setting_values import parse_size


def test_flags_win_over_the_environment_which_wins_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "xllm.toml"
    file.write_text('max-slots = 1\nmax-queue = 1\nkv-memory = "2GiB"\n')
    config = load_config(
        "m.gguf", {"max_slots": "3"}, config_file=file, environ={"XLLM_MAX_SLOTS": "2", "XLLM_MAX_QUEUE": "2"}
    )
    assert (config.max_slots, config.max_queue, config.kv_memory) == (3, 2, 2 * 2**30)
    assert config.sources == {"max_slots": "--max-slots", "max_queue": "XLLM_MAX_QUEUE", "kv_memory": str(file)}
    assert "max-slots = 3 (--max-slots)" in config.describe()


def test_the_default_address_is_the_clients() -> None:
    assert load_config("m.gguf").listen == (default_endpoint(),)


def test_every_setting_has_three_spellings_and_a_text() -> None:
    for setting in SETTINGS:
        assert setting.flag.startswith("--") and setting.env.startswith("XLLM_")
        assert setting.help.endswith(".")


def test_a_switch_is_off_unless_given() -> None:
    assert load_config("m.gguf", {"allow_long_context": False}).sources == {}
    assert load_config("m.gguf", {"allow_long_context": True}).allow_long_context
    assert load_config("m.gguf", environ={"XLLM_ALLOW_LONG_CONTEXT": "yes"}).allow_long_context


def test_names_that_are_no_setting_are_told_not_obeyed() -> None:
    config = load_config("m.gguf", environ={"XLLM_SERVICE_HOST": "10.0.0.1", "PATH": "x"})
    assert config.ignored == ("XLLM_SERVICE_HOST",)
    assert "XLLM_SERVICE_HOST is no setting and is ignored" in config.describe()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"max_slots": "0"}, "--max-slots: expected a whole number from 1 to 1024, found 0"),
        ({"max_slots": "many"}, "--max-slots: expected a whole number"),
        ({"kv_memory": "-1"}, "--kv-memory: expected bytes"),
        ({"kv_type": "f64"}, "--kv-type: expected one of f16, int8, int4"),
        ({"block_size": 48}, "--block-size: expected one of 16, 32, 64, 128"),
        ({"drain_grace": "nan"}, "--drain-grace: expected seconds"),
        ({"listen": ["nowhere"]}, "--listen: 'nowhere' is no address"),
        ({"metrics": "unix:/tmp/m"}, "--metrics: expected HOST:PORT"),
        ({"metrics": "0.0.0.0:9"}, "--metrics 0.0.0.0:9: other machines can reach it"),
        ({"metrics": "127.0.0.1:9", "allow_remote_metrics": True}, "--allow-remote-metrics has no effect"),
        ({"health": "unix:/tmp/h"}, "--health: expected HOST:PORT"),
        ({"health": "127.0.0.1:5", "listen": ["127.0.0.1:5"]}, "127.0.0.1:5 is given twice"),
        ({"keepalive_time": "0.2"}, "--keepalive-time: expected seconds from 1 to 86400"),
        ({"max_connections": "0"}, "--max-connections: expected a whole number from 1 to 65536"),
        ({"name": "a b"}, "--name: expected at most 64"),
        ({"listen": ["127.0.0.1:5", "127.0.0.1:5"]}, "127.0.0.1:5 is given twice"),
        ({"colour": "red"}, "colour is no setting"),
    ],
)
def test_a_wrong_value_is_named(flags: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config("m.gguf", flags)
    assert message in str(caught.value)


@pytest.mark.parametrize("text", ["colour = 1", "max-slots = 0", "max-slots = true", "not toml"])
def test_a_wrong_file_is_named(tmp_path: Path, text: str) -> None:
    file = tmp_path / "xllm.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"xllm\.toml"):
        load_config("m.gguf", config_file=file)


@pytest.mark.parametrize("address", ["0.0.0.0:1", "[::]:1", "10.1.2.3:1", "example.org:1"])
def test_other_machines_need_tls_or_an_explicit_word(address: str) -> None:
    with pytest.raises(ConfigError, match="--allow-plaintext"):
        load_config("m.gguf", {"listen": ["unix:/tmp/x", address]})
    assert load_config("m.gguf", {"listen": [address], "allow_plaintext": True})


@pytest.mark.parametrize("address", ["unix:/tmp/x", "127.0.0.1:1", "[::1]:1", "localhost:1"])
def test_local_addresses_need_nothing(address: str) -> None:
    assert load_config("m.gguf", {"listen": [address]})


def test_security_settings_without_effect_are_refused(tmp_path: Path) -> None:
    pem = tmp_path / "x.pem"
    pem.write_text("x")
    for flags, message in (
        ({"tls_cert": pem}, "needs --tls-key"),
        ({"tls_key": pem}, "needs --tls-cert"),
        ({"tls_client_ca": pem}, "needs --tls-cert"),
        ({"tls_cert": pem, "tls_key": pem, "listen": ["unix:/tmp/x"]}, "only unix sockets"),
        ({"allow_plaintext": True}, "has no effect"),
        ({"allow_plaintext": True, "listen": ["0.0.0.0:1"], "tls_cert": pem, "tls_key": pem}, "TLS is on"),
        ({"token_file": tmp_path / "none"}, "no such file"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_config("m.gguf", flags)


def test_token_files_are_private_and_never_quoted(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text("# mine\n0123456789abcdef\n\nanother-long-token-1\n")
    file.chmod(0o600)
    assert read_tokens(file) == ("0123456789abcdef", "another-long-token-1")
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        read_tokens(file)
    file.chmod(0o600)
    for text in ("short-secret", "# nothing\n", "has a space in it!", "sécurité-sécurité"):
        file.write_text(text)
        with pytest.raises(ConfigError) as caught:
            read_tokens(file)
        assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "size"), [("1500", 1500), ("2k", 2000), ("2KiB", 2048), ("1.5GiB", 3 * 2**29), ("0", 0)]
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


def test_a_model_that_has_a_name_goes_by_it_unless_another_is_set() -> None:
    assert load_config("cache/x.gguf", default_name="smollm2-135m").model_name == "smollm2-135m"
    assert load_config("cache/x.gguf", {"name": "mine"}, default_name="smollm2-135m").model_name == "mine"


@pytest.mark.parametrize("path", ["/models/Tiny Model.Q4_1.gguf", "/models/.gguf"])
def test_the_model_has_a_usable_name(path: str) -> None:
    assert load_config(path).model_name in ("Tiny-Model.Q4_1", "model")


def test_a_setting_is_given_once_in_a_file_whatever_its_spelling(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text("max-slots = 4\nmax_slots = 5\n")
    with pytest.raises(ConfigError, match="max_slots is max-slots in another spelling"):
        load_config("m.gguf", config_file=file)
