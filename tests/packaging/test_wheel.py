"""The wheel, built and installed into a clean environment, then used from another folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

from nn.io import registry

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """Runs the installed `anygpu` in an empty folder; its dependencies are those of the environment that runs this."""
    home = tmp_path_factory.mktemp("installed")
    venv.create(home / "venv", symlinks=os.name != "nt")
    bin_ = home / "venv" / ("Scripts" if os.name == "nt" else "bin")
    pip = [sys.executable, "-m", "pip", "--python", str(bin_ / "python"), "--disable-pip-version-check"]
    command = [*pip, "install", "-q", "--no-index", "--no-deps", str(wheel)]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(home / "venv")}))
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    (home / "elsewhere").mkdir()
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}

    def run(*argv: str, timeout: float = 300.0) -> subprocess.CompletedProcess[str]:
        command = [str(bin_ / argv[0]), *argv[1:]]
        return subprocess.run(
            command, cwd=home / "elsewhere", env=environment, capture_output=True, text=True, timeout=timeout
        )

    run.site = site
    return run


def tracked(folder: str, suffix: str) -> set[str]:
    return {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / folder).rglob(f"*{suffix}")
        if "__pycache__" not in path.parts
    }


def test_wheel_holds_the_packages_and_every_shader_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        (metadata,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        fields = Parser().parsestr(archive.read(metadata).decode())
    want = {name for folder in ("gpu", "nn", "apps") for name in tracked(folder, ".py")} | tracked("shaders", ".wgsl")
    want |= tracked("gpu", ".html")
    assert want <= names and len(tracked("shaders", ".wgsl")) > 10
    assert not [name for name in names - want if not name.endswith(".md")]
    assert fields["License-Expression"] == "MIT"
    unconditional = [entry for entry in fields.get_all("Requires-Dist") if "extra ==" not in entry]
    assert sorted(entry.split("<")[0].split(">")[0] for entry in unconditional) == ["glfw", "numpy", "wgpu"]


def test_nothing_but_the_oracle_pulls_torch(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        fields = Parser().parsestr(archive.read(metadata).decode())
    heavy = [entry for entry in fields.get_all("Requires-Dist") if entry.startswith(("torch", "transformers"))]
    assert len(heavy) == 2 and all(entry.endswith("extra == 'oracle'") for entry in heavy)


def test_command_runs_from_another_folder(installed):
    done = installed("anygpu", "--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, "anygpu 0.1.0\n", "")
    done = installed("anygpu", "pull", "--list")
    assert done.returncode == 0 and all(name in done.stdout for name in registry.MODELS)


def test_shaders_are_found_beside_the_packages(installed):
    done = installed("python", "-c", "import gpu; print(gpu.__file__)")
    assert Path(done.stdout.strip()).parent.parent == installed.site, (
        done.stderr
    )  # the installed one, not this checkout
    assert (installed.site / "shaders" / "lib").is_dir()


def test_check_runs_from_another_folder(installed):
    done = installed("anygpu", "check", "--json", "--filter", "softmax")
    assert done.returncode == 0, done.stderr + done.stdout
    report = json.loads(done.stdout)
    assert report


@pytest.mark.weights
def test_chat_answers_from_another_folder(installed):
    done = installed("anygpu", "chat", "--json", "--max-tokens", "4", "--temperature", "0", "Hi", timeout=600)
    assert done.returncode == 0, done.stderr + done.stdout
    answer = json.loads(done.stdout)
    assert answer["text"] and len(answer["ids"]) <= 4 and answer["finish_reason"] in ("length", "stop")
