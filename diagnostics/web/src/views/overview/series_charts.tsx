// Charts of loss, step time, throughput and gradient norm over steps or time, with marks for events.

import type { JSX } from "preact";
import { useMemo } from "preact/hooks";

import { useResource } from "../../api/resource";
import type { MarkDocument, MarksDocument, SeriesDocument } from "../../api/documents";
import { job } from "../../app/job";
import { useParam } from "../../app/location";
import { axis, isWholeRun, rangeQuery, setRange, setRangeOf } from "../../app/range";
import { Chart } from "../../ui/chart";
import { acrossOf } from "../../ui/chart-scale";
import { markHref, MarkLegend } from "../../ui/chart_marks";
import { recentS } from "../../ui/clocked";
import { Switch } from "../../ui/controls";
import { TimeText } from "../../ui/figures";
import { countOf, countText, durationText, largeText, numberText, percentText } from "../../ui/format";
import { EmptyState, Loaded } from "../../ui/states";
import { Table, type Column } from "../../ui/table";

const POINTS = 600;
const NONE: readonly MarkDocument[] = [];

const lossText = (value: number): string => numberText(value, 3);
const normText = (value: number): string => numberText(value, 3);

function Charts({ series, marks }: { series: SeriesDocument; marks: readonly MarkDocument[] }): JSX.Element {
  const [scale, setScale] = useParam("loss", "linear");
  const [rate, setRate] = useParam("rate", "tokens");
  const over = axis.value;
  // the time axis of a live job ends now, so that a job that has stopped leaves an empty part
  const endS = job.value?.is_recorded === true || over === "step" ? null : recentS.value;
  const across = useMemo(() => acrossOf(series, over, endS), [series, over, endS]);
  const hasMfu = series.mfu.some((value) => value !== null);
  const isMfu = hasMfu && rate === "mfu";
  const onRange = (first: number | null, last: number | null): void =>
    first === null || last === null ? setRange("") : setRangeOf(over, first, last);
  const shared = { across, marks, onRange };
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
        note={series.stride > 1 ? `range of ${countText(series.stride)} steps per point` : undefined}
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

const MARK_COLUMNS: readonly Column<MarkDocument>[] = [
  { key: "at", label: "When", sort: (row) => row.at_unix_s, render: (row) => <TimeText at={row.at_unix_s} /> },
  { key: "step", label: "Step", isNumber: true, sort: (row) => row.step, render: (row) => countText(row.step) },
  {
    key: "what",
    label: "What",
    className: "wide",
    sort: (row) => row.kind,
    render: (row) => <a href={markHref(row)}>{row.text}</a>,
  },
];

/** The marks as a table, with the same texts as the tooltips of the symbols above the charts. */
function MarkList({ marks }: { marks: readonly MarkDocument[] }): JSX.Element {
  return (
    <details class="mark-list">
      <summary>{countOf(marks.length, "mark")} as a list</summary>
      <Table
        caption="Marks on the charts"
        columns={MARK_COLUMNS}
        rows={marks}
        rowKey={(row) => `${row.kind} ${row.ref} ${row.at_unix_s} ${row.step}`}
        sortParam="marks"
        defaultSort="-at"
      />
    </details>
  );
}

export function SeriesCharts(): JSX.Element {
  const [hiddenText, setHidden] = useParam("hide", "");
  const series = useResource<SeriesDocument>("series", { ...rangeQuery(), points: POINTS }, "series");
  const found = useResource<MarksDocument>("marks", rangeQuery(), "overview");
  const marks = found.data?.marks ?? NONE;
  const shown = useMemo(() => marks.filter((mark) => !hiddenText.split(",").includes(mark.kind)), [marks, hiddenText]);
  const hidden = hiddenText === "" ? [] : hiddenText.split(",");
  return (
    <section aria-label="Training charts">
      {marks.length === 0 ? null : (
        <MarkLegend marks={marks} hidden={hidden} onChange={(next) => setHidden(next.join(","))} />
      )}
      <Loaded resource={series}>
        {(document) =>
          document.step.length > 0 ? (
            <Charts series={document} marks={shown} />
          ) : isWholeRun.value ? (
            <EmptyState title="No steps recorded yet">
              Charts appear after the first step that all ranks complete. Starting processes, building the model and loading the
              checkpoint takes a minute or two.
            </EmptyState>
          ) : (
            <EmptyState
              title="No step ended in this range"
              action={
                <button type="button" class="button small" onClick={() => setRange("")}>
                  Show the whole run
                </button>
              }
            >
              Nothing was trained in this range, or its records have expired.
            </EmptyState>
          )
        }
      </Loaded>
      {marks.length === 0 ? null : <MarkList marks={shown} />}
    </section>
  );
}
