// Drawn on top of the slices: names, the outline of the critical path, arrows from send to receive, the cursor.

import { cssOf, inkOn } from "./colors.ts";
import type { Size } from "./surface.ts";
import { cutText } from "./text.ts";
import { TIMELINE_LEFT, TIMELINE_TOP, xOf, yOf } from "./timeline-camera.ts";
import { IS_OPEN, lineOfSlice, operationName, type PlacedLine } from "./timeline-picture.ts";
import type { TimelineScene, TimelineStyle } from "./timeline-scene.ts";
import type { Span, Wide } from "./timeline-strips.ts";

const MOST_LABELS = 260;
const MOST_OUTLINES = 1500;
const MOST_ARROWS = 150;
/** The usual letters of pipeline diagrams; the legend explains them. */
export const SHORT_NAMES: Readonly<Record<string, string>> = {
  "forward-compute": "F", "backward-compute": "B", "backward-weight-compute": "W",
};

export function paintLabels(
  context: CanvasRenderingContext2D, scene: TimelineScene, wide: Wide[], scroll: number, size: Size, style: TimelineStyle,
): number {
  const { picture, placement, colors } = scene;
  context.font = style.font;
  context.textBaseline = "middle";
  context.textAlign = "left";
  let drawn = 0;
  for (const one of wide) {
    if (drawn >= MOST_LABELS) {
      break;
    }
    const placed = placement.ofLine.get(lineOfSlice(picture, one.slice));
    if (placed === undefined) {
      continue;
    }
    const number = Math.min(picture.operation[one.slice] ?? 0, 127);
    const isPale = colors.pale[one.slice] === 1;
    const color = colors.triples[number] ?? [128, 128, 128];
    context.fillStyle = isPale ? style.inkFaint : cssOf(inkOn(color));
    const micro = picture.microbatch[one.slice] ?? -1;
    const name = operationName(picture, one.slice);
    const room = (one.right - one.left) / size.ratio - 8;
    const short = SHORT_NAMES[name] ?? name;
    const left = TIMELINE_LEFT + one.left / size.ratio + 4;
    const fits = cutText(context, micro >= 0 ? `${short} ${micro}` : short, room);
    if (fits !== "") {
      context.fillText(fits, left, yOf(placed.top, scroll) + placed.height / 2 + 0.5);
      drawn += 1;
    }
  }
  return drawn;
}

export function paintCritical(
  context: CanvasRenderingContext2D, scene: TimelineScene, shown: PlacedLine[], span: Span, scroll: number, size: Size,
  style: TimelineStyle,
): void {
  const { picture, critical } = scene;
  if (critical === null) {
    return;
  }
  context.strokeStyle = style.ink;
  context.lineWidth = 2;
  let drawn = 0;
  context.beginPath();
  for (const placed of shown) {
    if (placed.isIdeal) {
      continue;
    }
    const last = picture.lineFirst[placed.line + 1] ?? 0;
    for (let slice = picture.lineFirst[placed.line] ?? 0; slice < last && drawn < MOST_OUTLINES; slice += 1) {
      if (critical[slice] !== 1) {
        continue;
      }
      const begin = picture.begin[slice] as number;
      const end = begin + (picture.length[slice] as number);
      if (end <= span.fromNs || begin >= span.toNs) {
        continue;
      }
      const left = xOf(begin, span, size);
      const width = Math.max(2, xOf(end, span, size) - left);
      context.rect(left, yOf(placed.top, scroll) + 1, width, placed.height - 2);
      drawn += 1;
    }
  }
  context.stroke();
}

/** Return the flows that are at least partly visible. */
function flowsInSight(scene: TimelineScene, span: Span, scroll: number, size: Size): number[] {
  const { picture, placement } = scene;
  const bottom = scroll + size.height - TIMELINE_TOP;
  const found: number[] = [];
  for (let flow = 0; flow + 1 < picture.flows.length; flow += 2) {
    const send = picture.flows[flow] as number;
    const receive = picture.flows[flow + 1] as number;
    const end = (picture.begin[receive] as number) + (picture.length[receive] as number);
    if (end < span.fromNs || (picture.begin[send] as number) > span.toNs) {
      continue;
    }
    const from = placement.ofLine.get(picture.flowLines[flow] as number);
    const to = placement.ofLine.get(picture.flowLines[flow + 1] as number);
    if (from !== undefined && to !== undefined && Math.max(from.top, to.top) >= scroll && Math.min(from.top, to.top) <= bottom) {
      found.push(flow);
    }
  }
  return found;
}

export function paintFlows(
  context: CanvasRenderingContext2D, scene: TimelineScene, span: Span, scroll: number, size: Size, style: TimelineStyle,
): number {
  const { picture, placement, cursor } = scene;
  const all = flowsInSight(scene, span, scroll, size);
  // Too many arrows would cover the slices; above the limit only those of the slice at the cursor are drawn.
  const isOfCursor = (flow: number): boolean => picture.flows[flow] === cursor || picture.flows[flow + 1] === cursor;
  const shown = all.length > MOST_ARROWS ? all.filter(isOfCursor) : all;
  context.strokeStyle = style.inkSoft;
  context.fillStyle = style.inkSoft;
  context.lineWidth = 1;
  context.globalAlpha = 0.75;
  context.beginPath();
  const heads: [number, number][] = [];
  for (const flow of shown) {
    const send = picture.flows[flow] as number;
    const receive = picture.flows[flow + 1] as number;
    const begin = picture.begin[send] as number;
    const end = (picture.begin[receive] as number) + (picture.length[receive] as number);
    const from = placement.ofLine.get(picture.flowLines[flow] as number);
    const to = placement.ofLine.get(picture.flowLines[flow + 1] as number);
    if (from === undefined || to === undefined) {
      continue;
    }
    const x0 = xOf(begin, span, size);
    const x1 = xOf(end, span, size);
    const y0 = yOf(from.top, scroll) + from.height / 2;
    const y1 = yOf(to.top, scroll) + to.height / 2;
    const bend = Math.min(40, 10 + Math.abs(x1 - x0) / 3);
    context.moveTo(x0, y0);
    context.bezierCurveTo(x0 + bend, y0, x1 - bend, y1, x1, y1);
    heads.push([x1, y1]);
  }
  context.stroke();
  context.beginPath();
  for (const [x, y] of heads) {
    context.moveTo(x, y);
    context.lineTo(x - 6, y - 3);
    context.lineTo(x - 6, y + 3);
  }
  context.fill();
  context.globalAlpha = 1;
  if (shown.length < all.length) {
    paintHint(context, `${all.length.toLocaleString("en-US")} arrows: zoom in, or select a slice`, span, size, style);
  }
  return heads.length;
}

function paintHint(context: CanvasRenderingContext2D, text: string, span: Span, size: Size, style: TimelineStyle): void {
  context.font = style.font;
  context.textAlign = "right";
  context.textBaseline = "middle";
  const right = TIMELINE_LEFT + span.width / size.ratio - 4;
  const width = context.measureText(text).width + 8;
  context.fillStyle = cssOf(style.background, 0.92);
  context.fillRect(right - width, TIMELINE_TOP + 1, width, 15);
  context.fillStyle = style.inkSoft;
  context.fillText(text, right - 4, TIMELINE_TOP + 9);
}

export function paintCursor(
  context: CanvasRenderingContext2D, scene: TimelineScene, span: Span, scroll: number, size: Size, style: TimelineStyle,
): void {
  const { picture, placement, cursor } = scene;
  if (cursor < 0 || cursor >= picture.numSlices) {
    return;
  }
  const placed = placement.ofLine.get(lineOfSlice(picture, cursor));
  if (placed === undefined) {
    return;
  }
  const begin = picture.begin[cursor] as number;
  const left = xOf(begin, span, size);
  const width = Math.max(4, xOf(begin + (picture.length[cursor] as number), span, size) - left);
  context.lineWidth = 2;
  context.strokeStyle = style.accent;
  context.strokeRect(left - 1, yOf(placed.top, scroll) - 1, width + 2, placed.height + 2);
  if (((picture.flags[cursor] as number) & IS_OPEN) !== 0) {
    context.setLineDash([2, 2]);
    context.strokeRect(left - 1, yOf(placed.top, scroll) - 1, width + 2, placed.height + 2);
    context.setLineDash([]);
  }
}
