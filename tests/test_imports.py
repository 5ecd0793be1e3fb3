"""The direction of dependencies, and what starting up may import."""

import ast
import importlib.metadata
import subprocess
import sys

import pytest
from conftest import ROOT

# Each module may import those named before it, and nothing else of the project.
MAY_IMPORT = {
    "__init__": (), "errors": (), "program": ("errors",), "places": ("__version__", "errors"), "headers": ("places",
                                                                                                           "errors"),
    "sampling": ("headers", "errors"), "settings": ("sampling", "errors"), "processes": ("errors",),
    "template": ("processes",), "chat": ("processes", "errors"),
    "checkpoint": ("headers", "settings", "errors"), "build": ("places", "headers", "checkpoint", "program", "errors"),
    "native": ("places", "headers", "errors"),
    "weights": ("headers", "checkpoint", "errors"), "graphs": ("errors",),
    "rope": (),
    "gpu": ("headers", "weights", "errors"), "launch": ("headers", "gpu", "graphs", "errors"),
    "device": ("gpu", "launch", "errors"),
    "session": ("native", "rope", "sampling", "errors"), "batch": ("sampling",),
    "draws": ("sampling",),
    "library": ("build", "native", "weights", "gpu", "device", "errors"),
    "capacity": ("errors",),
    "model": ("capacity", "batch", "weights", "errors"),
    "opened": ("checkpoint", "native", "weights", "library", "model", "errors"), "stepper": ("sampling", "errors"),
    "engine": ("opened", "sampling", "draws", "session", "stepper", "errors"),
    "report": ("errors",), "score": ("sampling", "errors"), "text": ("errors",), "arrays": ("errors",),
    "listen": ("errors",), "log": (), "stdio": (),
    "intake": (), "metrics": ("__version__", "report"), "refused": ("errors",), "fields": ("refused", "sampling",
                                                                                           "errors"),
    "stops": ("text",), "schemas": ("refused",), "call_grammars": ("schemas",),
    "constraints": ("call_grammars", "refused", "schemas"), "grammars": ("processes", "errors"),
    "grammar_check": ("grammars", "processes"),
    "requests": ("arrays", "chat", "constraints", "fields", "grammars", "refused", "report", "sampling", "stops",
                 "text", "errors"),
    "scheduler": ("refused", "requests", "errors"), "logprobs": (),
    "connection": ("intake", "logprobs", "refused", "requests"),
    "coding": ("refused",), "access": ("listen", "refused", "errors"), "messages": ("chat", "refused"),
    "scan": (), "arguments": ("scan",), "tool_formats": ("arguments", "scan"), "parts": ("scan", "tool_formats"),
    "reading": ("parts", "tool_formats", "errors"), "tools": ("refused",),
    "choices": ("logprobs", "parts", "stops"), "conversation": ("chat", "refused", "tools", "errors"),
    "openai": ("choices", "constraints", "conversation", "fields", "messages", "refused", "requests", "sampling",
               "tools"),
    "tokens": ("conversation", "openai", "refused"),
    "http": ("coding", "connection", "intake", "metrics", "openai", "refused", "tokens", "errors"),
    "server": ("access", "arrays", "chat", "connection", "http", "intake", "listen", "log", "metrics", "reading",
               "refused", "requests",
               "scheduler", "stdio", "errors"),
    "serve": ("access", "build", "sampling", "listen", "scheduler", "http", "server", "program", "errors"),
    "doctor": ("places", "build", "checkpoint", "weights", "gpu", "library", "errors", "native"),
    "dialogue": ("chat", "parts", "reading", "stops", "text", "program", "errors"),
    "run": ("__version__", "headers", "checkpoint", "build", "dialogue", "weights", "library", "sampling", "capacity",
            "engine", "opened", "report", "score", "doctor", "text", "tool_formats", "arrays", "serve", "log",
            "program", "errors"),
}


def imported(path):
    """Full names of every module that a file imports, at any depth."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_dependencies_point_one_way():
    for path in (ROOT / "colibri").glob("*.py"):
        for name in imported(path):
            parts = name.split(".")
            assert parts[0] not in ("bench", "tests", "converter"), f"{path.name} imports {name}"
            if parts[0] == "colibri":
                assert parts[1] in MAY_IMPORT[path.stem], f"{path.name} imports {name}"
            assert parts[0] != "cuda" or path.stem == "gpu", f"{path.name} imports {name}"


def test_converter_stands_alone():
    for path in (ROOT / "converter").glob("*.py"):
        for name in imported(path):
            parts = name.split(".")
            known = parts[0] in sys.stdlib_module_names or parts[0] in ("numpy", "tqdm", "converter") or (
                path.stem == "hub" and parts[0] == "huggingface_hub")
            known = known or parts[0] == "colibri" and parts[1] in ("headers", "errors", "program", "__version__")
            known = known or path.stem == "few_bits" and name in ("colibri.build", "colibri.native")  # to search
            assert known, f"{path.name} imports {name}"


def test_host_run_imports_no_cuda_and_no_progress_bar():
    script = "import sys, colibri.run; print([m for m in ('cuda', 'tqdm', 'numpy.random') if m in sys.modules])"
    printed = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "cuda" not in printed.stdout and "tqdm" not in printed.stdout


@pytest.mark.skipif(not list(importlib.metadata.distributions(name="colibri")), reason="colibri is not installed")
def test_a_clone_named_like_the_package_hides_nothing(tmp_path):
    """Started beside a clone called colibri, whose root is no package."""
    (tmp_path / "colibri" / "native").mkdir(parents=True)
    found = subprocess.run([sys.executable, "-c", "import colibri.native; print(colibri.native.__file__)"],
                           cwd=tmp_path, capture_output=True, text=True, check=False)
    assert found.stdout.strip() == str(ROOT / "colibri" / "native.py"), found.stderr


@pytest.mark.parametrize("name", ["colibri.run", "converter"])
def test_missing_package_is_one_line(name):
    """-S: without site-packages, as where the environment is not activated."""
    result = subprocess.run([sys.executable, "-S", "-m", name, "--help"], cwd=ROOT, capture_output=True, text=True,
                            check=False)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == (f"python -m {name}: imports: No module named 'numpy', expected the packages of setup.cfg; "
                             "activate their environment (. .venv/bin/activate), or install them (pip install -e .)\n")
