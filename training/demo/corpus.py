"""Text that every Python installation carries: modules, docstrings, functions, package descriptions.

Everything here is a pure function of the installation: files are taken in byte order of their relative
paths, those that are not valid UTF-8 or do not parse are left out, and nothing depends on time or hashing.
"""

from __future__ import annotations

import ast
import importlib.metadata
import sysconfig
import textwrap
import warnings
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from training.demo.errors import CorpusError

_SKIPPED_DIRS = frozenset(
    {
        "__pycache__",
        "dist-packages",
        "encodings",
        "idle_test",
        "lib2to3",
        "pydoc_data",
        "site-packages",
        "test",
        "tests",
    }
)
_MIN_DOCSTRING_CHARS = 120
_MIN_ANSWER_CHARS = 40
_MAX_ANSWER_CHARS = 2_000
_MAX_DESCRIPTION_CHARS = 20_000
_MIN_DESCRIPTION_CHARS = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class Module:
    """One source file of the standard library."""

    path: str
    """POSIX path relative to the standard library, for example `json/decoder.py`."""
    text: str
    """The whole file."""
    tree: ast.Module
    """The parsed file."""

    @property
    def dotted_name(self) -> str:
        """The name it is imported by, for example `json.decoder`."""
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@dataclass(frozen=True, kw_only=True, slots=True)
class Prose:
    """One passage of English: a docstring or a package description."""

    title: str
    """Where it comes from, for example `json.decoder.JSONDecoder` or `numpy (package)`."""
    text: str
    """The passage, at least a sentence or two."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Dialogue:
    """One question about a function and its answer."""

    question: str
    """What the user asks."""
    answer: str
    """The function's docstring, or its source."""


def standard_library(root: Path | None = None) -> list[Module]:
    """Reads the sources of the standard library, in byte order of their paths.

    Args:
        root: The directory to read instead of this interpreter's standard library.

    Raises:
        CorpusError: There is no readable source there (some minimal installations carry byte code only).
    """
    root = Path(sysconfig.get_path("stdlib")) if root is None else root
    modules = [module for path in _python_files(root) if (module := _parse(root, path)) is not None]
    if not modules:
        raise CorpusError(
            f"{root}: no Python sources found; the demo trains on the standard library's own text, "
            "so run it with an interpreter that ships its .py files"
        )
    return modules


def docstrings(modules: Iterable[Module]) -> Iterator[Prose]:
    """Yields the docstrings of modules and classes that are long enough to read, in source order."""
    for module in modules:
        for name, node in _definitions(module.tree, module.dotted_name):
            if isinstance(node, ast.Module | ast.ClassDef):
                text = ast.get_docstring(node)
                if text is not None and len(text) >= _MIN_DOCSTRING_CHARS:
                    yield Prose(title=name, text=text)


def package_descriptions() -> Iterator[Prose]:
    """Yields the long descriptions of the installed packages, by name, each cut at 20,000 characters."""
    found: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        metadata = distribution.metadata
        if "Name" in metadata and "Description" in metadata:
            # A name can be listed twice (an editable install shadows a regular one); the first is imported.
            found.setdefault(metadata["Name"].lower(), metadata["Description"])
    for name, text in sorted(found.items()):
        if len(text) >= _MIN_DESCRIPTION_CHARS:
            yield Prose(title=f"{name} (package)", text=text[:_MAX_DESCRIPTION_CHARS])


def dialogues(modules: Iterable[Module]) -> Iterator[Dialogue]:
    """Yields question and answer pairs made from documented functions, in source order.

    Two kinds alternate: what a function does (answered by its docstring) and how to write it (by its source).
    """
    num_yielded = 0
    for module in modules:
        lines = module.text.splitlines()
        for name, node in _definitions(module.tree, module.dotted_name):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            doc = ast.get_docstring(node)
            if doc is None or len(doc) < _MIN_ANSWER_CHARS:
                continue
            if num_yielded % 2 == 0:
                question = f"What does `{name}({ast.unparse(node.args)})` do?"
                answer = doc
            else:
                summary = " ".join(doc.split("\n\n")[0].split())
                question = f"Write the Python function `{node.name}`. {summary}"
                answer = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
            if len(answer) <= _MAX_ANSWER_CHARS:
                num_yielded += 1
                yield Dialogue(question=question, answer=answer)


def _python_files(root: Path) -> list[Path]:
    """Lists the `.py` files below `root` in byte order of their relative paths, without tests and tables."""
    found = []
    for path in root.rglob("*.py"):
        relative = path.relative_to(root)
        if _SKIPPED_DIRS.isdisjoint(relative.parts[:-1]) and path.is_file():
            found.append((relative.as_posix().encode(), path))
    return [path for _, path in sorted(found)]


def _parse(root: Path, path: Path) -> Module | None:
    """Reads and parses one file; None when it is not UTF-8 or not valid source for this interpreter."""
    try:
        text = path.read_text(encoding="utf-8")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in old modules are not our business
            tree = ast.parse(text)
    except (UnicodeDecodeError, SyntaxError, ValueError):
        return None
    return Module(path=path.relative_to(root).as_posix(), text=text, tree=tree)


def _definitions(tree: ast.Module, name: str) -> Iterator[tuple[str, ast.AST]]:
    """Yields the module, then every class and function in it outside function bodies, with dotted names."""
    pending: deque[tuple[str, ast.AST]] = deque([(name, tree)])
    while pending:
        prefix, node = pending.popleft()
        yield prefix, node
        if isinstance(node, ast.Module | ast.ClassDef):
            kinds = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
            pending.extend(
                (f"{prefix}.{child.name}", child) for child in node.body if isinstance(child, kinds)
            )
