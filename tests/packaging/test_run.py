"""The `run` script in a copy of the project, with stand-ins for Python, uv and the system's package manager."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = ("sh", "cat", "cksum", "dirname", "id", "uname", "rm", "mkdir", "chmod", "cp", "tr", "grep", "head")
# A Python that makes "environments" of copies of itself and notes every call; there is an adapter if a file says so.
PYTHON = """#!/bin/sh
echo "$*" >>"$LOG"
case "$*" in
*enumerate_adapters*) [ -e "$LOG.adapter" ] ;;
"-m venv "*) mkdir -p "$3/bin"; cp "$0" "$3/bin/python"
    printf '#!/bin/sh\\necho "anygpu $*" >>"$LOG"\\n' >"$3/bin/anygpu"; chmod +x "$3/bin/anygpu" ;;
*"pip install"*) [ ! -e "$LOG.broken" ] ;;
esac
"""


@pytest.fixture
def project(tmp_path):
    """A copy of the project in a path with a space, and a PATH with nothing but basic tools and the stand-ins."""
    root = tmp_path / "a copy"
    root.mkdir()
    for name in ("run", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, root / name)
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    for tool in TOOLS:
        (bin_ / tool).symlink_to(shutil.which(tool))
    stand_in(bin_, "python3.11", PYTHON)
    (tmp_path / "log.adapter").touch()

    def run(*argv: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "log").write_text("")
        environment = {"PATH": str(bin_), "LOG": str(tmp_path / "log")}
        command = [str(root / "run"), *argv]
        return subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=60)

    run.root, run.bin, run.log = root, bin_, tmp_path / "log"
    return run


def stand_in(folder: Path, name: str, text: str) -> None:
    (folder / name).unlink(missing_ok=True)
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)


def installs(run) -> list[str]:
    return [line.split("[")[1].rstrip("]") for line in run.log.read_text().splitlines() if "pip install" in line]


def test_first_use_sets_up_and_the_second_does_not(project):
    done = project("chat", "a  b", "$c")
    assert done.returncode == 0, done.stderr
    calls = project.log.read_text().splitlines()
    assert calls[-1] == "anygpu chat a  b $c" and installs(project) == ["chat"]
    assert f"-c {project.root}/constraints.txt" in project.log.read_text()
    begin = time.perf_counter()
    done = project("info")
    assert time.perf_counter() - begin < 1.0
    assert done.stderr == "" and installs(project) == [] and project.log.read_text().splitlines()[-1] == "anygpu info"


def test_each_command_installs_what_it_needs(project):
    project("test", "-k", "x")
    assert installs(project) == ["chat,dev"]
    assert project.log.read_text().splitlines()[-1] == "-m pytest -n 2 --dist worksteal -k x"
    project("chat")
    assert installs(project) == []
    project("test", "--oracle", "-x")
    assert installs(project) == ["chat,dev,oracle"]
    assert project.log.read_text().splitlines()[-1] == "-m pytest -n 2 --dist worksteal -x"


def test_a_changed_lock_installs_again(project):
    project("setup")
    with open(project.root / "constraints.txt", "a") as lock:
        lock.write("# newer\n")
    project("setup")
    assert installs(project) == ["chat"]


def test_a_failed_install_is_not_remembered(project):
    broken = Path(f"{project.log}.broken")
    broken.touch()
    assert project("chat").returncode != 0
    assert "anygpu chat" not in project.log.read_text()
    broken.unlink()
    assert project("chat").returncode == 0
    assert installs(project) == ["chat"]


def test_uv_is_used_where_it_is(project):
    stand_in(
        project.bin, "uv", '#!/bin/sh\necho "uv $*" >>"$LOG"\n[ "$1" = pip ] || { shift 4; python3.11 -m venv "$2"; }\n'
    )
    done = project("test")
    assert done.returncode == 0, done.stderr
    assert installs(project) == ["chat,dev"] and "uv pip install -q" in project.log.read_text()


def test_no_python(project):
    stand_in(project.bin, "python3.11", "#!/bin/sh\nexit 1\n")  # too old, or a shim for a version that is not there
    done = project("chat")
    assert done.returncode == 1 and done.stderr.startswith("run: needs Python 3.11 or newer")


@pytest.mark.parametrize(
    ("manager", "want"),
    [
        ("apt-get", "sudo apt-get update && sudo apt-get install libvulkan1 mesa-vulkan-drivers"),
        ("dnf", "sudo dnf install vulkan-loader mesa-vulkan-drivers"),
        ("pacman", "sudo pacman -S vulkan-icd-loader vulkan-swrast"),
        ("zypper", "sudo zypper install libvulkan1 libvulkan_lvp"),
        ("apk", "sudo apk add vulkan-loader mesa-vulkan-swrast"),
        (None, "install Mesa's lavapipe."),
    ],
)
def test_no_adapter_prints_the_command_for_this_system(project, manager, want):
    os.remove(f"{project.log}.adapter")
    stand_in(project.bin, "id", "#!/bin/sh\necho 1000\n")
    stand_in(project.bin, "uname", "#!/bin/sh\necho Linux\n")
    if manager:
        stand_in(project.bin, manager, "#!/bin/sh\nexit 1\n")
    done = project("chat")
    assert done.returncode == 1 and "anygpu chat" not in project.log.read_text()
    last = done.stderr.splitlines()[-1]
    assert last == f"run: no Vulkan driver found. For a GPU install its vendor's driver; to run on the CPU: {want}"


def test_no_adapter_elsewhere(project):
    os.remove(f"{project.log}.adapter")
    stand_in(project.bin, "uname", "#!/bin/sh\necho Darwin\n")
    done = project("chat")
    assert done.returncode == 1 and "update the system" in done.stderr


def test_setup_refuses_other_words(project):
    done = project("setup", "everything")
    assert done.returncode == 1 and done.stderr == "run: setup takes chat, dev or oracle, not everything\n"
