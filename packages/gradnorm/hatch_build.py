"""Puts the C source into the wheel as a library, for several kinds of CPU; without a compiler the wheel is for any."""

import platform
import shutil
import tempfile
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CustomBuildHook(BuildHookInterface):
    def initialize(self, version, build_data):
        """Translate; not for an editable install, where the source may change and is translated when it is used."""
        (source,) = Path(self.root, "src").rglob("*.c")
        if version == "editable" or platform.system() != "Linux":
            return
        self.folder = tempfile.mkdtemp()
        target = Path(self.folder, source.with_suffix(".so").name)
        try:
            _library_of(source.parent).translate(source, target, ())
        except RuntimeError as error:
            self.app.display_warning(f"{source.name} did not compile, so it is translated where it is used: {error}")
            return
        build_data["force_include"][str(target)] = f"{source.parent.name}/{target.name}"
        build_data["tag"] = f"py3-none-{_platform()}"
        build_data["pure_python"] = False

    def finalize(self, version, build_data, artifact_path):
        shutil.rmtree(getattr(self, "folder", ""), ignore_errors=True)


def _library_of(package):
    """The module that knows how sources are translated, without the package, which imports torch."""
    spec = spec_from_file_location("library", package / "_library.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _platform():
    """It is linked with the C library alone, of which any later version will do."""
    kind, release = platform.libc_ver()
    if kind == "glibc":
        return f"manylinux_{release.replace('.', '_')}_{platform.machine()}"
    return f"linux_{platform.machine()}"
