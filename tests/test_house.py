"""The house keeps its order: what is packaged, who imports whom and when, what is never used."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
FLOORS = (  # from the ground: an import goes down, or stays within its room
    ("sim",),
    ("common",),
    ("bench",),
    ("realrun",),
    ("profiler",),
    ("calibration",),
    ("view",),
    ("decide", "published"),
    ("live",),
    ("cli",),
    ("",),  # the Python API
)
SIM_FLOORS = (  # the same inside sim, by folder or file
    ("core", "limits", "reading"),
    ("records",),
    ("models",),
    ("prices",),
    ("workload",),
    ("machine",),
    ("policies",),
    ("config",),
    ("metrics",),
    ("engines",),
    ("assembly", "cluster", "relevance", "run", "trust"),
)
HEAVY = {  # what takes long to import, or may not be there
    "distributed", "joblib", "matplotlib", "numpy", "pandas", "pyarrow", "pydantic", "pynvml", "ray",
    "rich", "safetensors", "scipy", "seaborn", "simpy", "torch", "tornado", "transformers", "triton",
}  # fmt: skip


class Import(NamedTuple):
    """A module of ours, or a package of others', that a module imports: at its top, in a function, or for its types."""

    source: str
    target: str
    when: str


@cache
def modules() -> dict[str, Path]:
    """Every module of the program by its name; `pdvsim/` also holds links to the other rooms, which are left out."""
    paths = {}
    for top in ("pdvsim", "sim", "profiler", "realrun", "calibration"):
        for path in sorted((ROOT / top).rglob("*.py")):
            if not any(parent.is_symlink() for parent in path.parents):
                parts = path.relative_to(ROOT).with_suffix("").parts
                parts = parts if top == "pdvsim" else ("pdvsim", *parts)
                paths[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return paths


def under(*rooms: str) -> list[str]:
    return [name for name in modules() if name.startswith(tuple(f"pdvsim.{room}." for room in rooms))]


def room_of(module: str) -> str:
    """The package under `pdvsim` that a module is in; none of those that stand in `pdvsim` itself."""
    at = modules()[module].parent.relative_to(ROOT).parts
    return (at[1:] or ("",))[0] if at[0] == "pdvsim" else at[0]


def floor_of(module: str) -> int:
    return next(number for number, rooms in enumerate(FLOORS) if room_of(module) in rooms)


@cache
def tree(module: str) -> ast.Module:
    return ast.parse(modules()[module].read_bytes())


@cache
def imports(module: str) -> tuple[Import, ...]:
    return tuple(_imports(module, tree(module), "at once"))


def _imports(module: str, node: ast.AST, when: str) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        yield from (Import(module, alias.name, when) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        for alias in node.names:
            inner = f"{node.module}.{alias.name}"
            yield Import(module, inner if inner in modules() else str(node.module), when)
    else:
        if isinstance(node, ast.FunctionDef):
            when = "in a function"
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            when = "for types"
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.expr):  # which holds no import
                yield from _imports(module, child, when)


@cache
def ours(module: str) -> frozenset[str]:
    """The modules of ours that a module imports in any way."""
    return frozenset(i.target for i in imports(module) if i.target in modules() and i.target != module)


@cache
def loaded(module: str) -> frozenset[str]:
    """The modules of ours that importing a module loads, itself among them."""
    names, todo = set(), [module]
    while todo:
        if (name := todo.pop()) not in names:
            names.add(name)
            todo += [i.target for i in imports(name) if i.when == "at once" and i.target in modules()]
    return frozenset(names)


@cache
def weight(target: str) -> frozenset[str]:
    """The heavy packages that an import loads."""
    if target not in modules():
        return frozenset({target.partition(".")[0]} & HEAVY)
    named = (i.target for name in loaded(target) for i in imports(name) if i.when == "at once")
    return frozenset({name.partition(".")[0] for name in named} & HEAVY)


def test_every_package_is_listed() -> None:
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["packages"])
    assert listed == {name for name, path in modules().items() if path.name == "__init__.py"}


def test_imports_go_down() -> None:
    for module in modules():
        for target in ours(module):
            assert floor_of(target) < floor_of(module) or room_of(target) == room_of(module), f"{module} -> {target}"


def test_imports_inside_sim_go_down() -> None:
    floors = {part: number for number, parts in enumerate(SIM_FLOORS) for part in parts}
    for module in under("sim"):
        for target in ours(module) & set(under("sim")):
            source_part, target_part = (name.split(".")[2] for name in (module, target))
            assert floors[target_part] <= floors[source_part], f"{module} -> {target}"


def test_there_is_no_circle() -> None:
    """Imports in functions and for types count: two files that need each other are one thing."""
    left = {name: set(ours(name)) for name in modules()}
    while ends := {name for name in left if not left[name] or name not in set().union(*left.values())}:
        left = {name: targets - ends for name, targets in left.items() if name not in ends}
    assert not left, f"circles among {sorted(left)}"


def test_an_import_in_a_function_spares_something() -> None:
    """It loads a heavy package that its module does not. Only what `import pdvsim` loads may put off anything."""
    for module in sorted(set(modules()) - loaded("pdvsim")):
        for put_off in imports(module):
            if put_off.when == "in a function":
                assert weight(put_off.target) - weight(module), f"{put_off.target} belongs to the top of {module}"


def types_of(module: str) -> dict[str, str]:
    """Names of classes, and of aliases with what they stand for."""
    classes = {node.name: module for node in ast.walk(tree(module)) if isinstance(node, ast.ClassDef)}
    plain = (
        node for node in tree(module).body if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    )
    named = ((ast.unparse(node.targets[0]), ast.unparse(node.value)) for node in plain)
    return classes | {name: value for name, value in named if name[0].isupper() and not name.isupper()}


def test_a_type_name_is_used_once() -> None:
    """An alias may be written again where it stands for the same."""
    meanings: dict[str, set[str]] = {}
    for module in modules():
        for name, meaning in types_of(module).items():
            meanings.setdefault(name, set()).add(meaning)
    assert {name for name, all_of_it in meanings.items() if len(all_of_it) > 1} == set()


def test_figures_come_from_one_factory() -> None:
    for module in sorted(set(modules()) - {"pdvsim.view.figure"}):
        used = {i.target for i in imports(module) if i.when != "for types"}
        assert not used & {"matplotlib", "matplotlib.figure", "matplotlib.pyplot"}, module


BANNED = {  # by room
    "": "pickle dill marshal shelve",  # data is never run
    "sim.": "torch triton seaborn matplotlib",  # a device or a picture: the data flows one way
    "sim.policies.": "time threading asyncio pdvsim.sim.machine.device pdvsim.sim.cluster pdvsim.sim.run",
}


@pytest.mark.parametrize("room", BANNED)
def test_what_a_room_never_imports(room: str) -> None:
    for module in (name for name in modules() if f"{name}.".startswith(f"pdvsim.{room}")):
        for target in (i.target for i in imports(module)):
            assert not any(f"{target}.".startswith(f"{name}.") for name in BANNED[room].split()), (module, target)


def test_a_policy_never_asks_what_runs_it() -> None:
    """One that knew its device would make two programs of one."""
    for module in under("sim.policies"):
        text = modules()[module].read_text(encoding="utf-8")
        assert "isinstance(self.device" not in text, module
        assert "type(self.device" not in text, module


def test_data_is_never_run() -> None:
    for module in modules():
        calls = (node.func for node in ast.walk(tree(module)) if isinstance(node, ast.Call))
        assert not {call.id for call in calls if isinstance(call, ast.Name)} & {"eval", "exec"}, module


COMMAND = "try: pdvsim.cli.main({!r}.split())\nexcept SystemExit: pass"
LIGHT = [  # what runs one after the other in a process, and what it does not load
    ("import pdvsim", "argparse numpy pandas simpy"),
    ("import pdvsim.cli\n" + COMMAND.format("--help"), "argparse numpy pandas simpy"),
    (COMMAND.format("run --help"), "numpy pandas simpy rich"),
    ("pdvsim.run(arch='pdv', num_prompts=5, request_rate=4)", "torch transformers seaborn"),
]


def test_what_is_heavy_is_loaded_where_it_is_needed() -> None:
    loaded = "\nprint('loaded:', *sorted(set({!r}.split()) & set(sys.modules)))"
    code = "\n".join(["import sys", *(run + loaded.format(unwanted) for run, unwanted in LIGHT)])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert re.findall("^loaded:.*", done.stdout, re.M) == ["loaded:"] * len(LIGHT)


def test_what_is_public_says_its_contract() -> None:
    for module in sorted(modules()):
        public = [
            d for d in tree(module).body if isinstance(d, ast.FunctionDef | ast.ClassDef) and not d.name.startswith("_")
        ]
        assert [d.name for d in public if not (ast.get_docstring(d) or "").splitlines()[:1]] == [], module


def test_a_test_file_has_a_name_of_its_own() -> None:
    """pytest imports test files by their name, without their folder."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []


CEILINGS = {  # lines of Python at most, by room; a change may lower these, never raise one
    "sim and setup": (2468, ("sim", "sim/setup")),
    "models and prices": (5531, ("sim/models/", "sim/prices/")),
    "engines": (942, ("sim/engines/",)),
    "machine": (2465, ("sim/machine/",)),
    "policies": (2766, ("sim/policies/",)),
    "workload": (2152, ("sim/workload/",)),
    "metrics": (1354, ("sim/metrics/",)),
    "bench": (1996, ("pdvsim/bench/",)),
    "decide": (5502, ("pdvsim/decide/",)),
    "view": (4330, ("pdvsim/view/", "pdvsim/live/")),
    "commands": (4290, ("pdvsim", "pdvsim/cli/", "pdvsim/common/")),
    "realrun and profiler": (6808, ("realrun/", "profiler/")),
    "calibration": (5354, ("calibration/", "pdvsim/published/")),
    "studies": (4058, ("studies/",)),
    "tests": (25188, ("tests/",)),
}
MOST_FILES = {"run": 60, "advise": 96}  # of the product, whose functions one of these executes
QUESTIONS = {
    "run": "pdvsim.run(engine='pdvsim', num_prompts=20, request_rate={})",
    "advise": "pdvsim.advise(engine='pdvsim', request_rate={}, num_prompts=20, num_runs=2, budget=30, jobs=1, "
    "goodput=['ttft:500'])",
}
COUNTED = """
import sys
from pathlib import Path
files = set()
def called(frame, event, argument):
    if event == "call":
        files.add(frame.f_code.co_filename)
import pdvsim
{}.__repr__()  # imports what it needs
sys.setprofile(called)
{}.__repr__()
sys.setprofile(None)
print("executed:", *sorted({{str(Path(name).resolve()) for name in files}}))
"""


def lines(place: str) -> int:
    """Lines of the Python files in a folder; of those under it too where its name ends in a slash."""
    files = (ROOT / place).rglob("*.py") if place.endswith("/") else (ROOT / place).glob("*.py")
    inside = (file for file in files if not any(parent.is_symlink() for parent in (file, *file.parents)))
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in inside)


@pytest.mark.parametrize("room", CEILINGS)
def test_a_room_only_gets_smaller(room: str) -> None:
    most, places = CEILINGS[room]
    assert sum(map(lines, places)) <= most


@pytest.mark.parametrize("what", QUESTIONS)
def test_a_question_passes_few_files(what: str) -> None:
    code = COUNTED.format(QUESTIONS[what].format(4), QUESTIONS[what].format(5))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    [files] = re.findall("^executed: (.*)", done.stdout, re.M)
    ours = {path.resolve() for path in modules().values()}
    assert len([name for name in files.split() if Path(name) in ours]) <= MOST_FILES[what]
