// Draws the timeline. Panning redraws everything in each frame, so all work is bounded by what is visible: rows of pixels for
// the slices, then a few hundred labels, outlines and arrows.

import { cssOf } from "./colors.ts";
import type { Size } from "./surface.ts";
import { cutText } from "./text.ts";
import { ticksBetween, timeTick } from "./ticks.ts";
import { TIMELINE_LEFT, TIMELINE_TOP, xOf, yOf } from "./timeline-camera.ts";
import { paintCritical, paintCursor, paintFlows, paintLabels } from "./timeline-marks.ts";
import type { PlacedLine } from "./timeline-picture.ts";
import type { TimelineScene, TimelineStyle } from "./timeline-scene.ts";
import { drawStrip, type Span, type StripSource, type Wide } from "./timeline-strips.ts";

const LABEL_FROM_PX = 26;

export interface TimelineScratch {
  canvas: HTMLCanvasElement;
  image: ImageData | null;
}

export interface Painted {
  numSeen: number;
  numLabels: number;
  numArrows: number;
}

/** Draw everything for a span of time and a scroll position. */
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
  const { picture, ideal, colors } = scene;
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
  const real: StripSource = { begin: picture.begin, length: picture.length, weight: colors.weight, color: colors.color };
  const ghost: StripSource | null = ideal === null ? null : { ...real, begin: ideal.begin, length: ideal.length };
  let seen = 0;
  shown.forEach((placed, place) => {
    const row = pixels.subarray(place * span.width, (place + 1) * span.width);
    const first = picture.lineFirst[placed.line] ?? 0;
    const last = picture.lineFirst[placed.line + 1] ?? first;
    if (placed.isIdeal) {
      if (ghost !== null) {
        drawStrip(picture, ghost, first, last, span, row, weights, colors.ideals, colors.edges, Infinity, []);
      }
      return;
    }
    const label = LABEL_FROM_PX * size.ratio;
    seen += drawStrip(picture, real, first, last, span, row, weights, colors.pixels, colors.edges, label, wide);
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

function fillLine(context: CanvasRenderingContext2D, x: number, y: number, width: number, height: number, color: string): void {
  context.fillStyle = color;
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
