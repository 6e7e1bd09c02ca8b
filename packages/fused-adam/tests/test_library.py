"""The library of the C source is there for every process, however many start at once, or there is a reason."""

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from stepstack_fused_adam import _library

(SOURCE,) = Path(_library.__file__).parent.glob("*.c")
LOAD = """
import importlib.util, sys, pathlib
spec = importlib.util.spec_from_file_location("library", sys.argv[1])
library = importlib.util.module_from_spec(spec)
spec.loader.exec_module(library)
found = library.load(pathlib.Path(sys.argv[2]))
print(found if isinstance(found, str) else found.answer())
"""
needs_a_compiler = pytest.mark.skipif(_library.compiler() is None, reason="no C compiler here")


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "answer.c"
    path.write_text("int answer(void) { return 42; }\n")
    return path


@pytest.fixture
def start(source, tmp_path):
    """Starts a process with an empty cache and folder for temporary files of its own, which loads the library."""
    tmp_path.joinpath("tmp").mkdir()

    def start(**environment):
        ours = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "TMPDIR": str(tmp_path / "tmp"), "HOME": str(tmp_path)}
        command = [sys.executable, "-I", "-c", LOAD, _library.__file__, str(source)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        return subprocess.Popen(command, env=os.environ | ours | environment, text=True, **pipes)

    return start


def said(process):
    return process.communicate(timeout=30)[0].strip()


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def fake_compiler(tmp_path, does):
    """A folder with a compiler that is a shell script."""
    path = tmp_path / "bin" / "cc"
    path.parent.mkdir()
    path.write_text(f"#!/bin/sh\n{does}\n")
    path.chmod(0o755)
    return str(path)


@needs_a_compiler
def test_processes_that_start_at_once_with_an_empty_cache_all_have_it_and_keep_one(start, tmp_path):
    assert [said(process) for process in [start() for _ in range(6)]] == ["42"] * 6
    (kept,) = files(tmp_path / "cache")
    assert kept.startswith("stepstack/answer-")
    assert files(tmp_path / "tmp") == []


@needs_a_compiler
def test_what_is_kept_is_not_translated_again(start, tmp_path):
    assert said(start()) == "42"
    (kept,) = tmp_path.joinpath("cache", "stepstack").iterdir()
    before = kept.stat()
    assert said(start()) == "42"
    assert (kept.stat().st_ino, kept.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


@needs_a_compiler
def test_another_source_is_another_library(start, source, tmp_path):
    assert said(start()) == "42"
    source.write_text("int answer(void) { return 43; }\n")
    assert said(start()) == "43"
    assert len(files(tmp_path / "cache")) == 2


@needs_a_compiler
def test_without_a_cache_to_write_to_it_is_there_all_the_same_and_leaves_nothing(start, tmp_path):
    tmp_path.joinpath("cache").write_text("a file, in which nobody can make a folder")
    assert said(start()) == "42"
    assert files(tmp_path / "tmp") == []


@needs_a_compiler
def test_a_cache_that_is_no_absolute_path_is_none_as_the_standard_says(start, tmp_path):
    assert said(start(XDG_CACHE_HOME="here")) == "42"
    assert len(files(tmp_path / ".cache" / "stepstack")) == 1


@needs_a_compiler
def test_a_file_in_the_cache_that_is_cut_off_is_replaced(start, tmp_path):
    assert said(start()) == "42"
    (kept,) = tmp_path.joinpath("cache", "stepstack").iterdir()
    kept.write_bytes(kept.read_bytes()[:20])
    assert said(start()) == "42"
    assert kept.stat().st_size > 20


def test_without_a_compiler_there_is_a_reason(start, tmp_path):
    reason = said(start(PATH=str(tmp_path), CC="cc"))
    assert "no C compiler (cc, gcc, clang or $CC) is on the PATH" in reason
    assert not tmp_path.joinpath("cache").exists()


def test_a_broken_compiler_is_quoted_and_leaves_nothing(start, tmp_path):
    compiler = fake_compiler(tmp_path, "echo 'cc1: out of memory' >&2; exit 1")
    reason = said(start(CC=compiler))
    assert f"{compiler} -std=gnu11" in reason
    assert "cc1: out of memory" in reason
    assert files(tmp_path / "cache") == files(tmp_path / "tmp") == []


def test_a_compiler_that_makes_nonsense_is_a_reason_too(start, tmp_path):
    does = 'while [ "$1" != -o ]; do shift; done; echo nonsense > "$2"'
    reason = said(start(CC=fake_compiler(tmp_path, does)))
    assert "answer-" in reason
    assert files(tmp_path / "cache") == []


@needs_a_compiler
def test_a_compiler_that_knows_no_special_flags_will_do(start, tmp_path):
    does = f'case "$*" in *-march*) exit 1;; esac; exec {_library.compiler()} "$@"'
    assert said(start(CC=fake_compiler(tmp_path, does))) == "42"


@needs_a_compiler
def test_a_library_beside_the_source_is_taken_without_a_compiler(start, source, tmp_path):
    _library.translate(source, source.with_suffix(".so"), ())
    assert said(start(PATH=str(tmp_path), CC="cc")) == "42"
    assert not tmp_path.joinpath("cache").exists()


@pytest.mark.skipif("STEPSTACK_PREBUILT" not in os.environ, reason="for wheels with a library (nox -s isolated)")
def test_the_wheel_brings_the_library_and_needs_no_compiler():
    assert shutil.which("cc") is None
    assert _library.compiler() is None
    assert _library.missing(SOURCE) is None
    assert isinstance(_library.load(SOURCE), ctypes.CDLL)
