// The timeline on its canvas. Panning draws everything anew each frame, so all that is done here is bounded by what is in
// sight: rows of pixels for the slices, then a few hundred labels, outlines and arrows.

import { cssOf, mixed, operationColour, packed, type Theme, type Triple } from "./colours.ts";
import type { Size } from "./surface.ts";
import { cutText } from "./text.ts";
import { ticksBetween, timeTick } from "./ticks.ts";
import { TIMELINE_LEFT, TIMELINE_TOP, xOf, yOf } from "./timeline-camera.ts";
import { paintCritical, paintCursor, paintFlows, paintLabels } from "./timeline-marks.ts";
import {
  HAS_FAILED, type IdealPicture, type Placement, type PlacedLine, type TimelinePicture,
} from "./timeline-picture.ts";
import { drawStrip, type Span, type StripSource, type Wide } from "./timeline-strips.ts";

const LABEL_FROM_PX = 26;
const FONT_PX = 12;

export interface TimelineStyle {
  theme: Theme;
  background: Triple;
  ink: string;
  inkSoft: string;
  inkFaint: string;
  line: string;
  lineStrong: string;
  accent: string;
  font: string;
}

/** What of the slices is drawn how, made anew only when a choice changes and not each frame. */
export interface TimelineColours {
  /** By slice, a place in `pixels`: the operation's number, or that and 128 where it is pale. */
  colour: Uint8Array;
  pale: Uint8Array;
  weight: Uint8Array;
  pixels: Uint32Array;
  edges: Uint32Array;
  ideals: Uint32Array;
  triples: Triple[];
}

const WEIGHT_PALE = 0;
const WEIGHT_BY_LANE: Record<string, number> = { host: 1, compute: 3, dp: 4, tp: 4, "pp-send": 5, "pp-recv": 5 };
const WEIGHT_FAILED = 9;
const WEIGHT_CHOSEN = 12;

/** Return the colours of all slices; `chosen` (a search, or the critical path) leaves the others pale. */
export function timelineColours(
  picture: TimelinePicture, chosen: Uint8Array | null, style: Pick<TimelineStyle, "theme" | "background">,
): TimelineColours {
  const triples = Array.from({ length: 128 }, (_, number) =>
    operationColour(picture.operations[String(number)] ?? "", style.theme),
  );
  const darker: Triple = style.theme === "dark" ? [0, 0, 0] : [20, 22, 28];
  const table = (change: (colour: Triple) => Triple): Uint32Array => Uint32Array.from(triples, (one) => packed(change(one)));
  const pale = new Uint8Array(picture.numSlices);
  const colour = new Uint8Array(picture.numSlices);
  const weight = new Uint8Array(picture.numSlices);
  for (let line = 0; line < picture.lineTrack.length; line += 1) {
    const lane = picture.lanes[picture.trackLane[picture.lineTrack[line] ?? 0] ?? 0] ?? "";
    const laneWeight = WEIGHT_BY_LANE[lane] ?? 2;
    const last = picture.lineFirst[line + 1] ?? 0;
    for (let slice = picture.lineFirst[line] ?? 0; slice < last; slice += 1) {
      const isPale = chosen !== null && chosen[slice] === 0;
      const hasFailed = ((picture.flags[slice] as number) & HAS_FAILED) !== 0;
      // the upper half of the places is pale: one table does for both
      colour[slice] = Math.min(picture.operation[slice] as number, 127) + (isPale ? 128 : 0);
      pale[slice] = isPale ? 1 : 0;
      weight[slice] = isPale ? WEIGHT_PALE : hasFailed ? WEIGHT_FAILED : chosen === null ? laneWeight : WEIGHT_CHOSEN;
    }
  }
  const plain = table((one) => one);
  const plainEdges = table((one) => mixed(one, darker, 0.35));
  const palePixels = table((one) => mixed(one, style.background, 0.78));
  const paleEdges = table((one) => mixed(one, style.background, 0.66));
  return {
    colour,
    pale,
    weight,
    pixels: joined(plain, palePixels),
    edges: joined(plainEdges, paleEdges),
    ideals: joined(table((one) => mixed(one, style.background, 0.35)), palePixels),
    triples,
  };
}

function joined(first: Uint32Array, second: Uint32Array): Uint32Array {
  const both = new Uint32Array(first.length + second.length);
  both.set(first);
  both.set(second, first.length);
  return both;
}

export interface TimelineScene {
  picture: TimelinePicture;
  ideal: IdealPicture | null;
  placement: Placement;
  colours: TimelineColours;
  /** 1 where a slice is on the critical path, and that is shown. */
  critical: Uint8Array | null;
  hasFlows: boolean;
  cursor: number;
  rankLabels: ReadonlyMap<number, string>;
}

export interface TimelineScratch {
  canvas: HTMLCanvasElement;
  image: ImageData | null;
}

export interface Painted {
  numSeen: number;
  numLabels: number;
  numArrows: number;
}

/** Draw everything at a place in time and height. */
export function paintTimeline(
  context: CanvasRenderingContext2D, scratch: TimelineScratch, scene: TimelineScene, span: Span, scroll: number,
  size: Size, style: TimelineStyle,
): Painted {
  const { placement } = scene;
  context.clearRect(0, 0, size.width, size.height);
  const bottom = size.height - TIMELINE_TOP;
  const shown = placement.lines.filter((one) => one.top + one.height > scroll && one.top < scroll + bottom);
  paintGrid(context, scene, span, scroll, size, style);
  const wide: Wide[] = [];
  const numSeen = paintStrips(context, scratch, scene, shown, span, scroll, size, wide);
  context.save();
  context.beginPath();
  context.rect(TIMELINE_LEFT, TIMELINE_TOP, span.width / size.ratio, bottom);
  context.clip();
  paintCritical(context, scene, shown, span, scroll, size, style);
  const numLabels = paintLabels(context, scene, wide, scroll, size, style);
  const numArrows = scene.hasFlows ? paintFlows(context, scene, span, scroll, size, style) : 0;
  paintCursor(context, scene, span, scroll, size, style);
  context.restore();
  paintLeft(context, scene, shown, scroll, size, style);
  return { numSeen, numLabels, numArrows };
}

function paintStrips(
  context: CanvasRenderingContext2D, scratch: TimelineScratch, scene: TimelineScene, shown: PlacedLine[], span: Span,
  scroll: number, size: Size, wide: Wide[],
): number {
  const { picture, ideal, colours } = scene;
  const own = scratch.canvas.getContext("2d");
  if (own === null || shown.length === 0 || span.width < 1) {
    return 0;
  }
  if (scratch.image === null || scratch.image.width !== span.width || scratch.image.height < shown.length) {
    scratch.canvas.width = span.width;
    scratch.canvas.height = Math.max(shown.length, 64);
    scratch.image = own.createImageData(scratch.canvas.width, scratch.canvas.height);
  }
  const pixels = new Uint32Array(scratch.image.data.buffer);
  const weights = new Uint8Array(span.width);
  const real: StripSource = { begin: picture.begin, length: picture.length, weight: colours.weight, colour: colours.colour };
  const ghost: StripSource | null = ideal === null ? null : { ...real, begin: ideal.begin, length: ideal.length };
  let seen = 0;
  shown.forEach((placed, place) => {
    const row = pixels.subarray(place * span.width, (place + 1) * span.width);
    const first = picture.lineFirst[placed.line] ?? 0;
    const last = picture.lineFirst[placed.line + 1] ?? first;
    if (placed.isIdeal) {
      if (ghost !== null) {
        drawStrip(picture, ghost, first, last, span, row, weights, colours.ideals, colours.edges, Infinity, []);
      }
      return;
    }
    const label = LABEL_FROM_PX * size.ratio;
    seen += drawStrip(picture, real, first, last, span, row, weights, colours.pixels, colours.edges, label, wide);
  });
  own.putImageData(scratch.image, 0, 0, 0, 0, span.width, shown.length);
  context.imageSmoothingEnabled = false;
  const width = span.width / size.ratio;
  context.save();
  context.beginPath();
  context.rect(TIMELINE_LEFT, TIMELINE_TOP, width, size.height - TIMELINE_TOP);
  context.clip();
  shown.forEach((placed, place) => {
    const y = yOf(placed.top, scroll);
    context.drawImage(scratch.canvas, 0, place, span.width, 1, TIMELINE_LEFT, y, width, placed.height - (placed.isIdeal ? 1 : 0));
  });
  context.restore();
  return seen;
}

function paintGrid(
  context: CanvasRenderingContext2D, scene: TimelineScene, span: Span, scroll: number, size: Size, style: TimelineStyle,
): void {
  const { picture, placement } = scene;
  context.font = style.font;
  context.textBaseline = "middle";
  context.textAlign = "left";
  context.lineWidth = 1;
  for (const rank of placement.ranks) {
    const y = yOf(rank.top, scroll);
    if (y > TIMELINE_TOP && y < size.height) {
      fillLine(context, 0, y - 6, size.width, 1, style.line);
    }
  }
  const right = TIMELINE_LEFT + span.width / size.ratio;
  const ticks = ticksBetween(span.fromNs, span.toNs, Math.max(2, span.width / size.ratio / 110));
  const step = ticks.length > 1 ? (ticks[1] ?? 1) - (ticks[0] ?? 0) : 1;
  for (const tick of ticks) {
    const x = Math.round(xOf(tick, span, size));
    if (x < TIMELINE_LEFT || x > right) {
      continue;
    }
    fillLine(context, x, TIMELINE_TOP, 1, size.height, style.line);
    context.fillStyle = style.inkFaint;
    context.fillText(timeTick(tick, step), x + 4, TIMELINE_TOP / 2);
  }
  for (let place = 0; place < picture.steps.length; place += 1) {
    const x = Math.round(xOf(picture.stepBegin[place] as number, span, size));
    if (x >= TIMELINE_LEFT - 1 && x <= right) {
      fillLine(context, x, 0, 1, size.height, style.lineStrong);
      const text = `step ${picture.steps[place]}`;
      const width = context.measureText(text).width + 10;
      context.fillStyle = cssOf(style.background);
      context.fillRect(x + 1, 2, width, TIMELINE_TOP - 4);
      context.fillStyle = style.ink;
      context.fillText(text, x + 5, TIMELINE_TOP / 2);
    }
  }
  fillLine(context, 0, TIMELINE_TOP - 1, size.width, 1, style.lineStrong);
}

function fillLine(context: CanvasRenderingContext2D, x: number, y: number, width: number, height: number, colour: string): void {
  context.fillStyle = colour;
  context.fillRect(Math.round(x), Math.round(y), width, height);
}

function paintLeft(
  context: CanvasRenderingContext2D, scene: TimelineScene, shown: PlacedLine[], scroll: number, size: Size,
  style: TimelineStyle,
): void {
  const { picture, placement } = scene;
  context.font = style.font;
  context.textBaseline = "middle";
  context.save();
  context.beginPath();
  context.rect(0, TIMELINE_TOP, size.width, size.height);
  context.clip();
  for (const placed of shown) {
    if (placed.isIdeal || (picture.lineDepth[placed.line] ?? 0) > 0) {
      continue;
    }
    const track = picture.lineTrack[placed.line] ?? 0;
    const overflow = picture.trackOverflow[track] ?? 0;
    const lane = picture.lanes[picture.trackLane[track] ?? 0] ?? "";
    context.fillStyle = style.inkFaint;
    context.textAlign = "right";
    context.fillText(overflow > 0 ? `${lane} (${overflow + 1})` : lane, TIMELINE_LEFT - 8, yOf(placed.top, scroll) + placed.height / 2);
  }
  context.textAlign = "left";
  const bottom = scroll + size.height - TIMELINE_TOP;
  for (const rank of placement.ranks) {
    if (rank.bottom < scroll || rank.top > bottom) {
      continue;
    }
    const y = Math.max(TIMELINE_TOP + 8, yOf(rank.top, scroll) + 7);
    const text = cutText(context, scene.rankLabels.get(rank.rank) ?? `rank ${rank.rank}`, size.width - 20);
    const width = context.measureText(text).width;
    context.fillStyle = cssOf(style.background, 0.92);
    context.fillRect(2, y - 7, width + 8, 14);
    context.fillStyle = style.ink;
    context.fillText(text, 6, y);
  }
  context.restore();
}

export const TIMELINE_FONT_PX = FONT_PX;
