// Colors: perceptually even maps with monotonic lightness; text on a color is readable.

import assert from "node:assert/strict";
import { test } from "node:test";

import {
  againstPeers, inkOn, luminance, mapOf, mapTable, mixed, operationColor, packed, sequential, srgbOfOklab, tripleOfHex,
  type Triple,
} from "../src/canvas/colors.ts";
import { roundStep, ticksBetween, timeTick } from "../src/canvas/ticks.ts";

function contrast(a: Triple, b: Triple): number {
  const [low, high] = [luminance(a), luminance(b)].sort((x, y) => x - y);
  return ((high ?? 0) + 0.05) / ((low ?? 0) + 0.05);
}

test("OKLab gives white, black and the primaries of its definition", () => {
  assert.deepEqual(srgbOfOklab(1, 0, 0), [255, 255, 255]);
  assert.deepEqual(srgbOfOklab(0, 0, 0), [0, 0, 0]);
  assert.deepEqual(srgbOfOklab(0.6279553606, 0.2248630684, 0.1258462985), [255, 0, 0]);
  assert.deepEqual(srgbOfOklab(0.4520137184, -0.0324569677, -0.3115281477), [0, 0, 255]);
});

test("lightness increases along the map, and its ends have a high contrast", () => {
  const map = Array.from({ length: 255 }, (_, level) => sequential(level / 254));
  for (let level = 3; level < map.length; level += 1) {
    // a level is less than one step of 8 bits, so every third level is compared
    assert.ok(luminance(map[level] as Triple) > luminance(map[level - 3] as Triple));
  }
  assert.ok(contrast(map[0] as Triple, map[254] as Triple) > 9);
  assert.deepEqual(sequential(-1), sequential(0));
  assert.deepEqual(sequential(2), sequential(1));
  const blue = map[0] as Triple;
  const yellow = map[254] as Triple;
  assert.ok(blue[2] > blue[0] && yellow[2] < yellow[0]);
});

test("no color of the map is outside of sRGB, so none was clipped", () => {
  // at the edge of sRGB a channel is 0 or 255; inside of it none is
  for (let level = 1; level < 254; level += 1) {
    const color = sequential(level / 254);
    assert.ok(color.every((channel) => channel > 0 && channel < 255), String(color));
  }
});

test("in the map for peers the lower half is pale, and lightness is monotonic", () => {
  for (const [theme, sign] of [["light", -1], ["dark", 1]] as const) {
    const map = Array.from({ length: 255 }, (_, level) => againstPeers(level / 254, theme));
    for (let level = 20; level < map.length; level += 1) {
      const rise = luminance(map[level] as Triple) - luminance(map[level - 20] as Triple);
      assert.ok(rise * sign > 0, `${theme} ${level}`);
    }
    for (const color of map) {
      assert.ok(color.every((channel) => channel > 0 && channel < 255), `${theme} ${String(color)}`);
    }
    const spread = (color: Triple): number => Math.max(...color) - Math.min(...color);
    assert.ok(map.slice(0, 128).every((color) => spread(color) < 32), "colors of chance are nearly gray");
    assert.ok(contrast(map[0] as Triple, map[127] as Triple) < 1.5, "and nearly equal");
    assert.ok(contrast(map[127] as Triple, map[254] as Triple) > 4, "slow ranks are visible");
    assert.deepEqual(mapOf("relative", theme)(-1), map[0]);
    assert.deepEqual(againstPeers(2, theme), map[254]);
  }
});

test("a table is the map as pixels", () => {
  const table = mapTable(255, mapOf("absolute", "light"));

  assert.equal(table.length, 255);
  assert.equal(table[0], packed(sequential(0)));
  assert.equal(table[254], packed(sequential(1)));
  assert.equal(packed([1, 2, 3]), 0xff030201);
  const bytes = new Uint8Array(Uint32Array.of(packed([1, 2, 3], 4)).buffer);
  assert.deepEqual([...bytes], [1, 2, 3, 4]);
});

test("labels on the colors of operations are readable", () => {
  for (const theme of ["light", "dark"] as const) {
    for (const name of [
      "forward-compute", "backward-compute", "backward-weight-compute", "forward-send", "gc", "step", "optimizer",
      "nonsense",
    ]) {
      const color = operationColor(name, theme);
      assert.ok(contrast(inkOn(color), color) >= 4.5, `${name} ${theme} ${contrast(inkOn(color), color)}`);
    }
  }
  assert.notDeepEqual(operationColor("forward-compute", "light"), operationColor("backward-compute", "light"));
  assert.notDeepEqual(operationColor("backward-weight-compute", "light"), operationColor("backward-compute", "light"));
  assert.notDeepEqual(operationColor("backward-weight-compute", "light"), operationColor("nonsense", "light"));
});

test("design tokens are parsed, and colors are mixed", () => {
  assert.deepEqual(tripleOfHex(" #1d5bb8"), [29, 91, 184]);
  assert.deepEqual(tripleOfHex("#1d5bb826"), [29, 91, 184]);
  assert.deepEqual(tripleOfHex("#fff"), [255, 255, 255]);
  assert.deepEqual(tripleOfHex("red"), [128, 128, 128]);
  assert.deepEqual(mixed([0, 0, 0], [100, 200, 50], 0.5), [50, 100, 25]);
});

test("ticks are round and few", () => {
  assert.deepEqual(ticksBetween(0, 100, 5), [0, 20, 40, 60, 80, 100]);
  assert.deepEqual(ticksBetween(13, 27, 3), [15, 20, 25]);
  assert.equal(roundStep(0, 4), 1);
  for (const span of [3, 47, 1e6, 2.5e9]) {
    assert.ok(ticksBetween(0, span, 8).length <= 10);
  }
  assert.equal(timeTick(12_500_000, 500_000), "12500\u202f\u00b5s");
  assert.equal(timeTick(12_500_000, 5_000_000), "13\u202fms");
  assert.equal(timeTick(1_500_000_000, 500_000_000), "1500\u202fms");
  assert.equal(timeTick(3_000_000_000, 1_000_000_000), "3\u202fs");
});
