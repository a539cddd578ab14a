"""The files that make a release: workflows, cibuildwheel's configuration, the conda recipe, CITATION.cff, forms of issues."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import featstore

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").iterdir())
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").iterdir())
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
BUILDS = PYPROJECT["tool"]["cibuildwheel"]
CONDA_NAMES = {"pytorch": "torch", "python-lmdb": "lmdb", "python-xxhash": "xxhash"}  # where they are not PyPI's


def loaded(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def named(name: str) -> dict[Any, Any]:
    """Return the workflow of that name."""
    found: dict[Any, Any] = loaded(ROOT / ".github" / "workflows" / f"{name}.yml")
    return found


def steps_of(workflow: dict[Any, Any]) -> list[dict[str, Any]]:
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


def pythons() -> list[str]:
    """Return the Python versions that the package says it supports, in order."""
    found = [re.fullmatch(r"Programming Language :: Python :: (3\.\d+)", each) for each in PROJECT["classifiers"]]
    return [each[1] for each in found if each]


def test_there_is_what_the_others_look_at() -> None:
    assert [path.name for path in WORKFLOWS] == ["ci.yml", "release.yml"]
    assert [path.name for path in FORMS] == ["bug.yml", "config.yml", "feature.yml"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_use_what_exists(path: Path) -> None:
    """Targets of make, files of this tree, jobs that are needed; ends of time for each job."""
    workflow, text = loaded(path), path.read_text()
    assert True in workflow  # YAML 1.1 reads "on" so; GitHub does not
    makefile = (ROOT / "Makefile").read_text()
    commands = "\n".join(step["run"] for step in steps_of(workflow) if "run" in step)
    targets = set(re.findall(r"\bmake (\w+)", commands))
    assert not {target for target in targets if not re.search(rf"^{target}:", makefile, re.MULTILINE)}
    files = re.findall(r"(?<![\w/*.-])(?:(?:tests|docs|\.github|recipe)/[\w./-]+\w|[A-Z]+\.md|pyproject\.toml)", text)
    assert not [file for file in files if not (ROOT / file).exists()]
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"] <= 90
        needs = job.get("needs", [])
        assert {*([needs] if isinstance(needs, str) else needs)} <= workflow["jobs"].keys()


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_may_do_little(path: Path) -> None:
    """They read the tree; one job proves who it is to the index. No passwords; actions by their major versions."""
    workflow = loaded(path)
    assert workflow["permissions"] == {"contents": "read"}
    more = {name: job["permissions"] for name, job in workflow["jobs"].items() if "permissions" in job}
    assert more == ({"publish": {"id-token": "write"}} if path.name == "release.yml" else {})
    assert "secrets." not in path.read_text()
    assert "pull_request_target" not in workflow[True]
    uses = [step["uses"] for step in steps_of(workflow) if "uses" in step]
    assert uses
    assert not [each for each in uses if not re.fullmatch(r"actions/[\w-]+@v\d+|pypa/gh-action-pypi-publish@release/v\d+", each)]


def test_ci_runs_the_readme_s_commands() -> None:
    """On the oldest and the newest Python; PIP_ARGS is the Makefile's."""
    ci = named("ci")
    commands = [step["run"].split(" DEMO_ARGS")[0] for step in steps_of(ci) if "run" in step]
    made = [each.removeprefix("make ") for each in sorted(commands) if each.startswith("make")]
    assert made == ["demo", "docs", "graphbolt", "lint", "test"]
    assert ci["env"].keys() == {"PIP_ARGS"}
    assert "$(PIP_ARGS)" in (ROOT / "Makefile").read_text()
    matrix = ci["jobs"]["test"]["strategy"]["matrix"]["python"]
    assert (matrix[0], matrix[-1]) == (pythons()[0], pythons()[-1])
    assert set(matrix) < set(pythons())


def test_ci_builds_a_wheel_as_a_release_does() -> None:
    ci, release = named("ci")["jobs"]["wheel"], named("release")["jobs"]["wheels"]
    assert ci["env"] == release["env"]
    made, of_release = ([step["run"] for step in job["steps"] if "run" in step] for job in (ci, release))
    assert of_release[1].removesuffix(" auditwheel") == made[0].removesuffix(" auditwheel")
    assert made[2].endswith(f" dist/*{BUILDS['manylinux-x86_64-image']}_x86_64*.whl")
    assert "--only cp312-manylinux_x86_64 " in made[1]


def test_only_a_tag_publishes_and_after_all_was_tested() -> None:
    release = named("release")
    assert release[True] == {"push": {"tags": ["v*"]}, "workflow_dispatch": None}
    jobs = release["jobs"]
    assert jobs["publish"]["if"] == "startsWith(github.ref, 'refs/tags/v')"
    assert set(jobs["publish"]["needs"]) == jobs.keys() - {"publish"}
    assert [name for name, job in jobs.items() if any("pypi-publish" in step.get("uses", "") for step in job["steps"])] == [
        "publish"
    ]
    kept = [step["with"] for step in steps_of(release) if "upload-artifact" in step.get("uses", "")]
    assert all(each["name"].startswith("dist-") and each["if-no-files-found"] == "error" for each in kept)
    assert {each["path"] for each in kept} == {"dist/*.tar.gz", "dist/*.whl"}
    assert [step["with"]["pattern"] for step in jobs["publish"]["steps"] if "with" in step] == ["dist-*"]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="the step runs on the Python that the workflow sets up, which has tomllib")
@pytest.mark.parametrize(("tag", "is_right"), [("v{}", True), ("{}", False), ("v{}.1", False)])
def test_a_tag_is_the_package_s_version(tmp_path: Path, tag: str, is_right: bool) -> None:
    """By the workflow's own step. A release also needs its section in the changelog."""
    (step,) = [step for step in steps_of(named("release")) if step.get("name") == "The tag is the package's version"]
    assert step["if"] == "startsWith(github.ref, 'refs/tags/')"
    (tmp_path / "python").symlink_to(sys.executable)
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    version = PROJECT["version"]
    env = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "GITHUB_REF_NAME": tag.format(version)}

    def status(changelog: str) -> int:
        (tmp_path / "CHANGELOG.md").write_text(changelog)
        return subprocess.run(["bash", "-e", "-c", step["run"]], cwd=tmp_path, env=env, check=False).returncode

    assert (status(f"# Changelog\n\n## [{version}] - 2030-01-01\n") == 0) == is_right
    assert status("# Changelog\n\n## [Unreleased]\n") != 0


@pytest.mark.skipif(sys.version_info < (3, 11), reason="cibuildwheel needs Python 3.11")
@pytest.mark.parametrize("archs", [["x86_64", "aarch64"], None], ids=["both", "this machine's"])
def test_cibuildwheel_builds_what_is_supported(archs: list[str] | None) -> None:
    """It knows every option, and each Python of the classifiers, on both processors, without musl and free threads."""
    chosen = [] if archs is None else ["--archs", ",".join(archs)]
    command = [sys.executable, "-m", "cibuildwheel", "--platform", "linux", *chosen, "--print-build-identifiers", str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    tags = [f"cp{version.replace('.', '')}" for version in pythons()]
    machines = [os.uname().machine] if archs is None else archs
    assert done.stdout.split() == [f"{tag}-manylinux_{machine}" for machine in machines for tag in tags]


def test_wheels_are_tested_by_a_script_that_needs_nothing_else() -> None:
    """``{package}`` is the unpacked sdist; ``{project}``, where cibuildwheel is called, has no tests."""
    command = BUILDS["test-command"]
    assert command == "python {package}/tests/system/smoke.py"
    script = (ROOT / command.split("{package}/")[1]).read_text()
    imported = set(re.findall(r"^(?:import|from) ([\w]+)", script, re.MULTILINE))
    assert imported - set(sys.stdlib_module_names) == {"numpy", "torch", "featstore"}
    images = {BUILDS[f"manylinux-{machine}-image"] for machine in ("x86_64", "aarch64")}
    assert images == {"manylinux_2_28"}
    runners = named("release")["jobs"]["wheels"]["strategy"]["matrix"]["runner"]
    assert len(runners) == 2
    assert [runner.endswith("-arm") for runner in runners] == [False, True]


def test_supported_pythons_are_those_that_may_install() -> None:
    assert pythons() == [f"3.{minor}" for minor in range(10, 10 + len(pythons()))]
    assert PROJECT["requires-python"] == f">={pythons()[0]}"
    assert BUILDS["build"] == [f"cp{version.replace('.', '')}-*" for version in pythons()]
    readme = (ROOT / "README.md").read_text()
    assert f"CPython {pythons()[0]} to {pythons()[-1]}" in readme


def test_citation() -> None:
    cited = loaded(ROOT / "CITATION.cff")
    assert cited["cff-version"] == "1.2.0"
    assert cited["version"] == PROJECT["version"] == featstore.__version__
    assert cited["title"] == PROJECT["name"]
    assert cited["license"] == PROJECT["license"]
    assert cited["abstract"] == PROJECT["description"]
    assert cited["keywords"] == PROJECT["keywords"]
    (author,) = cited["authors"]
    assert author["name"] in (ROOT / "LICENSE").read_text()
    assert PROJECT["authors"] == [{"name": author["name"]}]
    assert {"message", "type"} < cited.keys()


def requirements(lines: list[str]) -> dict[str, str]:
    """Return the bounds of packages by their names on PyPI, without spaces."""
    found = [re.fullmatch(r"([\w.-]+) *([<>=!].*)?", line.strip()) for line in lines]
    assert all(found), lines
    pairs = [(each[1].lower(), (each[2] or "").replace(" ", "")) for each in found if each]
    return {CONDA_NAMES.get(name, name): bounds for name, bounds in pairs}


def test_the_recipe_needs_what_the_package_needs() -> None:
    recipe = loaded(ROOT / "recipe" / "recipe.yaml")
    assert recipe["schema_version"] == 1
    assert recipe["context"] == {"name": PROJECT["name"], "version": PROJECT["version"]}
    needed = {section: recipe["requirements"][section] for section in ("host", "run")}
    assert requirements(needed["run"]) == requirements(PROJECT["dependencies"]) | {"python": PROJECT["requires-python"]}
    built = requirements(PYPROJECT["build-system"]["requires"])
    assert requirements(needed["host"]) == built | {"python": "", "pip": ""}
    scripts = [f"{name} = {target}" for name, target in PROJECT["scripts"].items()]
    assert recipe["build"]["python"]["entry_points"] == scripts
    about = recipe["about"]
    assert (about["summary"], about["license"]) == (PROJECT["description"], PROJECT["license"])
    assert (ROOT / about["license_file"]).exists()
    assert (ROOT / "recipe" / recipe["source"]["path"]).resolve() == ROOT
    variants = loaded(ROOT / "recipe" / "variants.yaml")
    assert variants["python"] == pythons()
    assert BUILDS["manylinux-x86_64-image"] == f"manylinux_{variants['c_stdlib_version'][0].replace('.', '_')}"
    imports, script = recipe["tests"]
    modules = [name.replace(".", "/") for name in imports["python"]["imports"]]
    assert all((ROOT / name).is_dir() or (ROOT / "src_cython" / f"{name}.pyx").exists() for name in modules)
    (file,) = script["files"]["source"]
    assert (ROOT / file).exists()
    assert script["script"] == [f"python {file}"]


@pytest.mark.parametrize("path", [path for path in FORMS if path.name != "config.yml"], ids=lambda path: path.name)
def test_forms_of_issues(path: Path) -> None:
    """GitHub's rules for forms: a name and a description; elements of known types; ids once; a label for each field."""
    form = loaded(path)
    assert {"name", "description", "body"} <= form.keys() <= {"name", "description", "body", "labels"}
    fields = [each for each in form["body"] if each["type"] != "markdown"]
    assert {each["type"] for each in form["body"]} <= {"markdown", "textarea"}
    assert len({each["id"] for each in fields}) == len(fields) > 0
    assert all(each["attributes"]["label"] for each in fields)
    pages = re.findall(r"[\w/-]+\.md", path.read_text())
    assert not [page for page in pages if not (ROOT / page).exists()]
    asked = [each["attributes"]["label"] for each in fields]
    assert ("What `featstore doctor --json` prints" in asked) == (path.name == "bug.yml")


def test_faults_of_security_are_reported_in_private() -> None:
    """To nobody's address: GitHub's own way. The page is not an issue that all can read."""
    text = (ROOT / "SECURITY.md").read_text()
    assert "*Report a vulnerability*" in text
    assert not re.search(r"[\w.-]+@[\w-]+\.\w", text)
    assert loaded(ROOT / ".github" / "ISSUE_TEMPLATE" / "config.yml") == {"blank_issues_enabled": False, "contact_links": []}


def test_security_s_points_are_whole_sentences() -> None:
    text = (ROOT / "SECURITY.md").read_text()
    points = re.findall(r"^- .*(?:\n  .*)*", text, re.MULTILINE)
    assert len(points) > 10
    assert not [point for point in points if point[-1] not in ".:)"]
