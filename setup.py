"""Packaging of flatfsdp: everything pip needs to know, and nothing else.

The version is read from the package's source, so that building never imports torch. `pip install .` into an
environment that has one of the declared versions of torch leaves it as it is; `tools/test --torch VERSION` runs tests
with another one than the pinned one.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent
ADDRESS = "FLATFSDP_ADDRESS"  # of the environment: where the repository is published
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


def home() -> str:
    """Where the repository is published: by the environment, or else where this clone comes from; "" if neither is on
    the web. The source names no address, since none is known that would be true of every copy."""
    if ADDRESS in os.environ:
        return os.environ[ADDRESS].rstrip("/")
    command = ["git", "-C", str(ROOT), "config", "--local", "--get", "remote.origin.url"]
    try:
        origin = subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
    return web_address(origin) if (ROOT / ".git").exists() else ""  # not that of a repository around this folder


def web_address(origin: str) -> str:
    """The page of a git remote, without the user and password that it may have; "" for a folder."""
    found = re.fullmatch(r"(?:https?://|ssh://|git@)(?:[^@/]+@)?([\w.-]+\.[a-z]+)(:\d+)?[:/]+(.+?)(?:\.git)?/?", origin)
    if found is None:
        return ""
    port = found[2] or "" if origin.startswith("http") else ""
    return f"https://{found[1]}{port}/{found[3]}"


def long_description() -> str:
    """The README, where the source tree has one."""
    readme = ROOT / "README.md"
    return readme.read_text(encoding="utf-8") if readme.is_file() else ""


address = home()
setup(
    name="flatfsdp",
    version=version(),
    description="Fully sharded data parallel training over flat parameters, with FSDP1's API",
    long_description=long_description(),
    long_description_content_type="text/markdown",
    author="The flatfsdp authors",
    project_urls={name: f"{address}/{path}".rstrip("/") for name, path in PLACES.items() if address},
    license="BSD-3-Clause",
    packages=find_packages(include=["flatfsdp", "flatfsdp.*"]),
    package_data={"flatfsdp": ["py.typed", "examples/*.txt"]},
    python_requires=">=3.10",
    install_requires=["torch>=2.11,<2.15"],
    extras_require={
        "train": ["pydantic>=2.11", "tomli; python_version < '3.11'", "tqdm", "safetensors", "matplotlib"],
        "hf": ["transformers", "peft", "datasets", "safetensors"],
        "docs": ["sphinx", "myst-parser", "furo", "sphinx-copybutton"],
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
