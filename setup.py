"""A source distribution with the links that `pdvsim/` holds to the other rooms; everything else is in pyproject.toml.

setuptools leaves a link to a folder out. Without them mypy and editors do not find `pdvsim.sim` in an unpacked one.
"""

from __future__ import annotations

import os
from pathlib import Path

from setuptools import setup
from setuptools.command.sdist import sdist


class SdistWithLinks(sdist):
    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        super().make_release_tree(base_dir, files)
        for link in sorted(Path("pdvsim").iterdir()):
            if link.is_symlink():
                Path(base_dir, link).symlink_to(os.readlink(link), target_is_directory=True)


setup(cmdclass={"sdist": SdistWithLinks})
