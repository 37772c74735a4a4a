// Line charts over steps or time, drawn by uPlot. All charts of a view share cursor and range; the range is in the URL.

import type { ComponentChildren, JSX } from "preact";
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import type uPlot from "uplot";

import type { MarkDocument } from "../api/documents";
import { clock, token } from "../app/preferences";
import { columnAcross, groupMarks, timeTicks, timeTickTexts, type Across, type MarkGroup } from "./chart-scale";
import { MarkLane, markColor, markText } from "./chart_marks";
import { countText, timeText } from "./format";
import { shownValues, stepAxis, usePlot, type Values, type ValueScale } from "./plot";
import { rootFontSize } from "./virtual";

interface ChartProps extends ValueScale {
  title: string;
  /** After the title, such as the unit. */
  note?: ComponentChildren;
  tools?: ComponentChildren;
  across: Across;
  values: Values;
  /** Minimum and maximum around each value, drawn as a band. */
  low?: Values;
  high?: Values;
  marks?: readonly MarkDocument[];
  /** Called when a part was selected by dragging; both null: show everything. */
  onRange?: (first: number | null, last: number | null) => void;
}

const SYNC = "steps";
const LINE_WIDTH = 1.5;
const LEAST_MARK_PX = 13;

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
    ctx.strokeStyle = markColor(mark.kind);
    ctx.globalAlpha = isQuiet ? 0.6 : 0.7;
    ctx.setLineDash(mark.kind === "incident" || isQuiet ? [] : [3 * ratio, 3 * ratio]);
    ctx.beginPath();
    ctx.moveTo(place, isQuiet ? bottom - 5 * ratio : bbox.top);
    ctx.lineTo(place, bottom);
    ctx.stroke();
  }
  ctx.restore();
}

/** Return the axis of times, below the chart. */
function timeAxis(): uPlot.Axis {
  const rem = rootFontSize();
  return {
    size: 2.4 * rem,
    splits: (plot, _axis, min, max) => timeTicks(min, max, Math.max(1, plot.width / (4.5 * rem)), zoneOffsetS(max)),
    values: (_plot, splits) => timeTickTexts(splits, zoneOffsetS(splits[0] ?? 0)),
  };
}

/** Offset from UTC of the zone that the page shows, in seconds. */
function zoneOffsetS(unixS: number): number {
  return clock.value === "utc" ? 0 : -60 * new Date(unixS * 1000).getTimezoneOffset();
}

/** Return the line of the values, and the edges of the band around it. */
function lines(hasBand: boolean): uPlot.Series[] {
  const edge = { stroke: token("--chart-edge"), width: hasBand ? 1 : 0, points: { show: false } };
  return [{ stroke: token("--chart-line"), width: LINE_WIDTH, points: { show: false }, spanGaps: false }, edge, { ...edge }];
}

/** Return the text of the cursor's position: its step, or its time on a time axis. */
function placeText(across: Across, index: number): string {
  const value = across.values[index];
  if (value === undefined) {
    return "";
  }
  return across.axis === "step" ? `step ${countText(value)}` : timeText(value, clock.value);
}

export function Chart(props: ChartProps): JSX.Element {
  const { title, across, values, low, high, text, isLog = false, fromZero = false } = props;
  const [cursor, setCursor] = useState<{ index: number | null; left: number }>({ index: null, left: -1 });
  const [scaled, setScaled] = useState({ left: 0, width: 0, min: 0, max: 0 });
  const latest = useRef(props);
  latest.current = props;
  const hasBand = low !== undefined && high !== undefined;
  const data = useMemo<uPlot.AlignedData>(() => {
    const column = (one: Values | undefined): (number | null)[] => shownValues(columnAcross(across, one), isLog);
    return [[...across.values], column(values), column(low), column(high)];
  }, [across, values, low, high, isLog]);
  const groups = useMemo(() => {
    const { min, max, width } = scaled;
    const xOf = (value: number): number | null =>
      value < min || value > max || max <= min ? null : ((value - min) / (max - min)) * width;
    return groupMarks(props.marks ?? [], across.axis, xOf, LEAST_MARK_PX);
  }, [props.marks, across.axis, scaled]);
  const drawn = useRef(groups);
  drawn.current = groups;

  const keepScale = (made: uPlot): void => {
    const { min, max } = made.scales["x"] ?? {};
    const ratio = window.devicePixelRatio || 1;
    if (typeof min === "number" && typeof max === "number") {
      const now = { left: made.bbox.left / ratio, width: made.bbox.width / ratio, min, max };
      setScaled((old) =>
        old.left === now.left && old.width === now.width && old.min === min && old.max === max ? old : now,
      );
    }
  };
  const { box, plot } = usePlot(
    data,
    () => ({
      scale: props,
      sync: SYNC,
      xScale: {
        range: (_plot, min, max) => {
          const shown = latest.current.across;
          const [first, last] = [shown.min ?? min ?? 0, shown.max ?? max ?? 1];
          return last > first ? [first, last] : [first - 0.5, first + 0.5];
        },
      },
      xAxis: across.axis === "time" ? timeAxis() : stepAxis(),
      series: lines(hasBand),
      bands: hasBand ? [{ series: [3, 2], fill: token("--chart-band") }] : [],
      cursorPoints: { fill: token("--chart-line") },
      hooks: {
        drawAxes: [(made) => drawGaps(made, latest.current.across)],
        draw: [
          (made) => {
            keepScale(made);
            drawMarks(made, drawn.current);
          },
        ],
      },
      onCursor: (index, left) => setCursor({ index, left }),
      onRange: (first, last) => latest.current.onRange?.(first, last),
    }),
    [clock.value, across.axis, isLog, fromZero, hasBand],
  );
  useEffect(() => plot.current?.redraw(false), [groups]);

  const drawnValues = data[1] as Values;
  const shownRow = cursor.index ?? drawnValues.findLastIndex((value) => value !== null);
  const near = cursor.left < 0 ? undefined : groups.find((one) => Math.abs(one.x - cursor.left) < LEAST_MARK_PX / 2);
  const value = drawnValues[shownRow] ?? null;
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
