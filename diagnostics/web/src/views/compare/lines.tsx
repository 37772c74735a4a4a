// A chart of several runs over steps, drawn by uPlot. Each run has its own color and dash pattern.

import type { ComponentChildren, JSX } from "preact";
import { useMemo, useState } from "preact/hooks";
import type uPlot from "uplot";

import { token } from "../../app/preferences";
import { countText } from "../../ui/format";
import { shownValues, stepAxis, usePlot, type Values, type ValueScale } from "../../ui/plot";

const COLORS = ["--chart-line", "--part-3", "--mark", "--part-5"] as const;
const DASHES = [[], [6, 3], [2, 3], [8, 3, 2, 3]] as const;
const SYNC = "runs";
const LINE_WIDTH = 1.75;

/** The legend symbol of a run: its color and dash pattern. */
export function LineKey({ index }: { index: number }): JSX.Element {
  const dashes = DASHES[index % DASHES.length] ?? [];
  return (
    <svg class="line-key" viewBox="0 0 24 8" aria-hidden="true" style={{ color: `var(${COLORS[index % COLORS.length]})` }}>
      <line x1="0" y1="4" x2="24" y2="4" stroke="currentColor" stroke-width="2.5" stroke-dasharray={dashes.join(" ")} />
    </svg>
  );
}

interface LinesProps extends ValueScale {
  title: string;
  tools?: ComponentChildren;
  steps: readonly number[];
  names: readonly string[];
  /** Values by run; null: no value at this step. */
  values: readonly Values[];
  onZoom: (first: number | null, last: number | null) => void;
}

/** Return the line of a run. A run may not have all steps of the axis. */
function runLine(index: number): uPlot.Series {
  return {
    stroke: token(COLORS[index % COLORS.length] ?? "--chart-line"),
    dash: [...(DASHES[index % DASHES.length] ?? [])],
    width: LINE_WIDTH,
    points: { show: false },
    spanGaps: true,
  };
}

export function Lines(props: LinesProps): JSX.Element {
  const { title, tools, steps, names, values, text, isLog = false, fromZero = false, onZoom } = props;
  const [cursor, setCursor] = useState<number | null>(null);
  const data = useMemo<uPlot.AlignedData>(
    () => [[...steps], ...values.map((line) => shownValues(line, isLog))],
    [steps, values, isLog],
  );
  const { box } = usePlot(
    data,
    () => ({
      scale: props,
      sync: SYNC,
      xAxis: stepAxis(),
      series: names.map((_, index) => runLine(index)),
      onCursor: setCursor,
      onRange: onZoom,
    }),
    [isLog, fromZero, names.join(",")],
  );

  const known = (line: Values): number | null =>
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
