"""Figures of the source tree's structure: `python -m tests.support.structure [path of src]`.

Lines, files, folders and functions are counted from the source; imports too, those within functions included. The files
of a step are those whose functions run on the one rank of a small job from its first prompt to its last update.
"""

from __future__ import annotations

import ast
import json
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

from torch.distributed import TCPStore

from tests.support.jobs import ROOT, environment, tiny_config
from tests.support.ranks import HOST, rank_environment

PACKAGE = "spmdrl"
# What people start: everything else must be reached from here.
ENTRIES = (
    "__main__", "job_end", "library", "cli.command_line", "runtime.workers.guard", "runtime.workers.worker",
    *(f"verbs.doctor.{name}" for name in ("device_facts", "stage_process", "device_verbs", "precision", "whole_jobs")),
)  # fmt: skip

SOURCES = {".py", ".cpp", ".h", ".js", ".css", ".html", ".sh", ".sbatch", ".json", ".yaml"}
QUESTIONS = {"what", "whether", "where", "how", "which", "who", "when", "that", "why", "over", "while"}

# From prompt to gradient, without what logs, times, saves or switches.
ON_A_ROWS_WAY = re.compile(r"algorithms|dataflow|engines|nouns|runtime/workers|verbs|train")
BESIDE_IT = re.compile(r"resharding|checkpoint|manifest|state\.py|models/hf|volume")

RUNNING = """
import json, os, sys, threading
from pathlib import Path

folder, ranks = Path(sys.argv[-2]), json.loads(sys.argv.pop())
seen, threads, in_loop = set(), set(), []

def watch(frame, event, argument):
    code = frame.f_code
    if event not in ("call", "return") or "/spmdrl/" not in code.co_filename:
        return
    if code.co_name == "loop" and code.co_filename.endswith("train.py"):
        in_loop[:] = [True] if event == "call" else []
        # Those that live through all steps: a timer or an exchange of lines is there at one of its ends at most.
        now = set(threading.enumerate())
        threads.update(now) if event == "call" else threads.intersection_update(now)
    if in_loop and event == "call" and not code.co_name.startswith("<"):
        seen.add(code.co_filename.rpartition("/spmdrl/")[2])

# Imported before, as watching makes it slow, and once for all ranks.
import spmdrl.engines.generation.native.native_engine, spmdrl.verbs.train, torch.distributed.pipelining
from spmdrl.__main__ import main
from transformers import AutoTokenizer, PreTrainedTokenizerFast

for job, own in ranks:
    if os.fork() == 0:
        break
else:
    sys.exit(any([os.wait()[1] for _ in ranks]))
os.environ.update(own)
sys.argv[-1] = f"run.dir={folder / job}"
is_first = own.get("RANK", "0") == "0"
if is_first:
    threading.setprofile(watch)
    sys.setprofile(watch)
try:
    raise SystemExit(main())
except SystemExit as end:
    assert not end.code, end.code
finally:
    sys.setprofile(None)
    if is_first:
        found = {"files": sorted(seen), "threads": sorted(thread.name for thread in threads)}
        (folder / f"{job}.json").write_text(json.dumps(found))
"""


def modules_of(package: Path) -> dict[str, Path]:
    """Every module by its name below the package; a package is its `__init__.py`."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def nodes_of(tree: ast.Module) -> list[ast.AST]:
    """All nodes of a tree, which takes longer to walk through than to parse."""
    return list(ast.walk(tree))


def functions_of(tree: ast.Module) -> Iterator[int]:
    """Lines of each function and method, decorators and docstring included, those of nested functions too."""
    for node in nodes_of(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert node.end_lineno is not None
            yield node.end_lineno - node.lineno + 1


def imports_of(tree: ast.Module, modules: Iterable[str], *, at_top: bool = False) -> set[str]:
    """The package's modules that a module imports; with `at_top`, those that it imports when it is imported itself."""
    known, found = set(modules), set()
    for node in tree.body if at_top else nodes_of(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        found |= {name.removeprefix(f"{PACKAGE}.") for name in names if name.startswith(f"{PACKAGE}.")} & known
    return found


def cycles(imports: Mapping[str, set[str]]) -> list[list[str]]:
    """Groups of modules that import each other in a circle (Tarjan's strongly connected components)."""
    numbers: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(name: str) -> None:
        numbers[name] = low[name] = len(numbers)
        stack.append(name)
        for other in sorted(imports[name]):
            if other not in numbers:
                visit(other)
            if other in stack:
                low[name] = min(low[name], low[other])
        if low[name] == numbers[name]:
            group = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(group) > 1:
                found.append(sorted(group))

    for name in imports:
        if name not in numbers:
            visit(name)
    return found


def names_used(tree: ast.Module) -> Iterator[str]:
    """Names that a module reads, calls or passes, attributes and short texts (`getattr`, tables) included."""
    for node in nodes_of(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.keyword) and node.arg:
            yield node.arg
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < 60:
            yield from re.findall(r"\w+", node.value)


def unused(trees: Mapping[str, ast.Module]) -> list[str]:
    """Functions, classes and methods that no module names, but for what a class from elsewhere asks for."""
    used = {name for tree in trees.values() for name in names_used(tree)}
    own = {node.name for tree in trees.values() for node in nodes_of(tree) if isinstance(node, ast.ClassDef)}
    found = []
    for module, tree in trees.items():
        holders: list[ast.Module | ast.ClassDef] = [tree]
        holders += [node for node in nodes_of(tree) if isinstance(node, ast.ClassDef) and not extends_others(node, own)]
        found += [
            f"{module}.{node.name}"
            for holder in holders
            for node in holder.body
            if isinstance(node, (ast.FunctionDef, ast.ClassDef))
            and node.name not in used
            and not node.name.startswith("__")
        ]
    return sorted(found)


def extends_others(node: ast.ClassDef, own: Iterable[str]) -> bool:
    """Whether a class has a base that the package doesn't define."""
    return any(not isinstance(base, ast.Name) or base.id not in own for base in node.bases)


def reached(imports: Mapping[str, set[str]], entries: Iterable[str]) -> set[str]:
    todo = [name for name in entries if name in imports]
    seen = set(todo)
    while todo:
        new = imports[todo.pop()] & imports.keys() - seen
        seen |= new
        todo += new
    return seen


def figures(package: Path) -> dict[str, object]:
    """What can be counted without running anything."""
    modules = modules_of(package)
    source = {name: path.read_text(encoding="utf-8") for name, path in modules.items()}
    trees = {name: ast.parse(text) for name, text in source.items()}
    lengths = sorted(length for name in modules for length in functions_of(trees[name]))
    folders = {
        str(folder.relative_to(package)): sum(
            1 for path in folder.iterdir() if path.name[:2] != "__" and (path.suffix == ".py" or holds_code(path))
        )
        for folder in [package, *(path for path in package.rglob("*") if holds_code(path))]
    }
    product = {name: imports_of(trees[name], modules) for name in modules}
    is_package = {name for name, path in modules.items() if path.name == "__init__.py"}
    found = {
        "lines": sum(
            path.read_text(encoding="utf-8").count("\n")
            for path in package.rglob("*")
            # Links to configs/ are lines of that folder.
            if path.suffix in SOURCES and not path.is_symlink()
        ),
        "imports_of_ours": sum(len(found) for found in product.values()),
        "files": len(modules) - len(is_package),
        "folders": len(folders),
        "most_imports_of_ours": max((len(found), name) for name, found in product.items()),
        "most_methods": max(methods_of(trees)),
        "headless_docstrings": headless(trees),
        "widest_folder": max(folders.values()),
        "widest_folders": sorted(name for name, width in folders.items() if width == max(folders.values())),
        "functions": len(lengths),
        "function_lines_median": statistics.median(lengths),
        "function_lines_p90": lengths[int(0.9 * len(lengths))],
        "import_cycles": cycles({name: imports_of(trees[name], modules, at_top=True) for name in modules}),
        "modules_nothing_in_the_product_imports": sorted(
            set(product) - is_package - reached(product, [*ENTRIES, *(f"verbs.{name}" for name in modules)])
        ),
        "names_that_only_tests_use": unused(trees),
    }
    # The trees of the whole package would stay with them.
    nodes_of.cache_clear()
    return found


def methods_of(trees: Mapping[str, ast.Module]) -> list[tuple[int, str]]:
    """Each class with the number of its methods."""
    classes = [node for tree in trees.values() for node in nodes_of(tree) if isinstance(node, ast.ClassDef)]
    return [(sum(isinstance(entry, ast.FunctionDef) for entry in node.body), node.name) for node in classes]


def headless(trees: Mapping[str, ast.Module]) -> list[str]:
    """Docstrings and texts of attributes and keys that begin with a question word instead of a verb or a noun."""
    bodies = [node.body for tree in trees.values() for node in nodes_of(tree) if hasattr(node, "body")]
    strings = [
        entry.value.value
        for body in bodies if isinstance(body, list) for entry in body
        if isinstance(entry, ast.Expr) and isinstance(entry.value, ast.Constant) and isinstance(entry.value.value, str)
    ]  # fmt: skip
    first_words = [re.match(r"\W*(\w*)", text) for text in strings]
    return sorted(word.string.splitlines()[0] for word in first_words if word and word[1].lower() in QUESTIONS)


def holds_code(path: Path) -> bool:
    return path.is_dir() and (path / "__init__.py").exists()


def what_runs(package: Path) -> tuple[list[str], list[str]]:
    """The files whose functions run in the loop of a small job on one rank, and the Python threads that rank 0 of two
    keeps."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        (folder / "job.py").write_text(RUNNING)
        ranks = [("one", {}), *(("two", rank_environment(rank, 2, 2, store.port)) for rank in range(2))]
        command = [
            sys.executable, str(folder / "job.py"), "train", str(tiny_config(folder)), "train.max_steps=2",
            "checkpoint.interval=0", str(folder), json.dumps(ranks),
        ]  # fmt: skip
        env = environment(PYTHONPATH=str(package.parent))
        subprocess.run(command, env=env, cwd=ROOT, stdout=subprocess.DEVNULL, check=True)
        one, two = (json.loads((folder / f"{job}.json").read_text()) for job in ("one", "two"))
        return one["files"], two["threads"]


def on_a_rows_way(files: Iterable[str]) -> list[str]:
    """Those files of a step that stand between a prompt and its gradient."""
    return [path for path in files if ON_A_ROWS_WAY.match(path) and not BESIDE_IT.search(path)]


def main() -> None:
    package = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "src") / PACKAGE
    ran, threads = what_runs(package)
    found = figures(package) | {"files_of_a_step": len(ran), "files_from_prompt_to_gradient": len(on_a_rows_way(ran))}
    for name, value in (found | {"threads": threads}).items():
        print(f"{name:40} {value}")
    print("\n".join(on_a_rows_way(ran)))


if __name__ == "__main__":
    main()
