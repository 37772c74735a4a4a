// The timeline's canvas: pan, zoom, cursor.

import type { JSX, TargetedKeyboardEvent } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";

import { setParams } from "../../app/location";
import { fitted, useFrame, useSize } from "../../canvas/surface";
import { Camera } from "../../canvas/timeline-camera";
import { paintTimeline, type Painted, type TimelineScratch } from "../../canvas/timeline-painter";
import type { IdealPicture, TimelinePicture } from "../../canvas/timeline-picture";
import { countOf } from "../../ui/format";
import { Gestures, type Moves } from "./gestures";
import { moveByKey, neighbor } from "./keys";
import { partOfUrl } from "./query";
import { timelineStyle, useScene } from "./scene";

const NUM_TIMES = 240;

interface ChartProps {
  picture: TimelinePicture;
  ideal: IdealPicture | null;
  hasIdeal: boolean;
  hasCritical: boolean;
  hasFlows: boolean;
  found: Uint8Array | null;
  cursor: number;
  setCursor: (slice: number) => void;
  /** The slice under the pointer; -1: none. */
  setHovered: (slice: number) => void;
  fromNs: number | null;
  toNs: number | null;
  /** The rank to scroll to, from the URL. */
  rank: number | null;
}

/** Store on the canvas element what was drawn and how long that took, for measurements. */
function note(canvas: HTMLCanvasElement, times: number[], tookMs: number, painted: Painted, camera: Camera): void {
  times.push(tookMs);
  if (times.length > NUM_TIMES) {
    times.shift();
  }
  const sorted = [...times].sort((a, b) => a - b);
  Object.assign(canvas.dataset, {
    seen: String(painted.numSeen),
    labels: String(painted.numLabels),
    arrows: String(painted.numArrows),
    paintedMs: tookMs.toFixed(2),
    medianMs: (sorted[sorted.length >> 1] ?? 0).toFixed(2),
    span: `${Math.round(camera.span.fromNs)} ${Math.round(camera.span.toNs)}`,
    scroll: String(Math.round(camera.scroll)),
  });
}

export function Chart(props: ChartProps): JSX.Element {
  const { picture, cursor, setCursor } = props;
  const box = useRef<HTMLDivElement>(null);
  const canvas = useRef<HTMLCanvasElement>(null);
  const scratch = useRef<TimelineScratch | null>(null);
  const times = useRef<number[]>([]);
  const size = useSize(box);
  const scene = useScene(props);
  const [isGrabbing, setGrabbing] = useState(false);
  const held = useRef<Camera | null>(null);
  held.current ??= new Camera(picture, scene.placement, props.fromNs, props.toNs);
  const camera = held.current;

  const paint = useFrame(() => {
    const target = canvas.current;
    const context = fitted(target, size);
    if (target === null || context === null) {
      return;
    }
    scratch.current ??= { canvas: document.createElement("canvas"), image: null };
    const began = performance.now();
    const painted = paintTimeline(context, scratch.current, scene, camera.span, camera.scroll, size, timelineStyle(target));
    note(target, times.current, performance.now() - began, painted, camera);
  });
  const moved = (): void => {
    const { fromNs, toNs } = camera.span;
    setParams(camera.isWhole ? { t0: null, t1: null } : { t0: Math.round(fromNs), t1: Math.round(toNs) });
    paint();
  };

  useEffect(() => {
    camera.fit(size.width, size.height, size.ratio, scene.placement);
    paint();
  }, [scene, size]);
  useEffect(() => {
    // a link or the back button may select another part; after a drag the camera already shows the part in the URL
    const [from, to] = partOfUrl();
    const fromNs = from ?? 0;
    const toNs = to ?? camera.endNs;
    if (Math.abs(fromNs - camera.span.fromNs) > 1 || Math.abs(toNs - camera.span.toNs) > 1) {
      camera.show(fromNs, toNs);
      paint();
    }
  }, [props.fromNs, props.toNs]);
  useEffect(() => {
    camera.revealRank(props.rank);
    paint();
  }, [props.rank, size.height > 0]);
  useEffect(() => {
    if (camera.revealSlice(cursor)) {
      moved();
    }
  }, [cursor]);

  const moves = useRef<Moves | null>(null);
  moves.current = {
    moved,
    clicked: (x, y) => setCursor(camera.sliceAt(x, y)),
    hovered: (x, y) => props.setHovered(camera.sliceAt(x, y)),
    grabbed: setGrabbing,
  };
  const gestures = useRef<Gestures | null>(null);
  gestures.current ??= new Gestures(() => held.current as Camera, () => moves.current as Moves);
  const own = gestures.current;
  useEffect(() => {
    // not passive: the page must not scroll while the timeline zooms
    const target = canvas.current;
    const listen = (event: WheelEvent): void => own.wheel(event);
    target?.addEventListener("wheel", listen, { passive: false });
    return () => target?.removeEventListener("wheel", listen);
  }, []);

  const onKeyDown = (event: TargetedKeyboardEvent<HTMLCanvasElement>): void => {
    if (event.altKey || event.metaKey || event.ctrlKey) {
      return;
    }
    const isChosen = cursor >= 0 && cursor < picture.numSlices;
    const around = isChosen ? (picture.begin[cursor] ?? 0) : (camera.span.fromNs + camera.span.toNs) / 2;
    if (moveByKey(camera, event.key, event.shiftKey, around)) {
      moved();
    } else if (event.key.startsWith("Arrow")) {
      setCursor(isChosen ? neighbor(picture, cursor, event.key) : camera.firstInSight());
    } else {
      return;
    }
    event.preventDefault();
  };

  return (
    <div class="picture timeline-chart" ref={box}>
      <canvas
        ref={canvas}
        class={isGrabbing ? "is-grabbing" : ""}
        tabIndex={0}
        role="application"
        aria-roledescription="timeline"
        aria-label={`${countOf(picture.rank.length, "rank")}, ${countOf(picture.numSlices, "slice")} of steps ${picture.firstStep} to ${picture.lastStep}. Arrow keys go from slice to slice, plus and minus zoom.`}
        data-testid="timeline-canvas"
        data-slices={picture.numSlices}
        data-cursor={cursor}
        onPointerDown={(event) => own.down(event)}
        onPointerMove={(event) => own.move(event)}
        onPointerUp={(event) => own.up(event)}
        onPointerCancel={() => own.cancel()}
        onPointerLeave={() => props.setHovered(-1)}
        onKeyDown={onKeyDown}
      />
    </div>
  );
}
