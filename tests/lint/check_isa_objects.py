"""Checks that code compiled for one instruction set cannot be picked by the linker for everyone.

An inline or template function that such a file emits is a weak symbol, and the linker keeps one
copy of it for the whole library, perhaps the AVX-512 one: the program then dies on an older CPU,
far from the kernel. What these files define must be strong or local. By hand:
``python tests/lint/check_isa_objects.py build/dev``.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ISA_OBJECT = re.compile(r"_(avx2|avx512|neon)\.cc\.o$")


def weak_functions(nm_output: str) -> list[str]:
    """Return the names of the weak functions in the output of ``nm --demangle --defined-only``."""
    return re.findall(r"^[0-9a-f]+ W (.+)$", nm_output, re.MULTILINE)


def main() -> int:
    """Check every object of the build folder named on the command line."""
    status = 0
    for path in sorted(Path(sys.argv[1]).rglob("*.o")):
        if ISA_OBJECT.search(path.name):
            nm = ["nm", "--demangle", "--defined-only", str(path)]
            output = subprocess.run(nm, capture_output=True, text=True, check=True).stdout
            for name in weak_functions(output):
                print(f"{path.name}: weak symbol {name}; make it static, or keep it out of this file")
                status = 1
    print("instruction set objects: " + ("ok" if status == 0 else "weak symbols found"))
    return status


if __name__ == "__main__":
    sys.exit(main())
