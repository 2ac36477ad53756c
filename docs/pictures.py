"""Pictures and tables for the cells of pages: nothing is drawn by hand."""

from __future__ import annotations

import html
import io
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from schedules import Hop, costs, depth, hops

COLORS = ("#4c72b0", "#dd8452", "#55a868", "#c44e52", "#8172b3", "#937860", "#da8bc3", "#8c8c8c")


def draw_schedule(messages: Sequence[Hop], title: str, ranks: int = 4) -> Figure:
    """Ranks from top to bottom, steps from left to right; a colour for each block."""
    figure = Figure(figsize=(max(3.0, 1.2 + 0.75 * depth(messages)), 0.55 * ranks + 0.7))
    axes = figure.add_subplot()
    blocks = sorted({hop.offset for hop in messages})
    for hop in messages:
        color = COLORS[blocks.index(hop.offset) % len(COLORS)]
        style = {"arrowstyle": "-|>", "color": color, "lw": 1.4, "shrinkA": 4, "shrinkB": 4}
        if not hop.is_sum:
            style["linestyle"] = (0, (3, 2))
        axes.annotate("", (hop.came, hop.target), (hop.left, hop.source), arrowprops=style)
    for step in range(depth(messages) + 1):
        axes.plot([step] * ranks, range(ranks), "o", color="#444444", markersize=4)
    axes.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
    axes.set_xticks(range(depth(messages) + 1))
    axes.set_xlabel("hops")
    axes.set(title=title, ylim=(ranks - 0.6, -0.4), xlim=(-0.3, depth(messages) + 0.3))
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    figure.set_layout_engine("tight")
    return figure


Cell = tuple[str, int]  # text, colour


def draw_data(before: Sequence[Sequence[Cell]], after: Sequence[Sequence[Cell]]) -> Figure:
    """What each rank (a row) holds before and after; a colour for each rank's data, -1 for sums."""
    width = max(map(len, [*before, *after]))
    figure = Figure(figsize=(0.62 * (2 * width) + 2.2, 0.42 * len(before) + 0.5))
    for place, (title, rows) in enumerate((("before", before), ("after", after))):
        axes = figure.add_subplot(1, 2, place + 1)
        for y, row in enumerate(rows):
            for x, (text, color) in enumerate(row):
                face = "#444444" if color < 0 else COLORS[color]
                axes.add_patch(_box(x, y, face))
                axes.text(x + 0.47, y + 0.45, text, ha="center", va="center", color="w", fontsize=9)
        axes.set(title=title, xlim=(0, width), ylim=(len(rows), 0))
        axes.set_yticks(
            [y + 0.45 for y in range(len(rows))], [f"rank {y}" for y in range(len(rows))]
        )
        axes.set_xticks([])
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0)
    figure.set_layout_engine("tight")
    return figure


def _box(x: float, y: float, color: str) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((x, y), 0.94, 0.9, color=color)


def data(collective: str, ranks: int = 3) -> Figure:
    """The picture of what a collective does, by its name."""
    everyone = range(ranks)
    letters = "abcdefgh"
    own = [[(letters[r], r)] for r in everyone]
    parts = [[(f"{letters[r]}{i}", r) for i in everyone] for r in everyone]
    total, sums = [("Σ", -1)], [(f"Σ{i}", -1) for i in everyone]
    pictures = {
        "allreduce": (own, [total] * ranks),
        "reduce_scatter": (parts, [[sums[r]] for r in everyone]),
        "all_gather": (own, [[cell for [cell] in own]] * ranks),
        "all_to_all": (parts, [[parts[s][r] for s in everyone] for r in everyone]),
        "broadcast": (own, [own[0]] * ranks),
        "reduce": (own, [total if r == 0 else [("0", 7)] for r in everyone]),
        "ppermute": (own, [own[r - 1] for r in everyone]),
        "barrier": (own, own),
    }
    return draw_data(*pictures[collective])


def show(figure: Figure) -> None:
    """Displays a figure as SVG in the page that is being executed."""
    from IPython.display import SVG, display

    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg")
    display(SVG(buffer.getvalue()))


def show_schedules(collective: str, algorithms: Sequence[str]) -> None:
    """Displays one picture for each algorithm; those of two levels with two hosts."""
    for algorithm in algorithms:
        two_levels = algorithm == "hierarchical"
        messages = hops(collective, algorithm, 4, per_host=2 if two_levels else None)
        show(draw_schedule(messages, f"{collective}, {algorithm}"))


def show_costs(collective: str, algorithms: Sequence[str], ranks: int = 8, hosts: int = 2) -> None:
    """Displays a table of hops and bytes."""
    names = ("algorithm", "hops", "sent by the busiest rank", "over the busiest host's link")
    rows = [
        (
            row["algorithm"],
            row["hops"],
            f"{row['rank_bytes_sent'] / 2**20:.4g} MiB",
            f"{row['host_bytes_sent'] / 2**20:.4g} MiB",
        )
        for row in costs(collective, algorithms, ranks, ranks // hosts)
    ]
    show_table(names, rows)


def show_table(names: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Displays a table in the page that is being executed."""
    from IPython.display import HTML, display

    head = "".join(f"<th>{name}</th>" for name in names)
    cells = ["".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) for row in rows]
    body = "".join(f"<tr>{row}</tr>" for row in cells)
    display(
        HTML(f"<table class='table'><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>")
    )


def show_command(command: str, picture: str) -> None:
    """Runs `jaxring COMMAND` in a folder of its own; displays what it prints and draws."""
    from IPython.display import Image, display

    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-m", "jaxring", *command.split()],
            cwd=folder,
            env={**os.environ, "COLUMNS": "110"},
            capture_output=True,
            text=True,
        )
        print(f"$ jaxring {command}\n{done.stdout}{done.stderr if done.returncode else ''}")
        if done.returncode:
            raise RuntimeError(f"jaxring {command}: exit code {done.returncode}")
        display(Image((Path(folder) / picture).read_bytes()))


def show_settings() -> None:
    """Displays the table of settings, from the same list that everybody reads."""
    from jaxring.config import Config

    names = ("setting", "default", "counts at", "variable", "meaning")
    show_table(
        names,
        [(s.name, repr(s.default), f"{s.when} time", s.variable, s.doc) for s in Config.settings()],
    )


def show_help(command: str) -> None:
    """Displays a command's `--help`."""
    done = subprocess.run(
        [sys.executable, "-m", "jaxring", *command.split(), "--help"],
        env={**os.environ, "COLUMNS": "100", "TERM": "dumb", "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    print(done.stdout)


def show_timeline(page: str, script: str) -> None:
    """Runs a page's block of that file name on two ranks with a timeline, and draws it."""
    from jaxring import timeline

    text = (Path(__file__).parent / page).read_text()
    source = text.split(f"<!-- run: save as {script} -->\n```python\n")[1].split("\n```")[0]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / script).write_text(source)
        subprocess.run(
            [sys.executable, "-m", "jaxring", "run", "-n", "2", script],
            cwd=folder,
            env={**os.environ, "JAXRING_TIMELINE": "trace.json"},
            capture_output=True,
            check=True,
        )
        show(
            draw_timeline(timeline.merge(sorted(Path(folder).glob("trace.*.json")))["traceEvents"])
        )


def draw_timeline(events: Sequence[dict[str, Any]]) -> Figure:
    """A row for each process's row, waits in red, as chrome://tracing shows them."""
    slices = [event for event in events if event["ph"] == "X"]
    names = {
        (e["pid"], e["tid"]): e["args"]["name"] for e in events if e.get("name") == "thread_name"
    }
    rows = sorted(names)
    figure = Figure(figsize=(8, 0.5 * len(rows) + 0.9))
    axes = figure.add_subplot()
    for event in slices:
        y = rows.index((event["pid"], event["tid"]))
        waits = event["name"].startswith("waiting")
        bar = (event["ts"] / 1e3, max(event["dur"] / 1e3, 0.05))
        axes.broken_barh([bar], (y - 0.35, 0.7), color=COLORS[3] if waits else COLORS[0])
        if not waits:
            axes.text(bar[0], y - 0.42, event["name"], fontsize=7)
    axes.set_yticks(range(len(rows)), [names[row] for row in rows])
    axes.set(xlabel="ms", ylim=(len(rows) - 0.5, -0.7))
    figure.set_layout_engine("tight")
    return figure
