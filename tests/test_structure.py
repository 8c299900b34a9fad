"""The shape of the code base: imports point one way, documents name what is there, nothing knows this machine."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from nn.check import all_cases

ROOT = Path(__file__).resolve().parent.parent
CODE = ("gpu", "nn", "apps")
LINES = 600
# Files over LINES lines, each with the reason why it is one file.
LONG: dict[str, str] = {}
BINDINGS = {"wgpu", "wgpudawn"}
LOWER = {"gpu": {"gpu"}, "nn": {"gpu", "nn"}, "apps": {"gpu", "nn", "apps"}}  # what each may import of ours


def files(*patterns, folders=(".",)):
    """Files of the repository (not of environments, caches, builds or hidden folders), as paths from its root."""
    skipped = {"__pycache__", "build", "dist", "shared"}
    found = {path for folder in folders for pattern in patterns for path in (ROOT / folder).rglob(pattern)}
    relative = sorted(path.relative_to(ROOT) for path in found if path.is_file())
    return [p for p in relative if not skipped & set(p.parts) and not any(part.startswith(".") for part in p.parts)]


def imports(path):
    """(line, module) of every import statement, those inside functions and TYPE_CHECKING included."""
    for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import; write the whole name"
            yield node.lineno, node.module or ""
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "import_module" and node.args:
            name = node.args[0]
            parts = name.values if isinstance(name, ast.JoinedStr) else [name]
            if isinstance(parts[0], ast.Constant) and isinstance(parts[0].value, str):
                yield node.lineno, parts[0].value


def test_imports_point_one_way():
    seen, wrong = 0, []
    for path in files("*.py", folders=CODE):
        layer = path.parts[0]
        for line, module in imports(path):
            top = module.split(".")[0]
            seen += top in CODE
            if (top in CODE and top not in LOWER[layer]) or top in ("tests", "docs"):
                wrong.append(f"{path}:{line}: {layer} imports {module}")
            if top in BINDINGS and layer != "gpu":
                wrong.append(f"{path}:{line}: {module} is imported in gpu/ only")
    assert seen > 300  # the walk did see imports
    assert not wrong, "\n".join(wrong)


EVERY_MODULE_FIRST = """
import importlib, pkgutil, sys, traceback
import nn
names = [info.name for info in pkgutil.walk_packages(nn.__path__, "nn.")]
assert len(names) > 60
for name in names:
    for loaded in [m for m in sys.modules if m.split(".")[0] == "nn"]:
        del sys.modules[loaded]
    try:
        importlib.import_module(name)
    except Exception:
        print(name, traceback.format_exc(limit=-1))
"""


def test_every_module_can_be_imported_first():
    """No module needs another one imported before it, although nn.tensor and nn.ops are written with each other."""
    done = subprocess.run([sys.executable, "-c", EVERY_MODULE_FIRST], cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("", 0), done.stdout + done.stderr


def test_the_product_needs_no_oracle():
    oracles = {"torch", "transformers", "gguf", "safetensors", "pytest", "hypothesis"}
    peers = Path("apps/bench/peers.py")  # imports them if they are there, to compare with
    wrong = [
        f"{path}:{line}: {module}"
        for path in files("*.py", folders=CODE)
        for line, module in imports(path)
        if module.split(".")[0] in oracles and path != peers
    ]
    assert not wrong, "\n".join(wrong)


def test_every_switch_is_in_the_readme():
    """A switch is a name that code reads or sets; README.md lists it in its table, and lists none that is gone."""
    used = set()
    for path in (*files("*.py", folders=CODE), Path("run"), Path(".ci/run")):
        used |= set(re.findall(r"\bANYGPU_[A-Z]+\b", (ROOT / path).read_text(encoding="utf-8")))
    table = set(re.findall(r"^\| `(ANYGPU_[A-Z]+)` \|", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE))
    assert {"ANYGPU_DEVICE", "ANYGPU_CACHE"} <= used
    assert table == used


def test_no_file_is_long_without_a_reason():
    sizes = {
        str(path): len((ROOT / path).read_text(encoding="utf-8").splitlines())
        for path in files("*.py", "*.wgsl", folders=(*CODE, "shaders", "tests", "docs"))
    }
    assert len(sizes) > 100
    assert {path for path, lines in sizes.items() if lines > LINES} == set(LONG)


def test_nothing_knows_a_persons_machine():
    """No path into a home or work folder, in code, documents or scripts."""
    personal = re.compile(r"(?<![\w.~$])/(?:home|Users|root|work|workspace|mnt)/(?!me\b)[\w.-]+")  # "me" is made up
    wrong = []
    for path in (*files("*.py", "*.wgsl", "*.md", "*.toml", "*.txt"), Path("run"), Path(".ci/run")):
        for number, line in enumerate((ROOT / path).read_text(encoding="utf-8").splitlines(), 1):
            if personal.search(line):
                wrong.append(f"{path}:{number}: {line.strip()[:100]}")
    assert not wrong, "\n".join(wrong)


MAPS = files("*.md")
OUTSIDE = {"config.json", "tokenizer.json"}  # files of models


def test_there_is_a_map_of_every_large_folder():
    assert {"gpu", "shaders", "nn", "nn/graph", "nn/check", "tests"} <= {str(path.parent) for path in MAPS}


@pytest.mark.parametrize("path", MAPS, ids=str)
def test_documents_name_what_is_there(path):
    """Links lead somewhere, and names of files in `code` are files: from the document's folder, the root, or below."""
    text = (ROOT / path).read_text(encoding="utf-8")
    folder = (ROOT / path).parent
    links = re.findall(r"\]\(([^)#\s]+)", text)
    wrong = [link for link in links if "://" not in link and not (folder / link).exists()]
    for name in re.findall(r"`([\w./*-]+\.(?:py|wgsl|md|toml|json))(?:::\w+)?`", text):
        known = (ROOT / name).exists() or name in OUTSIDE or any(folder.glob(f"**/{name}"))
        wrong += [] if known else [name]
    for name in re.findall(r"^\| (.*?) \|", text, re.MULTILINE):
        for part in re.findall(r"`([\w/]+)/`", name):
            wrong += [] if (folder / part).is_dir() or (ROOT / part).is_dir() else [part]
    assert not wrong, f"{path}: {wrong}"


@pytest.mark.parametrize("folder", ["gpu", "nn/graph"])
def test_maps_list_every_file(folder):
    text = (ROOT / folder / "README.md").read_text(encoding="utf-8")
    names = [path.name for path in files("*.py", folders=(folder,)) if path.parent == Path(folder)]
    assert len(names) > 8
    assert not [name for name in names if name != "__init__.py" and f"`{name}`" not in text]


def test_cases_name_tests_that_are_there():
    """docs/cases.md: `file::test`, further `::test` of the same file, and [names of check cases]."""
    text = (ROOT / "docs/cases.md").read_text(encoding="utf-8")
    lines = re.findall(r"^\| (\d+) \| .* \| (.*) \|$", text, re.MULTILINE)
    assert [number for number, _ in lines] == [str(i) for i in range(1, 26)]
    names = {case.name for case in all_cases()}
    for number, cell in lines:
        held = 0
        file = None
        for path, test in re.findall(r"`([\w/.]*)::(\w+)`", cell):
            file = ROOT / path if path else file
            assert file is not None and f"def {test}(" in file.read_text(encoding="utf-8"), f"{number}: {path}::{test}"
            held += 1
        for case in re.findall(r"\[([^\]]+)\]", cell):
            assert case in names, f"{number}: no case [{case}]"
            held += 1
        assert held or "later part" in cell, f"{number}: no test"
