"""The code blocks of README.md and docs/ that say before them that they can be run.

    <!-- run -->               the block below runs, with exit code 0
    <!-- run: fails -->        … with another one: it shows an error
    <!-- run: slow -->         … only with -m slow
    <!-- run: slow, 0 or 1 --> … with one of these exit codes: the machine's speed decides
    <!-- run: save as x.py --> it is written to that file, for the blocks after it

A page's blocks run in their order, in one folder. As a program, `python docs_blocks.py PAGE…` runs
those of pages that are not slow, with the Python that runs it: so tools/packages.py does what a new
user would.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(
    r"^<!-- run(?:: (?P<how>[^>]*?))? -->\n\n?```(?P<language>\w+)\n(?P<text>.*?)^```$", re.M | re.S
)
TIMEOUT_S = 100


@dataclass(frozen=True)
class Block:
    """A code block, and how it is to be run."""

    page: str
    line: int
    language: str
    text: str
    how: str

    @property
    def file(self) -> str | None:
        return self.how.removeprefix("save as ") if self.how.startswith("save as ") else None

    @property
    def slow(self) -> bool:
        return self.how.startswith("slow")

    @property
    def exit_codes(self) -> range:
        if self.how == "fails":
            return range(1, 256)
        return range(2 if self.how == "slow, 0 or 1" else 1)


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    return [
        Block(
            page.name,
            text.count("\n", 0, found.start()) + 1,
            found["language"],
            found["text"],
            found["how"] or "",
        )
        for found in BLOCK.finditer(text)
    ]


def environment(folder: Path) -> dict[str, str]:
    """`python` and `jaxring` are those of this interpreter, whatever PATH says."""
    tools = folder / ".bin"
    tools.mkdir(exist_ok=True)
    for name, command in (("python", '"$@"'), ("jaxring", '-m jaxring "$@"')):
        tool = tools / name
        tool.write_text(f'#!/bin/sh\nexec "{sys.executable}" {command}\n')
        tool.chmod(0o755)
    kept = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAXRING_TIMEOUT_S")}
    return {**kept, "PATH": f"{tools}:{os.environ['PATH']}", "JAX_PLATFORMS": "cpu"}


def run(block: Block, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs the block; AssertionError with its output if it ends otherwise than it says."""
    command = ["bash", "-euo", "pipefail", "-c", block.text]
    if block.language == "python":
        script = folder / f"block_{block.line}.py"
        script.write_text(block.text)
        command = [sys.executable, str(script)]
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment(folder),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
    )
    expected = "an error" if block.how == "fails" else f"exit code in {[*block.exit_codes]}"
    assert done.returncode in block.exit_codes, (
        f"{block.page}:{block.line}: expected {expected}, got exit code {done.returncode}:\n"
        f"{block.text}\n{done.stdout}"
    )
    return done


def run_page(page: Path, folder: Path, slow: bool = False) -> int:
    """Runs a page's blocks, the slow ones or the others; how many it were."""
    count = 0
    for block in blocks(page):
        if block.file:
            (folder / block.file).write_text(block.text)
        elif block.slow == slow:
            run(block, folder)
            count += 1
    return count


if __name__ == "__main__":
    for name in sys.argv[1:]:
        with tempfile.TemporaryDirectory(prefix="jaxring-docs-") as place:
            print(f"{name}: {run_page(Path(name), Path(place))} blocks")
