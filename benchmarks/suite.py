"""Runs the whole table and writes it into docs/performance.md: `make bench`.

    python benchmarks/suite.py [--only WORD] [--cpp BUILD_FOLDER] [--out build/bench]

Each section is one `jaxring bench` command, whose JSON lands in the output folder; the tables are
made from these files, so that a section can be measured again by itself.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "performance.md"
MARKERS = ("<!-- measured: begin -->", "<!-- measured: end -->")
K, M = 1 << 10, 1 << 20


@dataclass(frozen=True)
class Section:
    """One command and what it must reach.

    Attributes:
      title: of the table.
      arguments: of `jaxring bench`, without --json.
      targets: (largest size in bytes, least ratio), ascending.
    """

    title: str
    arguments: str
    targets: tuple[tuple[int, float], ...] = field(default=())

    @property
    def name(self) -> str:
        return re.sub(r"[^a-z0-9]+", "-", self.title.lower()).strip("-")

    def target(self, size_bytes: int) -> float | None:
        return next((least for largest, least in self.targets if size_bytes <= largest), None)


def others() -> list[Section]:
    """reduce_scatter and the rest: at or above lax at every size."""
    sections = []
    for collective in ("reduce_scatter", "all_gather", "all_to_all", "broadcast", "ppermute"):
        for where, ranks in (("2 processes", "-n 2"), ("4 devices", "-n 1 --devices 4")):
            sizes = "-b 64 -e 16M -f 64 --rounds 5"
            sections.append(
                Section(
                    f"{collective}, {where}",
                    f"{collective} {ranks} {sizes} --against lax",
                    ((16 * M, 1.0),),
                )
            )
    return sections


def devices(count: int) -> list[Section]:
    """One process: whole calls, and the slope within one jit."""
    ranks = f"-n 1 --devices {count}"
    return [
        Section(
            f"allreduce, one process, {count} devices, whole calls",
            f"allreduce {ranks} -b 16 -e 64M -f 8 --rounds 5 --against lax",
            ((8 * M, 0.95), (32 * M, 1.6), (64 * M, 2.6)),
        ),
        Section(
            f"allreduce, one process, {count} devices, per operation within one jit",
            f"allreduce {ranks} -b 16 -e 1M -f 16 --slope 17 --rounds 10 --against lax",
            ((16, 15.0 if count == 2 else 10.0), (64 * K, 4.0), (1 * M, 1.7)),
        ),
    ]


SECTIONS = [
    Section(
        "allreduce, 2 processes on a mesh",
        "allreduce -n 2 -b 16 -e 64M -f 4 --rounds 5 --against lax",
        ((16, 40), (1 * K, 30), (256 * K, 15), (1 * M, 10), (16 * M, 7), (64 * M, 6.5)),
    ),
    Section(
        "allreduce, 2 processes, communicator mode",
        "allreduce -n 2 --mode communicator -b 16 -e 64M -f 8 --rounds 5 --against lax",
        ((16, 40), (1 * K, 30), (256 * K, 15), (1 * M, 10), (16 * M, 7), (64 * M, 6.5)),
    ),
    Section(
        "allreduce, 2 processes, in place",
        "allreduce -n 2 -b 16M -e 64M -f 4 --rounds 5 --outputs in-place --against lax",
        ((16 * M, 7), (64 * M, 12)),
    ),
    Section(
        "allreduce, 4 processes",
        "allreduce -n 4 -b 16 -e 16M -f 32 --rounds 4 --against lax",
        ((16, 10), (16 * K, 30), (1 * M, 15), (64 * M, 4.5)),
    ),
    Section(
        "allreduce, 8 processes",
        "allreduce -n 8 -b 16 -e 1M -f 256 --rounds 2 --against lax",
    ),
    *devices(2),
    *devices(4),
    *devices(8),
    Section(
        "allreduce of 161 leaves, 2 processes",
        "allreduce -n 2 -b 102M -e 102M --leaves 161 --rounds 4 --against lax",
        ((102 * M, 5),),
    ),
    *others(),
]


def measure(section: Section, file: Path, patience_s: float) -> None:
    command = [sys.executable, "-m", "jaxring", "bench", *section.arguments.split()]
    command += ["--patience-s", str(patience_s)]
    print(f"# {section.title}: jaxring bench {section.arguments}", flush=True)
    start = time.perf_counter()
    done = subprocess.run([*command, "--json", str(file)], cwd=file.parent, check=False)
    print(f"# {time.perf_counter() - start:.0f} s, exit code {done.returncode}", flush=True)


def size(size_bytes: int) -> str:
    for unit, text in ((M, "M"), (K, "K")):
        if size_bytes % unit == 0:
            return f"{size_bytes // unit}{text}"
    return str(size_bytes)


def table(section: Section, document: dict[str, Any]) -> str:
    machine, peer = document["environment"], document["spec"]["against"]
    trips = " and ".join(f"{ns:.0f}" for ns in machine["cache_line_round_trip_ns"])
    lines = [
        f"### {section.title}",
        "",
        f"`jaxring bench {section.arguments}`; {machine['date'][:16]}, round trip {trips} ns",
        "",
        f"| bytes | jaxring µs | quartiles | {peer} µs | ratio | target |",
        "|---|---|---|---|---|---|",
    ]
    for row in document["rows"]:
        least = section.target(row["size_bytes"])
        low, high = row["spread_us"]["jaxring"]
        verdict = "" if least is None else f"{least:g}" + ("" if row["ratio"] >= least else " ✗")
        met_slow_mode = f" ({row['slow_rounds']} slow)" if row["slow_rounds"] else ""
        lines.append(
            f"| {size(row['size_bytes'])}{met_slow_mode} | {row['time_us']:.1f} |"
            f" {low:.1f}–{high:.1f} | {row['against_us']:.1f} | {row['ratio']:.2f} | {verdict} |"
        )
    return "\n".join(lines)


def engine_table(build: Path) -> str:
    """google-benchmark's programs and the instruction counts."""
    texts = []
    for program, pattern in (
        ("engine_benchmark", "allreduce/ranks:2"),
        ("kernels_benchmark", "operands:2"),
    ):
        command = [str(build / program), f"--benchmark_filter={pattern}", "--benchmark_format=json"]
        run = subprocess.run(
            [*command, "--benchmark_min_time=0.1"], capture_output=True, text=True, check=True
        )
        texts += ["", f"### {program}", "", "| benchmark | µs | GB/s |", "|---|---|---|"]
        for row in json.loads(run.stdout)["benchmarks"]:
            name = row["name"].removesuffix("/real_time")
            rate = row["bytes_per_second"] / 1e9
            texts.append(f"| {name} | {row['real_time'] / 1e3:.2f} | {rate:.2f} |")
    texts.append("")
    for layout in ("processes", "devices"):
        count = [str(ROOT / "benchmarks" / "small_message_path.sh"), str(build), layout]
        done = subprocess.run(count, capture_output=True, text=True, check=False)
        texts.append(f"- {done.stdout.strip()}" if done.returncode == 0 else f"- {done.stderr}")
    return "\n".join(texts)


def head(documents: list[dict[str, Any]]) -> str:
    machine = documents[0]["environment"]
    versions = ", ".join(f"{name} {machine[name]}" for name in ("jaxring", "jax", "jaxlib"))
    return (
        f"{machine['cores']} cores of {machine['cpu']}; Python {machine['python']}, {versions}."
        " Medians; ✗ marks what misses its target, *n slow* that so many rounds met the slow mode"
        " when patience was over."
    )


def write_page(out: Path) -> None:
    found = [(s, out / f"{s.name}.json") for s in SECTIONS]
    if missing := [s.title for s, file in found if not file.exists()]:
        print(f"# the page stays as it is: {len(missing)} sections have not been measured here")
        return
    documents = [(s, json.loads(file.read_text())) for s, file in found]
    parts = [head([d for _, d in documents]), *(table(s, d) for s, d in documents)]
    engine = out / "engine.md"
    if engine.exists():
        parts.append(engine.read_text().strip())
    before, rest = PAGE.read_text().split(MARKERS[0])
    after = rest.split(MARKERS[1])[1]
    PAGE.write_text(before + "\n\n".join([MARKERS[0], *parts, MARKERS[1]]) + after)
    print(f"# {PAGE.relative_to(ROOT)} is written")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="sections whose title holds this")
    parser.add_argument("--patience-s", type=float, default=15, help="see jaxring bench --help")
    parser.add_argument("--cpp", type=Path, help="folder of engine_benchmark, to run it too")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "bench")
    options = parser.parse_args()
    if not any(options.only in section.title for section in SECTIONS):
        parser.error(f"--only: no section's title holds {options.only!r}")
    options.out.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    for section in SECTIONS:
        if options.only in section.title:
            measure(section, options.out / f"{section.name}.json", options.patience_s)
    if options.cpp:
        (options.out / "engine.md").write_text(engine_table(options.cpp) + "\n")
    print(f"# {time.perf_counter() - start:.0f} s in all")
    write_page(options.out)


if __name__ == "__main__":
    main()
