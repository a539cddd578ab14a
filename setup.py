"""Compile ``src_cython/`` into ``featstore._core``.

``FEATSTORE_BUILD`` selects the build: ``release`` (default), ``debug`` (C asserts, bounds checks), ``trace`` (line
coverage), ``asan`` and ``tsan`` (sanitizers).
"""

import os
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup

ROOT = Path("src_cython")
MODE = os.environ.get("FEATSTORE_BUILD", "release")
MODES = {
    "release": (["-O3"], []),
    "debug": (["-O1", "-g", "-UNDEBUG"], []),
    "trace": (["-O0", "-g"], []),
    "asan": (["-O1", "-g", "-UNDEBUG", "-fsanitize=address,undefined", "-fno-omit-frame-pointer"], ["-fsanitize=address,undefined"]),
    "tsan": (["-O1", "-g", "-UNDEBUG", "-fsanitize=thread", "-fno-omit-frame-pointer"], ["-fsanitize=thread"]),
}
if MODE not in MODES:
    raise SystemExit(f"FEATSTORE_BUILD={MODE!r} is not one of {sorted(MODES)}")
compile_args, link_args = MODES[MODE]
checked = MODE in ("debug", "asan", "tsan")

extensions = [
    Extension(
        ".".join(path.relative_to(ROOT).with_suffix("").parts),
        [str(path)],
        include_dirs=[str(path.parent)],
        depends=[str(header) for header in sorted(path.parent.glob("*.h"))],
        extra_compile_args=["-std=gnu11", "-fvisibility=hidden", "-Wall", "-Wno-unused-function", "-Wno-sign-compare", *compile_args],
        extra_link_args=["-pthread", *link_args],
        define_macros=[("CYTHON_TRACE_NOGIL", "1")] if MODE == "trace" else [],
    )
    for path in sorted(ROOT.rglob("*.pyx"))
]

setup(
    ext_modules=cythonize(
        extensions,
        include_path=[str(ROOT)],
        build_dir=f"build/cython-{MODE}",
        force=MODE != "release",
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
    options={"build": {"build_base": f"build/{MODE}"}},
)
