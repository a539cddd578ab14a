"""Compile ``src_cython/`` into ``featstore._core``.

``FEATSTORE_BUILD`` selects the build: ``release`` (default), ``debug`` (C asserts, bounds checks), ``trace`` (line
coverage), ``asan`` and ``tsan`` (sanitizers). Each keeps its generated C and its objects in a folder of its own, because
Cython does not notice changed directives.
"""

import os
import re
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path("src_cython")
SHARED = "featstore._core._shared"  # Cython's memoryview code, once for all modules instead of 1 MB in each
MODE = os.environ.get("FEATSTORE_BUILD", "release")
MODES = {
    "release": (["-O2", "-g0"], []),  # -O3 is for kernels, where most loops are; what debuggers read is 10 MB
    "debug": (["-O1", "-g", "-UNDEBUG"], []),
    "trace": (["-O0", "-g"], []),
    "asan": (
        ["-fsanitize=address,undefined", "-O1", "-g", "-UNDEBUG", "-fno-omit-frame-pointer"],
        ["-fsanitize=address,undefined"],
    ),
    "tsan": (["-fsanitize=thread", "-O1", "-g", "-UNDEBUG", "-fno-omit-frame-pointer"], ["-fsanitize=thread"]),
}
USES = re.compile(r'^ *(?:#include|cdef extern from) "(?:kernels/)?(\w+\.h)"|^from featstore\._core\.(\w+) cimport', re.MULTILINE)
WARNINGS = ["-Wall", "-Wno-unused-function", "-Wno-sign-compare", "-Wno-psabi"]  # vectors are passed to inlined functions alone
if MODE not in MODES:
    raise SystemExit(f"FEATSTORE_BUILD={MODE!r} is not one of {sorted(MODES)}")
compile_args, link_args = MODES[MODE]
checked = MODE in ("debug", "asan", "tsan")
# A kernel's loops lie alike in every build: unaligned, a copy takes up to 5 % longer.
KERNEL_ARGS = ["-falign-functions=32", *(["-O3"] if MODE == "release" else [])]
# Sums and products round one by one, as in Python: the same on every processor.
C_ARGS = ["-std=gnu11", "-ffp-contract=off", "-fvisibility=hidden", *WARNINGS, *compile_args]


def uses(source: Path) -> list[str]:
    """Return what ``source`` is built anew with: the kernels that it and its .pxd files name, and those that these include."""
    kernels = ROOT / "featstore" / "_core" / "kernels"
    found, todo = set(), {source, source.with_suffix(".pxd")}
    while todo:
        path = todo.pop()
        found.add(path)
        if path.exists():
            for header, module in USES.findall(path.read_text()):
                used = {kernels / header, (kernels / header).with_suffix(".c")} if header else {source.with_name(f"{module}.pxd")}
                todo |= used - found
    return sorted(str(path) for path in found if path.parent == kernels and path.exists())


def extension(name: str, source: Path) -> Extension:
    """Return the extension module ``name`` made from ``source``."""
    return Extension(
        name,
        [str(source)],
        include_dirs=[str(source.parent)],
        depends=uses(source),
        extra_compile_args=C_ARGS,
        extra_link_args=["-pthread", *link_args],
        define_macros=[("CYTHON_TRACE_NOGIL", "1")] if MODE == "trace" else [],
    )


class BuildExt(build_ext):
    """Builds the library of kernels first, which the modules link."""

    def run(self) -> None:
        """Build both."""
        self.run_command("build_clib")
        super().run()


kernels, headers = (sorted(str(path) for path in ROOT.rglob(f"kernels/*.{kind}")) for kind in "ch")
LIBRARY = {"sources": kernels, "obj_deps": {"": headers}, "cflags": [*C_ARGS, *KERNEL_ARGS]}
extensions = [extension(".".join(path.relative_to(ROOT).with_suffix("").parts), path) for path in sorted(ROOT.rglob("*.pyx"))]
if extensions:
    extensions.append(
        Extension(SHARED, [SHARED.replace(".", "/") + ".c"], extra_compile_args=["-O2", "-w"], extra_link_args=link_args)
    )

setup(
    cmdclass={"build_ext": BuildExt},
    libraries=[("featstore_kernels", LIBRARY)] if kernels else [],
    ext_modules=cythonize(
        extensions,
        include_path=[str(ROOT)],
        build_dir=f"build/cython-{MODE}",
        force=MODE != "release",
        shared_utility_qualified_name=SHARED,
        compiler_directives={
            "language_level": 3,
            "boundscheck": checked,
            "wraparound": False,
            "cdivision": True,
            "initializedcheck": checked,
            "embedsignature": True,
            "freethreading_compatible": False,
            "linetrace": MODE == "trace",
        },
    ),
    options={"build": {"build_base": f"build/{MODE}"}, "build_ext": {"parallel": len(os.sched_getaffinity(0))}},
)
