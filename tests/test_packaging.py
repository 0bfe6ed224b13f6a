"""What is installed, under which names, and whether the project's own files declare what they use."""

import ast
import configparser
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

LINKS = ("passes", "templates")
# Module name -> distribution, where they differ.
DISTRIBUTIONS = {"cutlass": "nvidia-cutlass-dsl", "yaml": "pyyaml"}


@pytest.fixture(scope="module")
def pyproject(repo_root: Path) -> dict:
    return tomllib.loads((repo_root / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def wheel(repo_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the sources, so that the checkout stays clean."""
    copy = tmp_path_factory.mktemp("sources")
    skip = shutil.ignore_patterns("__pycache__")
    for folder in ("dscompile", *LINKS):
        shutil.copytree(repo_root / folder, copy / folder, symlinks=True, ignore=skip)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(repo_root / name, copy / name)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(copy / "dist"), str(copy)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=copy)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = (copy / "dist").glob("*.whl")
    return built


def python_files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*.py")) if "__pycache__" not in path.parts)


@pytest.mark.parametrize("name", LINKS)
def test_real_folders_at_the_top_and_relative_links_inside(repo_root: Path, name: str):
    link = repo_root / "dscompile" / name
    assert (repo_root / name).is_dir() and not (repo_root / name).is_symlink()
    assert link.is_symlink() and os.readlink(link) == f"../{name}"


def test_wheel_installs_one_top_level_name(wheel: Path):
    with zipfile.ZipFile(wheel) as archive:
        tops = {name.split("/")[0] for name in archive.namelist()}
    assert tops == {"dscompile", "dscompile-0.1.0.dist-info"}


def test_wheel_holds_every_module_and_marker(wheel: Path):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    folders = [("dscompile", "dscompile"), *((name, f"dscompile/{name}") for name in LINKS)]
    for source, target in folders:
        root = wheel.parent.parent / source  # what it was built from
        for path in [*python_files(root), *root.rglob("*.jinja"), *root.rglob("py.typed")]:
            inner = path.relative_to(root).as_posix()
            if source == "dscompile" and inner.split("/")[0] in LINKS:
                continue
            assert f"{target}/{inner}" in names, (
                f"{source}/{inner} is not in the wheel; does its folder lack __init__.py?"
            )


def test_wheel_metadata(wheel: Path):
    with zipfile.ZipFile(wheel) as archive:
        info = "dscompile-0.1.0.dist-info"
        entry_points = configparser.ConfigParser()
        entry_points.read_string(archive.read(f"{info}/entry_points.txt").decode())
        metadata = archive.read(f"{info}/METADATA").decode()
        assert f"{info}/licenses/LICENSE" in archive.namelist()
    assert entry_points["torch_dynamo_backends"]["dsv4"] == "dscompile.backend:dsv4"
    assert entry_points["console_scripts"]["dscompile"] == "dscompile.cli:app"
    assert "License-Expression: Apache-2.0" in metadata
    assert "Requires-Python: >=3.11" in metadata


def test_installed_wheel_imports_and_adds_no_other_name(wheel: Path, tmp_path: Path):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    # -S leaves out .pth files, and so an editable install of this checkout; the dependencies stay reachable.
    program = f"""
import sys, importlib.util
sys.path[:0] = [{str(tmp_path)!r}]
sys.path.append({sysconfig.get_path("purelib")!r})
import dscompile.passes, dscompile.templates
for module in (dscompile, dscompile.passes, dscompile.templates):
    assert module.__file__.startswith({str(tmp_path)!r}), module.__file__
for name in {LINKS!r}:
    assert importlib.util.find_spec(name) is None, name
"""
    done = subprocess.run([sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_backend_entry_point_is_visible_to_dynamo():
    import torch

    if "dsv4" not in torch._dynamo.list_backends(exclude_tags=()):
        pytest.fail("backend 'dsv4' is not registered: install the project (`make setup`)")


def imported_modules(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module


@pytest.mark.parametrize("folder", ["dscompile", *LINKS])
def test_every_import_is_declared(repo_root: Path, pyproject: dict, folder: str):
    project = pyproject["project"]
    lines = [*project["dependencies"], *project["optional-dependencies"]["transformers"]]
    lines += project["optional-dependencies"]["gpu"]
    declared = {re.split(r"[\[<>=!~; ]", line, maxsplit=1)[0].lower() for line in lines}
    for path in python_files(repo_root / folder):
        for module in imported_modules(path):
            top = module.split(".")[0]
            if top in sys.stdlib_module_names or top == "dscompile":
                continue
            assert top not in LINKS, f"{path}: import dscompile.{module}, not {module} (it would load twice)"
            assert DISTRIBUTIONS.get(top, top) in declared, (
                f"{path} imports {module}, which pyproject.toml does not name"
            )


def test_constraints_pin_exactly_what_is_declared(repo_root: Path, pyproject: dict):
    pins = {}
    for line in (repo_root / "constraints" / "cpu.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            name, _, version = line.partition("==")
            assert version, f"not an exact version: {line!r}"
            pins[name.lower()] = version
    assert pins["torch"] == "2.13.0"  # no local part: the plain file must serve every platform
    extras = pyproject["project"]["optional-dependencies"]
    lines = [*pyproject["project"]["dependencies"], *extras["transformers"], *extras["test"], *extras["dev"]]
    for line in lines:
        name = re.split(r"[\[<>=!~; ]", line, maxsplit=1)[0].lower()
        assert name == "dscompile" or name in pins, f"{name} has no version in constraints/cpu.txt"
