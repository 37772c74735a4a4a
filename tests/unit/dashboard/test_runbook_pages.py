"""Runbooks as pages: as steps, with the names of the job in every command."""

from __future__ import annotations

from collections.abc import Iterable

from megatrain_dashboard.api.runbooks.document import (
    RunbookBlockDocument,
    RunbookStepDocument,
    TextDocument,
)
from megatrain_dashboard.api.runbooks.filling import Names, filled_code, filled_command
from megatrain_dashboard.api.runbooks.markdown import Runbook
from megatrain_dashboard.api.runbooks.route import installed_runbooks
from tests.helpers.markdown import anchors, fenced_blocks
from tests.helpers.source_tree import ROOT

SOURCES = ROOT / "docs" / "runbooks"
OWN_ETCD = Names("big", "/data2/runs/big", host="gpu-7", rank=5, round=3, step=210, incident="i-1", verdict="v-9")
ETCD = Names("big", "/data2/runs/big", "https://e1:2379,https://e2:2379", host="gpu-7")
UNKNOWN = Names("big", "/data2/runs/big")
EXAMPLES = ("runs/demo", "runs/my", " my ", "etcd-1:", "host-1", "host-2", "host-7", "20261121", "fan broken")


def test_all_pages_but_the_index_are_served() -> None:
    assert set(installed_runbooks()) == {path.name for path in SOURCES.glob("*.md")} - {"README.md"}


def test_a_runbook_keeps_its_headings_and_its_commands() -> None:
    for name, runbook in installed_runbooks().items():
        text = (SOURCES / name).read_text()
        steps = runbook.steps(OWN_ETCD)
        commands = [command for block in blocks_of(steps) for command in block.commands]
        assert {step.anchor for step in steps if step.title != "First"} <= anchors(text), name
        assert len(commands) == sum(len(block.commands) for block in fenced_blocks(text)), name
        links = [one.target for block in blocks_of(steps) for one in texts_of(block) if one.kind == "document"]
        assert [target for target in links if not (ROOT / target.partition("#")[0]).exists()] == [], name


def test_no_command_names_the_job_of_the_example() -> None:
    found = [
        command
        for names in (OWN_ETCD, ETCD, UNKNOWN)
        for runbook in installed_runbooks().values()
        for block in blocks_of(runbook.steps(names))
        for command in block.commands
        if any(example in f"{command} " for example in EXAMPLES)
    ]
    assert found == []


def blocks_of(steps: Iterable[RunbookStepDocument]) -> list[RunbookBlockDocument]:
    return [block for step in steps for block in step.blocks]


def texts_of(block: RunbookBlockDocument) -> list[TextDocument]:
    return [*block.texts, *(one for row in block.rows for cell in row for one in cell)]


FILLED = [
        ("megatrain status runs/demo", "megatrain status /data2/runs/big",
         "megatrain status big --rdzv-endpoint https://e1:2379,https://e2:2379", "megatrain status /data2/runs/big"),
        ("megatrain host cordon my --host host-2 --reason \"two kills\" --rdzv-endpoint etcd-1:2379",
         "megatrain host cordon /data2/runs/big --host gpu-7 --reason \"WHY\"",
         "megatrain host cordon big --rdzv-endpoint https://e1:2379,https://e2:2379 --host gpu-7 --reason \"WHY\"",
         "megatrain host cordon /data2/runs/big --host HOST --reason \"WHY\""),
        ("megatrain ckpt ls runs/my", "megatrain ckpt ls /data2/runs/big", "megatrain ckpt ls /data2/runs/big",
         "megatrain ckpt ls /data2/runs/big"),
        ("megatrain incidents my --id 20261121-104630 --rdzv-endpoint etcd-1:2379",
         "megatrain incidents /data2/runs/big --id i-1",
         "megatrain incidents big --rdzv-endpoint https://e1:2379,https://e2:2379 --id last",
         "megatrain incidents /data2/runs/big --id last"),
        ("megatrain job approve runs/demo --verdict 20261121-110233-417",
         "megatrain job approve /data2/runs/big --verdict v-9",
         "megatrain job approve big --rdzv-endpoint https://e1:2379,https://e2:2379 --verdict VERDICT",
         "megatrain job approve /data2/runs/big --verdict VERDICT"),
        ("tail runs/my/logs/host-2/round-000003/rank-00003.log",
         "tail /data2/runs/big/logs/gpu-7/round-000003/rank-00005.log",
         "tail /data2/runs/big/logs/gpu-7/round-ROUND/rank-RANK.log",
         "tail /data2/runs/big/logs/HOST/round-ROUND/rank-RANK.log"),
        ("curl -N http://etcd-1:2379/v3/watch", "curl -N http://HOST:PORT/v3/watch", "curl -N https://e1:2379/v3/watch",
         "curl -N http://HOST:PORT/v3/watch"),
        ("journalctl -k", "journalctl -k", "journalctl -k", "journalctl -k"),
]  # fmt: skip
"""A command of a runbook, and the same for a job with its own etcd, with another etcd, and with unknown names."""


def test_commands_have_the_names_of_the_job() -> None:
    for command, *expected in FILLED:
        assert [filled_command(command, names) for names in (OWN_ETCD, ETCD, UNKNOWN)] == expected


def test_names_of_a_job_are_quoted_for_a_shell() -> None:
    names = Names("big", "/runs/a b;rm", host="$(x)")
    assert filled_command("megatrain host check runs/demo --host host-7", names) == (
        "megatrain host check '/runs/a b;rm' --host '$(x)'"
    )


def test_output_of_programs_is_shown_unchanged() -> None:
    code = "optimizer.lr: host-2 has 0.5, but host-1, the first host of job 'my', has 0.001"
    assert filled_code(code, OWN_ETCD) == code
    assert filled_code("<run>/logs/diagnostics.log", OWN_ETCD) == "/data2/runs/big/logs/diagnostics.log"


def test_markdown_becomes_steps() -> None:
    text = (
        "# A page\n\nFirst: **look** at `runs/demo` ([hang](hang.md#now), [guide](../guides/recovery.md)).\n\n"
        "<!-- not run: a reason -->\n```console\n$ megatrain status runs/demo\ndemo: green\n```\n\n"
        "## When `it` came\n\n| a | b |\n|---|---|\n| x | `y` |\n\n- one\n  more\n- two\n"
    )
    first, second = Runbook("page.md", text).steps(UNKNOWN)
    assert (first.title, second.title, second.anchor) == ("First", "When it came", "when-it-came")
    paragraph, commands = first.blocks
    assert [(one.kind, one.text, one.target) for one in paragraph.texts] == [
        ("text", "First: ", ""),
        ("strong", "look", ""),
        ("text", " at ", ""),
        ("code", "/data2/runs/big", ""),
        ("text", " (", ""),
        ("runbook", "hang", "hang.md#now"),
        ("text", ", ", ""),
        ("document", "guide", "docs/guides/recovery.md"),
        ("text", ").", ""),
    ]
    assert (commands.commands, commands.example) == (("megatrain status /data2/runs/big",), "demo: green")
    table, *items = second.blocks
    assert [[cell[0].text for cell in row] for row in table.rows] == [["a", "b"], ["x", "y"]]
    assert [item.texts[0].text for item in items] == ["one more", "two"]
