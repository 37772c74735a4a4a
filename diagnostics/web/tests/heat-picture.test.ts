// The heat map scaled to the screen: cells that share a pixel show their maximum; new steps are appended to old ones.

import assert from "node:assert/strict";
import { test } from "node:test";

import {
  clampedWindow, columnOfStep, continued, heatPixels, poolHeat, rowOfRank, showing, stepsOf, wholeWindow, type HeatPicture,
} from "../src/canvas/heat-picture.ts";

const NO_VALUE = 255;

function picture(rows: number[][], firstStep = 10, more: Partial<HeatPicture> = {}): HeatPicture {
  const numColumns = rows[0]?.length ?? 0;
  return {
    round: 1, layout: { axes: [{ name: "dp", word: "dp", size: rows.length, stride: 1 }], world_size: rows.length }, operation: "gc", measure: "sum", unit: "s",
    scale: "absolute", by: "rank", sort: "rank", firstStep, lastStep: firstStep + numColumns - 1, rowsPerBin: 1,
    stepsPerBin: 1, low: 0, high: 1, least: 0, greatest: 1, noValue: NO_VALUE, numLevels: 255, hosts: [], groupLabels: [],
    numRows: rows.length, numColumns, cells: Uint8Array.from(rows.flat()), rowRank: Int32Array.from(rows.keys()),
    rowHost: new Int32Array(rows.length), columnStep: Int32Array.from({ length: numColumns }, (_, at) => firstStep + at),
    groupBegin: new Int32Array(0), ...more,
  };
}

test("one bad rank of 12,288 is visible on a screen of 700 lines, wherever it is", () => {
  for (const bad of [0, 777, 6144, 12_287]) {
    const cells = new Uint8Array(12_288 * 100).fill(40);
    cells[bad * 100 + 33] = 250;
    const whole = picture([[0]], 0, {
      cells, numRows: 12_288, numColumns: 100, rowRank: Int32Array.from({ length: 12_288 }, (_, row) => row),
    });
    const pooled = poolHeat(whole, wholeWindow(whole), 700, 1200);

    assert.deepEqual([pooled.height, pooled.width], [700, 100]);
    const bright = [...pooled.levels.keys()].filter((at) => pooled.levels[at] === 251);
    assert.equal(bright.length, 1);
    assert.equal((bright[0] ?? 0) % 100, 33);
    const line = Math.floor((bright[0] ?? 0) / 100);
    const first = Math.floor((line * 12_288) / 700);
    assert.ok(first <= bad && bad < Math.floor(((line + 1) * 12_288) / 700));
  }
});

test("selected columns give exactly their steps", () => {
  const one = picture([[0, 0, 0, 0, 0]], 10);
  assert.deepEqual(stepsOf(one, { top: 0, bottom: 1, left: 1, right: 3 }), { from: 11, to: 12 });
  // steps 100 to 112 in columns of three; the last has one
  const shared = picture([[0, 0, 0, 0, 0]], 100, { stepsPerBin: 3, lastStep: 112 });
  assert.deepEqual(stepsOf(shared, { top: 0, bottom: 1, left: 1, right: 2 }), { from: 103, to: 105 });
  assert.deepEqual(stepsOf(shared, { top: 0, bottom: 1, left: 3, right: 5 }), { from: 109, to: 112 });
});

test("pooling equals a plain loop, in any window", () => {
  let seed = 7;
  const random = (below: number): number => {
    seed = (seed * 48_271) % 2_147_483_647;
    return seed % below;
  };
  const rows = Array.from({ length: 23 }, () => Array.from({ length: 17 }, () => (random(4) === 0 ? NO_VALUE : random(255))));
  const whole = picture(rows);
  for (const [top, bottom, left, right, height, width] of [[0, 23, 0, 17, 23, 17], [3, 20, 2, 15, 5, 4], [0, 23, 0, 17, 7, 40]] as const) {
    const pooled = poolHeat(whole, { top, bottom, left, right }, height, width);
    for (let line = 0; line < pooled.height; line += 1) {
      const of = (size: number, place: number, parts: number): number => Math.floor((place * size) / parts);
      let hasGap = 0;
      const greatest = new Array<number>(pooled.width).fill(0);
      for (let row = top + of(bottom - top, line, pooled.height); row < top + of(bottom - top, line + 1, pooled.height); row += 1) {
        for (let column = left; column < right; column += 1) {
          const code = rows[row]?.[column] ?? 0;
          const place = Math.floor(((column - left) * pooled.width) / (right - left));
          hasGap = code === NO_VALUE ? 1 : hasGap;
          greatest[place] = Math.max(greatest[place] ?? 0, code === NO_VALUE ? 0 : code + 1);
        }
      }
      assert.deepEqual([...pooled.levels.subarray(line * pooled.width, (line + 1) * pooled.width)], greatest);
      assert.equal(pooled.hasGaps[line], hasGap);
    }
  }
});

test("cells without a value look different from every level", () => {
  const pooled = poolHeat(picture([[0, NO_VALUE], [NO_VALUE, 254]]), { top: 0, bottom: 2, left: 0, right: 2 }, 2, 2);
  const table = Uint32Array.from({ length: 255 }, (_, level) => 1000 + level);

  assert.deepEqual([...heatPixels(pooled, table, 1, 2)], [1000, 2, 2, 1254]);
  assert.deepEqual([...pooled.hasGaps], [1, 1]);
});

test("the cell reported at a shared pixel is the one drawn there", () => {
  const shown = picture([[1, 2], [3, NO_VALUE], [9, 4]]);

  assert.deepEqual(showing(shown, 0, 3, 0, 2), { row: 2, column: 0 });
  assert.deepEqual(showing(shown, 1, 2, 1, 2), { row: 1, column: 1 });
});

test("a picture is extended by new steps and drops the oldest", () => {
  const old = picture([[1, 2, 3], [4, 5, NO_VALUE]]);
  const next = picture([[33, 7], [66, 8]], 12);

  const joined = continued(old, next, 10);
  assert.deepEqual([...(joined?.cells ?? [])], [1, 2, 33, 7, 4, 5, 66, 8]);
  assert.deepEqual([joined?.firstStep, joined?.lastStep, joined?.numColumns], [10, 13, 4]);
  const few = continued(old, next, 3);
  assert.deepEqual([...(few?.cells ?? [])], [2, 33, 7, 5, 66, 8]);
  assert.deepEqual([...(few?.columnStep ?? [])], [11, 12, 13]);
});

test("a picture is not extended by one that does not continue it", () => {
  const old = picture([[1, 2], [3, 4]]);

  assert.equal(continued(old, picture([[1], [1]], 14), 10), null); // a gap
  assert.equal(continued(old, picture([[1], [1]], 11, { high: 2 }), 10), null);
  assert.equal(continued(old, picture([[1], [1]], 11, { operation: "step" }), 10), null);
  assert.equal(continued(old, picture([[1], [1]], 11, { rowRank: Int32Array.of(1, 0) }), 10), null);
  assert.equal(continued(old, picture([[1]], 11), 10), null);
});

test("windows stay inside the picture, and steps and ranks are found", () => {
  const shown = picture([[1, 2, 3], [4, 5, 6]], 10, { stepsPerBin: 5, rowRank: Int32Array.of(4, 9) });

  assert.deepEqual(clampedWindow(shown, { top: -3, bottom: 99, left: 1.2, right: 1.4 }), { top: 0, bottom: 2, left: 1, right: 2 });
  assert.deepEqual(clampedWindow(shown, { top: 7, bottom: 7, left: 9, right: 9 }), { top: 1, bottom: 2, left: 2, right: 3 });
  assert.deepEqual([columnOfStep(shown, 9), columnOfStep(shown, 14), columnOfStep(shown, 24), columnOfStep(shown, 25)], [-1, 0, 2, -1]);
  assert.deepEqual([rowOfRank(shown, 9), rowOfRank(shown, 5)], [1, -1]);
});
