"""The documents name commands, files and options that exist."""

import dataclasses
import re
from pathlib import Path

from dscompile.cli import app
from dscompile.options import Options


def documents(root: Path) -> list[Path]:
    return [root / "README.md", *sorted((root / "docs").glob("*.md"))]


def make_targets(root: Path) -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):", (root / "Makefile").read_text(), re.MULTILINE))


def code_parts(text: str) -> list[str]:
    """What stands between backticks, and the lines of fenced blocks."""
    fenced = re.findall(r"^```[a-z]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    inline = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))
    return [line.split("#")[0].strip() for block in fenced for line in block.splitlines()] + inline


def test_every_named_make_command_exists(repo_root: Path):
    known = make_targets(repo_root)
    named = set()
    for document in documents(repo_root):
        for part in code_parts(document.read_text()):
            if re.match(r"make\s", part):
                words = [word for word in part.split()[1:] if re.fullmatch(r"[a-z-]+", word)]
                named.update(words)
                assert set(words) <= known, f"{document.name}: {part!r}; the Makefile has {sorted(known)}"
    assert {"demo", "test"} <= named


def test_every_named_command_of_the_tool_exists(repo_root: Path):
    known = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    named = set()
    for document in documents(repo_root):
        for part in code_parts(document.read_text()):
            if match := re.match(r"dscompile ([a-z]+)", part):
                named.add(match.group(1))
    assert named == known


def test_every_make_command_has_a_line_of_help(repo_root: Path):
    makefile = (repo_root / "Makefile").read_text()
    (phony,) = re.findall(r"^\.PHONY: (.*)", makefile, re.MULTILINE)
    helped = set(re.findall(r"^([a-z-]+):[^#\n]*## .", makefile, re.MULTILINE))
    assert helped == set(phony.split())


def test_every_named_folder_and_file_exists(repo_root: Path):
    prefixes = ("dscompile/", "passes/", "templates/", "tests/", "docs/", "examples/", "benchmarks/", "constraints/")
    for document in documents(repo_root):
        for part in code_parts(document.read_text()):
            if part.startswith(prefixes) and re.fullmatch(r"[\w./-]+", part):
                assert (repo_root / part).exists(), f"{document.name} names {part}"


def test_every_relative_link_leads_somewhere(repo_root: Path):
    for document in documents(repo_root):
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", document.read_text()):
            if "://" not in target:
                assert (document.parent / target).exists(), f"{document.name} links to {target}"


def test_options_page_has_every_option_with_its_default(repo_root: Path):
    rows = re.findall(
        r"^\| `(\w+)` \|.*?\| `([^`]*)` \|", (repo_root / "docs" / "options.md").read_text(), re.MULTILINE
    )
    assert dict(rows) == {field.name: repr(getattr(Options(), field.name)) for field in dataclasses.fields(Options)}


def test_every_page_is_in_the_index(repo_root: Path):
    index = (repo_root / "docs" / "index.md").read_text()
    for page in sorted((repo_root / "docs").glob("*.md")):
        assert page.name == "index.md" or f"({page.name})" in index, f"docs/index.md does not link to {page.name}"
