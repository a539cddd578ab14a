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

ROOT = Path("src_cython")
SHARED = "featstore._core._shared"  # Cython's memoryview code, once for all modules instead of 1 MB in each
MODE = os.environ.get("FEATSTORE_BUILD", "release")
ASAN, TSAN = ["-fsanitize=address,undefined"], ["-fsanitize=thread"]
MODES = {
    "release": (["-O3"], []),
    "debug": (["-O1", "-g", "-UNDEBUG"], []),
    "trace": (["-O0", "-g"], []),
    "asan": (
        ["-fsanitize=address,undefined", "-O1", "-g", "-UNDEBUG", "-fno-omit-frame-pointer"],
        ["-fsanitize=address,undefined"],
    ),
    "tsan": (["-fsanitize=thread", "-O1", "-g", "-UNDEBUG", "-fno-omit-frame-pointer"], ["-fsanitize=thread"]),
}
USES = re.compile(r'^(?:#include|cdef extern from) "(\w+\.h)"|^from featstore\._core\.(\w+) cimport', re.MULTILINE)
WARNINGS = ["-Wall", "-Wno-unused-function", "-Wno-sign-compare"]
if MODE not in MODES:
    raise SystemExit(f"FEATSTORE_BUILD={MODE!r} is not one of {sorted(MODES)}")
compile_args, link_args = MODES[MODE]
checked = MODE in ("debug", "asan", "tsan")


def headers(source: Path) -> list[str]:
    """Return the headers beside ``source`` that it is compiled with: its own, those of its .pxd files, and what these include."""
    found, todo = set(), {source, source.with_suffix(".pxd")}
    while todo:
        path = todo.pop()
        found.add(path)
        if path.exists():
            used = {path.with_name(header or f"{module}.pxd") for header, module in USES.findall(path.read_text())}
            todo |= used - found
    return sorted(str(path) for path in found if path.suffix == ".h" and path.exists())


def extension(name: str, source: Path) -> Extension:
    """Return the extension module ``name`` made from ``source``."""
    return Extension(
        name,
        [str(source)],
        include_dirs=[str(source.parent)],
        depends=headers(source),
        # Sums and products round one by one, as in Python: the same on every processor.
        extra_compile_args=["-std=gnu11", "-ffp-contract=off", "-fvisibility=hidden", *WARNINGS, *compile_args],
        extra_link_args=["-pthread", *link_args],
        define_macros=[("CYTHON_TRACE_NOGIL", "1")] if MODE == "trace" else [],
    )


extensions = [extension(".".join(path.relative_to(ROOT).with_suffix("").parts), path) for path in sorted(ROOT.rglob("*.pyx"))]
if extensions:
    extensions.append(
        Extension(SHARED, [SHARED.replace(".", "/") + ".c"], extra_compile_args=["-O2", "-w"], extra_link_args=link_args)
    )

setup(
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
