"""Every chore of the house: `nox -l` lists them.

The everyday sessions share one environment, `.venv`, which `dev` makes: a fresh torch per session would cost half
a minute, and nox has no option for a shared environment, so these sessions run without one of nox's own.
`isolated` is the exception: a wheel, in a fresh environment with only what it declares.
"""

import hashlib
import os
import platform
import shutil
import sys
from pathlib import Path

import nox
from nox.project import dependency_groups, load_toml

ROOT = Path(__file__).parent
FOLDERS = {
    path.parent.name: path.parent
    for kind in ("packages", "integration")
    for path in sorted(ROOT.glob(f"{kind}/*/pyproject.toml"))
}
PROJECTS = {name: load_toml(folder / "pyproject.toml") for name, folder in FOLDERS.items()}
ENGINES = [name for name, project in PROJECTS.items() if "engine" in project["dependency-groups"]]
VENV = ROOT / ".venv"
BIN = VENV / ("Scripts" if os.name == "nt" else "bin")
DIST = ROOT / "dist"
CONSTRAINTS = ROOT / "ci" / "constraints.txt"
PYPROJECTS = [CONSTRAINTS, *(folder / "pyproject.toml" for folder in FOLDERS.values())]
EDITABLE = [word for folder in FOLDERS.values() for word in ("--editable", folder)]
BUILD_TOOLS = ["editables", "hatchling>=1.27"]
TOOLS = [*BUILD_TOOLS, "matplotlib>=3.8", "mypy>=1.15", "nox>=2025.2.9", "ruff>=0.11", "tqdm>=4.66"]

nox.needs_version = ">=2025.2.9"
nox.options.sessions = ["lint", "types", "tests"]
os.environ["PIP_CONSTRAINT"] = str(CONSTRAINTS)


@nox.session(venv_backend="none")
def dev(session):
    """Make `.venv`: every package, editable, and what the tests and tools need. Quick when nothing changed."""
    wanted = [*TOOLS, *foreign(test_groups())]
    stamp, made_from = VENV / "made-from.sha256", fingerprint(wanted)
    if is_made(stamp, made_from):
        return
    if not BIN.exists():
        session.run(sys.executable, "-m", "venv", VENV)
    session.log("Installing into .venv; torch is large, so the first time takes a minute or two.")
    pip_install = ("-m", "pip", "install", "--quiet")
    python(session, *pip_install, *wanted)
    python(session, *pip_install, "--no-build-isolation", *EDITABLE)
    stamp.write_text(made_from)


@nox.session(venv_backend="none")
def demo(session):
    """Train a small GPT on the standard library's sources: -- [--steps N] [--ranks N] [--resume DIR] …"""
    dev(session)
    # Ctrl-C reaches the training too, which then writes a checkpoint; nox would kill it after 0.3 s.
    python(session, ROOT / "docs" / "examples" / "train_gpt.py", *session.posargs, interrupt_timeout=None)


@nox.session(venv_backend="none")
def tests(session):
    """All tests: -- [pytest's arguments]"""
    dev(session)
    python(session, "-m", "pytest", *session.posargs)


for name, folder in FOLDERS.items():

    @nox.session(name=f"tests({name})", venv_backend="none", default=False)
    def only(session, folder=folder):
        """The tests of this folder: -- [pytest's arguments]"""
        dev(session)
        python(session, "-m", "pytest", folder, *session.posargs)


@nox.session(venv_backend="none", default=False)
def wheels(session):
    """Build every wheel, into `dist`."""
    dev(session)
    shutil.rmtree(DIST, ignore_errors=True)
    python(session, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", DIST, *FOLDERS.values())


@nox.session(default=False, reuse_venv=False, requires=["wheels"])
@nox.parametrize("name", [nox.param(name, id=name) for name in FOLDERS])
def isolated(session, name):
    """Test the wheel in a fresh environment with nothing but what it declares: -- [pytest's arguments]"""
    # Whatever is ours comes from `dist`, never from an index; what nobody declares is not installed.
    ours = Path(session.create_tmp()) / "ours.txt"
    ours.write_text("".join(f"{wheel.name.split('-')[0]} @ {wheel.as_uri()}\n" for wheel in DIST.glob("*.whl")))
    distribution, test_group = PROJECTS[name]["project"]["name"], dependency_groups(PROJECTS[name], "test")
    # Compiling all of torch is four fifths of installing it; what the tests import is compiled as they import it.
    session.install("--no-compile", "--constraint", ours, distribution, *test_group)
    session.env["PYTHONDONTWRITEBYTECODE"] = ""
    # Not `python -m pytest`, which would put the current folder on the path.
    session.run("pytest", FOLDERS[name] / "tests", *session.posargs)
    if platform.system() == "Linux" and (FOLDERS[name] / "hatch_build.py").exists():
        # The wheel brings a library, which has to do without a compiler.
        without = {"PATH": session.bin, "CC": "", "STEPSTACK_PREBUILT": "1"}
        session.run("pytest", FOLDERS[name] / "tests", "-k", "library or native", env=without)


@nox.session(default=False, reuse_venv=True)
@nox.parametrize("name", [nox.param(name, id=name) for name in ENGINES])
def engines(session, name):
    """Test an integration beside the real engine, in an environment of its own: -- [pytest's arguments]"""
    ours = [*BUILD_TOOLS, "torch", *foreign(test_groups())]
    theirs = dependency_groups(PROJECTS[name], "engine")
    # Without what these declare; of several versions, one after the other in the same environment.
    alone = [group for key, group in PROJECTS[name]["dependency-groups"].items() if key.startswith("engine-alone")]
    stamp, made_from = Path(session.virtualenv.location) / "made-from.sha256", fingerprint([*ours, *theirs])
    if not is_made(stamp, made_from):
        session.install("--no-compile", *ours)
        session.install("--no-compile", "--no-build-isolation", *theirs)
        session.install("--no-build-isolation", *EDITABLE)
        stamp.write_text(made_from)
    for version in alone or [[]]:
        if version:
            # Some say that they need a newer Python than they do.
            alone_options = ("--no-compile", "--no-build-isolation", "--no-deps", "--ignore-requires-python")
            session.install(*alone_options, *version)
        session.run("python", "-m", "pytest", FOLDERS[name] / "tests", "-m", "engine", *session.posargs)


@nox.session(venv_backend="none")
def lint(session):
    """ruff, rules and formatting: -- [--fix]"""
    dev(session)
    session.run(BIN / "ruff", "check", *session.posargs)
    session.run(BIN / "ruff", "format", "--check")


@nox.session(venv_backend="none")
def types(session):
    """mypy, strict, on every `src`."""
    dev(session)
    python(session, "-m", "mypy", *(folder / "src" for folder in FOLDERS.values()))


@nox.session(venv_backend="none", default=False)
def gpu(session):
    """The tests that need a GPU; skipped where there is none."""
    dev(session)
    nothing_collected = 5
    python(session, "-m", "pytest", "-m", "gpu", *session.posargs, success_codes=[0, nothing_collected])


@nox.session(venv_backend="none", default=False)
def bench(session):
    """The benchmarks, all or of some folders: -- [gradnorm] [fused-adam] …"""
    dev(session)
    for name in session.posargs or FOLDERS:
        if name not in FOLDERS:
            session.error(f"no folder {name!r} here; there are {', '.join(FOLDERS)}")
        for benchmark in sorted(FOLDERS[name].glob("benchmarks/bench_*.py")):
            python(session, benchmark)


def python(session, *arguments, **options):
    session.run(BIN / "python", *arguments, **options)


def test_groups():
    return {requirement for project in PROJECTS.values() for requirement in dependency_groups(project, "test")}


def foreign(requirements):
    return sorted(requirement for requirement in requirements if not requirement.startswith("stepstack"))


def fingerprint(words):
    return hashlib.sha256(
        b"\0".join([*map(str.encode, words), *(file.read_bytes() for file in PYPROJECTS)])
    ).hexdigest()


def is_made(stamp, made_from):
    return stamp.exists() and stamp.read_text() == made_from
