"""What an installation costs: import time on top of JAX, bytes on disk. `jaxring info --cost`."""

from __future__ import annotations

import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import jaxring

_RUNS = 5
# In a process of its own, since this one has imported everything. JAX first, which a program that
# uses jaxring pays for anyway.
_PROGRAM = """
import time
begin = time.perf_counter()
import jax, jax.numpy
middle = time.perf_counter()
import jaxring
print(middle - begin, time.perf_counter() - middle)
"""


def measure() -> dict[str, Any]:
    """Seconds (medians of 5 processes) and bytes."""
    times = [_import_times_s() for _ in range(_RUNS)]
    package = Path(jaxring.__file__).parent
    files = [f for f in package.rglob("*") if f.is_file() and "__pycache__" not in f.parts]
    native = [f for f in files if f.suffix == ".so"]
    return {
        "import jax [s]": round(statistics.median(t[0] for t in times), 3),
        "import jaxring on top [s]": round(statistics.median(t[1] for t in times), 3),
        "installed [MB]": round(sum(f.stat().st_size for f in files) / 1e6, 2),
        "of which native modules [MB]": {f.name: round(f.stat().st_size / 1e6, 2) for f in native},
    }


def _import_times_s() -> tuple[float, float]:
    # -P: `jaxring` must not be looked for in the current folder, which may be a source tree.
    command = [sys.executable, "-P", "-c", _PROGRAM]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    jax_s, jaxring_s = text.split()
    return float(jax_s), float(jaxring_s)
