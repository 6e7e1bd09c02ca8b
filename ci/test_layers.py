"""What may import what: only what is declared, downwards only, and no engine inside a package."""

import ast
import re
import sys
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path
from textwrap import dedent

import pytest

from folders import each_folder, import_name, pyproject

# A package knows no other folder of ours, an integration knows the packages and `stepstack`; and beside that:
ARROWS = {"stepstack_clip": {"stepstack_gradnorm"}, "stepstack_nemo": {"stepstack_megatron"}}
# Not as the end of a longer word: "compute" and "mnemonic" are fine.
ENGINE = re.compile(r"(?<![a-z])(megatron|deepspeed|nemo|mpu|main_grad)", re.IGNORECASE)


@each_folder
def test_src_imports_only_what_it_declares(folder):
    assert undeclared_imports(folder, "src") == []


@each_folder
def test_tests_import_only_what_their_group_adds(folder):
    assert undeclared_imports(folder, "tests", group="test") == []


@each_folder
def test_what_src_declares_it_imports(folder):
    assert idle_declarations(folder) == []


@each_folder
def test_arrows_point_down_only(folder):
    assert wrong_arrows(folder) == []


@each_folder
def test_a_package_names_no_engine(folder):
    assert folder.parent.name != "packages" or engine_names(folder) == []


def test_an_undeclared_import_is_seen(make):
    source = """\
        import torch.nn, yaml
        from ._noun import f
        from stepstack_norm import g
        def later():
            from numpy.linalg import norm
        try:
            import apex  # optional
        except ImportError:
            apex = None
        try:
            import jax
        finally:
            pass
        """
    folder = make("packages/norm", source)
    assert undeclared_imports(folder, "src") == ["__init__.py:1 yaml", "__init__.py:5 numpy", "__init__.py:11 jax"]


def test_an_undeclared_import_of_a_test_is_seen(make, tmp_path):
    (tmp_path / "docs" / "examples").mkdir(parents=True)
    (tmp_path / "docs" / "examples" / "train.py").touch()
    folder = make("packages/norm")
    source = "import pytest, torch, stepstack_norm, train, vectors\nimport hypothesis\n"
    (folder / "tests" / "test_norm.py").write_text(source)
    (folder / "tests" / "vectors.py").touch()
    assert undeclared_imports(folder, "tests", group="test") == ["test_norm.py:2 hypothesis"]


def test_a_declaration_that_nothing_imports_is_seen(make):
    folder = make("packages/norm", "import torch", dependencies=["torch>=2.10", "stepstack-clip==0.1", "tqdm"])
    assert idle_declarations(folder) == ["stepstack_clip", "tqdm"]


@pytest.mark.parametrize(
    ("folder", "imported", "allowed"),
    [
        ("packages/clip", "stepstack_gradnorm", True),
        ("packages/gradnorm", "stepstack_clip", False),
        ("packages/gradnorm", "stepstack_testing", False),
        ("packages/gradnorm", "stepstack", False),
        ("integration/pytorch", "stepstack_clip", True),
        ("integration/pytorch", "stepstack_testing", False),
        ("integration/pytorch", "stepstack_megatron", False),
        ("integration/megatron", "stepstack", True),
        ("integration/megatron", "stepstack_nemo", False),
        ("integration/nemo", "stepstack_megatron", True),
    ],
)
def test_a_wrong_arrow_is_seen(make, folder, imported, allowed):
    for path in ("packages/clip", "packages/gradnorm", "packages/testing", "integration/megatron"):
        make(path)
    assert wrong_arrows(make(folder, f"import {imported}")) == ([] if allowed else [f"__init__.py:1 {imported}"])


def test_a_wrong_arrow_that_is_only_declared_is_seen(make):
    folder = make("packages/norm", dependencies=["torch>=2.10", "stepstack-clip==0.1"])
    assert wrong_arrows(folder) == ["pyproject.toml stepstack_clip"]


def test_an_engine_is_seen_and_a_word_around_its_name_is_not(make):
    folder = make("packages/norm", "compute = mnemonic = domain_grad = 1\nget_mpu = MegatronNorm = p.main_grad = 1\n")
    folder.joinpath("src", "stepstack_norm", "_presets.py").write_text("PRESETS = {'megatron': 2}\n")
    assert engine_names(folder) == ["__init__.py:2 mpu", "__init__.py:2 Megatron", "__init__.py:2 main_grad"]


@pytest.fixture
def make(tmp_path):
    """Make a folder of a made-up tree, or make it anew: what its `__init__` says and what it depends on."""

    def made(path: str, source: str = "", dependencies: tuple[str, ...] = ("torch>=2.10",)) -> Path:
        folder = tmp_path / path
        src = folder / "src" / import_name(folder)
        src.mkdir(parents=True, exist_ok=True)
        (folder / "tests").mkdir(exist_ok=True)
        src.joinpath("__init__.py").write_text(dedent(source))
        folder.joinpath("pyproject.toml").write_text(
            f"project.dependencies = {list(dependencies)}\ndependency-groups.test = ['pytest>=8']\n"
        )
        return folder

    return made


def undeclared_imports(folder: Path, part: str, group: str | None = None) -> list[str]:
    """Imports in `src` or `tests` of what is neither the folder's own nor declared, as `file:line name`.

    A `try` that catches ImportError makes an import optional; such a one need not be declared. Tests may also try the
    examples of the documentation, which belong to no distribution, share what lies beside them, and import the engine
    that those of them need which are skipped without it.
    """
    declared = {import_name(folder), *declared_names(folder, group)}
    if group == "test":
        shared = [*folder.parents[1].glob("docs/examples/*.py"), *folder.glob("tests/*.py")]
        declared |= {path.stem for path in shared}
        if "engine" in pyproject(folder)["dependency-groups"]:
            declared |= set(declared_names(folder, "engine"))
    return [
        f"{where} {name}"
        for where, name, optional in imports(folder / part)
        if not (optional or declared & {name, *(dist.replace("-", "_") for dist in INSTALLED.get(name, ()))})
    ]


def idle_declarations(folder: Path) -> list[str]:
    """The distributions that pyproject declares and `src` never imports."""
    imported = {name for _, name, _ in imports(folder / "src")}
    imported |= {dist.replace("-", "_") for name in imported for dist in INSTALLED.get(name, ())}
    return sorted(declared_names(folder) - imported - {"numpy"})  # without which torch warns, so tests bring it


def wrong_arrows(folder: Path) -> list[str]:
    """What `src` imports, or pyproject declares, of ours and may not: `file:line name`."""
    own = import_name(folder)
    allowed = {own} | ARROWS.get(own, set())
    if folder.parent.name == "integration":
        packages = {import_name(path.parent) for path in folder.parents[1].glob("packages/*/pyproject.toml")}
        allowed |= packages - {"stepstack_testing"} | {"stepstack"}
    found = [(where, name) for where, name, _ in imports(folder / "src")]
    found += [("pyproject.toml", name) for name in declared_names(folder)]
    return [f"{where} {name}" for where, name in found if name.startswith("stepstack") and name not in allowed]


def engine_names(folder: Path) -> list[str]:
    return [
        f"{path.name}:{number} {name}"
        for path in sorted(folder.joinpath("src").rglob("*.py"))
        if path.name != "_presets.py"  # a user may ask for the rule that an engine has, by the engine's name
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        for name in ENGINE.findall(line)
    ]


def imports(root: Path) -> Iterator[tuple[str, str, bool]]:
    """`file:line`, the top-level name, and whether it is optional, of every import but the standard library's."""
    for path in sorted(root.rglob("*.py")):
        tree = ast.parse(path.read_text())
        optional = {
            inner
            for node in ast.walk(tree)
            if isinstance(node, ast.Try) and any("ImportError" in ast.dump(handler) for handler in node.handlers)
            for statement in node.body
            for inner in ast.walk(statement)
        }
        for node in ast.walk(tree):
            for name in imported_names(node):
                if name not in sys.stdlib_module_names:
                    yield f"{path.name}:{node.lineno}", name, node in optional


def imported_names(node: ast.AST) -> set[str]:
    if isinstance(node, ast.Import):
        return {alias.name.partition(".")[0] for alias in node.names}
    if isinstance(node, ast.ImportFrom) and node.level == 0:
        return {node.module.partition(".")[0]}
    return set()


def declared_names(folder: Path, group: str | None = None) -> set[str]:
    """The declared distributions, spelled as they are mostly imported."""
    told = pyproject(folder)
    declared = [*told["project"]["dependencies"], *(told["dependency-groups"][group] if group else ())]
    return {re.match(r"[\w.-]+", requirement)[0].replace("-", "_") for requirement in declared}


INSTALLED = packages_distributions()  # for what is imported by another name: yaml is PyYAML
