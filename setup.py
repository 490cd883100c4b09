"""Everything is declared in pyproject.toml, but that two folders of the repository are installed with the package."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithFolders(build_py):
    """Copies ``configs`` and ``patches`` into the package (megatron_resilience/files.py finds them in either place)."""

    def run(self):
        super().run()
        if not self.editable_mode:
            for name in ("configs", "patches"):
                target = Path(self.build_lib) / "megatron_resilience" / name
                shutil.copytree(Path(__file__).parent / name, target, dirs_exist_ok=True)


setup(cmdclass={"build_py": BuildWithFolders})
