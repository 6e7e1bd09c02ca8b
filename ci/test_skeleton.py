"""Every folder has one shape, one name and one sentence, so that what is known of one is known of all."""

import ast
import re
from pathlib import Path

import pytest

from folders import distribution, each_folder, import_name, pyproject

ODDS_AND_ENDS = {"utils", "util", "helpers", "common", "core", "misc", "manager"}
ONE_SITTING = 400  # lines; under 300 reads well


@each_folder
def test_a_folder_has_the_shape_of_all(folder):
    assert flaws(folder) == []


def test_a_good_folder_has_no_flaws(good_folder):
    assert flaws(good_folder) == []


@pytest.mark.parametrize(
    "missing", ["README.md", "CHANGELOG.md", "src/stepstack_fast_norm/py.typed", "tests/test_norm.py"]
)
def test_a_missing_file_is_seen(good_folder, missing):
    good_folder.joinpath(missing).unlink()
    assert flaws(good_folder) == [f"there is no {re.sub('test_norm', 'test_*', missing)}"]


@pytest.mark.parametrize(
    ("file", "old", "new", "flaw"),
    [
        (
            "pyproject.toml",
            "stepstack-fast-norm",
            "fast-norm",
            "the distribution is fast-norm, not stepstack-fast-norm",
        ),
        ("pyproject.toml", "Apache-2.0", "MIT", "license is 'MIT', not 'Apache-2.0'"),
        ("pyproject.toml", ">=3.10", ">=3.12", "requires-python is '>=3.12', not '>=3.10'"),
        ("README.md", "A fast norm.", "A norm.", "README.md does not say: A fast norm."),
        ("src/stepstack_fast_norm/__init__.py", "A fast", "The", "__init__.py does not say: A fast norm."),
        ("src/stepstack_fast_norm/_norm.py", "", "\n" * 401, "src/stepstack_fast_norm/_norm.py has 401 lines"),
        ("src/stepstack_fast_norm/_utils.py", "", "", "src/stepstack_fast_norm/_utils.py is a name for odds and ends"),
    ],
)
def test_a_flaw_is_seen(good_folder, file, old, new, flaw):
    path = good_folder / file
    text = path.read_text() if path.exists() else ""
    path.write_text(text.replace(old, new) if old else new)
    assert flaws(good_folder) == [flaw]


def test_what_only_tests_import_needs_no_changelog_but_a_bar_to_publishing(good_folder):
    testing = good_folder.rename(good_folder.with_name("testing"))
    testing.joinpath("src", "stepstack_fast_norm").rename(testing / "src" / "stepstack_testing")
    testing.joinpath("CHANGELOG.md").unlink()
    project = testing / "pyproject.toml"
    project.write_text(project.read_text().replace("fast-norm", "testing"))
    assert flaws(testing) == ["it could be published: it lacks the classifier 'Private :: Do Not Upload'"]
    project.write_text(project.read_text() + "classifiers = ['Private :: Do Not Upload']\n")
    assert flaws(testing) == []


@pytest.fixture
def good_folder(tmp_path):
    folder = tmp_path / "packages" / "fast-norm"
    package = folder / "src" / "stepstack_fast_norm"
    package.mkdir(parents=True)
    (folder / "tests").mkdir()
    package.joinpath("__init__.py").write_text('"""A fast norm."""\n')
    package.joinpath("py.typed").touch()
    folder.joinpath("tests", "test_norm.py").touch()
    folder.joinpath("CHANGELOG.md").touch()
    folder.joinpath("README.md").write_text("# stepstack-fast-norm\n\nA fast norm.\n")
    folder.joinpath("pyproject.toml").write_text(
        "[project]\nname = 'stepstack-fast-norm'\ndescription = 'A fast norm.'\n"
        "license = 'Apache-2.0'\nrequires-python = '>=3.10'\n"
    )
    return folder


def flaws(folder: Path) -> list[str]:
    """What a folder lacks, or has otherwise than the others."""
    project = pyproject(folder)["project"]
    name, package = distribution(folder), f"src/{import_name(folder)}"
    for_tests_only = folder.name == "testing"
    wanted = ["README.md", f"{package}/__init__.py", f"{package}/py.typed", "tests/test_*.py"]
    wanted += [] if for_tests_only else ["CHANGELOG.md"]

    found = [f"there is no {pattern}" for pattern in wanted if not any(folder.glob(pattern))]
    if project["name"] != name:
        found.append(f"the distribution is {project['name']}, not {name}")
    for key, value in {"license": "Apache-2.0", "requires-python": ">=3.10"}.items():
        if project[key] != value:
            found.append(f"{key} is {project[key]!r}, not {value!r}")
    if for_tests_only and "Private :: Do Not Upload" not in project.get("classifiers", ()):
        found.append("it could be published: it lacks the classifier 'Private :: Do Not Upload'")
    return found + silent_files(folder, package, project["description"]) + unshapely_files(folder)


def silent_files(folder: Path, package: str, sentence: str) -> list[str]:
    """Which of the files that say what the folder is for do not say its sentence."""
    texts = {}
    if (readme := folder / "README.md").exists():
        texts["README.md"] = readme.read_text()
    if (init := folder / package / "__init__.py").exists():
        texts["__init__.py"] = ast.get_docstring(ast.parse(init.read_text())) or ""
    return [
        f"{name} does not say: {sentence}" for name, text in texts.items() if sentence not in " ".join(text.split())
    ]


def unshapely_files(folder: Path) -> list[str]:
    found = []
    for path in sorted(folder.glob("src/**/*.py")):
        lines = len(path.read_text().splitlines())
        if lines > ONE_SITTING:
            found.append(f"{path.relative_to(folder)} has {lines} lines")
        if path.stem.strip("_") in ODDS_AND_ENDS:
            found.append(f"{path.relative_to(folder)} is a name for odds and ends")
    return found
