"""Every command of README.md and docs/ that is marked as one to run does run (docs_blocks.py)."""

import importlib.metadata

import pytest
from by_place import load

docs_blocks = load("docs_blocks", "tests")
PAGES = {page.name: page for page in docs_blocks.pages()}


def having(slow: bool) -> list[str]:
    return [
        name
        for name, page in PAGES.items()
        if any(b.slow == slow and not b.file for b in docs_blocks.blocks(page))
    ]


@pytest.mark.parametrize("name", having(slow=False))
def test_page(name, tmp_path):
    docs_blocks.run_page(PAGES[name], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", having(slow=True))
def test_page_slow(name, tmp_path):
    plugins = {entry.value for entry in importlib.metadata.entry_points(group="pytest11")}
    if name == "own-tests.md" and "pytest_jaxring" not in plugins:
        pytest.skip("the fixture comes with an installed package")
    docs_blocks.run_page(PAGES[name], tmp_path, slow=True)


def test_a_block_that_does_not_do_what_it_says_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- run -->\n```sh\nfalse\n```\n\n<!-- run: fails -->\n```sh\ntrue\n```\n\n"
        "<!-- run -->\n```python\nraise SystemExit(3)\n```\n\n```sh\nnot marked\n```\n"
    )
    found = docs_blocks.blocks(page)
    assert [(b.line, b.language, b.how) for b in found] == [
        (1, "sh", ""),
        (6, "sh", "fails"),
        (11, "python", ""),
    ]
    for block in found:
        with pytest.raises(AssertionError, match=f"page.md:{block.line}: expected"):
            docs_blocks.run(block, tmp_path)


def test_marks_are_understood():
    """A mark that is misspelt would silently run nothing."""
    for page in docs_blocks.pages():
        marks = [line for line in page.read_text().splitlines() if line.startswith("<!-- run")]
        assert len(marks) == len(docs_blocks.blocks(page)), f"{page.name}: {marks}"
        for block in docs_blocks.blocks(page):
            assert block.language in ("sh", "python"), f"{page.name}:{block.line}"
            assert block.how in ("", "slow", "slow, 0 or 1", "fails") or block.file, (
                f"{page.name}:{block.line}"
            )


# Not tree: where a rank sends to two at once the simulated clock counts them one after the other.
@pytest.mark.parametrize("algorithm", ["ring", "halving_doubling", "chain", "reducer"])
def test_pictures_show_as_many_hops_as_are_counted(algorithm):
    """docs/schedules.py places steps in time by itself; the engine's counting must agree."""
    schedules = load("schedules", "docs")
    for ranks in (2, 4, 7, 8):
        messages = schedules.hops("allreduce", algorithm, ranks)
        (row,) = schedules.costs("allreduce", [algorithm], ranks, ranks)
        assert schedules.depth(messages) == row["hops"], ranks
