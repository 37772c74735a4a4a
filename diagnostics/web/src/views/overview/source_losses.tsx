// The loss by source of the data: a table of all sources, and the chart of the chosen one. A run with one source has neither.

import type { JSX } from "preact";
import { useMemo } from "preact/hooks";

import { useResource } from "../../api/resource";
import type { SourceDocument, SourcesDocument, SourceSeriesDocument } from "../../api/documents";
import { job } from "../../app/job";
import { setParams, useParam } from "../../app/location";
import { axis, rangeQuery, setRange, setRangeOf } from "../../app/range";
import { Sparkline } from "../../ui/bars";
import { Chart } from "../../ui/chart";
import { acrossOf } from "../../ui/chart-scale";
import { recentS } from "../../ui/clocked";
import { countOf, countText, numberText, percentText } from "../../ui/format";
import { Section } from "../../ui/section";
import { Table, type Column } from "../../ui/table";

const lossText = (value: number): string => numberText(value, 3);
const changeText = (value: number | null): string =>
  value === null ? "\u2013" : `${value > 0 ? "+" : value < 0 ? "\u2212" : ""}${numberText(Math.abs(value), 3)}`;

const COLUMNS: readonly Column<SourceDocument>[] = [
    {
      key: "name",
      label: "Source",
      className: "wide",
      sort: (row) => row.name,
      render: (row) => (
        <button type="button" class="cell-button" title="show its chart" onClick={() => setParams({ source: row.name })}>
          {row.name}
        </button>
      ),
    },
    {
      key: "line",
      label: "Loss over the range",
      render: (row) => <Sparkline values={row.line} label={`loss of ${row.name}`} />,
    },
    {
      key: "loss",
      label: "Loss",
      isNumber: true,
      title: "Mean over the last tenth of the steps",
      sort: (row) => row.loss,
      render: (row) => (row.loss === null ? "\u2013" : lossText(row.loss)),
    },
    {
      key: "change",
      label: "Change",
      isNumber: true,
      title: "Last tenth of the steps minus first tenth",
      sort: (row) => row.change,
      render: (row) => changeText(row.change),
    },
    {
      key: "share",
      label: "Share of tokens",
      isNumber: true,
      title: "Of all tokens with a label",
      sort: (row) => row.token_share,
      render: (row) => percentText(row.token_share),
    },
    {
      key: "bad",
      label: "Steps without a finite loss",
      isNumber: true,
      sort: (row) => row.num_bad_steps,
      render: (row) =>
        row.last_bad_step === null ? "0" : `${countText(row.num_bad_steps)}, last in step ${countText(row.last_bad_step)}`,
    },
];

function SourceChart({ found, series }: { found: SourcesDocument; series: SourceSeriesDocument }): JSX.Element {
  const over = axis.value;
  const endS = job.value?.is_recorded === true || over === "step" ? null : recentS.value;
  const across = useMemo(() => acrossOf({ ...found, gaps: [] }, over, endS), [found, over, endS]);
  return (
    <Chart
      across={across}
      title={`Loss of ${series.name}`}
      note={found.stride > 1 ? `mean and highest of ${countText(found.stride)} steps per point` : undefined}
      values={series.loss}
      low={series.loss}
      high={series.loss_high}
      text={lossText}
      onRange={(first, last) => (first === null || last === null ? setRange("") : setRangeOf(over, first, last))}
    />
  );
}

export function SourceLosses(): JSX.Element | null {
  const [name] = useParam("source", "");
  const found = useResource<SourcesDocument>("sources", { ...rangeQuery(), source: name }, "series").data;
  if (found === null || found.sources.length === 0) {
    return null;
  }
  const { series, sources } = found;
  return (
    <Section
      title="Loss by source"
      note={`${countOf(sources.length, "source")}${found.is_sampled ? ", from a part of the steps" : ""}`}
    >
      {series === null ? null : <SourceChart found={found} series={series} />}
      <Table
        caption="Loss by source of the data"
        columns={COLUMNS}
        rows={sources}
        rowKey={(row) => row.name}
        sortParam="sources"
        defaultSort="-change"
        isChosen={(row) => row.name === series?.name}
      />
    </Section>
  );
}
