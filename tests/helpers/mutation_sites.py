"""Mutations of a Python file: their sites, and the file with one of them."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
}


@dataclass(frozen=True, slots=True)
class Mutation:
    """A piece of a file, and its replacement. Lines and columns count as in `ast`: columns in bytes of UTF-8.

    number: how many earlier mutations of the file have the same piece and replacement.
    """

    line: int
    column: int
    end_line: int
    end_column: int
    before: str
    after: str
    number: int = 0


def mutations_of(source: str) -> list[Mutation]:
    """Return every mutation of a file, in the order of its lines. Docstrings, annotations and log calls have none."""
    found = [_mutation(source, node, after) for node, after in _replacements(ast.parse(source))]
    counts: Counter[tuple[str, str]] = Counter()
    numbered = []
    for one in sorted(found, key=lambda one: (one.line, one.column, one.after)):
        numbered.append(replace(one, number=counts[one.before, one.after]))
        counts[one.before, one.after] += 1
    return numbered


def mutated(source: str, mutation: Mutation) -> str:
    """Return the file with this mutation. Raises ValueError if the piece is not where the mutation has it."""
    lines = source.encode().splitlines(keepends=True)
    begin = sum(map(len, lines[: mutation.line - 1])) + mutation.column
    end = sum(map(len, lines[: mutation.end_line - 1])) + mutation.end_column
    whole = source.encode()
    if whole[begin:end].decode() != mutation.before:
        raise ValueError(f"line {mutation.line} does not have {mutation.before!r} at byte {mutation.column}")
    return (whole[:begin] + mutation.after.encode() + whole[end:]).decode()


def _mutation(source: str, node: ast.expr | ast.stmt, after: str) -> Mutation:
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    before = ast.get_source_segment(source, node)
    assert before is not None
    return Mutation(node.lineno, node.col_offset, node.end_lineno, node.end_col_offset, before, after)


def _replacements(tree: ast.Module) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    """Yield nodes and the text that replaces each."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Expr) and _says_only(node.value):
            continue
        match node:
            case ast.Compare(left, [operator], [right]) if type(operator) in _COMPARISONS:
                yield node, _text(ast.Compare(left, [_COMPARISONS[type(operator)]()], [right]))
            case ast.BinOp(left, operator, right) if type(operator) in _ARITHMETIC and not _is_text(left, right):
                yield node, _text(ast.BinOp(left, _ARITHMETIC[type(operator)](), right))
            case ast.BoolOp(operator, values):
                yield node, _text(ast.BoolOp(ast.And() if isinstance(operator, ast.Or) else ast.Or(), values))
            case ast.Constant(bool() as value):
                yield node, str(not value)
            case ast.Constant(int() | float() as value):
                yield node, repr(value + 1)
            case ast.Return(ast.expr() as value) if not (isinstance(value, ast.Constant) and value.value is None):
                yield node, "return None"
            case ast.Expr(ast.Call()):
                yield node, "pass"
            case ast.If(test) | ast.While(test) | ast.IfExp(test):
                yield test, _text(ast.UnaryOp(ast.Not(), test))
        waiting += _code_below(node)


def _code_below(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the executed children of a node; those of an f-string have no position of their own in the file."""
    if isinstance(node, ast.JoinedStr):
        return
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "type_params"):
            continue
        yield from (one for one in (value if isinstance(value, list) else [value]) if isinstance(one, ast.AST))


def _says_only(value: ast.expr) -> bool:
    """Return whether a statement is a docstring or a log call."""
    if isinstance(value, ast.Constant):
        return True
    match value:
        case ast.Call(ast.Attribute(ast.Name(name))) if name.endswith("logger"):
            return True
    return False


def _is_text(*operands: ast.expr) -> bool:
    return any(
        isinstance(operand, ast.JoinedStr)
        or (isinstance(operand, ast.Constant) and isinstance(operand.value, str | bytes))
        for operand in operands
    )


def _text(node: ast.expr) -> str:
    return f"({ast.unparse(node)})"
