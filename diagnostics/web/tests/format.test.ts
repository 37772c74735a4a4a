// Numbers, durations and times as text.

import assert from "node:assert/strict";
import { test } from "node:test";

import {
  ageText,
  bytesText,
  memoryText,
  countOf,
  durationText,
  largeText,
  numberText,
  percentText,
  ranksText,
  timeText,
} from "../src/ui/format.ts";

/** Replace the narrow no-break spaces before units, so that expected values are easier to read. */
function plain(text: string): string {
  return text.replaceAll("\u202f", " ");
}

test("numbers have three significant digits, and an exponent only if needed", () => {
  const cases: [number | null, string][] = [
    [0, "0"],
    [1234.5, "1,235"],
    [123.45, "123"],
    [12.345, "12.3"],
    [1.2345, "1.23"],
    [0.012345, "0.0123"],
    [0.000012345, "1.23e-5"],
    [-2.5, "-2.50"],
    [null, "\u2013"],
    [Number.NaN, "\u2013"],
  ];
  for (const [value, expected] of cases) {
    assert.equal(numberText(value), expected);
  }
});

test("durations have a fitting unit and never show sixty of the smaller one", () => {
  const cases: [number | null, string][] = [
    [0, "0 s"],
    [0.0000042, "4.20 \u00b5s"],
    [0.0042, "4.20 ms"],
    [0.9996, "1.00 s"],
    [6.344, "6.34 s"],
    [99.96, "1 min 40 s"],
    [3599.7, "1 h"],
    [7260, "2 h 1 min"],
    [48 * 3600, "2 d"],
    [101 * 3600, "4 d 5 h"],
    [-0.25, "-250 ms"],
    [null, "\u2013"],
  ];
  for (const [value, expected] of cases) {
    assert.equal(plain(durationText(value)), expected);
  }
});

test("ages are rounded", () => {
  assert.equal(ageText(-5), "just now");
  assert.equal(plain(ageText(42.4)), "42 s ago");
  assert.equal(plain(ageText(125)), "2 min ago");
  assert.equal(plain(ageText(7300)), "2 h 2 min ago");
  assert.equal(plain(ageText(50_000)), "14 h ago");
  assert.equal(plain(ageText(5 * 86_400 + 7200)), "5 d 2 h ago");
  assert.equal(plain(ageText(1103 * 86_400)), "1,103 d ago");
});

test("sizes, percentages and counts", () => {
  assert.equal(plain(bytesText(182_403_121_152)), "182 GB");
  assert.equal(plain(bytesText(1_550_000)), "1.55 MB");
  assert.equal(plain(bytesText(999_600)), "1.00 MB");
  assert.equal(plain(memoryText(80 * 2 ** 30)), "80.0 GiB");
  assert.equal(plain(bytesText(999)), "999 B");
  assert.equal(plain(largeText(661_562)), "662 k");
  assert.equal(plain(largeText(202_291_281_920)), "202 G");
  assert.equal(plain(percentText(0.5512)), "55.1 %");
  assert.equal(countOf(1, "step"), "1 step");
  assert.equal(countOf(3000, "step"), "3,000 steps");
});

test("runs of ranks are joined", () => {
  assert.equal(ranksText([0, 1, 2, 5, 7, 8]), "0-2, 5, 7-8");
  assert.equal(ranksText([]), "");
  assert.equal(ranksText([1, 3, 5, 7], 2), "1, 3 and more");
});

test("times have a date unless it is today", () => {
  const noon = Date.UTC(2026, 10, 21, 12, 0, 9) / 1000;
  assert.equal(timeText(noon, "utc", noon + 60), "12:00:09");
  assert.equal(timeText(noon, "utc", noon + 86_400), "2026-11-21 12:00:09");
});
