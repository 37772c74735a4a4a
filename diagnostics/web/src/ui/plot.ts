// What all line charts share: a uPlot in an element, its axis of values, and the selection of a range by dragging.

import type { RefObject } from "preact";
import { useEffect, useRef } from "preact/hooks";
import uPlot from "uplot";

import { shownTheme, token } from "../app/preferences";
import { countText } from "./format";
import { rootFontSize } from "./virtual";

export type Values = readonly (number | null)[];

export interface ValueScale {
  text: (value: number) => string;
  isLog?: boolean;
  /** The scale includes zero, so that rates and durations can be compared by height. */
  fromZero?: boolean;
  /**
   * The scale ends at this multiple of the median, so that one slow step does not flatten all others. Higher values are cut
   * off.
   */
  mostMedians?: number;
}

interface PlotParts {
  scale: ValueScale;
  /** Charts with the same key share the cursor. */
  sync: string;
  xScale?: uPlot.Scale;
  xAxis: uPlot.Axis;
  series: readonly uPlot.Series[];
  bands?: uPlot.Band[];
  cursorPoints?: uPlot.Cursor.Points;
  hooks?: uPlot.Hooks.Arrays;
  /** Called with the point at the cursor, null if there is none, and the cursor's place in pixels. */
  onCursor: (index: number | null, left: number) => void;
  /** Called when a part was selected by dragging; both null: show everything. */
  onRange: (first: number | null, last: number | null) => void;
}

const LABEL_REM = 0.6875;
const LEAST_DRAG_PX = 4;
const LEAST_WIDTH_PX = 120;

/** Return the values that a scale can show, the others as gaps: a logarithmic one shows only values above zero. */
export function shownValues(values: Values, isLog: boolean): (number | null)[] {
  return values.map((value) => (isLog && value !== null && value <= 0 ? null : value));
}

/** Return the axis of steps, below the chart. */
export function stepAxis(): uPlot.Axis {
  const rem = rootFontSize();
  return { size: 1.5 * rem, values: (_plot, splits) => splits.map(countText) };
}

function median(values: ArrayLike<number | null | undefined>): number {
  const known = Array.from(values).filter((value): value is number => typeof value === "number");
  known.sort((a, b) => a - b);
  return known[known.length >> 1] ?? Number.POSITIVE_INFINITY;
}

function valueRange({ isLog = false, fromZero = false, mostMedians }: ValueScale): uPlot.Scale.Range {
  return (plot, min, most) => {
    if (min === null || most === null) {
      return [isLog ? 0.1 : 0, 1];
    }
    const max = mostMedians === undefined ? most : Math.min(most, median(plot.data[1] ?? []) * mostMedians);
    if (isLog) {
      return [min / 1.05, max * 1.05];
    }
    const low = fromZero ? Math.min(0, min) : min;
    const room = (max - low || Math.abs(max) || 1) * 0.08;
    return [fromZero ? low : min - room, max + room];
  };
}

/** "4.00" -> "4", "12.50 s" -> "12.5 s": tick labels have no trailing zeros. */
function tickText(text: string): string {
  return text.replace(/(\.\d*?)0+(?=\D|$)/, "$1").replace(/\.(?=\D|$)/, "");
}

function axes(xAxis: uPlot.Axis, text: (value: number) => string): uPlot.Axis[] {
  const rem = rootFontSize();
  // whole pixels: uPlot derives the line height from this number
  const font = `${Math.round(rem * LABEL_REM)}px ${getComputedStyle(document.documentElement).getPropertyValue("--font").trim()}`;
  const shared = { stroke: token("--ink-faint"), font, ticks: { show: false } };
  return [
    { ...shared, gap: 0.25 * rem, space: 4.5 * rem, grid: { show: false }, ...xAxis },
    {
      ...shared,
      size: 3.9 * rem,
      gap: 0.4 * rem,
      space: 2.1 * rem,
      grid: { stroke: token("--chart-grid"), width: 1 },
      values: (_plot, splits: (number | null)[]) => splits.map((value) => (value === null ? "" : tickText(text(value)))),
    },
  ];
}

function plotOptions(parts: PlotParts): Omit<uPlot.Options, "width" | "height"> {
  const rem = rootFontSize();
  return {
    padding: [rem / 2, rem / 2, 0, 0],
    legend: { show: false },
    cursor: {
      sync: { key: parts.sync, setSeries: false },
      drag: { x: true, y: false, setScale: false },
      points: { size: 7, ...parts.cursorPoints },
    },
    scales: { x: { time: false, ...parts.xScale }, y: { distr: parts.scale.isLog === true ? 3 : 1, range: valueRange(parts.scale) } },
    axes: axes(parts.xAxis, parts.scale.text),
    series: [{}, ...parts.series],
    bands: parts.bands ?? [],
    hooks: {
      ...parts.hooks,
      setCursor: [(plot) => parts.onCursor(plot.cursor.idx ?? null, plot.cursor.left ?? -1)],
      setSelect: [
        (plot) => {
          const { left, width } = plot.select;
          if (width < LEAST_DRAG_PX) {
            return;
          }
          const [first, last] = [plot.posToVal(left, "x"), plot.posToVal(left + width, "x")];
          plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
          parts.onRange(first, last);
        },
      ],
    },
  };
}

interface ShownPlot {
  box: RefObject<HTMLDivElement | null>;
  plot: RefObject<uPlot | null>;
}

/**
 * Show a plot in the element of `box` and keep it at the element's size.
 *
 * `partsOf` is called when the plot is made: at first, and again whenever the theme or one of `inputs` changes.
 */
export function usePlot(data: uPlot.AlignedData, partsOf: () => PlotParts, inputs: readonly unknown[]): ShownPlot {
  const box = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot>(null);
  const newest = useRef(data);
  newest.current = data;
  useEffect(() => {
    const element = box.current;
    if (element === null) {
      return undefined;
    }
    const parts = partsOf();
    const size = (): { width: number; height: number } => ({ width: Math.max(LEAST_WIDTH_PX, element.clientWidth), height: element.clientHeight });
    const made = new uPlot({ ...size(), ...plotOptions(parts) }, newest.current, element);
    made.over.addEventListener("dblclick", () => parts.onRange(null, null));
    plot.current = made;
    const observer = new ResizeObserver(() => made.setSize(size()));
    observer.observe(element);
    return () => {
      observer.disconnect();
      made.destroy();
      plot.current = null;
    };
  }, [shownTheme.value, ...inputs]);
  useEffect(() => plot.current?.setData(data), [data]);
  return { box, plot };
}
