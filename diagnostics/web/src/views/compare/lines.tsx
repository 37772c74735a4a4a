// A chart of several runs over steps, drawn by uPlot. Each run has its own colour and dash pattern.

import type { ComponentChildren, JSX } from "preact";
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import uPlot from "uplot";

import { shownTheme, token } from "../../app/preferences";
import { countText } from "../../ui/format";
import { rootFontSize } from "../../ui/virtual";

const COLOURS = ["--chart-line", "--part-3", "--mark", "--part-5"] as const;
const DASHES = [[], [6, 3], [2, 3], [8, 3, 2, 3]] as const;
const SYNC = "runs";
const LABEL_REM = 0.6875;
const LINE_WIDTH = 1.75;

/** The legend symbol of a run: its colour and dash pattern. */
export function LineKey({ index }: { index: number }): JSX.Element {
  const dashes = DASHES[index % DASHES.length] ?? [];
  return (
    <svg class="line-key" viewBox="0 0 24 8" aria-hidden="true" style={{ color: `var(${COLOURS[index % COLOURS.length]})` }}>
      <line x1="0" y1="4" x2="24" y2="4" stroke="currentColor" stroke-width="2.5" stroke-dasharray={dashes.join(" ")} />
    </svg>
  );
}

interface LinesProps {
  title: string;
  tools?: ComponentChildren;
  steps: readonly number[];
  names: readonly string[];
  /** Values by run; null: no value at this step. */
  values: readonly (readonly (number | null)[])[];
  text: (value: number) => string;
  isLog?: boolean;
  fromZero?: boolean;
  onZoom: (first: number | null, last: number | null) => void;
}

interface LineOptions {
  isLog: boolean;
  fromZero: boolean;
  text: (value: number) => string;
  onCursor: (index: number | null) => void;
  onZoom: LinesProps["onZoom"];
}

function range(options: LineOptions): uPlot.Scale.Range {
  return (_plot, min, max) => {
    if (min === null || max === null) {
      return [options.isLog ? 0.1 : 0, 1];
    }
    if (options.isLog) {
      return [min / 1.05, max * 1.05];
    }
    const low = options.fromZero ? Math.min(0, min) : min;
    const room = (max - low || Math.abs(max) || 1) * 0.08;
    return [options.fromZero ? low : min - room, max + room];
  };
}

function optionsOf(box: HTMLElement, names: readonly string[], options: LineOptions): uPlot.Options {
  const rem = rootFontSize();
  const font = `${rem * LABEL_REM}px ${getComputedStyle(document.documentElement).getPropertyValue("--font").trim()}`;
  const axis = { stroke: token("--ink-faint"), font, ticks: { show: false } };
  return {
    width: Math.max(120, box.clientWidth),
    height: box.clientHeight,
    padding: [rem / 2, rem / 2, 0, 0],
    legend: { show: false },
    cursor: { sync: { key: SYNC, setSeries: false }, drag: { x: true, y: false, setScale: false }, points: { size: 7 } },
    scales: { x: { time: false }, y: { distr: options.isLog ? 3 : 1, range: range(options) } },
    axes: [
      { ...axis, size: 1.5 * rem, gap: 0.25 * rem, space: 4.5 * rem, grid: { show: false }, values: (_plot, at) => at.map(countText) },
      {
        ...axis,
        size: 3.9 * rem,
        gap: 0.4 * rem,
        space: 2.1 * rem,
        grid: { stroke: token("--chart-grid"), width: 1 },
        values: (_plot, at) => at.map((value: number | null) => (value === null ? "" : options.text(value))),
      },
    ],
    series: [
      {},
      ...names.map((_, index) => ({
        stroke: token(COLOURS[index % COLOURS.length] ?? "--chart-line"),
        dash: [...(DASHES[index % DASHES.length] ?? [])],
        width: LINE_WIDTH,
        points: { show: false },
        // a run may not have all steps of the axis
        spanGaps: true,
      })),
    ],
    hooks: {
      setCursor: [(plot) => options.onCursor(plot.cursor.idx ?? null)],
      setSelect: [
        (plot) => {
          const { left, width } = plot.select;
          if (width >= 4) {
            const [first, last] = [plot.posToVal(left, "x"), plot.posToVal(left + width, "x")].map(Math.round);
            plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
            options.onZoom(first ?? null, last ?? null);
          }
        },
      ],
    },
  };
}

export function Lines(props: LinesProps): JSX.Element {
  const { title, tools, steps, names, values, text, isLog = false, fromZero = false, onZoom } = props;
  const box = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | null>(null);
  const [cursor, setCursor] = useState<number | null>(null);
  const theme = shownTheme.value;
  const data = useMemo<uPlot.AlignedData>(() => {
    const shown = values.map((line) => line.map((value) => (isLog && value !== null && value <= 0 ? null : value)));
    return [[...steps], ...shown];
  }, [steps, values, isLog]);
  const newest = useRef(data);
  newest.current = data;

  useEffect(() => {
    const element = box.current;
    if (element === null) {
      return undefined;
    }
    const options = { isLog, fromZero, text, onCursor: setCursor, onZoom };
    const made = new uPlot(optionsOf(element, names, options), newest.current, element);
    made.over.addEventListener("dblclick", () => onZoom(null, null));
    plot.current = made;
    const observer = new ResizeObserver(() => made.setSize({ width: Math.max(120, element.clientWidth), height: element.clientHeight }));
    observer.observe(element);
    return () => {
      observer.disconnect();
      made.destroy();
      plot.current = null;
    };
  }, [theme, isLog, fromZero, names.join(",")]);
  useEffect(() => plot.current?.setData(data), [data]);

  const known = (line: readonly (number | null)[]): number | null =>
    cursor === null ? (line.findLast((value) => value !== null) ?? null) : (line[cursor] ?? null);
  const read = values.map((line) => {
    const value = known(line);
    return value === null ? "\u2013" : text(value);
  });
  return (
    <figure class="chart" data-chart={title}>
      <figcaption class="chart-head">
        <span class="chart-title">{title}</span>
        {tools}
        <span class="chart-reading">
          {names.map((name, index) => (
            <span key={name} title={name}>
              <LineKey index={index} /> <strong>{read[index]}</strong>
            </span>
          ))}
          {cursor === null ? null : <span class="faint">step {countText(steps[cursor])}</span>}
        </span>
      </figcaption>
      <div
        class="chart-box"
        ref={box}
        role="img"
        aria-label={`${title} of ${names.map((name, index) => `${name}, last ${read[index]}`).join("; ")}`}
      />
    </figure>
  );
}
