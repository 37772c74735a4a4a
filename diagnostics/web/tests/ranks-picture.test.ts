// The grid of ranks: rank numbers and places, the rank at a point, keyboard movement.

import assert from "node:assert/strict";
import { test } from "node:test";

import {
  centerOf, clampedGrid, gridWidth, hasCards, placeOfRank, rankAt, rankBeside, rankOfPlace, shapeOf, wholeGrid, zoomedGrid,
  type RanksPicture,
} from "../src/canvas/ranks-picture.ts";
import { rangeStops, rankColors, ranksImage } from "../src/canvas/ranks-painter.ts";
import { peersOf, placeOf, placeText, type Layout } from "../src/canvas/layout.ts";

const SHAPE = { stages: 8, replicas: 192, inner: 8 };

function axis(name: string, size: number, stride: number): Layout["axes"][number] {
  return { name, word: name, size, stride };
}

const LAYOUT = { axes: [axis("pp", 8, 1536), axis("dp", 192, 8), axis("tp", 8, 1)], world_size: 12_288 };
const MORE = {
  axes: [axis("pp", 2, 8), axis("dp", 2, 4), axis("cp", 2, 2), axis("tp", 2, 1), axis("edp", 2, 4), axis("ep", 4, 1)],
  world_size: 16,
};

test("ranks and places are those of megatrain", () => {
  assert.deepEqual(shapeOf(LAYOUT), SHAPE);
  assert.deepEqual(placeOfRank(SHAPE, 777), { inner: 1, replica: 97, stage: 0 });
  assert.deepEqual(placeOfRank(SHAPE, 12_287), { inner: 7, replica: 191, stage: 7 });
  for (let rank = 0; rank < 12_288; rank += 1) {
    assert.equal(rankOfPlace(SHAPE, placeOfRank(SHAPE, rank)), rank);
  }
  assert.equal(placeText(placeOf(LAYOUT, 777)), "pp 0 dp 97 tp 1");
  const { tp = [], dp = [], pp = [] } = peersOf(LAYOUT, 777);
  assert.deepEqual(tp, [776, 777, 778, 779, 780, 781, 782, 783]);
  assert.deepEqual([dp.length, dp[0], dp[1]], [192, 1, 9]);
  assert.deepEqual([pp.length, pp[0], pp[1]], [8, 777, 777 + 1536]);
});

test("each rank of a stage and replica has a cell, for any inner axes", () => {
  assert.deepEqual(shapeOf(MORE), { stages: 2, replicas: 2, inner: 4 });
  assert.equal(placeText(placeOf(MORE, 13), ", "), "pp 1, dp 1, cp 0, tp 1, edp 1, ep 1");
  assert.deepEqual(peersOf(MORE, 13)["cp"], [13, 15]);
  assert.deepEqual(peersOf(MORE, 13)["ep"], [12, 13, 14, 15]);
  assert.deepEqual(peersOf(MORE, 13)["edp"], [9, 13]);
});

test("the rank at a point is the one drawn there", () => {
  const view = wholeGrid(SHAPE, 900, 500);
  for (const rank of [0, 7, 8, 777, 1535, 1536, 12_287]) {
    const { x, y } = centerOf(SHAPE, view, rank);
    assert.equal(rankAt(SHAPE, view, x, y), rank);
    assert.ok(x >= 0 && x <= 900 && y >= 0 && y <= 500);
  }
  assert.equal(rankAt(SHAPE, view, view.x + 8.5 * view.cell, 10), -1); // between two stages
  assert.equal(rankAt(SHAPE, view, -5, 10), -1);
  assert.equal(rankAt(SHAPE, view, 10, 499.999 + view.line), -1);
});

test("every rank has its own pixel, with stages side by side", () => {
  const colors = Array.from({ length: 12_288 }, (_, rank) => [rank & 255, rank >> 8, 7] as const);
  const image = ranksImage(SHAPE, colors);

  assert.equal(image.width, 64);
  assert.equal(image.pixels.filter((pixel) => pixel !== 0).length, 12_288);
  assert.equal(new Set(image.pixels).size, 12_288);
  assert.equal(image.pixels[97 * 64 + 1], ((255 << 24) | (7 << 16) | (3 << 8) | 9) >>> 0); // rank 777
});

test("the legend of steps and scores has the colors of the ranks", () => {
  const step = Int32Array.of(0, 5, 10);
  const score = Float32Array.of(0, 3, 6);
  const picture = { numRanks: 3, newestStep: 10, step, score } as unknown as RanksPicture;
  for (const [by, values] of [["step", step], ["score", score]] as const) {
    const stops = rangeStops(picture, by, "light");
    assert.deepEqual(stops.map((stop) => stop.value), [...values]);
    assert.deepEqual(stops.map((stop) => stop.color), rankColors(picture, by, "light"));
  }
  assert.equal(rangeStops({ ...picture, newestStep: 0 }, "step", "light").length, 1);
});

test("zooming keeps the point, and the grid never becomes smaller than the canvas or leaves it", () => {
  const whole = wholeGrid(SHAPE, 900, 500);
  const near = zoomedGrid(SHAPE, whole, 2, 300, 200, whole);
  const before = rankAt(SHAPE, whole, 300, 200);

  assert.equal(rankAt(SHAPE, near, 300, 200), before);
  assert.equal(zoomedGrid(SHAPE, whole, 0.1, 300, 200, whole).cell, whole.cell);
  const far = clampedGrid(SHAPE, { ...near, x: 1e6, y: -1e6 }, 900, 500);
  assert.equal(far.x, 0);
  assert.ok(far.y + far.line * 192 >= 500 - 1e-6);
});

test("a small job fills the page with cells large enough for text, and a large one is visible as a whole", () => {
  const small = { stages: 2, replicas: 4, inner: 1 };
  const view = wholeGrid(small, 760, 520);
  assert.equal(gridWidth(small, view), 760);
  assert.ok(hasCards(view));
  assert.equal(view.line * 4, 520);
  assert.equal(gridWidth(small, wholeGrid(small, 3300, 1800)), 3300);
  assert.ok(!hasCards(wholeGrid(SHAPE, 1900, 900)));
  assert.ok(Math.abs(gridWidth(SHAPE, wholeGrid(SHAPE, 1900, 900)) - 1900) < 1e-6);
});

test("zooming keeps the rank under the pointer while the gap between stages is at its maximum", () => {
  const whole = wholeGrid({ stages: 4, replicas: 8, inner: 2 }, 900, 500);
  const shape = { stages: 4, replicas: 8, inner: 2 };
  for (const rank of [0, 17, 40, 63]) {
    const { x, y } = centerOf(shape, whole, rank);
    assert.equal(rankAt(shape, zoomedGrid(shape, whole, 1.3, x, y, whole), x, y), rank);
  }
});

test("keys move from cell to cell, across the gap between stages, and stop at the edge", () => {
  assert.equal(rankBeside(SHAPE, 7, "ArrowRight"), 1536);
  assert.equal(rankBeside(SHAPE, 1536, "ArrowLeft"), 7);
  assert.equal(rankBeside(SHAPE, 0, "ArrowLeft"), 0);
  assert.equal(rankBeside(SHAPE, 0, "ArrowDown"), 8);
  assert.equal(rankBeside(SHAPE, 0, "PageUp"), 0);
  assert.equal(rankBeside(SHAPE, 0, "PageDown"), 80);
  assert.equal(rankBeside(SHAPE, 0, "End"), 1536 * 7 + 7);
  assert.equal(rankBeside(SHAPE, 12_287, "ArrowDown"), 12_287);
  assert.equal(rankBeside(SHAPE, 5, "x"), 5);
});
