"""Outputs shown in README and docs, made again: `python tests/docfiles.py [PAGE ...]`, after a change of a profile.

Each block with an output runs as it stands. Lines whose numbers or models have changed are replaced by what is printed
now; a block whose lines say something else is named and left to a person.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import sys
import tempfile
from itertools import groupby
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import test_docs as docs

from pdvsim.sim.models.presets import PRESETS

MODEL = re.compile("|".join(map(re.escape, sorted(PRESETS, key=len, reverse=True))))


def printed_by(block: docs.Block) -> list[str]:
    """What its commands or its Python print, in a folder that holds the page's files."""
    out, before = io.StringIO(), Path.cwd()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(out):
        for name, text in docs.files(block.page).items():
            (Path(folder) / name).write_text(text, encoding="utf-8")
        (Path(folder) / "calibration").symlink_to(docs.ROOT / "calibration")
        os.chdir(folder)
        sys.path.insert(0, folder)
        try:
            for line in block.commands:
                docs.run(shlex.split(line))
            if block.language == "python":
                exec(compile(block.text, docs.named(block), "exec"), {})
        finally:
            sys.path.remove(folder)
            os.chdir(before)
    return out.getvalue().splitlines()


def renewed(shown: list[str], printed: list[str]) -> list[str] | None:
    """The lines shown as they are printed now, each run of lines where its numbers are nearest; None if one is not."""
    lines: list[str] = []
    for dots, run in groupby(shown, key=lambda line: line == "..."):
        wanted = list(run)
        if not dots:
            places = [printed[i : i + len(wanted)] for i in range(len(printed) - len(wanted) + 1)]
            alike = [place for place in places if list(map(_words, place)) == list(map(_words, wanted))]
            if not alike:
                return None
            wanted = [line.rstrip() for line in min(alike, key=lambda place: _distance(wanted, place))]
        lines += wanted
    return lines


def _words(line: str) -> str:
    return re.sub(r"\s+|--+|==+", " ", docs.NUMBER.sub("#", MODEL.sub("@", line))).strip()


def _distance(shown: list[str], printed: list[str]) -> float:
    texts = [MODEL.sub("@", "\n".join(lines)) for lines in (shown, printed)]
    both = [[float(n.replace(",", "")) for n in docs.NUMBER.findall(text)] for text in texts]
    return sum(abs(a - b) / max(a, b, 1e-9) for a, b in zip(*both, strict=True))


def main(pages: list[str]) -> int:
    """Renew the pages named, or all; returns how many blocks are left to a person."""
    os.environ["COLUMNS"] = "160"
    left = 0
    for block in docs.BLOCKS:
        if not block.output or (pages and block.page not in pages) or block.mark in (docs.GPU, docs.FILE, docs.SERVES):
            continue
        shown, printed = block.output.splitlines(), printed_by(block)
        if docs.comes_out(shown, printed):
            continue
        lines = renewed(shown, printed)
        if lines is None or not docs.comes_out(lines, printed):
            left += 1
            print(f"{docs.named(block)} says something else now:\n" + "\n".join(printed))
            continue
        page = next(page for page in docs.PAGES if page.name == block.page)
        text = page.read_text(encoding="utf-8")
        assert text.count(block.output) == 1, docs.named(block)
        page.write_text(text.replace(block.output, "\n".join(lines) + "\n"), encoding="utf-8")
        print(f"{docs.named(block)} renewed")
    return left


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
