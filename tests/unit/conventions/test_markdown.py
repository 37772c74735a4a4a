"""The runner of documents finds the blocks, commands, links and anchors that a reader sees."""

from __future__ import annotations

from tests.helpers.markdown import anchors, fenced_blocks, link_targets

DOCUMENT = """# A `name`, and more

Text with [a link](other.md#part "title") and `[no](link)`.

```console
$ megatrain train a.toml \\
    --train.steps=3
step 1
$ make help
```

<!-- not run: needs 8 GPUs -->

```console
$ torchrun x.py
```

```python
# not a heading
print("[no](link)")
```
"""


def test_fenced_blocks_have_their_commands() -> None:
    console, skipped, python = fenced_blocks(DOCUMENT)

    assert (console.language, console.line, console.skip_reason) == ("console", 5, "")
    assert console.commands == ["megatrain train a.toml --train.steps=3", "make help"]
    assert skipped.skip_reason == "needs 8 GPUs"
    assert (python.language, python.skip_reason) == ("python", "")
    assert python.text.startswith("# not a heading")


def test_reason_belongs_to_the_block_that_follows_it_at_once() -> None:
    text = "<!-- not run: a reason -->\nwords between\n```console\n$ make help\n```\n"
    assert fenced_blocks(text)[0].skip_reason == ""


def test_links_and_anchors_are_found() -> None:
    assert link_targets(DOCUMENT) == ["other.md#part"]
    assert anchors(DOCUMENT) == {"a-name-and-more"}
