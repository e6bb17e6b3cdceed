"""Each of the 39 faults has its row in README.md, and each row names a test that exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

HERE = Path(__file__).parent


def rows() -> dict[int, tuple[str, str]]:
    """The file and the test that each row names."""
    found = {}
    for line in (HERE / "README.md").read_text().splitlines():
        match = re.fullmatch(r"\| (\d+) \|.*\| `([\w/]+\.py)::(\w+)(?:\[\w+\])?` \|", line)
        if match is not None:
            found[int(match[1])] = (match[2], match[3])
    return found


def test_every_entry_has_its_test() -> None:
    found = rows()
    assert sorted(found) == list(range(1, 40))
    for file, name in found.values():
        tree = ast.parse((HERE.parent / file).read_text())
        functions = {node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))}
        assert name in functions, f"{file} has no {name}"
