"""Packages know nothing of each other, so some have a copy of the same file: what is mended in one is mended in all."""

import ast
from pathlib import Path

import pytest

from folders import ROOT, import_name

TWINS = {
    "how a C source becomes a library": ["src/*/_library.py", "packages/fused-adam", "packages/gradnorm"],
    "how wheels get it": ["hatch_build.py", "packages/fused-adam", "packages/gradnorm"],
    "the tests of both": ["tests/test_library.py", "packages/fused-adam", "packages/gradnorm"],
}


@pytest.mark.parametrize("pattern_and_folders", TWINS.values(), ids=TWINS)
def test_twins_are_the_same_code(pattern_and_folders):
    pattern, *folders = pattern_and_folders
    one, *others = [code(*ROOT.joinpath(folder).glob(pattern), import_name(ROOT / folder)) for folder in folders]
    assert all(other == one for other in others)


@pytest.mark.parametrize(
    ("one", "other", "are_twins"),
    [
        ("x = 1", "x = 1  # a comment", True),
        ("x = 1", "x = 2", False),
        ('"""Of this."""\nx = 1', '"""Of that."""\n\n\nx = 1', True),
        ('def f():\n    """Of this."""', 'def f():\n    """Of that."""', False),
        ("from stepstack_one import f", "from stepstack_other import f", True),
        ("from stepstack_one import f", "from stepstack_other import g", False),
        ("x = 1", "x = 1\ny = 2", False),
    ],
)
def test_a_difference_is_seen(tmp_path, one, other, are_twins):
    codes = []
    for package, text in (("stepstack_one", one), ("stepstack_other", other)):
        path = tmp_path / f"{package}.py"
        path.write_text(text)
        codes.append(code(path, package))
    assert (codes[0] == codes[1]) is are_twins


def code(path: Path, package: str) -> str:
    """The syntax tree of a file, without the module's docstring and the name of its own package."""
    tree = ast.parse(path.read_text())
    if ast.get_docstring(tree) is not None:
        del tree.body[0]
    return ast.dump(tree).replace(f"'{package}'", "'THIS_PACKAGE'").replace(f"'{package}.", "'THIS_PACKAGE.")
