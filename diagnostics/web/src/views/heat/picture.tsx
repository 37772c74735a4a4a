// The heat map's canvas, with pointer and keyboard control.

import type { JSX, TargetedKeyboardEvent, TargetedPointerEvent } from "preact";
import { useEffect, useMemo, useRef, useState } from "preact/hooks";

import { useStepText } from "./step_text";
import { navigate } from "../../app/location";
import { shownTheme, token } from "../../app/preferences";
import { mapOf, mapTable, tripleOfHex } from "../../canvas/colors";
import { columnOfStep, rowOfRank, type HeatPicture, type HeatWindow } from "../../canvas/heat-picture";
import {
  cellAt, cellSeenAt, heatPlace, HEAT_FONT_PX, paintHeat, paintHeatCursor, type HeatCursor, type HeatStyle,
} from "../../canvas/heat-painter";
import { fitted, fontOf, useFrame, useSize } from "../../canvas/surface";
import { countOf } from "../../ui/format";
import { around, including, type Zoom } from "./zoom";

const CLICK_PX = 5;
const PAGE = 10;

/** The position of the cursor as rank and step, so that it is kept when the picture moves. */
export interface Spot {
  rank: number;
  step: number;
}

export function cursorOf(picture: HeatPicture, spot: Spot | null): HeatCursor | null {
  if (spot === null) {
    return null;
  }
  const row = rowOfRank(picture, spot.rank);
  const column = columnOfStep(picture, spot.step);
  return row < 0 || column < 0 ? null : { row, column };
}

function styleOf(element: HTMLElement, stepText: (step: number) => string): HeatStyle {
  return {
    stepText,
    ink: token("--ink"),
    inkFaint: token("--ink-faint"),
    line: token("--line-strong"),
    mark: token("--bad"),
    accent: token("--accent"),
    nothing: tripleOfHex(token("--surface-sunk")),
    weave: tripleOfHex(token("--line-strong")),
    font: fontOf(element, HEAT_FONT_PX),
  };
}

interface PictureProps {
  picture: HeatPicture;
  zoom: Zoom;
  spot: Spot | null;
  setSpot: (spot: Spot | null, isByHand: boolean) => void;
}

function moved(key: string, isFar: boolean, cursor: HeatCursor, picture: HeatPicture, window: HeatWindow): HeatCursor | null {
  const page = Math.max(1, Math.round((window.bottom - window.top) / PAGE));
  const steps: Record<string, [number, number]> = {
    ArrowUp: [-1, 0],
    ArrowDown: [1, 0],
    ArrowLeft: [0, -1],
    ArrowRight: [0, 1],
    PageUp: [-page, 0],
    PageDown: [page, 0],
    Home: isFar ? [-picture.numRows, 0] : [0, -picture.numColumns],
    End: isFar ? [picture.numRows, 0] : [0, picture.numColumns],
  };
  const step = steps[key];
  if (step === undefined) {
    return null;
  }
  return {
    row: Math.min(Math.max(0, cursor.row + step[0]), picture.numRows - 1),
    column: Math.min(Math.max(0, cursor.column + step[1]), picture.numColumns - 1),
  };
}

export function Picture({ picture, zoom, spot, setSpot }: PictureProps): JSX.Element {
  const box = useRef<HTMLDivElement>(null);
  const cells = useRef<HTMLCanvasElement>(null);
  const above = useRef<HTMLCanvasElement>(null);
  const scratch = useRef<HTMLCanvasElement | null>(null);
  const size = useSize(box);
  const [drag, setDrag] = useState<{ x0: number; y0: number; x1: number; y1: number } | null>(null);
  const theme = shownTheme.value;
  const table = useMemo(
    () => mapTable(picture.numLevels || 1, mapOf(picture.scale, theme)),
    [picture.numLevels, picture.scale, theme],
  );
  const cursor = cursorOf(picture, spot);
  const stepText = useStepText(picture);

  const paint = useFrame(() => {
    const canvas = cells.current;
    const context = fitted(canvas, size);
    if (canvas === null || context === null) {
      return;
    }
    scratch.current ??= document.createElement("canvas");
    const began = performance.now();
    const gaps = paintHeat(context, scratch.current, picture, zoom.window, size, styleOf(canvas, stepText), table);
    const now = performance.now();
    canvas.dataset["paintedMs"] = (now - began).toFixed(2);
    canvas.dataset["paintedAt"] = now.toFixed(2);
    canvas.dataset["rows"] = String(picture.numRows);
    canvas.dataset["cols"] = String(picture.numColumns);
    canvas.dataset["lastStep"] = String(picture.lastStep);
    canvas.dataset["window"] = [zoom.window.top, zoom.window.bottom, zoom.window.left, zoom.window.right].join(" ");
    canvas.dataset["gapLines"] = String(gaps);
  });
  const paintCursor = useFrame(() => {
    const canvas = above.current;
    const context = fitted(canvas, size);
    if (canvas !== null && context !== null) {
      paintHeatCursor(context, zoom.window, size, cursor, drag, styleOf(canvas, stepText));
      canvas.dataset["cursor"] = cursor === null ? "" : `${spot?.rank} ${spot?.step}`;
    }
  });
  const { top, bottom, left, right } = zoom.window;
  useEffect(paint, [picture, top, bottom, left, right, size, table, stepText]);
  useEffect(paintCursor, [picture, top, bottom, left, right, size, theme, cursor?.row, cursor?.column, drag]);

  const put = (found: HeatCursor | null, isByHand: boolean): void => {
    const rank = found === null ? undefined : picture.rowRank[found.row];
    const step = found === null ? undefined : picture.columnStep[found.column];
    setSpot(rank === undefined || step === undefined ? null : { rank, step }, isByHand);
  };
  const open = (found: HeatCursor): void => {
    const step = picture.columnStep[found.column];
    navigate("timeline", { rank: picture.rowRank[found.row], first: step, last: step });
  };
  const pointOf = (event: TargetedPointerEvent<HTMLElement>): { x: number; y: number } => {
    const rect = event.currentTarget.getBoundingClientRect();
    return { x: event.clientX - rect.left, y: event.clientY - rect.top };
  };
  const onPointerMove = (event: TargetedPointerEvent<HTMLElement>): void => {
    const { x, y } = pointOf(event);
    if (drag !== null) {
      setDrag({ ...drag, x1: x, y1: y });
      return;
    }
    put(cellSeenAt(picture, x, y, zoom.window, size), false);
  };
  const onPointerUp = (event: TargetedPointerEvent<HTMLElement>): void => {
    if (drag === null) {
      return;
    }
    const { x, y } = pointOf(event);
    setDrag(null);
    if (Math.abs(x - drag.x0) < CLICK_PX && Math.abs(y - drag.y0) < CLICK_PX) {
      const found = cellSeenAt(picture, x, y, zoom.window, size);
      if (found !== null) {
        put(found, true);
        open(found);
      }
      return;
    }
    zoom.set(selected(drag.x0, drag.y0, x, y));
  };
  const selected = (x0: number, y0: number, x1: number, y1: number): HeatWindow => {
    const place = heatPlace(size);
    const first = cellAt(Math.min(x0, x1), Math.min(y0, y1), zoom.window, place);
    const last = cellAt(Math.max(x0, x1), Math.max(y0, y1), zoom.window, place);
    // a drag along one axis selects only along that axis
    const isFlat = Math.abs(y1 - y0) < CLICK_PX;
    const isUpright = Math.abs(x1 - x0) < CLICK_PX;
    return {
      top: isFlat ? zoom.window.top : Math.max(zoom.window.top, first.row),
      bottom: isFlat ? zoom.window.bottom : Math.min(zoom.window.bottom, last.row + 1),
      left: isUpright ? zoom.window.left : Math.max(zoom.window.left, first.column),
      right: isUpright ? zoom.window.right : Math.min(zoom.window.right, last.column + 1),
    };
  };
  const onKeyDown = (event: TargetedKeyboardEvent<HTMLElement>): void => {
    if (event.altKey || event.metaKey) {
      return;
    }
    const here = cursor ?? { row: zoom.window.top, column: zoom.window.right - 1 };
    const next = moved(event.key, event.ctrlKey, here, picture, zoom.window);
    if (next !== null) {
      put(next, true);
      const shown = including(zoom.window, next.row);
      if (shown.top !== top) {
        zoom.set(shown);
      }
    } else if (event.key === "Enter") {
      open(here);
    } else if (event.key === "+" || event.key === "=") {
      zoom.set(around(picture, zoom.window, here.row, here.column, 0.5));
    } else if (event.key === "-") {
      zoom.set(around(picture, zoom.window, here.row, here.column, 2));
    } else if (event.key === "0") {
      zoom.reset();
    } else {
      return;
    }
    event.preventDefault();
  };

  return (
    <div class="picture" ref={box}>
      <canvas ref={cells} class="heat-cells" aria-hidden="true" data-testid="heat-cells" />
      <canvas
        ref={above}
        class="heat-above"
        tabIndex={0}
        role="application"
        aria-roledescription="heat map"
        aria-label={`${picture.operation}, ${countOf(picture.numRows, picture.by)}, steps ${picture.firstStep} to ${picture.lastStep}. Arrow keys move, plus and minus zoom, Enter opens the timeline. The table of outliers lists the ranks that are farthest above their peers.`}
        data-testid="heat-above"
        onPointerDown={(event) => {
          if (event.button === 0) {
            const { x, y } = pointOf(event);
            event.currentTarget.setPointerCapture(event.pointerId);
            event.currentTarget.focus({ preventScroll: true });
            setDrag({ x0: x, y0: y, x1: x, y1: y });
          }
        }}
        onPointerMove={onPointerMove}
        onPointerUp={onPointerUp}
        onPointerCancel={() => setDrag(null)}
        onPointerLeave={() => {
          if (drag === null && document.activeElement !== above.current) {
            setSpot(null, false);
          }
        }}
        onKeyDown={onKeyDown}
      />
    </div>
  );
}
