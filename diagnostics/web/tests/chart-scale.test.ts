// The x axis of charts: gaps, ticks, and marks that share a position; and typed bounds of a range.

import assert from "node:assert/strict";
import { test } from "node:test";

import type { MarkDocument, SeriesDocument } from "../src/api/documents.ts";
import { boundOf, boundText } from "../src/ui/bounds.ts";
import { acrossOf, columnAcross, endOfStep, extentOf, groupMarks, timeTicks, timeTickTexts } from "../src/ui/chart-scale.ts";

function series(at: (number | null)[], gaps: [number, number][] = []): SeriesDocument {
  return {
    step: at.map((_, index) => index),
    at_unix_s: at,
    gaps: gaps.map(([begin, end]) => ({ begin_unix_s: begin, end_unix_s: end, round: 1 })),
    range: { first_step: null, last_step: null, begin_unix_s: null, end_unix_s: null },
  } as unknown as SeriesDocument;
}

function mark(kind: MarkDocument["kind"], step: number, more: Partial<MarkDocument> = {}): MarkDocument {
  return { kind, step, at_unix_s: step * 10, text: `${kind} ${step}`, ref: "", count: 1, last_step: step, last_unix_s: step * 10, ...more };
}

test("lines break at gaps on a time axis only", () => {
  const document = series([10, 20, 620, 630], [[20, 610]]);
  assert.deepEqual(columnAcross(acrossOf(document, "step", null), [1, 2, 3, 4]), [1, 2, 3, 4]);
  const over = acrossOf(document, "time", null);
  assert.deepEqual(over.values, [10, 20, 20, 620, 630]);
  assert.deepEqual(columnAcross(over, [1, 2, 3, 4]), [1, 2, null, 3, 4]);
});

test("times ascend even if clocks of hosts step back, and steps without a time are omitted", () => {
  const over = acrossOf(series([10, 9.5, null, 12]), "time", null);
  assert.deepEqual(over.values, [10, 10, 12]);
  assert.deepEqual(over.rows, [0, 1, 3]);
});

test("the end of a step is interpolated between known ones, and null outside of them", () => {
  const document = { ...series([10, 20, 40]), step: [0, 10, 20] };
  assert.deepEqual([0, 5, 10, 15, 20, 25].map((step) => endOfStep(document, step)), [10, 15, 20, 30, 40, null]);
  assert.equal(endOfStep(series([null, 20]), 0), null);
});

test("a time axis ends at the end of the range, or now, so that missing steps are visible", () => {
  const document = series([10, 20]);
  assert.equal(acrossOf(document, "time", 500).max, 500);
  const asked = { ...document, range: { ...document.range, begin_unix_s: 0, end_unix_s: 100 } };
  const over = acrossOf(asked, "time", 500);
  assert.deepEqual([over.min, over.max], [0, 100]);
});

test("of marks that share a position the most severe is drawn, and all are counted", () => {
  const checkpoints = Array.from({ length: 3000 }, (_, step) => mark("checkpoint", step));
  const groups = groupMarks([...checkpoints, mark("incident", 1500)], "step", (step) => step / 10, 13);
  assert.ok(groups.length <= 300 / 13 + 1);
  const grave = groups.filter((group) => group.mark.kind === "incident");
  assert.equal(grave.length, 1);
  assert.equal(grave[0]?.x, 150);
  assert.equal(groups.reduce((sum, group) => sum + group.count, 0), 3001);
});

test("marks outside of the chart, or without a position, are not drawn", () => {
  const xOf = (value: number): number | null => (value > 5 ? null : value);
  assert.equal(groupMarks([mark("note", 9), mark("note", 1, { step: null })], "step", xOf, 13).length, 0);
  assert.equal(groupMarks([mark("note", 1, { at_unix_s: null })], "time", xOf, 13).length, 0);
});

test("the extent of a group contains all of its marks", () => {
  const [group] = groupMarks([mark("checkpoint", 100, { count: 25, last_step: 200 }), mark("round", 101)], "step", () => 1, 13);
  assert.ok(group !== undefined);
  assert.deepEqual(extentOf(group, "step"), [90, 210]);
  assert.equal(group.count, 26);
});

test("ticks are at whole hours of the zone, with the date where it changes", () => {
  const offset = 5.5 * 3600; // half an hour off: India
  const begin = Date.UTC(2026, 10, 22, 16, 40) / 1000; // 22:10 there
  const ticks = timeTicks(begin, begin + 4 * 3600, 6, offset);
  assert.deepEqual(timeTickTexts(ticks, offset), ["23:00\n11-22", "00:00\n11-23", "01:00", "02:00"]);
  assert.deepEqual(timeTickTexts(timeTicks(0, 20, 5, 0), 0), ["00:00:00\n01-01", "00:00:05", "00:00:10", "00:00:15", "00:00:20"]);
});

test("there are never more ticks than fit", () => {
  for (const span of [1, 60, 3600, 86_400, 30 * 86_400, 900 * 86_400]) {
    assert.ok(timeTicks(1000, 1000 + span, 6, 0).length <= 7);
  }
});

test("a bound is a step, a time, or a duration before now; anything else is null", () => {
  const cases: [string, string | null][] = [
    ["", ""],
    [" 1,200 ", "1200"],
    ["-15m", "-15m"],
    ["2026-11-23 09:30", "2026-11-23T09:30:00Z"],
    ["2026-11-23T09:30:05", "2026-11-23T09:30:05Z"],
    ["2026-11-23T09:30:00+02:00", "2026-11-23T07:30:00Z"],
    ["yesterday", null],
    ["-15", null],
    ["12.5", null],
  ];
  for (const [text, bound] of cases) {
    assert.equal(boundOf(text, "utc"), bound, text);
  }
  assert.equal(boundText("1200", "utc"), "step 1,200");
  assert.equal(boundText("2026-11-23T09:30:00Z", "utc"), "2026-11-23 09:30");
});
