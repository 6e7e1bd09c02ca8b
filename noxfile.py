"""Every chore of the house: `nox -l` lists them.

The everyday sessions share one environment, `.venv`, which `dev` makes: a fresh torch per session would cost
minutes, and nox has no option for a shared environment, so these sessions run without one of nox's own.
`isolated` is the exception: one wheel, in an environment with only what it declares.
"""

import hashlib
import os
import shutil
import sys
from functools import partial
from pathlib import Path

import nox
from nox.project import dependency_groups, load_toml

ROOT = Path(__file__).parent
VENV = ROOT / ".venv"
BIN = VENV / ("Scripts" if os.name == "nt" else "bin")
FOLDERS = {
    path.parent.name: path.parent
    for kind in ("packages", "integration")
    for path in sorted(ROOT.glob(f"{kind}/*/pyproject.toml"))
}
TOOLS = ["editables", "hatchling>=1.27", "matplotlib>=3.8", "mypy>=1.15", "ruff>=0.11", "tqdm>=4.66"]

os.environ["PIP_CONSTRAINT"] = str(ROOT / "ci" / "constraints.txt")
nox.options.sessions = ["lint", "types", "tests"]
nox.options.reuse_existing_virtualenvs = True


@nox.session(venv_backend="none")
def dev(session):
    """Make `.venv`: every package, editable, with its test group and the tools. Quick when nothing changed."""
    inputs = [
        ROOT / "noxfile.py",
        ROOT / "ci" / "constraints.txt",
        *(folder / "pyproject.toml" for folder in FOLDERS.values()),
    ]
    wanted = hashlib.sha256(b"".join(path.read_bytes() for path in inputs)).hexdigest()
    stamp = VENV / "made-from.sha256"
    if stamp.exists() and stamp.read_text() == wanted:
        return
    if not BIN.exists():
        session.run(sys.executable, "-m", "venv", str(VENV))
    groups = {requirement for folder in FOLDERS.values() for requirement in test_group(folder)} - {"stepstack-testing"}
    pip = [str(BIN / "python"), "-m", "pip", "install", "--quiet"]
    session.run(*pip, *TOOLS)
    editable = [word for folder in FOLDERS.values() for word in ("--editable", str(folder))]
    session.run(*pip, "--no-build-isolation", *editable, *sorted(groups))
    stamp.write_text(wanted)


@nox.session(venv_backend="none")
def tests(session):
    """All tests. `tests(gradnorm)` and the like run one package's."""
    dev(session)
    python(session, "-m", "pytest", *session.posargs)


def tests_of(folder, session):
    dev(session)
    python(session, "-m", "pytest", str(folder / "tests"), *session.posargs)


def isolated(folder, session):
    """Build the wheel and run its tests with nothing but what it declares (and its test group)."""
    wheels = Path(session.create_tmp()) / "wheels"
    shutil.rmtree(wheels, ignore_errors=True)
    session.install("hatchling>=1.27")
    session.run(
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        str(wheels),
        *map(str, FOLDERS.values()),
    )
    session.install(
        "--find-links",
        str(wheels),
        load_toml(folder / "pyproject.toml")["project"]["name"],
        *test_group(folder),
    )
    session.run(
        "python",
        "-m",
        "pytest",
        "--config-file",
        str(ROOT / "pyproject.toml"),
        str(folder / "tests"),
        *session.posargs,
    )


for name, folder in FOLDERS.items():
    nox.session(partial(tests_of, folder), name=f"tests({name})", venv_backend="none", default=False)
    nox.session(partial(isolated, folder), name=f"isolated({name})", default=False)


@nox.session(venv_backend="none")
def lint(session):
    """ruff: rules and formatting."""
    dev(session)
    session.run(str(BIN / "ruff"), "check", *session.posargs)
    session.run(str(BIN / "ruff"), "format", "--check")


@nox.session(venv_backend="none")
def types(session):
    """mypy, strict, on every `src`."""
    dev(session)
    for folder in FOLDERS.values():
        python(session, "-m", "mypy", str(folder / "src"))


def python(session, *arguments):
    session.run(str(BIN / "python"), *arguments)


def test_group(folder):
    return dependency_groups(load_toml(folder / "pyproject.toml"), "test")
