"""Every place of the package where what comes from outside may become code: an unpickling, an eval, an import by a name
that is not written there. A new one fails here until it is listed, with where its input comes from."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]

# Who can write to the config, or to modules that it names, can run code: that is what these keys are for.
PLACES = {
    ("weft/__init__.py", "__getattr__", "import_module"): "weft's own modules, from a table of public names",
    ("weft/config/__init__.py", "__getattr__", "import_module"): "the same",
    ("weft/api.py", "_run", "import_module"): "weft's own recipes, by the commands of the table of schemas",
    ("weft/cli.py", "_train.body", "import_module"): "the same",
    ("weft/former_modules.py", "_FormerModules.create_module", "import_module"): "weft's own, by their former names",
    ("weft/data/workers.py", "WorkerPool._receive", "pickle.loads"): "a pipe to a process that this one has started",
    ("weft/data/workers.py", "serve", "pickle.loads"): "a pipe to the process that has started this one",
    (
        "weft/rl/dump_files.py",
        "_load_torch",
        "torch.load",
    ): "dumps of other trainers, by an Unpickler with a list of types",
    ("weft/rl/environments/base.py", "load_class", "import_module"): "weft's own adapters, by a table of schemes",
    ("weft/importing.py", "import_extra", "import_module"): "names written at the calls, of weft's extras",
    ("weft/importing.py", "import_module", "import_module"): "import paths of the config",
    ("weft/importing.py", "import_named", "import_module"): "the same",
    ("weft/models/hf.py", "import_architectures", "import_module"): "model.imports, never in the model's folder",
    ("weft/models/hf_processor.py", "_family", "import_module"): "modules of transformers, by names that it lists",
    ("weft/models/hf_processor.py", "_without_torchvision", "import_module"): "the same",
    ("weft/rl/algorithms/__init__.py", "_built_in", "import_module"): "the files of that folder",
    ("weft/rl/rewards/calls.py", "_load", "pickle.loads"): "functions of the program that calls weft.rl",
    ("weft/rl/user_process.py", "receive", "pickle.loads"): "a pipe to the controller",
    ("weft/rl/workers.py", "Worker._ask", "pickle.loads"): "a pipe to a process of rl.reward or rl.environment",
    ("weft/verify/plants.py", "owner_of", "import_module"): "names of weft's own modules",
    ("weft/verify/reference_optimizer.py", "Optimizer.over", "import_module"): "optimizer.name of the config",
}
# torch pickles objects that ranks of one run send each other. Their connections: docs/explanation/security.md.
AMONG_RANKS = {
    "all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list", "send_object_list",
    "recv_object_list",
}  # fmt: skip
UNPICKLING = {
    *(f"{module}.load{s}" for module in ("pickle", "cloudpickle", "dill", "marshal", "joblib") for s in ("", "s")),
    "torch.load", "shelve.open", "pd.read_pickle", "pandas.read_pickle",
}  # fmt: skip
CODE = {"eval", "exec", "compile", "__import__", "runpy.run_path", "runpy.run_module"}
YAML = {f"yaml.{kind}load{every}" for kind in ("", "unsafe_", "full_") for every in ("", "_all")}


def found_in(source: str) -> Iterator[tuple[str, str]]:
    """(the function it is in, what is called) of every such place."""

    def walk(node: ast.AST, within: str) -> Iterator[tuple[str, str]]:
        for child in ast.iter_child_nodes(node):
            name = within
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = f"{within}.{child.name}".lstrip(".")
            if isinstance(child, ast.Call) and (kind := dangerous(child)):
                yield within, kind
            yield from walk(child, name)

    yield from walk(ast.parse(source), "")


def dangerous(call: ast.Call) -> str | None:
    name = ast.unparse(call.func)
    last = name.rpartition(".")[2]
    if name in UNPICKLING | CODE or last in {"spec_from_file_location", "Unpickler", "get_class_from_dynamic_module"}:
        return name
    if name in YAML and ast.unparse(call.args[-1]) not in ("Loader", "_Loader"):  # SafeLoaders
        return name
    if last == "import_module" and not isinstance(call.args[0], ast.Constant):
        return last
    keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    if keywords.get("allow_pickle", "False") != "False" or keywords.get("trust_remote_code", "False") != "False":
        return name
    return last if last in AMONG_RANKS else None


def test_places_where_code_may_come_in_are_listed() -> None:
    places = set()
    for path in sorted((ROOT / "weft").rglob("*.py")):
        for function, kind in found_in(path.read_text()):
            if kind not in AMONG_RANKS:
                places.add((str(path.relative_to(ROOT)), function, kind))
    assert places == PLACES.keys()


def test_each_kind_of_place_is_seen() -> None:
    for line, kind in {
        "pickle.loads(data)": "pickle.loads",
        "torch.load(path)": "torch.load",
        "eval(text)": "eval",
        "yaml.load(text, yaml.Loader)": "yaml.load",
        "importlib.import_module(name)": "import_module",
        "np.load(path, allow_pickle=True)": "np.load",
        "AutoModel.from_pretrained(path, trust_remote_code=trusted)": "AutoModel.from_pretrained",
        "dist.all_gather_object(out, value)": "all_gather_object",
    }.items():
        assert list(found_in(f"class A:\n    def f(self):\n        return {line}")) == [("A.f", kind)]
    assert not list(found_in("import_module('peft'); model.eval(); yaml.load(text, Loader); yaml.safe_load(text)"))
