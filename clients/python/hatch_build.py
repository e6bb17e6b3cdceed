"""Build hook: generate the stubs before they are packed, and put the protos into a source distribution."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class StubsHook(BuildHookInterface[Any]):
    """Runs generate_stubs.py; see there."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Generate what is out of date. Raises GenerationError when it cannot, and the build fails."""
        sys.path.insert(0, self.root)
        try:
            import generate_stubs

            generate_stubs.generate()
        finally:
            sys.path.remove(self.root)
        if self.target_name == "sdist":
            protos = generate_stubs.find_protos()
            for proto in sorted((protos / "xllm" / "v1").glob("*.proto")):
                build_data["force_include"][str(proto)] = f"protos/xllm/v1/{Path(proto).name}"
