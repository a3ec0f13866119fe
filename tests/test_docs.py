"""The README and the pages of docs: every command and Python block runs, what is shown comes out, links lead somewhere.

A block's commands run in order in one empty folder, on a reduced budget. A block of `text` right after one is its
output: then it runs as it stands, and every number must come out to the digit on Linux, where they were made, and
within 2% elsewhere (`python tests/docfiles.py` renews them); a line of dots stands for lines left out.
A block under `<!-- needs a GPU -->` or `<!-- needs your file -->` cannot run here: each of its commands must say so in
one line, with exit code 2.
"""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import shutil
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from markdown_it import MarkdownIt

import pdvsim
from pdvsim.calibration.validate.served import SHIPPED
from pdvsim.cli import COMMANDS, command_class, main
from pdvsim.cli.realrun import RealrunCommand
from pdvsim.cli.realrun import main as realrun
from pdvsim.common.commandline import parse
from pdvsim.common.options import options

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
NOTES = sorted((ROOT / "docs" / "notes").glob("*.md"))
PROGRAMS = ("pdvsim ", "realrun ")
GPU, FILE = "<!-- needs a GPU -->", "<!-- needs your file -->"
SERVES = "<!-- serves until Ctrl-C -->"
BUDGET: dict[str, float] = {"num-prompts": 6, "num-runs": 2, "budget": 9, "budget-s": 0.1, "jobs": 1}  # at most
SERVER: dict[str, float] = {"output-len": 16, "max-num-seqs": 4, "num-speculative-tokens": 2}  # soon full: few runs
SMALLER = {"capacity": SERVER | {"tolerance": 0.5, "think-time-s": 0.05}, "map": SERVER}  # which take what they need
GIVEN = ("think-time-s",)  # less of it where it is given, and nowhere else
LISTS, FEW = ("--acceptances", "--concurrency", "--pairs"), 2
FILE_MARK = re.compile(r"<!-- file (\S+) -->")
FILE_NAME = re.compile(r"# (\w+\.py)\n")
MODEL = "tinyllama-1.1b"  # of whose samples a profile is fitted here
EXACT = sys.platform == "linux"
TOLERANCE = 0.02  # of a number shown, plus one unit of its last digit, on systems whose sums differ
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")
MARKDOWN = MarkdownIt("commonmark").enable("table")


@dataclass(frozen=True)
class Block:
    """A block of code: where it stands, in which language, and the comment right above it."""

    page: str
    line: int
    language: str
    text: str
    mark: str
    output: str = ""

    @property
    def commands(self) -> list[str]:
        """Its commands, each on one line."""
        lines = (line.strip() for line in self.text.replace("\\\n", " ").splitlines())
        return [line.split(" # ")[0] for line in lines if line.startswith(PROGRAMS)]


def blocks(page: str, text: str) -> list[Block]:
    """The blocks of a page, each with what is shown as its output."""
    listed: list[Block] = []
    mark, shown = "", False
    for token in MARKDOWN.parse(text):
        code = token.type in ("fence", "code_block")
        if code and shown and token.info.strip() == "text":
            listed[-1] = replace(listed[-1], output=token.content)
        elif code:
            listed.append(Block(page, token.map[0] + 1, token.info.strip(), token.content, mark))
        mark, shown = token.content.strip() if token.type == "html_block" else "", code
    return listed


def inline(text: str, kind: str) -> Iterator[Any]:
    """The pieces of a kind inside paragraphs, lists and tables."""
    for token in MARKDOWN.parse(text):
        yield from (child for child in token.children or () if child.type == kind)


def command_of(argv: list[str]) -> type:
    """The dataclass of a command line."""
    return RealrunCommand if argv[0] == "realrun" else command_class(argv[1])


def names(command: type) -> set[str]:
    """Every spelling of its flags."""
    known = options(command).values()
    return {flag for option in known for flag in option.flags} | {f"--no-{option.flag[2:]}" for option in known}


def flags(command: type) -> set[str]:
    return {option.flag[2:] for option in options(command).values()}


def reduced(argv: list[str]) -> list[str]:
    """The command line with no more than BUDGET of each flag that it knows, and a FEW values of each list."""
    command = command_of(argv)
    for flag in LISTS:
        if flag in argv:
            at = argv.index(flag) + 1
            end = next((i for i in range(at, len(argv)) if argv[i].startswith("-")), len(argv))
            values = [value for word in argv[at:end] for value in word.split(",")]
            few = 1 if flag == "--concurrency" and (argv[1] == "map" or "--vary" in argv) else FEW
            argv = [*argv[:at], ",".join(values[:few]), *argv[end:]]
    for name, most in (BUDGET | SMALLER.get(argv[1], {})).items():
        if name not in flags(command):
            continue
        flag = f"--{name}"
        if flag in argv:
            at = argv.index(flag)
            argv = [*argv[: at + 1], str(min(most, float(argv[at + 1]))).removesuffix(".0"), *argv[at + 2 :]]
        elif name not in GIVEN and accepted(command, [*argv, flag, str(most)]):
            argv = [*argv, flag, str(most)]
    return argv


def accepted(command: type, argv: list[str]) -> bool:
    """Whether the flags go together."""
    with contextlib.suppress(ValueError):
        parse(command, argv[1 if argv[0] == "realrun" else 2 :])
        return True
    return False


def run(argv: list[str]) -> int:
    """Run a command line in this process; returns its exit code."""
    return realrun(argv[1:]) if argv[0] == "realrun" else main(argv[1:])


BLOCKS = [block for page in PAGES for block in blocks(page.name, page.read_text(encoding="utf-8"))]
WITH_COMMANDS = [block for block in BLOCKS if block.commands]
IN_PYTHON = [block for block in BLOCKS if block.language == "python"]


def comes_out(shown: list[str], printed: list[str]) -> bool:
    """Whether lines are as shown; three dots stand for any number of them."""
    if not shown:
        return not printed
    if shown[0] == "...":
        return any(comes_out(shown[1:], printed[at:]) for at in range(len(printed) + 1))
    return bool(printed) and alike(shown[0], printed[0]) and comes_out(shown[1:], printed[1:])


def alike(shown: str, printed: str) -> bool:
    """Whether two lines say the same in the same or near numbers; how wide their columns are does not matter."""
    texts = [re.sub(r"\s+|--+|==+", " ", NUMBER.sub("#", line)).strip() for line in (shown, printed)]
    numbers = [NUMBER.findall(line) for line in (shown, printed)]
    return texts[0] == texts[1] and all(near(*pair) for pair in zip(*numbers, strict=True))


def near(shown: str, printed: str, exact: bool = EXACT) -> bool:
    """Whether a number is the one shown, to the digit; if not `exact`, within TOLERANCE."""
    if exact:
        return shown == printed
    unit = 10.0 ** -len(shown.partition(".")[2])
    value = float(shown.replace(",", ""))
    return abs(float(printed.replace(",", "")) - value) <= TOLERANCE * value + 1.001 * unit


def named(block: Block) -> str:
    return f"{block.page}:{block.line}"


def files(page: str) -> dict[str, str]:
    """The files that a page shows, by name: cards in TOML, Python that begins with `# NAME.py`, and what is marked."""
    shown = [block for block in BLOCKS if block.page == page]
    cards = [block.text for block in shown if block.language == "toml"]
    modules = [block.text for block in shown if block.language == "python" and FILE_NAME.match(block.text)]
    named = {str(FILE_NAME.match(text)[1]): text for text in modules}  # type: ignore[index]
    named |= {name[1]: block.text for block in shown if (name := FILE_MARK.match(block.mark))}
    return named | {f"{tomllib.loads(text)['name']}.toml": text for text in cards}


@pytest.fixture(scope="session")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`calibration` as a clone has it, with the samples of one model and a few runs: all of them take a minute."""
    source = ROOT / "calibration" / "data" / "h200"
    target = tmp_path_factory.mktemp("clone") / "calibration"
    folder = target / "data" / "h200"
    folder.mkdir(parents=True)
    samples = pq.read_table(source / "samples.parquet")
    rows = samples.select(["section", "model"]).to_pylist()
    subset = samples.filter([row["section"] == "host" or tuple(row.values()) == ("solo", MODEL) for row in rows])
    pq.write_table(subset, folder / "samples.parquet")
    header = json.loads((source / "header.json").read_text(encoding="utf-8")) | {"samples": len(subset)}
    (folder / "header.json").write_text(json.dumps(header), encoding="utf-8")
    for name in (*SHIPPED, "plan.jsonl"):
        runs = (source / name).read_text(encoding="utf-8").splitlines()
        (folder / name).write_text("\n".join(runs[::7] if len(runs) < 50 else runs[::20]), encoding="utf-8")
    shutil.copytree(source.parent / "traffic", target / "data" / "traffic")  # that runs are made with
    return target


@pytest.fixture
def folder(tmp_path: Path, measured: Path, monkeypatch: pytest.MonkeyPatch, block: Block) -> Path:
    """A folder to run in that holds nothing but the files that the page shows."""
    for name, text in files(block.page).items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "calibration").symlink_to(measured)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("pdvsim.cli.validate.runs.shipped", lambda: [measured / "data" / "h200" / "runs.jsonl"])
    return tmp_path


@pytest.fixture
def verdict_only(block: Block, monkeypatch: pytest.MonkeyPatch) -> None:
    """What follows the verdict takes a third of the simulations of advice: left out of an output that does not show it.

    Commands without an output, and tests of advice, have it.
    """
    if block.output and not any(words in block.output for words in ("Where that changes", "it holds")):
        monkeypatch.setattr("pdvsim.decide.advise._surroundings", lambda advice, bench: None)


@pytest.mark.usefixtures("quick_plots", "verdict_only")
@pytest.mark.parametrize("block", [b for b in WITH_COMMANDS if b.mark not in (GPU, FILE, SERVES)], ids=named)
def test_commands_run(block: Block, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for line in block.commands:
        argv = shlex.split(line)
        assert run(argv if block.output else reduced(argv)) == 0, capfd.readouterr().err
    printed = capfd.readouterr().out
    assert printed
    assert not block.output or comes_out(block.output.splitlines(), printed.splitlines()), printed


@pytest.mark.parametrize("block", [b for b in WITH_COMMANDS if b.mark == SERVES], ids=named)
def test_what_serves_is_a_command_line(block: Block) -> None:
    for argv in map(shlex.split, block.commands):
        parse(command_of(argv), argv[2:])


@pytest.mark.parametrize("block", [b for b in WITH_COMMANDS if b.mark in (GPU, FILE)], ids=named)
def test_what_cannot_run_here_says_so(block: Block, folder: Path, refused: Callable[..., str]) -> None:
    import torch

    if block.mark == GPU and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    for line in block.commands:
        argv = shlex.split(line)
        reason = refused(reduced(argv)[argv[0] == "pdvsim" :])
        missing = [word for word in argv[2:] if not word.startswith("-")]  # or, after a GPU's command, what that makes
        missing += ["CUDA"] if block.mark == GPU else []
        assert any(word in reason for word in missing), reason
        there = {path.name for path in folder.iterdir()} - {"__pycache__"}  # of a policy's file
        assert there == {"calibration", *files(block.page)}, "it wrote something"


@pytest.mark.parametrize("block", IN_PYTHON, ids=named)
def test_python_runs(
    block: Block, folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in () if block.output else ("run", "sweep", "capacity", "advise", "speedup", "draft_table", "winner_map"):
        monkeypatch.setattr(pdvsim, name, _with_budget(getattr(pdvsim, name), name))
    monkeypatch.syspath_prepend(folder)
    exec(compile(block.text, named(block), "exec"), {})
    printed = capfd.readouterr().out
    assert not block.output or comes_out(block.output.splitlines(), printed.splitlines()), printed


def _with_budget(call: Any, name: str) -> Any:
    known = flags(command_of(["pdvsim", {"winner_map": "map"}.get(name, name.replace("_", "-"))]))
    most = {flag.replace("-", "_"): value for flag, value in BUDGET.items() if flag in known}

    def smaller(**options: Any) -> Any:
        return call(**options | {flag: min(options.get(flag, value), value) for flag, value in most.items()})

    return smaller


def test_the_readmes_links_resolve() -> None:
    """Those of the other pages are in the site (test_site.py)."""
    page = ROOT / "README.md"
    text = page.read_text(encoding="utf-8")
    links = [link.attrGet("href") for link in inline(text, "link_open")]
    for where in [*links, *(picture.attrGet("src") for picture in inline(text, "image"))]:
        if not where.startswith(("http://", "https://", "#")):
            assert (page.parent / where.partition("#")[0]).exists(), f"{page.name} links to {where}"


@pytest.mark.parametrize("page", PAGES + NOTES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_in_the_text_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert "python -m pdvsim." not in text, "a user is told to run a command, or a study"
    for study in re.findall(r"python (studies/\w+\.py)", text):
        assert (ROOT / study).exists(), study
    for code in inline(text, "code_inline"):
        argv = code.content.split()
        if code.content.startswith(PROGRAMS) and argv[1:] and not argv[1].isupper() and argv[1][0] != "-":
            assert argv[0] == "realrun" or argv[1] in COMMANDS, code.content
            known = names(command_of(argv))
            assert {token.partition("=")[0] for token in argv if token.startswith("--")} <= known, code.content
