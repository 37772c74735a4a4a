// The grid of ranks: numbers and places, what is below a point, where keys lead.

import assert from "node:assert/strict";
import { test } from "node:test";

import {
  centreOf, clampedGrid, gridWidth, hasCards, peersOfRank, placeOfRank, rankAt, rankBeside, rankOfPlace, wholeGrid, zoomedGrid,
} from "../src/canvas/grid-picture.ts";
import { gridImage } from "../src/canvas/grid-painter.ts";

const LAYOUT = { tp_size: 8, pp_size: 8, dp_size: 192 };

test("ranks and places are those of megatrain", () => {
  assert.deepEqual(placeOfRank(LAYOUT, 777), { tp: 1, dp: 97, pp: 0 });
  assert.deepEqual(placeOfRank(LAYOUT, 12_287), { tp: 7, dp: 191, pp: 7 });
  for (let rank = 0; rank < 12_288; rank += 1) {
    assert.equal(rankOfPlace(LAYOUT, placeOfRank(LAYOUT, rank)), rank);
  }
  const peers = peersOfRank(LAYOUT, 777);
  assert.deepEqual(peers.tp, [776, 777, 778, 779, 780, 781, 782, 783]);
  assert.deepEqual([peers.dp.length, peers.dp[0], peers.dp[1]], [192, 1, 9]);
  assert.deepEqual([peers.pp.length, peers.pp[0], peers.pp[1]], [8, 777, 777 + 1536]);
});

test("the rank below a point is the one that is drawn there", () => {
  const view = wholeGrid(LAYOUT, 900, 500);
  for (const rank of [0, 7, 8, 777, 1535, 1536, 12_287]) {
    const { x, y } = centreOf(LAYOUT, view, rank);
    assert.equal(rankAt(LAYOUT, view, x, y), rank);
    assert.ok(x >= 0 && x <= 900 && y >= 0 && y <= 500);
  }
  assert.equal(rankAt(LAYOUT, view, view.x + 8.5 * view.cell, 10), -1); // between two stages
  assert.equal(rankAt(LAYOUT, view, -5, 10), -1);
  assert.equal(rankAt(LAYOUT, view, 10, 499.999 + view.line), -1);
});

test("every rank has a pixel of its own, stage beside stage", () => {
  const colours = Array.from({ length: 12_288 }, (_, rank) => [rank & 255, rank >> 8, 7] as const);
  const image = gridImage(LAYOUT, colours);

  assert.equal(image.width, 64);
  assert.equal(image.pixels.filter((pixel) => pixel !== 0).length, 12_288);
  assert.equal(new Set(image.pixels).size, 12_288);
  assert.equal(image.pixels[97 * 64 + 1], ((255 << 24) | (7 << 16) | (3 << 8) | 9) >>> 0); // rank 777
});

test("zooming keeps the point, and neither shrinks below the whole nor loses the grid", () => {
  const whole = wholeGrid(LAYOUT, 900, 500);
  const near = zoomedGrid(LAYOUT, whole, 2, 300, 200, whole);
  const before = rankAt(LAYOUT, whole, 300, 200);

  assert.equal(rankAt(LAYOUT, near, 300, 200), before);
  assert.equal(zoomedGrid(LAYOUT, whole, 0.1, 300, 200, whole).cell, whole.cell);
  const far = clampedGrid(LAYOUT, { ...near, x: 1e6, y: -1e6 }, 900, 500);
  assert.equal(far.x, 0);
  assert.ok(far.y + far.line * 192 >= 500 - 1e-6);
});

test("a small job fills the page with cells that hold words, a large one keeps all in sight", () => {
  const small = { tp_size: 1, pp_size: 2, dp_size: 4 };
  const view = wholeGrid(small, 760, 520);
  assert.equal(gridWidth(small, view), 760);
  assert.ok(hasCards(view));
  assert.equal(view.line * 4, 520);
  assert.equal(gridWidth(small, wholeGrid(small, 3300, 1800)), 3300);
  assert.ok(!hasCards(wholeGrid(LAYOUT, 1900, 900)));
  assert.ok(Math.abs(gridWidth(LAYOUT, wholeGrid(LAYOUT, 1900, 900)) - 1900) < 1e-6);
});

test("zooming keeps the rank under the pointer where gaps stay as they are", () => {
  const whole = wholeGrid({ tp_size: 2, pp_size: 4, dp_size: 8 }, 900, 500);
  const layout = { tp_size: 2, pp_size: 4, dp_size: 8 };
  for (const rank of [0, 17, 40, 63]) {
    const { x, y } = centreOf(layout, whole, rank);
    assert.equal(rankAt(layout, zoomedGrid(layout, whole, 1.3, x, y, whole), x, y), rank);
  }
});

test("keys lead from cell to cell, over the gap between stages, and stop at the rim", () => {
  assert.equal(rankBeside(LAYOUT, 7, "ArrowRight"), 1536);
  assert.equal(rankBeside(LAYOUT, 1536, "ArrowLeft"), 7);
  assert.equal(rankBeside(LAYOUT, 0, "ArrowLeft"), 0);
  assert.equal(rankBeside(LAYOUT, 0, "ArrowDown"), 8);
  assert.equal(rankBeside(LAYOUT, 0, "PageUp"), 0);
  assert.equal(rankBeside(LAYOUT, 0, "PageDown"), 80);
  assert.equal(rankBeside(LAYOUT, 0, "End"), 1536 * 7 + 7);
  assert.equal(rankBeside(LAYOUT, 12_287, "ArrowDown"), 12_287);
  assert.equal(rankBeside(LAYOUT, 5, "x"), 5);
});
