"""Each module has a file of tests of its name, or a line in tests/tested_by.txt that says which tests hold it."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def own_tests(module: Path) -> Path:
    """Return where a module's tests are: those of the top are of the room ``base``, an adapter's have its name before theirs."""
    if module.suffix == ".pyx":
        return ROOT / "tests" / "core" / f"test_{module.stem}.py"
    room = module.parts[1] if len(module.parts) > 2 else "base"
    framework = f"{module.parts[2]}_" if room == "adapters" else ""
    return ROOT / "tests" / room / f"test_{framework}{module.stem}.py"


def table(text: str) -> dict[str, list[str]]:
    """Read the lines ``module: room/tests ...``; groups have empty lines between them."""
    rows = [line.partition(": ") for line in text.splitlines() if line and not line.startswith("#")]
    return {module: tests.split() for module, _, tests in rows}


def wrong(modules: list[Path], held: dict[str, list[str]]) -> list[str]:
    """Name what the table lacks, and what it has and should not."""
    names = {str(module): own_tests(module).exists() for module in modules}
    found = [f"{name} has no tests" for name, own in names.items() if not own and not held.get(name)]
    found += [f"{name} is not there" for name in held.keys() - names.keys()]
    found += [f"{name} has tests of its own" for name in held if names.get(name)]
    rows = (test.split("/") for row in held.values() for test in row)
    files = {f"{room}/{name}": ROOT / "tests" / room / f"test_{name}.py" for room, name in rows}
    return found + [f"{test} is not there" for test, file in files.items() if not file.exists()]


def modules_of() -> list[Path]:
    """List the modules of the library and of its core."""
    files = [*ROOT.glob("featstore/**/*.py"), *ROOT.glob("src_cython/**/*.pyx")]
    return sorted(file.relative_to(ROOT) for file in files if not file.stem.startswith("__"))


def test_each_module_has_its_tests() -> None:
    modules = modules_of()
    assert len(modules) > 250
    text = (ROOT / "tests" / "tested_by.txt").read_text()
    assert wrong(modules, table(text)) == []
    begins = [group.partition("\n")[0] for group in text.split("\n\n")]
    assert len(begins) > 20
    assert all(begin.startswith("# ") and begin.endswith(".") for begin in begins), "why a group has no tests of its own"


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("", "featstore/cache/clock.py has no tests"),
        (
            "featstore/cache/clock.py: cache/policies\nfeatstore/cache/gone.py: cache/policies",
            "featstore/cache/gone.py is not there",
        ),
        ("featstore/cache/clock.py: cache/policies\nfeatstore/cache/belady.py: cache/policies", "belady.py has tests of its own"),
        ("featstore/cache/clock.py: cache/gone", "cache/gone is not there"),
    ],
)
def test_what_is_wrong_is_found(line: str, error: str) -> None:
    modules = [Path("featstore/cache/clock.py"), Path("featstore/cache/belady.py")]
    (found,) = wrong(modules, table(line))
    assert error in found
