"""The folders that the guards look at, and how the names in them hang together."""

import sys
from pathlib import Path
from typing import Any

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest brings it

ROOT = Path(__file__).parents[1]
FOLDERS = [
    path.parent for kind in ("packages", "integration") for path in sorted(ROOT.glob(f"{kind}/*/pyproject.toml"))
]
PUBLISHED = [folder for folder in FOLDERS if folder.name != "testing"]  # that one is imported by tests only
each_folder = pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)


def distribution(folder: Path) -> str:
    """`stepstack-` and the folder's name; plain `stepstack` is the integration into PyTorch itself."""
    return "stepstack" if folder.parts[-2:] == ("integration", "pytorch") else f"stepstack-{folder.name}"


def import_name(folder: Path) -> str:
    return distribution(folder).replace("-", "_")


def pyproject(folder: Path) -> dict[str, Any]:
    return tomllib.loads(folder.joinpath("pyproject.toml").read_text())
