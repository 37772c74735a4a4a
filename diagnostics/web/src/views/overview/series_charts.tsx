// Loss, step time, throughput and gradient norm over the steps, with incidents as marks. Dragging zooms all of them.

import type { JSX } from "preact";
import { useMemo } from "preact/hooks";

import { useResource } from "../../api/resource";
import type { IncidentDocument, SeriesDocument } from "../../api/documents";
import { setParams, useNumberParam, useParam } from "../../app/location";
import { Chart, type ChartMark } from "../../ui/chart";
import { Switch } from "../../ui/controls";
import { countText, durationText, largeText, numberText, percentText } from "../../ui/format";
import { EmptyState, Loaded } from "../../ui/states";

const POINTS = 600;

/** Incidents where they happened, and where the job began anew for another reason. */
export function marksOf(series: SeriesDocument, incidents: readonly IncidentDocument[]): ChartMark[] {
  const marks: ChartMark[] = [];
  for (const incident of incidents) {
    if (incident.last_step !== null) {
      marks.push({ step: incident.last_step, text: incident.kind_text, tone: "bad" });
    }
  }
  const marked = new Set(marks.map((mark) => mark.step));
  for (let index = 1; index < series.step.length; index += 1) {
    const step = series.step[index];
    if (step !== undefined && series.round[index] !== series.round[index - 1] && !marked.has(step)) {
      marks.push({ step, text: `round ${series.round[index]}`, tone: "quiet" });
    }
  }
  for (const step of series.bad_steps) {
    marks.push({ step, text: "not a finite number", tone: "bad" });
  }
  return marks;
}

const zoom = (first: number | null, last: number | null): void => setParams({ first, last }, { isNewEntry: true });

const lossText = (value: number): string => numberText(value, 3);
const normText = (value: number): string => numberText(value, 3);

function Charts({ series, incidents }: { series: SeriesDocument; incidents: readonly IncidentDocument[] }): JSX.Element {
  const [scale, setScale] = useParam("loss", "linear");
  const marks = useMemo(() => marksOf(series, incidents), [series, incidents]);
  const [rate, setRate] = useParam("rate", "tokens");
  const hasMfu = series.mfu.some((value) => value !== null);
  const isMfu = hasMfu && rate === "mfu";
  const shared = { steps: series.step, marks, onZoom: zoom };
  const isLog = scale === "log";
  return (
    <div class="charts">
      <Chart
        {...shared}
        title="Loss"
        tools={<Switch label="log" isOn={isLog} onChange={(isOn) => setScale(isOn ? "log" : "linear")} />}
        values={series.loss}
        low={series.loss_low}
        high={series.loss_high}
        text={lossText}
        isLog={isLog}
      />
      <Chart
        {...shared}
        title="Step time"
        note={series.stride > 1 ? `range of ${countText(series.stride)} steps a point` : undefined}
        values={series.step_s}
        low={series.step_s_low}
        high={series.step_s_high}
        text={durationText}
        fromZero
        mostMedians={3}
      />
      <Chart
        {...shared}
        key={isMfu ? "mfu" : "tokens"}
        title={isMfu ? "MFU" : "Tokens per s"}
        tools={hasMfu ? <Switch label="MFU" isOn={isMfu} onChange={(isOn) => setRate(isOn ? "mfu" : "tokens")} /> : null}
        values={isMfu ? series.mfu : series.tokens_per_s}
        text={isMfu ? percentText : largeText}
        fromZero
      />
      <Chart
        {...shared}
        title="Gradient norm"
        values={series.grad_norm}
        low={series.grad_norm}
        high={series.grad_norm_high}
        text={normText}
      />
    </div>
  );
}

export function SeriesCharts({ incidents }: { incidents: readonly IncidentDocument[] }): JSX.Element {
  const [first] = useNumberParam("first");
  const [last] = useNumberParam("last");
  const series = useResource<SeriesDocument>("series", { first, last, points: POINTS }, "series");
  const isZoomed = first !== null || last !== null;
  return (
    <section aria-label="Course of the training">
      {isZoomed ? (
        <p class="zoom-line">
          <span class="faint">
            Steps {countText(first)} to {countText(last)} are shown.
          </span>{" "}
          <button type="button" class="button small" onClick={() => zoom(null, null)}>
            Show all
          </button>
        </p>
      ) : null}
      <Loaded resource={series}>
        {(found) =>
          found.step.length === 0 ? (
            <EmptyState title="No step is recorded yet">
              Loss, step time and throughput appear here with the first step that all ranks complete. Starting takes a minute or
              two: processes, model, checkpoint.
            </EmptyState>
          ) : (
            <Charts series={found} incidents={incidents} />
          )
        }
      </Loaded>
    </section>
  );
}
