"""What the pages say is so: their Python runs, the sessions they name exist, their links lead somewhere."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from folders import ROOT

PYTHON = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
NOX = re.compile(r"\bnox -s ([^`\n&|#]+)")
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")

PAGES = [page for at in ("", "packages/*/", "integration/*/", "docs/**/") for page in sorted(ROOT.glob(f"{at}*.md"))]


def of_each(pages):
    return pytest.mark.parametrize("page", pages, ids=lambda page: str(page.relative_to(ROOT)))


@of_each([page for page in PAGES if PYTHON.search(page.read_text())])
def test_its_python_runs(page, tmp_path):
    run_python(page, tmp_path)


@of_each(PAGES)
def test_the_sessions_it_names_exist(page, sessions):
    assert sessions_named(page) - sessions == set()


@of_each(PAGES)
def test_its_links_lead_somewhere(page):
    assert broken_links(page) == []


def test_blocks_run_in_order_in_one_namespace(tmp_path):
    run_python(written(tmp_path, "```python\nx = 1\n```\nthen\n```python\nassert x == 1\n```\n"), tmp_path)


@pytest.mark.parametrize("bad", ["assert x == 2", "import warnings; warnings.warn('deprecated')"])
def test_a_block_that_fails_is_seen_by_its_line(tmp_path, bad):
    page = written(tmp_path, f"# Title\n```python\nx = 1\n```\nthen\n```python\n\n{bad}\n```\n")
    with pytest.raises(pytest.fail.Exception, match=r"README\.md\", line 8"):
        run_python(page, tmp_path)


def test_sessions_are_found_in_prose_and_in_code(tmp_path, sessions):
    page = written(
        tmp_path, 'Say `nox -s lint types`.\n```bash\npip install nox && nox -s "isolated(a)" -- -k x\n```\n'
    )
    assert sessions_named(page) == {"lint", "types", "isolated(a)"}
    assert {"lint", "types", "tests", "isolated", "isolated(gradnorm)"} < sessions


def test_a_broken_link_is_seen(tmp_path):
    page = written(tmp_path, "[a](README.md#top) [b](docs/gone.md) [c](https://example.org) [d](#here)")
    assert broken_links(page) == ["docs/gone.md"]


@pytest.fixture(scope="module")
def sessions():
    # Without a keyword that all fit, nox lists only what a plain `nox` runs.
    command = [sys.executable, "-m", "nox", "--list-sessions", "--json", "--keywords", "not nothing"]
    listed = json.loads(subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout)
    return {session[key] for session in listed for key in ("name", "session")}


def written(folder: Path, text: str) -> Path:
    page = folder / "README.md"
    page.write_text(text)
    return page


def run_python(page: Path, folder: Path) -> None:
    """Run a page's Python blocks as one program, in a process of its own, in `folder`; warnings are errors."""
    text = page.read_text()
    program = ""
    for block in PYTHON.finditer(text):
        program += "\n" * (text[: block.start(1)].count("\n") - program.count("\n")) + block[1]
    runner = f"exec(compile({program!r}, {str(page)!r}, 'exec'))"
    command = [sys.executable, "-W", "error", "-c", runner]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    if ended.returncode != 0:
        pytest.fail(ended.stderr, pytrace=False)


def sessions_named(page: Path) -> set[str]:
    """Every session that a page tells to run with `nox -s`."""
    named = set()
    for command in NOX.findall(page.read_text()):
        for word in shlex.split(command):
            if word.startswith("-"):
                break
            named.add(word)
    return named


def broken_links(page: Path) -> list[str]:
    """The relative links of a page that lead to no file."""
    targets = LINK.findall(page.read_text())
    return [to for to in targets if not re.match(r"\w+:", to) and not page.parent.joinpath(to).exists()]
