"""Generates docs/API.md from the docstrings of the public names: ``python -m docs.reference > docs/API.md``."""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from typing import Any

import stillframe

HEAD = """# Python

<!-- Generated from the docstrings by `make docs`; do not edit. -->

Everything here is imported as `stillframe.NAME`. Errors: [by what to do](ERRORS.md). Frameworks have a function each,
described in their guides: [Trainer](guides/transformers.md), [Accelerate](guides/accelerate.md),
[Lightning](guides/lightning.md), [DeepSpeed](guides/deepspeed.md), [DCP](guides/dcp.md).
"""

SECTIONS = {
    "Saving": ["Checkpointer", "Save", "Every", "on_preemption", "Preemption"],
    "What a state holds": ["TrainState", "Batches", "RNG", "register_leaf"],
    "Reading": ["restore", "load", "Catalog", "Checkpoint"],
    "Retention": ["Keep", "KeepLast", "KeepEvery", "KeepFor", "KeepBest"],
    "Tiers": ["Tier"],
    "What is returned": ["RestoreReport", "SkippedStep", "Stats", "TierStats", "Progress", "Times", "Phase"],
}
_TITLES = {name for names in SECTIONS.values() for name in names}


def document() -> str:
    parts = [HEAD]
    for title, names in SECTIONS.items():
        parts += [f"## {title}\n", *(_entry(name) for name in names)]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(parts))


def _entry(name: str) -> str:
    thing = getattr(stillframe, name)
    if inspect.isclass(thing):
        return _class(name, thing)
    if inspect.isfunction(thing):
        return f"### {name}\n\n{_signature(name, thing)}\n{_text(thing)}\n"
    return f"### {name}\n\n`{str(thing).replace('typing.', '')}`\n"


def _class(name: str, kind: type) -> str:
    made = "" if name in _RETURNED else _signature(name, kind)
    fields = [*([] if made else _fields(kind)), *_attributes(kind)]
    methods = []
    for each, member in vars(kind).items():
        if each.startswith("_") or each not in _SHOWN.get(name, vars(kind)):
            continue
        if isinstance(member, property) and member.fget is not None and member.fget.__doc__:
            fields.append(_row(each, str(member.fget.__annotations__["return"]), member.fget.__doc__))
        elif inspect.isfunction(member) and member.__doc__:
            methods.append(f"#### {name}.{each}\n\n{_signature(each, member)}\n{_text(member)}\n")
    table = ["| | | |", "| --- | --- | --- |", *fields, ""] if fields else []
    return "\n".join([f"### {name}\n", made, _text(kind), *table, *methods])


_RETURNED = {"Save", "Preemption", "Checkpoint", "Keep", *SECTIONS["What is returned"]}
"""Nobody calls these classes: a call returns them."""
_SHOWN: dict[str, set[str]] = {
    "Catalog": {"steps", "latest", "open", "delete", "pin", "unpin"},
    "Checkpoint": {"world_size", "ranks", "close"},
    "Keep": set(),
    "TrainState": set(),
    "Batches": set(),
}
"""Of classes that have methods for stillframe's own parts."""


def _signature(name: str, thing: Any) -> str:
    signature = inspect.signature(thing)
    shown = []
    has_star = False
    for each in signature.parameters.values():
        if each.name == "self":
            continue
        if each.kind is each.KEYWORD_ONLY and not has_star:
            shown.append("*")
            has_star = True
        has_star = has_star or each.kind is each.VAR_POSITIONAL
        shown.append(_parameter(each))
    returned = signature.return_annotation
    arrow = "" if inspect.isclass(thing) or returned in (signature.empty, "None", None) else f" -> {returned}"
    line = f"{name}({', '.join(shown)}){arrow}"
    if len(line) > 100:
        line = f"{name}(\n" + "".join(f"    {each},\n" for each in shown) + f"){arrow}"
    return f"```text\n{line}\n```\n"


def _parameter(given: inspect.Parameter) -> str:
    """Annotations are texts, as ``from __future__ import annotations`` makes them, or the types themselves."""
    stars = "**" if given.kind is given.VAR_KEYWORD else "*" if given.kind is given.VAR_POSITIONAL else ""
    given_kind = given.annotation
    kind = given_kind.__name__ if isinstance(given_kind, type) else str(given_kind).replace("typing.", "")
    annotation = "" if given_kind is given.empty else f": {kind}"
    default = "" if given.default is given.empty else f" = {given.default!r}"
    return re.sub(r"<Signals\.(\w+): \d+>", r"\1", f"{stars}{given.name}{annotation}{default}")


def _text(thing: Any) -> str:
    parameters = list(inspect.signature(thing).parameters) if callable(thing) and _has_signature(thing) else []
    return _prose(inspect.getdoc(thing) or "", parameters) + "\n"


def _has_signature(thing: Any) -> bool:
    try:
        inspect.signature(thing)
    except (TypeError, ValueError):
        return False
    return True


def _fields(kind: type) -> list[str]:
    """The attributes of a class that have an annotation, with the text that follows them in the source."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(tree, ast.ClassDef)
    rows = []
    for node, after in zip(tree.body, [*tree.body[1:], ast.Pass()], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id[0] != "_":
            text = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else ""
            rows.append(_row(node.target.id, ast.unparse(node.annotation), str(text)))
    return rows


def _attributes(kind: type) -> list[str]:
    """Those that ``__init__`` makes and that have a text, which follows them in the source."""
    if not inspect.isfunction(vars(kind).get("__init__")) or hasattr(kind, "__dataclass_fields__"):
        return []
    (made,) = ast.parse(textwrap.dedent(inspect.getsource(vars(kind)["__init__"]))).body
    assert isinstance(made, ast.FunctionDef)
    kinds = {each.arg: ast.unparse(each.annotation) for each in made.args.args if each.annotation is not None}
    rows = []
    for node, after in zip(made.body, [*made.body[1:], ast.Pass()], strict=True):
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        text = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else None
        if isinstance(target, ast.Attribute) and target.attr[0] != "_" and text is not None:
            value = getattr(node, "value", None)
            given = kinds.get(target.attr) or type(getattr(value, "value", None)).__name__
            kind_text = ast.unparse(node.annotation) if isinstance(node, ast.AnnAssign) else given
            rows.append(_row(target.attr, kind_text, str(text)))
    return rows


def _row(name: str, kind: str, text: str) -> str:
    return f"| `{name}` | `{kind}` | {' '.join(_prose(text, []).split())} |".replace(" | None`", " \\| None`")


def _prose(docstring: str, parameters: list[str]) -> str:
    """Markdown of a docstring: parameters become a list, ``Blocks:`` and the like paragraphs."""
    lines: list[str] = []
    is_item = is_code = False
    for line in [*inspect.cleandoc(docstring).splitlines(), ""]:
        if is_code and line and not line.startswith("    "):
            lines[-1:] = ["```", ""]
            is_code = False
        if is_code:
            lines.append(line[4:])
            continue
        named = re.match(r"(\w+(?:, \w+)*): ", line)
        if named and set(named[1].split(", ")) <= {*parameters, "more"}:
            lines += [] if is_item else [""]
            names = ", ".join(f"`{each}`" for each in named[1].split(", "))
            line, is_item = f"- {names}: {line[named.end() :]}", True
        elif re.match(r"(Blocks|Raises|Thread|Durability)\b", line):
            word = line.split()[0].rstrip(":,.")
            line, is_item = f"\n**{word}**{line[len(word) :]}", False
        elif is_item and line:
            line = f"  {line}"
        is_item = is_item and bool(line)
        if line.endswith("::"):
            lines += [line[:-1], "", "```py"]
            is_code = True
            continue
        lines.append(line)
    if is_code:
        lines.append("```")
    text = "\n".join(lines).strip().replace("```py\n\n", "```py\n").replace("\n\n```\n", "\n```\n")
    text = re.sub(r":meth:`~?([\w.]+)`", r"`\1()`", text)
    text = re.sub(r":\w+:`~?([\w.]+)`", lambda found: _link(found[1]), text)
    return re.sub(r"``(.+?)``", r"`\1`", text)


def _link(name: str) -> str:
    if name in _TITLES:
        return f"[`{name}`](#{name.lower()})"
    return f"[`{name}`](ERRORS.md)" if name.endswith("Error") else f"`{name.split('.')[-1]}`"


if __name__ == "__main__":
    sys.stdout.write(document())
