"""The registry of policies, entry points good and bad, and the example package, installed by pip and used by name."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from featstore.cache import base
from featstore.cache.base import (
    OnlinePolicy,
    Policy,
    PolicyContext,
    StaticPolicy,
    available_policies,
    get_policy,
    register_policy,
)
from featstore.cache.lru import LRU
from featstore.cache.select import choose_rows
from featstore.errors import BudgetError, CorruptionError, FeatstoreWarning, PluginError
from featstore.gather.plan import BatchPlan
from featstore.graph.policyinputs import policy_scores
from featstore.load import checkedstrategy
from featstore.partitioning import base as partitioners
from featstore.sampling.batch import SampledBatch
from featstore.sampling.foreign import sampled_by
from featstore.strategies import registry as strategies
from featstore.strategies.base import Batch, EpochRun
from featstore.strategies.ondemand import OnDemand
from tests.support.programs import FORGET_FEATSTORE, run_program
from tests.support.refusing import refuses

PARTITIONERS, STRATEGIES = partitioners.PARTITIONERS, strategies.STRATEGIES
ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "featstore-plugin-example"
BUILTIN = ["clock", "degree", "frequency", "in_out_ratio", "lru", "random", "s3fifo", "sieve"]


@pytest.fixture(autouse=True)
def _registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget what a test registers after it."""
    available_policies()
    monkeypatch.setattr(base.POLICIES, "known", dict(base.POLICIES.known))
    monkeypatch.setattr(base.POLICIES, "_asked", set())


class Rows(StaticPolicy):
    def scores(self, context: PolicyContext) -> Any:
        return -np.arange(context.n)


def new_class() -> type[StaticPolicy]:
    return type("New", (Rows,), {"__module__": "somewhere"})


def test_built_in_policies_are_known() -> None:
    assert set(BUILTIN) <= set(available_policies())
    for name in BUILTIN:
        policy = get_policy(name)
        assert policy.name == name
        assert isinstance(policy, (StaticPolicy, OnlinePolicy))
        assert get_policy(name) is not policy  # one instance a cache


def test_names_classes_and_instances() -> None:
    instance = LRU()
    assert get_policy(instance) is instance
    assert type(get_policy(LRU)) is LRU
    assert register_policy("rows")(Rows) is Rows
    assert type(get_policy("rows")) is Rows
    assert "rows" in available_policies()
    assert get_policy("rows").name == "rows"
    assert type("Sub", (Rows,), {})().name == "Sub"  # a subclass does not inherit the name
    for wrong in (7, None, object, np.zeros(3), OnlinePolicy.hit):
        refuses(TypeError, "a policy is a name", lambda: get_policy(wrong))


def test_an_unknown_name_lists_all() -> None:
    caught = refuses(ValueError, "no policy is named 'lrru'", lambda: get_policy("lrru"))
    for name in BUILTIN:
        assert repr(name) in str(caught.value)


def test_a_name_is_taken_once() -> None:
    register_policy("mine")(new_class())
    refuses(ValueError, r"'mine' is registered already: somewhere\.New", lambda: register_policy("mine")(new_class()))
    refuses(ValueError, r"'lru' is registered already: featstore\.cache\.lru\.LRU", lambda: register_policy("lru")(new_class()))
    twice = new_class()
    register_policy("twice")(twice)
    refuses(ValueError, "already", lambda: register_policy("twice")(twice))


def test_a_notebook_cell_may_run_again() -> None:
    first, second = (type("Cell", (Rows,), {"__module__": "__main__"}) for _ in range(2))
    register_policy("cell")(first)
    register_policy("cell")(second)
    assert type(get_policy("cell")) is second
    other = type("Other", (Rows,), {"__module__": "__main__"})
    refuses(ValueError, "already", lambda: register_policy("cell")(other))


def test_what_is_no_policy_is_not_registered() -> None:
    for wrong in (dict, 3, Rows().scores):
        refuses(TypeError, "not a subclass", lambda: register_policy("wrong")(wrong))
    refuses(TypeError, "name is a string", lambda: register_policy(Rows))
    refuses(ValueError, "empty", lambda: register_policy(""))
    assert "wrong" not in available_policies()


def test_a_third_kind_fits() -> None:
    class Planned(Policy):
        def plan(self) -> None: ...

    register_policy("planned")(Planned)
    assert type(get_policy("planned")) is Planned


def test_a_policy_that_cannot_be_made() -> None:
    class Needs(Rows):
        def __init__(self, what: int) -> None: ...

    register_policy("needs")(Needs)
    refuses(PluginError, r"policy 'needs' .*Needs\) cannot be made: .*'what'", lambda: get_policy("needs"))
    assert type(get_policy(Needs(3))) is Needs

    class Abstract(OnlinePolicy): ...

    refuses(PluginError, "Abstract", lambda: get_policy(Abstract))


class OneNode(partitioners.Partitioner):
    def assign(self, graph: Any) -> Any:
        return np.zeros(graph.num_nodes, np.int32)


def made_strategy(given: Any) -> Any:
    return strategies.get_strategy(given)


def made_partitioner(given: Any) -> Any:
    return partitioners.get_partitioner(given, {})


@pytest.mark.parametrize(
    ("kind", "base", "make"),
    [("policy", Rows, get_policy), ("partitioner", OneNode, made_partitioner), ("strategy", OnDemand, made_strategy)],
)
def test_a_name_is_text(kind: str, base: type, make: Any) -> None:
    def named(answer: Any) -> type:
        def name(_: object) -> Any:
            if isinstance(answer, Exception):
                raise answer
            return answer

        return type("Wrong", (base,), {"name": property(name), "__module__": "mine"})

    for wrong, error, message in (
        (named(None), PluginError, f"^{kind} mine.Wrong: name must be text, not NoneType$"),
        (named(LookupError("no name")), PluginError, f"^{kind} mine.Wrong: name raised LookupError: no name$"),
        (named(PermissionError(13, "denied")), PermissionError, "denied"),  # of the system: no fault of the plug-in's
    ):
        for given in (wrong, wrong()):
            refuses(error, message, lambda: make(given))
    assert make(named("good")).name == "good"


@pytest.mark.usefixtures("_program_server")
def test_many_threads_look_up_at_once(tmp_path: Path) -> None:
    script = f"{FORGET_FEATSTORE}import threading"
    script += """
from featstore.cache.base import available_policies, get_policy, register_policy, StaticPolicy
barrier, seen = threading.Barrier(8), []
def work(i):
    barrier.wait()
    if i % 2:
        register_policy(f"mine{i}")(type("Mine", (StaticPolicy,), {"scores": None}))
    seen.append(type(get_policy("sieve")).__name__)
threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
[t.start() for t in threads]
[t.join() for t in threads]
assert seen == ["Sieve"] * 8, seen
assert {"mine1", "mine7", "lru"} <= set(available_policies())
"""
    (tmp_path / "script.py").write_text(script)
    done = run_program("script.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def distribute(folder: Path, name: str, entry_points: str, source: str | None = None) -> None:
    """Put an 'installed' distribution with these entry points, and a module of that name, into a folder."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[featstore.policies]\n" + entry_points)
    if source is not None:
        (folder / f"{name}.py").write_text(source)


MODULE = """
import numpy as np
from featstore.cache.base import StaticPolicy
class Lowest(StaticPolicy):
    def scores(self, context):
        return -np.arange(context.n)
class Raises(Lowest):
    def __init__(self):
        raise OSError("no licence")
text = "no class"
"""


def test_entry_points_are_loaded_when_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    distribute(
        tmp_path, "plug_a", "lowest = plug_a:Lowest\nraises = plug_a:Raises\ntext = plug_a:text\nnone = plug_a:None_\n", MODULE
    )
    distribute(tmp_path, "plug_b", "broken = plug_b:X\n", "1 / 0\n")
    distribute(tmp_path, "plug_c", "missing = plug_c_is_not_there:X\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert {"lowest", "raises", "text", "none", "broken", "missing", *BUILTIN} <= set(available_policies())
    get_policy("lru")
    assert "plug_a" not in sys.modules
    policy = get_policy("lowest")
    assert type(policy).__name__ == "Lowest"
    assert policy.name == "lowest"
    assert type(get_policy("lowest")) is type(policy)
    for name, message in {
        "broken": r"broken = plug_b:X of plug.b 1\.0 cannot be loaded: ZeroDivisionError",
        "missing": r"missing = plug_c_is_not_there:X of plug.c 1\.0 cannot be loaded: ModuleNotFoundError",
        "none": r"none = plug_a:None_ of plug.a 1\.0 cannot be loaded: AttributeError",
        "text": r"text = plug_a:text of plug.a 1\.0 is not a subclass .* 'no class'",
        "raises": r"policy 'raises' \(plug_a\.Raises\) cannot be made: OSError: no licence",
    }.items():
        refuses(PluginError, message, lambda: get_policy(name))
    get_policy("lowest")  # the others' faults are theirs


def test_an_entry_point_whose_module_registers_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = MODULE.replace(
        "class Lowest", "from featstore.cache.base import register_policy\n@register_policy('own')\nclass Lowest"
    )
    distribute(
        tmp_path,
        "plug_d",
        "own = plug_d:Lowest\nclash = plug_d:Raises\n",
        source + "register_policy('clash')(type('C', (Lowest,), {}))\n",
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert get_policy("own").name == "own"
    del base.POLICIES.known["own"], base.POLICIES.known["clash"]
    sys.modules.pop("plug_d")
    refuses(PluginError, "registers another class", lambda: get_policy("clash"))


def test_entry_points_that_collide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    distribute(tmp_path, "plug_e", "same = plug_e:Lowest\nlru = plug_e:Lowest\n", MODULE)
    distribute(tmp_path, "plug_f", "same = plug_f:Lowest\n", MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    refuses(PluginError, r"several installed packages .*plug_e:Lowest.*plug_f:Lowest", lambda: get_policy("same"))
    # A plug-in does not replace what is built in, and that is said, once.
    message = (
        r"the policy 'lru' is featstore\.cache\.lru\.LRU, and entry point .*lru = plug_e:Lowest of plug.e 1\.0, .* is not used"
    )
    with pytest.warns(FeatstoreWarning, match=message):
        assert type(get_policy("lru")) is LRU
    assert type(get_policy("lru")) is LRU
    assert available_policies().count("same") == 1


def test_a_distribution_found_twice_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in (tmp_path / "a", tmp_path / "b"):
        distribute(folder, "plug_g", "twin = plug_g:Lowest\n", MODULE)
        monkeypatch.syspath_prepend(folder)
    assert get_policy("twin").name == "twin"


def test_every_registry_says_which_of_two_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the kind: a built-in name is refused; an entry point with that name, or a registered class's, is said."""
    for registry, name in ((base.POLICIES, "sieve"), (PARTITIONERS, "ldg"), (STRATEGIES, "ginex")):
        built_in: Any = registry.find(name)  # imports all built-in ones, which register once
        monkeypatch.setattr(registry, "known", dict(registry.known))
        monkeypatch.setattr(registry, "_asked", set())
        with pytest.raises(ValueError, match=f"'{name}' is registered already: featstore"):
            registry.register(name)(type("Mine", (built_in,), {"__module__": "mine"}))
        registry.register("own")(mine := type("Mine", (built_in,), {"__module__": "mine"}))
        folder = tmp_path / registry.kind
        distribute(folder, f"plug_{registry.kind}", "")
        points = f"[{registry.group}]\n{name} = plug_x:Y\nown = plug_x:Y\n"
        (folder / f"plug_{registry.kind}-1.0.dist-info" / "entry_points.txt").write_text(points)
        monkeypatch.syspath_prepend(folder)
        for each, wins in ((name, built_in), ("own", mine)):
            there = f"{each} = plug_x:Y of plug.{registry.kind} 1"
            match = f"the {registry.kind} '{each}' is {wins.__module__}.{wins.__qualname__}, and .*{there}"
            with pytest.warns(FeatstoreWarning, match=match):
                assert registry.find(each) is wins
            assert registry.find(each) is wins
        assert "plug_x" not in sys.modules


def run_python(arguments: list[str], path: list[Path], cwd: Path | None = None) -> str:
    """Run this interpreter; its own packages stay visible, ``path`` comes first."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PIP_", "PYTEST_"))}
    environment |= {"PYTHONPATH": os.pathsep.join(map(str, path)), "PYTHONDONTWRITEBYTECODE": "1", "PIP_CONFIG_FILE": os.devnull}
    done = subprocess.run(
        [sys.executable, *arguments], env=environment, cwd=cwd, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, f"{arguments}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def install(example: Path, folder: Path) -> tuple[Path, Path]:
    """Install an example with pip, offline, into a folder of its own; return that folder and the copied source."""
    source, target = folder / "source", folder / "target"
    shutil.copytree(example, source, ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__", ".*"))
    quiet = "--quiet --disable-pip-version-check --no-cache-dir --no-build-isolation --no-deps --no-index"
    run_python(["-m", "pip", "install", *quiet.split(), "--target", str(target), str(source)], [])
    return target, source


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return install(EXAMPLE, tmp_path_factory.mktemp("plugin"))


@pytest.mark.usefixtures("_program_server")
def test_the_example_is_found_by_name(installed: tuple[Path, Path], tmp_path: Path) -> None:
    script = f"import sys; sys.path.insert(0, {str(installed[0])!r})"
    script += """
import numpy as np
from featstore.cache.base import available_policies, get_policy
from featstore.cache.table import FeatureCache
assert "lfu" in available_policies()
assert "featstore_plugin_example" not in sys.modules
data = np.arange(400, dtype=np.uint8).reshape(100, 4)
cache = FeatureCache(10, 4, 100, get_policy("lfu"))
rng = np.random.default_rng(0)
for _ in range(50):
    ids = (100 * rng.random(20) ** 3).astype(np.int64)
    plan = cache.plan(ids)
    cache.apply(cache.admit(ids), data[ids])
assert cache.stats()["hits"] > 200, cache.stats()
print(get_policy("lfu").name, sys.modules["featstore_plugin_example"].__file__)
"""
    (tmp_path / "script.py").write_text(script)
    done = run_program("script.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    name, file = done.stdout.split()
    assert name == "lfu"
    assert Path(file).is_relative_to(installed[0])


@pytest.mark.parametrize("some", [["-k", "long_trace or name or emptied"], pytest.param([], marks=pytest.mark.stress)])
def test_the_example_keeps_the_contract(installed: tuple[Path, Path], some: list[str]) -> None:
    """Some of the contract: all of it holds for such a policy in tests/testing/test_policies.py."""
    target, source = installed
    arguments = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error", *some, "tests"]
    assert " passed" in run_python(arguments, [target, ROOT], cwd=source)


def test_it_was_not_there_before() -> None:
    assert "lfu" not in available_policies()


def test_hypothesis_is_only_needed_for_testing() -> None:
    """That importing the package imports none is a test of tests/cli/test_main.py."""
    wrong = [
        path
        for path in (ROOT / "featstore").rglob("*.py")
        if "testing" not in path.parts and ("hypothesis" in path.read_text() or "import pytest" in path.read_text())
    ]
    assert not wrong


@pytest.mark.parametrize(
    "failure",
    [
        OSError(5, "fails", "x"),
        CorruptionError("damaged", "x"),
        BudgetError("none", 7),
        MemoryError(),
        KeyError("x"),
    ],
    ids=lambda failure: type(failure).__name__,
)
def test_errors_of_the_drive_and_of_memory_are_not_said_to_be_a_plug_ins(
    failure: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However they come out of its code: a loader gives memory back after a lack of it, and the command advises on damage."""

    def fail(*_: object, **__: object) -> Any:
        raise failure

    class Run(EpochRun):
        threads = 1

        def batch(self, position: int) -> Any:
            return Batch(position, SampledBatch(0, 0, torch.arange(3), 3, ()))

        def plan(self, name: str, batch: Batch) -> Any:
            return BatchPlan(3, ()), {}

    policy: Any = type("Fails", (StaticPolicy,), {"name": "fails", "scores": fail})()
    context = PolicyContext(3, 4, fail, fail)
    answer = type("Answer", (), {"num_sampled_nodes": property(fail)})()
    graph = SimpleNamespace(num_nodes=3, pool=None)
    loader: Any = SimpleNamespace(graph=graph, nodes=SimpleNamespace(rows_of=fail))
    monkeypatch.setattr(checkedstrategy, "as_sampled", fail)
    epoch = checkedstrategy._CheckedEpoch("mine", Run(), loader, None, 0)
    calls: dict[str, Callable[[], Any]] = {
        "scores": lambda: policy_scores(policy, context, of_lists=False),
        "rows": lambda: choose_rows(policy, context, 3, 1, by_score=False),
        "sample": lambda: sampled_by(policy, answer, 3, 0, 0),
        "batch": lambda: epoch.batch(0),
        "plan": lambda: epoch.plan("x", Run().batch(0)),
    }
    for name, call in calls.items():
        if isinstance(failure, KeyError):
            with pytest.raises(PluginError, match="KeyError"):
                call()
            continue
        with pytest.raises(type(failure)) as caught:
            call()
        assert caught.value is failure, name
