"""The manifests of deploy/: valid for the API they are written for, and true of this server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from xllm_service.config import ServeConfig, load_config

MANIFESTS = sorted((Path(__file__).parents[2] / "deploy" / "kubernetes").glob("*.yaml"))
VERSIONS = ("1.27", "1.34")  # the first one whose gRPC probes are stable, and a recent one


def documents(path: Path) -> list[Any]:
    return [one for one in yaml.safe_load_all(path.read_text()) if one is not None]


def pod() -> Any:
    (found,) = documents(MANIFESTS[0])
    return found["spec"]


def server() -> Any:
    (found,) = (one for one in pod()["containers"] if one["name"] == "xllm")
    return found


def settings(model_file: Path) -> ServeConfig:
    """What the server makes of the manifest's arguments."""
    verb, _, *flags = server()["args"]
    assert verb == "serve"
    given: dict[str, Any] = {}
    for flag in flags:
        name, _, value = flag.removeprefix("--").partition("=")
        given.setdefault(name.replace("-", "_"), []).append(value)
    flat = {name: values if name == "listen" else values[0] for name, values in given.items()}
    return load_config(
        model_file,
        {},
        environ={f"XLLM_{name.upper()}": ",".join(v) if isinstance(v, list) else v for name, v in flat.items()},
    )


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
@pytest.mark.parametrize("version", VERSIONS)
def test_a_manifest_is_valid(path: Path, version: str) -> None:
    for document in documents(path):
        kubernetes_validate.validate(document, version, strict=True)


def test_a_misspelt_key_would_be_found() -> None:
    (manifest,) = documents(MANIFESTS[0])
    manifest["spec"]["containers"][0]["readinesProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="readinesProbe"):
        kubernetes_validate.validate(manifest, VERSIONS[-1], strict=True)


def test_its_arguments_are_settings_and_fit_the_rest_of_the_pod(model_file: Path) -> None:
    config = settings(model_file)
    probe = server()["readinessProbe"]["grpc"]
    assert config.health is not None and int(str(config.health).rpartition(":")[2]) == probe["port"]
    assert pod()["terminationGracePeriodSeconds"] > config.drain_grace
    mounts = {mount["mountPath"] for mount in server()["volumeMounts"]}
    (listen,) = [str(one) for one in config.listen]
    assert any(listen.startswith(f"unix:{path}/") for path in mounts)
    (app,) = (one for one in pod()["containers"] if one["name"] == "app")
    assert {"name": "XLLM_ENDPOINT", "value": listen} in app["env"]
    assert mounts & {mount["mountPath"] for mount in app["volumeMounts"]}
    volumes = {volume["name"] for volume in pod()["volumes"]}
    assert all(mount["name"] in volumes for one in pod()["containers"] for mount in one["volumeMounts"])
