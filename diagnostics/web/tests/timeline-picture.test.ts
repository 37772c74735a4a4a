// The timeline: slices by time and line, search, and drawing slices as rows of pixels.

import assert from "node:assert/strict";
import { test } from "node:test";

import {
  firstEndingAfter, lineOfSlice, linesWithIdeal, placeLines, sliceAt, type IdealPicture, type TimelinePicture,
} from "../src/canvas/timeline-picture.ts";
import { findSlices, inOrderOfTime, parseSearch } from "../src/canvas/timeline-search.ts";
import { drawStrip, panned, zoomed, type StripSource, type Wide } from "../src/canvas/timeline-strips.ts";

// Rank 3: compute 0-10, 20-30, 35-36; rank 5: compute 5-25, and within it 6-8.
function picture(): TimelinePicture {
  const slices = [[0, 10, 3, 0], [20, 10, 4, 0], [35, 1, 3, 1], [5, 20, 3, 2], [6, 2, 19, -1]] as const;
  const of = (place: 0 | 1 | 2 | 3): number[] => slices.map((one) => one[place]);
  return {
    round: 1, layout: { axes: [{ name: "dp", word: "dp", size: 8, stride: 1 }], world_size: 8 }, firstStep: 1, lastStep: 1, endNs: 36,
    lanes: ["compute", "tp", "pp-send", "pp-recv", "dp", "host"],
    operations: { "3": "forward-compute", "4": "backward-compute", "19": "gc" }, hosts: ["h"], leftOut: [], notes: [],
    numSlices: 5, begin: Float64Array.from(of(0)), length: Float64Array.from(of(1)), sequence: new Float64Array(5),
    bytes: new Float64Array(5), step: new Int32Array(5).fill(1), microbatch: Int32Array.from(of(3)),
    operation: Uint8Array.from(of(2)), chunk: new Uint8Array(5).fill(255), flags: new Uint8Array(5),
    lineFirst: Int32Array.of(0, 3, 4, 5), lineTrack: Int32Array.of(0, 1, 1), lineDepth: Int32Array.of(0, 0, 1),
    trackRank: Int32Array.of(3, 5), trackLane: Uint8Array.of(0, 0), trackOverflow: Int32Array.of(0, 0),
    rank: Int32Array.of(3, 5), rankHost: Int32Array.of(0, 0), flows: Int32Array.of(0, 3), flowLines: Int32Array.of(0, 1), steps: Int32Array.of(1),
    stepBegin: Float64Array.of(0), stepEnd: Float64Array.of(36),
  };
}

test("slices are found by time", () => {
  const shown = picture();

  assert.equal(firstEndingAfter(shown, 0, 3, 10), 1);
  assert.equal(firstEndingAfter(shown, 0, 3, 9.5), 0);
  assert.equal(firstEndingAfter(shown, 0, 3, 99), 3);
  assert.deepEqual([0, 5, 12, 29, 33, 50].map((ns) => sliceAt(shown, 0, ns, 1)), [0, 0, -1, 1, -1, -1]);
  assert.deepEqual([12, 18, 33, 50].map((ns) => sliceAt(shown, 0, ns, Infinity)), [0, 1, 2, 2]);
  assert.deepEqual([0, 2, 3, 4].map((slice) => lineOfSlice(shown, slice)), [0, 0, 1, 2]);
});

test("a slice must match all words and numbers of a search", () => {
  const shown = picture();
  const find = (text: string): number[] => {
    const search = parseSearch(text);
    return search === null ? [] : [...inOrderOfTime(shown, findSlices(shown, search))];
  };

  assert.equal(parseSearch("  "), null);
  assert.deepEqual(find("forward"), [0, 3, 2]);
  assert.deepEqual(find("compute rank:3"), [0, 1, 2]);
  assert.deepEqual(find("r3 mb:0"), [0, 1]);
  assert.deepEqual(find("forward mb:1"), [2]);
  assert.deepEqual(find("COMPUTE backward"), [1]);
  assert.deepEqual(find("step:2"), []);
  assert.deepEqual(find("gc r5"), [4]);
});

test("lines of a rank are adjacent, and the ideal times of a line are below it", () => {
  const shown = picture();
  const ideal: IdealPicture = {
    problem: "", idealS: 1, notes: [], begin: new Float64Array(5), length: Float64Array.of(-1, 5, -1, -1, -1),
    isCritical: new Uint8Array(5), steps: Int32Array.of(1), replayedS: Float64Array.of(1),
  };
  const has = linesWithIdeal(shown, ideal);
  const placed = placeLines(shown, (line) => has[line] === 1);

  assert.deepEqual([...has], [1, 0, 0]);
  assert.deepEqual(placed.lines.map((one) => [one.line, one.isIdeal]), [[0, false], [0, true], [1, false], [2, false]]);
  for (let at = 1; at < placed.lines.length; at += 1) {
    const before = placed.lines[at - 1];
    const here = placed.lines[at];
    assert.ok(before !== undefined && here !== undefined && here.top >= before.top + before.height);
  }
  assert.deepEqual(placed.ranks.map((one) => one.rank), [3, 5]);
  assert.ok((placed.ranks[1]?.top ?? 0) > (placed.ranks[0]?.bottom ?? 0));
  assert.ok(placed.height >= (placed.ranks[1]?.bottom ?? 0));
});

const COLORS = Uint32Array.from({ length: 256 }, (_, place) => place + 1);
const EDGES = Uint32Array.from({ length: 256 }, (_, place) => place + 1001);

function strip(
  shown: TimelinePicture, first: number, last: number, fromNs: number, toNs: number, width: number,
  more: Partial<StripSource> = {},
): { row: number[]; wide: Wide[]; seen: number } {
  const source: StripSource = {
    begin: shown.begin, length: shown.length, weight: new Uint8Array(shown.numSlices), color: shown.operation, ...more,
  };
  const row = new Uint32Array(width);
  const wide: Wide[] = [];
  const seen = drawStrip(shown, source, first, last, { fromNs, toNs, width }, row, new Uint8Array(width), COLORS, EDGES, 8, wide);
  return { row: [...row], wide, seen };
}

test("slices are drawn as pixels, and the first pixel of a wide one is darker", () => {
  const { row, wide, seen } = strip(picture(), 0, 3, 0, 40, 40);

  assert.deepEqual(row.slice(0, 11), [1004, 4, 4, 4, 4, 4, 4, 4, 4, 4, 0]);
  assert.deepEqual(row.slice(19, 31), [0, 1005, 5, 5, 5, 5, 5, 5, 5, 5, 5, 0]);
  assert.deepEqual(row.slice(34, 37), [0, 4, 0]);
  assert.deepEqual(wide, [{ slice: 0, left: 0, right: 10 }, { slice: 1, left: 20, right: 30 }]);
  assert.equal(seen, 3);
});

test("only visible slices are processed", () => {
  const { row, seen } = strip(picture(), 0, 3, 12, 22, 10);

  assert.equal(seen, 1);
  assert.deepEqual(row, [0, 0, 0, 0, 0, 0, 0, 0, 5, 5]);
});

test("a slice narrower than a pixel is drawn, and of several in one pixel the one with the greatest weight", () => {
  const count = 1000;
  const shown: TimelinePicture = {
    ...picture(), numSlices: count, begin: Float64Array.from({ length: count }, (_, at) => at * 10),
    length: new Float64Array(count).fill(1), operation: new Uint8Array(count).fill(3), lineFirst: Int32Array.of(0, count),
  };
  const weight = new Uint8Array(count).fill(2);
  const color = new Uint8Array(count).fill(3);
  weight[777] = 9;
  color[777] = 200;

  const { row, seen } = strip(shown, 0, count, 0, 10_000, 10, { weight, color });

  assert.equal(seen, count);
  assert.deepEqual(row, [4, 4, 4, 4, 4, 4, 4, 201, 4, 4]);
});

test("slices are drawn at their ideal times, and slices without one are not", () => {
  const { row } = strip(picture(), 0, 3, 0, 40, 40, {
    begin: Float64Array.of(30, 2, 0, 0, 0), length: Float64Array.of(4, 1, -1, -1, -1),
  });

  assert.deepEqual([...row.keys()].filter((at) => row[at] !== 0), [2, 30, 31, 32, 33]);
});

test("panning and zooming stay near the picture", () => {
  const span = { fromNs: 1000, toNs: 3000, width: 100 };

  assert.deepEqual(panned(span, 500, 100_000), { fromNs: 1500, toNs: 3500, width: 100 });
  assert.equal(panned(span, -1e9, 100_000).fromNs, -1000);
  assert.equal(panned(span, 1e9, 100_000).toNs, 101_000);
  const near = zoomed(span, 0.5, 1500, 100_000);
  assert.deepEqual([near.fromNs, near.toNs], [1250, 2250]);
  const nearest = zoomed(span, 1e-9, 1500, 100_000);
  assert.ok(nearest.toNs - nearest.fromNs >= 200);
  assert.ok(zoomed(span, 1e9, 1500, 100_000).toNs <= 151_000);
});
