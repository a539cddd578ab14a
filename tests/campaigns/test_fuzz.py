"""The parsers on the corpus of the fuzzers, and on inputs made of it: nothing but the errors that are promised."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.campaigns import fuzz_targets
from tests.campaigns.fuzz_targets import CORPUS, TARGETS, forget_scratch, inputs

HERE = Path(__file__).parent
KERNELS = HERE.parents[1] / "src_cython" / "featstore" / "_core" / "kernels"


@pytest.fixture(autouse=True, scope="module")
def _scratch() -> Iterator[None]:
    yield
    forget_scratch()


@pytest.mark.parametrize("name", TARGETS)
def test_the_corpus_is_replayed(name: str) -> None:
    """Seeds, and what fuzzers found, each in every way of reading it."""
    assert inputs(name)
    for data in inputs(name):
        TARGETS[name](data)


def mutated(data: bytes, rng: random.Random) -> bytes:
    """Change an input as fuzzers do: bytes flipped, put in, taken out, repeated, numbers of note written over."""
    found = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(found) + 1)
        how = rng.randrange(5)
        if how == 0 and found:
            found[at % len(found)] ^= 1 << rng.randrange(8)
        elif how == 1:
            found[at:at] = rng.choice((b"\0", b"9" * 40, b"-1", b"{}", b"[" * 99, b"!!int", b"\xff" * 8, rng.randbytes(3)))
        elif how == 2:
            del found[at : at + rng.randint(1, 20)]
        elif how == 3:
            found[at:at] = found[at : at + 40]
        else:
            value = rng.choice((0, -1, 1, 2**31 - 1, 2**32, 2**62, -(2**63)))
            found[at : at + 8] = value.to_bytes(8, "little", signed=True)
    return bytes(found)


@pytest.mark.parametrize("name", TARGETS)
def test_inputs_made_of_the_corpus(name: str) -> None:
    seeds = inputs(name)

    @given(st.integers(0, 2**32))
    def attempt(seed: int) -> None:
        rng = random.Random(seed)
        TARGETS[name](mutated(rng.choice(seeds), rng))

    attempt()


# What a seed shows of a target is that it comes to its end; of these the last part is an error by design.
NOT_WHOLE = {"csv", "npy", "npz", "ogb_csv", "graphbolt"}


@pytest.mark.parametrize("name", sorted(TARGETS.keys() - NOT_WHOLE))
def test_seeds_are_parsed_to_their_end(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: a target whose seed is refused at once would fuzz nothing but a checksum."""
    monkeypatch.setattr(fuzz_targets, "DAMAGE", ())
    TARGETS[name]((CORPUS / name / "seed-0").read_bytes())


def test_a_parser_that_breaks_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: a header that is not what it was parsed to fails its target."""
    from featstore.storage import format as formats

    monkeypatch.setattr(formats.Header, "pack", lambda self: b"")
    with pytest.raises(AssertionError, match="not what it was parsed to"):
        TARGETS["header"](inputs("header")[0])


def test_the_corpus_is_small() -> None:
    assert sum(path.stat().st_size for path in CORPUS.rglob("*") if path.is_file()) < 200_000


# --- the kernels ----------------------------------------------------------------------------------------------------------------

SOURCES = ("neighbors", "weighted", "draws", "xxh3", "pairs", "nearby", "vectors")


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fuzzer of the kernels with a main of its own, under AddressSanitizer and UndefinedBehaviorSanitizer."""
    made = tmp_path_factory.mktemp("kernels") / "fuzz_kernels"
    line = [shutil.which("gcc") or "cc", "-w", "-O0", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]
    files = [HERE / "fuzz_kernels.c", *(KERNELS / f"{name}.c" for name in SOURCES)]
    subprocess.run([*line, "-DFUZZ_MAIN", f"-I{KERNELS}", "-o", made, *files, "-lm"], check=True, capture_output=True, text=True)
    return made


def replay(kernels: Path, n: int, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the corpus, and then ``n`` drawn inputs."""
    words = [str(kernels), str(n), *sorted(map(str, (CORPUS / "kernels").iterdir()))]
    return subprocess.run(words, capture_output=True, text=True, check=False, env={**os.environ, "LD_PRELOAD": "", **environment})


@pytest.mark.parametrize("n", [3000, pytest.param(10**6, marks=pytest.mark.stress)])
def test_kernels_on_their_corpus_and_drawn_inputs(kernels: Path, n: int) -> None:
    done = replay(kernels, n)
    assert done.returncode == 0, done.stderr
    assert f"{n} drawn inputs" in done.stdout


def test_a_kernel_without_its_check_is_noticed(kernels: Path) -> None:
    """The control: ids that no check has seen are looked up, which reads beyond an array."""
    done = replay(kernels, 0, FUZZ_WITHOUT_CHECK="1")
    assert done.returncode != 0
    assert "AddressSanitizer" in done.stderr
