"""What keeps the project in order agrees with itself: one version of each tool, wherever it is called."""

from __future__ import annotations

import tomllib
from pathlib import Path

import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]


def pinned() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pairs = (line.split("==") for line in lines if not line.startswith("#"))
    return {canonicalize_name(name): version for name, version in pairs}


def test_what_is_installed_for_the_tests_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    wanted = [Requirement(text) for text in named]
    assert {canonicalize_name(requirement.name) for requirement in wanted} <= set(pinned())
    for requirement in wanted:
        assert requirement.specifier.contains(pinned()[canonicalize_name(requirement.name)]), requirement


def test_a_commit_is_checked_as_the_tests_do() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"]
    by_id = {hook["id"]: (repo, hook) for repo in hooks for hook in repo["hooks"]}
    for name in ("ruff-check", "ruff-format"):
        assert by_id[name][0]["rev"] == f"v{pinned()['ruff']}"
    assert by_id["mypy"][1]["entry"] == ".venv/bin/mypy"  # the one that make installs
