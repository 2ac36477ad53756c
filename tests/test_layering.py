"""Holds docs/design.md's layers by reading #includes and imports; nothing is compiled or imported.

core <- algorithms <- {host, cuda} <- communicator <- ffi <- cuda_ffi <- _src <- public Python
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Layer -> the layers of xla_ffi/ whose headers it may include, besides its own.
CPP_LAYERS = {
    "core": set(),
    "algorithms": {"core"},
    "host": {"core", "algorithms"},
    "cuda": {"core", "algorithms"},
    "transport": {"core"},
    "communicator": {"core", "algorithms", "host", "cuda", "transport"},
    "ffi": {"core", "algorithms", "host", "cuda", "communicator"},
    # Of a module of its own, so that nothing else may see it.
    "cuda_ffi": {"core", "algorithms", "cuda", "communicator", "ffi"},
}
# Layers that know nothing but C++ itself: no operating system, no CUDA runtime, no intrinsics.
CPP_PURE = {"core", "algorithms"}
# What only these may see.
CPP_FFI = {"ffi", "cuda_ffi"}
CPP_FFI_ONLY = re.compile(r"(xla|nanobind|pybind11)/|Python\.h$|absl/|tsl/")

# Below jaxring/_src: these hold state that the rules of _src need.
PY_BELOW_SRC = {"jaxring.errors", "jaxring.config", "jaxring.bootstrap", "jaxring.communicator"}
PY_NATIVE_USERS = {
    "jaxring._src.custom_call",
    "jaxring._src.engine",
    "jaxring._src.native_facts",
    "jaxring.communicator",
}
# CUDA's headers: of runtime and driver in two files, so that the rest can be tested without.
CUDA_HEADERS = re.compile(r"(cuda|nccl)[a-z_]*\.h$")
CUDA_RUNTIME_USERS = {
    "xla_ffi/cuda_ffi/cuda_multicast.cc",
    "xla_ffi/cuda_ffi/cuda_runtime.cc",
}
PY_CUDA_USERS = {"jaxring._src.cuda"}
PY_PRIVATE_JAX_USERS = {"jaxring._src._compat"}


def cpp_violations(root: Path) -> Iterator[str]:
    for path in sorted((root / "xla_ffi").rglob("*")):
        if path.suffix not in {".h", ".cc", ".cu", ".cuh"}:
            continue
        where = path.relative_to(root)
        layer = where.parts[1].split(".")[0]
        if layer not in CPP_LAYERS:
            yield f"{where}: {layer} is no layer; known: {', '.join(CPP_LAYERS)}"
            continue
        for header in re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', path.read_text(), re.M):
            problem = cpp_include_problem(layer, header) or cuda_problem(layer, where, header)
            if problem:
                yield f"{where}: includes {header}: {problem}"


def cpp_include_problem(layer: str, header: str) -> str | None:
    if header.startswith("xla_ffi/"):
        target = header.split("/")[1].split(".")[0]
        if target != layer and target not in CPP_LAYERS[layer]:
            return f"{layer} must not see {target}"
        return None
    if CPP_FFI_ONLY.match(header) and layer not in CPP_FFI:
        return "only ffi sees XLA and Python"
    if layer in CPP_PURE and not re.fullmatch(r"[a-z_]+", header):
        return f"{layer} includes the C++ standard library only"
    return None


def cuda_problem(layer: str, where: Path, header: str) -> str | None:
    if not CUDA_HEADERS.match(header) or str(where) in CUDA_RUNTIME_USERS:
        return None
    if layer == "cuda" and where.suffix in {".cu", ".cuh"}:
        return None
    return "only kernels and cuda_ffi/cuda_*.cc include CUDA's headers"


def module_name(root: Path, path: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(root: Path, path: Path, modules: set[str]) -> Iterator[tuple[str, int]]:
    """(imported module, line) of each import, lazy ones too, but not those for type checkers."""
    tree = ast.parse(path.read_text())
    for_types = {
        id(child)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for child in ast.walk(node)
    }
    package = module_name(root, path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    for node in ast.walk(tree):
        if id(node) in for_types:
            continue
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join(base + ([node.module] if node.module else []))
            for alias in node.names:
                inner = f"{source}.{alias.name}"
                is_module = inner in modules or alias.name in {"_native", "_cuda", "_src"}
                yield inner if is_module else source, node.lineno


def python_violations(root: Path) -> Iterator[str]:
    files = {
        module_name(root, path): path
        for folder in ("jaxring", "pytest_jaxring", "examples", "tests")
        for path in sorted((root / folder).rglob("*.py"))
    }
    edges: dict[str, set[str]] = {}
    for module, path in files.items():
        edges[module] = set()
        for target, line in imports(root, path, set(files)):
            edges[module].add(target)
            problem = python_import_problem(module, target)
            if problem:
                yield f"{path.relative_to(root)}:{line}: imports {target}: {problem}"
    cycle = find_cycle({m: t for m, t in edges.items() if m.startswith("jaxring")})
    if cycle:
        yield f"import cycle: {' -> '.join(cycle)}"


def python_import_problem(module: str, target: str) -> str | None:
    private = re.match(r"(jax\._src|jaxlib)(\.|$)", target)
    if private and module not in PY_PRIVATE_JAX_USERS:
        return "private parts of JAX are used in jaxring/_src/_compat.py only"
    if not module.startswith("jaxring"):
        return None
    if target.startswith("jaxring._native") and module not in PY_NATIVE_USERS:
        return f"only {', '.join(sorted(PY_NATIVE_USERS))} use the native module"
    if target.startswith("jaxring._cuda") and module not in PY_CUDA_USERS:
        return "only _src/cuda.py uses the CUDA module"
    if target.startswith("jaxring.cli") and not module.startswith(
        ("jaxring.cli", "jaxring.__main")
    ):
        return "nothing depends on the command line"
    is_low = module.startswith("jaxring._src") or module in PY_BELOW_SRC
    may_see = target.startswith(("jaxring._src", "jaxring._native")) or target in PY_BELOW_SRC
    if is_low and target.split(".")[0] == "jaxring" and not may_see:
        return "public modules depend on _src, never the reverse"
    return None


def find_cycle(edges: dict[str, set[str]]) -> list[str] | None:
    """Any cycle of modules, as the list of its members, the first one repeated."""
    done: set[str] = set()

    def visit(module: str, road: list[str]) -> list[str] | None:
        if module in road:
            return [*road[road.index(module) :], module]
        if module in done or module not in edges:
            return None
        for target in sorted(edges[module]):
            cycle = visit(target, [*road, module])
            if cycle:
                return cycle
        done.add(module)
        return None

    return next((c for module in sorted(edges) if (c := visit(module, []))), None)


def test_cpp_layers():
    assert list(cpp_violations(ROOT)) == []


def test_python_layers():
    assert list(python_violations(ROOT)) == []


@pytest.mark.parametrize(
    ("file", "text", "expected"),
    [
        (
            "xla_ffi/core/a.h",
            '#include "xla_ffi/algorithms/ring.h"',
            "core must not see algorithms",
        ),
        ("xla_ffi/core/a.h", "#include <sys/mman.h>", "standard library only"),
        ("xla_ffi/algorithms/a.h", '#  include "xla_ffi/host/wait.h"', "must not see host"),
        ("xla_ffi/algorithms/a.h", "#include <cuda_runtime.h>", "standard library only"),
        ("xla_ffi/host/a.cc", '#include "xla_ffi/transport/shm.h"', "host must not see transport"),
        ("xla_ffi/transport/a.cc", '#include "xla_ffi/host/wait.h"', "must not see host"),
        ("xla_ffi/communicator.cc", '#include "xla/ffi/api/ffi.h"', "only ffi sees XLA"),
        ("xla_ffi/host/a.h", "#include <nanobind/nanobind.h>", "only ffi sees XLA"),
        ("xla_ffi/ffi/a.cc", '#include "xla_ffi/transport/shm.h"', "ffi must not see transport"),
        ("xla_ffi/ffi/a.cc", '#include "xla_ffi/cuda_ffi/seat.h"', "ffi must not see cuda_ffi"),
        ("xla_ffi/cuda_ffi/a.cc", '#include "xla_ffi/transport/shm.h"', "must not see transport"),
        ("xla_ffi/cuda_ffi/a.cc", "#include <cuda_runtime_api.h>", "CUDA's headers"),
        ("xla_ffi/communicator/a.cc", "#include <cuda_runtime.h>", "CUDA's headers"),
        ("xla_ffi/cuda_ffi/a.cc", "#include <nccl.h>", "CUDA's headers"),
        ("xla_ffi/extras/a.h", "", "extras is no layer"),
        ("jaxring/_src/a.py", "from jaxring import _native", "use the native module"),
        ("jaxring/optim.py", "import jaxring._native as n", "use the native module"),
        ("jaxring/optim.py", "def f():\n    from . import _native", "use the native module"),
        ("jaxring/_src/custom_call.py", "from jaxring import _cuda", "uses the CUDA module"),
        ("jaxring/_src/a.py", "import jax._src.core", "private parts of JAX"),
        ("tests/test_a.py", "from jax._src import mesh", "private parts of JAX"),
        ("jaxring/_src/a.py", "from jaxlib import xla_client", "private parts of JAX"),
        ("jaxring/_src/a.py", "import jaxring", "never the reverse"),
        ("jaxring/_src/a.py", "from ..optim import x", "never the reverse"),
        ("jaxring/config.py", "from jaxring.testing import x", "never the reverse"),
        ("jaxring/testing.py", "from jaxring.cli.run import x", "command line"),
        ("jaxring/config.py", "import jaxring._src.config_user", "import cycle"),
    ],
)
def test_a_planted_violation_is_found(tmp_path, file, text, expected):
    for folder in ("xla_ffi", "jaxring/_src", "tests"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "jaxring/_src/config_user.py").write_text("from jaxring.config import config")
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text(text + "\n")
    found = [*cpp_violations(tmp_path), *python_violations(tmp_path)]
    assert len(found) == 1
    assert expected in found[0]


def test_what_is_allowed_passes(tmp_path):
    allowed = {
        "xla_ffi/core/a.h": '#include <vector>\n#include "xla_ffi/core/b.h"',
        "xla_ffi/host/a.cc": '#include <sys/mman.h>\n#include "xla_ffi/algorithms/ring.h"',
        "xla_ffi/communicator/engine.cc": '#include "xla_ffi/transport/shm.h"',
        "xla_ffi/cuda_ffi/a.cc": '#include "xla/ffi/api/ffi.h"\n#include "xla_ffi/ffi/b.h"',
        "xla_ffi/cuda_ffi/cuda_runtime.cc": "#include <cuda_runtime_api.h>",
        "xla_ffi/cuda/a.cu": "#include <cuda_runtime.h>",
        "xla_ffi/ffi/a.cc": '#include <nanobind/nanobind.h>\n#include "xla_ffi/host/a.h"',
        "jaxring/__init__.py": "from ._src.custom_call import x\nfrom . import config",
        "jaxring/_src/custom_call.py": "from jaxring import _native, config",
        "jaxring/_src/_compat.py": "import jax._src.core",
        "jaxring/config.py": "import jax\nfrom jaxring import errors",
        "jaxring/errors.py": (
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import jaxring.testing"
        ),
        "jaxring/cli/bench.py": "import jaxring",
        "tests/test_a.py": "import jaxring",
    }
    for file, text in allowed.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text + "\n")
    assert [*cpp_violations(tmp_path), *python_violations(tmp_path)] == []
