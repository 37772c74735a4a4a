// Lines over steps, drawn by uPlot. All charts of a view share cursor and zoom; the zoom is in the URL.

import type { ComponentChildren, JSX } from "preact";
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import uPlot from "uplot";

import { shownTheme, token } from "../app/preferences";
import { countText } from "./format";
import { rootFontSize } from "./virtual";

type Values = readonly (number | null)[];

export interface ChartMark {
  step: number;
  text: string;
  tone: "bad" | "quiet";
}

interface ChartProps {
  title: string;
  /** Behind the title: the unit, a rule. */
  note?: ComponentChildren;
  tools?: ComponentChildren;
  steps: readonly number[];
  values: Values;
  /** The extremes about each value: a band. */
  low?: Values;
  high?: Values;
  text: (value: number) => string;
  isLog?: boolean;
  /** The scale holds zero: for rates and durations, where a ratio is seen as one. */
  fromZero?: boolean;
  /** The scale ends at so many medians: one slow step must not make all others flat. It is cut at the edge. */
  mostMedians?: number;
  marks?: readonly ChartMark[];
  onZoom?: (first: number | null, last: number | null) => void;
}

const SYNC = "steps";
const LABEL_REM = 0.6875;
const LINE_WIDTH = 1.5;

/** What uPlot takes: null is a gap; a logarithm takes nothing that is not above zero. */
function column(values: Values | undefined, length: number, isLog: boolean): (number | null)[] {
  if (values === undefined) {
    return new Array<null>(length).fill(null);
  }
  return isLog ? values.map((value) => (value !== null && value > 0 ? value : null)) : [...values];
}

function drawMarks(plot: uPlot, marks: readonly ChartMark[]): void {
  const { ctx, bbox } = plot;
  const { min, max } = plot.scales["x"] ?? {};
  if (typeof min !== "number" || typeof max !== "number") {
    return;
  }
  const ratio = window.devicePixelRatio || 1;
  ctx.save();
  for (const mark of marks) {
    if (mark.step < min || mark.step > max) {
      continue;
    }
    const x = Math.round(plot.valToPos(mark.step, "x", true)) + 0.5;
    const isBad = mark.tone === "bad";
    ctx.strokeStyle = ctx.fillStyle = token(isBad ? "--bad" : "--ink-faint");
    ctx.lineWidth = ratio;
    ctx.setLineDash(isBad ? [] : [3 * ratio, 3 * ratio]);
    ctx.globalAlpha = 0.75;
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
    if (isBad) {
      const side = 4 * ratio;
      ctx.globalAlpha = 1;
      ctx.beginPath();
      ctx.moveTo(x - side, bbox.top);
      ctx.lineTo(x + side, bbox.top);
      ctx.lineTo(x, bbox.top + side * 1.6);
      ctx.closePath();
      ctx.fill();
    }
  }
  ctx.restore();
}

interface Parts {
  text: (value: number) => string;
  isLog: boolean;
  fromZero: boolean;
  mostMedians: number;
  hasBand: boolean;
  marks: () => readonly ChartMark[];
  onCursor: (index: number | null) => void;
  onZoom: () => ((first: number | null, last: number | null) => void) | undefined;
}

function median(values: ArrayLike<number | null | undefined>): number {
  const known = Array.from(values).filter((value): value is number => typeof value === "number");
  known.sort((a, b) => a - b);
  return known[known.length >> 1] ?? Number.POSITIVE_INFINITY;
}

function scaleRange(parts: Parts): uPlot.Scale.Range {
  return (plot, min, most) => {
    if (min === null || most === null) {
      return [parts.isLog ? 0.1 : 0, 1];
    }
    const isCut = Number.isFinite(parts.mostMedians);
    const max = isCut ? Math.min(most, median(plot.data[1] ?? []) * parts.mostMedians) : most;
    if (parts.isLog) {
      return [min / 1.05, max * 1.05];
    }
    const room = (max - (parts.fromZero ? 0 : min) || Math.abs(max) || 1) * 0.08;
    return [parts.fromZero ? Math.min(0, min) : min - room, max + room];
  };
}

/** "4.00" -> "4", "12.50 s" -> "12.5 s": along an axis the digits that say nothing are left out. */
function tickText(text: string): string {
  return text.replace(/(\.\d*?)0+(?=\D|$)/, "$1").replace(/\.(?=\D|$)/, "");
}

function axes(parts: Parts, rem: number): uPlot.Axis[] {
  const font = `${rem * LABEL_REM}px ${getComputedStyle(document.documentElement).getPropertyValue("--font").trim()}`;
  const shared = {
    stroke: token("--ink-faint"),
    font,
    grid: { stroke: token("--chart-grid"), width: 1 },
    ticks: { show: false },
  };
  const labels = (_plot: uPlot, splits: (number | null)[]): string[] =>
    splits.map((value) => (value === null ? "" : tickText(parts.text(value))));
  return [
    {
      ...shared,
      size: 1.5 * rem,
      gap: 0.25 * rem,
      space: 4.5 * rem,
      grid: { show: false },
      values: (_plot, splits) => splits.map(countText),
    },
    { ...shared, size: 3.9 * rem, gap: 0.4 * rem, space: 2.1 * rem, values: labels },
  ];
}

function options(width: number, height: number, parts: Parts): uPlot.Options {
  const rem = rootFontSize();
  const line = token("--chart-line");
  const edge = { stroke: token("--chart-edge"), width: parts.hasBand ? 1 : 0, points: { show: false } };
  return {
    width,
    height,
    padding: [rem / 2, rem / 2, 0, 0],
    legend: { show: false },
    cursor: {
      sync: { key: SYNC, setSeries: false },
      drag: { x: true, y: false, setScale: false },
      points: { size: 7, fill: line },
    },
    scales: { x: { time: false }, y: { distr: parts.isLog ? 3 : 1, range: scaleRange(parts) } },
    axes: axes(parts, rem),
    series: [
      {},
      { stroke: line, width: LINE_WIDTH, points: { show: false }, spanGaps: false },
      { ...edge },
      { ...edge },
    ],
    bands: parts.hasBand ? [{ series: [3, 2], fill: token("--chart-band") }] : [],
    hooks: {
      draw: [(plot) => drawMarks(plot, parts.marks())],
      setCursor: [(plot) => parts.onCursor(plot.cursor.idx ?? null)],
      setSelect: [
        (plot) => {
          const { left, width: wide } = plot.select;
          if (wide < 4) {
            return;
          }
          const first = Math.round(plot.posToVal(left, "x"));
          const last = Math.round(plot.posToVal(left + wide, "x"));
          plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
          if (last > first) {
            parts.onZoom()?.(first, last);
          }
        },
      ],
    },
  };
}

function lastKnown(values: Values): number | null {
  for (let index = values.length - 1; index >= 0; index -= 1) {
    const value = values[index];
    if (value !== null && value !== undefined) {
      return index;
    }
  }
  return null;
}

/** Return the mark that the cursor is on, or beside. */
function nearMark(marks: readonly ChartMark[], steps: readonly number[], cursor: number): ChartMark | undefined {
  const reach = Math.max(1, Math.round(steps.length / 150));
  const first = steps[Math.max(0, cursor - reach)];
  const last = steps[Math.min(steps.length - 1, cursor + reach)];
  return first === undefined || last === undefined
    ? undefined
    : marks.find((mark) => mark.step >= first && mark.step <= last);
}

export function Chart(props: ChartProps): JSX.Element {
  const { title, steps, values, low, high, text, isLog = false, fromZero = false, mostMedians = Infinity } = props;
  const box = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | null>(null);
  const [cursor, setCursor] = useState<number | null>(null);
  const latest = useRef(props);
  latest.current = props;
  const theme = shownTheme.value;
  const hasBand = low !== undefined && high !== undefined;
  const data = useMemo<uPlot.AlignedData>(
    () => [[...steps], column(values, steps.length, isLog), column(low, steps.length, isLog), column(high, steps.length, isLog)],
    [steps, values, low, high, isLog],
  );
  const newest = useRef(data);
  newest.current = data;

  useEffect(() => {
    const element = box.current;
    if (element === null) {
      return undefined;
    }
    const parts: Parts = {
      text,
      isLog,
      fromZero,
      mostMedians,
      hasBand,
      marks: () => latest.current.marks ?? [],
      onCursor: setCursor,
      onZoom: () => latest.current.onZoom,
    };
    const size = (): { width: number; height: number } => ({ width: Math.max(120, element.clientWidth), height: element.clientHeight });
    const made = new uPlot(options(size().width, size().height, parts), newest.current, element);
    made.over.addEventListener("dblclick", () => latest.current.onZoom?.(null, null));
    plot.current = made;
    const observer = new ResizeObserver(() => made.setSize(size()));
    observer.observe(element);
    return () => {
      observer.disconnect();
      made.destroy();
      plot.current = null;
    };
  }, [theme, isLog, fromZero, hasBand]);

  useEffect(() => plot.current?.setData(data), [data]);
  useEffect(() => plot.current?.redraw(false), [props.marks]);

  const index = cursor ?? lastKnown(values);
  const near = cursor === null ? undefined : nearMark(props.marks ?? [], steps, cursor);
  const value = index === null ? null : (values[index] ?? null);
  const step = index === null ? undefined : steps[index];
  const shown = value === null ? "\u2013" : text(value);
  return (
    <figure class="chart" data-chart={title}>
      <figcaption class="chart-head">
        <span class="chart-title">{title}</span>
        {props.note === undefined ? null : <span class="chart-note">{props.note}</span>}
        {props.tools}
        <span class="chart-reading">
          {near === undefined ? null : <span class="chart-mark">{near.text}</span>}
          <strong>{shown}</strong>
          {step === undefined ? null : <span class="faint">step {countText(step)}</span>}
        </span>
      </figcaption>
      <div
        class="chart-box"
        ref={box}
        role="img"
        aria-label={`${title} over ${steps.length} points up to step ${countText(steps[steps.length - 1])}, last ${shown}`}
      />
    </figure>
  );
}
