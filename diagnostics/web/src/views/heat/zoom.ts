// The visible part of the heat map. Its steps are the range shared by all views; its rows are specific to the heat map. Both are
// in the URL, so that a link shows the same part.

import { shownRound } from "../../app/job";
import { setParams, useNumberParam, type ParamValue } from "../../app/location";
import { isWholeRun } from "../../app/range";
import { clampedWindow, stepsOf, type HeatPicture, type HeatWindow, wholeWindow } from "../../canvas/heat-picture";

export interface Zoom {
  window: HeatWindow;
  hasAllRows: boolean;
  /** Show a window; columns beyond the picture extend the range of steps. */
  set: (window: HeatWindow) => void;
  /** Show all rows, and the whole run. */
  reset: () => void;
}

const ALL_STEPS = { from: null, to: null };
const ALL_ROWS = { top: null, bottom: null };

/** Return the range for a window's columns; empty if they are exactly those of the picture. */
function rangeOf(picture: HeatPicture, { left, right }: HeatWindow): Record<string, ParamValue> {
  const extra = right - left - picture.numColumns;
  if (extra > 0) {
    const [from, to] = [picture.firstStep - (extra / 2) * picture.stepsPerBin, picture.lastStep + (extra / 2) * picture.stepsPerBin];
    const all = shownRound.value;
    const isAll = all === null || (from <= (all.first_step ?? 0) && to >= (all.last_step ?? 0));
    return isAll ? ALL_STEPS : { from: Math.max(0, Math.floor(from)), to: Math.ceil(to) };
  }
  if (left <= 0 && right >= picture.numColumns) {
    return {};
  }
  return { ...stepsOf(picture, clampedWindow(picture, { ...wholeWindow(picture), left, right })) };
}

/** Return the visible part of a picture, as set in the URL. */
export function useZoom(picture: HeatPicture): Zoom {
  const [top] = useNumberParam("top");
  const [bottom] = useNumberParam("bottom");
  const whole = wholeWindow(picture);
  return {
    window: clampedWindow(picture, { ...whole, top: top ?? whole.top, bottom: bottom ?? whole.bottom }),
    hasAllRows: top === null && bottom === null,
    set: (next) => {
      const inside = clampedWindow(picture, next);
      const hasAllRows = inside.top === 0 && inside.bottom === picture.numRows;
      const rows = hasAllRows ? ALL_ROWS : { top: inside.top, bottom: inside.bottom };
      setParams({ ...(isWholeRun.value && next.right - next.left > picture.numColumns ? {} : rangeOf(picture, next)), ...rows }, { isNewEntry: true });
    },
    reset: () => setParams({ ...ALL_STEPS, ...ALL_ROWS }, { isNewEntry: true }),
  };
}

/** Return a window scaled around a cell; it may have more columns than the picture. */
export function around(picture: HeatPicture, window: HeatWindow, row: number, column: number, factor: number): HeatWindow {
  const rows = Math.max(1, (window.bottom - window.top) * factor);
  const columns = Math.max(1, (window.right - window.left) * factor);
  const top = Math.min(Math.max(0, row - rows / 2), Math.max(0, picture.numRows - rows));
  const left = Math.min(Math.max(0, column - columns / 2), Math.max(0, picture.numColumns - columns));
  return { top, left, bottom: top + rows, right: left + columns };
}

/** Return the window moved just enough to contain a row. */
export function including(window: HeatWindow, row: number): HeatWindow {
  const down = row < window.top ? row - window.top : row >= window.bottom ? row - window.bottom + 1 : 0;
  return { ...window, top: window.top + down, bottom: window.bottom + down };
}
