// Pointer and wheel on the timeline: drag to move, pinch or wheel to zoom, click to select.

import { TIMELINE_LEFT, type Camera } from "../../canvas/timeline-camera";

const WHEEL_ZOOM = 1.0015;
const PINCH_WHEEL = 4;
const WHEEL_LINE_PX = 24;
const CLICK_PX = 4;
const LEAST_PINCH_PX = 8;

interface Point {
  x: number;
  y: number;
}

/** Callbacks for gestures. */
export interface Moves {
  moved: () => void;
  clicked: (x: number, y: number) => void;
  hovered: (x: number, y: number) => void;
  grabbed: (isGrabbing: boolean) => void;
}

interface Drag extends Point {
  fromNs: number;
  toNs: number;
  scroll: number;
  hasMoved: boolean;
}

function pointOf(event: MouseEvent): Point {
  const rect = (event.currentTarget as Element).getBoundingClientRect();
  return { x: event.clientX - rect.left, y: event.clientY - rect.top };
}

export class Gestures {
  private readonly camera: () => Camera;
  private readonly moves: () => Moves;
  private readonly pointers = new Map<number, Point>();
  private drag: Drag | null = null;

  constructor(camera: () => Camera, moves: () => Moves) {
    this.camera = camera;
    this.moves = moves;
  }

  down(event: PointerEvent): void {
    const target = event.currentTarget as HTMLElement;
    const at = pointOf(event);
    target.setPointerCapture(event.pointerId);
    target.focus({ preventScroll: true });
    this.pointers.set(event.pointerId, at);
    const { span, scroll } = this.camera();
    this.drag = { ...at, fromNs: span.fromNs, toNs: span.toNs, scroll, hasMoved: this.pointers.size > 1 };
    this.moves().grabbed(true);
  }

  move(event: PointerEvent): void {
    const at = pointOf(event);
    const drag = this.drag;
    if (drag === null) {
      this.moves().hovered(at.x, at.y);
      return;
    }
    const before = this.pointers.get(event.pointerId) ?? at;
    this.pointers.set(event.pointerId, at);
    const other = [...this.pointers].find(([id]) => id !== event.pointerId)?.[1];
    if (other !== undefined) {
      const was = Math.max(LEAST_PINCH_PX, Math.abs(before.x - other.x));
      const is = Math.max(LEAST_PINCH_PX, Math.abs(at.x - other.x));
      this.camera().zoom(was / is, this.camera().nsAt((at.x + other.x) / 2));
      this.moves().moved();
      return;
    }
    drag.hasMoved ||= Math.abs(at.x - drag.x) > CLICK_PX || Math.abs(at.y - drag.y) > CLICK_PX;
    if (drag.hasMoved) {
      const camera = this.camera();
      camera.show(drag.fromNs, drag.toNs);
      camera.panNs((drag.x - at.x) * camera.nsOfPixel);
      camera.scrollTo(drag.scroll + drag.y - at.y);
      this.moves().moved();
    }
  }

  up(event: PointerEvent): void {
    const at = pointOf(event);
    const isClick = this.drag !== null && !this.drag.hasMoved;
    this.pointers.delete(event.pointerId);
    this.drag = null;
    this.moves().grabbed(false);
    if (isClick) {
      this.moves().clicked(at.x, at.y);
    }
  }

  cancel(): void {
    this.pointers.clear();
    this.drag = null;
    this.moves().grabbed(false);
  }

  wheel(event: WheelEvent): void {
    event.preventDefault();
    const camera = this.camera();
    const { x } = pointOf(event);
    const factor = event.deltaMode === WheelEvent.DOM_DELTA_LINE ? WHEEL_LINE_PX : 1;
    if (event.shiftKey || x < TIMELINE_LEFT) {
      camera.scrollTo(camera.scroll + (event.deltaY || event.deltaX) * factor);
    } else if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      camera.panNs(event.deltaX * factor * camera.nsOfPixel);
    } else {
      camera.zoom(WHEEL_ZOOM ** (event.deltaY * factor * (event.ctrlKey ? PINCH_WHEEL : 1)), camera.nsAt(x));
    }
    this.moves().moved();
  }
}
