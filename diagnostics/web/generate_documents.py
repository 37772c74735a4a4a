"""Write src/api/documents.ts: what the API answers, as TypeScript has it, made from the classes that make the answers.

Run by `make web`; a test holds that the file is current. `--check` writes nothing and says whether it is.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatrain_diagnostics import dashboard
from megatrain_diagnostics.dashboard.answers.document import Document

OUTPUT = Path(__file__).parent / "src" / "api" / "documents.ts"
HEAD = """// Made by generate_documents.py from every document.py of the dashboard: change those, then run `make web`.
// Times are unix seconds, durations seconds, ratios parts of one; null is "not known".
"""
_PRIMITIVES = {"string": "string", "integer": "number", "number": "number", "boolean": "boolean", "null": "null"}
_REQUEST = "Request"


def document_classes() -> Iterator[type[Document]]:
    """Yield the classes by file, in the order in which they stand there."""
    for module_info in sorted(_modules(), key=lambda info: info.name):
        module = importlib.import_module(module_info.name)
        for value in vars(module).values():
            is_document = isinstance(value, type) and issubclass(value, Document) and value is not Document
            if is_document and value.__module__ == module.__name__:
                yield value


def _modules() -> Iterator[pkgutil.ModuleInfo]:
    """Yield the modules of the dashboard that hold documents."""
    for info in pkgutil.walk_packages(dashboard.__path__, f"{dashboard.__name__}."):
        if info.name.rpartition(".")[2] == "document":
            yield info


def type_text(schema: dict[str, Any]) -> str:
    """Return a JSON schema as a type. Raises: ValueError for what no document has so far."""
    match schema:
        case {"$ref": str(reference)}:
            return reference.rpartition("/")[2]
        case {"enum": list(values)}:
            return " | ".join(f'"{value}"' for value in values)
        case {"const": value}:
            return f'"{value}"'
        case {"anyOf": list(options)}:
            return " | ".join(type_text(option) for option in options)
        case {"type": "array", "items": dict(items)}:
            inner = type_text(items)
            return f"readonly ({inner})[]" if " " in inner else f"readonly {inner}[]"
        case {"type": "object", "additionalProperties": dict(values)}:
            return f"Record<string, {type_text(values)}>"
        case {"type": str(name)} if name in _PRIMITIVES:
            return _PRIMITIVES[name]
    raise ValueError(f"{schema}: no type is known for this schema; teach type_text about it")


def interface_text(document: type[Document]) -> str:
    """Return one class as an interface. In what is asked, a field with a default may be left out."""
    is_request = document.__name__.endswith(_REQUEST)
    schema = document.model_json_schema(mode="validation" if is_request else "serialization")
    required = set(schema.get("required", ())) if is_request else set(schema.get("properties", {}))
    lines = [f"export interface {document.__name__} {{"]
    for name, field in schema.get("properties", {}).items():
        lines.append(f"  {name}{'' if name in required else '?'}: {type_text(field)};")
    return "\n".join([*lines, "}"])


def documents_text() -> str:
    """Return the whole file."""
    return "\n".join([HEAD, "\n\n".join(interface_text(document) for document in document_classes()), ""])


def main(arguments: list[str]) -> int:
    text = documents_text()
    is_current = OUTPUT.exists() and OUTPUT.read_text(encoding="utf-8") == text
    if "--check" in arguments:
        if not is_current:
            print(f"{OUTPUT}: not made from the documents of now; run make web", file=sys.stderr)
        return 0 if is_current else 1
    if not is_current:
        OUTPUT.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
