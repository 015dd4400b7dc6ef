"""Packaging of flatfsdp: everything pip needs to know, and nothing else.

The version is read from the package's source, so that building never imports torch. torch itself has a lower bound
only: `pip install .` into an environment that has torch leaves that torch as it is.
"""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent
HOME = ""  # where the repository is published; without it there are no URLs
PLACES = {
    "Source": "",
    "Documentation": "tree/main/docs",
    "Changelog": "blob/main/CHANGELOG.md",
    "Issues": "issues",
}


def version() -> str:
    """`__version__` of the package, without importing it."""
    source = (ROOT / "flatfsdp" / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__\s*(?::\s*\w+\s*)?=\s*"([^"]+)"', source, flags=re.MULTILINE)
    if found is None:
        raise RuntimeError('flatfsdp/__init__.py has no line `__version__ = "..."`')
    return found.group(1)


def long_description() -> str:
    """The README, where the source tree has one."""
    readme = ROOT / "README.md"
    return readme.read_text(encoding="utf-8") if readme.is_file() else ""


setup(
    name="flatfsdp",
    version=version(),
    description="Fully sharded data parallel training over flat parameters, with FSDP1's API",
    long_description=long_description(),
    long_description_content_type="text/markdown",
    author="The flatfsdp authors",
    project_urls={name: f"{HOME}/{path}" for name, path in PLACES.items() if HOME},
    license="BSD-3-Clause",
    packages=find_packages(include=["flatfsdp", "flatfsdp.*"]),
    package_data={"flatfsdp": ["py.typed", "examples/*.txt"]},
    python_requires=">=3.10",
    install_requires=["torch>=2.11"],
    extras_require={
        "train": ["pydantic>=2.11", "tomli; python_version < '3.11'", "tqdm", "safetensors", "matplotlib"],
        "hf": ["transformers", "peft", "datasets", "safetensors"],
        "docs": ["sphinx", "myst-parser", "furo"],
        "test": ["pytest", "expecttest"],
    },
    keywords="pytorch distributed training fsdp zero sharding",
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)
