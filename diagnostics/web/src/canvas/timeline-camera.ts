// The visible part of a timeline: a span of time, and the vertical scroll position.

import { lineOfSlice, sliceAt, type Placement, type TimelinePicture } from "./timeline-picture.ts";
import type { Size } from "./surface.ts";
import { panned, zoomed, type Span } from "./timeline-strips.ts";

export const TIMELINE_LEFT = 150;
export const TIMELINE_TOP = 26;
const TIMELINE_RIGHT = 8;
const SLACK_PX = 4;
const MARGIN_PX = 24;

/** Return the x coordinate of a time. */
export function xOf(ns: number, span: Span, size: Size): number {
  return TIMELINE_LEFT + ((ns - span.fromNs) * span.width) / size.ratio / (span.toNs - span.fromNs);
}

/** Return the y coordinate of a position in the list of lines. */
export function yOf(top: number, scroll: number): number {
  return TIMELINE_TOP + top - scroll;
}

export class Camera {
  span: Span;
  scroll = 0;
  private readonly picture: TimelinePicture;
  private placement: Placement;
  private ratio = 1;
  private viewHeight = 1;

  constructor(picture: TimelinePicture, placement: Placement, fromNs: number | null, toNs: number | null) {
    this.picture = picture;
    this.placement = placement;
    this.span = { fromNs: fromNs ?? 0, toNs: toNs ?? this.endNs, width: 1 };
  }

  get endNs(): number {
    return Math.max(1, this.picture.endNs);
  }

  get isWhole(): boolean {
    return Math.abs(this.span.fromNs) < 1 && Math.abs(this.span.toNs - this.endNs) < 1;
  }

  /** Set the size of the canvas in CSS pixels, and the placement of lines. */
  fit(width: number, height: number, ratio: number, placement: Placement): void {
    this.ratio = ratio;
    this.placement = placement;
    this.viewHeight = Math.max(1, height - TIMELINE_TOP);
    this.span = { ...this.span, width: Math.max(1, Math.round((width - TIMELINE_LEFT - TIMELINE_RIGHT) * ratio)) };
    this.scrollTo(this.scroll);
  }

  /** Return the time at an x coordinate. */
  nsAt(x: number): number {
    return this.span.fromNs + (x - TIMELINE_LEFT) * this.nsOfPixel;
  }

  get nsOfPixel(): number {
    return ((this.span.toNs - this.span.fromNs) * this.ratio) / this.span.width;
  }

  /** Return the slice at or near a point; -1: none. */
  sliceAt(x: number, y: number): number {
    const top = y - TIMELINE_TOP + this.scroll;
    const placed = this.placement.lines.find((one) => !one.isIdeal && top >= one.top && top <= one.top + one.height);
    if (placed === undefined || x < TIMELINE_LEFT || y < TIMELINE_TOP) {
      return -1;
    }
    return sliceAt(this.picture, placed.line, this.nsAt(x), SLACK_PX * this.nsOfPixel);
  }

  /** Return the first visible slice. */
  firstInSight(): number {
    const placed = this.placement.lines.find((one) => !one.isIdeal && one.top >= this.scroll);
    return placed === undefined ? 0 : Math.max(0, sliceAt(this.picture, placed.line, this.span.fromNs, Infinity));
  }

  show(fromNs: number, toNs: number): void {
    if (toNs > fromNs) {
      this.span = { ...this.span, fromNs, toNs };
    }
  }

  showAll(): void {
    this.show(0, this.endNs);
  }

  /** Move by a fraction of the visible span. */
  pan(part: number): void {
    this.panNs((this.span.toNs - this.span.fromNs) * part);
  }

  panNs(ns: number): void {
    this.span = panned(this.span, ns, this.endNs);
  }

  zoom(factor: number, aroundNs: number): void {
    this.span = zoomed(this.span, factor, aroundNs, this.endNs);
  }

  goToEnd(isLast: boolean): void {
    const length = this.span.toNs - this.span.fromNs;
    const begin = isLast ? Math.max(0, this.endNs - length) : 0;
    this.show(begin, begin + length);
  }

  scrollTo(top: number): void {
    this.scroll = Math.min(Math.max(0, top), Math.max(0, this.placement.height - this.viewHeight + MARGIN_PX));
  }

  scrollPage(part: number): void {
    this.scrollTo(this.scroll + this.viewHeight * part);
  }

  /** Scroll a rank into view. */
  revealRank(rank: number | null): void {
    const own = this.placement.ranks.find((one) => one.rank === rank);
    if (own !== undefined && (own.top < this.scroll || own.bottom > this.scroll + this.viewHeight)) {
      this.scrollTo(own.top - 8);
    }
  }

  /** Scroll a slice into view; return whether the view moved. */
  revealSlice(slice: number): boolean {
    if (slice < 0 || slice >= this.picture.numSlices) {
      return false;
    }
    const begin = this.picture.begin[slice] ?? 0;
    const end = begin + (this.picture.length[slice] ?? 0);
    const { fromNs, toNs } = this.span;
    const isAside = end < fromNs || begin > toNs;
    if (isAside) {
      const length = toNs - fromNs;
      this.show(begin - length * 0.3, begin + length * 0.7);
    }
    const placed = this.placement.ofLine.get(lineOfSlice(this.picture, slice));
    const isAbove = placed !== undefined && placed.top < this.scroll;
    const isBelow = placed !== undefined && placed.top + placed.height > this.scroll + this.viewHeight;
    if (placed !== undefined && (isAbove || isBelow)) {
      this.scrollTo(placed.top - this.viewHeight / 2);
    }
    return isAside || isAbove || isBelow;
  }
}
