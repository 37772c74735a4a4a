// Server-sent events as text.

import assert from "node:assert/strict";
import { test } from "node:test";

import { parseEvent } from "../src/api/event_text.ts";

test("an event has a name and data, and a comment has none", () => {
  const cases: [string, string, string][] = [
    ['event: change\ndata: {"step": 3}', "change", '{"step": 3}'],
    ["data: a: b", "message", "a: b"],
    ["id: 7\nevent: change\ndata: one\ndata: two", "change", "one\ntwo"],
    [": still here", "message", ""],
    ["retry: 2000", "message", ""],
    ["", "message", ""],
  ];
  for (const [block, name, data] of cases) {
    assert.deepEqual(parseEvent(block), { name, data });
  }
});
