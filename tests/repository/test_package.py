"""The package as pip sees it: a wheel's contents, its requirements, and that installing it leaves torch unchanged."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import subprocess
import sys
import zipfile
from email import message_from_string
from email.message import Message
from pathlib import Path
from typing import Any

import pytest
import torch

import flatfsdp
from flatfsdp import env
from flatfsdp.trainer.hub.cache import EXTRAS
from tools import memory_picture

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[2]


# Where a clone may come from, and the page of that.
ORIGINS = {
    "https://host.org/them/flatfsdp.git": "https://host.org/them/flatfsdp",
    "https://name:secret@host.org/them/flatfsdp": "https://host.org/them/flatfsdp",
    "https://host.org:8443/them/flatfsdp/": "https://host.org:8443/them/flatfsdp",
    "http://name@127.0.0.1:80/them/flatfsdp": "",
    "git@host.org:them/flatfsdp.git": "https://host.org/them/flatfsdp",
    "ssh://git@host.org:22/them/flatfsdp.git": "https://host.org/them/flatfsdp",
    "/work/flatfsdp": "",
    "file:///work/flatfsdp": "",
    "../flatfsdp": "",
    "": "",
}


def pip(*arguments: str | Path) -> str:
    """Run pip of this environment without any index; its stdout."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the sources, so that building leaves no traces in the tree."""
    pytest.importorskip("setuptools", minversion="70.1")  # the first that builds wheels on its own
    folder = tmp_path_factory.mktemp("package")
    sources = folder / "sources"
    shutil.copytree(ROOT / "flatfsdp", sources / "flatfsdp", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "pyproject.toml", "LICENSE", "README.md"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, sources)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("FLATFSDP_ADDRESS", "https://example.org/flatfsdp/")
        pip("wheel", "--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", folder, sources)
    (built,) = folder.glob("*.whl")
    return built


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as files:
        (name,) = (name for name in files.namelist() if name.endswith(".dist-info/METADATA"))
        return message_from_string(files.read(name).decode())


def test_the_wheel_holds_the_package_its_types_and_its_license(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as files:
        shipped = set(files.namelist())
    sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / "flatfsdp").rglob("*.py")}
    assert sources <= shipped
    assert "flatfsdp/py.typed" in shipped
    assert [name for name in shipped if name.endswith("/LICENSE")]
    assert {name.split("/")[0].split("-")[0] for name in shipped} == {"flatfsdp"}  # neither tests nor tools


def test_the_metadata(wheel: Path) -> None:
    found = metadata(wheel)
    assert (found["Name"], found["Version"]) == ("flatfsdp", flatfsdp.__version__)
    assert found["Requires-Python"] == ">=3.10"
    assert found.get_all("Requires-Dist") == [
        "torch<2.15,>=2.11",
        'pydantic>=2.11; extra == "train"',
        'tomli; python_version < "3.11" and extra == "train"',
        'tqdm; extra == "train"',
        'safetensors; extra == "train"',
        'matplotlib; extra == "train"',
        'transformers; extra == "hf"',
        'peft; extra == "hf"',
        'datasets; extra == "hf"',
        'safetensors; extra == "hf"',
        'sphinx; extra == "docs"',
        'myst-parser; extra == "docs"',
        'furo; extra == "docs"',
        'sphinx-copybutton; extra == "docs"',
        'pytest; extra == "test"',
        'expecttest; extra == "test"',
    ]


def test_the_addresses_are_those_of_the_repository(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    urls = dict(each.split(", ") for each in metadata(wheel).get_all("Project-URL", []))
    assert urls["Source"] == "https://example.org/flatfsdp"
    assert urls["Changelog"] == "https://example.org/flatfsdp/blob/main/CHANGELOG.md"
    assert {*urls} == {"Source", "Documentation", "Changelog", "Issues"}

    setuptools = pytest.importorskip("setuptools")
    made: dict[str, Any] = {}
    monkeypatch.setattr(setuptools, "setup", made.update)
    monkeypatch.setenv("FLATFSDP_ADDRESS", "")
    web_address = runpy.run_path(str(ROOT / "setup.py"))["web_address"]
    assert made["project_urls"] == {}
    assert [*map(web_address, ORIGINS)] == [*ORIGINS.values()]


def test_an_extra_that_a_message_names_has_the_library(wheel: Path) -> None:
    required = metadata(wheel).get_all("Requires-Dist", [])
    own = {name: extra for name, extra in EXTRAS.items() if name != "huggingface_hub"}  # which transformers needs
    assert [name for name, extra in own.items() if f'{name}; extra == "{extra}"' not in required] == []


def test_installing_changes_no_torch(wheel: Path) -> None:
    resolved = json.loads(pip("install", "--quiet", "--dry-run", "--no-index", "--report", "-", wheel))["install"]
    assert {entry["metadata"]["name"] for entry in resolved} <= {"flatfsdp"}


def test_every_requirement_is_pinned_for_the_tools() -> None:
    pinned = re.findall(r"^([\w-]+)==", (ROOT / "tools" / "constraints.txt").read_text(), flags=re.MULTILINE)
    needed = {*"torch pydantic tqdm safetensors matplotlib pytest expecttest mypy ruff setuptools".split()}
    needed |= {"sphinx", "myst-parser", "furo", "sphinx-copybutton"}
    assert needed <= set(pinned)


def test_a_bug_report_names_the_versions_and_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    monkeypatch.setenv("SECRET_TOKEN", "hush")
    facts = dict(line.split(": ", 1) for line in env.describe().splitlines())
    assert facts["flatfsdp"] == flatfsdp.__version__
    assert facts["torch"].startswith(torch.__version__)
    assert "gloo" in facts["backends"]
    assert facts["NCCL_DEBUG"] == "WARN"
    assert "hush" not in env.describe()
    assert {"python", "system", "cores", "devices", "packages"} <= set(facts)


def test_a_picture_of_memory_shows_what_it_takes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["memory_picture.py", "--help"])
    with pytest.raises(SystemExit) as raised:
        memory_picture.main()
    assert raised.value.code == 0 and "picture     the image file to write" in capsys.readouterr().out


@pytest.mark.skipif(shutil.which("bash") is None, reason="tools are for bash")
def test_setting_up_shows_the_package_that_pip_is_at_and_how_many_are_left(tmp_path: Path) -> None:
    def shown(*lines: str) -> str:
        done = subprocess.run(
            [ROOT / "tools" / "pip_progress", tmp_path / "pip.log", "--editable", ".[train,test]"],
            input="\n".join([*lines, ""]), capture_output=True, text=True, timeout=60, check=True,
        )  # fmt: skip
        assert done.stdout == ""
        assert (tmp_path / "pip.log").read_text().splitlines() == list(lines)
        return re.sub(r"\d+ s", "0 s", done.stderr)  # one line: the next would follow after 15 seconds

    assert shown("Collecting torch==2.13.0 (from flatfsdp)", "Collecting numpy") == "tools/venv: 0 s, finding torch\n"
    line = shown("  Downloading python_dateutil-4.0.0-py3-none-any.whl (92 kB)", "Collecting numpy")
    left = re.fullmatch(r"tools/venv: 0 s, fetching python_dateutil \(92 kB\), (\d+) of about (\d+) left\n", line)
    assert left and left[1] == left[2] and 25 < int(left[1]) < 45
    for name in ("MarkupSafe-3.0.4", "typing_extensions-4.16.0"):
        folder = tmp_path / "lib" / "python3.11" / "site-packages" / f"{name}.dist-info"
        folder.mkdir(parents=True)
        (folder / "INSTALLER").touch()
    installing = "Installing collected packages: markupsafe, typing-extensions, torch, flatfsdp"
    assert shown(installing) == "tools/venv: 0 s, installing torch, 2 of 4 left\n"
