"""Imports go downward only, read from the source: a module of a5lib imports its own layer or one below, never above."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

LAYERS = {
    0: ["errors", "config", "records", "progress"],
    1: ["prompts", "data", "grading", "toy_problems", "machine", "cards"],
    2: ["models", "optimizers", "heads", "synthetic"],
    3: ["memory", "shapes", "preflight", "recorder", "engines", "rollouts"],
    4: ["training", "metrics", "evaluation", "checkpoints", "runlog", "toy_build"],
    5: ["plots", "doctor", "bench", "bench_variants", "bench_update", "realised_share", "peers", "probe", "figures",
        "plan_command", "rollout_views", "update_views", "diagnose", "cycle_views", "widgets", "course", "cli",
        "__main__"],
}  # fmt: skip
LAYER_OF = {f"a5lib.{room}": layer for layer, rooms in LAYERS.items() for room in rooms} | {"a5lib": 0}


def module_name(path, root=ROOT):
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(source, module, is_package):
    """Every module that the source imports anywhere, inside functions too, by absolute name."""
    package = module if is_package else module.rpartition(".")[0]
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *([node.module] if node.module else [])])
            # `from a5lib import cli` imports a5lib.cli; of `from a5lib.cli import main` only a5lib.cli is a module
            names |= {f"{base}.{alias.name}" for alias in node.names} if base in ("a5lib", "a5lib.engines") else {base}
    return names


def room(module):
    return ".".join(module.split(".")[:2])


def layer(module):
    assert room(module) in LAYER_OF, f"{module} has no layer; add it to LAYERS and keep the imports downward"
    return LAYER_OF[room(module)]


def violations(source, module, is_package=False):
    found = []
    for name in sorted(imported(source, module, is_package)):
        top = name.partition(".")[0]
        if top == "a5lib" and room(name) in LAYER_OF and layer(name) > layer(module):
            found.append(f"{module} (layer {layer(module)}) imports {name} (layer {layer(name)})")
        if top in ("solutions", "starter") and room(module) != "a5lib.course":
            found.append(f"{module} imports {name}; only a5lib.course may")
    return found


MODULES = sorted((ROOT / "a5lib").rglob("*.py"))


@pytest.mark.parametrize("path", MODULES, ids=[module_name(path) for path in MODULES])
def test_imports_go_downward(path):
    module = module_name(path)
    layer(module)
    found = violations(path.read_text(encoding="utf-8"), module, path.name == "__init__.py")
    assert not found, "; ".join(found)


@pytest.mark.parametrize("package", ["solutions", "starter"])
def test_the_exercises_need_torch_and_transformers_alone(package):
    allowed = {"torch", "transformers", package} | set(sys.stdlib_module_names)
    for path in (ROOT / package).glob("*.py"):
        names = imported(path.read_text(encoding="utf-8"), module_name(path), path.name == "__init__.py")
        others = {name for name in names if name.partition(".")[0] not in allowed}
        assert not others, f"{package}/{path.name} imports {sorted(others)}"


@pytest.mark.parametrize(
    ("module", "source", "expected"),
    [
        ("a5lib.config", "from a5lib.models import load_policy", "a5lib.models (layer 2)"),
        ("a5lib.config", "def f():\n    import a5lib.cli", "a5lib.cli (layer 5)"),
        ("a5lib.models", "from a5lib import errors, training", "a5lib.training (layer 4)"),
        ("a5lib.engines.resident", "from .. import cli", "a5lib.cli (layer 5)"),
        ("a5lib.data", "from .memory import update_ledger", "a5lib.memory (layer 3)"),
        ("a5lib.training", "from solutions.losses import f", "only a5lib.course may"),
        ("a5lib.cli", "import starter", "only a5lib.course may"),
    ],
)
def test_the_reader_sees_what_is_forbidden(module, source, expected):
    assert len(violations(source, module)) == 1
    assert expected in violations(source, module)[0]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("a5lib.training", "from a5lib.evaluation import evaluate\nfrom a5lib.config import TrainConfig\nimport torch"),
        ("a5lib.engines.resident", "from a5lib.engines import Batch\nfrom . import Engine"),
        ("a5lib.course", "import solutions"),
    ],
)
def test_the_reader_sees_what_is_allowed(module, source):
    assert not violations(source, module)
