"""Builds the Cython core: every ``minidl/*/_*.pyx`` becomes one extension module. The rest is in pyproject.toml.

``python setup.py build_ext --inplace`` builds in the source tree without pip and without a network.
"""

from __future__ import annotations

import os
import sys
import tempfile
from glob import glob
from pathlib import Path

import setuptools
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError, LinkError

try:
    import numpy
    from Cython.Build import cythonize
except ImportError as error:
    reason = str(error).strip().partition("\n")[0]
    sys.exit(f"minidl: building needs Cython >= 3.1 and NumPy >= 2.0 ({reason}); pip install cython numpy")

if int(setuptools.__version__.partition(".")[0]) < 77:  # older ones reject the licence field of pyproject.toml
    sys.exit(f"minidl: building needs setuptools >= 77, this is {setuptools.__version__}; pip install -U setuptools")

OPENMP = ["-fopenmp"]
PROBE = "#include <omp.h>\nint main(void) { return omp_get_max_threads() < 1; }\n"


def jobs() -> int:
    """The cores this process may use, which under a batch system are fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class BuildExtensions(build_ext):
    """Compiles in parallel, with OpenMP where the compiler has it."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.parallel = self.parallel or jobs()
        if self.inplace:  # pip's folder for an editable install lives no longer than it: all would be compiled again
            self.build_lib = self.build_temp = f"build/{sys.implementation.cache_tag}"

    def build_extensions(self) -> None:
        if self.compiler_links_openmp():
            for extension in self.extensions:
                extension.extra_compile_args += OPENMP
                extension.extra_link_args += OPENMP
        else:
            print("minidl: this C compiler has no OpenMP; the CPU backend will use one thread per process", flush=True)
        super().build_extensions()

    def compiler_links_openmp(self) -> bool:
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder, "openmp.c")
            source.write_text(PROBE)
            try:
                objects = self.compiler.compile([str(source)], output_dir=folder, extra_postargs=OPENMP)
                self.compiler.link_executable(objects, str(Path(folder, "openmp")), extra_postargs=OPENMP)
            except (CompileError, LinkError):
                return False
        return True


def extensions() -> list[Extension]:
    shared = glob("minidl/cpu/*.h")
    return [
        Extension(
            source.removesuffix(".pyx").replace("/", "."),
            [source],
            include_dirs=["minidl/cpu", numpy.get_include()],
            define_macros=[("NPY_NO_DEPRECATED_API", "NPY_1_7_API_VERSION")],
            extra_compile_args=["-O3", "-g0"],  # many Pythons ask for debug symbols, ten times the code
            depends=sorted({*shared, *glob(f"{os.path.dirname(source)}/*.h")}),
        )
        for source in sorted(glob("minidl/*/_*.pyx"))
    ]


if __name__ == "__main__":
    os.chdir(Path(__file__).resolve().parent)
    setup(
        ext_modules=cythonize(extensions(), nthreads=jobs(), build_dir="build/cython", language_level=3),
        cmdclass={"build_ext": BuildExtensions},
    )
