// Which part of the heat map is in sight: steps and rows, kept in the URL, so that a link shows the same part.

import { setParams, useNumberParam } from "../../app/location";
import { clampedWindow, type HeatPicture, type HeatWindow, wholeWindow } from "../../canvas/heat-picture";

export interface Zoom {
  window: HeatWindow;
  isWhole: boolean;
  set: (window: HeatWindow | null) => void;
}

/** Return the part of a picture that the URL names. */
export function useZoom(picture: HeatPicture): Zoom {
  const [left] = useNumberParam("left");
  const [right] = useNumberParam("right");
  const [top] = useNumberParam("top");
  const [bottom] = useNumberParam("bottom");
  const whole = wholeWindow(picture);
  const columnOf = (step: number): number => (step - picture.firstStep) / picture.stepsPerBin;
  const window = clampedWindow(picture, {
    top: top ?? whole.top,
    bottom: bottom ?? whole.bottom,
    left: left === null ? whole.left : columnOf(left),
    right: right === null ? whole.right : columnOf(right + 1),
  });
  return {
    window,
    isWhole: left === null && right === null && top === null && bottom === null,
    set: (next) => {
      if (next === null) {
        setParams({ left: null, right: null, top: null, bottom: null }, { isNewEntry: true });
        return;
      }
      const inside = clampedWindow(picture, next);
      const isAllSteps = inside.left === 0 && inside.right === picture.numColumns;
      const isAllRows = inside.top === 0 && inside.bottom === picture.numRows;
      setParams(
        {
          left: isAllSteps ? null : picture.firstStep + inside.left * picture.stepsPerBin,
          right: isAllSteps ? null : picture.firstStep + inside.right * picture.stepsPerBin - 1,
          top: isAllRows ? null : inside.top,
          bottom: isAllRows ? null : inside.bottom,
        },
        { isNewEntry: true },
      );
    },
  };
}

/** Return a window of another size around a cell. */
export function around(picture: HeatPicture, window: HeatWindow, row: number, column: number, factor: number): HeatWindow {
  const rows = Math.max(1, (window.bottom - window.top) * factor);
  const columns = Math.max(1, (window.right - window.left) * factor);
  const top = Math.min(Math.max(0, row - rows / 2), Math.max(0, picture.numRows - rows));
  const left = Math.min(Math.max(0, column - columns / 2), Math.max(0, picture.numColumns - columns));
  return { top, left, bottom: top + rows, right: left + columns };
}

/** Return the window moved so far that a cell is in it. */
export function including(window: HeatWindow, row: number, column: number): HeatWindow {
  const down = row < window.top ? row - window.top : row >= window.bottom ? row - window.bottom + 1 : 0;
  const right = column < window.left ? column - window.left : column >= window.right ? column - window.right + 1 : 0;
  return {
    top: window.top + down, bottom: window.bottom + down, left: window.left + right, right: window.right + right,
  };
}
