// Line charts over steps or time, drawn by uPlot. All charts of a view share cursor and range; the range is in the URL.

import type { ComponentChildren, JSX } from "preact";
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import uPlot from "uplot";

import type { MarkDocument } from "../api/documents";
import { clock, shownTheme, token } from "../app/preferences";
import { columnAcross, groupMarks, timeTicks, timeTickTexts, type Across, type MarkGroup } from "./chart-scale";
import { MarkLane, markColour, markText } from "./chart_marks";
import { countText, timeText } from "./format";
import { rootFontSize } from "./virtual";

type Values = readonly (number | null)[];

interface ChartProps {
  title: string;
  /** After the title, such as the unit. */
  note?: ComponentChildren;
  tools?: ComponentChildren;
  across: Across;
  values: Values;
  /** Minimum and maximum around each value, drawn as a band. */
  low?: Values;
  high?: Values;
  text: (value: number) => string;
  isLog?: boolean;
  /** The scale includes zero, so that rates and durations can be compared by height. */
  fromZero?: boolean;
  /**
   * The scale ends at this multiple of the median, so that one slow step does not flatten all others. Higher values are cut
   * off.
   */
  mostMedians?: number;
  marks?: readonly MarkDocument[];
  /** Called when a part was selected by dragging; both null: show everything. */
  onRange?: (first: number | null, last: number | null) => void;
}

const SYNC = "steps";
const LABEL_REM = 0.6875;
const LINE_WIDTH = 1.5;

const LEAST_MARK_PX = 13;
const LEAST_DRAG_PX = 4;

/** Return a column for uPlot: null is a gap. On a logarithmic scale values of zero or less are gaps. */
function column(across: Across, values: Values | undefined, isLog: boolean): (number | null)[] {
  const found = columnAcross(across, values);
  return isLog ? found.map((value) => (value !== null && value > 0 ? value : null)) : found;
}

/** Shade the times in which nothing was trained. */
function drawGaps(plot: uPlot, across: Across): void {
  const { ctx, bbox } = plot;
  ctx.save();
  ctx.fillStyle = token("--chart-gap");
  for (const gap of across.gaps) {
    const left = Math.max(bbox.left, plot.valToPos(gap.begin_unix_s, "x", true));
    const right = Math.min(bbox.left + bbox.width, plot.valToPos(gap.end_unix_s, "x", true));
    if (right > left) {
      ctx.fillRect(left, bbox.top, Math.max(1, right - left), bbox.height);
    }
  }
  ctx.restore();
}

/** Draw a vertical line at each mark; checkpoints and new rounds get only a tick at the bottom, since there may be hundreds. */
function drawMarks(plot: uPlot, groups: readonly MarkGroup[]): void {
  const { ctx, bbox } = plot;
  const ratio = window.devicePixelRatio || 1;
  ctx.save();
  ctx.lineWidth = ratio;
  for (const { x, mark } of groups) {
    const isQuiet = mark.kind === "checkpoint" || mark.kind === "round";
    const place = Math.round(bbox.left + x * ratio) + 0.5;
    const bottom = bbox.top + bbox.height;
    ctx.strokeStyle = markColour(mark.kind);
    ctx.globalAlpha = isQuiet ? 0.6 : 0.7;
    ctx.setLineDash(mark.kind === "incident" || isQuiet ? [] : [3 * ratio, 3 * ratio]);
    ctx.beginPath();
    ctx.moveTo(place, isQuiet ? bottom - 5 * ratio : bbox.top);
    ctx.lineTo(place, bottom);
    ctx.stroke();
  }
  ctx.restore();
}

interface Parts {
  text: (value: number) => string;
  isLog: boolean;
  fromZero: boolean;
  mostMedians: number;
  hasBand: boolean;
  across: () => Across;
  groups: () => readonly MarkGroup[];
  onCursor: (index: number | null, left: number) => void;
  /** Called after each draw: the x scale may have changed. */
  onScale: (plot: uPlot) => void;
  onRange: (first: number, last: number) => void;
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

/** "4.00" -> "4", "12.50 s" -> "12.5 s": tick labels have no trailing zeros. */
function tickText(text: string): string {
  return text.replace(/(\.\d*?)0+(?=\D|$)/, "$1").replace(/\.(?=\D|$)/, "");
}

function axes(parts: Parts, rem: number): uPlot.Axis[] {
  // whole pixels: uPlot derives the line height from this number
  const font = `${Math.round(rem * LABEL_REM)}px ${getComputedStyle(document.documentElement).getPropertyValue("--font").trim()}`;
  const shared = {
    stroke: token("--ink-faint"),
    font,
    grid: { stroke: token("--chart-grid"), width: 1 },
    ticks: { show: false },
  };
  const labels = (_plot: uPlot, splits: (number | null)[]): string[] =>
    splits.map((value) => (value === null ? "" : tickText(parts.text(value))));
  const isTime = parts.across().axis === "time";
  return [
    {
      ...shared,
      size: (isTime ? 2.4 : 1.5) * rem,
      gap: 0.25 * rem,
      space: 4.5 * rem,
      grid: { show: false },
      ...(isTime
        ? {
            splits: (plot: uPlot, _axis: number, min: number, max: number) =>
              timeTicks(min, max, Math.max(1, plot.width / (4.5 * rem)), zoneOffsetS(max)),
            values: (_plot: uPlot, splits: number[]) => timeTickTexts(splits, zoneOffsetS(splits[0] ?? 0)),
          }
        : { values: (_plot: uPlot, splits: number[]) => splits.map(countText) }),
    },
    { ...shared, size: 3.9 * rem, gap: 0.4 * rem, space: 2.1 * rem, values: labels },
  ];
}

/** Offset from UTC of the zone that the page shows, in seconds. */
function zoneOffsetS(unixS: number): number {
  return clock.value === "utc" ? 0 : -60 * new Date(unixS * 1000).getTimezoneOffset();
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
    scales: {
      x: {
        time: false,
        range: (_plot, min, max) => {
          const across = parts.across();
          const [first, last] = [across.min ?? min ?? 0, across.max ?? max ?? 1];
          return last > first ? [first, last] : [first - 0.5, first + 0.5];
        },
      },
      y: { distr: parts.isLog ? 3 : 1, range: scaleRange(parts) },
    },
    axes: axes(parts, rem),
    series: [
      {},
      { stroke: line, width: LINE_WIDTH, points: { show: false }, spanGaps: false },
      { ...edge },
      { ...edge },
    ],
    bands: parts.hasBand ? [{ series: [3, 2], fill: token("--chart-band") }] : [],
    hooks: {
      drawAxes: [(plot) => drawGaps(plot, parts.across())],
      draw: [
        (plot) => {
          parts.onScale(plot);
          drawMarks(plot, parts.groups());
        },
      ],
      setCursor: [(plot) => parts.onCursor(plot.cursor.idx ?? null, plot.cursor.left ?? -1)],
      setSelect: [
        (plot) => {
          const { left, width: wide } = plot.select;
          if (wide < LEAST_DRAG_PX) {
            return;
          }
          const [first, last] = [plot.posToVal(left, "x"), plot.posToVal(left + wide, "x")];
          plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
          parts.onRange(first, last);
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

/** Return the text of the cursor's position: its step, or its time on a time axis. */
function placeText(across: Across, index: number | null): string {
  const value = index === null ? undefined : across.values[index];
  if (value === undefined) {
    return "";
  }
  return across.axis === "step" ? `step ${countText(value)}` : timeText(value, clock.value);
}

export function Chart(props: ChartProps): JSX.Element {
  const { title, across, values, low, high, text, isLog = false, fromZero = false, mostMedians = Infinity } = props;
  const box = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | null>(null);
  const [cursor, setCursor] = useState<{ index: number | null; left: number }>({ index: null, left: -1 });
  const [scaled, setScaled] = useState({ left: 0, width: 0, min: 0, max: 0 });
  const latest = useRef(props);
  latest.current = props;
  const theme = shownTheme.value;
  const zone = clock.value;
  const hasBand = low !== undefined && high !== undefined;
  const data = useMemo<uPlot.AlignedData>(
    () => [[...across.values], column(across, values, isLog), column(across, low, isLog), column(across, high, isLog)],
    [across, values, low, high, isLog],
  );
  const newest = useRef(data);
  newest.current = data;
  const groups = useMemo(() => {
    const { min, max, width } = scaled;
    const xOf = (value: number): number | null =>
      value < min || value > max || max <= min ? null : ((value - min) / (max - min)) * width;
    return groupMarks(props.marks ?? [], across.axis, xOf, LEAST_MARK_PX);
  }, [props.marks, across.axis, scaled]);
  const drawn = useRef(groups);
  drawn.current = groups;

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
      across: () => latest.current.across,
      groups: () => drawn.current,
      onCursor: (index, left) => setCursor({ index, left }),
      onScale: (made) => {
        const { min, max } = made.scales["x"] ?? {};
        const ratio = window.devicePixelRatio || 1;
        if (typeof min === "number" && typeof max === "number") {
          const now = { left: made.bbox.left / ratio, width: made.bbox.width / ratio, min, max };
          setScaled((old) =>
            old.left === now.left && old.width === now.width && old.min === min && old.max === max ? old : now,
          );
        }
      },
      onRange: (first, last) => latest.current.onRange?.(first, last),
    };
    const size = (): { width: number; height: number } => ({ width: Math.max(120, element.clientWidth), height: element.clientHeight });
    const made = new uPlot(options(size().width, size().height, parts), newest.current, element);
    made.over.addEventListener("dblclick", () => latest.current.onRange?.(null, null));
    plot.current = made;
    const observer = new ResizeObserver(() => made.setSize(size()));
    observer.observe(element);
    return () => {
      observer.disconnect();
      made.destroy();
      plot.current = null;
    };
  }, [theme, zone, across.axis, isLog, fromZero, hasBand]);

  useEffect(() => plot.current?.setData(data), [data]);
  useEffect(() => plot.current?.redraw(false), [groups]);

  const shownRow = cursor.index === null ? lastKnown(data[1] as Values) : cursor.index;
  const near = cursor.left < 0 ? undefined : groups.find((one) => Math.abs(one.x - cursor.left) < LEAST_MARK_PX / 2);
  const value = shownRow === null ? null : ((data[1] as Values)[shownRow] ?? null);
  const shown = value === null ? "\u2013" : text(value);
  const place = placeText(across, shownRow);
  return (
    <figure class="chart" data-chart={title} data-axis={across.axis}>
      <figcaption class="chart-head">
        <span class="chart-title">{title}</span>
        {props.note === undefined ? null : <span class="chart-note">{props.note}</span>}
        {props.tools}
        <span class="chart-reading">
          {near === undefined ? null : <span class="chart-mark">{markText(near)}</span>}
          <strong>{shown}</strong>
          {place === "" ? null : <span class="faint">{place}</span>}
        </span>
      </figcaption>
      <MarkLane groups={groups} left={scaled.left} axis={across.axis} />
      <div class="chart-box" ref={box} role="img" aria-label={`${title} over ${values.length} points up to ${placeText(across, across.values.length - 1)}, last ${shown}`} />
    </figure>
  );
}
